"""Which numbers of a program are words of its block, and how they lie there."""

from __future__ import annotations

import struct

import pytest
from fused_programs import Builder, cross_entropy, dropout, repeated

from actors.kernels.native.emit import emit
from actors.kernels.program.numbers import number_words, numbers_of
from compiler.contract.types import DType

SIGNED = struct.Struct("<q")


def scaled(number, op="mul", dtype=DType.FLOAT32):
    b = Builder()
    x = b.input(dtype=dtype)
    return b.program(b.op(op, x, b.constant(number, dtype)))


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div"])
def test_programs_that_differ_in_what_arithmetic_reads_have_one_text(op):
    one, other = scaled(1 / 37, op), scaled(1 / 64, op)
    assert emit(one).text == emit(other).text
    assert number_words(one) != number_words(other)


@pytest.mark.parametrize("op", ["max", "min", "pow", "mod"])
def test_what_the_compiler_makes_something_of_stays_in_the_text(op):
    assert number_words(scaled(0.3, op)) == []
    assert emit(scaled(0.3, op)).text != emit(scaled(0.7, op)).text


def test_a_number_that_arithmetic_and_others_read_stays_in_the_text():
    b = Builder()
    x, number = b.input(), b.constant(0.3)
    assert number_words(b.program(b.op("max", b.op("mul", x, number), number))) == []


@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, -1.0])
def test_zero_and_one_stay_in_the_text(number):
    assert number_words(scaled(number)) == []


def test_floats_are_words_by_the_bits_of_their_type():
    (single,), (double,) = [
        number_words(scaled(0.1, dtype=t)) for t in (DType.FLOAT32, DType.FLOAT64)
    ]
    assert struct.pack("<i", single) == struct.pack("<f", 0.1)
    assert SIGNED.pack(double) == struct.pack("<d", 0.1)
    # Rounded as a literal of C is: to infinity.
    assert struct.pack("<i", number_words(scaled(1e300))[0]) == struct.pack("<f", float("inf"))


def test_sizes_and_keys_are_words_in_their_order():
    assert number_words(cross_entropy(65)) == [65]
    assert number_words(dropout(key=7)) == [7]
    assert number_words(repeated(3, 5)) == [3, 5]
    assert number_words(repeated(1, 0)) == []
    values = [number.value for number in numbers_of(repeated(3, 5))]
    assert values == sorted(values)
