"""Members of fused kernels: how a node fits into a program, and how a cluster becomes one node.

A member reads tensors by how they lie in the space of its program. It looks through views that keep
the order of elements, so that a reshape between two members, or a broadcast in front of one, costs
nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from compiler.contract.attrs import Attrs
from compiler.contract.errors import InternalError
from compiler.contract.program import FusedProgram, Kind, ProgramInput
from compiler.contract.spaces import (
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
from compiler.contract.types import Phase, ValueId
from compiler.graph.graph import Graph, Node, cached_analysis, prune
from compiler.graph.program_builder import (
    IterationDomain,
    ProgramBuilder,
    expand,
    frame,
    has_plugin_kernel,
)
from compiler.graph.registry import Op, input_output_aliases
from compiler.ops.language.program_ops import FUSED, fused_attrs
from compiler.ops.primitives.shape import BROADCAST_TO, RESHAPE, STOP_GRADIENT, TRANSPOSE
from compiler.ops.primitives.sources import CONSTANT, constant_array
from compiler.storage.storage import Storage, assign_storage, call_of, launch_of_values


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
class SpaceMapping:
    """One way to see a frame in a space: how each operand would be read, None where it cannot."""

    inputs: tuple[Access | None, ...]
    outputs: tuple[Access | None, ...]


@cached_analysis
def _frames(graph: Graph) -> tuple[IterationDomain | None, ...]:
    """Return the frame of each node, None for one that no program can compute."""
    is_launch, types = assign_storage(graph).is_launch, graph.types
    domains: list[IterationDomain | None] = []
    for index, node in enumerate(graph.nodes):
        if not expand.has(node.op) or not is_launch[index] or input_output_aliases.get(node.op):
            domains.append(None)
            continue
        inputs = tuple([types[v] for v in node.inputs])
        outputs = tuple([types[v] for v in node.outputs])
        domains.append(frame.get(node.op)(inputs, outputs, node.attrs))
    return tuple(domains)


def frames(graph: Graph) -> tuple[IterationDomain | None, ...]:
    """Return the frame of each node, None for one that no program is to compute.

    A kernel from elsewhere may take a node, its operands lying as they do now. Whether one does is
    no fact of the graph alone: it depends on what the node's device is, and on who was registered.
    """
    domains = _frames(graph)
    candidates = [index for index, node in enumerate(graph.nodes) if has_plugin_kernel.has(node.op)]
    if not candidates:
        return domains
    plugin_nodes: set[int] = set()
    layout = assign_storage(graph).layout
    for index in candidates:
        node = graph.nodes[index]
        call = call_of(node, graph.types, layout.__getitem__)
        if domains[index] is not None and has_plugin_kernel.get(node.op)(call, node.device):
            plugin_nodes.add(index)
    return tuple([None if index in plugin_nodes else frame for index, frame in enumerate(domains)])


class FusionCandidates:
    """The nodes of a graph as members of fused programs."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.storage: Storage = assign_storage(graph)
        self.producers = graph.producers()
        self._frames = frames(graph)
        self._weights: dict[Op, int] = {}
        # By the identity of a frame, which layers share: to compare two takes as long as to see it.
        self._spaces: dict[int, Space] = {}
        self._places: dict[tuple[int, int, int], tuple[SpaceMapping, ...]] = {}

    def frame_of(self, index: int) -> IterationDomain | None:
        """Return the frame of a node, or None for one that no program computes."""
        return self._frames[index]

    def natural_space(self, index: int) -> Space | None:
        """Return the space in which a node starts a program, or None for one that none does.

        The columns are the last axis, where the node leaves that open and the axis is no single
        column.
        """
        domain = self.frame_of(index)
        if domain is None:
            return None
        space = self._spaces.get(id(domain))
        if space is None:
            space = self._spaces[id(domain)] = _natural_space(domain)
        return space

    def fit(self, index: int, space: Space, made: dict[ValueId, Kind]) -> Member | None:
        """Return a node as a member in a space, or None where it does not fit.

        `made` are the values of the program and their canonical kinds: they are read as what they
        are, and the others from tensors whose rows lie evenly spaced.
        """
        domain = self.frame_of(index)
        if domain is None:
            return None
        key = id(domain), space.rows, space.columns
        places = self._places.get(key)
        if places is None:
            places = self._places[key] = tuple(_places(domain, space))
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
        self, index: int, place: SpaceMapping, space: Space, made: dict[ValueId, Kind]
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
        domain = self.frame_of(index)
        outputs = self.graph.nodes[index].outputs
        return () if domain is None else tuple([outputs[i] for i in domain.write_only])

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


