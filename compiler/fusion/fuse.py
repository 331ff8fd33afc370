"""Clusters: elementwise ops, broadcasts and row reductions that feed one another, in one launch.

    y = x + bias; h = gelu(y); z = layer_norm(h, ...)  ->  y, h, z, ... = fused(x, bias, ...)

The nodes of one launch are a *cluster*. What only they read disappears: no bytes, no traffic. An op
that finds no partner becomes a cluster of its own, so that generated code runs it too.

**Why no cycle can arise.** Every launch gets a depth, and so does every cluster: all its members
have the cluster's. A launch that reads nothing made by launches has depth 1. Any other one looks at
what it reads: of the launches that made it, let D be the greatest depth. It may join the clusters
of depth D that it reads from, if it can join all of them at once: they become one, of depth D
still. Else it gets depth D + 1, alone or in a cluster of that depth. So every value that goes from
one cluster (or lone launch) to another goes from a smaller depth to a greater one, and a path that
leaves a cluster never comes back. An update counts all readers of the old value among what it
reads, so it stays after them.

Two nodes of equal depth that read the same tensor also meet, as it is read once then.

**Nodes that wait.** A node of the backward pass that reads nothing made there (`deferrable_nodes`)
is given no depth until something reads it, and joins that reader. So what `recompute_cheap`
computes again costs neither a launch nor a tensor. If it must be in memory, as a matrix product
reads it, it joins a cluster of any greater depth that reads the same tensor: what it reads comes
from smaller depths still, and its readers come after.

A cluster never spans two phases, two devices, nor two rates: a value is not made before the phase
that asked for it, nor elsewhere, nor more often than it is needed. Nor does it span a collective,
which would then wait for what comes after it in the order of all ranks.

Guarantees: every value that leaves a cluster has the type that it had; no op with an `expand` cell
is left that a cluster could compute; the order of nodes is topological.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from compiler.contract.program import Kind
from compiler.contract.spaces import FULL, Space, canonical
from compiler.contract.types import Phase, ValueId
from compiler.fusion.join_updates import update_programs
from compiler.fusion.members import (
    Found,
    FusionCandidates,
    Member,
    deferrable_nodes,
    emit_kernels,
)
from compiler.fusion.prepare import dense_operands, narrow_broadcasts, stage_reductions
from compiler.fusion.recompute_cheap import recompute_cheap
from compiler.graph.graph import Graph, Node, consumers
from compiler.graph.target import WIDE_IN_CACHE
from compiler.ops.families.arithmetic import ADD
from compiler.ops.primitives.matmul import MATMUL
from compiler.sbp.collective_schedule import last_buckets_before
from compiler.storage.order import needed_per_step, sort_launches
from compiler.storage.storage import launch_of_values, write_after_read

# Values that the kernel of a product keeps for the backward pass, and goes on from.
#
#     h = x @ w + bias; g = gelu(h); y = g @ v        h is kept, for the gradient of gelu
#
# A forward cluster ends at a kept value, so that what follows may run again from it alone. Where
# the kernel of a product puts out both h and g (`Hardware.epilogue_ops`), one launch that makes
# both is worth more: it runs again whole or not at all. The bits are the same either way.
#
# h is a sum with a product in it. In the forward pass only one op of `product_finishes` reads h,
# and only products read g.

FinishesOf = Callable[[int], tuple[str, ...]]
"""From a device's number to the ops that its products go on with."""


def no_finishes(device: int) -> tuple[str, ...]:
    """Return no ops: a device's product kernels end at kept values."""
    return ()


def epilogue_saved_values(members: FusionCandidates, finishes: FinishesOf) -> frozenset[ValueId]:
    """Return the values that a product's kernel keeps as it goes on from them. O(nodes)."""
    nodes = members.graph.nodes
    ops_of = {device: finishes(device) for device in {node.device for node in nodes}}
    if not any(ops_of.values()):
        return frozenset()
    values: list[ValueId] = []
    for node in nodes:
        if node.phase is not Phase.FORWARD or node.op.name not in ops_of[node.device]:
            continue
        value = members.storage.root[node.inputs[0]]
        readers, after = _readers(members, value), _readers(members, node.outputs[0])
        if readers == [node] and _has_product(members, value, node) and _are_products(after, node):
            values.append(value)
    return frozenset(values)


