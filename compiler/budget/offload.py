"""Bytes in host memory, on the device only around their use: optimizer state, idle activations.

The state that the updates read and write is most of what a large job holds, and is needed for a
moment of each step. `offload_variables` moves it into host memory. Updates that follow one another
form a bucket: one actor brings the bucket's state to the device, the updates change it there,
another actor takes it back, and both overlap with compute.

**When.** Bucket k comes in once bucket k - 2 is out (`Node.after`), so that the device holds two at
most: one that is being updated, and one on its way in or out. The first two begin so late that they
still arrive in time by the estimates; without that they would arrive before the forward pass.

**Fewer cuts.** The compute stream is cut where it waits for a bucket and where a bucket waits for
it. So buckets are as large as two of them may be, and only the first two have a start of their own.

Guarantees: the values of all variables after a step have the same bits as without the pass; state
in host memory is touched by copies alone; what is read from it comes after the last step's writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import TypeVar

from compiler.contract.attrs import Attrs
from compiler.contract.errors import CompileError
from compiler.contract.placement import HOST_SIDE
from compiler.contract.types import Phase, TensorType, ValueId
from compiler.graph.graph import Graph, Node, Write, consumers, new_value
from compiler.graph.registry import is_comm
from compiler.graph.target import Hardware
from compiler.ops.primitives.sources import VARIABLE
from compiler.ops.primitives.transfer import COPY_TO, is_copy, next_bucket
from compiler.storage.buffers import LaunchTimes, copy_info, launch_times
from compiler.storage.order import launches_in_order, needed_per_step, place_views
from compiler.storage.storage import Storage, assign_storage

T = TypeVar("T")

MIN_BUCKET_BYTES = 4 << 20
"""Bytes below which a bucket is not worth its two cuts of the compute stream.

