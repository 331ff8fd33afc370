"""Sums, means and maxima by numpy's kernels and by native ones."""

import itertools
import math

import numpy as np
import pytest

from actors.kernels.host import catalogue
from actors.kernels.native.reduce import NATIVE_REDUCE_KERNELS
from actors.kernels.reference.reduce import REDUCE_KERNELS

KERNELS = {
    "numpy": {kernel.op: kernel for kernel in REDUCE_KERNELS},
    "native": {kernel.op: kernel for kernel in NATIVE_REDUCE_KERNELS},
}
NATIVE = KERNELS["native"]
KINDS = ("dense", "transposed", "sliced", "permuted", "broadcast")
DTYPES = ("float32", "float64", "int32", "int64")
ORACLES = {"sum": np.sum, "mean": np.mean, "max": np.max}
ANY_AXES = [
    (shape, axes)
    for shape in ((3, 4, 5), (6,), ())
    for count in range(len(shape) + 1)
    for axes in itertools.combinations(range(len(shape)), count)
]
CASES = [
    *ANY_AXES,
    ((3, 17), (0,)),
    ((3, 17), (1,)),
    ((40, 3, 7), (1,)),
    ((40, 3, 7), (0, 2)),
    ((2, 5, 1, 600), (0, 1)),
    ((2, 5, 3, 4), (1, 3)),
    ((2, 5, 3, 4), (0, 1, 2, 3)),
    ((0, 3), (0,)),
    ((3, 0), (0,)),
]


def taken(path, op, attrs, x, out, native_call):
    """Return the kernel of a path that takes the call: numpy's take what native ones leave."""
    operands = native_call.operand(x), native_call.operand(out)
    native = KERNELS[path][op]
    is_taken = native.query(attrs, operands[:1], operands[1:]) is not None
    return native if is_taken else KERNELS["numpy"][op]


def reduced(native_call, path, op, x, axes, keepdims=False):
    out = np.zeros(np.sum(x, axis=axes, keepdims=keepdims).shape, x.dtype)
    attrs = {"axes": axes, "keepdims": keepdims}
    kernel = taken(path, op, attrs, x, out, native_call)
    return native_call.call(kernel, attrs, (x,), (out,))[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("op", "dtype"),
    [(op, dtype) for op in ORACLES for dtype in DTYPES if op != "mean" or "float" in dtype],
)
def test_reductions_over_any_axes_agree_with_float64(
    op, dtype, kind, path, harness, native_call, pieces
):
    rng = np.random.default_rng(1)
    for shape, axes in CASES:
        if 0 in shape and op != "sum":
            continue
        x = harness.strided(rng, shape, dtype, kind, rng.standard_normal(shape) * 100)
        want = ORACLES[op](x.astype(np.float64), axis=axes)
        size = ORACLES[op](np.abs(x.astype(np.float64)), axis=axes)
        for keepdims in (False, True):
            got = reduced(native_call, path, op, x, axes, keepdims)
            assert (np.abs(got.reshape(want.shape) - want) <= 1e-6 * size).all()


LONG = [
    ((-1,), (0,)), ((-1, 1), (0,)), ((-1, 3), (0,)), ((1, -1), (1,)), ((2, -1, 3), (1,)),
    ((-1, 3, 10), (0, 2)), ((-1, 10, 3), (0, 1)), ((700, -1), (0, 1)),
]  # fmt: skip


@pytest.mark.parametrize("layout", ["dense", "sliced", "transposed"])
@pytest.mark.parametrize(("form", "axes"), LONG)
def test_long_sums_and_means_of_float32_lose_less_than_a_millionth(
    form, axes, layout, path, harness, native_call
):
    """Of equal terms, whose errors add up, and of random ones, all of one sign."""
    counts = (10_000, 200_000, 1_000_000)[: 3 if (layout, path) == ("dense", "native") else 2]
    for count in counts:
        shape = tuple([count // -math.prod(form) if n < 0 else n for n in form])
        for terms in (np.full(shape, 0.1), np.random.default_rng(count).random(shape) + 0.5):
            x = harness.strided(None, shape, np.float32, layout, terms)
            for op in ("sum", "mean"):
                want = getattr(np, op)(x.astype(np.float64), axes)
                got = reduced(native_call, path, op, x, axes)
                np.testing.assert_allclose(got, want, rtol=1e-6)


def test_integers_are_summed_exactly_and_wrap_around_as_those_of_numpy(path, native_call, pieces):
    for dtype in ("int32", "int64"):
        for x in (np.full((50, 3), np.iinfo(dtype).max, dtype), np.arange(-70, 80, dtype=dtype)):
            rows = x.reshape(50, 3)
            want = np.add.reduce(rows, axis=0, dtype=dtype)
            got = reduced(native_call, path, "sum", rows, (0,))
            np.testing.assert_array_equal(got, want)


def test_reductions_over_nothing_give_zero_for_sums_and_are_refused_for_maxima(harness):
    x = np.zeros((3, 0), np.float32)
    attrs = {"axes": (1,), "keepdims": False}
    (y,) = harness.call("sum", attrs, (x,), (((3,), "float32"),))
    np.testing.assert_array_equal(y, 0)
    operands = harness.operand(x), harness.operand(y)
    with pytest.raises(LookupError, match=r" max\(float32\[3, 0\]\)"):
        catalogue.select_kernel("max", attrs, operands[:1], operands[1:])


def test_empty_outputs_of_maxima_are_left_alone(harness):
    x = np.zeros((0, 3), np.float32)
    harness.call("max", {"axes": (1,), "keepdims": False}, (x,), (((0,), "float32"),))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
def test_a_nan_is_the_maximum_wherever_it_stands(axes, dtype, path, native_call, pieces):
    for place in ((0, 0), (3, 20), (6, 39)):
        x = np.random.default_rng(3).standard_normal((7, 40)).astype(dtype)
        x[place] = np.nan
        np.testing.assert_array_equal(reduced(native_call, path, "max", x, axes), x.max(axes))
    x[...] = -np.inf
    np.testing.assert_array_equal(reduced(native_call, path, "max", x, axes), -np.inf)


def test_what_these_kernels_do_not_do_is_left_to_numpy(native, native_call):
    def query(op, x, out, **attrs):
        operands = native_call.operand(x), native_call.operand(out)
        return NATIVE[op].query(attrs, operands[:1], operands[1:])

    over = {"axes": (0,), "keepdims": False}
    apart = {"axes": (0, 2), "keepdims": False}
    assert query("sum", np.zeros((2, 3, 4)), np.zeros(3), **apart) is None
    assert query("sum", np.zeros((2, 3, 4))[..., ::2], np.zeros((3, 2)), **over) is None
    assert query("sum", np.zeros((2, 3, 1)), np.zeros(3), **apart) is not None
    assert query("sum", np.zeros((2, 3), np.int8), np.zeros(3, np.int8), **over) is None
    assert query("mean", np.zeros((2, 3), np.int64), np.zeros(3, np.int64), **over) is None
    assert query("max", np.zeros((0, 3)), np.zeros(3), **over) is None


@pytest.mark.parametrize("axes", [(0,), (1,)])
def test_sums_have_the_same_bits_with_one_thread_and_with_two(axes, with_threads, native_call):
    x = np.random.default_rng(5).standard_normal((30, 900, 70), dtype=np.float32)
    alone = with_threads(1, lambda: reduced(native_call, "native", "sum", x, axes))
    for _ in range(5):
        both = with_threads(2, lambda: reduced(native_call, "native", "sum", x, axes))
        np.testing.assert_array_equal(both, alone)