def _natural_space(found: IterationDomain) -> Space:
    shape = found.shape
    # No last axis, or one of one element: the elements are the columns of a single row.
    if found.num_trailing is None and shape[-1:] in ((), (1,)):
        return Space(1, math.prod(shape))
    first = len(shape) - (1 if found.num_trailing is None else found.num_trailing)
    return Space(math.prod(shape[:first]), math.prod(shape[first:]))


def _places(found: IterationDomain, space: Space) -> Iterator[SpaceMapping]:
    """Yield the ways to see a frame in a space, the widest first."""
    shape, size, columns = found.shape, math.prod(found.shape), space.columns
    trailing = (
        None if found.num_trailing is None else math.prod(shape[len(shape) - found.num_trailing :])
    )
    if size == space.rows * columns and trailing in (None, columns):
        yield SpaceMapping(
            tuple([_by_rows(s, found, space) for s in found.inputs]),
            tuple([access_of(s, shape, columns) for s in found.outputs]),
        )
    if trailing is not None or found.is_whole:
        return
    num_outputs = len(found.outputs)
    if size == space.rows:
        wide = (*shape, columns)
        yield SpaceMapping(
            tuple([access_of((*s, 1), wide, columns) for s in found.inputs]), (ROW,) * num_outputs
        )
    if size == columns:
        yield SpaceMapping(
            tuple([_of_columns(math.prod(s), size) for s in found.inputs]), (COLUMN,) * num_outputs
        )
    if size == 1:
        yield SpaceMapping((SCALAR,) * len(found.inputs), (SCALAR,) * num_outputs)


def _by_rows(shape: Shape, found: IterationDomain, space: Space) -> Access | None:
    """Return how an operand is read; the one label of a single row is a label of a row."""
    access = access_of(shape, found.shape, space.columns)
    has_rows = found.num_trailing is not None and space.rows == 1 and bool(shape)
    return ROW if has_rows and access == SCALAR else access


def _of_columns(num_elements: int, columns: int) -> Access | None:
    if num_elements == columns:
        return COLUMN
    return SCALAR if num_elements == 1 else None


# Put clusters into the graph: programs, operands, and an order of all nodes.
#
# From the last node to the first it is decided what is still read, so that a value which only
# members read, and a view through which only members look, is made no more.
#
# Scope, source and phase of a fused kernel are those of its last member.

Found = tuple[Space, list[Member]]
"""A cluster that was found: what it works on, and its nodes."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """What stands as one node in the new graph: a cluster's members in order, or a lone node."""

    nodes: tuple[int, ...]
    inputs: tuple[ValueId, ...]
    cluster: int = -1


def emit_kernels(members: FusionCandidates, clusters: Sequence[Found]) -> Graph:
    """Return the graph with a fused kernel for each cluster. O(n log n)."""
    graph = members.graph
    if not clusters:
        return graph
    is_needed = [False] * len(graph.types)
    for value in graph.roots():
        is_needed[value] = True
    nodes: list[Node] = []
    written: dict[object, _Written] = {}
    # From the end, so that all readers of a unit's values have been seen.
    for unit in reversed(_sorted(graph, _units(graph, clusters))):
        outputs = [v for n in unit.nodes for v in graph.nodes[n].outputs if is_needed[v]]
        if not outputs:
            continue
        if unit.cluster < 0:
            node = graph.nodes[unit.nodes[0]]
        else:
            space, parts = clusters[unit.cluster]
            node = _fused_node(members, space, _in_order(parts), tuple(outputs), written)
        nodes.append(node)
        for value in node.inputs:
            is_needed[value] = True
    nodes.reverse()
    return prune(replace(graph, nodes=tuple(nodes)))


