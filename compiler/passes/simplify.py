"""Prune, fold constants, merge common subexpressions, apply each op's own algebra, all exact.

One walk in topological order copies the graph into a fresh builder: a node is replaced by what its
`simplify` column says, folded through its `reference` when the op `is_exact`, all inputs are
constants and the result is small, or merged with an equal node emitted before. Then everything no
root needs is dropped.

Results stay bit-identical: exp, gelu, a sum over an axis and their like are not folded, because
the bits of a kernel that approximates, or adds in another order, are not the reference's. The one
exception is a power with the constant exponent 1 or 2, which becomes x or its square: these are
correctly rounded, and a kernel's pow may be a unit in the last place beside them.

Guarantees: no unused node, no two equal pure nodes on one device and stage, no foldable node under
FOLD_LIMIT_BYTES.
"""

from __future__ import annotations

import numpy as np

from compiler.attrs import Attrs
from compiler.bfloat16 import encoded
from compiler.errors import InternalError
from compiler.graph import Graph, GraphBuilder, Node
from compiler.ops.sources import CONSTANT, constant_array
from compiler.prune import needed_nodes, prune
from compiler.registry import Op, infer_type, is_exact, reference, view, writes
from compiler.rules import simplify
from compiler.types import TensorType, ValueId

FOLD_LIMIT_BYTES = 1 << 16
"""Larger constants cost more to store and load than to compute."""

_Same = tuple[Op, tuple[ValueId, ...], Attrs, int, int]
"""What two nodes have in common that are one: op, inputs, attributes, device and stage."""

MAX_ROUNDS = 8
"""A rewrite may uncover another; real graphs settle in two or three rounds."""


def run(graph: Graph) -> Graph:
    """Return an equivalent graph with fewer nodes. O(nodes) per round."""
    for _ in range(MAX_ROUNDS):
        settled, graph = graph, _walk(graph)
        if len(graph.nodes) == len(settled.nodes) and graph.nodes == settled.nodes:
            break
    return graph


def _walk(graph: Graph) -> Graph:
    b = GraphBuilder()
    new_id: list[ValueId] = [ValueId(-1)] * len(graph.types)
    seen: dict[_Same, tuple[ValueId, ...]] = {}
    for node in needed_nodes(graph):
        inputs = tuple([new_id[v] for v in node.inputs])
        outputs = _replaced(b, node, inputs)
        if outputs is None:
            outputs = _copied(b, node, inputs, [graph.types[v] for v in node.outputs], seen)
        else:
            _check_types(graph, b, node, outputs)
        for old, new in zip(node.outputs, outputs, strict=True):
            new_id[old] = new
    return prune(b.freeze_as(graph, new_id))


def _replaced(
    b: GraphBuilder, node: Node, inputs: tuple[ValueId, ...]
) -> tuple[ValueId, ...] | None:
    """Return what stands for the outputs of a node by its op's algebra or by folding, or None."""
    if simplify.has(node.op):
        with b.beside(node):
            replaced = simplify.get(node.op)(b, node, inputs)
        if replaced is not None:
            return replaced
    if not inputs or any([b.producer_of(v).op is not CONSTANT for v in inputs]):
        return None
    with b.beside(node):
        return _fold(b, node, inputs)


def _copied(
    b: GraphBuilder,
    node: Node,
    inputs: tuple[ValueId, ...],
    types: list[TensorType],
    seen: dict[_Same, tuple[ValueId, ...]],
) -> tuple[ValueId, ...]:
    """Copy a node, or find the equal one that was copied before."""
    if node.writes:
        return b.copy(node, inputs, types)
    key = (node.op, inputs, node.attrs, node.device, node.stage)
    if key not in seen:
        seen[key] = b.copy(node, inputs, types)
    return seen[key]


def _check_types(graph: Graph, b: GraphBuilder, node: Node, outputs: tuple[ValueId, ...]) -> None:
    for old, new in zip(node.outputs, outputs, strict=True):
        if b.types[new] != graph.types[old]:
            raise InternalError(
                f"{node.source}: {node.op} makes {graph.types[old]}, but what its simplify column"
                f" puts in its place makes {b.types[new]}"
            )


def _fold(b: GraphBuilder, node: Node, inputs: tuple[ValueId, ...]) -> tuple[ValueId, ...] | None:
    """Evaluate a node of constants. Views stay views: a broadcast constant costs no bytes."""
    if not is_exact.get(node.op) or view.has(node.op) or writes.get(node.op):
        return None
    if not reference.has(node.op):
        return None
    arrays = [constant_array(b.producer_of(v)) for v in inputs]
    with np.errstate(all="ignore"):
        results = [np.asarray(r) for r in reference.get(node.op)(node.attrs, *arrays)]
    if sum(r.nbytes for r in results) > FOLD_LIMIT_BYTES:
        return None
    types = infer_type.get(node.op)(tuple([b.type_of(v) for v in inputs]), node.attrs)
    return tuple(
        b.one(CONSTANT, dtype=t.dtype.value, shape=t.shape, data=encoded(r, t.dtype))
        for r, t in zip(results, types, strict=True)
    )
