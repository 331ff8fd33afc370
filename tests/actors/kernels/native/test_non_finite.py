import numpy as np
import pytest

from actors.kernels.native.non_finite import NATIVE_NON_FINITE_KERNELS

(KERNEL,) = NATIVE_NON_FINITE_KERNELS
LAYOUTS = [
    (shape, kind)
    for shape in [(5, 7), (), (130,), (0, 2), (4, 6, 8)]
    for kind in ("dense", "transposed", "sliced", "windowed")
    if len(shape) < 3 or kind == "dense"  # others may have three axes that do not join
]


def found(native_call, *inputs):
    (flag,) = native_call.call(KERNEL, {}, inputs, (np.array(7, np.int64),), launches=1)
    return int(flag)


@pytest.mark.parametrize(("shape", "kind"), LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nan_and_infinity_are_found_wherever_they_are(
    dtype, shape, kind, native, harness, native_call, chunk_bytes
):
    x = harness.strided(np.random.default_rng(1), shape, np.dtype(dtype), kind)
    assert found(native_call, x) == 0
    for place in range(x.size):
        index = np.unravel_index(place, shape)
        kept = x[index]
        x[index] = (np.nan, np.inf, -np.inf)[place % 3]
        assert found(native_call, x) == 1
        x[index] = kept


def test_every_kind_of_nan_is_one_and_the_outermost_numbers_are_none(native, native_call):
    bits = np.array([0x7FC00000, 0xFFC00001, 0x7F800001, 0xFFFFFFFF, 0x7F800000], np.uint32)
    for one in bits:
        assert found(native_call, np.array([0, one, 0], np.uint32).view(np.float32)) == 1
    for dtype in (np.float32, np.float64):
        info = np.finfo(dtype)
        x = np.array([info.max, -info.max, info.tiny, info.smallest_subnormal, -0.0], dtype)
        assert found(native_call, x) == 0


@pytest.mark.parametrize("earlier", [0, 1])
def test_what_was_found_earlier_stays_found(earlier, native, native_call):
    flag = np.array(earlier, np.int64)
    assert found(native_call, np.ones(3), flag) == earlier
    assert found(native_call, np.array([1.0, np.inf]), flag) == 1
    assert found(native_call, np.empty((0, 3)), flag) == earlier


def test_a_large_tensor_is_searched_to_its_end(with_threads, native_call):
    x = np.zeros((900, 701), np.float32)
    for threads in (1, 2):
        assert with_threads(threads, lambda: found(native_call, x)) == 0
        x[-1, -1] = np.nan
        assert with_threads(threads, lambda: found(native_call, x)) == 1
        x[-1, -1] = 0


def test_axes_that_do_not_join_are_left_to_numpy(native, native_call):
    x = np.zeros((4, 5, 16), np.float32)[:, ::2, ::2]
    operands = native_call.operand(x), native_call.operand(np.array(0, np.int64))
    assert KERNEL.query({}, operands[:1], operands[1:]) is None
