import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

KINDS = ("dense", "transposed", "sliced", "windowed", "permuted", "broadcast")


def elements(x):
    return [x[index] for index in np.ndindex(x.shape)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["copy", "stop_gradient"])
def test_copies_keep_every_element_of_any_layout_and_type(op, kind, harness):
    rng = np.random.default_rng(1)
    for shape, dtype in (((2, 3, 4), "float32"), ((5,), "int64"), ((), "bool"), ((0, 2), "int8")):
        x = harness.strided(rng, shape, dtype, kind)
        (y,) = harness.call(op, {}, (x,), ((shape, dtype),))
        np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("kind", KINDS)
def test_reshape_keeps_row_major_order_into_dense_and_strided_outputs(kind, harness):
    rng = np.random.default_rng(2)
    for shape, target in (((2, 3, 4), (6, 4)), ((2, 3, 4), (4, 6)), ((1,), ()), ((), (1, 1))):
        x = harness.strided(rng, shape, "float32", kind)
        attrs = {"shape": target}
        (y,) = harness.call("reshape", attrs, (x,), ((target, "float32"),))
        np.testing.assert_array_equal(y.ravel(), elements(x))
        if len(target) == 2:
            out = np.zeros(target[::-1], np.float32).T
            harness.run("reshape", attrs, (x,), (out,))
            np.testing.assert_array_equal(elements(out), elements(x))


def test_transpose_puts_axis_perm_i_at_place_i(harness):
    x = np.random.default_rng(3).standard_normal((2, 3, 4))
    (y,) = harness.call("transpose", {"perm": (2, 0, 1)}, (x,), (((4, 2, 3), "float64"),))
    for i, j, k in np.ndindex(2, 3, 4):
        assert y[k, i, j] == x[i, j, k]


def test_broadcast_repeats_new_and_unit_axes(harness):
    x = np.array([[1.0], [2.0]])
    (y,) = harness.call("broadcast_to", {"shape": (3, 2, 2)}, (x,), (((3, 2, 2), "float64"),))
    np.testing.assert_array_equal(y, [[[1, 1], [2, 2]]] * 3)


@st.composite
def slices(draw):
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=0, max_size=3)))
    starts = tuple(draw(st.integers(0, n)) for n in shape)
    stops = tuple(draw(st.integers(start, n)) for start, n in zip(starts, shape, strict=True))
    return shape, starts, stops, tuple(draw(st.integers(1, 3)) for _ in shape)


@settings(max_examples=60, deadline=None)
@given(case=slices())
def test_slice_takes_every_step_and_pad_is_its_adjoint(harness, case):
    shape, starts, stops, steps = case
    x = np.random.default_rng(4).standard_normal(shape)
    ranges = [range(*bound) for bound in zip(starts, stops, steps, strict=True)]
    size = tuple(map(len, ranges))
    attrs = {"starts": starts, "stops": stops, "steps": steps}
    (y,) = harness.call("slice", attrs, (x,), ((size, "float64"),))
    for index in np.ndindex(size):
        assert y[index] == x[tuple(r[i] for r, i in zip(ranges, index, strict=True))]
    # <slice(x), y> = <x, pad(y)> for the padding that undoes the slice.
    spans = [(n - 1) * step + 1 if n else 0 for n, step in zip(size, steps, strict=True)]
    high = tuple(full - low - span for full, low, span in zip(shape, starts, spans, strict=True))
    attrs = {"low": starts, "high": high, "steps": steps}
    (z,) = harness.call("pad", attrs, (y,), ((shape, "float64"),))
    assert (x * z).sum() == pytest.approx((y * y).sum())
    assert np.count_nonzero(z) == np.count_nonzero(y)


def test_pad_without_padding_is_a_copy(harness):
    x = np.arange(6.0).reshape(2, 3)
    attrs = {"low": (0, 0), "high": (0, 0), "steps": (1, 1)}
    (y,) = harness.call("pad", attrs, (x,), (((2, 3), "float64"),))
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_concat_places_inputs_one_after_the_other(axis, harness):
    rng = np.random.default_rng(5)
    parts = []
    for extent, kind in ((2, "dense"), (0, "dense"), (3, "transposed"), (1, "sliced")):
        shape = [2, 3, 4]
        shape[axis] = extent
        parts.append(harness.strided(rng, tuple(shape), "float32", kind))
    shape = [2, 3, 4]
    shape[axis] = 6
    (y,) = harness.call("concat", {"axis": axis}, tuple(parts), ((tuple(shape), "float32"),))
    moved = np.moveaxis(y, axis, 0)
    np.testing.assert_array_equal(moved[:2], np.moveaxis(parts[0], axis, 0))
    np.testing.assert_array_equal(moved[2:5], np.moveaxis(parts[2], axis, 0))
    np.testing.assert_array_equal(moved[5:], np.moveaxis(parts[3], axis, 0))
