"""The graph of one rank: parts of all values, and collectives between them.

What a node reads as it does not lie is brought there first, once for all who read it so; the steps
are those of `compiler.sbp.moves`. Collectives are numbered in the order of the graph of whole
tensors, which is the same on every rank; in which order they go follows from the first rank's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from compiler.attrs import Attrs, AttrValue
from compiler.errors import InternalError
from compiler.graph import UNSTAGED, Graph, GraphBuilder, Node, Output, Write
from compiler.mesh import Mesh, MeshLinks
from compiler.ops.channels import OVER_STAGES
from compiler.ops.comm import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from compiler.ops.sources import VARIABLE
from compiler.registry import Op
from compiler.sbp.derive import Found
from compiler.sbp.infer import SbpChoice
from compiler.sbp.moves import Hop, ways_between
from compiler.sbp.parts import splits_of
from compiler.sbp.positions import PartPlace, among_zeros, only_first, own_rows
from compiler.sbp.project import LocalCall, Part
from compiler.sbp.ways import emit_part
from compiler.sbp.words import (
    BROADCAST,
    Broadcast,
    By,
    NdSbp,
    Partial,
    Sbp,
    Shape,
    Split,
    local_shape,
    local_slices,
    part_of,
)
from compiler.turns import CommTurns, in_turn, turns_of
from compiler.types import Phase, TensorType, ValueId


@dataclass(frozen=True, slots=True)
class Layouts:
    """What was chosen over all axes of a mesh: words of every value, ways of every node."""

    mesh: Mesh
    wires: MeshLinks
    choices: tuple[SbpChoice, ...]

    def of(self, value: ValueId) -> NdSbp:
        """Return how a value lies."""
        return tuple([choice.words[value] for choice in self.choices])

    def ways(self, node: int) -> list[tuple[int, Found]]:
        """Return the ways of a node, by the axes of the mesh."""
        return [(axis, choice.ways[node]) for axis, choice in enumerate(self.choices)]


def turns_between(graph: Graph, layouts: Layouts) -> CommTurns:
    """Return the turns of all collectives of the ranks' graphs: see `compiler.turns`.

    They follow from the graph of the first rank, whose parts are the largest of all. O(nodes).
    """
    mesh = layouts.mesh
    first = _Rank(graph, layouts, mesh.coordinates(0)).result()
    links = zip(mesh.names, mesh.shape, layouts.wires, strict=True)
    return turns_of(first, {name: wire.least_bytes(parts) for name, parts, wire in links})


def distribute(graph: Graph, layouts: Layouts, rank: int, turns: CommTurns | None = None) -> Graph:
    """Return the graph of one rank. O(nodes).

    `turns` are those of `turns_between`, which whoever asks for many ranks asks for once.
    """
    found = _Rank(graph, layouts, layouts.mesh.coordinates(rank)).result()
    return in_turn(found, turns_between(graph, layouts) if turns is None else turns)


@dataclass(slots=True)
class _Rank:
    """The graph of a rank under construction.

    `held` are values by how they lie, and those brought there by the stage that reads them so: what
    stages hand on is as its maker left it.
    """

    graph: Graph
    layouts: Layouts
    coordinates: tuple[int, ...]
    b: GraphBuilder = field(default_factory=GraphBuilder)
    held: dict[tuple[ValueId, NdSbp, int | None], ValueId] = field(default_factory=dict)
    shared: dict[int, dict[object, ValueId]] = field(default_factory=dict)
    num_collectives: int = 0
    held_again: dict[tuple[ValueId, NdSbp, int | None], ValueId] = field(default_factory=dict)
    """What is brought for the backward pass, though it had been for the forward pass."""
    is_kept: dict[ValueId, bool] = field(default_factory=dict)
    moved_until: dict[ValueId, int] = field(default_factory=dict)
    moved_bytes: int = 0

    def result(self) -> Graph:
        graph = self.graph
        whole = (BROADCAST,) * len(self.layouts.mesh.shape)
        returned = {o.value for o in graph.outputs}
        for index, node in enumerate(graph.nodes):
            with self.b.beside(node):
                self._emit(index, node)
            # As soon as they are there: other stages may get them with the batch.
            for value in [v for v in node.outputs if v in returned]:
                self._brought(value, whole)
        self.b.outputs = [Output(o.name, self._brought(o.value, whole)) for o in graph.outputs]
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
        ways, types = self.layouts.ways(index), self.graph.types
        needs = [
            tuple([found.signature.inputs[i] for _, found in ways]) for i in range(len(node.inputs))
        ]
        makes = [self.layouts.of(value) for value in node.outputs]
        pairs = zip(node.inputs, needs, strict=True)
        inputs = [self._brought(v, words, (node.phase, node.stage)) for v, words in pairs]
        if node.op is OVER_STAGES:
            node = replace(node, attrs=Attrs({**node.attrs, **self._next_turn()}))
        call = LocalCall(
            node,
            tuple(inputs),
            tuple([types[v] for v in node.inputs]),
            tuple([types[v] for v in node.outputs]),
            tuple([self._part(v, w) for v, w in zip(node.inputs, needs, strict=True)]),
            tuple([self._part(v, w) for v, w in zip(node.outputs, makes, strict=True)]),
            tuple([splits_of(words, self.layouts.mesh) for words in needs]),
            tuple([splits_of(words, self.layouts.mesh) for words in makes]),
            self.layouts.mesh,
            self.coordinates,
            self._shared(),
        )
        made = emit_part(self.b, call, ways, self._made_whole)
        for value, words, own in zip(node.outputs, makes, made, strict=True):
            self.held[value, words, None] = own

    def _part(self, value: ValueId, words: NdSbp) -> Part:
        shape = self.graph.types[value].shape
        return local_slices(shape, words, self.layouts.mesh.shape, self.coordinates)

    def _brought(
        self, value: ValueId, words: NdSbp, reader: tuple[Phase | None, int] = (None, UNSTAGED)
    ) -> ValueId:
        """Return a value as it lies, or brought into another layout, for a phase and a stage."""
        maker, phase = self.graph.nodes[self.graph.producers()[value]], reader[0]
        stage = maker.stage if reader[1] == UNSTAGED else reader[1]
        layouts, type_ = self.layouts, self.graph.types[value]
        now = layouts.of(value)
        found = self.held[value, now, None]
        if words == now:
            return found
        steps = ways_between(type_, now, words, layouts.mesh.shape, layouts.wires)[1]
        held = self._held_for(value, maker, phase)
        with self.b.beside(replace(maker, stage=stage), phase):
            for step in steps:
                after = (*now[: step.axis], step.new, *now[step.axis + 1 :])
                key = value, after, stage
                if key not in held:
                    held[key] = self._moved(found, type_, now, step)
                    if maker.op is VARIABLE:
                        self.moved_bytes += type_.size_bytes
                        self.moved_until[value] = self.moved_bytes
                found, now = held[key], after
        return found

    def _held_for(
        self, value: ValueId, maker: Node, phase: Phase | None
    ) -> dict[tuple[ValueId, NdSbp, int | None], ValueId]:
        """Return where a value is looked up as it has been brought before.

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

    def _moved(self, value: ValueId, type_: TensorType, words: NdSbp, step: Hop) -> ValueId:
        """Emit one step of a value that lies in some way."""
        mesh, b, old, new = self.layouts.mesh, self.b, step.old, step.new
        parts, index = mesh.shape[step.axis], self.coordinates[step.axis]
        # As all ranks along the axis have it together.
        open_ = (*words[: step.axis], BROADCAST, *words[step.axis + 1 :])
        shape = local_shape(type_.shape, open_, mesh.shape, self.coordinates)
        if isinstance(old, Partial):
            if isinstance(new, Broadcast):
                return self._made_whole(b, value, old.by, step.axis)
            axis = _split_axis(new)
            rows = len(part_of(shape[axis], parts, index))
            attrs = {"axis": axis, "rows": rows, "by": old.by.value}
            return self._met(REDUCE_SCATTER, value, step.axis, attrs)
        if isinstance(new, Partial):
            return self._share(value, old, new, shape, step.axis)
        if isinstance(old, Broadcast):
            cut = _split_axis(new)
            return own_rows(b, value, self._place(shape, cut, step.axis), cut)
        rows = shape[old.axis]
        if isinstance(new, Broadcast):
            return self._met(ALL_GATHER, value, step.axis, {"axis": old.axis, "rows": rows})
        to_rows = len(part_of(shape[new.axis], parts, index))
        attrs = {"axis": old.axis, "rows": rows, "to_axis": new.axis, "to_rows": to_rows}
        return self._met(ALL_TO_ALL, value, step.axis, attrs)

    def _place(self, shape: Shape, cut: int, axis: int) -> PartPlace:
        """Return a rank's rows of what those along an axis of the mesh have together."""
        mesh, rows = self.layouts.mesh, [slice(0, extent) for extent in shape]
        own = part_of(shape[cut], mesh.shape[axis], self.coordinates[axis])
        rows[cut] = slice(own.start, own.stop)
        return PartPlace(shape, tuple(rows), ((mesh.names[axis], cut),), self._shared())

    def _shared(self) -> dict[object, ValueId]:
        """Return what nodes of the stage that is emitted to have in common."""
        return self.shared.setdefault(self.b.stage, {})

    def _share(self, value: ValueId, old: Sbp, new: Partial, shape: Shape, axis: int) -> ValueId:
        """Emit a share of a sum: what one rank has, and zeros."""
        if isinstance(old, Split):
            return among_zeros(self.b, value, self._place(shape, old.axis, axis), old.axis)
        if new.by is not By.SUM:
            return value  # the largest of equal ones is each of them
        return only_first(self.b, value, self._place((self.layouts.mesh.shape[axis],), 0, axis))

    def _made_whole(self, b: GraphBuilder, value: ValueId, by: By, axis: int) -> ValueId:
        return self._met(ALL_REDUCE, value, axis, {"by": by.value})

    def _met(self, op: Op, value: ValueId, axis: int, attrs: Mapping[str, AttrValue]) -> ValueId:
        """Emit a collective, the next one in order."""
        mesh = self.layouts.mesh
        own = {"num_ranks": mesh.shape[axis], "group": mesh.names[axis], **self._next_turn()}
        return self.b.emit(op, (value,), {**own, **attrs})[0]

    def _next_turn(self) -> dict[str, AttrValue]:
        order = self.num_collectives
        self.num_collectives += 1
        return {"bucket": order, "order": order}


def _split_axis(word: Sbp) -> int:
    if not isinstance(word, Split):
        raise InternalError(f"a step leads to {word}, where only a slice can come next")
    return word.axis
