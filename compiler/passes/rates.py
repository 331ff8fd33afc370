"""Let nothing be shared between what runs once per batch and what runs once per step.

What both need (a learning rate that is also a metric) is computed in each: values would otherwise
have to cross between two rates, and all that both can need follows from variables alone.

Guarantees: where a step sums gradients over batches, only sources and the sums are read at both
rates.
"""

from __future__ import annotations

from dataclasses import replace

from compiler.errors import CompileError
from compiler.graph import Graph, Node, new_value
from compiler.ops.sources import INPUT
from compiler.rates import needed_per_batch, needed_per_step
from compiler.registry import is_source
from compiler.turns import apart_by_rates
from compiler.types import ValueId


def run(graph: Graph) -> Graph:
    """Return the graph with a second node for each one that both rates need. O(nodes)."""
    per_step = needed_per_step(graph)
    if not any(per_step):
        return graph
    per_batch = needed_per_batch(graph)
    types = list(graph.types)
    nodes: list[Node] = []
    twin_of: dict[ValueId, ValueId] = {}
    for index, node in enumerate(graph.nodes):
        if not per_step[index] or is_source.get(node.op):
            _check_rate(node, is_per_step=per_step[index])
            nodes.append(node)
            continue
        inputs = tuple([twin_of.get(v, v) for v in node.inputs])
        if not per_batch[index]:
            nodes.append(replace(node, inputs=inputs))
            continue
        outputs = tuple([new_value(types, graph.types[v]) for v in node.outputs])
        twin_of.update(zip(node.outputs, outputs, strict=True))
        node, twin = apart_by_rates(node)
        nodes += [node, replace(twin, inputs=inputs, outputs=outputs)]
    return replace(graph, nodes=tuple(nodes), types=tuple(types))


def _check_rate(node: Node, *, is_per_step: bool) -> None:
    if is_per_step and node.op is INPUT:
        raise CompileError(
            f"{node.source}: the optimizer reads batch[{node.attrs['name']!r}]; it runs once per"
            " step, after several batches, so it can read parameters, gradients and counters only"
        )