At 25 GB/s they take 170 us, so that what a copy costs besides its bytes, 10 to 20 us with the
message, is a tenth.
"""

MAX_BUCKETS = 16
"""Buckets per step, about; two are on the device, so seven eighths of the state are not."""

OPTIMIZER = "optimizer"
"""The role of the variables that may live in host memory."""


@dataclass(frozen=True, slots=True)
class StateUpdate:
    """A node that is the only one to read some optimizer state, and writes over it.

    `positions` are those of the state among the node's inputs, `names` those of the variables.
    """

    node: int
    positions: tuple[int, ...]
    names: tuple[str, ...]


def state_updates(graph: Graph) -> tuple[StateUpdate, ...]:
    """Return the updates whose optimizer state could live in host memory, in order. O(nodes)."""
    readers = consumers(graph)
    name_of = {
        node.outputs[0]: node.attrs.str_("name")
        for node in graph.nodes
        if node.op is VARIABLE and node.attrs.str_("role") == OPTIMIZER
    }
    updates: list[StateUpdate] = []
    for index, node in enumerate(graph.nodes):
        positions = tuple(
            [
                position
                for _, position in node.writes
                if node.inputs[position] in name_of
                and readers[node.inputs[position]] == (index,)
                and node.inputs.count(node.inputs[position]) == 1
                and graph.types[node.inputs[position]].size_bytes
            ]
        )
        if positions:
            names = tuple([name_of[node.inputs[position]] for position in positions])
            updates.append(StateUpdate(index, positions, names))
    return tuple(updates)


def state_names(graph: Graph) -> tuple[str, ...]:
    """Return the names of all variables that could live in host memory."""
    return tuple([name for update in state_updates(graph) for name in update.names])


def state_bytes(graph: Graph, update: StateUpdate) -> int:
    """Return the bytes of the state of one update."""
    inputs = graph.nodes[update.node].inputs
    return sum([graph.types[inputs[position]].size_bytes for position in update.positions])


def offload_variables(
    graph: Graph, names: Sequence[str], hardware: Hardware, *, bucket_bytes: int | None = None
) -> Graph:
    """Return an ordered graph with the variables of these names in host memory. O(nodes).

    `bucket_bytes`: what a bucket holds at most, unless one update has more state; by default a
    share of all bytes. Raises CompileError for a name that is not of such state.
    """
    if not names:
        return graph
    graph = with_early_updates(graph)
    updates = _chosen(graph, names)
    sizes = [state_bytes(graph, update) for update in updates]
    buckets = fill_buckets(updates, sizes, bucket_bytes)
    return _StateCopies(graph, buckets, _start(graph, buckets, hardware)).run()


def with_early_updates(graph: Graph) -> Graph:
    """Return the graph with each node of the update as soon as what it waits for is done.

    That frees its gradient and spreads the copies over the backward pass. Where the peak lies
    elsewhere, `order` leaves all updates at the end.
    """
    is_late = [node.phase is not Phase.UPDATE for node in graph.nodes]
    return replace(graph, nodes=place_views(graph, launches_in_order(graph, is_late)))


def _chosen(graph: Graph, names: Sequence[str]) -> tuple[StateUpdate, ...]:
    """Return the updates of the named state, each with the positions of that state only."""
    requested = dict.fromkeys(names)
    movable = state_names(graph)
    unknown = [name for name in requested if name not in movable]
    if unknown:
        raise CompileError(
            f"variable {unknown[0]!r} cannot live in host memory: only optimizer state that nothing"
            f" but its update reads can; here that is {', '.join(movable) or 'none'}"
        )
    updates: list[StateUpdate] = []
    for update in state_updates(graph):
        pairs = zip(update.positions, update.names, strict=True)
        selected = [(position, name) for position, name in pairs if name in requested]
        if selected:
            positions, own_names = zip(*selected, strict=True)
            updates.append(StateUpdate(update.node, positions, own_names))
    return tuple(updates)


def fill_buckets(
    items: Sequence[T],
    sizes: Sequence[int],
    bucket_bytes: int | None,
    is_apart: Callable[[list[T], T], bool] = lambda bucket, item: False,
) -> tuple[tuple[T, ...], ...]:
    """Put items that follow one another together, unless they have to be `is_apart`.

    `bucket_bytes`: what a bucket holds at most, unless one item is larger; by default a share of
    all bytes.
    """
    # At most `MAX_BUCKETS` even shares, unless those were too small to pay for their cuts.
    most = bucket_bytes or max(MIN_BUCKET_BYTES, -(-sum(sizes) // MAX_BUCKETS))
    buckets: list[list[T]] = []
    filled_bytes = 0
    for item, size in zip(items, sizes, strict=True):
        if not buckets or filled_bytes + size > most or is_apart(buckets[-1], item):
            buckets.append([])
            filled_bytes = 0
        buckets[-1].append(item)
        filled_bytes += size
    return tuple([tuple(bucket) for bucket in buckets])


def _start(
    graph: Graph, buckets: tuple[tuple[StateUpdate, ...], ...], hardware: Hardware
) -> ValueId | None:
    """Return the value after which the first two buckets come in; None: at once.

    It is the last one that leaves both copies enough time before the updates that wait for them.
    """
    is_per_step = needed_per_step(graph)[buckets[0][0].node]
    times = launch_times(graph, hardware, is_per_step=is_per_step)
    latest, copy_ns = inf, 0.0
    messages_ns = 2 * hardware.message_ns(0, 0)
    # Two buckets are on the device at once, so that the first two come in from the start.
    for bucket in buckets[:2]:
        copy_ns += sum([_copy_in_ns(graph, update, hardware) for update in bucket])
        latest = min(latest, times.begin_ns[bucket[0].node] - copy_ns - messages_ns)
    return times.last_before(latest)


def _copy_in_ns(graph: Graph, update: StateUpdate, hardware: Hardware) -> float:
    node = graph.nodes[update.node]
    types = [graph.types[node.inputs[position]] for position in update.positions]
    return sum([copy_info(hardware, HOST_SIDE, node.device, type_).duration_ns for type_ in types])


class _StateCopies:
    """The graph with copies around each bucket, node by node."""

    def __init__(
        self,
        graph: Graph,
        buckets: tuple[tuple[StateUpdate, ...], ...],
        start: ValueId | None,
    ) -> None:
        self._graph = graph
        self._buckets = buckets
        self._start = start
        self._first_bucket = next_bucket(graph)
        self._types: list[TensorType] = list(graph.types)
        self._nodes: list[Node] = []
        self._written: dict[ValueId, ValueId] = {}
        self._ends: list[ValueId] = []
        """By bucket, the last value that it took out."""

    def run(self) -> Graph:
        graph = self._graph
        update_at = {u.node: u for bucket in self._buckets for u in bucket}
        bucket_at = {bucket[0].node: k for k, bucket in enumerate(self._buckets)}
        last_at = {bucket[-1].node: k for k, bucket in enumerate(self._buckets)}
        on_host = {graph.nodes[u.node].inputs[p] for u in update_at.values() for p in u.positions}
        on_device: dict[ValueId, ValueId] = {}
        for index, node in enumerate(graph.nodes):
            if index in bucket_at:
                on_device = self._copy_in(bucket_at[index])
            if node.op is VARIABLE and node.outputs[0] in on_host:
                node = replace(node, attrs=Attrs({**node.attrs, "place": HOST_SIDE}))
            elif index in update_at:
                node = replace(node, inputs=tuple([on_device.get(v, v) for v in node.inputs]))
            self._nodes.append(node)
            if index in last_at:
                self._copy_back(last_at[index])
        return replace(
            graph,
            nodes=tuple(self._nodes),
            types=tuple(self._types),
            writes=tuple(
                [Write(w.variable, self._written.get(w.variable, w.value)) for w in graph.writes]
            ),
        )

    def _copy_in(self, bucket: int) -> dict[ValueId, ValueId]:
        """Append the copies of a bucket to the device; return the new values by variable."""
        after = () if self._start is None else (self._start,)
        # From the third on: a bucket comes in when the one two before is out, so that two are
        # there.
        if bucket >= 2:
            after = (self._ends[bucket - 2],)
        on_device: dict[ValueId, ValueId] = {}
        for update in self._buckets[bucket]:
            node = self._graph.nodes[update.node]
            for position in update.positions:
                variable = node.inputs[position]
                copy = replace(node, op=COPY_TO, inputs=(variable,), after=after)
                on_device[variable] = self._append(copy, node.device, bucket)
        return on_device

    def _copy_back(self, bucket: int) -> None:
        """Append the copies that take a bucket back over its variables."""
        for update in self._buckets[bucket]:
            node = self._graph.nodes[update.node]
            for output, position in node.writes:
                if position not in update.positions:
                    continue
                variable = node.inputs[position]
                both = (node.outputs[output], variable)
                copy = replace(node, op=COPY_TO, inputs=both, after=())
                self._written[variable] = self._append(copy, HOST_SIDE, bucket)
        self._ends.append(self._nodes[-1].outputs[0])

    def _append(self, copy: Node, to: int, bucket: int) -> ValueId:
        """Append a copy of one bucket; return its value, which has the type of its input."""
        value = new_value(self._types, self._types[copy.inputs[0]])
        attrs = Attrs({"to": to, "bucket": self._first_bucket + bucket})
        self._nodes.append(replace(copy, outputs=(value,), attrs=attrs))
        return value


# Take long-lived activations out to host memory while nobody reads them.
#
# A value that the forward pass saves for the backward pass is copied out after its maker, and in
# again shortly before its first reader on the far side of its longest idle time; the device's bytes
# are free meanwhile. Values made one after the other form a bucket, which one actor takes out and
# another brings in, beside compute.
#
# **When.** A bucket goes out once its last value is made. It comes in (`Node.after`) so late that
# it still arrives in time by the estimates, the link being busy with the buckets before it.
#
# **Why nothing waits in a circle.** All values of a bucket are made before the first late reader of
# any of them. So the place after its last maker for the copies out, and the place before its first
# late reader for the copies in, obey the order of nodes, and so does everything that waits for
# them.
#
# Guarantees: all values have the same bits as without the pass; a late reader reads a copy.


@dataclass(frozen=True, slots=True)
class Idle:
    """A value with the nodes that make it and read it around its longest idle time.

    `late` are its readers after that, the first one first. `made_ns` is the time of its maker.
    """

    value: ValueId
    maker: int
    late: tuple[int, ...]
    idle_ns: float
    made_ns: float


def idle_values(graph: Graph, hardware: Hardware) -> tuple[Idle, ...]:
    """Return the values that could go to host memory, in the order in which they are made.

    Not those of sources, outputs, and what is written over. O(nodes).
    """
    storage = assign_storage(graph)
    times = launch_times(graph, hardware, is_per_step=False)
    readers: dict[ValueId, list[int]] = {}
    for index in times.nodes:
        for root in dict.fromkeys([storage.root[v] for v in graph.nodes[index].inputs]):
            readers.setdefault(root, []).append(index)
    fixed = _fixed(graph, storage)
    place = {node: launch for launch, node in enumerate(times.nodes)}
    idles: list[Idle] = []
    for launch, index in enumerate(times.nodes):
        for value in graph.nodes[index].outputs:
            may_move = storage.root[value] == value and value not in fixed
            if may_move and readers.get(value) and graph.types[value].size_bytes:
                idles.append(_idle(value, launch, readers[value], times, place))
    return tuple(idles)


def _fixed(graph: Graph, storage: Storage) -> set[ValueId]:
    """Return the roots that stay: of outputs and written values, and of what goes elsewhere."""
    fixed = {storage.root[output.value] for output in graph.outputs}
    fixed |= {storage.root[w.value] for w in graph.writes}
    for node in graph.nodes:
        if is_comm.get(node.op) or is_copy(node):
            fixed.update([storage.root[v] for v in (*node.inputs, *node.outputs)])
    return fixed


def _idle(
    value: ValueId,
    launch: int,
    readers: list[int],
    times: LaunchTimes,
    place: dict[int, int],
) -> Idle:
    accesses = [launch, *[place[reader] for reader in readers]]
    idle = [
        times.begin_ns[times.nodes[later]] - times.ends_ns[earlier]
        for earlier, later in pairwise(accesses)
    ]
    # The longest gap between two accesses; `late` are the readers behind it.
    longest = max(range(len(idle)), key=idle.__getitem__)
    late = tuple(readers[longest:])
    made_ns = times.duration_ns(launch)
    return Idle(value, times.nodes[launch], late, idle[longest], made_ns)


def spill_values(
    graph: Graph, values: Sequence[ValueId], hardware: Hardware, *, bucket_bytes: int | None = None
) -> Graph:
    """Return an ordered graph with these values in host memory while they are idle. O(nodes).

    `bucket_bytes`: what a bucket holds at most, unless one value is larger; by default a share of
    all bytes. Raises CompileError for a value that has to stay.
    """
    if not values:
        return graph
    requested = dict.fromkeys(values)
    idles = [idle for idle in idle_values(graph, hardware) if idle.value in requested]
    if len(idles) < len(requested):
        movable = {idle.value for idle in idles}
        stays = next(value for value in requested if value not in movable)
        raise CompileError(
            f"value %{stays} cannot go to host memory: only what a launch makes and launches of"
            " the same batch read can, unless it is an output or written over"
        )
    # All of a bucket is made before the first late reader of any of it.
    buckets = fill_buckets(
        idles,
        [graph.types[idle.value].size_bytes for idle in idles],
        bucket_bytes,
        lambda bucket, idle: idle.maker >= _first_reader(bucket),
    )
    return _SpillCopies(graph, buckets, _starts(graph, buckets, hardware)).run()


_Bucket = tuple[Idle, ...]


def _last_maker(bucket: Sequence[Idle]) -> int:
    return max([idle.maker for idle in bucket])


def _first_reader(bucket: Sequence[Idle]) -> int:
    return min([idle.late[0] for idle in bucket])


def _starts(
    graph: Graph, buckets: tuple[_Bucket, ...], hardware: Hardware
) -> tuple[ValueId | None, ...]:
    """Return, per bucket, the value after which it comes in; None: as soon as it is out.

    From the last one needed to the first: each arrives when it is needed, or when the link has to
    begin with the next, whatever is earlier.
    """
    times = launch_times(graph, hardware, is_per_step=False)
    starts: list[ValueId | None] = [None] * len(buckets)
    latest = times.ends_ns[-1]
    messages_ns = 2 * hardware.message_ns(0, 0)
    # From the last bucket needed backwards: the link carries one copy at a time.
    for k in sorted(range(len(buckets)), key=lambda k: -_first_reader(buckets[k])):
        latest = min(latest, times.begin_ns[_first_reader(buckets[k])] - messages_ns)
        for idle in buckets[k]:
            device, type_ = graph.nodes[idle.maker].device, graph.types[idle.value]
            latest -= copy_info(hardware, HOST_SIDE, device, type_).duration_ns
        starts[k] = times.last_before(latest)
    return tuple(starts)


class _SpillCopies:
    """The graph with copies of each bucket, node by node."""

    def __init__(
        self, graph: Graph, buckets: tuple[_Bucket, ...], starts: tuple[ValueId | None, ...]
    ) -> None:
        self._graph = graph
        self._buckets = buckets
        self._starts = starts
        self._producers = graph.producers()
        self._types: list[TensorType] = list(graph.types)
        self._nodes: list[Node] = []
        self._out: dict[ValueId, ValueId] = {}
        self._first_bucket = next_bucket(graph)

    def run(self) -> Graph:
        root = assign_storage(self._graph).root
        out_at: dict[int, list[int]] = {}
        in_at: dict[int, list[int]] = {}
        for k, bucket in enumerate(self._buckets):
            out_at.setdefault(_last_maker(bucket), []).append(k)
            in_at.setdefault(_first_reader(bucket), []).append(k)
        late: dict[int, set[ValueId]] = {}
        for idle in [idle for bucket in self._buckets for idle in bucket]:
            for reader in idle.late:
                late.setdefault(reader, set()).add(idle.value)
        back: dict[ValueId, ValueId] = {}
        for index, node in enumerate(self._graph.nodes):
            for k in in_at.get(index, ()):
                self._copy_in(k, back)
            moved = late.get(index, set())
            if moved:
                inputs = [self._shown(v, back) if root[v] in moved else v for v in node.inputs]
                node = replace(node, inputs=tuple(inputs))
            self._nodes.append(node)
            for k in out_at.get(index, ()):
                self._copy_out(k)
        return replace(self._graph, nodes=tuple(self._nodes), types=tuple(self._types))

    def _copy_out(self, k: int) -> None:
        for idle in self._buckets[k]:
            maker = self._graph.nodes[idle.maker]
            copy = replace(maker, op=COPY_TO, inputs=(idle.value,), after=())
            self._out[idle.value] = self._append(copy, self._copying(k, HOST_SIDE))

    def _copy_in(self, k: int, back: dict[ValueId, ValueId]) -> None:
        start = self._starts[k]
        after = () if start is None else (start,)
        # In the order in which they are read, so that the first reader's copy comes first.
        for idle in sorted(self._buckets[k], key=lambda idle: idle.late[0]):
            reader, maker = self._graph.nodes[idle.late[0]], self._graph.nodes[idle.maker]
            copy = replace(
                maker, op=COPY_TO, inputs=(self._out[idle.value],), after=after, phase=reader.phase
            )
            back[idle.value] = self._append(copy, self._copying(k, maker.device))

    def _copying(self, k: int, to: int) -> Attrs:
        return Attrs({"to": to, "bucket": self._first_bucket + k})

    def _shown(self, value: ValueId, back: dict[ValueId, ValueId]) -> ValueId:
        """Return what shows the copy of a root as `value` shows the root."""
        if value not in back:
            view = self._graph.nodes[self._producers[value]]
            source = self._shown(view.inputs[0], back)
            inputs = (source, *view.inputs[1:])
            back[value] = self._append(replace(view, inputs=inputs), view.attrs, value)
        return back[value]

    def _append(self, node: Node, attrs: Attrs, like: ValueId | None = None) -> ValueId:
        """Append a node; return its value, of the type of its input or `like` another."""
        value = new_value(self._types, self._types[node.inputs[0] if like is None else like])
        self._nodes.append(replace(node, outputs=(value,), attrs=attrs))
        return value
