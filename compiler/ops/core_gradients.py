"""Gradients of `reduce` and `shape`, written in terms of their ops and of arithmetic.

Griewank & Walther, Evaluating Derivatives (2008), section 3.2.
"""

from __future__ import annotations

import numpy as np

from compiler.graph import GraphBuilder, Node
from compiler.ops.binary import DIV, EQUAL, WHERE, scaled
from compiler.ops.elementwise import cast_to
from compiler.ops.reduce import ARGMAX, MAX, MEAN, SUM, kept_shape, num_reduced, sum_to
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
from compiler.ops.sources import constant, scalar
from compiler.types import ValueId


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
    if "by_place" in node.attrs:
        (axis,) = axes
        numbers = np.arange(shape[axis]).reshape(-1, *[1] * (len(shape) - 1 - axis))
        place = b.one(ARGMAX, x, axis=axis, keepdims=True)
        is_there = b.one(EQUAL, constant(b, numbers), place)
        return (b.one(WHERE, is_there, reshape_to(b, dy, kept), scalar(b, 0.0, dtype)),)
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
    return (sum_to(b, dy, b.type_of(node.inputs[0]).shape),)


gradient_of(STOP_GRADIENT)(lambda b, node, dy: (None,))
gradient_of(COPY)(lambda b, node, dy: (dy,))
