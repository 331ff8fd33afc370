"""Parts written where the tensor that joins them wants them.

A `concat` copies its parts into one tensor. Where the launch that makes a part writes into that
tensor itself, at the part's place, nothing is left to do, and the concat is no launch. So it is
with a reshape whose elements would have to move: who makes its input writes them as they will be
read. Between the two there may be views, which are followed back (column `concat_slices`).

It is decided when the launches stand in their chains, for three things must hold: maker, readers
and concat are in one chain; the kernels of all launches concerned are the ones they were, only with
strides, or faster ones; and the tensor that now lives from its first part on makes no peak. What
cannot be written in place is copied there, if that is less work than to join all parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from compiler.contract.attrs import NO_ATTRS
from compiler.contract.types import TensorType, ValueId, runs_of
from compiler.graph.graph import Graph, Node, consumers, new_value
from compiler.graph.registry import Layout, concat_slices, is_comm, is_source, view
from compiler.graph.target import CallOperand, Hardware, KernelCall, KernelInfo
from compiler.lowering.chains import ChainDraft
from compiler.ops.primitives.shape import COPY
from compiler.ops.primitives.transfer import is_copy
from compiler.storage.buffers import LaunchDraft, assign_buffers, last_uses
from compiler.storage.storage import Storage, call_of


@dataclass(frozen=True, slots=True)
class ConcatElision:
    """A graph, its storage, launches and chains; a node that joins parts may be no launch."""

    graph: Graph
    storage: Storage
    drafts: tuple[LaunchDraft, ...]
    chains: tuple[ChainDraft, ...]


@dataclass(slots=True)
class _Move:
    """Changes that are made together or not at all."""

    root: dict[ValueId, ValueId] = field(default_factory=dict)
    layout: dict[ValueId, Layout] = field(default_factory=dict)
    info: dict[int, KernelInfo] = field(default_factory=dict)
    moved: list[ValueId] = field(default_factory=list)

    def add(self, other: _Move) -> None:
        """Take over the changes of another one."""
        self.root |= other.root
        self.layout |= other.layout
        self.info |= other.info
        self.moved += other.moved


def elide_concats(
    graph: Graph,
    storage: Storage,
    drafts: tuple[LaunchDraft, ...],
    chains: Sequence[ChainDraft],
    hardware: Hardware,
) -> ConcatElision:
    """Return what is left to run when parts are written in place where that can be."""
    before = ConcatElision(graph, storage, drafts, tuple(chains))
    joining = [i for i, draft in enumerate(drafts) if concat_slices.has(draft.node.op)]
    if not joining:
        return before
    work = _Decisions(before, hardware)
    # From the last one on: what joins the parts of a part is placed before these are.
    for index in reversed(joining):
        work.take(index)
    return work.result()


def _is_place(type_: TensorType, layout: Layout) -> bool:
    """Whether something may be written there: of parts that lie less evenly no proof is known."""
    return runs_of(type_.shape, layout.strides_bytes, type_.dtype.itemsize) is not None


class _Decisions:
    """The state of the decisions so far."""

    def __init__(self, given: ConcatElision, hardware: Hardware) -> None:
        self._given = given
        self._graph, self._hardware = given.graph, hardware
        self._types = list(given.graph.types)
        self._root, self._layout = list(given.storage.root), list(given.storage.layout)
        self._drafts: list[LaunchDraft | None] = list(given.drafts)
        self._producers = given.graph.producers()
        self._readers = consumers(given.graph)
        is_launch = given.storage.is_launch
        nodes = [index for index, is_one in enumerate(is_launch) if is_one]
        self._draft_of = {node: draft for draft, node in enumerate(nodes)}
        self._chain_of: dict[int, tuple[int, int]] = {}
        for number, chain in enumerate(given.chains):
            for position, draft in enumerate(chain.launches):
                self._chain_of[draft] = number, position
        outside = [o.value for o in given.graph.outputs] + [w.value for w in given.graph.writes]
        self._owned = {*outside, *[self._root[v] for v in outside]}
        self._live: dict[int, _Live] = {}
        self._copies: dict[int, list[LaunchDraft]] = {}
        self._joined: dict[int, Node] = {}
        self._answers: dict[tuple[int, KernelCall], KernelInfo] = {}

    def take(self, index: int) -> None:
        """Let the parts of a concatenating launch be written in place, if that is possible."""
        draft = self._drafts[index]
        if draft is None:
            return
        node, joined = draft.node, draft.node.outputs[0]
        types = tuple([self._types[v] for v in node.inputs])
        if not self._types[joined].num_elements or index not in self._chain_of:
            return
        layouts = concat_slices.get(node.op)(
            self._types[joined], self._layout[joined], types, node.attrs
        )
        root = self._root[joined]
        move = _Move()
        copied: list[tuple[int, ValueId, Layout]] = []
        for place, (value, layout) in enumerate(zip(node.inputs, layouts, strict=True)):
            # One part that has no place stops all: a concat runs as a whole or not at all.
            if layout is None or not _is_place(self._types[value], layout):
                return
            change = self._moved(index, value, layout, root, move)
            if change is not None:
                move.add(change)
            elif self._types[value].num_elements:
                copied.append((place, value, layout))
        if not move.moved:
            return
        copies = [
            (place, *self._copy(value, layout, node.device)) for place, value, layout in copied
        ]
        # Copies of the other parts must cost less than the launch that they replace.
        if copies and sum([c[-1].duration_ns for c in copies]) >= draft.info.duration_ns:
            return
        if self._live_in(self._chain_of[index][0]).take(root, move.moved, self._scratch(move)):
            self._commit(index, move, copies)

    def result(self) -> ConcatElision:
        """Return what came of it."""
        before = self._given
        drafts: list[LaunchDraft] = []
        launches: list[tuple[int, ...]] = []
        for index, draft in enumerate(self._drafts):
            launched = self._copies.get(index, []) if draft is None else [draft]
            launches.append(tuple(range(len(drafts), len(drafts) + len(launched))))
            drafts += launched
        nodes: list[Node] = []
        is_launch: list[bool] = []
        for number, node in enumerate(before.graph.nodes):
            index = self._draft_of.get(number, -1)
            copies = self._copies.get(index, [])
            nodes += [*[copy.node for copy in copies], self._joined.get(index, node)]
            is_launch += [*[True] * len(copies), index >= 0 and index not in self._joined]
        chains = [
            replace(chain, launches=tuple([new for old in chain.launches for new in launches[old]]))
            for chain in before.chains
        ]
        return ConcatElision(
            replace(before.graph, nodes=tuple(nodes), types=tuple(self._types)),
            Storage(tuple(self._root), tuple(self._layout), tuple(is_launch)),
            tuple(drafts),
            tuple(chains),
        )

    # -- one part ----------------------------------------------------------------------------------

    def _moved(
        self, index: int, value: ValueId, layout: Layout, root: ValueId, so_far: _Move
    ) -> _Move | None:
        """Return the changes that have a part lie like this, or None where it cannot."""
        origin = self._trace_back(value, layout)
        if origin is None:
            return None
        base, own_layout = origin
        if not _is_place(self._types[base], own_layout):
            return None
        maker = self._draft_of[self._producers[base]]
        draft = self._drafts[maker]
        if draft is None or self._root[base] != base or base in self._owned or base in so_far.root:
            return None
        if draft.node.writes:
            return None
        move = _Move({base: root}, {base: own_layout}, {}, [base])
        affected = {maker}
        pending = [base]
        while pending:
            for reader in self._readers[pending.pop()]:
                if reader in self._draft_of:
                    affected.add(self._draft_of[reader])
                    continue
                node = self._graph.nodes[reader]
                new_layout = view.get(node.op)(
                    self._types[node.inputs[0]],
                    move.layout[node.inputs[0]],
                    self._types[node.outputs[0]],
                    node.attrs,
                )
                if new_layout is None:
                    return None
                move.root[node.outputs[0]], move.layout[node.outputs[0]] = root, new_layout
                pending.append(node.outputs[0])
        chain = self._chain_of[index][0]
        # Live bytes are followed within one chain only (`_Live`).
        if any([self._chain_of.get(t, (-1,))[0] != chain for t in affected]):
            return None
        is_same = self._ask_again(sorted(affected - {index}), so_far, move)
        return move if is_same else None

    def _trace_back(self, value: ValueId, layout: Layout) -> tuple[ValueId, Layout] | None:
        """Return the value of a launch that a value shows, and how it lies if that lies so."""
        while True:
            producer = self._producers[value]
            if producer in self._draft_of:
                return value, layout
            node = self._graph.nodes[producer]
            if is_source.get(node.op) or not concat_slices.has(node.op):
                return None
            types = (self._types[node.inputs[0]],)
            (inner,) = concat_slices.get(node.op)(self._types[value], layout, types, node.attrs)
            if inner is None:
                return None
            value, layout = node.inputs[0], inner

    def _ask_again(self, touched: list[int], so_far: _Move, move: _Move) -> bool:
        """Whether the launches that touch what moves keep their kernels; notes what they need."""
        layouts = so_far.layout | move.layout
        for index in touched:
            draft = self._drafts[index]
            if draft is None or is_comm.get(draft.node.op) or is_copy(draft.node):
                return False
            call = call_of(draft.node, self._types, lambda v: layouts.get(v, self._layout[v]))
            try:
                info = self._query(call, draft.node.device)
            except LookupError:
                return False
            # Another layout may need another kernel; a slower one is not worth the copy that is
            # saved.
            is_slower = info.duration_ns > draft.info.duration_ns
            if info.kernel != draft.info.kernel and is_slower:
                return False
            move.info[index] = info
        return True

    def _copy(
        self, value: ValueId, layout: Layout, device: int
    ) -> tuple[ValueId, Layout, KernelInfo]:
        """Return a part that is to be copied into its place, with what that needs."""
        source = CallOperand(self._types[value], self._layout[value])
        into = CallOperand(self._types[value], layout)
        call = KernelCall(COPY.name, NO_ATTRS, (source,), (into,))
        return value, layout, self._query(call, device)

    def _query(self, call: KernelCall, device: int) -> KernelInfo:
        """Ask a device's target, once for all layers. Raises LookupError when it has no kernel."""
        info = self._answers.get((device, call))
        if info is None:
            info = self._answers[device, call] = self._hardware.targets[device].query(call)
        return info

    # -- all parts of one launch -------------------------------------------------------------------

    def _live_in(self, chain: int) -> _Live:
        if chain not in self._live:
            self._live[chain] = _Live(self._given, chain)
        return self._live[chain]

    def _scratch(self, move: _Move) -> dict[int, int]:
        """Return how many bytes of workspace more the launches of a move need, by their place."""
        needs = [(self._drafts[draft], draft, info) for draft, info in move.info.items()]
        return {
            self._chain_of[draft][1]: info.workspace_bytes - before.info.workspace_bytes
            for before, draft, info in needs
            if before is not None
        }

    def _commit(
        self, index: int, move: _Move, copies: list[tuple[int, ValueId, Layout, KernelInfo]]
    ) -> None:
        """Make the changes, and copies of the parts that stay where they are."""
        for value, root in move.root.items():
            self._root[value], self._layout[value] = root, move.layout[value]
        for other, info in move.info.items():
            draft = self._drafts[other]
            if draft is not None:
                self._drafts[other] = replace(draft, info=info)
        draft = self._drafts[index]
        if draft is None:
            return
        node, inputs = draft.node, list(draft.node.inputs)
        drafts: list[LaunchDraft] = []
        for place, value, layout, info in copies:
            copy = new_value(self._types, self._types[value])
            self._root.append(self._root[node.outputs[0]])
            self._layout.append(layout)
            inputs[place] = copy
            single = replace(
                node, op=COPY, inputs=(value,), outputs=(copy,), attrs=NO_ATTRS, after=()
            )
            drafts.append(LaunchDraft(single, info))
        self._copies[index], self._drafts[index] = drafts, None
        self._joined[index] = replace(node, inputs=tuple(inputs))