def _readers(members: FusionCandidates, value: ValueId) -> list[Node]:
    """Return the forward launches that read a value, in person or as a view."""
    graph, is_launch = members.graph, members.storage.is_launch
    readers: list[Node] = []
    todo = [value]
    while todo:
        for index in consumers(graph)[todo.pop()]:
            node = graph.nodes[index]
            if not is_launch[index]:
                todo += node.outputs
            elif node.phase is Phase.FORWARD:
                readers.append(node)
    return readers


def _are_products(readers: list[Node], node: Node) -> bool:
    return bool(readers) and all([r.op is MATMUL and r.device == node.device for r in readers])


def _has_product(members: FusionCandidates, value: ValueId, reader: Node) -> bool:
    """Whether a value is a sum, of any number of terms, one of which is a product."""
    nodes, producers = members.graph.nodes, members.producers
    todo = [value]
    is_sum = False
    while todo:
        node = nodes[producers[members.storage.root[todo.pop()]]]
        if node.phase is not Phase.FORWARD or node.device != reader.device:
            continue
        if node.op is MATMUL and is_sum:
            return True
        if node.op is ADD:
            is_sum = True
            todo += node.inputs
    return False


MAX_INSTRUCTIONS = 64
"""Values of a row block that generated code holds at once; more spill, and compile longer."""

MAX_FULL_INPUTS = 10
"""Tensors read at once: with the outputs, about what the prefetchers of a core follow."""


Sort = tuple[Phase, int, bool, int]
"""What all members have in common: phase, device, whether they run once a step, and their era.

That is the last bucket of collectives that they need: see `compiler.sbp.collective_schedule`.
"""


@dataclass(slots=True)
class Cluster:
    """Members that become one launch; `made` are their values and canonical kinds.

    `write_only` values are made here too, but no member may read them. `full_bases` are the tensors
    read whole.
    """

    space: Space
    sort: Sort
    depth: int
    members: list[Member] = field(default_factory=list)
    made: dict[ValueId, Kind] = field(default_factory=dict)
    full_bases: dict[ValueId, None] = field(default_factory=dict)
    weight: int = 0


@dataclass(slots=True)
class _Assignment:
    """Which launch is in which cluster, while it is decided; `cluster_of[n]` is -1 for lone ones.

    Members read values of `kept` from memory only.
    Clusters that joined another one point to it in `parent`.
    `waits` marks those that may wait, `waiting` are those that do, with what they run after.
    """

    members: FusionCandidates
    made_by: tuple[int, ...]
    sorts: list[Sort]
    kept: frozenset[ValueId]
    depth: list[int]
    cluster_of: list[int]
    waits: list[bool]
    clusters: list[Cluster] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    readers: dict[ValueId, int] = field(default_factory=dict)
    waiting: dict[int, list[int]] = field(default_factory=dict)

    def find(self, cluster: int) -> int:
        """Return the cluster that a cluster has become part of."""
        while self.parent[cluster] != cluster:
            # Path halving: finds stay near constant time.
            self.parent[cluster] = self.parent[self.parent[cluster]]
            cluster = self.parent[cluster]
        return cluster


@dataclass(frozen=True, slots=True)
class _Block:
    """Launches that are placed together, as the last one needs the others, and what runs before."""

    nodes: tuple[int, ...]
    deepest: int
    deep: tuple[int, ...]


_Found = tuple[list[int], list[Member]]
"""The clusters that a block makes one, and its members there."""


