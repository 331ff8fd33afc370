"""Prune, fold constants, merge common subexpressions, apply each op's own algebra, all exact.

One walk in topological order copies the graph into a fresh builder: a node is replaced by what its
`simplify` column says, folded through its `reference` when the op `is_exact`, all inputs are
constants and the result is small, or merged with an equal node emitted before. Then everything no
root needs is dropped.

Results stay bit-identical: exp, gelu, a sum over an axis and their like are not folded, because
the bits of a kernel that approximates, or adds in another order, are not the reference's. The one
exception is a power with the constant exponent 1 or 2, which becomes x or its square: these are
correctly rounded, and a kernel's pow may be a unit in the last place beside them.

Guarantees: no unused node, no two equal pure nodes, no foldable node under FOLD_LIMIT_BYTES.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from compiler.attrs import Attrs
from compiler.graph import Graph, GraphBuilder, Node, remap
from compiler.ops.sources import CONSTANT, constant_array
from compiler.registry import Op, is_exact, reference, view, writes
from compiler.rules import simplify
from compiler.types import TensorType, ValueId

FOLD_LIMIT_BYTES = 1 << 16
"""Larger constants cost more to store and load than to compute."""


MAX_ROUNDS = 8
"""A rewrite may uncover another; real graphs settle in two or three rounds."""


def run(graph: Graph) -> Graph:
    """Return an equivalent graph with fewer nodes. O(nodes) per round."""
    graph = prune(graph)
    for _ in range(MAX_ROUNDS):
        settled, graph = graph, _walk(graph)
        if len(graph.nodes) == len(settled.nodes) and graph.nodes == settled.nodes:
            break
    return graph


def _walk(graph: Graph) -> Graph:
    b = GraphBuilder()
    new_id: list[ValueId] = [ValueId(-1)] * len(graph.types)
    seen: dict[tuple[Op, tuple[ValueId, ...], Attrs], tuple[ValueId, ...]] = {}
    for node in graph.nodes:
        inputs = tuple([new_id[v] for v in node.inputs])
        with b.at(node.scope, node.source, node.phase):
            outputs = _rewrite(b, node, inputs, seen)
        for old, new in zip(node.outputs, outputs, strict=True):
            new_id[old] = new
    return prune(replace(b.freeze(), **remap(graph, new_id)))  # type: ignore[arg-type]  # columns by name


def prune(graph: Graph) -> Graph:
    """Return the graph with only the nodes that roots need, and dense value ids."""
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
    new_id: list[ValueId] = [ValueId(-1)] * len(graph.types)
    types: list[TensorType] = []
    nodes: list[Node] = []
    for node in kept:
        for value in node.outputs:
            new_id[value] = ValueId(len(types))
            types.append(graph.types[value])
        nodes.append(
            replace(
                node,
                inputs=tuple([new_id[v] for v in node.inputs]),
                outputs=tuple([new_id[v] for v in node.outputs]),
            )
        )
    pruned = replace(graph, nodes=tuple(nodes), types=tuple(types))
    return replace(pruned, **remap(graph, new_id))  # type: ignore[arg-type]  # columns by name


def _rewrite(
    b: GraphBuilder,
    node: Node,
    inputs: tuple[ValueId, ...],
    seen: dict[tuple[Op, tuple[ValueId, ...], Attrs], tuple[ValueId, ...]],
) -> tuple[ValueId, ...]:
    if simplify.has(node.op):
        replaced = simplify.get(node.op)(b, node, inputs)
        if replaced is not None:
            return replaced
    folded = _fold(b, node, inputs)
    if folded is not None:
        return folded
    if writes.get(node.op):
        return b.emit(node.op, inputs, node.attrs)
    key = (node.op, inputs, node.attrs)
    if key not in seen:
        seen[key] = b.emit(node.op, inputs, node.attrs)
    return seen[key]


def _fold(b: GraphBuilder, node: Node, inputs: tuple[ValueId, ...]) -> tuple[ValueId, ...] | None:
    """Evaluate a node of constants. Views stay views: a broadcast constant costs no bytes."""
    if not inputs or not is_exact.get(node.op) or view.has(node.op) or writes.get(node.op):
        return None
    if any([b.producer_of(v).op is not CONSTANT for v in inputs]) or not reference.has(node.op):
        return None
    arrays = [constant_array(b.producer_of(v)) for v in inputs]
    with np.errstate(all="ignore"):
        results = [np.asarray(r) for r in reference.get(node.op)(node.attrs, *arrays)]
    if sum(r.nbytes for r in results) > FOLD_LIMIT_BYTES:
        return None
    return tuple(
        b.one(CONSTANT, dtype=str(r.dtype), shape=tuple(r.shape), data=r.tobytes()) for r in results
    )
