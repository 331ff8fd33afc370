"""Drop what nothing needs: the one way in which nodes leave a graph."""

from __future__ import annotations

from compiler.graph import Graph, GraphBuilder, Node, mark_needed, numbers
from compiler.types import ValueId


def prune(graph: Graph) -> Graph:
    """Return the graph with only the nodes that roots need, and dense value ids. O(nodes).

    A pass that gives a reader something else to read leaves the old node where it is, and its last
    line is this: so no pass decides by itself what is still read.
    """
    kept = needed_nodes(graph)
    if len(kept) == len(graph.nodes) and _is_dense(graph):
        return graph
    # Not by `GraphBuilder.copy`: half of the time of a compilation's rewrites would go there.
    new_id: list[ValueId] = [ValueId(-1)] * len(graph.types)
    b = GraphBuilder()
    types, nodes = b.types, b.nodes
    for node in kept:
        inputs = tuple([new_id[v] for v in node.inputs])
        outputs = numbers(len(types), len(node.outputs))
        for value, new in zip(node.outputs, outputs, strict=True):
            new_id[value] = new
            types.append(graph.types[value])
        is_same = inputs == node.inputs and outputs == node.outputs
        nodes.append(node if is_same else node.with_values(inputs, outputs))
    return b.freeze_as(graph, new_id)


def needed_nodes(graph: Graph) -> list[Node]:
    """Return the nodes that roots need, in order."""
    marks = mark_needed(graph, graph.roots())
    return [node for node, is_needed in zip(graph.nodes, marks, strict=True) if is_needed]


def _is_dense(graph: Graph) -> bool:
    """Whether the values are numbered as their nodes stand, and every number is a value."""
    values = [value for node in graph.nodes for value in node.outputs]
    return values == list(range(len(graph.types)))
