import itertools

import numpy as np
import pytest

KINDS = ("dense", "transposed", "sliced", "permuted", "broadcast")


def all_axes(rank):
    return [c for n in range(rank + 1) for c in itertools.combinations(range(rank), n)]


def reduced_shape(shape, axes, keepdims):
    if keepdims:
        return tuple(1 if i in axes else n for i, n in enumerate(shape))
    return tuple(n for i, n in enumerate(shape) if i not in axes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_reductions_over_any_axes_agree_with_float64(op, kind, harness):
    rng = np.random.default_rng(1)
    for shape, keepdims in itertools.product([(3, 4, 5), (6,), ()], [False, True]):
        for axes, dtype in itertools.product(all_axes(len(shape)), ["float32", "float64"]):
            x = harness.strided(rng, shape, dtype, kind)
            attrs = {"axes": axes, "keepdims": keepdims}
            out = ((reduced_shape(shape, axes, keepdims), dtype),)
            (y,) = harness.call(op, attrs, (x,), out)
            wide = x.astype(np.float64)
            expected = getattr(np, op)(wide, axis=axes, keepdims=keepdims) if axes else wide
            np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(70, 33), (3, 5000), (5000, 3), (2, 3, 130)])
def test_sums_along_rows_and_columns_of_a_matrix_keep_float32_accuracy(shape, harness):
    x = (np.random.default_rng(2).standard_normal(shape) + 3).astype(np.float32)
    for axes in ((0,), (len(shape) - 1,), tuple(range(len(shape)))):
        out = reduced_shape(shape, axes, False)
        (y,) = harness.call("sum", {"axes": axes, "keepdims": False}, (x,), ((out, "float32"),))
        np.testing.assert_allclose(y, x.astype(np.float64).sum(axes), rtol=2e-6)


def test_integer_sums_are_exact(harness):
    x = np.arange(-50, 70, dtype=np.int64).reshape(4, 30) * 10**15
    (y,) = harness.call("sum", {"axes": (1,), "keepdims": False}, (x,), (((4,), "int64"),))
    np.testing.assert_array_equal(y, x.sum(1))


def test_reductions_over_nothing_give_zero_for_sums_and_are_refused_for_maxima(harness):
    x = np.zeros((3, 0), np.float32)
    attrs = {"axes": (1,), "keepdims": False}
    (y,) = harness.call("sum", attrs, (x,), (((3,), "float32"),))
    np.testing.assert_array_equal(y, 0)
    with pytest.raises(LookupError, match=r"max\(float32\[3, 0\]\)"):
        harness.call("max", attrs, (x,), (((3,), "float32"),))
    with pytest.raises(LookupError, match=r"argmax\(float32\[3, 0\]\)"):
        harness.call("argmax", {"axis": 1, "keepdims": False}, (x,), (((3,), "int64"),))


def test_empty_outputs_of_maxima_are_left_alone(harness):
    x = np.zeros((0, 3), np.float32)
    harness.call("max", {"axes": (1,), "keepdims": False}, (x,), (((0,), "float32"),))
    harness.call("argmax", {"axis": 1, "keepdims": False}, (x,), (((0,), "int64"),))


@pytest.mark.parametrize("kind", KINDS)
def test_argmax_is_the_first_of_ties_along_any_axis(kind, harness, pieces):
    rng = np.random.default_rng(3)
    for shape, dtype in itertools.product([(3, 4, 5), (40, 3), (9,)], ["float32", "int32"]):
        x = harness.strided(rng, shape, dtype, kind, rng.integers(0, 3, shape))
        for axis, keepdims in itertools.product(range(len(shape)), [False, True]):
            out = (reduced_shape(shape, (axis,), keepdims), "int64")
            (y,) = harness.call("argmax", {"axis": axis, "keepdims": keepdims}, (x,), (out,))
            best = x.max(axis=axis, keepdims=True)
            places = np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(x.ndim)])
            first = np.where(x == best, places, shape[axis]).min(axis=axis, keepdims=keepdims)
            np.testing.assert_array_equal(y, first)


def test_nan_wins_a_maximum(harness):
    x = np.array([[1, np.nan, 2], [3, 4, 5]], np.float32)
    (y,) = harness.call("max", {"axes": (1,), "keepdims": False}, (x,), (((2,), "float32"),))
    assert np.isnan(y[0])
    assert y[1] == 5
