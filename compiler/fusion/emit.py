"""Put the clusters that were found into the graph: programs, operands, and an order of all nodes.

From the last node to the first it is decided what is still read, so that a value which only members
read, and a view through which only members look, is made no more.

Scope, source and phase of a fused kernel are those of its last member.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from compiler.attrs import Attrs
from compiler.errors import InternalError
from compiler.fusion.builder import ProgramBuilder
from compiler.fusion.expansion import expand
from compiler.fusion.members import Member, Members, Read
from compiler.fusion.program import FusedProgram, Kind, ProgramInput
from compiler.fusion.spaces import Space, canonical
from compiler.graph import Graph, Node
from compiler.ops.fused import FUSED, fused_attrs
from compiler.ops.sources import CONSTANT, constant_array
from compiler.prune import prune
from compiler.types import ValueId

Found = tuple[Space, list[Member]]
"""A cluster that was found: what it works on, and its nodes."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """What stands as one node in the new graph: a cluster's members in order, or a lone node."""

    nodes: tuple[int, ...]
    inputs: tuple[ValueId, ...]
    cluster: int = -1


def emit_kernels(members: Members, clusters: Sequence[Found]) -> Graph:
    """Return the graph with a fused kernel for each cluster. O(n log n)."""
    graph = members.graph
    if not clusters:
        return graph
    is_needed = [False] * len(graph.types)
    for value in graph.roots():
        is_needed[value] = True
    nodes: list[Node] = []
    written: dict[object, _Written] = {}
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
        own = {v for m in members for v in graph.nodes[m.node].outputs}
        reads = dict.fromkeys([r.base for m in members for r in m.reads if r.base not in own])
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
    members: Members,
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
    members: Members, space: Space, parts: list[Member], outputs: tuple[ValueId, ...]
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
                made = graph.nodes[members.producers[base]]
                key.append(made.attrs if made.op is CONSTANT else None)
            key += [number[base], access.kind, access.every, access.count]
            key += [type_.dtype, type_.shape]
        for value in node.outputs:
            number[value] = len(number)
    for value in outputs:
        key += [number[value], graph.types[value].shape]
    return tuple(key), list(number)


def write_program(
    members: Members, space: Space, parts: list[Member], outputs: tuple[ValueId, ...]
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
        made = expand.get(node.op)(p, node.attrs, types, tuple(values))
        value_of.update(zip(node.outputs, made, strict=True))
    kinds = {v: k for m in parts for v, k in zip(graph.nodes[m.node].outputs, m.kinds, strict=True)}
    stored = [_stored(p, value_of[v], kinds[v], space) for v in outputs]
    program, kept = p.finish(tuple(stored))
    return program, tuple([operands[i] for i in kept])


def _stored(p: ProgramBuilder, value: int, kind: Kind, space: Space) -> int:
    """Return a value as an output of a kind: as many elements, made by an instruction."""
    if canonical(p.kind_of(value), space) is not canonical(kind, space):
        value = p.widened(value, kind)
    return p.copied(value) if p.is_input(value) else value


def _number(members: Members, value: ValueId) -> float | None:
    """Return what a constant of one element is, if a program can hold it as a number.

    NaN equals nothing, -0.0 equals 0.0 and infinity has no name in some languages: those stay
    operands.
    """
    node = members.graph.nodes[members.producers[value]]
    if node.op is not CONSTANT or members.graph.types[value].num_elements != 1:
        return None
    held = constant_array(node).reshape(()).item()
    is_plain = math.isfinite(held) and (held != 0 or math.copysign(1.0, held) > 0)
    return held if is_plain else None
