"""Functions of each element alone, of one operand or of several that broadcast."""

from __future__ import annotations

from actorflow.tensor import Operand, Tensor, apply, as_tensor
from compiler.fusion.expressions import Expression
from compiler.ops import binary, elementwise
from compiler.types import DType

__all__ = ["cos", "exp", "log", "maximum", "minimum", "sin", "sqrt", "square", "where"]


def exp(x: Tensor) -> Tensor:
    """Return e to the power of x."""
    return apply(elementwise.EXP, x)


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm."""
    return apply(elementwise.LOG, x)


def sqrt(x: Tensor) -> Tensor:
    """Return the square root."""
    return apply(elementwise.SQRT, x)


def cos(x: Tensor) -> Tensor:
    """Return the cosine of x in radians."""
    return apply(elementwise.COS, x)


def sin(x: Tensor) -> Tensor:
    """Return the sine of x in radians."""
    return apply(elementwise.SIN, x)


def square(x: Tensor) -> Tensor:
    """Return x * x."""
    return apply(elementwise.SQUARE, x)


def minimum(a: Operand, b: Operand) -> Tensor:
    """Return the smaller of two, elementwise."""
    return apply(binary.MINIMUM, a, b)


def maximum(a: Operand, b: Operand) -> Tensor:
    """Return the larger of two, elementwise."""
    return apply(binary.MAXIMUM, a, b)


def where(condition: Tensor, a: Operand, b: Operand) -> Tensor:
    """Return a where the bool tensor `condition` holds, else b; all three broadcast."""
    operands: tuple[object, ...] = (condition, a, b)
    if any([isinstance(o, Expression) for o in operands]):
        return apply(binary.WHERE, condition, a, b)
    partner = next((o.dtype for o in (a, b) if isinstance(o, Tensor)), DType.FLOAT32)
    chosen = as_tensor(condition, DType.BOOL)
    return apply(binary.WHERE, chosen, as_tensor(a, partner), as_tensor(b, partner))
