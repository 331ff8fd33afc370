"""Rounding, remainders, quotients of integers, bits, and bounds."""

from __future__ import annotations

import operator

from compiler.fusion.define import fused_op
from compiler.fusion.expressions import Expression

ONE, TWO = "x: number -> y", "a: number, b: number -> y"

SIGN = fused_op("sign", ONE, lambda x: (x > 0).to(x.dtype) - (x < 0).to(x.dtype))
"""-1, 0 or 1; 0 for NaN, as torch has it."""

FLOOR = fused_op("floor", ONE, Expression.floor)

CEIL = fused_op("ceil", ONE, Expression.ceil)

ROUND = fused_op("round", ONE, Expression.round)
"""To the nearest, ties to even."""

TRUNC = fused_op("trunc", ONE, lambda x: (x < 0).where(x.ceil(), x.floor()))

REMAINDER = fused_op("remainder", TWO, operator.mod)
"""With the sign of the divisor, as Python has it; of integers by 0: 0."""


def _fmod(a: Expression, b: Expression) -> Expression:
    """An integer's absolute value may overflow, a float's difference may round."""
    if a.dtype.is_float:
        size = abs(a) % abs(b)
        return (a < 0).where(-size, size)
    rest = a % b
    return ((rest != 0) & ((a < 0) != (b < 0))).where(rest - b, rest)


FMOD = fused_op(
    "fmod",
    TWO,
    _fmod,
    gradient=lambda dy, a, b: (dy, -(dy * (a / b < 0).where((a / b).ceil(), (a / b).floor()))),
)
"""The remainder with the sign of the dividend, as C has it."""


def _floor_divide(a: Expression, b: Expression) -> Expression:
    """Of floats: what is left of a, but for the remainder, is a multiple of b."""
    if not a.dtype.is_float:
        return a // b
    rest = _fmod(a, b)
    is_below = (rest != 0) & ((rest < 0) != (b < 0))
    return (b == 0).where(a / b, ((a - rest) / b).round() - is_below.to(a.dtype))


FLOOR_DIVIDE = fused_op("floor_divide", TWO, _floor_divide)
"""Rounded down; of integers by 0: 0."""

BITWISE_AND = fused_op("bitwise_and", "a: bits, b: bits -> y", operator.and_)

BITWISE_OR = fused_op("bitwise_or", "a: bits, b: bits -> y", operator.or_)

BITWISE_XOR = fused_op("bitwise_xor", "a: bits, b: bits -> y", operator.xor)

BITWISE_NOT = fused_op("bitwise_not", "x: bits -> y", operator.invert)

SHIFT_LEFT = fused_op("shift_left", "a: whole, b: whole -> y", operator.lshift)

SHIFT_RIGHT = fused_op("shift_right", "a: whole, b: whole -> y", operator.rshift)


def _clamp(x: Expression, low: Expression, high: Expression) -> Expression:
    return x.maximum(low).minimum(high)


def _clamp_gradient(
    dy: Expression, x: Expression, low: Expression, high: Expression
) -> tuple[Expression, ...]:
    """As torch has it: all of it to x at a bound, and to `high` where the bounds are crossed."""
    is_over, is_under = (x > high) | (low > high), x < low
    return (
        (is_over | is_under).where(0.0, dy),
        (is_under & (low < high)).where(dy, 0.0),
        is_over.where(dy, 0.0),
    )


CLAMP = fused_op(
    "clamp", "x: number, low: number, high: number -> y", _clamp, gradient=_clamp_gradient
)
"""x between two bounds; `high` where they are crossed."""
