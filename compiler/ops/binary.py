"""Arithmetic and comparison of two inputs, and selection.

Dtypes must be equal; shapes broadcast as in numpy.
"""

from __future__ import annotations

import operator

from compiler.fusion.define import fused_op
from compiler.fusion.expressions import Expression
from compiler.graph import GraphBuilder, Node
from compiler.ops.elementwise import NEG, SQUARE
from compiler.ops.rule import Values
from compiler.ops.sources import is_scalar_constant, scalar
from compiler.rules import simplify
from compiler.types import ValueId

NUMBERS = "a: number, b: number -> y"
ANY = "a: any, b: any -> y"
COMPARED = "a: any, b: any -> y: bool"

ADD = fused_op("add", NUMBERS, operator.add)

SUB = fused_op("sub", NUMBERS, operator.sub)

MUL = fused_op("mul", NUMBERS, operator.mul)

DIV = fused_op("div", "a, b -> y", operator.truediv)
"""Division by zero gives inf or NaN."""

POW = fused_op("pow", "a, b -> y", operator.pow)
"""NaN for negative a and fractional b."""

MAXIMUM = fused_op("maximum", ANY, Expression.maximum)
"""The larger, NaN where either is (bool: or). Ties share the gradient."""

MINIMUM = fused_op("minimum", ANY, Expression.minimum)
"""The smaller, NaN where either is (bool: and). Ties share the gradient."""

EQUAL = fused_op("equal", COMPARED, operator.eq)

NOT_EQUAL = fused_op("not_equal", COMPARED, operator.ne)

LESS = fused_op("less", COMPARED, operator.lt)

LESS_EQUAL = fused_op("less_equal", COMPARED, operator.le)

GREATER = fused_op("greater", COMPARED, operator.gt)

GREATER_EQUAL = fused_op("greater_equal", COMPARED, operator.ge)

WHERE = fused_op("where", "condition: bool, a: any, b: any -> y", Expression.where)
"""a where the condition holds, else b. All three broadcast."""


def scaled(b: GraphBuilder, value: ValueId, factor: float) -> ValueId:
    """Emit `value` times a number."""
    return b.one(MUL, value, scalar(b, factor, b.type_of(value).dtype))


@simplify.of(ADD)
def _simplify_add(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    x, y = inputs
    # -0.0 is the neutral element of float addition: x + 0.0 would turn a -0.0 into 0.0.
    zero = -0.0 if b.type_of(x).dtype.is_float else 0
    for kept, other in ((x, y), (y, x)):
        if _is_neutral(b, kept, other, zero):
            return (kept,)
        negated = b.producer_of(other)
        if negated.op is NEG:
            return (b.one(SUB, kept, negated.inputs[0]),)
    return None


@simplify.of(SUB)
def _simplify_sub(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    x, y = inputs
    if _is_neutral(b, x, y, 0.0):
        return (x,)
    negated = b.producer_of(y)
    return (b.one(ADD, x, negated.inputs[0]),) if negated.op is NEG else None


@simplify.of(MUL)
def _simplify_mul(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    x, y = inputs
    if _is_neutral(b, x, y, 1.0):
        return (x,)
    return (y,) if _is_neutral(b, y, x, 1.0) else None


@simplify.of(DIV)
def _simplify_div(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    return inputs[:1] if _is_neutral(b, inputs[0], inputs[1], 1.0) else None


@simplify.of(POW)
def _simplify_pow(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    x, exponent = inputs
    if _is_neutral(b, x, exponent, 1.0):
        return (x,)
    if _is_neutral(b, x, exponent, 2.0):
        return (b.one(SQUARE, x),)
    return None


def _is_neutral(b: GraphBuilder, kept: ValueId, other: ValueId, number: float) -> bool:
    """Whether `other` is this constant and the result has the shape of `kept`."""
    if not is_scalar_constant(b, other, number):
        return False
    return b.type_of(other).rank <= b.type_of(kept).rank
