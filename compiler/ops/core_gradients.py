"""Gradients of `elementwise`, `binary`, `reduce` and `shape`, written in terms of one another.

A rule prefers the node's output over its input where both serve (exp, sqrt, div): inputs can die.
Formulas: Griewank & Walther, Evaluating Derivatives (2008), table 2.3 and section 3.2.
"""

from __future__ import annotations

from compiler.graph import GraphBuilder, Node
from compiler.ops.binary import (
    ADD,
    DIV,
    EQUAL,
    GREATER_EQUAL,
    LESS,
    LESS_EQUAL,
    MAXIMUM,
    MINIMUM,
    MUL,
    POW,
    SUB,
    WHERE,
    scaled,
)
from compiler.ops.elementwise import (
    ABS,
    CAST,
    COS,
    EXP,
    LOG,
    NEG,
    RECIPROCAL,
    RSQRT,
    SIN,
    SQRT,
    SQUARE,
    cast_to,
)
from compiler.ops.reduce import MAX, MEAN, SUM, kept_shape, num_reduced, sum_to
from compiler.ops.rule import Grads, gradient_of
from compiler.ops.shape import (
    BROADCAST_TO,
    COPY,
    RESHAPE,
    STOP_GRADIENT,
    TRANSPOSE,
    broadcast_value,
    reshape_to,
)
from compiler.ops.sources import CONSTANT, scalar
from compiler.types import ValueId