def run(graph: Graph, *, ends_at_saved: bool = False) -> Graph:
    """Return the graph after all of fusion, for whoever has no pipeline. O(n log n).

    The order is that of `compiler.pipeline.pipeline.PASSES`, the device the host.
    """
    by_rows = narrow_broadcasts(stage_reductions(update_programs(graph)))
    cheap = recompute_cheap(by_rows, lambda device: WIDE_IN_CACHE)
    return fuse_launches(dense_operands(cheap), ends_at_saved=ends_at_saved)


def fuse_launches(
    graph: Graph,
    *,
    ends_at_saved: bool = False,
    finishes: FinishesOf = no_finishes,
    joins: bool = True,
) -> Graph:
    """Return the graph with clusters in place of the ops that they compute. O(n log n).

    Where nothing `joins`, each op is a launch of its own.

    `ends_at_saved` ends forward clusters at whole tensors that the backward pass keeps: what is
    computed of these may then run again from them alone, without the products before them. It does
    not end those that kernels of products go on from, as their devices' `finishes` say.
    """
    members = FusionCandidates(graph)
    if joins:
        found = find_clusters(members, ends_at_saved=ends_at_saved, finishes=finishes)
        clusters: list[Found] = [(cluster.space, cluster.members) for cluster in found]
    else:
        clusters = _lone_clusters(members)
    return emit_kernels(members, clusters)


def _lone_clusters(members: FusionCandidates) -> list[Found]:
    """Return a cluster for each node that a program computes."""
    clusters: list[Found] = []
    for index, is_launch in enumerate(members.storage.is_launch):
        space = members.natural_space(index) if is_launch else None
        member = None if space is None else members.fit(index, space, {})
        if space is not None and member is not None:
            clusters.append((space, [member]))
    return clusters


def find_clusters(
    members: FusionCandidates, *, ends_at_saved: bool = False, finishes: FinishesOf = no_finishes
) -> tuple[Cluster, ...]:
    """Return the clusters of a graph: which nodes, in which space. O(n log n)."""
    graph, storage = members.graph, members.storage
    made_by, order = launch_of_values(graph), sort_launches(graph)
    old_readers: dict[int, list[int]] = {}
    for reader, writer in write_after_read(graph):
        if storage.is_launch[reader]:
            old_readers.setdefault(writer, []).append(reader)
    nodes = len(graph.nodes)
    saved = saved_values(members) if ends_at_saved else frozenset()
    saved -= epilogue_saved_values(members, finishes) if saved else frozenset()
    rates, waits = needed_per_step(graph), deferrable_nodes(members)
    eras = last_buckets_before(graph)
    sorts = [(n.phase, n.device, rates[i], eras[i]) for i, n in enumerate(graph.nodes)]
    state = _Assignment(members, made_by, sorts, saved, [0] * nodes, [-1] * nodes, waits)
    # In this order all that a node reads has its depth, or waits.
    for index in order:
        before = [made_by[v] for v in graph.nodes[index].inputs if made_by[v] >= 0]
        _assign(state, index, list(dict.fromkeys([*before, *old_readers.get(index, ())])))
    # A copy, for settling one may take others out.
    for index in tuple(state.waiting):
        _settle(state, index)
    # A cluster that joined another one no longer points to itself.
    clusters = [g for i, g in enumerate(state.clusters) if state.parent[i] == i]
    return tuple(clusters)


def saved_values(members: FusionCandidates) -> frozenset[ValueId]:
    """Return the values of the forward pass that nodes after it read, in person or as a view."""
    graph, root = members.graph, members.storage.root
    forward = {v for node in graph.nodes if node.phase is Phase.FORWARD for v in node.outputs}
    late = [node for node in graph.nodes if node.phase is not Phase.FORWARD]
    return frozenset([root[v] for node in late for v in node.inputs if root[v] in forward])