def _in_order(members: list[Member]) -> list[Member]:
    """Return members so that each stands after those it reads from. Nodes stand so in a graph."""
    return sorted(members, key=lambda member: member.node)


def _units(graph: Graph, clusters: Sequence[Found]) -> list[_Unit]:
    """Return the units of a graph, by the last of their nodes."""
    last: dict[int, _Unit] = {}
    inside: set[int] = set()
    for number, (_, parts) in enumerate(clusters):
        members = _in_order(parts)
        outputs = {v for m in members for v in graph.nodes[m.node].outputs}
        reads = dict.fromkeys([r.base for m in members for r in m.reads if r.base not in outputs])
        indices = tuple([m.node for m in members])
        inside.update(indices)
        last[indices[-1]] = _Unit(indices, tuple(reads), number)
    units: list[_Unit] = []
    for index, node in enumerate(graph.nodes):
        if index in last:
            units.append(last[index])
        elif index not in inside:
            units.append(_Unit((index,), node.inputs))
    return units


def _sorted(graph: Graph, units: list[_Unit]) -> list[_Unit]:
    """Return the units in topological order, nearest to the given one (Kahn, 1962)."""
    made_by: dict[ValueId, int] = {
        v: i for i, unit in enumerate(units) for n in unit.nodes for v in graph.nodes[n].outputs
    }
    # Counts with repeats on both sides: a value that is read twice is counted down twice.
    waiting = [len(unit.inputs) for unit in units]
    readers: list[list[int]] = [[] for _ in units]
    for index, unit in enumerate(units):
        for value in unit.inputs:
            readers[made_by[value]].append(index)
    ready = [index for index, count in enumerate(waiting) if count == 0]
    order: list[_Unit] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(units[index])
        for reader in readers[index]:
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heapq.heappush(ready, reader)
    if len(order) < len(units):  # what waits for itself would be left out without a word
        raise InternalError("kernels were fused that read each other's results")
    return order


_Written = tuple[Attrs, tuple[int, ...]]
"""The attributes of a fused kernel, and which of the values of its members are its operands."""


def _fused_node(
    members: FusionCandidates,
    space: Space,
    parts: list[Member],
    outputs: tuple[ValueId, ...],
    written: dict[object, _Written],
) -> Node:
    graph = members.graph
    key, values = _likeness(members, space, parts, outputs)
    if key not in written:
        program, inputs = write_program(members, space, parts, outputs)
        names = tuple([graph.nodes[m.node].op.name for m in parts])
        shapes = tuple([graph.types[v].shape for v in outputs])
        attrs = Attrs(fused_attrs(program, space, shapes, names))
        written[key] = attrs, tuple([values.index(v) for v in inputs])
    attrs, places = written[key]
    last = graph.nodes[parts[-1].node]
    inputs = tuple([values[i] for i in places])
    return replace(last, op=FUSED, inputs=inputs, outputs=outputs, attrs=attrs)


def _likeness(
    members: FusionCandidates, space: Space, parts: list[Member], outputs: tuple[ValueId, ...]
) -> tuple[object, list[ValueId]]:
    """Return what is equal for kernels that are alike, and the values of the members.

    Layers repeat: a program is written for the first of them.
    """
    graph = members.graph
    number: dict[ValueId, int] = {}
    key: list[object] = [space.rows, space.columns]
    for member in parts:
        node = graph.nodes[member.node]
        key += [node.op, node.attrs, member.kinds]
        for value, read in zip(node.inputs, member.reads, strict=True):
            base, access, type_ = read.base, read.access, graph.types[value]
            if base not in number:
                number[base] = len(number)
                maker = graph.nodes[members.producers[base]]
                # A constant may become a number of the program, so that kernels are alike only with
                # equal ones.
                key.append(maker.attrs if maker.op is CONSTANT else None)
            key += [number[base], access.kind, access.every, access.count]
            key += [type_.dtype, type_.shape]
        for value in node.outputs:
            number[value] = len(number)
    for value in outputs:
        key += [number[value], graph.types[value].shape]
    return tuple(key), list(number)


