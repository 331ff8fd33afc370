"""Put in the place of updates that need norms or products what they are made of.

    lamb_update(w, dw, m, v, lr, step)
      ->  change = ...; trust = |w| / |change|;  lamb_step(w, dw, m, v, lr * trust, step)

It runs once gradients are final: without a loss scale, of all ranks, and with the flag of broken
steps on every update. What parameters share, such as powers of the step, is then computed once.

Guarantees: every update that is left has a program.
"""

from __future__ import annotations

from compiler.fusion.staged import stages
from compiler.graph import Graph, GraphBuilder
from compiler.passes import simplify
from compiler.types import ValueId


def run(graph: Graph) -> Graph:
    """Return the graph with updates by programs alone. O(nodes)."""
    if not any([stages.has(node.op) for node in graph.nodes]):
        return graph
    b, new_id = GraphBuilder(), [ValueId(-1)] * len(graph.types)
    for node in graph.nodes:
        inputs = tuple([new_id[value] for value in node.inputs])
        if stages.has(node.op):
            with b.beside(node):
                outputs = stages.get(node.op).emit(b, inputs, node.attrs)
        else:
            outputs = b.copy(node, inputs, [graph.types[v] for v in node.outputs])
        for before, after in zip(node.outputs, outputs, strict=True):
            new_id[before] = after
    return simplify.run(b.freeze_as(graph, new_id))
