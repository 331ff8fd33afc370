import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


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
