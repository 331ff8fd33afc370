"""Share the work of a step among ranks: every value gets a layout, and one rank its own graph.

What a node reads as it does not lie is brought there first, once for all who read it so; the steps
are those of `compiler.sbp.boxing`. Collectives are numbered in the order of the graph of whole
tensors, which is the same on every rank; in which order they go follows from the first rank's.

What is given: a batch lies in rows along the axis "data" of the mesh, and whole along the others;
variables lie whole; what the job itself says of either (attribute `sbp`) counts before that, and
what it says of any other value (`to_sbp`). State of an optimizer lies as its parameter does. With
`zero` a parameter that is whole along "data" lies there in parts of its first axis. What a step
writes to a variable lies as that does. All else is chosen (`compiler.sbp.infer`). Along the axis
"stage" nothing is shared: its ranks have nodes of their own (`compiler.sbp.stages`).

It runs on the graph of a whole step, with gradients, norms and searches for NaN: so these are
shared like any value, and whatever follows sees an ordinary graph of smaller tensors in which
some nodes meet other ranks.

Guarantees: with one rank the graph is the same; else it is that of the rank, and its outputs are
those of one rank that does all, to the order of sums.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import cast

from compiler.contract.attrs import Attrs, AttrValue
from compiler.contract.errors import CompileError, InternalError
from compiler.contract.placement import Mesh, MeshLinks, RankContext
from compiler.contract.sbp import (
    BROADCAST,
    PARTIAL,
    Broadcast,
    Layout,
    NdSbp,
    Partial,
    ReduceOp,
    Sbp,
    Shape,
    Split,
    local_shape,
    shard_range,
)
from compiler.contract.types import Phase, TensorType, ValueId
from compiler.graph.columns import LocalCall
from compiler.graph.graph import UNSTAGED, Graph, GraphBuilder, Node, Write
from compiler.graph.registry import Op
from compiler.ops.families.updates import ACCUMULATE, is_update
from compiler.ops.primitives.body import hash_graph
from compiler.ops.primitives.sources import INPUT, VARIABLE
from compiler.ops.primitives.transfer import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    OVER_STAGES,
    REDUCE_SCATTER,
    STAGE,
)
from compiler.sbp.boxing import cheapest_boxing
from compiler.sbp.collective_schedule import CommTurns, schedule_collectives, with_schedule
from compiler.sbp.derive import CandidateSignature
from compiler.sbp.infer import MeshAxis, SbpChoice, Speed, choose
from compiler.sbp.local_form import emit_part
from compiler.sbp.positions import ShardIndex, own_rows, pad_to_global, zero_off_first_rank
from compiler.sbp.stages import extract_stage


@dataclass(frozen=True, slots=True)
class SbpAssignment:
    """What was chosen over all axes of a mesh: words of every value, ways of every node."""

    mesh: Mesh
    wires: MeshLinks
    choices: tuple[SbpChoice, ...]

    def of(self, value: ValueId) -> NdSbp:
        """Return how a value lies."""
        return tuple([choice.words[value] for choice in self.choices])

    def signatures(self, node: int) -> list[CandidateSignature]:
        """Return the way of a node along each axis of the mesh."""
        return [choice.signatures[node] for choice in self.choices]


def turns_between(graph: Graph, layouts: SbpAssignment) -> CommTurns:
    """Return the turns (`schedule_collectives`) of all collectives of the ranks' graphs.

    They follow from the graph of the first rank, whose parts are the largest of all. O(nodes).
    """
    mesh = layouts.mesh
    first = _Rank(graph, layouts, mesh.coordinates(0)).result()
    links = zip(mesh.names, mesh.shape, layouts.wires, strict=True)
    return schedule_collectives(
        first, {name: wire.least_bytes(parts) for name, parts, wire in links}
    )


def distribute(
    graph: Graph, layouts: SbpAssignment, rank: int, turns: CommTurns | None = None
) -> Graph:
    """Return the graph of one rank. O(nodes).

    `turns` are those of `turns_between`, which whoever asks for many ranks asks for once.
    """
    rank_graph = _Rank(graph, layouts, layouts.mesh.coordinates(rank)).result()
    return with_schedule(rank_graph, turns_between(graph, layouts) if turns is None else turns)


@dataclass(slots=True)
class _Rank:
    """The graph of a rank under construction.

    `held` are values by how they lie, and those brought there by the stage that reads them so: what
    stages hand on is as its maker left it.
    """

    graph: Graph
    layouts: SbpAssignment
    coordinates: tuple[int, ...]
    b: GraphBuilder = field(default_factory=GraphBuilder)
    held: dict[tuple[ValueId, NdSbp, int | None], ValueId] = field(default_factory=dict)
    shared: dict[int, dict[object, ValueId]] = field(default_factory=dict)
    num_collectives: int = 0
    held_again: dict[tuple[ValueId, NdSbp, int | None], ValueId] = field(default_factory=dict)
    """Values converted again for the backward pass, after a conversion for the forward pass."""
    is_kept: dict[ValueId, bool] = field(default_factory=dict)
    moved_until: dict[ValueId, int] = field(default_factory=dict)
    moved_bytes: int = 0

    def result(self) -> Graph:
        graph = self.graph
        whole = (BROADCAST,) * len(self.layouts.mesh.shape)
        returned = {o.value for o in graph.outputs}
        for index, node in enumerate(graph.nodes):
            with self.b.like_node(node):
                self._emit(index, node)
            # As soon as they are there: other stages may get them with the batch.
            for value in [v for v in node.outputs if v in returned]:
                self._brought(value, whole)
        self.b.outputs = [replace(o, value=self._brought(o.value, whole)) for o in graph.outputs]
        self.b.writes = [
            Write(
                self._brought(w.variable, self.layouts.of(w.variable)),
                self._brought(w.value, self.layouts.of(w.variable), (Phase.UPDATE, UNSTAGED)),
            )
            for w in graph.writes
        ]
        if (steps := graph.accumulation) is not None:
            batch = self._brought(steps.batch, self.layouts.of(steps.batch))
            self.b.accumulation = replace(steps, batch=batch)
        return self.b.freeze()

    def _emit(self, index: int, node: Node) -> None:
        ways, types = self.layouts.signatures(index), self.graph.types
        needs = [tuple([way.signature.inputs[i] for way in ways]) for i in range(len(node.inputs))]
        pairs = zip(node.inputs, needs, strict=True)
        inputs = [self._brought(v, words, (node.phase, node.stage)) for v, words in pairs]
        # The number in turn is the same on every rank, as all emit in the order of one graph.
        if node.op is OVER_STAGES:
            node = replace(node, attrs=Attrs({**node.attrs, **self._next_turn()}))
        call = LocalCall(
            node,
            tuple(inputs),
            tuple([types[v] for v in node.inputs]),
            tuple([types[v] for v in node.outputs]),
            tuple([way.signature for way in ways]),
            self.layouts.mesh,
            self.coordinates,
            self._shared(),
        )
        outputs = emit_part(self.b, call, ways, self._made_whole)
        for value, output in zip(node.outputs, outputs, strict=True):
            self.held[value, self.layouts.of(value), None] = output

    def _brought(
        self, value: ValueId, words: NdSbp, reader: tuple[Phase | None, int] = (None, UNSTAGED)
    ) -> ValueId:
        """Return a value in a layout, converted if it lies otherwise, for a phase and a stage."""
        maker, phase = self.graph.nodes[self.graph.producers()[value]], reader[0]
        stage = maker.stage if reader[1] == UNSTAGED else reader[1]
        layouts, type_ = self.layouts, self.graph.types[value]
        layout = layouts.of(value)
        current = self.held[value, layout, None]
        if words == layout:
            return current
        way = cheapest_boxing(type_, layout, words, layouts.mesh.shape, layouts.wires)[1]
        held = self._held_for(value, maker, phase)
        with self.b.like_node(replace(maker, stage=stage), phase):
            # A step that another reader has asked for before is found in `held`.
            for after in way:
                key = value, after, stage
                if key not in held:
                    held[key] = self._moved(current, type_, layout, after)
                    if maker.op is VARIABLE:
                        self.moved_bytes += type_.size_bytes
                        self.moved_until[value] = self.moved_bytes
                current, layout = held[key], after
        return current

    def _held_for(
        self, value: ValueId, maker: Node, phase: Phase | None
    ) -> dict[tuple[ValueId, NdSbp, int | None], ValueId]:
        """Return the table in which earlier conversions of a value are looked up.

        What ranks have parts of, parameters above all, is given up after the forward pass and
        brought once more in the backward pass, unless that begins with it: unless fewer bytes of
        parameters than its own were brought in between (of wholes, the same on all ranks). That
        all are there at once is what nobody has memory for who cuts them into parts (Zhao et al.,
        "PyTorch FSDP", 2023, section 3.2).
        """
        if maker.op is not VARIABLE or phase is not Phase.BACKWARD:
            return self.held
        if value not in self.is_kept:
            since = self.moved_bytes - self.moved_until.get(value, 0)
            self.is_kept[value] = since < self.graph.types[value].size_bytes
        return self.held if self.is_kept[value] else self.held_again

    def _moved(self, value: ValueId, type_: TensorType, before: NdSbp, after: NdSbp) -> ValueId:
        """Emit one step of a value between layouts, whose words along one mesh axis differ."""
        mesh, b = self.layouts.mesh, self.b
        along = next(i for i, word in enumerate(before) if word != after[i])
        old, new = before[along], after[along]
        parts, index = mesh.shape[along], self.coordinates[along]
        # As all ranks along the axis have it together.
        open_ = (*before[:along], BROADCAST, *before[along + 1 :])
        shape = local_shape(type_.shape, open_, mesh.shape, self.coordinates)
        # A partial value meets as an all-reduce where all of it is wanted, else as a
        # reduce-scatter.
        if isinstance(old, Partial):
            if isinstance(new, Broadcast):
                return self._made_whole(b, value, old.by, along)
            axis = _split_axis(new)
            rows = len(shard_range(shape[axis], parts, index))
            attrs = {"axis": axis, "rows": rows, "by": old.by.value}
            return self._met(REDUCE_SCATTER, value, along, attrs)
        if isinstance(new, Partial):
            return self._share(value, old, new, shape, along)
        if isinstance(old, Broadcast):
            cut = _split_axis(new)
            return own_rows(b, value, self._place(shape, cut, along), cut)
        # Split to whole is an all-gather; split to another split is an all-to-all.
        rows = shape[old.axis]
        if isinstance(new, Broadcast):
            return self._met(ALL_GATHER, value, along, {"axis": old.axis, "rows": rows})
        to_rows = len(shard_range(shape[new.axis], parts, index))
        attrs = {"axis": old.axis, "rows": rows, "to_axis": new.axis, "to_rows": to_rows}
        return self._met(ALL_TO_ALL, value, along, attrs)

    def _place(self, shape: Shape, cut: int, axis: int) -> ShardIndex:
        """Return a rank's rows of what those along an axis of the mesh have together."""
        mesh = self.layouts.mesh
        sbp = tuple([Split(cut) if i == axis else BROADCAST for i in range(len(mesh.shape))])
        return ShardIndex(shape, sbp, mesh, self.coordinates, self._shared())

    def _shared(self) -> dict[object, ValueId]:
        """Return what nodes of the stage that is emitted to have in common."""
        return self.shared.setdefault(self.b.stage, {})

    def _share(self, value: ValueId, old: Sbp, new: Partial, shape: Shape, axis: int) -> ValueId:
        """Emit a share of a sum: what one rank has, and zeros."""
        if isinstance(old, Split):
            return pad_to_global(self.b, value, self._place(shape, old.axis, axis), old.axis)
        if new.by is not ReduceOp.SUM:
            return value  # the largest of equal ones is each of them
        return zero_off_first_rank(
            self.b, value, self._place((self.layouts.mesh.shape[axis],), 0, axis)
        )

    def _made_whole(self, b: GraphBuilder, value: ValueId, by: ReduceOp, axis: int) -> ValueId:
        return self._met(ALL_REDUCE, value, axis, {"by": by.value})

    def _met(self, op: Op, value: ValueId, axis: int, attrs: Mapping[str, AttrValue]) -> ValueId:
        """Emit a collective, the next one in order."""
        mesh = self.layouts.mesh
        fields = {"num_ranks": mesh.shape[axis], "group": mesh.names[axis], **self._next_turn()}
        return self.b.emit(op, (value,), {**fields, **attrs})[0]

    def _next_turn(self) -> dict[str, AttrValue]:
        order = self.num_collectives
        self.num_collectives += 1
        return {"bucket": order, "order": order}


