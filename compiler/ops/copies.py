"""Tensors between the memory of the device and that of its host.

Host memory is for what the device need not hold all the time. Nothing computes there: a value goes
in before it is read and out after it was made. A copy is one launch of the plain copy kernel; it
runs in an actor of kind copy, on a stream of its own for each direction, so that it overlaps with
compute. Copies with the same `bucket` run in one actor.

Only the pass `offload` emits these ops, behind `order`; they have no gradient.
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from compiler.attrs import Attrs
from compiler.graph import Graph, Node
from compiler.ops.rule import array_of
from compiler.ops.signature import Array, Types, typed
from compiler.ops.sources import VARIABLE
from compiler.registry import Cost, OpAttr, cost, define, is_exact, writes
from compiler.registry import recompute as may_repeat
from compiler.types import ValueId


class Copies(Enum):
    """Which way a copy goes."""

    IN = "in"
    OUT = "out"


copies = OpAttr[Copies](
    "copies",
    "which way the op moves a tensor between host and device memory, in an actor of its own; read"
    " by lowering",
)

COPY_IN = define("copy_in")
"""x in host memory -> x on the device. Attrs: bucket."""

COPY_OUT = define("copy_out")
"""x on the device -> x in host memory. Attrs: bucket."""

COPY_BACK = define("copy_back")
"""x on the device, variable in host memory -> x, over the variable. Attrs: bucket."""

HOST_MEMORY = "host"
"""Attribute `memory` of a variable that lives in host memory; others have none."""

copies.register(COPY_IN, Copies.IN)
copies.register(COPY_OUT, Copies.OUT)
copies.register(COPY_BACK, Copies.OUT)
writes.register(COPY_BACK, ((0, 1),))

for _op in (COPY_IN, COPY_OUT, COPY_BACK):
    is_exact.register(_op, True)
    may_repeat.register(_op, False)


def direction(node: Node) -> Copies | None:
    """Return which way a node copies, or None for one that does not."""
    return copies.get(node.op) if copies.has(node.op) else None


def is_host_variable(node: Node) -> bool:
    """Whether a node is a variable that lives in host memory."""
    return node.op is VARIABLE and node.attrs.get("memory") == HOST_MEMORY


def host_values(graph: Graph) -> frozenset[ValueId]:
    """Return the values that live in host memory: such variables, and what was copied out."""
    return frozenset(
        [
            value
            for node in graph.nodes
            if is_host_variable(node) or direction(node) is Copies.OUT
            for value in node.outputs
        ]
    )


typed(COPY_IN, "x -> x")
typed(COPY_OUT, "x -> x")
typed(COPY_BACK, "x, variable = x -> x")


@array_of(COPY_IN, COPY_OUT, COPY_BACK)
def _copy(attrs: Attrs, x: Array, *over: Array) -> Array:
    return np.array(x)


@cost.of(COPY_IN, COPY_OUT, COPY_BACK)
def _copy_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    return Cost(0.0, float(inputs[0].size_bytes + outputs[0].size_bytes))
