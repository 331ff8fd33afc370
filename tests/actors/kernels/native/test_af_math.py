"""The functions of af_math.h and angles.h against float64, over float32's whole range."""

from __future__ import annotations

import math

import numpy as np
import pytest

from actors.kernels.common.host_memory import address
from actors.kernels.library import runtime
from actors.kernels.library.launch import native_launch
from actors.kernels.library.runtime import CFunction
from compiler.contract.types import from_bits, to_bits

ERRORS = {
    "af_expf": 1.1,
    "af_logf": 1.0,
    "af_tanhf": 2.6,
    "af_erff": 2.5,
    "af_sinf": 1.0,
    "af_cosf": 1.0,
}
"""The tables of the headers: units in the last place of the float32 result."""

REFERENCE = {
    "af_expf": np.exp,
    "af_logf": np.log,
    "af_tanhf": np.tanh,
    "af_erff": np.vectorize(math.erf, otypes=[np.float64]),
    "af_sinf": np.sin,
    "af_cosf": np.cos,
}
STEP = {"af_erff": 104_729}
"""Every how many bit patterns are tried; erf's reference is slow."""

TEXT = """AF_EXPORT int32_t NAME(void *arguments) {
    const af_word *a = arguments;
    const IN *x = a[0].p;
    OUT *y = a[1].p;
#pragma omp simd
    for (int64_t j = 0; j < a[2].i; j++) y[j] = FUNCTION(x[j]);
    return 0;
}"""


def function(name, taken="float", given="float"):
    text = TEXT.replace("FUNCTION", name)
    text = text.replace("IN *", f"{taken} *").replace("OUT *", f"{given} *")
    return CFunction(f"test_{name}", text.replace("NAME", f"test_{name}"), name)


FUNCTIONS = {
    **{name: function(name) for name in ERRORS},
    "af_to_bf16": function("af_to_bf16", "float", "uint16_t"),
    "af_from_bf16": function("af_from_bf16", "uint16_t", "float"),
}


@pytest.fixture
def apply(native):
    """Apply one of FUNCTIONS to an array."""
    runtime.prepare(FUNCTIONS.values())

    def run(name, x):
        y = np.empty(x.shape, np.uint16 if name == "af_to_bf16" else np.float32)
        words = (address(x), address(y), x.size)
        native_launch(runtime.address_of(FUNCTIONS[name]), words, (x, y))()
        return y

    return run


def in_last_places(y, reference):
    """Return |y - reference| in units of the last place of the float32 nearest to it."""
    exponent = np.frexp(np.abs(reference))[1] - 1
    return np.abs(y - reference) / np.ldexp(1.0, np.maximum(exponent, -126) - 23)


@pytest.mark.parametrize("name", ERRORS)
def test_the_error_is_at_most_what_the_header_says(apply, name):
    patterns = np.arange(0, 2**32, STEP.get(name, 2_003), dtype=np.uint64).astype(np.uint32)
    near = np.linspace(-20, 20, 100_001 if name == "af_erff" else 1_000_001, dtype=np.float32)
    x = np.concatenate([patterns.view(np.float32), near, near / 16])
    y = apply(name, x)
    with np.errstate(all="ignore"):
        wide = REFERENCE[name](x.astype(np.float64))
        nearest = wide.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(nearest))
    is_number = np.isfinite(nearest) & np.isfinite(y)
    assert is_number.sum() > 100_000
    assert in_last_places(y[is_number].astype(np.float64), wide[is_number]).max() <= ERRORS[name]
    is_infinite = np.isinf(nearest) | np.isinf(y)
    np.testing.assert_array_equal(y[is_infinite], nearest[is_infinite])
    is_zero = (nearest == 0) & (wide == 0)
    np.testing.assert_array_equal(np.signbit(y[is_zero]), np.signbit(nearest[is_zero]))


@pytest.mark.parametrize("name", ERRORS)
def test_special_values_are_exact(apply, name):
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4e38, -3.4e38], np.float32)
    with np.errstate(all="ignore"):
        expected = REFERENCE[name](x.astype(np.float64)).astype(np.float32)
    y = apply(name, x)
    np.testing.assert_allclose(y, expected, rtol=2e-7, atol=0)
    known = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(y[known]), np.signbit(expected[known]))


def test_the_exponential_underflows_step_by_step_and_overflows_at_the_largest_float(apply):
    x = np.array([-87.5, -95, -103.2, -103.9, -104.5, 88.72, 88.73], np.float32)
    y = apply("af_expf", x)
    assert (y[:3] > 0).all()
    assert y[2] < 1e-44
    np.testing.assert_array_equal(y[3:5], [np.float32(1e-45), 0])
    assert np.isfinite(y[5])
    assert np.isinf(y[6])


def test_bfloat16_is_rounded_to_the_nearest_and_to_even(apply, groups):
    patterns = np.arange(0, 2**32, 40_009, dtype=np.uint64).astype(np.uint32)
    ties = (np.arange(2**16, dtype=np.uint32) << 16) | 0x8000
    x = np.concatenate([patterns, ties]).view(np.float32)
    got = apply("af_to_bf16", x)
    is_number = ~np.isnan(x)
    np.testing.assert_array_equal(got[is_number], to_bits(x)[is_number])
    assert np.isnan(from_bits(got[~is_number])).all()


def test_bfloat16_is_read_without_a_change(apply, groups):
    bits = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    got = apply("af_from_bf16", bits)
    np.testing.assert_array_equal(got.view(np.uint32), from_bits(bits).view(np.uint32))


def test_the_generator_makes_the_bits_of_numpys(native):
    text = """AF_EXPORT int32_t NAME(void *arguments) {
    const af_word *a = arguments;
    af_philox(a[0].p, (uint64_t)a[1].i, a[2].i, (uint64_t)a[3].i, 5u, 2u);
    return 0;
}""".replace("NAME", "test_af_philox")
    count, step = 16, -3
    words = np.zeros(4 * count, np.uint64)
    address_of = runtime.address_of(CFunction("test_af_philox", text, "philox"))
    native_launch(address_of, (address(words), 7, count, step), (words,))()
    counter = np.array([6, 0, step % 2**64, 0], np.uint64)
    generator = np.random.Philox(counter=counter, key=np.array([5, 2], np.uint64))
    np.testing.assert_array_equal(words, generator.random_raw(4 * count))
