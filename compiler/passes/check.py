"""Verify a logical graph: inputs are produced before they are read, types are as inferred.

Guarantees nothing new: it returns the graph it was given, or raises InternalError. Runs between all
passes in tests and under ACTORFLOW_VERIFY=1.
"""

from __future__ import annotations

from compiler.errors import InternalError
from compiler.graph import Graph
from compiler.registry import infer_type


def check(graph: Graph, after: str) -> Graph:
    """Return `graph` unchanged. Raises InternalError naming the node and the pass it came from."""
    is_known = [False] * len(graph.types)
    for node in graph.nodes:
        where = f"after {after}: {node.op} at {node.source}"
        for value in node.inputs:
            if not 0 <= value < len(is_known) or not is_known[value]:
                raise InternalError(f"{where} reads value {value} before it is produced")
        for value in node.after:
            if not 0 <= value < len(is_known) or not is_known[value]:
                raise InternalError(f"{where} waits for value {value}, which comes later")
        inferred = infer_type.get(node.op)(tuple([graph.types[v] for v in node.inputs]), node.attrs)
        if inferred != tuple([graph.types[v] for v in node.outputs]):
            raise InternalError(f"{where} has output types other than inference gives")
        for value in node.outputs:
            if is_known[value]:
                raise InternalError(f"{where} produces value {value}, which has a producer already")
            is_known[value] = True
    for value in graph.roots():
        if not is_known[value]:
            raise InternalError(f"after {after}: root value {value} has no producer")
    return graph
