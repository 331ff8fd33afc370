"""Reverse-mode differentiation of a graph that is being built.

Source: Griewank & Walther, Evaluating Derivatives, 2008, ch. 3.

Walks the nodes backwards from what is differentiated; each op's `gradient` column emits ordinary
nodes into the same graph, with the scope, source and device of the forward node. So what comes out
can be differentiated again, as far as the ops it is made of can. Contributions to one value are
added where the value was made, in the order in which the walk meets them, so the result is
deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compiler.errors import CompileError
from compiler.graph import GraphBuilder, Node
from compiler.ops.binary import ADD
from compiler.ops.shape import STOP_GRADIENT
from compiler.ops.slicing import joined_pads
from compiler.rules import gradient
from compiler.types import Phase, ValueId


def emit_gradients(
    b: GraphBuilder, seeds: Mapping[ValueId, ValueId], wanted: Sequence[ValueId]
) -> dict[ValueId, ValueId]:
    """Emit the gradients of the values `wanted`; O(nodes).

    `seeds` has, by value that is differentiated, the gradient that flows into it. A wanted value
    that reaches none of them has no entry in the result. Raises CompileError naming op and user
    line where an op on the way has no gradient.
    """
    nodes = tuple(b.nodes)
    depends = _depends_on(b, nodes, wanted)
    gradients = {value: seed for value, seed in seeds.items() if depends[value]}
    for node in reversed(nodes):
        flowing = tuple([gradients.get(v) for v in node.outputs])
        if not any([depends[v] for v in node.inputs]) or all([g is None for g in flowing]):
            continue
        with b.beside(node, Phase.BACKWARD):
            for value, gradient_value in zip(node.inputs, _pull(b, node, flowing), strict=True):
                if gradient_value is None or not depends[value]:
                    continue
                earlier = gradients.get(value)
                if earlier is not None:
                    with b.on(b.producer_of(value).device):
                        gradient_value = _sum(b, earlier, gradient_value)
                gradients[value] = gradient_value
    return {value: gradients[value] for value in wanted if value in gradients}


def _depends_on(b: GraphBuilder, nodes: Sequence[Node], wanted: Sequence[ValueId]) -> list[bool]:
    depends = [False] * len(b.types)
    for value in wanted:
        depends[value] = True
    for node in nodes:
        if node.op is not STOP_GRADIENT and any([depends[v] for v in node.inputs]):
            for value in node.outputs:
                depends[value] |= b.types[value].dtype.is_float
    return depends


def _sum(b: GraphBuilder, one: ValueId, other: ValueId) -> ValueId:
    """Emit a sum of gradients; those of slices that lie side by side are joined before."""
    joined = joined_pads(b, one, other)
    if joined is not None:
        return joined
    before = b.producer_of(one)
    if before.op is ADD:
        joined = joined_pads(b, before.inputs[1], other)
    return b.one(ADD, one, other) if joined is None else b.one(ADD, before.inputs[0], joined)


def _pull(
    b: GraphBuilder, node: Node, flowing: tuple[ValueId | None, ...]
) -> tuple[ValueId | None, ...]:
    if not gradient.has(node.op):
        raise CompileError(
            f"{node.source}: {node.op} has no gradient, but a parameter is reached only through it;"
            " cut the path with .detach(), or register a gradient for the op"
        )
    return gradient.get(node.op)(b, node, flowing)