def _split_axis(word: Sbp) -> int:
    if not isinstance(word, Split):
        raise InternalError(f"a step leads to {word}, where only a slice can come next")
    return word.axis


# Which ranks have equal graphs is found by looking at few of them. What a rank's graph says of the
# rank's place along an axis of the mesh is which part of a tensor it has: where the part begins,
# how long it is, whether it is the first. Of parts in their order each begins later than the one
# before, and the longer ones come first (`compiler.contract.sbp.shard_range`): so along an axis the
# first one and the last one are equal only where all are. An axis on which graphs depend at one
# place of the others alone, as parts of uneven parts do, is found by looking at all corners, and at
# all places along the axes on which graphs do depend.

Place = tuple[int, ...]
"""Coordinates of a rank."""


def representatives(
    shape: Sequence[int], graph_at: Callable[[Place], Hashable]
) -> dict[Place, Place]:
    """Return, for each place in a grid, the first place that has an equal graph.

    `graph_at` returns what graphs can be told apart by. It is asked once for each place, and along
    an axis on which nothing depends for the first and the last one alone.
    """
    graphs: dict[Place, Hashable] = {}

    def seen(place: Place) -> Hashable:
        if place not in graphs:
            graphs[place] = graph_at(place)
        return graphs[place]

    def is_free(axis: int, corners: Sequence[Place]) -> bool:
        """Whether the first and the last place along an axis are equal, wherever they are."""
        pairs = [(p, (*p[:axis], 0, *p[axis + 1 :])) for p in corners]
        return all([seen(place) == seen(first) for place, first in pairs])

    # From the origin first: an axis that matters there need not be looked at from elsewhere.
    origin = (0,) * len(shape)
    free = [
        axis
        for axis, extent in enumerate(shape)
        if is_free(axis, [(*origin[:axis], extent - 1, *origin[axis + 1 :])])
    ]
    while True:
        ends = [(0, n - 1) if axis in free else range(n) for axis, n in enumerate(shape)]
        corners = list(itertools.product(*ends))
        still = [axis for axis in free if is_free(axis, corners)]
        if still == free:
            break
        free = still
    first: dict[Hashable, Place] = {}
    first_of: dict[Place, Place] = {}
    for place in itertools.product(*map(range, shape)):
        corner = tuple([0 if axis in free else index for axis, index in enumerate(place)])
        first_of[place] = first.setdefault(seen(corner), corner)
    return first_of


