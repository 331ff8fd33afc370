"""The turns of collectives: which go together, and the ONE order in which all of them go.

Each collective has a number from whoever emitted it, the same on every rank. From the graph of one
rank, the first of the mesh, follow the attributes of each of these numbers (`CommTurns`): its
bucket, its place in the order, and when it is wanted. Nodes have them from then on; every pass
leaves them alone and lowering obeys them, whatever a rank believes of durations. So ranks whose
parts are uneven, and have other bytes, cut their buckets at the same places.

- *late*: nothing of the batch waits for it, as for gradients. What is made one after the other goes
  together: a bucket is full with an eighth of all bytes, and with no less than what an all-reduce
  moves in the time of its messages, below which it would wait longer for messages than for bytes.
- *ahead*: a parameter that ranks have parts of is gathered for use. It could begin with the step,
  but all parameters at once are what nobody has memory for: a bucket is gathered while the one
  before it is in use.
- All others are waited for by what comes next, and go alone as soon as they can.

What is gathered for each batch and once per step, too, has a turn for each: its twin that
`compiler.passes.batches` makes has the second.

The order is a topological one of buckets: what is ahead depends on variables alone, what is late on
both and on late ones of a lesser level, and nothing but late ones on that. In it buckets stand by
the time at which their last operand is made, counted in nodes.

Guarantees: no bucket waits for itself, and none for one that comes after it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from compiler.contract.attrs import Attrs, AttrValue
from compiler.contract.errors import InternalError
from compiler.contract.types import Phase, ValueId
from compiler.graph.graph import Graph, Node, cached_analysis, mark_needed
from compiler.graph.registry import is_comm, is_source, view
from compiler.ops.primitives.shape import BROADCAST_TO, CAST
from compiler.ops.primitives.slicing import CONCAT, PAD, SLICE
from compiler.ops.primitives.sources import INPUT
from compiler.ops.primitives.transfer import ALL_GATHER, BLOCKING, DEFERRED, PREFETCH, is_collective
from compiler.sbp.stages import cross_stage_nodes, edges_of_stages
from compiler.storage.order import needed_per_batch, needed_per_step
from compiler.storage.storage import write_after_read

MAX_LATE = 8
"""Buckets of gradients: enough to overlap with the backward pass, few enough to cost no latency."""

MAX_AHEAD = 32
"""Buckets of parameters: two of them are there at a time."""

_MOVERS = (CAST, BROADCAST_TO, CONCAT, PAD, SLICE)


_TWIN = "twin"
"""The attribute with bucket and order of a twin once per step, until there is one."""

CommTurns = Mapping[int, Mapping[str, AttrValue]]
"""The schedule: by the number that a collective got when it was emitted, its attributes `bucket`,
`order` and `when`, and `twin` where both rates need it."""

LeastBytes = Mapping[str, float]
"""By the name of a group: what a bucket of it should hold at least; nothing where it is missing."""


def schedule_collectives(graph: Graph, least: LeastBytes) -> CommTurns:
    """Return the turn of every collective of a graph. O(nodes x levels)."""
    if not any([is_comm.get(node.op) for node in graph.nodes]):
        return {}
    return _TurnChoice(graph, least).result()


def awaited_results(graph: Graph) -> list[ValueId]:
    """Return what a step is for: all that it writes; where it writes nothing, what it returns.

    Metrics beside that can wait. But those of stages go through the channels that values and
    gradients of a batch go through (`compiler.sbp.stages`), and would keep them waiting.
    """
    written, returned = [w.value for w in graph.writes], [o.value for o in graph.outputs]
    is_staged = any([node.stage > 0 for node in graph.nodes])
    return [*written, *returned] if is_staged or not written else written


def split_by_rate(node: Node) -> tuple[Node, Node]:
    """Return a node that both rates need, and its twin once per step: one in the turn of that.

    Raises InternalError for a collective of which it was not known.
    """
    if not is_comm.get(node.op):
        return node, node
    attrs = {name: value for name, value in node.attrs.items() if name != _TWIN}
    twin = node.attrs.get(_TWIN)
    if not isinstance(twin, tuple):
        raise InternalError(f"{node.op} at {node.source} has no turn for once per step")
    bucket, order = twin
    twin_attrs = {**attrs, "bucket": bucket, "order": order}
    return replace(node, attrs=Attrs(attrs)), replace(node, attrs=Attrs(twin_attrs))


def with_schedule(graph: Graph, turns: CommTurns) -> Graph:
    """Return the graph of a rank whose collectives have their turns. O(nodes)."""
    if not turns:
        return graph
    nodes = []
    for node in graph.nodes:
        if is_comm.get(node.op):
            turn = turns[node.attrs.int_("order")]
            node = replace(node, attrs=Attrs({**node.attrs, **turn}))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


@cached_analysis
def last_buckets_before(graph: Graph) -> tuple[int, ...]:
    """Return, per node, the last bucket that it needs, or -1.

    Whoever makes one node of several keeps the order of buckets where that is the same for all:
    what one of them is needed for comes after what another one needs. O(nodes).
    """
    of_node = [-1] * len(graph.nodes)
    of_value = [-1] * len(graph.types)
    for index, node in enumerate(graph.nodes):
        last = of_node[index] = max([of_value[v] for v in node.inputs], default=-1)
        if is_collective(node.op):
            last = max(last, node.attrs.int_("bucket"))
        for value in node.outputs:
            of_value[value] = last
    return tuple(of_node)


@cached_analysis
def first_buckets_after(graph: Graph) -> tuple[int, ...]:
    """Return, per node, the first bucket that needs it, or more than there are. O(nodes)."""
    # One more than the last bucket: later than all.
    none = 1 + max([n.attrs.int_("bucket") for n in graph.nodes if is_collective(n.op)], default=0)
    of_node = [none] * len(graph.nodes)
    of_value = [none] * len(graph.types)
    # Backwards, so that all readers of a value have been seen.
    for index in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[index]
        first = of_node[index] = min([of_value[v] for v in node.outputs], default=none)
        if is_collective(node.op):
            first = min(first, node.attrs.int_("bucket"))
        for value in node.inputs:
            of_value[value] = min(of_value[value], first)
    return tuple(of_node)


def sorted_by(
    keys: Sequence[tuple[float, ...]], edges: Iterable[tuple[int, int]]
) -> list[int] | None:
    """Return all numbers, those with small keys first as far as pairs (before, after) allow it.

    None where these go in a circle (Kahn, 1962).
    """
    waiting = [0] * len(keys)
    later: list[list[int]] = [[] for _ in keys]
    for before, after in edges:
        waiting[after] += 1
        later[before].append(after)
    ready = [(key, index) for index, key in enumerate(keys) if not waiting[index]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        index = heapq.heappop(ready)[1]
        order.append(index)
        for after in later[index]:
            waiting[after] -= 1
            if not waiting[after]:
                heapq.heappush(ready, (keys[after], after))
    return order if len(order) == len(keys) else None


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Collectives that begin together; `key` says where in the order."""

    nodes: tuple[int, ...]
    when: str
    key: tuple[float, ...]


