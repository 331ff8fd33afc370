"""Comparisons, logic, and what numbers are: bools of each element."""

from __future__ import annotations

import math

from actorflow.tensor import Operand, Tensor, apply, as_tensor
from compiler.ops import binary, rounding
from compiler.types import DType

__all__ = [
    "bitwise_and",
    "bitwise_not",
    "bitwise_or",
    "bitwise_xor",
    "eq",
    "ge",
    "gt",
    "isfinite",
    "isinf",
    "isnan",
    "le",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "lt",
    "ne",
]


def eq(a: Operand, b: Operand) -> Tensor:
    """Return whether a == b, elementwise."""
    return apply(binary.EQUAL, a, b)


def ne(a: Operand, b: Operand) -> Tensor:
    """Return whether a != b, elementwise."""
    return apply(binary.NOT_EQUAL, a, b)


def lt(a: Operand, b: Operand) -> Tensor:
    """Return whether a < b, elementwise."""
    return apply(binary.LESS, a, b)


def le(a: Operand, b: Operand) -> Tensor:
    """Return whether a <= b, elementwise."""
    return apply(binary.LESS_EQUAL, a, b)


def gt(a: Operand, b: Operand) -> Tensor:
    """Return whether a > b, elementwise."""
    return apply(binary.GREATER, a, b)


def ge(a: Operand, b: Operand) -> Tensor:
    """Return whether a >= b, elementwise."""
    return apply(binary.GREATER_EQUAL, a, b)


def truth(x: Operand) -> Tensor:
    """Return whether elements are other than 0; NaN is."""
    x = as_tensor(x)
    return x if x.dtype is DType.BOOL else ne(x, 0)


def logical_and(a: Operand, b: Operand) -> Tensor:
    """Return whether both are other than 0."""
    return apply(rounding.BITWISE_AND, truth(a), truth(b))


def logical_or(a: Operand, b: Operand) -> Tensor:
    """Return whether either is other than 0."""
    return apply(rounding.BITWISE_OR, truth(a), truth(b))


def logical_xor(a: Operand, b: Operand) -> Tensor:
    """Return whether one alone is other than 0."""
    return apply(rounding.BITWISE_XOR, truth(a), truth(b))


def logical_not(x: Operand) -> Tensor:
    """Return whether elements are 0."""
    return apply(rounding.BITWISE_NOT, truth(x))


def bitwise_and(a: Operand, b: Operand) -> Tensor:
    """Return the bits that are set in both integers; also of bools."""
    return apply(rounding.BITWISE_AND, a, b)


def bitwise_or(a: Operand, b: Operand) -> Tensor:
    """Return the bits that are set in either integer; also of bools."""
    return apply(rounding.BITWISE_OR, a, b)


def bitwise_xor(a: Operand, b: Operand) -> Tensor:
    """Return the bits that are set in one integer alone; also of bools."""
    return apply(rounding.BITWISE_XOR, a, b)


def bitwise_not(x: Tensor) -> Tensor:
    """Return the bits that are not set; also of bools."""
    return apply(rounding.BITWISE_NOT, x)


def isnan(x: Tensor) -> Tensor:
    """Return whether elements are NaN."""
    return ne(x, x)


def isinf(x: Tensor) -> Tensor:
    """Return whether elements are infinite, of either sign."""
    x = as_tensor(x)
    return eq(abs(x), math.inf) if x.dtype.is_float else isnan(x)


def isfinite(x: Tensor) -> Tensor:
    """Return whether elements are neither infinite nor NaN."""
    x = as_tensor(x)
    return lt(abs(x), math.inf) if x.dtype.is_float else eq(x, x)
