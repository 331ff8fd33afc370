"""bfloat16 at compile time: the upper half of a float32, for constants and references.

Eight bits of exponent, seven of fraction (Kalamkar et al., A Study of BFLOAT16 for Deep Learning
Training, 2019). References know no such arrays: they take and give float32 (or wider) arrays that
hold bfloat16 values, and whoever stores a result of theirs in a value of this type rounds it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from compiler.types import DType, numpy_dtype

Array = np.ndarray[Any, np.dtype[Any]]

_LOW_BITS = np.uint32(16)
"""Bits of a float32 that a bfloat16 lacks. Typed: before numpy 2 a Python number made int64 of a
uint32 of rank 0."""


def to_bits(x: Array) -> Array:
    """Return the nearest bfloat16 of numbers, ties to even, as uint16; a NaN keeps its sign.

    Numbers of another type become float32 first.
    """
    with np.errstate(over="ignore"):
        bits = np.asarray(x).astype(np.float32).view(np.uint32)
        high = bits >> _LOW_BITS
        nearest = (bits + (np.uint32(0x7FFF) + (high & np.uint32(1)))) >> _LOW_BITS
    # A NaN with a fraction of low bits alone would become infinite: its quiet bit is set.
    return np.where(np.isnan(x), high | np.uint32(0x40), nearest).astype(np.uint16)


def from_bits(bits: Array) -> Array:
    """Return the float32 values of bfloat16 bits (uint16)."""
    return (np.asarray(bits).astype(np.uint32) << _LOW_BITS).view(np.float32)


def rounded(x: Array) -> Array:
    """Return numbers rounded to bfloat16 values, as float32."""
    return from_bits(to_bits(x))


def encoded(array: Array, dtype: DType) -> bytes:
    """Return the bytes of a dense value of a dtype that holds these numbers."""
    if dtype is DType.BFLOAT16:
        return to_bits(array).tobytes()
    with np.errstate(over="ignore"):
        return np.asarray(array).astype(numpy_dtype(dtype)).tobytes()


def decoded(data: bytes, dtype: DType) -> Array:
    """Return the numbers in the bytes of a dense value, flat: float32 ones for bfloat16."""
    array = np.frombuffer(data, numpy_dtype(dtype))
    return from_bits(array) if dtype is DType.BFLOAT16 else array
