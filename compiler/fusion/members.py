"""One node as a member of a fused program: which tensors it reads, and how they lie in the space.

A member looks through views that keep the order of elements, so that a reshape between two members,
or a broadcast in front of one, costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from compiler.facts import fact
from compiler.fusion.builder import ProgramBuilder
from compiler.fusion.expansion import Frame, expand, frame, stands_alone
from compiler.fusion.program import Kind, ProgramInput
from compiler.fusion.spaces import (
    COLUMN,
    ROW,
    SCALAR,
    Access,
    Shape,
    Space,
    access_of,
    canonical,
    row_stride,
    through_broadcast,
)
from compiler.graph import Graph, Node
from compiler.lowering.storage import Storage, assign_storage, call_of
from compiler.ops.shape import BROADCAST_TO, RESHAPE, STOP_GRADIENT, TRANSPOSE
from compiler.registry import Op, writes
from compiler.types import ValueId


@dataclass(frozen=True, slots=True)
class Read:
    """A tensor that a member reads, behind all views, and how."""

    base: ValueId
    access: Access


@dataclass(frozen=True, slots=True)
class Member:
    """A node in a space: what each input reads, and the kind of each output."""

    node: int
    reads: tuple[Read, ...]
    kinds: tuple[Kind, ...]
    write_only: tuple[ValueId, ...]


@dataclass(frozen=True, slots=True)
class WayToSee:
    """One way to see a frame in a space: how each operand would be read, None where it cannot."""

    inputs: tuple[Access | None, ...]
    outputs: tuple[Access | None, ...]


@fact
def _frames(graph: Graph) -> tuple[Frame | None, ...]:
    """Return the frame of each node, None for one that no program can compute."""
    is_launch, types = assign_storage(graph).is_launch, graph.types
    found: list[Frame | None] = []
    for index, node in enumerate(graph.nodes):
        if not expand.has(node.op) or not is_launch[index] or writes.get(node.op):
            found.append(None)
            continue
        inputs = tuple([types[v] for v in node.inputs])
        outputs = tuple([types[v] for v in node.outputs])
        found.append(frame.get(node.op)(inputs, outputs, node.attrs))
    return tuple(found)


def frames(graph: Graph) -> tuple[Frame | None, ...]:
    """Return the frame of each node, None for one that no program is to compute.

    A kernel from elsewhere may take a node, its operands lying as they do now. Whether one does is
    no fact of the graph alone: it depends on what the node's device is, and on who was registered.
    """
    found = _frames(graph)
    asked = [index for index, node in enumerate(graph.nodes) if stands_alone.has(node.op)]
    if not asked:
        return found
    alone: set[int] = set()
    layout = assign_storage(graph).layout
    for index in asked:
        node = graph.nodes[index]
        call = call_of(node, graph.types, layout.__getitem__)
        if found[index] is not None and stands_alone.get(node.op)(call, node.device):
            alone.add(index)
    return tuple([None if index in alone else frame for index, frame in enumerate(found)])


class Members:
    """The nodes of a graph as members of fused programs."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.storage: Storage = assign_storage(graph)
        self.producers = graph.producers()
        self._frames = frames(graph)
        self._weights: dict[Op, int] = {}
        # By the identity of a frame, which layers share: to compare two takes as long as to see it.
        self._spaces: dict[int, Space] = {}
        self._places: dict[tuple[int, int, int], tuple[WayToSee, ...]] = {}

    def frame_of(self, index: int) -> Frame | None:
        """Return the frame of a node, or None for one that no program computes."""
        return self._frames[index]

    def natural_space(self, index: int) -> Space | None:
        """Return the space in which a node starts a program, or None for one that none does.

        The columns are the last axis, where the node leaves that open and the axis is no single
        column.
        """
        found = self.frame_of(index)
        if found is None:
            return None
        space = self._spaces.get(id(found))
        if space is None:
            space = self._spaces[id(found)] = _natural_space(found)
        return space

    def fit(self, index: int, space: Space, made: dict[ValueId, Kind]) -> Member | None:
        """Return a node as a member in a space, or None where it does not fit.

        `made` are the values of the program and their canonical kinds: they are read as what they
        are, and the others from tensors whose rows lie evenly spaced.
        """
        found = self.frame_of(index)
        if found is None:
            return None
        key = id(found), space.rows, space.columns
        places = self._places.get(key)
        if places is None:
            places = self._places[key] = tuple(_places(found, space))
        for place in places:
            member = self._placed(index, place, space, made)
            if member is not None:
                return member
        return None

    def can_read(self, value: ValueId, access: Access | None, space: Space) -> bool:
        """Whether the rows of a value lie so that a kernel reads them by an access."""
        return access is not None and self._read(value, access, space, {}) is not None

    def weight_of(self, member: Member) -> int:
        """Return about how many instructions a member takes: those of the first one of its op."""
        node = self.graph.nodes[member.node]
        if node.op not in self._weights:
            p = ProgramBuilder(1, 1)
            types = tuple([self.graph.types[v] for v in node.inputs])
            values = [
                p.input(ProgramInput(type_.dtype, read.access.kind))
                for type_, read in zip(types, member.reads, strict=True)
            ]
            expand.get(node.op)(p, node.attrs, types, tuple(values))
            self._weights[node.op] = p.num_instructions
        return self._weights[node.op]

    def _placed(
        self, index: int, place: WayToSee, space: Space, made: dict[ValueId, Kind]
    ) -> Member | None:
        node, write_only = self.graph.nodes[index], self._write_only(index)
        reads: list[Read] = []
        for value, access in zip(node.inputs, place.inputs, strict=True):
            read = None if access is None else self._read(value, access, space, made)
            if read is None:
                return None
            reads.append(read)
        kinds: list[Kind] = []
        for access in place.outputs:
            if access is None or access.count:
                return None
            kinds.append(access.kind)
        return Member(index, tuple(reads), tuple(kinds), write_only)

    def _write_only(self, index: int) -> tuple[ValueId, ...]:
        found = self.frame_of(index)
        outputs = self.graph.nodes[index].outputs
        return () if found is None else tuple([outputs[i] for i in found.write_only])

    def _read(
        self, value: ValueId, access: Access, space: Space, made: dict[ValueId, Kind]
    ) -> Read | None:
        base, access = self._behind_views(value, access, space)
        if base in made:
            is_same = canonical(access.kind, space) is made[base] and not access.count
            return Read(base, access) if is_same else None
        if self.storage.root[base] == base:  # dense, as whatever has bytes of its own
            return Read(base, access)
        type_, item = self.graph.types[base], self.graph.types[base].dtype.itemsize
        strides = tuple([step // item for step in self.storage.layout[base].strides_bytes])
        is_even = row_stride(access.kind, space.columns, type_.shape, strides) is not None
        return Read(base, access) if is_even else None

    def _behind_views(self, value: ValueId, access: Access, space: Space) -> tuple[ValueId, Access]:
        """Walk from a value through views to the tensor that they show."""
        while True:
            index = self.producers[value]
            node = self.graph.nodes[index]
            if self.storage.is_launch[index] or not node.inputs:
                return value, access
            before = self.graph.types[node.inputs[0]].shape
            if node.op is BROADCAST_TO:
                after = self.graph.types[value].shape
                behind = through_broadcast(access, before, after, space.columns)
                if behind is None:
                    return value, access
                access = behind
            elif not _keeps_order(node, before):
                return value, access
            value = node.inputs[0]


def _keeps_order(node: Node, shape: tuple[int, ...]) -> bool:
    """Whether a view has its elements in the same row-major order as what it shows."""
    if node.op is not TRANSPOSE:
        return node.op in (RESHAPE, STOP_GRADIENT)
    perm = [axis for axis in node.attrs.ints("perm") if shape[axis] != 1]
    return perm == sorted(perm)


def _natural_space(found: Frame) -> Space:
    shape = found.shape
    if found.num_trailing is None and shape[-1:] in ((), (1,)):
        return Space(1, math.prod(shape))
    first = len(shape) - (1 if found.num_trailing is None else found.num_trailing)
    return Space(math.prod(shape[:first]), math.prod(shape[first:]))


def _places(found: Frame, space: Space) -> Iterator[WayToSee]:
    """Yield the ways to see a frame in a space, the widest first."""
    shape, size, columns = found.shape, math.prod(found.shape), space.columns
    own = (
        None if found.num_trailing is None else math.prod(shape[len(shape) - found.num_trailing :])
    )
    if size == space.rows * columns and own in (None, columns):
        yield WayToSee(
            tuple([_by_rows(s, found, space) for s in found.inputs]),
            tuple([access_of(s, shape, columns) for s in found.outputs]),
        )
    if own is not None or found.is_whole:
        return
    num_outputs = len(found.outputs)
    if size == space.rows:
        wide = (*shape, columns)
        yield WayToSee(
            tuple([access_of((*s, 1), wide, columns) for s in found.inputs]), (ROW,) * num_outputs
        )
    if size == columns:
        yield WayToSee(
            tuple([_of_columns(math.prod(s), size) for s in found.inputs]), (COLUMN,) * num_outputs
        )
    if size == 1:
        yield WayToSee((SCALAR,) * len(found.inputs), (SCALAR,) * num_outputs)


def _by_rows(shape: Shape, found: Frame, space: Space) -> Access | None:
    """Return how an operand is read; the one label of a single row is a label of a row."""
    access = access_of(shape, found.shape, space.columns)
    has_rows = found.num_trailing is not None and space.rows == 1 and bool(shape)
    return ROW if has_rows and access == SCALAR else access


def _of_columns(num_elements: int, columns: int) -> Access | None:
    if num_elements == columns:
        return COLUMN
    return SCALAR if num_elements == 1 else None
