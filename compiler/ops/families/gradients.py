"""Reverse-mode differentiation of a graph that is being built, and gradients of primitives.

Source: Griewank & Walther, Evaluating Derivatives, 2008, ch. 3.

`emit_gradients` walks the nodes backwards from what is differentiated; each op's `gradient` column
emits ordinary nodes into the same graph, with the scope, source and device of the forward node. So
what comes out can be differentiated again, as far as the ops it is made of can. Contributions to
one value are added where the value was made, in the order in which the walk meets them, so the
result is deterministic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from compiler.contract.errors import CompileError
from compiler.contract.types import Phase, ValueId
from compiler.graph.columns import Grads, LocalCall, gradient_of, project
from compiler.graph.graph import GraphBuilder, Node, gradient
from compiler.ops.families.arithmetic import (
    ADD,
    BITWISE_OR,
    DIV,
    EQUAL,
    NOT_EQUAL,
    WHERE,
    scaled,
)
from compiler.ops.primitives.reduce import ARGMAX, MAX, MEAN, SUM, kept_shape, num_reduced, sum_to
from compiler.ops.primitives.shape import (
    BROADCAST_TO,
    COPY,
    RESHAPE,
    STOP_GRADIENT,
    TRANSPOSE,
    broadcast_value,
    cast_to,
    reshape_to,
)
from compiler.ops.primitives.slicing import joined_pads
from compiler.ops.primitives.sources import constant, scalar


def emit_gradients(
    b: GraphBuilder, seeds: Mapping[ValueId, ValueId], wanted: Sequence[ValueId]
) -> dict[ValueId, ValueId]:
    """Emit the gradients of the values `wanted`; O(nodes that `seeds` are made by).

    `seeds` has, by value that is differentiated, the gradient that flows into it. A wanted value
    that reaches none of them has no entry in the result. Raises CompileError naming op and user
    line where an op on the way has no gradient.
    """
    nodes = _makers(b, seeds)
    depends = _depends_on(b, nodes, wanted)
    gradients = {value: seed for value, seed in seeds.items() if value in depends}
    for node in reversed(nodes):
        flowing = tuple([gradients.get(v) for v in node.outputs])
        if depends.isdisjoint(node.inputs) or all([g is None for g in flowing]):
            continue
        with b.like_node(node, Phase.BACKWARD):
            for value, gradient_value in zip(node.inputs, _pull(b, node, flowing), strict=True):
                if gradient_value is None or value not in depends:
                    continue
                earlier = gradients.get(value)
                if earlier is not None:
                    with b.on(b.producer_of(value).device):
                        gradient_value = _sum_gradients(b, earlier, gradient_value)
                gradients[value] = gradient_value
    return {value: gradients[value] for value in wanted if value in gradients}


def _makers(b: GraphBuilder, values: Iterable[ValueId]) -> list[Node]:
    """Return the nodes that values are made by, directly or not, in their order."""
    made_by, todo = set[int](), [b.index_of_producer(value) for value in values]
    while todo:
        index = todo.pop()
        if index not in made_by:
            made_by.add(index)
            todo += [b.index_of_producer(value) for value in b.nodes[index].inputs]
    return [b.nodes[index] for index in sorted(made_by)]


def _depends_on(b: GraphBuilder, nodes: Sequence[Node], wanted: Sequence[ValueId]) -> set[ValueId]:
    """Return the floats that nodes make of the values `wanted`, and these."""
    depends = set(wanted)
    for node in nodes:
        if node.op is not STOP_GRADIENT and not depends.isdisjoint(node.inputs):
            depends.update([v for v in node.outputs if b.types[v].dtype.is_float])
    return depends


def _sum_gradients(b: GraphBuilder, one: ValueId, other: ValueId) -> ValueId:
    """Emit a sum of gradients; those of slices that lie side by side are joined before."""
    joined = joined_pads(b, one, other)
    if joined is not None:
        return joined
    before = b.producer_of(one)
    if before.op is ADD:
        joined = joined_pads(b, before.inputs[1], other)
    return (
        b.emit_one(ADD, one, other) if joined is None else b.emit_one(ADD, before.inputs[0], joined)
    )


def _pull(
    b: GraphBuilder, node: Node, flowing: tuple[ValueId | None, ...]
) -> tuple[ValueId | None, ...]:
    if not gradient.has(node.op):
        raise CompileError(
            f"{node.source}: {node.op} has no gradient, but a parameter is reached only through it;"
            " cut the path with .detach(), or register a gradient for the op"
        )
    return gradient.get(node.op)(b, node, flowing)


# Gradients of the primitives in `reduce` and `shape`: they emit arithmetic, so they stand above it.


@gradient_of(SUM)
def _gradient_of_sum(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
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
    reduced = kept_shape(shape, axes)
    if "by_place" in node.attrs:
        (axis,) = axes
        numbers = np.arange(shape[axis]).reshape(-1, *[1] * (len(shape) - 1 - axis))
        place = b.emit_one(ARGMAX, x, axis=axis, keepdims=True)
        is_there = b.emit_one(EQUAL, constant(b, numbers), place)
        return (b.emit_one(WHERE, is_there, reshape_to(b, dy, reduced), scalar(b, 0.0, dtype)),)
    largest = reshape_to(b, node.outputs[0], reduced)
    is_largest, elsewhere = b.emit_one(EQUAL, x, largest), scalar(b, 0.0, dtype)
    if "nan_shares" in node.attrs:
        is_largest = b.emit_one(BITWISE_OR, is_largest, b.emit_one(NOT_EQUAL, x, x))
    else:
        elsewhere = b.emit_one(WHERE, b.emit_one(EQUAL, largest, largest), elsewhere, largest)
    ties = b.emit_one(SUM, cast_to(b, is_largest, dtype), axes=axes, keepdims=True)
    share = b.emit_one(DIV, reshape_to(b, dy, reduced), ties)
    return (b.emit_one(WHERE, is_largest, share, elsewhere),)


@gradient_of(RESHAPE)
def _reshape(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return (reshape_to(b, dy, b.type_of(node.inputs[0]).shape),)


@gradient_of(TRANSPOSE)
def _transpose(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    perm = node.attrs.ints("perm")
    inverse = tuple(perm.index(axis) for axis in range(len(perm)))
    return (b.emit_one(TRANSPOSE, dy, perm=inverse),)


@gradient_of(BROADCAST_TO)
def _broadcast_to(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return (sum_to(b, dy, b.type_of(node.inputs[0]).shape),)


gradient_of(STOP_GRADIENT)(lambda b, node, dy: (None,))
gradient_of(COPY)(lambda b, node, dy: (dy,))


@project.of(MEAN)
def _mean_of_parts(b: GraphBuilder, call: LocalCall) -> tuple[ValueId, ...]:
    """Divide by how many elements the whole has."""
    from compiler.ops.families.arithmetic import (
        scaled,  # defined by a program, which a sum is part of
    )

    (x,), attrs = call.inputs, call.node.attrs
    count = num_reduced(attrs, call.whole_inputs[0].shape)
    if num_reduced(attrs, b.type_of(x).shape) == count:
        return b.emit(MEAN, (x,), attrs)
    return (scaled(b, b.emit(SUM, (x,), attrs)[0], 1.0 / count),)
