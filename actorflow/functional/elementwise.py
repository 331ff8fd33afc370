"""Functions of each element alone, of one operand or of several that broadcast.

In this order: arithmetic and analysis; comparisons and logic; rounding, remainders and bounds.
"""

from __future__ import annotations

import builtins
import math
from typing import Any

import numpy as np

from actorflow.tensor.literals import checked_number, checked_size, result_type
from actorflow.tensor.tensor import Operand, Tensor, apply, as_tensor
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError
from compiler.contract.types import DType
from compiler.ops.families import arithmetic
from compiler.ops.language.expressions import Expression

__all__ = [
    "abs",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "bitwise_and",
    "bitwise_not",
    "bitwise_or",
    "bitwise_xor",
    "ceil",
    "clamp",
    "clip",
    "cos",
    "cosh",
    "eq",
    "erf",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "floor_divide",
    "fmod",
    "frac",
    "ge",
    "gt",
    "hypot",
    "isfinite",
    "isinf",
    "isnan",
    "le",
    "lerp",
    "log",
    "log1p",
    "log2",
    "log10",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "lt",
    "maximum",
    "minimum",
    "nan_to_num",
    "ne",
    "neg",
    "pow",
    "reciprocal",
    "remainder",
    "round",
    "rsqrt",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "tan",
    "trunc",
    "where",
]


def abs(x: Tensor) -> Tensor:  # noqa: A001  # torch's name
    """Return the absolute value."""
    x = as_tensor(x)
    is_plain = x.dtype.value.startswith("uint")
    return x if is_plain else apply(arithmetic.ABS, x)


def acos(x: Tensor) -> Tensor:
    """Return the arc whose cosine is x, from 0 to pi; NaN outside of [-1, 1]."""
    return apply(arithmetic.ACOS, x)


def acosh(x: Tensor) -> Tensor:
    """Return the number whose hyperbolic cosine is x, from 0 on; NaN below 1."""
    return apply(arithmetic.ACOSH, x)


def asin(x: Tensor) -> Tensor:
    """Return the arc whose sine is x, from -pi/2 to pi/2; NaN outside of [-1, 1]."""
    return apply(arithmetic.ASIN, x)


def asinh(x: Tensor) -> Tensor:
    """Return the number whose hyperbolic sine is x."""
    return apply(arithmetic.ASINH, x)


def atan(x: Tensor) -> Tensor:
    """Return the arc whose tangent is x, from -pi/2 to pi/2."""
    return apply(arithmetic.ATAN, x)


def atanh(x: Tensor) -> Tensor:
    """Return the number whose hyperbolic tangent is x; NaN outside of [-1, 1]."""
    return apply(arithmetic.ATANH, x)


def cos(x: Tensor) -> Tensor:
    """Return the cosine of x in radians."""
    return apply(arithmetic.COS, x)


def cosh(x: Tensor) -> Tensor:
    """Return the hyperbolic cosine."""
    return apply(arithmetic.COSH, x)


def erf(x: Tensor) -> Tensor:
    """Return the error function."""
    return apply(arithmetic.ERF, x)


def erfc(x: Tensor) -> Tensor:
    """Return 1 - erf(x), small ones to the last digit."""
    return apply(arithmetic.ERFC, x)


def exp(x: Tensor) -> Tensor:
    """Return e to the power of x."""
    return apply(arithmetic.EXP, x)


def exp2(x: Tensor) -> Tensor:
    """Return 2 to the power of x."""
    return apply(arithmetic.EXP2, x)


