"""The hash of a logical graph: what a plan is recorded under, and kept under in a cache."""

from __future__ import annotations

import hashlib
from dataclasses import astuple

from compiler.body import bodies_in
from compiler.graph import UNSTAGED, Graph
from compiler.rows import packed


def hash_graph(graph: Graph, *, with_sources: bool = False) -> str:
    """Return a hash of what the graph computes; `with_sources` adds scopes and user lines."""
    nodes = []
    for node in graph.nodes:
        row: list[object] = [node.op.name, node.inputs, node.outputs, node.attrs.packed]
        if with_sources:
            row += [node.scope, node.source.file, node.source.line]
            row += [hash_graph(body.graph, with_sources=True) for body in bodies_in(node)]
        if node.device:
            row.append(node.device)
        if node.stage != UNSTAGED:
            row.append(("stage", node.stage))
        nodes.append(row)
    rules = [
        (u.op.name, u.variable, u.state, u.scalars, u.attrs.packed, u.objective)
        for u in graph.updates
    ]
    body = [
        nodes,
        [(t.dtype.value, t.shape) for t in graph.types],
        [(o.name, o.value) for o in graph.outputs],
        rules,
        [(w.variable, w.value) for w in graph.writes],
        None if graph.accumulation is None else astuple(graph.accumulation),
    ]
    return hashlib.blake2b(packed(body), digest_size=16).hexdigest()
