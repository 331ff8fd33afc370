"""The graph of one rank: parts of all values, and collectives between them.

What a node reads as it does not lie is brought there first, once for all who read it so; the steps
are those of `compiler.sbp.moves`. Collectives are numbered in the order of the graph of whole
tensors, which is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from compiler.attrs import AttrValue
from compiler.errors import InternalError
from compiler.graph import Graph, GraphBuilder, Node, Output, Write
from compiler.ops.comm import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from compiler.ops.shape import BROADCAST_TO
from compiler.ops.slicing import PAD, SLICE
from compiler.ops.sources import scalar
from compiler.registry import Op
from compiler.sbp.derive import Found
from compiler.sbp.infer import SbpChoice
from compiler.sbp.mesh import Mesh
from compiler.sbp.moves import Hop, MeshLinks, ways_between
from compiler.sbp.project import LocalCall, Part
from compiler.sbp.ways import emit_part
from compiler.sbp.words import (
    BROADCAST,
    Broadcast,
    By,
    NdSbp,
    Partial,
    Sbp,
    Split,
    local_shape,
    local_slices,
    part_of,
)
from compiler.types import TensorType, ValueId


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


def distribute(graph: Graph, layouts: Layouts, rank: int) -> Graph:
    """Return the graph of one rank. O(nodes)."""
    return _Rank(graph, layouts, layouts.mesh.coordinates(rank)).result()


@dataclass(slots=True)
class _Rank:
    """The graph of a rank under construction; `held` are values by how they lie."""

    graph: Graph
    layouts: Layouts
    coordinates: tuple[int, ...]
    b: GraphBuilder = field(default_factory=GraphBuilder)
    held: dict[tuple[ValueId, NdSbp], ValueId] = field(default_factory=dict)
    num_collectives: int = 0

    def result(self) -> Graph:
        graph = self.graph
        for index, node in enumerate(graph.nodes):
            with self.b.beside(node):
                self._emit(index, node)
        whole = (BROADCAST,) * len(self.layouts.mesh.shape)
        self.b.outputs = [Output(o.name, self._brought(o.value, whole)) for o in graph.outputs]
        self.b.writes = [
            Write(
                self._brought(w.variable, self.layouts.of(w.variable)),
                self._brought(w.value, self.layouts.of(w.variable)),
            )
            for w in graph.writes
        ]
        return self.b.freeze()

    def _emit(self, index: int, node: Node) -> None:
        ways, types = self.layouts.ways(index), self.graph.types
        needs = [
            tuple([found.signature.inputs[i] for _, found in ways]) for i in range(len(node.inputs))
        ]
        makes = [self.layouts.of(value) for value in node.outputs]
        inputs = [self._brought(v, words) for v, words in zip(node.inputs, needs, strict=True)]
        call = LocalCall(
            node,
            tuple(inputs),
            tuple([types[v] for v in node.inputs]),
            tuple([types[v] for v in node.outputs]),
            tuple([self._part(v, w) for v, w in zip(node.inputs, needs, strict=True)]),
            tuple([self._part(v, w) for v, w in zip(node.outputs, makes, strict=True)]),
        )
        made = emit_part(self.b, call, ways, self._made_whole)
        for value, words, own in zip(node.outputs, makes, made, strict=True):
            self.held[value, words] = own

    def _part(self, value: ValueId, words: NdSbp) -> Part:
        shape = self.graph.types[value].shape
        return local_slices(shape, words, self.layouts.mesh.shape, self.coordinates)

    def _brought(self, value: ValueId, words: NdSbp) -> ValueId:
        """Return a value as it lies, or brought into another layout."""
        found = self.held.get((value, words))
        if found is None:
            layouts, type_ = self.layouts, self.graph.types[value]
            now = layouts.of(value)
            found = self.held[value, now]
            steps = ways_between(type_, now, words, layouts.mesh.shape, layouts.wires)[1]
            maker = self.graph.nodes[self.graph.producers()[value]]
            with self.b.beside(maker):
                for step in steps:
                    after = (*now[: step.axis], step.new, *now[step.axis + 1 :])
                    if (value, after) not in self.held:
                        self.held[value, after] = self._moved(found, type_, now, step)
                    found, now = self.held[value, after], after
        return found

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
            return self._share(value, old, new, shape, parts, index)
        if isinstance(old, Broadcast):
            cut = _split_axis(new)
            own = part_of(shape[cut], parts, index)
            starts = [own.start if axis == cut else 0 for axis in range(len(shape))]
            stops = [own.stop if axis == cut else n for axis, n in enumerate(shape)]
            steps = (1,) * len(shape)
            return b.one(SLICE, value, starts=tuple(starts), stops=tuple(stops), steps=steps)
        rows = shape[old.axis]
        if isinstance(new, Broadcast):
            return self._met(ALL_GATHER, value, step.axis, {"axis": old.axis, "rows": rows})
        own_rows = len(part_of(shape[new.axis], parts, index))
        attrs = {"axis": old.axis, "rows": rows, "to_axis": new.axis, "to_rows": own_rows}
        return self._met(ALL_TO_ALL, value, step.axis, attrs)

    def _share(
        self, value: ValueId, old: Sbp, new: Partial, shape: Sequence[int], parts: int, index: int
    ) -> ValueId:
        """Emit a share of a sum: what one rank has, and zeros."""
        b = self.b
        if isinstance(old, Split):
            own = part_of(shape[old.axis], parts, index)
            low = [own.start if axis == old.axis else 0 for axis in range(len(shape))]
            high = [n - own.stop if axis == old.axis else 0 for axis, n in enumerate(shape)]
            return b.one(PAD, value, low=tuple(low), high=tuple(high), steps=(1,) * len(shape))
        if new.by is By.MAX or index == 0:
            return value  # the largest of equal ones is each of them
        zero = scalar(b, 0, b.type_of(value).dtype)
        return b.one(BROADCAST_TO, zero, shape=tuple(shape))

    def _made_whole(self, b: GraphBuilder, value: ValueId, by: By, axis: int) -> ValueId:
        return self._met(ALL_REDUCE, value, axis, {"by": by.value})

    def _met(self, op: Op, value: ValueId, axis: int, attrs: Mapping[str, AttrValue]) -> ValueId:
        """Emit a collective, the next one in order."""
        mesh, order = self.layouts.mesh, self.num_collectives
        self.num_collectives += 1
        own: dict[str, AttrValue] = {
            "num_ranks": mesh.shape[axis],
            "group": mesh.names[axis],
            "bucket": order,
        }
        return self.b.emit(op, (value,), {**own, "order": order, **attrs})[0]


def _split_axis(word: Sbp) -> int:
    if not isinstance(word, Split):
        raise InternalError(f"a step leads to {word}, where only a slice can come next")
    return word.axis
