"""Join rows of several tables where they are picked.

    concat(embedding(w0, ids0), x, embedding(w1, ids1), ...)  ->  embedding_concat(...)

along the last axis, for every embedding that only this concat reads. Runs behind autodiff, whose
gradients of both read the gradient of the whole, and the ids.

Guarantees: no concat along the last axis is the only reader of an embedding.
"""

from __future__ import annotations

from dataclasses import replace

from compiler.attrs import Attrs
from compiler.graph import Graph, Node, consumers
from compiler.ops.embedding import EMBEDDING
from compiler.ops.embedding_concat import EMBEDDING_CONCAT
from compiler.ops.slicing import CONCAT
from compiler.types import ValueId


def run(graph: Graph) -> Graph:
    """Return the graph with these nodes in one. O(nodes)."""
    lookups = {node.outputs[0]: node for node in graph.nodes if node.op is EMBEDDING}
    if not lookups:
        return graph
    readers, roots = consumers(graph), set(graph.roots())
    alone = {v: node for v, node in lookups.items() if len(readers[v]) == 1 and v not in roots}
    nodes: list[Node] = []
    dropped: set[ValueId] = set()
    for node in graph.nodes:
        parts = [alone.get(value) for value in node.inputs]
        if not _joins_last_axis(graph, node) or not any(parts):
            nodes.append(node)
            continue
        inputs: list[ValueId] = []
        for value, lookup in zip(node.inputs, parts, strict=True):
            inputs += [value] if lookup is None else lookup.inputs
            dropped.update(() if lookup is None else (value,))
        picked = tuple([int(lookup is not None) for lookup in parts])
        attrs = Attrs({"picked": picked})
        nodes.append(replace(node, op=EMBEDDING_CONCAT, inputs=tuple(inputs), attrs=attrs))
    left = [node for node in nodes if not node.outputs or node.outputs[0] not in dropped]
    return replace(graph, nodes=tuple(left))


def _joins_last_axis(graph: Graph, node: Node) -> bool:
    if node.op is not CONCAT:
        return False
    return node.attrs.int_("axis") == graph.types[node.outputs[0]].rank - 1