def _assign(state: _Assignment, index: int, before: list[int]) -> None:
    """Give a launch that runs after those of `before` its depth and cluster, or let it wait."""
    can_join = state.members.frame_of(index) is not None
    if state.waits[index] and can_join:
        state.waiting[index] = before
        return
    late = [n for n in before if n in state.waiting]
    if late:
        if can_join and _is_placed(state, _block_of(state, index, before)):
            return
        for node in late:
            _settle(state, node)
    block = _block_of(state, index, before)
    if not (can_join and _is_placed(state, block)):
        # One deeper than all that it reads, so that no path leads back.
        state.depth[index] = block.deepest + 1


def _settle(state: _Assignment, index: int) -> None:
    """Place a node that waits, and those it needs, for what reads it reads it from memory."""
    if index not in state.waiting:
        return
    before = state.waiting[index]
    if not _is_placed(state, _block_of(state, index, before), is_late=True):
        for node in before:
            _settle(state, node)
        block = _block_of(state, index, before)
        if not _is_placed(state, block, is_late=True):
            state.depth[index] = block.deepest + 1
    state.waiting.pop(index, None)


def _block_of(state: _Assignment, index: int, before: list[int]) -> _Block:
    """Return a node with all that waits for it."""
    depth = state.depth
    if not any([n in state.waiting for n in before]):
        deepest = max([depth[n] for n in before], default=0)
        return _Block((index,), deepest, tuple([n for n in before if depth[n] == deepest]))
    late: dict[int, None] = {}
    ready: dict[int, None] = {}
    todo = list(before)
    while todo:
        node = todo.pop()
        if node in state.waiting:
            if node not in late:
                late[node] = None
                todo += state.waiting[node]
        else:
            ready[node] = None
    deepest = max([depth[n] for n in ready], default=0)
    deep = tuple([n for n in sorted(ready) if depth[n] == deepest])
    return _Block((*sorted(late), index), deepest, deep)


def _is_placed(state: _Assignment, block: _Block, *, is_late: bool = False) -> bool:
    """Put a block into a cluster, if there is one for it."""
    natural = state.members.natural_space(block.nodes[-1])
    if natural is None or len({state.sorts[n] for n in block.nodes}) > 1:
        return False
    target = _joinable(state, block)
    if target is None:
        members = _fitted(state, block, natural, {})
        if members is None:
            return False
        target = _beside(state, block, members, is_late=is_late) or _alone(
            state, block, natural, members
        )
    if target is not None:
        _join(state, *target)
    return target is not None


def _joinable(state: _Assignment, block: _Block) -> _Found | None:
    """Return the clusters of the deepest launches that a block reads from, if it may join them."""
    if not block.deep or any([state.cluster_of[n] < 0 for n in block.deep]):
        return None
    numbers = list(dict.fromkeys([state.find(state.cluster_of[n]) for n in block.deep]))
    clusters = [state.clusters[g] for g in numbers]
    first = clusters[0]
    if any([g.space != first.space for g in clusters]) or not _is_alike(state, block, clusters):
        return None
    made = first.made if len(clusters) == 1 else {v: k for g in clusters for v, k in g.made.items()}
    members = _fitted(state, block, first.space, made)
    if members is None:
        return None
    # Every tensor of the deepest launches must be read as a value of the cluster.
    reads = [r.base for member in members for r in member.reads if r.base not in made]
    if any([state.made_by[base] in block.deep for base in reads]):
        return None
    return (numbers, members) if _is_small(state, clusters, members) else None


def _fitted(
    state: _Assignment, block: _Block, space: Space, made: dict[ValueId, Kind]
) -> list[Member] | None:
    """Return the nodes of a block as members, each of which may read those before it."""
    if len(block.nodes) == 1:
        member = state.members.fit(block.nodes[0], space, made)
        return None if member is None else [member]
    made = dict(made)
    members: list[Member] = []
    inside: set[int] = set()
    for node in block.nodes:
        member = state.members.fit(node, space, made)
        if member is None:
            return None
        # What is made here, or shows what is, and may not be read here would have to be in memory.
        bases = [r.base for r in member.reads]
        if any([state.made_by[base] in inside and base not in made for base in bases]):
            return None
        members.append(member)
        made.update(_made_by(state, member, space))
        inside.add(node)
    return members