@dataclass(slots=True)
class _TurnChoice:
    """Columns by node: its place in a topological order, its level, when its results are there."""

    graph: Graph
    least: LeastBytes
    before: list[list[int]] = field(init=False)
    """What must be done before a node: makers of what it reads, old readers of what it writes, and
    of stages what is asked for beyond that (`compiler.sbp.stages`)."""
    sequence: list[int] = field(init=False)
    place: list[int] = field(init=False)
    per_step: tuple[bool, ...] = field(init=False)
    at_both: tuple[bool, ...] = field(init=False)

    def __post_init__(self) -> None:
        graph, makers = self.graph, self.graph.producers()
        # What both rates need is made in each (`compiler.passes.batches`): its turn is the earlier.
        pairs = list(zip(needed_per_step(graph), needed_per_batch(graph), strict=True))
        self.per_step = tuple([step and not batch for step, batch in pairs])
        self.at_both = tuple([step and batch for step, batch in pairs])
        self.before = [[makers[v] for v in node.inputs] for node in graph.nodes]
        for earlier, later in (*write_after_read(graph), *edges_of_stages(graph)):
            self.before[later].append(earlier)
        edges = [(maker, i) for i, before in enumerate(self.before) for maker in before]
        # With the given place as key the order stays nearest to the given one.
        order = sorted_by([(float(i),) for i in range(len(graph.nodes))], edges)
        if order is None:
            raise InternalError("an update must run both before and after what reads its variable")
        self.sequence = order
        self.place = [0] * len(order)
        for position, index in enumerate(order):
            self.place[index] = position

    def result(self) -> CommTurns:
        late, need = self._late(), self._ahead()
        need = {index: at for index, at in need.items() if not late[index]}
        buckets = self._ahead_buckets(need)
        when = [
            PREFETCH if i in need else DEFERRED if late[i] else BLOCKING for i in range(len(late))
        ]
        buckets += self._others(when, {i: b.key[1] for b in buckets for i in b.nodes})
        buckets.sort(key=lambda b: b.key)
        # A twin follows from variables alone: it goes before all that only a step needs.
        first = [i for i, bucket in enumerate(buckets) if self.per_step[bucket.nodes[0]]]
        at = first[0] if first else len(buckets)
        both = [tuple([i for i in bucket.nodes if self.at_both[i]]) for bucket in buckets[:at]]
        twins = [replace(b, nodes=nodes) for b, nodes in zip(buckets, both, strict=False) if nodes]
        turns: dict[int, dict[str, AttrValue]] = {}
        order = 0
        for number, bucket in enumerate([*buckets[:at], *twins, *buckets[at:]]):
            # Numbers [at, at + len(twins)) are the twins', which stand before a step's buckets.
            is_twin = at <= number < at + len(twins)
            for index in bucket.nodes:
                emitted = self.graph.nodes[index].attrs.int_("order")
                if is_twin:
                    turns[emitted][_TWIN] = (number, order)
                else:
                    turns[emitted] = {"bucket": number, "order": order, "when": bucket.when}
                order += 1
        return turns

    def _late(self) -> list[bool]:
        """Mark the collectives that nothing of the forward or backward pass waits for.

        Another stage waits for what it gets: it comes with all else that goes there for a batch.
        """
        graph = self.graph
        needed = mark_needed(graph, awaited_results(graph))
        is_awaited = [False] * len(graph.nodes)
        for index in cross_stage_nodes(graph):
            is_awaited[index] = True
        for index in reversed(self.sequence):
            node = graph.nodes[index]
            computes = node.phase is not Phase.UPDATE and not _moves(node) and needed[index]
            # Whoever counts steps on the way forward has all wait that read the count before.
            if is_awaited[index] or (computes and not node.writes):
                for earlier in self.before[index]:
                    is_awaited[earlier] = True
        pairs = zip(graph.nodes, is_awaited, strict=True)
        return [is_comm.get(node.op) and not awaited for node, awaited in pairs]

    def _ahead(self) -> dict[int, int]:
        """Return the collectives that gather what variables hold, with the place of a reader.

        It is the first one that does not just bring it elsewhere.
        """
        nodes = self.graph.nodes
        is_free = [False] * len(nodes)
        for index in self.sequence:
            node, before = nodes[index], self.before[index]
            is_first = all([is_free[m] and not is_comm.get(nodes[m].op) for m in before])
            is_own = node.op is not INPUT if is_source.get(node.op) else _moves(node)
            is_free[index] = is_first and is_own
        read_at = [len(nodes)] * len(nodes)
        need: dict[int, int] = {}
        for index in reversed(self.sequence):
            node = nodes[index]
            at = read_at[index] if _moves(node) else self.place[index]
            if node.op is ALL_GATHER and is_free[index]:
                need[index] = at
            for earlier in self.before[index]:
                read_at[earlier] = min(read_at[earlier], at)
        return need

    def _ahead_buckets(self, need: Mapping[int, int]) -> list[_Bucket]:
        """Cut what is gathered ahead into buckets; each begins when the one before is read."""
        order = sorted(need, key=lambda i: (self.per_step[i], need[i], self.place[i]))
        rows = [(self.per_step[i], need[i], i) for i in order]
        buckets: list[_Bucket] = []
        begins, is_per_step = -1.0, False
        for nodes in self._cut(rows, MAX_AHEAD):
            if self.per_step[nodes[0]] != is_per_step:
                begins, is_per_step = -1.0, self.per_step[nodes[0]]
            key = (is_per_step, begins, 0, len(buckets))
            buckets.append(_Bucket(tuple(nodes), PREFETCH, key))
            # Half a place before its reader, so that it stands before the reader and after what
            # precedes it.
            begins = max(begins, need[nodes[0]] - 0.5)
        return buckets

    def _others(self, when: Sequence[str], begun: Mapping[int, float]) -> list[_Bucket]:
        """Return the buckets of all others, level by level of late ones.

        A node's time is that of the last thing that it waits for: its place, or a bucket's time.
        """
        nodes = self.graph.nodes
        is_late = [is_comm.get(n.op) and w == DEFERRED for n, w in zip(nodes, when, strict=True)]
        level = [0] * len(nodes)
        for index in self.sequence:
            level[index] = is_late[index] + max([level[m] for m in self.before[index]], default=0)
        time = [-1.0] * len(nodes)
        buckets: list[_Bucket] = []
        for depth in range(max(level) + 1):
            here = [i for i in self.sequence if level[i] == depth]
            buckets += self._late_buckets([i for i in here if is_late[i]], time, depth)
            for index in [i for i in here if not is_late[i]]:
                node = nodes[index]
                ready = max([time[m] for m in self.before[index]], default=-1.0)
                if index in begun:
                    time[index] = begun[index]
                elif is_comm.get(node.op):
                    time[index] = ready
                    key = (self.per_step[index], ready, 1, self.place[index])
                    buckets.append(_Bucket((index,), BLOCKING, key))
                elif not is_source.get(node.op):
                    time[index] = max(ready, self.place[index])
        return buckets

    def _late_buckets(self, late: list[int], time: list[float], level: int) -> list[_Bucket]:
        """Cut the late ones of a level into buckets; notes their times."""
        for index in late:
            time[index] = max([time[m] for m in self.before[index]])
        late.sort(key=lambda i: (self.per_step[i], time[i], self.place[i]))
        buckets: list[_Bucket] = []
        for group in self._cut([(self.per_step[i], time[i], i) for i in late], MAX_LATE):
            ends = max([time[i] for i in group])
            for index in group:
                time[index] = ends
            first = min([self.place[i] for i in group])
            key = (self.per_step[group[0]], ends, 1 + level, first)
            buckets.append(_Bucket(tuple(group), DEFERRED, key))
        return buckets

    def _cut(self, rows: Sequence[tuple[bool, float, int]], most: int) -> list[list[int]]:
        """Cut collectives, which stand in order of a time, into buckets by bytes.

        What has one time stays together, and rates stay apart.
        """
        size = {i: self.graph.types[self._larger(i)].size_bytes for *_, i in rows}
        groups = [self.graph.nodes[i].attrs.str_("group") for *_, i in rows]
        least = max([self.least.get(group, 0.0) for group in groups], default=0.0)
        # By an equal share of all bytes, or what is bound by bytes and not messages.
        enough = max(sum(size.values()) / most, least)
        buckets: list[list[int]] = []
        bucket_bytes, last = 0, (False, -2.0)
        for is_per_step, time, index in rows:
            is_full = bucket_bytes >= enough and (is_per_step, time) != last
            if not buckets or is_full or is_per_step != last[0]:
                buckets.append([])
                bucket_bytes = 0
            buckets[-1].append(index)
            bucket_bytes, last = bucket_bytes + size[index], (is_per_step, time)
        return buckets

    def _larger(self, index: int) -> ValueId:
        """Return the larger one of operand and result: what is gathered, or was, on all ranks."""
        node = self.graph.nodes[index]
        both = (*node.inputs, *node.outputs)
        return max(both, key=lambda v: self.graph.types[v].size_bytes)


def _moves(node: Node) -> bool:
    """Whether a node only brings values elsewhere, or into another form."""
    return is_comm.get(node.op) or view.has(node.op) or node.op in _MOVERS