def expm1(x: Tensor) -> Tensor:
    """Return e^x - 1, to the last digit near 0."""
    return apply(arithmetic.EXPM1, x)


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm."""
    return apply(arithmetic.LOG, x)


def log10(x: Tensor) -> Tensor:
    """Return the logarithm to base 10."""
    return apply(arithmetic.LOG10, x)


def log1p(x: Tensor) -> Tensor:
    """Return log(1 + x), to the last digit near 0."""
    return apply(arithmetic.LOG1P, x)


def log2(x: Tensor) -> Tensor:
    """Return the logarithm to base 2."""
    return apply(arithmetic.LOG2, x)


def neg(x: Tensor) -> Tensor:
    """Return -x."""
    return apply(arithmetic.NEG, x)


def reciprocal(x: Tensor) -> Tensor:
    """Return 1 / x."""
    return apply(arithmetic.RECIPROCAL, x)


def rsqrt(x: Tensor) -> Tensor:
    """Return 1 / sqrt(x)."""
    return apply(arithmetic.RSQRT, x)


def sin(x: Tensor) -> Tensor:
    """Return the sine of x in radians."""
    return apply(arithmetic.SIN, x)


def sinh(x: Tensor) -> Tensor:
    """Return the hyperbolic sine."""
    return apply(arithmetic.SINH, x)


def sqrt(x: Tensor) -> Tensor:
    """Return the square root."""
    return apply(arithmetic.SQRT, x)


def square(x: Tensor) -> Tensor:
    """Return x * x."""
    return apply(arithmetic.SQUARE, x)


def tan(x: Tensor) -> Tensor:
    """Return the tangent of x in radians."""
    return apply(arithmetic.TAN, x)


def atan2(a: Operand, b: Operand) -> Tensor:
    """Return the angle of the point (b, a) from -pi to pi."""
    return apply(arithmetic.ATAN2, a, b)


def hypot(a: Operand, b: Operand) -> Tensor:
    """Return sqrt(a^2 + b^2), of which nothing overflows in between."""
    return apply(arithmetic.HYPOT, a, b)


def logaddexp(a: Operand, b: Operand) -> Tensor:
    """Return log(e^a + e^b), of which nothing overflows in between."""
    return apply(arithmetic.LOGADDEXP, a, b)


def lerp(start: Operand, end: Operand, weight: Operand) -> Tensor:
    """Return start + weight * (end - start)."""
    return apply(arithmetic.LERP, start, end, weight)


def pow(x: Operand, exponent: Operand) -> Tensor:  # noqa: A001  # torch's name
    """Return x to a power: of integers an integer, by squaring; a number must be 0 or more then."""
    values: list[Any] = [as_tensor(o) if isinstance(o, np.ndarray) else o for o in (x, exponent)]
    tensors = [o for o in values if isinstance(o, Tensor)]
    if not tensors or not all([_is_whole(o) for o in values]):
        return apply(arithmetic.POW, *values)
    start, power_of = values
    if isinstance(power_of, Tensor):
        return _to_whole_powers(as_tensor(start, power_of.dtype), power_of)
    if power_of < 0:
        raise CompileError(
            f"{find_source()}: {tensors[0].type} needs an exponent that is an integer of 0 or more,"
            f" got {power_of}; convert the tensor first with .to('float32')"
        )
    base: Tensor = start.to(DType.INT64) if start.dtype is DType.BOOL else start
    power: Tensor = base * 0 + 1
    for bit in reversed(f"{power_of:b}"):
        power, base = (power * base if bit == "1" else power), base * base
    return power


def _to_whole_powers(x: Tensor, exponent: Tensor) -> Tensor:
    """Return x to integers, by squaring: exact but for wrapping around, as products are.

    To a negative power it is the quotient 1 / x^n, rounded toward zero, and 0 for x = 0.
    """
    dtype = result_type([x, exponent])
    dtype = DType.INT64 if dtype is DType.BOOL else dtype
    base, rest = x.to(dtype), exponent.to(dtype)
    is_signed = dtype.value.startswith("int")
    bits = 8 * dtype.itemsize - is_signed
    is_odd = apply(arithmetic.BITWISE_AND, rest, 1) == 1
    power: Tensor = base * 0 + 1
    square_ = base
    for bit in range(bits):
        is_set = apply(arithmetic.BITWISE_AND, apply(arithmetic.SHIFT_RIGHT, rest, bit), 1) == 1
        power = where(is_set, power * square_, power)
        square_ = square_ * square_
    if not is_signed:
        return power
    turned = where(is_odd, base, 1)  # of 1 and -1
    return where(rest < 0, where(abs(base) == 1, turned, 0), power)


def _is_whole(operand: Operand) -> bool:
    return not operand.dtype.is_float if isinstance(operand, Tensor) else isinstance(operand, int)


def minimum(a: Operand, b: Operand) -> Tensor:
    """Return the smaller of two, elementwise."""
    return apply(arithmetic.MINIMUM, a, b)


def maximum(a: Operand, b: Operand) -> Tensor:
    """Return the larger of two, elementwise."""
    return apply(arithmetic.MAXIMUM, a, b)


def where(condition: Operand, a: Operand, b: Operand) -> Tensor:
    """Return a where the bool tensor `condition` holds, else b; all three broadcast."""
    is_program = isinstance(condition, Expression)
    mask = condition if is_program else as_tensor(condition, DType.BOOL)
    return apply(arithmetic.WHERE, mask, a, b)


def eq(a: Operand, b: Operand) -> Tensor:
    """Return whether a == b, elementwise."""
    return apply(arithmetic.EQUAL, a, b)


def ne(a: Operand, b: Operand) -> Tensor:
    """Return whether a != b, elementwise."""
    return apply(arithmetic.NOT_EQUAL, a, b)


def lt(a: Operand, b: Operand) -> Tensor:
    """Return whether a < b, elementwise."""
    return apply(arithmetic.LESS, a, b)


def le(a: Operand, b: Operand) -> Tensor:
    """Return whether a <= b, elementwise."""
    return apply(arithmetic.LESS_EQUAL, a, b)


def gt(a: Operand, b: Operand) -> Tensor:
    """Return whether a > b, elementwise."""
    return apply(arithmetic.GREATER, a, b)


def ge(a: Operand, b: Operand) -> Tensor:
    """Return whether a >= b, elementwise."""
    return apply(arithmetic.GREATER_EQUAL, a, b)


def truth(x: Operand) -> Tensor:
    """Return whether elements are other than 0; NaN is."""
    x = as_tensor(x)
    return x if x.dtype is DType.BOOL else ne(x, 0)


def logical_and(a: Operand, b: Operand) -> Tensor:
    """Return whether both are other than 0."""
    return apply(arithmetic.BITWISE_AND, truth(a), truth(b))


def logical_or(a: Operand, b: Operand) -> Tensor:
    """Return whether either is other than 0."""
    return apply(arithmetic.BITWISE_OR, truth(a), truth(b))


def logical_xor(a: Operand, b: Operand) -> Tensor:
    """Return whether one alone is other than 0."""
    return apply(arithmetic.BITWISE_XOR, truth(a), truth(b))


def logical_not(x: Operand) -> Tensor:
    """Return whether elements are 0."""
    return apply(arithmetic.BITWISE_NOT, truth(x))


def bitwise_and(a: Operand, b: Operand) -> Tensor:
    """Return the bits that are set in both integers; also of bools."""
    return apply(arithmetic.BITWISE_AND, a, b)


def bitwise_or(a: Operand, b: Operand) -> Tensor:
    """Return the bits that are set in either integer; also of bools."""
    return apply(arithmetic.BITWISE_OR, a, b)


def bitwise_xor(a: Operand, b: Operand) -> Tensor:
    """Return the bits that are set in one integer alone; also of bools."""
    return apply(arithmetic.BITWISE_XOR, a, b)


def bitwise_not(x: Tensor) -> Tensor:
    """Return the bits that are not set; also of bools."""
    return apply(arithmetic.BITWISE_NOT, x)


def isnan(x: Tensor) -> Tensor:
    """Return whether elements are NaN."""
    return ne(x, x)


def isinf(x: Tensor) -> Tensor:
    """Return whether elements are infinite, of either sign."""
    x = as_tensor(x)
    return eq(builtins.abs(x), math.inf) if x.dtype.is_float else isnan(x)


def isfinite(x: Tensor) -> Tensor:
    """Return whether elements are neither infinite nor NaN."""
    x = as_tensor(x)
    return lt(builtins.abs(x), math.inf) if x.dtype.is_float else eq(x, x)


MOST_DECIMALS = 300
"""A power of ten of more is no float64."""


def sign(x: Tensor) -> Tensor:
    """Return -1, 0 or 1; 0 for NaN."""
    return apply(arithmetic.SIGN, x)


def floor(x: Tensor) -> Tensor:
    """Return the largest whole number that is not above x."""
    return apply(arithmetic.FLOOR, x)


def ceil(x: Tensor) -> Tensor:
    """Return the smallest whole number that is not below x."""
    return apply(arithmetic.CEIL, x)


def round(x: Tensor, *, decimals: int = 0) -> Tensor:  # noqa: A001  # torch's name
    """Return the nearest number of so many decimals, ties to even; of tens where it is negative."""
    x, places = as_tensor(x), checked_size(decimals, "decimals of round")
    if not places:
        return apply(arithmetic.ROUND, x)
    if not -MOST_DECIMALS <= places <= MOST_DECIMALS:
        raise CompileError(
            f"{find_source()}: round needs decimals of {-MOST_DECIMALS} to {MOST_DECIMALS}, got"
            f" {places}"
        )
    if not x.dtype.is_float:
        raise CompileError(f"{find_source()}: round to decimals is of floats, got {x.type}")
    factor = 10.0 ** builtins.abs(places)
    if places > 0:
        return apply(arithmetic.ROUND, x * factor) / factor
    return apply(arithmetic.ROUND, x / factor) * factor


def trunc(x: Tensor) -> Tensor:
    """Return the whole number next to x towards 0."""
    return apply(arithmetic.TRUNC, x)


def frac(x: Tensor) -> Tensor:
    """Return what `trunc` leaves out, with the sign of x."""
    return x - trunc(x)


def remainder(a: Operand, b: Operand) -> Tensor:
    """Return a - b * floor(a / b), with the sign of b, as `%` does; of integers by 0: 0."""
    return apply(arithmetic.REMAINDER, a, b)


def fmod(a: Operand, b: Operand) -> Tensor:
    """Return a - b * trunc(a / b), with the sign of a; of integers by 0: a."""
    return apply(arithmetic.FMOD, a, b)


def floor_divide(a: Operand, b: Operand) -> Tensor:
    """Return a / b rounded down, in the dtype of both, as `//` does; of integers by 0: 0."""
    return apply(arithmetic.FLOOR_DIVIDE, a, b)


def clamp(
    x: Tensor,
    min: Operand | None = None,  # noqa: A002  # torch's name
    max: Operand | None = None,  # noqa: A002  # torch's name
) -> Tensor:
    """Return x between two bounds, numbers or tensors; `max` where they are crossed."""
    x = as_tensor(x)
    if min is None and max is None:
        raise CompileError(f"{find_source()}: clamp needs a min, a max or both")
    bounds = [
        b if isinstance(b, (int, float)) else as_tensor(b) for b in (min, max) if b is not None
    ]
    dtype = result_type([x, *bounds])
    if dtype is DType.BOOL:
        raise CompileError(f"{find_source()}: clamp needs numbers, got bools")
    low, high = (-math.inf, math.inf)
    if not dtype.is_float:
        limits = np.iinfo(dtype.value)
        low, high = int(limits.min), int(limits.max)
    return apply(arithmetic.CLAMP, x, low if min is None else min, high if max is None else max)


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
