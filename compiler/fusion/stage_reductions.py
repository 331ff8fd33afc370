"""Cut reductions to one number in two, so that the larger part can be walked over by rows.

    mean(x, all axes)  ->  mean(mean(x, last axis), the other axes)

A fused kernel reduces rows; one row of all elements could not be shared among threads, nor walked
over together with what made it. The mean of equally many means is the mean.

Guarantees: the same values but for rounding; no other node changes.
"""

from __future__ import annotations

from dataclasses import replace

from compiler.attrs import Attrs
from compiler.graph import Graph, Node
from compiler.ops.reduce import MAX, MEAN, SUM
from compiler.types import TensorType, ValueId


def stage_reductions(graph: Graph) -> Graph:
    """Return the graph with reductions of matrices to one number in two nodes. O(nodes)."""
    types = list(graph.types)
    nodes: list[Node] = []
    for node in graph.nodes:
        if _is_total(node, types):
            nodes += _staged(node, types)
        else:
            nodes.append(node)
    if len(nodes) == len(graph.nodes):
        return graph
    return replace(graph, nodes=tuple(nodes), types=tuple(types))


def _is_total(node: Node, types: list[TensorType]) -> bool:
    """Whether a node reduces a float tensor with several rows and columns to one number."""
    if node.op not in (SUM, MEAN, MAX):
        return False
    x = types[node.inputs[0]]
    if x.rank < 2 or node.attrs.ints("axes") != tuple(range(x.rank)):
        return False
    return x.dtype.is_float and x.shape[-1] > 1 and x.num_elements > x.shape[-1]


def _staged(node: Node, types: list[TensorType]) -> list[Node]:
    x = types[node.inputs[0]]
    kept = node.attrs.bool_("keepdims")
    axes = node.attrs.ints("axes")
    middle = ValueId(len(types))
    types.append(TensorType(x.dtype, (*x.shape[:-1], 1) if kept else x.shape[:-1]))
    first = Attrs({"axes": axes[-1:], "keepdims": kept})
    rest = Attrs({"axes": axes[:-1], "keepdims": kept})
    return [
        replace(node, outputs=(middle,), attrs=first),
        replace(node, inputs=(middle,), attrs=rest),
    ]
