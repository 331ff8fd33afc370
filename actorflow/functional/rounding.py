"""Rounding, quotients and remainders of whole numbers, and bounds."""

from __future__ import annotations

import math

import numpy as np

from actorflow.functional.comparison import isnan
from actorflow.functional.elementwise import where
from actorflow.literals import checked_number, checked_size
from actorflow.promotion import result_type
from actorflow.tensor import Operand, Tensor, apply, as_tensor
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.ops import rounding
from compiler.types import DType

__all__ = [
    "ceil",
    "clamp",
    "clip",
    "floor",
    "floor_divide",
    "fmod",
    "frac",
    "nan_to_num",
    "remainder",
    "round",
    "sign",
    "trunc",
]


MOST_DECIMALS = 300
"""A power of ten of more is no float64."""


def sign(x: Tensor) -> Tensor:
    """Return -1, 0 or 1; 0 for NaN."""
    return apply(rounding.SIGN, x)


def floor(x: Tensor) -> Tensor:
    """Return the largest whole number that is not above x."""
    return apply(rounding.FLOOR, x)


def ceil(x: Tensor) -> Tensor:
    """Return the smallest whole number that is not below x."""
    return apply(rounding.CEIL, x)


def round(x: Tensor, *, decimals: int = 0) -> Tensor:  # noqa: A001  # torch's name
    """Return the nearest number of so many decimals, ties to even; of tens where it is negative."""
    x, places = as_tensor(x), checked_size(decimals, "decimals of round")
    if not places:
        return apply(rounding.ROUND, x)
    if not -MOST_DECIMALS <= places <= MOST_DECIMALS:
        raise CompileError(
            f"{find_source()}: round goes to {-MOST_DECIMALS} .. {MOST_DECIMALS} decimals, got"
            f" {places}"
        )
    if not x.dtype.is_float:
        raise CompileError(f"{find_source()}: round to decimals is of floats, got {x.type}")
    factor = 10.0 ** abs(places)
    if places > 0:
        return apply(rounding.ROUND, x * factor) / factor
    return apply(rounding.ROUND, x / factor) * factor


def trunc(x: Tensor) -> Tensor:
    """Return the whole number next to x towards 0."""
    return apply(rounding.TRUNC, x)


def frac(x: Tensor) -> Tensor:
    """Return what `trunc` leaves out, with the sign of x."""
    return x - trunc(x)


def remainder(a: Operand, b: Operand) -> Tensor:
    """Return a - b * floor(a / b), with the sign of b, as `%` does; of integers by 0: 0."""
    return apply(rounding.REMAINDER, a, b)


def fmod(a: Operand, b: Operand) -> Tensor:
    """Return a - b * trunc(a / b), with the sign of a; of integers by 0: a."""
    return apply(rounding.FMOD, a, b)


def floor_divide(a: Operand, b: Operand) -> Tensor:
    """Return a / b rounded down, in the dtype of both, as `//` does; of integers by 0: 0."""
    return apply(rounding.FLOOR_DIVIDE, a, b)


def clamp(x: Tensor, min: Operand = None, max: Operand = None) -> Tensor:  # noqa: A002  # torch's
    """Return x between two bounds, numbers or tensors; `max` where they are crossed."""
    x = as_tensor(x)
    if min is None and max is None:
        raise CompileError(f"{find_source()}: clamp needs a min, a max or both")
    given = [
        b if isinstance(b, (int, float)) else as_tensor(b) for b in (min, max) if b is not None
    ]
    meeting = result_type([x, *given])
    if meeting is DType.BOOL:
        raise CompileError(f"{find_source()}: clamp needs numbers, got bools")
    low, high = (-math.inf, math.inf)
    if not meeting.is_float:
        limits = np.iinfo(meeting.value)
        low, high = int(limits.min), int(limits.max)
    return apply(rounding.CLAMP, x, low if min is None else min, high if max is None else max)


clip = clamp


def nan_to_num(
    x: Tensor, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    """Return x with numbers for NaN and for what is infinite: the largest ones by default."""
    x = as_tensor(x)
    if not x.dtype.is_float:
        return x
    limits = np.finfo("float32" if x.dtype.value == "bfloat16" else x.dtype.value)
    largest = float(limits.max) if posinf is None else checked_number(posinf, "posinf")
    least = float(limits.min) if neginf is None else checked_number(neginf, "neginf")
    finite = where(isnan(x), checked_number(nan, "nan"), x)
    return where(x == math.inf, largest, where(x == -math.inf, least, finite))
