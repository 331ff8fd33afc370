"""bfloat16 at compile time, against roundings by search and by exact fractions."""

from fractions import Fraction

import numpy as np
import pytest
from error_texts import raises

from compiler.contract.attrs import Attrs
from compiler.contract.errors import CompileError
from compiler.contract.types import (
    DType,
    TensorType,
    decoded,
    encoded,
    from_bits,
    numpy_dtype,
    rounded,
    to_bits,
)
from compiler.graph.graph import GraphBuilder, Output
from compiler.graph.registry import reference
from compiler.ops.families.arithmetic import ADD, MUL
from compiler.ops.families.attention import ATTENTION, ATTENTION_GRAD
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.shape import BROADCAST_TO, CAST, cast_to
from compiler.ops.primitives.sources import (
    CONSTANT,
    INPUT,
    constant_array,
    is_scalar_constant,
    scalar,
)
from compiler.passes import simplify

EVERY = np.arange(1 << 16, dtype=np.uint16)
IS_NAN = (EVERY & 0x7F80 == 0x7F80) & (EVERY & 0x7F != 0)
LOW = DType.BFLOAT16


def value_of(bits):
    """Return what 16 bits mean, from the definition; an infinity is the next power of two."""
    sign = -1 if bits >> 15 else 1
    exponent, fraction = bits >> 7 & 0xFF, bits & 0x7F
    if exponent == 0:
        return sign * Fraction(fraction, 1 << 7) * Fraction(2) ** -126
    return sign * (1 + Fraction(fraction, 1 << 7)) * Fraction(2) ** (exponent - 127)


def test_all_bits_mean_what_the_format_says():
    values = from_bits(EVERY)
    assert values.dtype == np.float32
    finite = EVERY & 0x7F80 != 0x7F80
    sample = [*EVERY[finite][::97].tolist(), 0, 1, 0x8000, 0x7F, 0x80, 0x7F7F]
    assert all(Fraction(float(values[bits])) == value_of(bits) for bits in sample)
    assert np.isposinf(values[0x7F80])
    assert np.isneginf(values[0xFF80])
    assert np.isnan(values[IS_NAN]).all()
    assert np.isfinite(values[finite]).all()


def test_every_value_goes_up_and_comes_down_unchanged():
    back = to_bits(from_bits(EVERY))
    np.testing.assert_array_equal(back[~IS_NAN], EVERY[~IS_NAN])
    np.testing.assert_array_equal(back[IS_NAN], EVERY[IS_NAN] | 0x40)


def nearest(number):
    """Return the bits of the nearest value, ties to even, by exact comparison with neighbours."""
    exact = abs(Fraction(float(number)))
    sign = 0x8000 if np.signbit(number) else 0
    low, high = 0, 0x7F80
    while high - low > 1:  # the values of 0..0x7F80 ascend
        middle = (low + high) // 2
        low, high = (middle, high) if value_of(middle) <= exact else (low, middle)
    below, above = exact - value_of(low), value_of(high) - exact
    is_up = above < below or (above == below and low % 2 == 1)
    return sign | (high if is_up else low)


def test_numbers_go_down_to_the_nearest_with_ties_to_even():
    rng = np.random.default_rng(0)
    anything = rng.integers(0, 1 << 32, 800, dtype=np.uint64).astype(np.uint32)
    ties = (rng.integers(0, 0x7F80, 200).astype(np.uint32) << 16) | 0x8000
    edges = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0x7F7F7FFF, 0x7F7F8000, 0x807FFFFF], np.uint32)
    numbers = np.concatenate([anything, ties, ties | 1, ties - 1, edges]).view(np.float32)
    numbers = numbers[np.isfinite(numbers)]
    found = to_bits(numbers)
    assert [hex(b) for b in found.tolist()] == [hex(nearest(n)) for n in numbers]


def test_infinities_stay_and_no_nan_becomes_infinite():
    special = np.array([0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF], np.uint32)
    down = to_bits(special.view(np.float32))
    assert [hex(b) for b in down.tolist()] == ["0x7f80", "0xff80", "0x7fc0", "0xffff", "0x7fff"]
    assert to_bits(np.array(np.nan)).shape == ()


def test_a_value_is_encoded_as_its_dtype_has_it():
    numbers = np.array([1.0, -2.5, 0.1])
    assert encoded(numbers, LOW) == bytes.fromhex("803f20c0cd3d")
    np.testing.assert_array_equal(decoded(encoded(numbers, LOW), LOW), rounded(numbers))
    assert encoded(numbers, DType.FLOAT32) == numbers.astype(np.float32).tobytes()
    assert LOW.itemsize == 2
    assert LOW.is_float
    assert not LOW.is_integer
    assert numpy_dtype(LOW) == np.uint16
    assert TensorType(LOW, (3, 5)).size_bytes == 30


