"""Take long-lived activations out to host memory while nobody reads them.

What the forward pass saves for the backward pass lies idle in between. Here a value is copied out
after its maker, and in again shortly before its first reader on the far side of its longest idle
time; the device's bytes are free meanwhile. Values made one after the other form a bucket, which
one actor takes out and another brings in, beside compute.

**When.** A bucket goes out once its last value is made. It comes in (`Node.after`) so late that it
still arrives in time by the estimates, the link being busy with the buckets before it.

**Why nothing waits in a circle.** All values of a bucket are made before the first late reader of
any of them. So the place after its last maker for the copies out, and the place before its first
late reader for the copies in, obey the order of nodes, and so does everything that waits for them.

Guarantees: all values have the same bits as without the pass; a late reader reads a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from compiler.attrs import Attrs
from compiler.budget.offload import fill_buckets
from compiler.errors import CompileError
from compiler.graph import Graph, Node, new_value
from compiler.lowering.buffers import copy_info
from compiler.lowering.launch_times import LaunchTimes, launch_times
from compiler.lowering.storage import Storage, assign_storage
from compiler.ops.copies import COPY_TO, is_copy, next_bucket
from compiler.placement import HOST_SIDE
from compiler.registry import is_comm
from compiler.target import Hardware
from compiler.types import TensorType, ValueId


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
    found: list[Idle] = []
    for launch, index in enumerate(times.nodes):
        for value in graph.nodes[index].outputs:
            known = storage.root[value] == value and value not in fixed
            if known and readers.get(value) and graph.types[value].size_bytes:
                found.append(_idle(value, launch, readers[value], times, place))
    return tuple(found)


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
    touched = [launch, *[place[reader] for reader in readers]]
    idle = [
        times.begin_ns[times.nodes[later]] - times.ends_ns[earlier]
        for earlier, later in pairwise(touched)
    ]
    longest = max(range(len(idle)), key=idle.__getitem__)
    late = tuple(readers[longest:])
    made_ns = times.duration_ns(launch)
    return Idle(value, times.nodes[launch], late, idle[longest], made_ns)


def run(
    graph: Graph, values: Sequence[ValueId], hardware: Hardware, *, bucket_bytes: int | None = None
) -> Graph:
    """Return an ordered graph with these values in host memory while they are idle. O(nodes).

    `bucket_bytes`: what a bucket holds at most, unless one value is larger; by default a share of
    all bytes. Raises CompileError for a value that has to stay.
    """
    if not values:
        return graph
    wanted = dict.fromkeys(values)
    chosen = [idle for idle in idle_values(graph, hardware) if idle.value in wanted]
    if len(chosen) < len(wanted):
        known = {idle.value for idle in chosen}
        stays = next(value for value in wanted if value not in known)
        raise CompileError(
            f"value %{stays} cannot go to host memory: only what a launch makes and launches of"
            " the same batch read can, unless it is an output or written over"
        )
    # All of a bucket is made before the first late reader of any of it.
    buckets = fill_buckets(
        chosen,
        [graph.types[idle.value].size_bytes for idle in chosen],
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
            own = late.get(index, set())
            if own:
                read = [self._shown(v, back) if root[v] in own else v for v in node.inputs]
                node = replace(node, inputs=tuple(read))
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