def write_program(
    members: FusionCandidates, space: Space, parts: list[Member], outputs: tuple[ValueId, ...]
) -> tuple[FusedProgram, tuple[ValueId, ...]]:
    """Return the program of members in order, and the operands it reads. O(instructions)."""
    graph = members.graph
    p = ProgramBuilder(space.rows, space.columns)
    value_of: dict[ValueId, int] = {}
    operand_of: dict[Read, int] = {}
    operands: list[ValueId] = []
    for member in parts:
        node = graph.nodes[member.node]
        values: list[int] = []
        for read in member.reads:
            if read.base in value_of:
                values.append(value_of[read.base])
                continue
            if read not in operand_of:
                number = _number(members, read.base)
                dtype = graph.types[read.base].dtype
                if number is None:
                    a = read.access
                    operand_of[read] = p.input(ProgramInput(dtype, a.kind, a.every, a.count))
                    operands.append(read.base)
                else:
                    operand_of[read] = p.constant(number, dtype)
            values.append(operand_of[read])
        types = tuple([graph.types[v] for v in node.inputs])
        results = expand.get(node.op)(p, node.attrs, types, tuple(values))
        value_of.update(zip(node.outputs, results, strict=True))
    kinds = {v: k for m in parts for v, k in zip(graph.nodes[m.node].outputs, m.kinds, strict=True)}
    stored = [_stored(p, value_of[v], kinds[v], space) for v in outputs]
    program, used = p.finish(tuple(stored))
    # `finish` drops inputs that no output needs; `used` are those that stay.
    return program, tuple([operands[i] for i in used])


def _stored(p: ProgramBuilder, value: int, kind: Kind, space: Space) -> int:
    """Return a value as an output of a kind: as many elements, made by an instruction."""
    if canonical(p.kind_of(value), space) is not canonical(kind, space):
        value = p.widened(value, kind)
    return p.copied(value) if p.is_input(value) else value


def _number(members: FusionCandidates, value: ValueId) -> float | None:
    """Return what a constant of one element is, if a program can hold it as a number.

    NaN equals nothing, -0.0 equals 0.0 and infinity has no name in some languages: those stay
    operands.
    """
    node = members.graph.nodes[members.producers[value]]
    if node.op is not CONSTANT or members.graph.types[value].num_elements != 1:
        return None
    number = constant_array(node).reshape(()).item()
    is_plain = math.isfinite(number) and (number != 0 or math.copysign(1.0, number) > 0)
    return number if is_plain else None


# Which nodes of the backward pass may wait for the kernel that reads them first.
#
# A node that reads nothing made in the backward pass could run at any time after the forward pass:
# a clone of `recompute_cheap`, or a factor of a gradient that needs no gradient. Where the loss is
# linear in a long chain of elementwise ops, all of its backward pass is such. So few wait for one
# reader; the node that would have to wait for more is placed, and they with it.

MAX_WAITING = 16
"""Nodes that wait for one, those that they wait for included: a norm's factors are six."""


def deferrable_nodes(members: FusionCandidates) -> list[bool]:
    """Mark the nodes of a graph that may wait. O(nodes)."""
    graph = members.graph
    made_by = launch_of_values(graph)
    sizes = [0] * len(graph.nodes)
    for index, node in enumerate(graph.nodes):
        if node.phase is not Phase.BACKWARD or not members.storage.is_launch[index]:
            continue
        before = {made_by[v] for v in node.inputs if made_by[v] >= 0}
        # A launch of the backward pass has a size only where it may wait itself.
        is_ready = all([graph.nodes[n].phase is Phase.FORWARD or sizes[n] for n in before])
        size = 1 + sum([sizes[n] for n in before])
        if is_ready and size <= MAX_WAITING and members.frame_of(index) is not None:
            sizes[index] = size
    return [size > 0 for size in sizes]