class _Live:
    """Live bytes of a chain, by launch, as parts move into what joins them; workspaces count."""

    def __init__(self, given: ConcatElision, chain: int) -> None:
        graph, storage = given.graph, given.storage
        drafts = tuple([given.drafts[i] for i in given.chains[chain].launches])
        roots = {storage.root[v] for d in drafts for v in d.node.outputs}
        elsewhere = {
            storage.root[v]
            for number, other in enumerate(given.chains)
            if number != chain
            for i in other.launches
            for v in given.drafts[i].node.inputs
        }
        live_out = {storage.root[o.value] for o in graph.outputs} | (elsewhere & roots)
        buffers = assign_buffers(graph, storage, drafts, live_out)
        self._sizes = {root: graph.types[root].size_bytes for root in roots}
        self._made_at: dict[ValueId, int] = {}
        self._last = last_uses(storage, drafts)
        for index, draft in enumerate(drafts):
            for value in draft.node.outputs:
                self._made_at.setdefault(storage.root[value], index)
        self._interval = {
            root: buffers.buffers[index].interval for root, index in buffers.of_root.items()
        }
        self._bytes = np.array([draft.info.workspace_bytes for draft in drafts], np.int64)
        for buffer in buffers.buffers:
            start, end = buffer.interval
            self._bytes[start:end] += buffer.size_bytes
        self._peak = int(self._bytes.max(initial=0))

    def take(
        self, root: ValueId, parts: Sequence[ValueId], scratch_bytes: Mapping[int, int]
    ) -> bool:
        """Have values live in another one, from the first of them on, unless that makes a peak.

        `scratch_bytes` are the bytes of workspace that launches need more by it.
        """
        first = min([self._made_at[part] for part in parts])
        begins, ends = self._made_at[root], self._ends(root)
        last = max([self._ends(part) for part in parts])
        after = self._bytes.copy()
        for launch, size in scratch_bytes.items():
            after[launch] += size
        if root in self._interval:
            after[first:begins] += self._sizes[root]
            after[ends:last] += self._sizes[root]
        for part in parts:
            if part not in self._interval:
                continue
            start, end = self._interval[part]
            # Bytes that another value had before, or has after, stay while that one lives.
            made_at, done_at = self._made_at[part], self._ends(part)
            after[made_at + (start < made_at) : done_at - (done_at < end)] -= self._sizes[part]
        if int(after.max(initial=0)) > self._peak:
            return False
        self._bytes, self._made_at[root] = after, min(first, begins)
        self._last[root] = max(ends, last) - 1
        return True

    def _ends(self, root: ValueId) -> int:
        """Return the launch after the last one that touches a value."""
        return self._last.get(root, self._made_at[root]) + 1
