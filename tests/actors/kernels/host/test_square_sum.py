"""The sum of squares of a tensor, by programs that numpy follows and that are C."""

import math

import numpy as np
import pytest


def summed(harness, *inputs):
    (total,) = harness.run("square_sum", {}, inputs, (np.array(7.0),))
    return float(total)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(5, 7), (), (130,), (4, 6, 8), (1, 1)])
def test_squares_are_added_to_what_was_summed_before(shape, dtype, path, harness):
    x = np.asarray(np.random.default_rng(2).standard_normal(shape), dtype)
    expected = math.fsum([float(v) ** 2 for v in x.reshape(-1)])
    assert summed(harness, x) == pytest.approx(expected, rel=1e-14)
    assert summed(harness, x, np.array(0.75)) == pytest.approx(0.75 + expected, rel=1e-14)


@pytest.mark.parametrize(
    ("x", "expected"),
    [([3e38, 0], 9e76), ([1e-30, 0], 1e-60), ([np.inf, 1], np.inf), ([np.nan, np.inf], np.nan)],
)
def test_no_number_of_float32_overflows(x, expected, path, harness):
    found = summed(harness, np.array(x, np.float32))
    assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_the_bits_are_the_same_with_any_number_of_threads(with_threads, harness):
    x = np.random.default_rng(3).standard_normal((900, 701)).astype(np.float32)
    one, two = (with_threads(count, lambda: summed(harness, x)) for count in (1, 2))
    assert one == two
    assert one == pytest.approx(np.sum(np.square(x, dtype=np.float64)), rel=1e-12)
