"""Functions of each element alone, of one operand or of several that broadcast."""

from __future__ import annotations

import numpy as np

from actorflow.tensor import Operand, Tensor, apply, as_tensor
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.fusion.expressions import Expression
from compiler.ops import binary, elementwise
from compiler.ops import transcendental as functions
from compiler.types import DType

__all__ = [
    "abs",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "hypot",
    "lerp",
    "log",
    "log1p",
    "log2",
    "log10",
    "logaddexp",
    "maximum",
    "minimum",
    "neg",
    "pow",
    "reciprocal",
    "rsqrt",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "tan",
    "where",
]


def abs(x: Tensor) -> Tensor:  # noqa: A001  # torch's name
    """Return the absolute value."""
    x = as_tensor(x)
    is_plain = x.dtype.value.startswith("uint")
    return x if is_plain else apply(elementwise.ABS, x)


def acos(x: Tensor) -> Tensor:
    """Return the arc whose cosine is x, from 0 to pi; NaN outside of [-1, 1]."""
    return apply(functions.ACOS, x)


def acosh(x: Tensor) -> Tensor:
    """Return the number whose hyperbolic cosine is x, from 0 on; NaN below 1."""
    return apply(functions.ACOSH, x)


def asin(x: Tensor) -> Tensor:
    """Return the arc whose sine is x, from -pi/2 to pi/2; NaN outside of [-1, 1]."""
    return apply(functions.ASIN, x)


def asinh(x: Tensor) -> Tensor:
    """Return the number whose hyperbolic sine is x."""
    return apply(functions.ASINH, x)


def atan(x: Tensor) -> Tensor:
    """Return the arc whose tangent is x, from -pi/2 to pi/2."""
    return apply(functions.ATAN, x)


def atanh(x: Tensor) -> Tensor:
    """Return the number whose hyperbolic tangent is x; NaN outside of [-1, 1]."""
    return apply(functions.ATANH, x)


def cos(x: Tensor) -> Tensor:
    """Return the cosine of x in radians."""
    return apply(elementwise.COS, x)


def cosh(x: Tensor) -> Tensor:
    """Return the hyperbolic cosine."""
    return apply(functions.COSH, x)


def erf(x: Tensor) -> Tensor:
    """Return the error function."""
    return apply(functions.ERF, x)


def erfc(x: Tensor) -> Tensor:
    """Return 1 - erf(x), small ones to the last digit."""
    return apply(functions.ERFC, x)


def exp(x: Tensor) -> Tensor:
    """Return e to the power of x."""
    return apply(elementwise.EXP, x)


def exp2(x: Tensor) -> Tensor:
    """Return 2 to the power of x."""
    return apply(functions.EXP2, x)


def expm1(x: Tensor) -> Tensor:
    """Return e^x - 1, to the last digit near 0."""
    return apply(functions.EXPM1, x)


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm."""
    return apply(elementwise.LOG, x)


def log10(x: Tensor) -> Tensor:
    """Return the logarithm to base 10."""
    return apply(functions.LOG10, x)


def log1p(x: Tensor) -> Tensor:
    """Return log(1 + x), to the last digit near 0."""
    return apply(functions.LOG1P, x)


def log2(x: Tensor) -> Tensor:
    """Return the logarithm to base 2."""
    return apply(functions.LOG2, x)


def neg(x: Tensor) -> Tensor:
    """Return -x."""
    return apply(elementwise.NEG, x)


def reciprocal(x: Tensor) -> Tensor:
    """Return 1 / x."""
    return apply(elementwise.RECIPROCAL, x)


def rsqrt(x: Tensor) -> Tensor:
    """Return 1 / sqrt(x)."""
    return apply(elementwise.RSQRT, x)


def sin(x: Tensor) -> Tensor:
    """Return the sine of x in radians."""
    return apply(elementwise.SIN, x)


def sinh(x: Tensor) -> Tensor:
    """Return the hyperbolic sine."""
    return apply(functions.SINH, x)


def sqrt(x: Tensor) -> Tensor:
    """Return the square root."""
    return apply(elementwise.SQRT, x)


def square(x: Tensor) -> Tensor:
    """Return x * x."""
    return apply(elementwise.SQUARE, x)


def tan(x: Tensor) -> Tensor:
    """Return the tangent of x in radians."""
    return apply(functions.TAN, x)


def atan2(a: Operand, b: Operand) -> Tensor:
    """Return the angle of the point (b, a) from -pi to pi."""
    return apply(functions.ATAN2, a, b)


def hypot(a: Operand, b: Operand) -> Tensor:
    """Return sqrt(a^2 + b^2), of which nothing overflows in between."""
    return apply(functions.HYPOT, a, b)


def logaddexp(a: Operand, b: Operand) -> Tensor:
    """Return log(e^a + e^b), of which nothing overflows in between."""
    return apply(functions.LOGADDEXP, a, b)


def lerp(start: Operand, end: Operand, weight: Operand) -> Tensor:
    """Return start + weight * (end - start)."""
    return apply(functions.LERP, start, end, weight)


def pow(x: Operand, exponent: Operand) -> Tensor:  # noqa: A001  # torch's name
    """Return x to a power. Of an integer tensor and a whole number from 0 on it is an integer."""
    x, exponent = [as_tensor(o) if isinstance(o, np.ndarray) else o for o in (x, exponent)]
    tensors = [o for o in (x, exponent) if isinstance(o, Tensor)]
    if not tensors or not all([_is_whole(o) for o in (x, exponent)]):
        return apply(binary.POW, x, exponent)
    if not isinstance(x, Tensor) or not isinstance(exponent, int) or exponent < 0:
        came = [str(o.type) if isinstance(o, Tensor) else str(o) for o in (x, exponent)]
        raise CompileError(
            f"{find_source()}: {came[0]} can be taken to the power of a whole number from 0 on, got"
            f" {came[1]}; convert the tensor first with .to('float32')"
        )
    base: Tensor = x.to(DType.INT64) if x.dtype is DType.BOOL else x
    power: Tensor = base * 0 + 1
    for bit in reversed(f"{exponent:b}"):
        power, base = (power * base if bit == "1" else power), base * base
    return power


def _is_whole(operand: Operand) -> bool:
    return not operand.dtype.is_float if isinstance(operand, Tensor) else isinstance(operand, int)


def minimum(a: Operand, b: Operand) -> Tensor:
    """Return the smaller of two, elementwise."""
    return apply(binary.MINIMUM, a, b)


def maximum(a: Operand, b: Operand) -> Tensor:
    """Return the larger of two, elementwise."""
    return apply(binary.MAXIMUM, a, b)


def where(condition: Operand, a: Operand, b: Operand) -> Tensor:
    """Return a where the bool tensor `condition` holds, else b; all three broadcast."""
    is_program = isinstance(condition, Expression)
    chosen = condition if is_program else as_tensor(condition, DType.BOOL)
    return apply(binary.WHERE, chosen, a, b)