DATA = "data"
"""The axis of a mesh whose ranks have different rows of a batch."""


def run(graph: Graph, ranks: RankContext, *, zero: bool = False) -> Graph:
    """Return the graph of one of some ranks.

    Raises CompileError, with the user's line, where a layout that is given cannot be.
    """
    return RankGraphs(graph, ranks, zero=zero).of(ranks.rank)


class RankGraphs:
    """The graphs of the ranks of a mesh: layouts and turns are chosen once for all of them.

    Raises CompileError as `run` does.
    """

    def __init__(self, graph: Graph, ranks: RankContext, *, zero: bool = False) -> None:
        self.graph, self.ranks = graph, ranks
        alike = ranks.without(STAGE)
        self._layouts = assign_sbp(graph, alike, zero=zero) if alike.count > 1 else None
        self._turns = None if self._layouts is None else turns_between(graph, self._layouts)
        # All stages at one place of the other axes share this graph, and ask for it in a row.
        self._of_all_stages = lru_cache(1)(self._shared)

    def of(self, rank: int) -> Graph:
        """Return the graph of a rank. O(nodes)."""
        mesh = self.ranks.mesh
        graph = self._of_all_stages(replace(self.ranks, rank=rank).without(STAGE).rank)
        num_stages = mesh.extent(STAGE)
        if num_stages > 1:
            stage = mesh.coordinates(rank)[mesh.axis(STAGE)]
            graph = extract_stage(graph, stage, num_stages)
        return graph

    def told_apart(self, graph_of: Callable[[int], Hashable]) -> tuple[Hashable, ...]:
        """Return what `graph_of` says of the graph of each rank, by its number.

        It is asked for few of them, and by the parts that they have: see `representatives`.
        """
        mesh, flat = self.ranks.mesh, self.ranks.mesh.without(STAGE)

        def at(place: Place, stage: int) -> int:
            along = dict(zip(flat.names, place, strict=True)) | {STAGE: stage}
            return mesh.rank([along[name] for name in mesh.names])

        def of_all_stages(place: Place) -> Hashable:
            return hash_graph(self._of_all_stages(flat.rank(place)), with_sources=True)

        alike, stages = representatives(flat.shape, of_all_stages), range(mesh.extent(STAGE))
        marks = {p: [graph_of(at(p, s)) for s in stages] for p in dict.fromkeys(alike.values())}
        by_rank = {at(p, s): marks[first][s] for p, first in alike.items() for s in stages}
        return tuple([by_rank[rank] for rank in range(mesh.num_ranks)])

    def _shared(self, flat_rank: int) -> Graph:
        """Return the graph of a rank with the nodes of all stages."""
        if self._layouts is None:
            return self.graph
        return distribute(self.graph, self._layouts, flat_rank, self._turns)


