"""Give every output of the job bytes of its own.

So it can live in a register that a consumer reads later. An output that is a view, an input, a
variable, a constant, or the same value as an earlier output gets a `copy` node; all others are
produced in place in the register.

Guarantees: every output value is the dense root of its storage, produced by a launch, and named
once.
"""

from __future__ import annotations

from compiler.graph import Graph, GraphBuilder, Output
from compiler.ops.shape import COPY
from compiler.storage import assign_storage
from compiler.types import ValueId


def run(graph: Graph) -> Graph:
    """Return the graph with a copy node for each output that needs one. O(nodes)."""
    storage = assign_storage(graph)
    producers = graph.producers()
    b = GraphBuilder.continuing(graph)
    taken: set[ValueId] = set()
    outputs: list[Output] = []
    for output in graph.outputs:
        value = output.value
        owns = storage.root[value] == value and storage.is_launch[producers[value]]
        if not owns or value in taken:
            node = graph.nodes[producers[value]]
            with b.at(node.scope, node.source):
                value = b.one(COPY, value)
        taken.add(value)
        outputs.append(Output(output.name, value))
    b.outputs = outputs
    return b.freeze()
