"""Whether a tensor holds NaN or infinity, by numpy's kernel and by the native one."""

import numpy as np
import pytest

from actors.kernels.interpret.non_finite import NON_FINITE_KERNELS
from actors.kernels.native.non_finite import NATIVE_NON_FINITE_KERNELS

((NUMPY,), (NATIVE,)) = NON_FINITE_KERNELS, NATIVE_NON_FINITE_KERNELS
KERNELS = {"numpy": NUMPY, "native": NATIVE}
SHAPES = [(5, 7), (), (130,), (0, 2), (4, 6, 8)]
CASES = [
    (path, shape, kind, dtype)
    for path, dtypes in (("numpy", ("float16", "float32", "float64")), ("native", ("f4", "f8")))
    for shape in SHAPES
    for kind in ("dense", "transposed", "sliced", "windowed", "permuted")
    for dtype in dtypes
    # Three axes that do not join are not for the native kernel.
    if path == "numpy" or len(shape) < 3 or kind == "dense"
]


def found(native_call, kernel, *inputs):
    (flag,) = native_call.call(kernel, {}, inputs, (np.array(7, np.int64),), launches=1)
    return int(flag)


@pytest.mark.parametrize(("path", "shape", "kind", "dtype"), CASES, indirect=["path"])
def test_nan_and_infinity_are_found_wherever_they_are(
    path, shape, kind, dtype, harness, native_call, pieces
):
    x = harness.strided(np.random.default_rng(1), shape, np.dtype(dtype), kind)
    flag = np.array(7, np.int64)
    launch, _, check = native_call.bind(KERNELS[path], {}, (x,), (flag,))
    for place in [None, *range(x.size)]:
        for value in (np.nan, np.inf, -np.inf):
            index = None if place is None else np.unravel_index(place, shape)
            if index is not None:
                kept, x[index] = x[index], value
            launch()
            assert flag == (index is not None)
            if index is not None:
                x[index] = kept
    check()


def test_every_kind_of_nan_is_one_and_the_outermost_numbers_are_none(path, native_call):
    kernel = KERNELS[path]
    bits = np.array([0x7FC00000, 0xFFC00001, 0x7F800001, 0xFFFFFFFF, 0x7F800000], np.uint32)
    for one in bits:
        assert found(native_call, kernel, np.array([0, one, 0], np.uint32).view(np.float32)) == 1
    for dtype in (np.float16, np.float32, np.float64)[path == "native" :]:
        info = np.finfo(dtype)
        x = np.array([info.max, -info.max, info.tiny, info.smallest_subnormal, -0.0], dtype)
        assert found(native_call, kernel, x) == 0


@pytest.mark.parametrize("earlier", [0, 1])
def test_what_was_found_earlier_stays_found(earlier, path, native_call):
    flag, kernel = np.array(earlier, np.int64), KERNELS[path]
    assert found(native_call, kernel, np.ones(3), flag) == earlier
    assert found(native_call, kernel, np.array([1.0, np.inf]), flag) == 1
    assert found(native_call, kernel, np.empty((0, 3)), flag) == earlier


def test_a_large_tensor_is_searched_to_its_end(with_threads, native_call):
    x = np.zeros((900, 701), np.float32)
    for threads in (1, 2):
        assert with_threads(threads, lambda: found(native_call, NATIVE, x)) == 0
        x[-1, -1] = np.nan
        assert with_threads(threads, lambda: found(native_call, NATIVE, x)) == 1
        x[-1, -1] = 0


def test_axes_that_do_not_join_are_left_to_numpy(native, native_call):
    x = np.zeros((4, 5, 16), np.float32)[:, ::2, ::2]
    operands = native_call.operand(x), native_call.operand(np.array(0, np.int64))
    assert NATIVE.query({}, operands[:1], operands[1:]) is None