def assign_sbp(graph: Graph, ranks: RankContext, *, zero: bool = False) -> SbpAssignment:
    """Return how every value lies, the same on all ranks."""
    mesh, choices = ranks.mesh, list[SbpChoice]()
    for name, link in zip(mesh.names, ranks.links, strict=True):
        # The axes before this one: their layouts are chosen, and this axis cuts what they left.
        earlier = list(zip(mesh.shape, choices, strict=False))
        axis = MeshAxis(mesh.shape[len(choices)], link, Speed(), name)
        fixed = _given(graph, mesh, name, zero=zero)
        choices.append(choose(graph, earlier, axis, fixed))
    return SbpAssignment(mesh, ranks.links, tuple(choices))


def with_variable_sbp_of(evaluation: Graph, training: Graph, mesh: Mesh, *, zero: bool) -> Graph:
    """Return a graph that reads the variables of another one as ranks have them for that.

    Both are of whole tensors and all stages: a rank reads what others hand on, which is made of
    variables that it does not have itself. O(nodes of both, times the axes).
    """
    flat = mesh.without(STAGE)
    fixed = {name: _given(training, flat, name, zero=zero) for name in flat.names}
    layouts = {
        n.attrs["name"]: tuple([(name, words[n.outputs[0]]) for name, words in fixed.items()])
        for n in training.nodes
        if n.op is VARIABLE
    }
    nodes = [
        replace(node, attrs=Attrs({**node.attrs, "sbp": layouts[node.attrs["name"]]}))
        if node.op is VARIABLE and node.attrs["name"] in layouts
        else node
        for node in evaluation.nodes
    ]
    return replace(evaluation, nodes=tuple(nodes))


