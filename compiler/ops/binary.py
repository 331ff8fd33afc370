"""Arithmetic and comparison of two inputs, and selection.

Dtypes must be equal; shapes broadcast as in numpy. Gradients are in `core_gradients`.
"""

from __future__ import annotations

import numpy as np

from compiler.attrs import Attrs
from compiler.graph import GraphBuilder, Node
from compiler.ops.elementwise import NEG, SQUARE
from compiler.ops.rule import Values, pointwise
from compiler.ops.signature import (
    Types,
    broadcast_shape,
    expect_equal_dtypes,
    expect_float,
    expect_inputs,
    expect_number,
)
from compiler.ops.sources import is_scalar_constant, scalar
from compiler.registry import OpTypeError, define, infer_type, is_exact, reference
from compiler.rules import simplify
from compiler.types import DType, TensorType, ValueId

ADD = define("add")
"""a, b -> a + b. Numbers."""

SUB = define("sub")
"""a, b -> a - b. Numbers."""

MUL = define("mul")
"""a, b -> a * b. Numbers."""

DIV = define("div")
"""a, b -> a / b. Floats; division by zero gives inf or NaN."""

POW = define("pow")
"""a, b -> a to the power of b. Floats; NaN for negative a and fractional b."""

MAXIMUM = define("maximum")
"""a, b -> the larger, NaN where either is. Any dtype (bool: or). Ties share the gradient."""

MINIMUM = define("minimum")
"""a, b -> the smaller, NaN where either is. Any dtype (bool: and). Ties share the gradient."""

EQUAL = define("equal")
"""a, b -> bool."""

NOT_EQUAL = define("not_equal")
"""a, b -> bool."""

LESS = define("less")
"""a, b -> bool."""

LESS_EQUAL = define("less_equal")
"""a, b -> bool."""

GREATER = define("greater")
"""a, b -> bool."""

GREATER_EQUAL = define("greater_equal")
"""a, b -> bool."""

WHERE = define("where")
"""condition (bool), a, b -> a where the condition holds, else b. All three broadcast."""


def scaled(b: GraphBuilder, value: ValueId, factor: float) -> ValueId:
    """Emit `value` times a number."""
    return b.one(MUL, value, scalar(b, factor, b.type_of(value).dtype))


@infer_type.of(ADD, SUB, MUL)
def _number_type(inputs: Types, attrs: Attrs) -> Types:
    a, b = expect_inputs(inputs, "a", "b")
    dtype = expect_equal_dtypes(inputs)
    expect_number(a, "a and b")
    return (TensorType(dtype, broadcast_shape(a.shape, b.shape)),)


@infer_type.of(DIV, POW)
def _float_type(inputs: Types, attrs: Attrs) -> Types:
    a, b = expect_inputs(inputs, "a", "b")
    dtype = expect_equal_dtypes(inputs)
    expect_float(inputs, "a", "b")
    return (TensorType(dtype, broadcast_shape(a.shape, b.shape)),)


@infer_type.of(MAXIMUM, MINIMUM)
def _any_type(inputs: Types, attrs: Attrs) -> Types:
    a, b = expect_inputs(inputs, "a", "b")
    return (TensorType(expect_equal_dtypes(inputs), broadcast_shape(a.shape, b.shape)),)


@infer_type.of(EQUAL, NOT_EQUAL, LESS, LESS_EQUAL, GREATER, GREATER_EQUAL)
def _comparison_type(inputs: Types, attrs: Attrs) -> Types:
    a, b = expect_inputs(inputs, "a", "b")
    expect_equal_dtypes(inputs)
    return (TensorType(DType.BOOL, broadcast_shape(a.shape, b.shape)),)


@infer_type.of(WHERE)
def _where_type(inputs: Types, attrs: Attrs) -> Types:
    condition, a, b = expect_inputs(inputs, "condition", "a", "b")
    if condition.dtype is not DType.BOOL:
        raise OpTypeError(
            f"needs a bool condition, got {condition.dtype}; compare it first, e.g. condition != 0"
        )
    dtype = expect_equal_dtypes((a, b))
    return (TensorType(dtype, broadcast_shape(condition.shape, a.shape, b.shape)),)


for _op in (ADD, SUB, MUL, DIV, MAXIMUM, MINIMUM, WHERE):
    is_exact.register(_op, True)
for _op in (EQUAL, NOT_EQUAL, LESS, LESS_EQUAL, GREATER, GREATER_EQUAL):
    is_exact.register(_op, True)

reference.register(ADD, pointwise(np.add))
reference.register(SUB, pointwise(np.subtract))
reference.register(MUL, pointwise(np.multiply))
reference.register(DIV, pointwise(np.divide))
reference.register(POW, pointwise(np.power))
reference.register(MAXIMUM, pointwise(np.maximum))
reference.register(MINIMUM, pointwise(np.minimum))
reference.register(EQUAL, pointwise(np.equal))
reference.register(NOT_EQUAL, pointwise(np.not_equal))
reference.register(LESS, pointwise(np.less))
reference.register(LESS_EQUAL, pointwise(np.less_equal))
reference.register(GREATER, pointwise(np.greater))
reference.register(GREATER_EQUAL, pointwise(np.greater_equal))
reference.register(WHERE, pointwise(np.where))


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
