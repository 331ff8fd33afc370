"""Have ranks meet: what updates read is the mean of all ranks.

    update(w, gradient, ...)   ->   update(w, all_reduce(gradient), ...)

So are floats that a job assigns to its buffers, and what a search for NaN reads, that all ranks
skip the same steps. A value that shows another one in another form is not summed itself, but the
one that it shows: that one is written as it is.

Each gradient has a collective of its own here, in the order in which gradients are made. That is
right and slow; `compiler.passes.buckets` puts them together when launches have an order.

Guarantees: with one rank the graph is the same; else every update reads gradients of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from compiler.fusion.program import GRADIENT
from compiler.graph import Graph, GraphBuilder
from compiler.ops.comm import ALL_REDUCE, EVERYONE
from compiler.ops.non_finite import NON_FINITE
from compiler.ops.shape import RESHAPE, TRANSPOSE
from compiler.ops.sources import INPUT
from compiler.ops.update import ASSIGN, is_update
from compiler.placement import ALONE, Ranks
from compiler.types import Phase, ValueId

_SHOWS = (RESHAPE, TRANSPOSE)


def run(graph: Graph, ranks: Ranks = ALONE) -> Graph:
    """Return the graph of one of some ranks. O(nodes)."""
    reads = _reads(graph) if ranks.count > 1 else {}
    if not reads:
        return graph
    made_by = graph.producers()
    shown = {value: _shown(graph, made_by, value) for value in reads.values()}
    summed = sorted(dict.fromkeys(shown.values()), key=lambda v: (made_by[v], v))
    turn = {value: order for order, value in enumerate(summed)}
    b = GraphBuilder()
    new_id = [ValueId(-1)] * len(graph.types)
    mean: dict[ValueId, ValueId] = {}

    def mean_of(value: ValueId) -> ValueId:
        node = graph.nodes[made_by[value]]
        if value not in mean and value in turn:
            order = turn[value]
            with b.at("optimizer", node.source, Phase.UPDATE, node.device):
                mean[value] = b.one(
                    ALL_REDUCE,
                    new_id[value],
                    num_ranks=ranks.count,
                    group=EVERYONE,
                    bucket=order,
                    order=order,
                )
        elif value not in mean:
            (mean[value],) = b.copy(node, (mean_of(node.inputs[0]),), (graph.types[value],))
        return mean[value]

    for index, node in enumerate(graph.nodes):
        inputs = tuple(
            [
                mean_of(value) if (index, position) in reads else new_id[value]
                for position, value in enumerate(node.inputs)
            ]
        )
        outputs = b.copy(node, inputs, [graph.types[v] for v in node.outputs])
        for before, after in zip(node.outputs, outputs, strict=True):
            new_id[before] = after
    return b.freeze_as(graph, new_id)


def _reads(graph: Graph) -> dict[tuple[int, int], ValueId]:
    """Return the value that a node reads at a position, where all ranks must read the same."""
    differs = _differs(graph)
    found: dict[tuple[int, int], ValueId] = {}
    for index, node in enumerate(graph.nodes):
        if is_update(node) or (node.op is ASSIGN and _is_own(graph, differs, node.inputs[1])):
            found[index, GRADIENT] = node.inputs[GRADIENT]
        elif node.op is NON_FINITE and differs[node.inputs[0]]:
            found[index, 0] = node.inputs[0]
    return {place: value for place, value in found.items() if graph.types[value].num_elements}


def _is_own(graph: Graph, differs: Sequence[bool], value: ValueId) -> bool:
    """Whether a rank has made a value that can be averaged: a count that differs is its own."""
    return differs[value] and graph.types[value].dtype.is_float


def _differs(graph: Graph) -> list[bool]:
    """Mark the values that a rank makes of its own batches."""
    marks = [False] * len(graph.types)
    for node in graph.nodes:
        if node.op is INPUT or any([marks[v] for v in node.inputs]):
            for value in node.outputs:
                marks[value] = True
    return marks


def _shown(graph: Graph, made_by: Sequence[int], value: ValueId) -> ValueId:
    """Return the value that another one shows."""
    while graph.nodes[made_by[value]].op in _SHOWS:
        value = graph.nodes[made_by[value]].inputs[0]
    return value