def _given(graph: Graph, mesh: Mesh, name: str, *, zero: bool) -> dict[ValueId, Sbp]:
    """Return the SBP words along an axis of the mesh that the job fixes, by value."""
    parts, words = mesh.shape[mesh.axis(name)], dict[ValueId, Sbp]()
    for node in graph.nodes:
        word = _said(node, name)
        if node.op is INPUT:
            words[node.outputs[0]] = word or _rows(graph, node, name, parts)
        elif node.op is VARIABLE:
            words[node.outputs[0]] = word or BROADCAST
        elif word is not None:
            words[node.outputs[0]] = word
    if name == DATA and zero:
        words |= _in_parts(graph, mesh, words)
    _follow_parameters(graph, words)
    _sum_shares(graph, words, name)
    return words | {
        write.value: BROADCAST for write in graph.writes if words[write.variable] == BROADCAST
    }


def _said(node: Node, name: str) -> Sbp | None:
    """Return the SBP word that the user's job states for a node along an axis, or None."""
    return dict(cast("Layout", node.attrs.get("sbp", ()))).get(name)


def _rows(graph: Graph, node: Node, name: str, parts: int) -> Sbp:
    """Return the layout of an entry of a batch for which the job states none."""
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
    variables = {n.attrs["name"]: n.outputs[0] for n in graph.nodes if n.op is VARIABLE}
    names = {value: cast("str", label) for label, value in variables.items()}
    for node in graph.nodes:
        if node.op is ACCUMULATE:
            parameter = variables.get(names[node.inputs[0]].partition("/")[2])
            word = BROADCAST if parameter is None else found[parameter]
            found[node.inputs[0]] = PARTIAL if name == DATA else word
