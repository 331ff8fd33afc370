"""Put elementwise ops, broadcasts and row reductions that feed one another into one launch.

    y = x + bias; h = gelu(y); z = layer_norm(h, ...)  ->  y, h, z, ... = group(x, bias, ...)

What only members read disappears: no bytes, no traffic. An op that finds no partner becomes a group
of its own, so that it too is run by generated code.

**Why no cycle can arise.** Every launch gets a depth, and so does every group: all its members have
the group's. A launch that reads nothing made by launches has depth 1. Any other one looks at what
it reads: of the launches that made it, let D be the greatest depth. It may join the groups of depth
D that it reads from, if it can join all of them at once: they become one, of depth D still. Else it
gets depth D + 1, alone or in a group of that depth. So every value that goes from one group (or
lone launch) to another goes from a smaller depth to a greater one, and a path that leaves a group
never comes back. An update counts all readers of the old value among what it reads, so it stays
behind them.

Two nodes of equal depth that read the same tensor also meet, as it is read once then.

A group never spans two phases, nor two rates: a value is not made before the phase that asked for
it, nor more often than it is needed.

Guarantees: every value that leaves a group has the type that it had; no op with an `expand` cell is
left that a group could compute; the order of nodes is topological.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from compiler.fusion.emit import emit_kernels
from compiler.fusion.fuse_products import fuse_products
from compiler.fusion.members import Member, Members
from compiler.fusion.narrow_broadcasts import narrow_broadcasts
from compiler.fusion.program import Kind
from compiler.fusion.spaces import FULL, Space, canonical
from compiler.fusion.stage_reductions import stage_reductions
from compiler.graph import Graph
from compiler.lowering.storage import launch_of_values, write_after_read
from compiler.passes.order import sort_launches
from compiler.rates import needed_per_step
from compiler.types import Phase, ValueId

MAX_INSTRUCTIONS = 64
"""Values of a row block that generated code holds at once; more spill, and compile longer."""

MAX_FULL_INPUTS = 10
"""Tensors read at once: with the outputs, about what the prefetchers of a core follow."""


@dataclass(slots=True)
class Group:
    """Members that become one launch; `made` are their values and canonical kinds.

    `write_only` values are made here too, but no member may read them. `full_bases` are the tensors
    read whole.
    """

    space: Space
    phase: Phase
    is_per_step: bool
    depth: int
    members: list[Member] = field(default_factory=list)
    made: dict[ValueId, Kind] = field(default_factory=dict)
    full_bases: dict[ValueId, None] = field(default_factory=dict)
    weight: int = 0


@dataclass(slots=True)
class _Assignment:
    """Which launch is in which group, while it is decided; `group_of[n]` is -1 for lone launches.

    Members read values of `kept` from memory only.
    Groups that joined another one point to it in `parent`.
    """

    members: Members
    made_by: tuple[int, ...]
    per_step: tuple[bool, ...]
    kept: frozenset[ValueId]
    depth: list[int]
    group_of: list[int]
    groups: list[Group] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    readers: dict[ValueId, int] = field(default_factory=dict)

    def find(self, group: int) -> int:
        """Return the group that a group has become part of."""
        while self.parent[group] != group:
            self.parent[group] = self.parent[self.parent[group]]
            group = self.parent[group]
        return group


def run(graph: Graph, *, with_products: bool = False, ends_at_saved: bool = False) -> Graph:
    """Return the graph with groups in place of the ops that they compute. O(n log n).

    `with_products` puts matrix products into the groups that alone read them. `ends_at_saved` ends
    forward groups at whole tensors that the backward pass keeps: what is computed of these may then
    run again from them alone, without the products before them.
    """
    members = Members(narrow_broadcasts(stage_reductions(graph)))
    fused = emit_kernels(members, find_groups(members, ends_at_saved=ends_at_saved))
    return fuse_products(fused) if with_products else fused


def find_groups(members: Members, *, ends_at_saved: bool = False) -> tuple[Group, ...]:
    """Return the groups of a graph: which nodes, in which space. O(n log n)."""
    graph, storage = members.graph, members.storage
    made_by, order = launch_of_values(graph), sort_launches(graph)
    old_readers: dict[int, list[int]] = {}
    for reader, writer in write_after_read(graph):
        if storage.is_launch[reader]:
            old_readers.setdefault(writer, []).append(reader)
    nodes = len(graph.nodes)
    kept = saved_values(members) if ends_at_saved else frozenset()
    state = _Assignment(members, made_by, needed_per_step(graph), kept, [0] * nodes, [-1] * nodes)
    for index in order:
        before = [made_by[v] for v in graph.nodes[index].inputs if made_by[v] >= 0]
        _assign(state, index, list(dict.fromkeys([*before, *old_readers.get(index, ())])))
    found = [g for i, g in enumerate(state.groups) if state.parent[i] == i]
    return tuple(found)


def saved_values(members: Members) -> frozenset[ValueId]:
    """Return the values of the forward pass that nodes behind it read, in person or as a view."""
    graph, root = members.graph, members.storage.root
    forward = {v for node in graph.nodes if node.phase is Phase.FORWARD for v in node.outputs}
    late = [node for node in graph.nodes if node.phase is not Phase.FORWARD]
    return frozenset([root[v] for node in late for v in node.inputs if root[v] in forward])


def _assign(state: _Assignment, index: int, before: list[int]) -> None:
    """Give a launch that runs after those of `before` its depth and group."""
    deepest = max([state.depth[n] for n in before], default=0)
    deep = [n for n in before if state.depth[n] == deepest]
    natural = state.members.natural_space(index)
    if natural is not None:
        found = _joinable(state, index, deep)
        if found is not None:
            _join(state, index, *found)
            return
        found = _beside(state, index, deepest + 1, natural) or _alone(
            state, index, deepest + 1, natural
        )
        if found is not None:
            _join(state, index, *found)
            return
    state.depth[index] = deepest + 1


def _joinable(state: _Assignment, index: int, deep: list[int]) -> tuple[list[int], Member] | None:
    """Return the groups of the deepest launches that a node reads from, if it may join them."""
    if not deep or any([state.group_of[n] < 0 for n in deep]):
        return None
    numbers = list(dict.fromkeys([state.find(state.group_of[n]) for n in deep]))
    groups = [state.groups[g] for g in numbers]
    first = groups[0]
    if any([g.space != first.space for g in groups]) or not _is_alike(state, index, groups):
        return None
    made = first.made if len(groups) == 1 else {v: k for g in groups for v, k in g.made.items()}
    member = state.members.fit(index, first.space, made)
    if member is None:
        return None
    # Every tensor of the deepest launches must be read as a value of the group.
    if any([state.made_by[r.base] in deep and r.base not in made for r in member.reads]):
        return None
    return (numbers, member) if _is_small(state, groups, member) else None


def _beside(
    state: _Assignment, index: int, depth: int, natural: Space
) -> tuple[list[int], Member] | None:
    """Return a group of a depth that reads one of the node's tensors, if the node may join it."""
    alone = state.members.fit(index, natural, {})
    for read in () if alone is None else alone.reads:
        number = state.readers.get(read.base, -1) if read.access == FULL else -1
        if number < 0:
            continue
        number = state.find(number)
        group = state.groups[number]
        if group.depth != depth or not _is_alike(state, index, [group]):
            continue
        member = state.members.fit(index, group.space, group.made)
        if member is not None and _is_small(state, [group], member):
            return [number], member
    return None


