"""Tensors between places: the one op that takes bytes from one memory to another.

A value lies in the memory of the device that its node computes on. Two kinds of nodes say
otherwise: a copy, whose value lies in the place `to`, and a source with an attribute `place`. A
place is the number of a device of the job, or HOST_SIDE, the memory of the host that devices copy
from and to. Nothing computes there: it holds what comes from outside and what goes there, and what
a device need not hold all the time.

A copy is one launch of the plain copy kernel. It runs in an actor of kind copy, on a stream of its
own for each direction, so that it overlaps with compute. Copies with the same `bucket` run in one
actor. What flows back through a copy that the user wrote needs none of its own: like any value it
is brought to where it is read (`compiler.passes.insert_copies`).
"""

from __future__ import annotations

import numpy as np

from compiler.attrs import Attrs
from compiler.facts import fact
from compiler.graph import Graph, GraphBuilder, Node
from compiler.ops.rule import Grads, array_of, gradient_of
from compiler.ops.signature import Array, Types, typed
from compiler.registry import Cost, cost, define, infer_type, is_exact, is_source, view, writes
from compiler.registry import recompute as may_repeat
from compiler.types import ValueId

COPY_TO = define("copy_to")
"""x -> x in place `to`; with a second input, over that variable. Attrs: to, bucket."""

COPY_BLOCK = define("copy_block")
"""x, ... -> x, ...: neighbours in memory, there and here alike, as one copy. Attrs: size_bytes.

The block has so many bytes, from the first tensor to the end of the last; what lies between two of
them is nobody's. No graph has it: lowering makes it of what it has given places, and
`compiler.blocks` proves those.
"""

writes.register(COPY_TO, ((0, 1),))
is_exact.register(COPY_TO, True)
may_repeat.register(COPY_TO, False)
typed(COPY_TO, "x, variable? = x -> x")
infer_type.register(COPY_BLOCK, lambda inputs, attrs: inputs)


def is_copy(node: Node) -> bool:
    """Whether a node takes a value from one place to another."""
    return node.op is COPY_TO


@fact
def places(graph: Graph) -> tuple[int, ...]:
    """Return, per value, the number of the device where it lies, or HOST_SIDE. O(nodes)."""
    column = [0] * len(graph.types)
    for node in graph.nodes:
        if is_copy(node):
            place = node.attrs.int_("to")
        elif is_source.get(node.op):
            place = node.attrs.int_("place") if "place" in node.attrs else node.device
        elif view.has(node.op):
            place = column[node.inputs[0]]
        else:
            place = node.device
        for value in node.outputs:
            column[value] = place
    return tuple(column)


def place_number(graph: Graph, value: ValueId) -> int:
    """Return the number of the device where a value lies, or HOST_SIDE."""
    return places(graph)[value]


def next_bucket(graph: Graph) -> int:
    """Return a bucket that no copy of a graph is in, nor any above it."""
    return max([node.attrs.int_("bucket") for node in graph.nodes if is_copy(node)], default=-1) + 1


@array_of(COPY_TO)
def _copy(attrs: Attrs, x: Array, *over: Array) -> Array:
    return np.array(x)


@gradient_of(COPY_TO)
def _pass_on(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return (dy, *[None for _ in node.inputs[1:]])


@cost.of(COPY_TO)
def _copy_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    return Cost(0.0, float(inputs[0].size_bytes + outputs[0].size_bytes))
