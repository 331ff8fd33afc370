"""erf and erfc of arrays against the C library's, number by number."""

import math

import numpy as np
import pytest

from compiler.contract.program import erf, erfc

FUNCTIONS = {"erf": (erf, math.erf, 2), "erfc": (erfc, math.erfc, 8)}
"""Each with the units in the last place that it may be off; the library's own 2 are in them."""


def arguments(dtype):
    """Return numbers of all magnitudes, and many where one formula gives way to the next."""
    rng = np.random.default_rng(0)
    exponents = rng.uniform(np.log10(np.finfo(dtype).tiny) - 5, 2, 3_000)
    near = np.concatenate([np.linspace(c - 1e-3, c + 1e-3, 400) for c in (0.5, 1, 4, 6)])
    x = np.concatenate([np.linspace(-28, 28, 8_001), near, 10.0**exponents])
    return np.concatenate([x, -x]).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_result_is_a_few_units_off_at_most(name, dtype):
    ours, exact, units = FUNCTIONS[name]
    x = arguments(dtype)
    wanted = np.array([exact(float(number)) for number in x])
    got = ours(x)
    assert got.dtype == dtype
    place = np.spacing(np.maximum(np.abs(wanted).astype(dtype), np.finfo(dtype).tiny))
    assert (np.abs(got.astype(np.float64) - wanted) / place).max() <= units


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_ends_zeros_and_nan_are_exact(dtype):
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], dtype)
    np.testing.assert_array_equal(erf(x), np.array([0, 0, 1, -1, np.nan], dtype))
    np.testing.assert_array_equal(np.signbit(erf(x)[:2]), [False, True])
    np.testing.assert_array_equal(erfc(x), np.array([1, 1, 0, 2, np.nan], dtype))


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 1, 5), (2, 9_000)])
def test_shape_and_strides_change_no_number(shape):
    x = np.random.default_rng(1).standard_normal((*shape, 2))[..., 0]
    for function in (erf, erfc):
        got = function(x)
        assert got.shape == shape
        for place in [tuple(i) for i in np.argwhere(np.ones(shape))[::997]]:
            assert got[place] == function(x[place].reshape(1))[0]