def _alone(
    state: _Assignment, index: int, depth: int, natural: Space
) -> tuple[list[int], Member] | None:
    """Return a new group for a node, or None where it does not fit its own space."""
    member = state.members.fit(index, natural, {})
    if member is None:
        return None
    phase = state.members.graph.nodes[index].phase
    state.groups.append(Group(natural, phase, state.per_step[index], depth))
    state.parent.append(len(state.parent))
    return [len(state.groups) - 1], member


def _is_alike(state: _Assignment, index: int, groups: list[Group]) -> bool:
    """Whether a node is of the phase and the rate of groups."""
    phase, rate = state.members.graph.nodes[index].phase, state.per_step[index]
    return all([g.phase is phase and g.is_per_step == rate for g in groups])


def _is_small(state: _Assignment, groups: list[Group], member: Member) -> bool:
    weight = sum([g.weight for g in groups]) + state.members.weight_of(member)
    full = dict.fromkeys([v for g in groups for v in g.full_bases])
    full.update(dict.fromkeys(_full_bases(member)))
    made = {v for g in groups for v in g.made}
    num_full = len([v for v in full if v not in made])
    return weight <= MAX_INSTRUCTIONS and num_full <= MAX_FULL_INPUTS


def _full_bases(member: Member) -> list[ValueId]:
    return [read.base for read in member.reads if read.access.kind is Kind.FULL]


def _join(state: _Assignment, index: int, numbers: list[int], member: Member) -> None:
    """Make several groups one, the largest of them, and put a node into it."""
    target = max(numbers, key=lambda g: len(state.groups[g].members))
    group = state.groups[target]
    for number in numbers:
        if number == target:
            continue
        other = state.groups[number]
        state.parent[number] = target
        group.members += other.members
        group.made.update(other.made)
        group.full_bases.update(other.full_bases)
        group.weight += other.weight
    node = state.members.graph.nodes[index]
    group.members.append(member)
    group.weight += state.members.weight_of(member)
    for read in member.reads:
        if read.base not in group.made and read.access.kind is Kind.FULL:
            group.full_bases[read.base] = None
            state.readers[read.base] = target
    for value, kind in zip(node.outputs, member.kinds, strict=True):
        is_kept = value in state.kept and kind is Kind.FULL
        if value not in member.write_only and not is_kept:
            group.made[value] = canonical(kind, group.space)
    state.depth[index] = group.depth
    state.group_of[index] = target