@gradient_of(NEG)
def _neg(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return (b.one(NEG, dy),)


@gradient_of(ABS)
def _abs(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    (x,) = node.inputs
    zero = scalar(b, 0.0, b.type_of(x).dtype)
    signed = b.one(WHERE, b.one(LESS, x, zero), b.one(NEG, dy), dy)
    return (b.one(WHERE, b.one(EQUAL, x, zero), zero, signed),)


@gradient_of(SQUARE)
def _square(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return (b.one(MUL, scaled(b, dy, 2.0), node.inputs[0]),)


@gradient_of(EXP)
def _exp(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return (b.one(MUL, dy, node.outputs[0]),)


@gradient_of(LOG)
def _log(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return (b.one(DIV, dy, node.inputs[0]),)


@gradient_of(SQRT)
def _sqrt(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return (b.one(DIV, scaled(b, dy, 0.5), node.outputs[0]),)


@gradient_of(RSQRT)
def _rsqrt(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    y = node.outputs[0]
    return (b.one(MUL, scaled(b, dy, -0.5), b.one(MUL, y, b.one(SQUARE, y))),)


@gradient_of(RECIPROCAL)
def _reciprocal(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return (b.one(NEG, b.one(MUL, dy, b.one(SQUARE, node.outputs[0]))),)


@gradient_of(SIN)
def _sin(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return (b.one(MUL, dy, b.one(COS, node.inputs[0])),)


@gradient_of(COS)
def _cos(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return (b.one(NEG, b.one(MUL, dy, b.one(SIN, node.inputs[0]))),)


@gradient_of(CAST)
def _cast(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    dtype = b.type_of(node.inputs[0]).dtype
    return (cast_to(b, dy, dtype) if dtype.is_float else None,)


def _fit(b: GraphBuilder, node: Node, *grads: ValueId | None) -> Grads:
    """Sum each gradient over the axes along which its input was stretched."""
    pairs = zip(grads, node.inputs, strict=True)
    return tuple(None if g is None else sum_to(b, g, b.type_of(v).shape) for g, v in pairs)


@gradient_of(ADD)
def _add(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return _fit(b, node, dy, dy)


@gradient_of(SUB)
def _sub(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    da, db = _fit(b, node, dy, dy)
    return da, None if db is None else b.one(NEG, db)


@gradient_of(MUL)
def _mul(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    x, y = node.inputs
    return _fit(b, node, b.one(MUL, dy, y), b.one(MUL, dy, x))


@gradient_of(DIV)
def _div(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    """Divide y and not dy for the second: with a small b, dy / b may be infinite where y is 0."""
    da = b.one(DIV, dy, node.inputs[1])
    slope = b.one(DIV, node.outputs[0], node.inputs[1])
    return _fit(b, node, da, b.one(NEG, b.one(MUL, dy, slope)))


@gradient_of(POW)
def _pow(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    """0^0 counts as constant in both arguments, as does 0^b in b; so no NaN arises from 0 * inf."""
    x, exponent = node.inputs
    dtype = b.type_of(x).dtype
    zero = scalar(b, 0.0, dtype)
    lowered = b.one(POW, x, b.one(SUB, exponent, scalar(b, 1.0, dtype)))
    dx = b.one(MUL, dy, b.one(MUL, exponent, lowered))
    dx = b.one(WHERE, b.one(EQUAL, exponent, zero), zero, dx)
    if b.producer_of(exponent).op is CONSTANT:
        return _fit(b, node, dx, None)
    logs = b.one(MUL, node.outputs[0], b.one(LOG, x))
    logs = b.one(WHERE, b.one(EQUAL, x, zero), zero, logs)
    return _fit(b, node, dx, b.one(MUL, dy, logs))


@gradient_of(MAXIMUM, MINIMUM)
def _extremum(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    x, y = node.inputs
    zero = scalar(b, 0.0, b.type_of(dy).dtype)
    share = b.one(WHERE, b.one(EQUAL, x, y), scaled(b, dy, 0.5), dy)
    wins, loses = (GREATER_EQUAL, LESS_EQUAL) if node.op is MAXIMUM else (LESS_EQUAL, GREATER_EQUAL)
    dx = b.one(WHERE, b.one(wins, x, y), share, zero)
    return _fit(b, node, dx, b.one(WHERE, b.one(loses, x, y), share, zero))


@gradient_of(WHERE)
def _where(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    condition = node.inputs[0]
    zero = scalar(b, 0.0, b.type_of(dy).dtype)
    da, db = b.one(WHERE, condition, dy, zero), b.one(WHERE, condition, zero, dy)
    return _fit(b, node, None, da, db)


@gradient_of(SUM)
def _sum(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return (_stretch(b, node, dy),)


@gradient_of(MEAN)
def _mean(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    count = num_reduced(node.attrs, b.type_of(node.inputs[0]).shape)
    return (_stretch(b, node, scaled(b, dy, 1.0 / count)),)


def _stretch(b: GraphBuilder, node: Node, dy: ValueId) -> ValueId:
    """Repeat the gradient of a reduction along the reduced axes: a view."""
    shape = b.type_of(node.inputs[0]).shape
    return broadcast_value(b, reshape_to(b, dy, kept_shape(shape, node.attrs.ints("axes"))), shape)


@gradient_of(MAX)
def _max(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    (x,) = node.inputs
    dtype, shape = b.type_of(x).dtype, b.type_of(x).shape
    axes = node.attrs.ints("axes")
    kept = kept_shape(shape, axes)
    is_largest = b.one(EQUAL, x, reshape_to(b, node.outputs[0], kept))
    ties = b.one(SUM, cast_to(b, is_largest, dtype), axes=axes, keepdims=True)
    share = b.one(DIV, reshape_to(b, dy, kept), ties)
    return (b.one(WHERE, is_largest, share, scalar(b, 0.0, dtype)),)


@gradient_of(RESHAPE)
def _reshape(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return (reshape_to(b, dy, b.type_of(node.inputs[0]).shape),)


@gradient_of(TRANSPOSE)
def _transpose(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    perm = node.attrs.ints("perm")
    inverse = tuple(perm.index(axis) for axis in range(len(perm)))
    return (b.one(TRANSPOSE, dy, perm=inverse),)


@gradient_of(BROADCAST_TO)
def _broadcast_to(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return _fit(b, node, dy)


@gradient_of(STOP_GRADIENT)
def _stop_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return (None,)


@gradient_of(COPY)
def _copy(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return (dy,)
