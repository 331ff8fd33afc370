import numpy as np
import pytest

from actors.kernels.native.reduce import NATIVE_REDUCE_KERNELS

KERNELS = {kernel.op: kernel for kernel in NATIVE_REDUCE_KERNELS}
KINDS = ("dense", "transposed", "sliced", "permuted", "broadcast")
DTYPES = ("float32", "float64", "int32", "int64")
CASES = [
    ((3, 17), (0,)),
    ((3, 17), (1,)),
    ((3, 17), (0, 1)),
    ((40, 3, 7), (1,)),
    ((40, 3, 7), (0, 2)),
    ((2, 5, 1, 600), (0, 1)),
    ((2, 5, 3, 4), (1, 3)),
    ((2, 5, 3, 4), (0, 1, 2, 3)),
    ((4, 5), ()),
    ((), ()),
    ((0, 3), (0,)),
    ((3, 0), (0,)),
]
ORACLES = {"sum": np.sum, "mean": np.mean, "max": np.max}


def reduced(native_call, op, x, axes, keepdims=False):
    out = np.zeros(np.sum(x, axis=axes, keepdims=keepdims).shape, x.dtype)
    attrs = {"axes": axes, "keepdims": keepdims}
    return native_call.call(KERNELS[op], attrs, (x,), (out,))[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("op", "dtype"),
    [(op, dtype) for op in ORACLES for dtype in DTYPES if op != "mean" or "float" in dtype],
)
def test_reductions_over_any_axes_agree_with_float64(
    op, dtype, kind, native, harness, native_call, pieces
):
    rng = np.random.default_rng(1)
    for shape, axes in CASES:
        if 0 in shape and op != "sum":
            continue
        x = harness.strided(rng, shape, dtype, kind, rng.standard_normal(shape) * 100)
        want = ORACLES[op](x.astype(np.float64), axis=axes)
        size = ORACLES[op](np.abs(x.astype(np.float64)), axis=axes)
        for keepdims in (False, True):
            got = reduced(native_call, op, x, axes, keepdims)
            assert (np.abs(got.reshape(want.shape) - want) <= 1e-6 * size).all()


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
def test_a_long_sum_of_float32_loses_little(axes, native, native_call):
    x = np.random.default_rng(2).random((700, 900), dtype=np.float32)
    want = x.astype(np.float64).sum(axes)
    got = reduced(native_call, "sum", x, axes)
    np.testing.assert_allclose(got, want, rtol=2e-6)


def test_integers_wrap_around_as_those_of_numpy(native, native_call, pieces):
    for dtype in ("int32", "int64"):
        x = np.full((50, 3), np.iinfo(dtype).max, dtype)
        want = np.add.reduce(x, axis=0, dtype=dtype)
        np.testing.assert_array_equal(reduced(native_call, "sum", x, (0,)), want)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
def test_a_nan_is_the_maximum_wherever_it_stands(axes, dtype, native, native_call, pieces):
    for place in ((0, 0), (3, 20), (6, 39)):
        x = np.random.default_rng(3).standard_normal((7, 40)).astype(dtype)
        x[place] = np.nan
        np.testing.assert_array_equal(reduced(native_call, "max", x, axes), x.max(axes))
    x[...] = -np.inf
    np.testing.assert_array_equal(reduced(native_call, "max", x, axes), -np.inf)


def test_what_these_kernels_do_not_do_is_left_to_numpy(native, native_call):
    def query(op, x, out, **attrs):
        operands = native_call.operand(x), native_call.operand(out)
        return KERNELS[op].query(attrs, operands[:1], operands[1:])

    over = {"axes": (0,), "keepdims": False}
    assert query("sum", np.zeros((2, 3), np.int8), np.zeros(3, np.int8), **over) is None
    assert query("mean", np.zeros((2, 3), np.int64), np.zeros(3, np.int64), **over) is None
    assert query("max", np.zeros((0, 3)), np.zeros(3), **over) is None
    first = {"axis": 0, "keepdims": False}
    assert query("argmax", np.zeros((2, 3), np.int8), np.zeros(3, np.int64), **first) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_is_the_first_largest_element(dtype, kind, native, harness, native_call, pieces):
    rng = np.random.default_rng(4)
    for shape in ((7,), (5, 30), (4, 3, 10)):
        x = harness.strided(rng, shape, dtype, kind, rng.integers(0, 6, shape))
        for axis in range(len(shape)):
            out = np.zeros(np.argmax(x, axis).shape, np.int64)
            attrs = {"axis": axis, "keepdims": False}
            (got,) = native_call.call(KERNELS["argmax"], attrs, (x,), (out,))
            np.testing.assert_array_equal(got, np.argmax(x, axis))


def test_argmax_is_the_first_nan(native, native_call):
    x = np.array([[1, np.nan, 3, np.nan], [np.nan, 9, 9, 1], [-np.inf, -np.inf, 0, 0]])
    attrs = {"axis": 1, "keepdims": False}
    (got,) = native_call.call(KERNELS["argmax"], attrs, (x,), (np.zeros(3, np.int64),))
    np.testing.assert_array_equal(got, [1, 0, 2])


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
def test_sums_have_the_same_bits_with_one_thread_and_with_two(axes, with_threads, native_call):
    x = np.random.default_rng(5).standard_normal((900, 700), dtype=np.float32)
    alone = with_threads(1, lambda: reduced(native_call, "sum", x, axes))
    for _ in range(5):
        both = with_threads(2, lambda: reduced(native_call, "sum", x, axes))
        np.testing.assert_array_equal(both, alone)
