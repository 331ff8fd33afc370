"""Drop what nothing needs: the one way in which nodes leave a graph."""

from __future__ import annotations

from compiler.graph import Graph, GraphBuilder, Node
from compiler.types import ValueId


def prune(graph: Graph) -> Graph:
    """Return the graph with only the nodes that roots need, and dense value ids. O(nodes).

    A pass that gives a reader something else to read leaves the old node where it is, and its last
    line is this: so no pass decides by itself what is still read.
    """
    needed = [False] * len(graph.types)
    for value in graph.roots():
        needed[value] = True
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if any([needed[v] for v in node.outputs]):
            kept.append(node)
            for value in node.inputs:
                needed[value] = True
    kept.reverse()
    if len(kept) == len(graph.nodes) and _is_dense(graph):
        return graph
    new_id: list[ValueId] = [ValueId(-1)] * len(graph.types)
    b = GraphBuilder()
    for node in kept:
        inputs = tuple([new_id[v] for v in node.inputs])
        outputs = b.copy(node, inputs, [graph.types[v] for v in node.outputs])
        for old, new in zip(node.outputs, outputs, strict=True):
            new_id[old] = new
    return b.freeze_as(graph, new_id)


def _is_dense(graph: Graph) -> bool:
    """Whether the values are numbered as their nodes stand, and every number is a value."""
    values = [value for node in graph.nodes for value in node.outputs]
    return values == list(range(len(graph.types)))