def test_constants_hold_two_bytes_an_element_and_read_as_float32():
    b = GraphBuilder()
    third = scalar(b, 1 / 3, LOW)
    node = b.producer_of(third)
    assert b.type_of(third) == TensorType(LOW, ())
    assert node.attrs["data"] == bytes.fromhex("ab3e")
    assert constant_array(node) == rounded(np.array(1 / 3))
    assert reference.get(CONSTANT)(node.attrs)[0] == constant_array(node)
    assert is_scalar_constant(b, scalar(b, 1.0, LOW), 1.0)
    assert not is_scalar_constant(b, scalar(b, -0.0, LOW), 0.0)


def values(b, shape, dtype):
    return b.emit_one(INPUT, name=f"x{len(b.nodes)}", dtype=dtype, shape=shape)


def simplified(b, value):
    b.outputs = [Output("y", value)]
    return simplify.simplify_graph(b.freeze())


def test_folding_rounds_what_becomes_bfloat16():
    b = GraphBuilder()
    x, y = scalar(b, 1 / 3, LOW), scalar(b, 3.0, LOW)
    graph = simplified(b, b.emit_one(ADD, b.emit_one(MUL, x, y), scalar(b, 2.0**-9, LOW)))
    (node,) = graph.nodes
    product = rounded(rounded(np.array(1 / 3)) * np.float32(3))
    assert constant_array(node) == rounded(product + np.float32(2.0**-9))
    assert graph.types[0] == TensorType(LOW, ())
    b = GraphBuilder()
    graph = simplified(b, cast_to(b, scalar(b, 0.1, DType.FLOAT32), LOW))
    assert [n.op for n in graph.nodes] == [CONSTANT]
    assert graph.nodes[0].attrs["data"] == encoded(np.float32(0.1), LOW)


@pytest.mark.parametrize(
    ("dtypes", "left"),
    [
        (("float32", "bfloat16", "float32"), 2),
        (("float16", "bfloat16", "float64"), 2),
        (("bfloat16", "float16", "float32"), 2),
        (("bfloat16", "float32", "bfloat16"), 0),
        (("bfloat16", "float32", "float64"), 1),
        (("bfloat16", "float64", "float16"), 1),
    ],
)
def test_a_pair_of_casts_becomes_one_only_where_the_middle_loses_nothing(dtypes, left):
    b = GraphBuilder()
    x = values(b, (4,), dtypes[0])
    x = b.emit_one(CAST, b.emit_one(CAST, x, dtype=dtypes[1]), dtype=dtypes[2])
    graph = simplified(b, x)
    assert len([n for n in graph.nodes if n.op is CAST]) == left


def test_a_cast_reference_gives_the_rounded_number_as_float32():
    numbers = np.linspace(-3, 3, 50)
    (down,) = reference.get(CAST)(Attrs({"dtype": "bfloat16"}), numbers)
    np.testing.assert_array_equal(down, rounded(numbers))
    assert down.dtype == np.float32


def test_a_product_of_bfloat16_may_keep_its_float32_sums():
    b = GraphBuilder()
    x, w = values(b, (3, 4), "bfloat16"), values(b, (4, 5), "bfloat16")
    assert b.type_of(b.emit_one(MATMUL, x, w)) == TensorType(LOW, (3, 5))
    kept = b.emit_one(MATMUL, x, w, out_dtype="float32")
    assert b.type_of(kept) == TensorType(DType.FLOAT32, (3, 5))
    assert b.type_of(b.emit_one(MATMUL, x, w, out_dtype="bfloat16")).dtype is LOW


@pytest.mark.parametrize(("dtype", "wanted"), [("float32", "bfloat16"), ("bfloat16", "float64")])
def test_a_product_makes_no_other_type_of_its_operands(dtype, wanted):
    b = GraphBuilder()
    x = values(b, (4, 4), dtype)
    with raises(CompileError):
        b.emit_one(MATMUL, x, x, out_dtype=wanted)


def test_attention_keeps_its_statistics_in_float32():
    b = GraphBuilder()
    q = values(b, (2, 3, 4), "bfloat16")
    attrs = {"scale": 1.0, "causal": True}
    y, lse, tail = b.emit(ATTENTION, (q, q, q), attrs)
    assert (b.type_of(y).dtype, b.type_of(lse).dtype) == (LOW, DType.FLOAT32)
    grads = b.emit(ATTENTION_GRAD, (y, q, q, q, y, lse, tail), attrs)
    assert {b.type_of(g).dtype for g in grads} == {LOW}
    low = b.emit_one(BROADCAST_TO, scalar(b, 0.0, LOW), shape=(2, 3))
    with raises(CompileError):
        b.emit(ATTENTION_GRAD, (y, q, q, q, y, low, tail), attrs)