def _made_by(state: _Assignment, member: Member, space: Space) -> dict[ValueId, Kind]:
    """Return the values of a member that others may read, and their canonical kinds."""
    outputs = state.members.graph.nodes[member.node].outputs
    return {
        value: canonical(kind, space)
        for value, kind in zip(outputs, member.kinds, strict=True)
        if value not in member.write_only and not (kind is Kind.FULL and value in state.kept)
    }


def _beside(
    state: _Assignment, block: _Block, alone: list[Member], *, is_late: bool
) -> _Found | None:
    """Return a cluster that reads one of a block's tensors, if the block may join it.

    The cluster has the depth that the block would have alone, or a greater one where it `is_late`.
    """
    depth = block.deepest + 1
    for member in alone:
        for read in member.reads:
            number = state.readers.get(read.base, -1) if read.access == FULL else -1
            if number < 0:
                continue
            number = state.find(number)
            cluster = state.clusters[number]
            is_deep = cluster.depth == depth or (is_late and cluster.depth > depth)
            if not is_deep or not _is_alike(state, block, [cluster]):
                continue
            members = _fitted(state, block, cluster.space, cluster.made)
            if members is not None and _is_small(state, [cluster], members):
                return [number], members
    return None


def _alone(
    state: _Assignment, block: _Block, natural: Space, members: list[Member]
) -> _Found | None:
    """Return a new cluster for a block, or None where it is too large for one."""
    if len(members) > 1 and not _is_small(state, [], members):
        return None
    sort = state.sorts[block.nodes[-1]]
    state.clusters.append(Cluster(natural, sort, block.deepest + 1))
    state.parent.append(len(state.parent))
    return [len(state.clusters) - 1], members


def _is_alike(state: _Assignment, block: _Block, clusters: list[Cluster]) -> bool:
    """Whether a block is of the phase and the rate of clusters, and for the same kernels."""
    sort = state.sorts[block.nodes[-1]]
    return all([cluster.sort == sort for cluster in clusters])


def _is_small(state: _Assignment, clusters: list[Cluster], members: list[Member]) -> bool:
    weight = sum([g.weight for g in clusters]) + sum([state.members.weight_of(m) for m in members])
    if weight > MAX_INSTRUCTIONS:
        return False
    full = {v for g in clusters for v in g.full_bases}
    full.update([v for member in members for v in _full_bases(member)])
    # From above first: what is made inside is taken off only where that decides.
    if len(full) <= MAX_FULL_INPUTS:
        return True
    inside = {v for member in members for v in state.members.graph.nodes[member.node].outputs}
    results = {v for g in clusters for v in g.made}
    return len([v for v in full if v not in results and v not in inside]) <= MAX_FULL_INPUTS


def _full_bases(member: Member) -> list[ValueId]:
    return [read.base for read in member.reads if read.access.kind is Kind.FULL]


def _join(state: _Assignment, numbers: list[int], members: list[Member]) -> None:
    """Make several clusters one, the largest of them, and put members into it."""
    # The largest takes the others in, so that a member moves O(log n) times.
    target = max(numbers, key=lambda g: len(state.clusters[g].members))
    cluster = state.clusters[target]
    for number in numbers:
        if number == target:
            continue
        other = state.clusters[number]
        state.parent[number] = target
        cluster.members += other.members
        cluster.made.update(other.made)
        cluster.full_bases.update(other.full_bases)
        cluster.weight += other.weight
    for member in members:
        cluster.members.append(member)
        cluster.weight += state.members.weight_of(member)
        for base in _full_bases(member):
            if base not in cluster.made:
                cluster.full_bases[base] = None
                state.readers[base] = target
        cluster.made.update(_made_by(state, member, cluster.space))
        state.depth[member.node] = cluster.depth
        state.cluster_of[member.node] = target
        state.waiting.pop(member.node, None)
