"""Make one launch of many updates, where a device takes that: a call costs more than most of them.

    sgd_update(w, dw, lr), ..., sgd_update(b, db, lr)  ->  ..., joined_updates(w, b, dw, db, lr)

Updates stand right after their gradients, which so end early. Those of one kind (the same program,
numbers, device and rate) wait for one another here, and their gradients with them, as long as no
launch has more live bytes by it than the fullest launch had before. So the peak stays what it was:
the budget's passes have run, and what they chose holds. Nothing waits beyond a reader of what it
makes, or a writer of what it reads.

Guarantees: every variable has the bits that it had; the peak of live bytes is none higher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from compiler.fusion.lone_updates import LoneUpdate, joined, lone_update
from compiler.graph import Graph, Node
from compiler.lowering.buffers import Buffers, assign_buffers, draft_launches
from compiler.lowering.storage import Storage, assign_storage
from compiler.ops.joined_updates import MOST_WRITTEN
from compiler.rates import needed_per_step
from compiler.target import Hardware
from compiler.types import ValueId


def join_updates(graph: Graph, hardware: Hardware) -> Graph:
    """Return an ordered graph with updates joined. O(launches + updates)."""
    kinds = _kinds(graph, hardware)
    if len(kinds) < 2:
        return graph
    join = _UpdateOrder(graph, hardware, kinds)
    for index, node in enumerate(graph.nodes):
        join.take(index, node)
    join.flush()
    return replace(graph, nodes=tuple(join.nodes))


@dataclass(frozen=True, slots=True)
class _WaitingUpdate:
    """An update that may wait, and what it has in common with others: `most` are one launch."""

    alone: LoneUpdate
    key: tuple[object, ...]
    most: int


def _kinds(graph: Graph, hardware: Hardware) -> dict[int, _WaitingUpdate]:
    """Return every update that may wait for others, by its node."""
    if all([target.joined_updates(1) <= 1 for target in hardware.targets]):
        return {}
    per_step = needed_per_step(graph)
    found: dict[int, _WaitingUpdate] = {}
    for index, node in enumerate(graph.nodes):
        alone = lone_update(graph, node)
        if alone is None:
            continue
        most = hardware.targets[node.device].joined_updates(len(alone.full))
        most = min(most, MOST_WRITTEN // len(alone.over))
        if most > 1:
            same = node.device, per_step[index], node.phase
            key = (alone.program, alone.over, alone.rule, alone.numbers, *same)
            found[index] = _WaitingUpdate(alone, key, most)
    return found


@dataclass(slots=True)
class _UpdateOrder:
    """The new order of the nodes, and the updates that wait, by their kind."""

    graph: Graph
    hardware: Hardware
    kinds: dict[int, _WaitingUpdate]
    nodes: list[Node] = field(default_factory=list)
    waiting: dict[tuple[object, ...], list[int]] = field(default_factory=dict)
    storage: Storage = field(init=False)
    live: _LiveBytes = field(init=False)
    held: int = 0
    made: set[ValueId] = field(default_factory=set)
    read: set[ValueId] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.storage = assign_storage(self.graph)
        self.live = _LiveBytes.of(self.graph, self.storage, self.hardware)

    def take(self, index: int, node: Node) -> None:
        """Put a node at its place, or let it wait."""
        written = [self.storage.root[node.outputs[output]] for output, _ in node.writes]
        is_met = not self.made.isdisjoint((*node.inputs, *node.after))
        if is_met or not self.read.isdisjoint(written):
            self.flush()
        if self.storage.is_launch[index] and not self.live.has_room(index, self.held):
            self.flush()
        kind = self.kinds.get(index)
        if kind is None:
            self.nodes.append(node)
            return
        own = self.waiting.setdefault(kind.key, [])
        own.append(index)
        self.held += self.live.held_by(node)
        self.made.update(node.outputs)
        self.read.update([self.storage.root[v] for v in node.inputs])
        if len(own) == kind.most:
            self._put(self.waiting.pop(kind.key))

    def flush(self) -> None:
        """Put all that waits."""
        for own in self.waiting.values():
            self._put(own)
        self.waiting, self.held = {}, 0
        self.made, self.read = set(), set()

    def _put(self, own: Sequence[int]) -> None:
        """Put some updates of a kind as one node, with the line of the first."""
        nodes = [self.graph.nodes[index] for index in own]
        self.held -= sum([self.live.held_by(node) for node in nodes])
        if len(nodes) == 1:
            self.nodes.append(nodes[0])
            return
        outputs = tuple([value for node in nodes for value in node.outputs])
        after = tuple(dict.fromkeys([value for node in nodes for value in node.after]))
        first = replace(nodes[0], after=after)
        updates = [self.kinds[index].alone for index in own]
        self.nodes.append(joined(self.graph, first, updates, outputs))


@dataclass(frozen=True, slots=True)
class _LiveBytes:
    """The bytes that live while each launch runs, and what of them an update alone holds."""

    graph: Graph
    storage: Storage
    buffers: Buffers
    of_launch: dict[int, int]
    peak: int

    @classmethod
    def of(cls, graph: Graph, storage: Storage, hardware: Hardware) -> _LiveBytes:
        """Return those of a graph in its order, all devices together."""
        drafts = draft_launches(graph, storage, hardware)
        buffers = assign_buffers(graph, storage, drafts, ())
        change = np.zeros(len(drafts) + 1, np.int64)
        for buffer in buffers.buffers:
            change[buffer.interval[0]] += buffer.size_bytes
            change[buffer.interval[1]] -= buffer.size_bytes
        live = np.cumsum(change)[: len(drafts)]
        live += np.array([draft.info.workspace_bytes for draft in drafts], np.int64)
        by_node = dict(zip(storage.launches, live.tolist(), strict=True))
        return cls(graph, storage, buffers, by_node, int(live.max(initial=0)))

    def has_room(self, launch: int, held: int) -> bool:
        """Whether a launch may run while so many bytes more are held."""
        return self.of_launch[launch] + held <= self.peak

    def held_by(self, node: Node) -> int:
        """Return the bytes that live on while an update waits."""
        roots = [self.storage.root[v] for v in node.inputs]
        own = dict.fromkeys([self.buffers.of_root[r] for r in roots if r in self.buffers.of_root])
        return sum([self.buffers.buffers[b].size_bytes for b in own])
