"""Share the work of a step among ranks: every value gets a layout, and one rank its own graph.

What is given: a batch lies in rows along the axis "data" of the mesh, and whole along the others;
variables lie whole; what the job itself says of either (attribute `sbp`) counts before that, and
what it says of any other value (`to_sbp`). State of an optimizer lies as its parameter does. With
`zero` a parameter that is whole along "data" lies there in parts of its first axis. What a step
writes to a variable lies as that does. All else is chosen (`compiler.sbp.infer`).

Along the axis "stage" nothing is shared: its ranks have nodes of their own (`compiler.sbp.cut`).

It runs on the graph of a whole step, with gradients, norms and searches for NaN: so these are
shared like any value, and whatever follows sees an ordinary graph of smaller tensors in which some
nodes meet other ranks.

Guarantees: with one rank the graph is the same; else it is that of the rank, and its outputs are
those of one rank that does all, to the order of sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import cast

from compiler.attrs import Attrs
from compiler.errors import CompileError
from compiler.graph import Graph, Node
from compiler.graph_hash import hash_graph
from compiler.mesh import Mesh, Ranks
from compiler.ops.channels import STAGE
from compiler.ops.sources import INPUT, VARIABLE
from compiler.ops.update import ACCUMULATE, is_update
from compiler.rank_classes import Place, representatives
from compiler.sbp.cut import cut
from compiler.sbp.distribute import Layouts, distribute, turns_between
from compiler.sbp.infer import MeshAxis, SbpChoice, Speed, choose
from compiler.sbp.words import BROADCAST, PARTIAL, Sbp, Split, word_of
from compiler.types import ValueId

DATA = "data"
"""The axis of a mesh whose ranks have different rows of a batch."""


def run(graph: Graph, ranks: Ranks, *, zero: bool = False) -> Graph:
    """Return the graph of one of some ranks.

    Raises CompileError, with the user's line, where a layout that is given cannot be.
    """
    return RankGraphs(graph, ranks, zero=zero).of(ranks.rank)


class RankGraphs:
    """The graphs of the ranks of a mesh: layouts and turns are chosen once for all of them.

    Raises CompileError as `run` does.
    """

    def __init__(self, graph: Graph, ranks: Ranks, *, zero: bool = False) -> None:
        self.graph, self.ranks = graph, ranks
        alike = ranks.without(STAGE)
        self._layouts = layouts_of(graph, alike, zero=zero) if alike.count > 1 else None
        self._turns = None if self._layouts is None else turns_between(graph, self._layouts)
        self._of_all_stages = lru_cache(1)(self._shared)

    def of(self, rank: int) -> Graph:
        """Return the graph of a rank. O(nodes)."""
        mesh = self.ranks.mesh
        graph = self._of_all_stages(replace(self.ranks, rank=rank).without(STAGE).rank)
        num_stages = mesh.extent(STAGE)
        if num_stages > 1:
            own = mesh.coordinates(rank)[mesh.axis(STAGE)]
            graph = cut(graph, own, num_stages)
        return graph

    def told_apart(self, graph_of: Callable[[int], Hashable]) -> tuple[Hashable, ...]:
        """Return what `graph_of` says of the graph of each rank, by its number.

        It is asked for few of them, and by the parts that they have: see `compiler.rank_classes`.
        """
        mesh, flat = self.ranks.mesh, self.ranks.mesh.without(STAGE)

        def at(place: Place, stage: int) -> int:
            along = dict(zip(flat.names, place, strict=True)) | {STAGE: stage}
            return mesh.rank([along[name] for name in mesh.names])

        def of_all_stages(place: Place) -> Hashable:
            return hash_graph(self._of_all_stages(flat.rank(place)), with_sources=True)

        alike, stages = representatives(flat.shape, of_all_stages), range(mesh.extent(STAGE))
        asked = {p: [graph_of(at(p, s)) for s in stages] for p in dict.fromkeys(alike.values())}
        found = {at(p, s): asked[first][s] for p, first in alike.items() for s in stages}
        return tuple([found[rank] for rank in range(mesh.num_ranks)])

    def _shared(self, flat_rank: int) -> Graph:
        """Return the graph of a rank with the nodes of all stages."""
        if self._layouts is None:
            return self.graph
        return distribute(self.graph, self._layouts, flat_rank, self._turns)


def layouts_of(graph: Graph, ranks: Ranks, *, zero: bool = False) -> Layouts:
    """Return how every value lies, the same on all ranks."""
    mesh, choices = ranks.mesh, list[SbpChoice]()
    for name, link in zip(mesh.names, ranks.links, strict=True):
        earlier = list(zip(mesh.shape, choices, strict=False))
        axis = MeshAxis(mesh.shape[len(choices)], link, Speed(), name)
        fixed = _given(graph, mesh, name, zero=zero)
        choices.append(choose(graph, earlier, axis, fixed))
    return Layouts(mesh, ranks.links, tuple(choices))


def with_layouts_of(evaluation: Graph, training: Graph, mesh: Mesh, *, zero: bool) -> Graph:
    """Return a graph that reads the variables of another one as ranks have them for that.

    Both are of whole tensors and all stages: a rank reads what others hand on, which is made of
    variables that it does not have itself. O(nodes of both, times the axes).
    """
    flat = mesh.without(STAGE)
    given = {name: _given(training, flat, name, zero=zero) for name in flat.names}
    words = {
        n.attrs["name"]: tuple([(name, str(own[n.outputs[0]])) for name, own in given.items()])
        for n in training.nodes
        if n.op is VARIABLE
    }
    nodes = [
        replace(node, attrs=Attrs({**node.attrs, "sbp": words[node.attrs["name"]]}))
        if node.op is VARIABLE and node.attrs["name"] in words
        else node
        for node in evaluation.nodes
    ]
    return replace(evaluation, nodes=tuple(nodes))


def _given(graph: Graph, mesh: Mesh, name: str, *, zero: bool) -> dict[ValueId, Sbp]:
    """Return the words along an axis of the mesh that are given."""
    parts, found = mesh.shape[mesh.axis(name)], dict[ValueId, Sbp]()
    for node in graph.nodes:
        said = _said(node, name)
        if node.op is INPUT:
            found[node.outputs[0]] = said or _rows(graph, node, name, parts)
        elif node.op is VARIABLE:
            found[node.outputs[0]] = said or BROADCAST
        elif said is not None:
            found[node.outputs[0]] = said
    if name == DATA and zero:
        found |= _in_parts(graph, mesh, found)
    _follow_parameters(graph, found)
    _sum_shares(graph, found, name)
    return found | {
        write.value: BROADCAST for write in graph.writes if found[write.variable] == BROADCAST
    }


def _said(node: Node, name: str) -> Sbp | None:
    """Return the word that the job itself gives along an axis."""
    pairs = cast("tuple[tuple[str, str], ...]", node.attrs.get("sbp", ()))
    text = dict(pairs).get(name)
    return None if text is None else word_of(text)


def _rows(graph: Graph, node: Node, name: str, parts: int) -> Sbp:
    """Return how an entry of a batch lies of which nothing is said."""
    type_ = graph.types[node.outputs[0]]
    if name != DATA or not type_.rank:
        return BROADCAST
    if type_.shape[0] < parts:
        raise CompileError(
            f"{node.source}: batch[{node.attrs['name']!r}] is {type_}, and has too few rows for"
            f" {parts} ranks along the axis 'data' of the mesh; give a larger batch, or lay it out"
            f' otherwise, as by batch[{node.attrs["name"]!r}].to_sbp(data="B")'
        )
    return Split(0)


def _in_parts(graph: Graph, mesh: Mesh, found: Mapping[ValueId, Sbp]) -> dict[ValueId, Sbp]:
    """Return the words of parameters that ranks with different rows share among them.

    One whose first axis is too short for that, as other axes of the mesh split it, stays as it is.
    """
    updated = {node.inputs[0] for node in graph.nodes if is_update(node)}
    makers = graph.producers()
    return {
        value: Split(0)
        for value, word in found.items()
        if value in updated and word == BROADCAST and _fits(graph, mesh, graph.nodes[makers[value]])
    }


def _fits(graph: Graph, mesh: Mesh, variable: Node) -> bool:
    """Whether each rank gets a row of a variable that DATA splits, too, along its first axis."""
    type_ = graph.types[variable.outputs[0]]
    splits = [n for name, n in mesh.axes if name == DATA or _said(variable, name) == Split(0)]
    return type_.rank > 0 and type_.shape[0] >= math.prod(splits)


def _follow_parameters(graph: Graph, found: dict[ValueId, Sbp]) -> None:
    """Give state of an optimizer, of the parameter's shape, the words of that."""
    for node in graph.nodes:
        if not is_update(node) or node.inputs[0] not in found:
            continue
        word, type_ = found[node.inputs[0]], graph.types[node.inputs[0]]
        for _, over in node.writes:
            if graph.types[node.inputs[over]].shape == type_.shape:
                found[node.inputs[over]] = word


def _sum_shares(graph: Graph, found: dict[ValueId, Sbp], name: str) -> None:
    """Give sums over batches their words.

    Of batches in rows they are shares, which meet once they are complete; else they lie as what
    their parameter does, so that nothing of their size is moved for each batch.
    """
    named = {n.attrs["name"]: n.outputs[0] for n in graph.nodes if n.op is VARIABLE}
    names = {value: cast("str", own) for own, value in named.items()}
    for node in graph.nodes:
        if node.op is ACCUMULATE:
            parameter = named.get(names[node.inputs[0]].partition("/")[2])
            word = BROADCAST if parameter is None else found[parameter]
            found[node.inputs[0]] = PARTIAL if name == DATA else word
