"""The device of every node: chosen by cost where no region says it, then copies between devices.

List scheduling on a simulated machine, as in TensorFlow's first paper (Abadi et al., 2015, section
3.2.1) and HEFT (Topcuoglu et al., 2002): nodes are taken in the order of how much time lies between
them and the end of the step, and each goes to the device where it ends first by the durations of
that device's kernels, when what it reads has come over links that carry one tensor at a time.

What belongs together is placed as one, by its first node: a parameter with whatever reads it, so
that none is copied, and an update with all that it writes. A view stays with what it shows. What
the user placed stays there.

A device whose memory would overflow is passed over. What lives is counted as the simulation goes:
variables from the beginning, values until their last reader. The backward pass has no choice any
more, for it reads the parameters; so where a trial overflows there, the next one leaves more room.
Its count knows nothing of fusion and in-place updates: it is an estimate, from above, and decides
where things go, while what the arenas of the plan really take decides whether it is accepted.

To look at one node at a time is short-sighted: branches that begin on two devices may have to meet
over a slow link. So all on one device is tried, too, and is taken unless several end sooner by a
tenth. A chain of layers stays on one device, unless it is too small: a copy never makes a chain
faster.

Guarantees: every node has a device, and it is the same one whenever graph and costs are the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from compiler.contract.attrs import NO_ATTRS
from compiler.contract.errors import CompileError
from compiler.contract.types import DType, Phase, TensorType, ValueId
from compiler.graph.graph import UNPLACED, Graph, GraphBuilder, Node, consumers
from compiler.graph.program_builder import expand
from compiler.graph.registry import is_comm, is_source, kernel_op, view
from compiler.graph.target import CallOperand, Hardware, KernelCall, Target
from compiler.ops.primitives.shape import COPY
from compiler.ops.primitives.sources import CONSTANT, INPUT, VARIABLE
from compiler.ops.primitives.transfer import COPY_TO, is_copy
from compiler.storage.storage import Storage, assign_storage, call_of, dense_layout

# Let every node read what lies on its own device: copy whatever comes from another one.
#
# A value that nodes of another device read gets one `copy_to` for that device, which they share; so
# does one that the user copies, and a copy to where a value lies already is none. Constants are
# made once on each device, and a broadcast, whose result is larger than what it shows, is repeated
# there: neither costs bytes on a link.
#
# A parameter is copied only where the user says so: to read one on two devices moves all of it in
# every step, which is seldom meant. What the engine itself reads, counters and learning rates, is
# copied like any other value. Gradients need no rule of their own: one that was made on a device
# where the parameter does not lie is read where it does, and copied for that.
#
# Each copy has a bucket of its own: it can be awaited alone.
#
# Guarantees: what a node reads lies on its device, or in a source with a place of its own; a copy
# leads to another place than its input's, and a value has one for each.


def insert_copies(graph: Graph, hardware: Hardware) -> Graph:
    """Return the graph with a copy for each value and device that it goes to. O(nodes).

    Raises CompileError, with the lines of both, for a parameter that nodes of two devices read.
    """
    if len({node.device for node in graph.nodes}) == 1 and not any(map(is_copy, graph.nodes)):
        return graph
    return _CrossingCopies(graph, hardware).run()


class _CrossingCopies:
    """One copy of a graph; a value of the old one has up to one per device in the new one."""

    def __init__(self, graph: Graph, hardware: Hardware) -> None:
        self._graph = graph
        self._hardware = hardware
        self._b = GraphBuilder()
        self._new_id: list[ValueId] = [ValueId(-1)] * len(graph.types)
        self._place: dict[ValueId, int] = {}
        """Where a value of the new graph lies."""
        self._brought: dict[tuple[ValueId, int], ValueId] = {}
        self._num_copies = 0

    def run(self) -> Graph:
        for node in self._graph.nodes:
            # In topological order: what a node reads has its new value and place by now.
            outputs = self._take(node)
            for old, new in zip(node.outputs, outputs, strict=True):
                self._new_id[old] = new
        return self._b.freeze_as(self._graph, self._new_id)

    def _take(self, node: Node) -> tuple[ValueId, ...]:
        """Append a node with the copies that it needs; return its values."""
        operands = [self._new_id[v] for v in node.inputs]
        if is_copy(node):
            return (self._copied(operands[0], node.attrs.int_("to"), node),)
        inputs = tuple([self._on_device(v, node.device, node) for v in operands])
        types = [self._graph.types[v] for v in node.outputs]
        outputs = self._b.copy(node, inputs, types)
        is_elsewhere = is_source.get(node.op) and "place" in node.attrs
        place = node.attrs.int_("place") if is_elsewhere else node.device
        self._place.update(dict.fromkeys(outputs, place))
        return outputs

    def _on_device(self, value: ValueId, device: int, reader: Node) -> ValueId:
        """Return a value on the device of its reader: itself, a copy, or made once more there."""
        if self._place[value] == device:
            return value
        maker = self._b.producer_of(value)
        if self._shown(value).op is CONSTANT or (view.has(maker.op) and self._is_wider(maker)):
            return self._repeated(value, maker, device, reader)
        if self._is_parameter(value):
            self._refuse(value, device, reader)
        return self._copied(value, device, reader)

    def _is_wider(self, node: Node) -> bool:
        """Whether a view has more elements than what it shows."""
        (x,), (y,) = node.inputs, node.outputs
        return self._b.type_of(x).num_elements < self._b.type_of(y).num_elements

    def _repeated(self, value: ValueId, maker: Node, device: int, reader: Node) -> ValueId:
        """Return a value that is made once more, on another device."""
        key = (value, device)
        if key not in self._brought:
            inputs = [self._on_device(v, device, reader) for v in maker.inputs]
            with self._b.like_node(maker), self._b.on(device):
                (output,) = self._b.emit(maker.op, inputs, maker.attrs)
            self._place[output] = device
            self._brought[key] = output
        return self._brought[key]

    def _copied(self, value: ValueId, to: int, reader: Node) -> ValueId:
        """Return a value where its copy lies, or itself where it is there."""
        if self._place[value] == to:
            return value
        key = (value, to)
        if key not in self._brought:
            with self._b.like_node(reader), self._b.on(self._b.producer_of(value).device):
                copy = self._b.emit_one(COPY_TO, value, to=to, bucket=self._num_copies)
            self._num_copies += 1
            self._place[copy] = to
            self._brought[key] = copy
        return self._brought[key]

    def _is_parameter(self, value: ValueId) -> bool:
        """Whether a value is a parameter, or shows one."""
        maker = self._shown(value)
        return maker.op is VARIABLE and maker.attrs.str_("role") == "parameter"

    def _shown(self, value: ValueId) -> Node:
        maker = self._b.producer_of(value)
        while view.has(maker.op):
            maker = self._b.producer_of(maker.inputs[0])
        return maker

    def _refuse(self, value: ValueId, device: int, reader: Node) -> None:
        variable, names = self._shown(value), self._hardware.devices
        home = self._place[variable.outputs[0]]
        raise CompileError(
            f"{reader.source}: {reader.op} on {names[device]} reads parameter"
            f" {variable.attrs['name']!r}, which lies on {names[home]}, where"
            f" {self._first_use(variable)} uses it; a parameter is copied only on request: read"
            f' parameter.to("{names[device]}") here, which copies it in every step, or run both'
            " on one device"
        )

    def _first_use(self, variable: Node) -> str:
        """Return the line that made a parameter lie where it does."""
        graph = self._graph
        readers = consumers(graph)
        views = [
            n.outputs[0]
            for n in graph.nodes
            if n.op is VARIABLE and n.attrs["name"] == variable.attrs["name"]
        ]
        for value in views:  # grows by the views of what is in it
            for index in readers[value]:
                node = graph.nodes[index]
                if view.has(node.op):
                    views.append(node.outputs[0])
                elif node.device == variable.device and node.phase is not Phase.UPDATE:
                    return str(node.source)
        return str(variable.source)


_WORTH = 1.1
"""How much sooner a step must end on several devices than on one, by durations before fusion."""

_FLOATING = (CONSTANT, INPUT)
"""Ops whose results lie on the reader's device: constants are made there, batches are fed."""


@dataclass(frozen=True, slots=True)
class PlacementWork:
    """What trials have in common; views and sources take no time and are part of no schedule.

    `maker` has, per value, the node whose bytes it shows; `group`, per node, the first node of
    those that are placed with it. Of groups: `able` are the devices with kernels for all of it,
    `pinned` the device of those that are placed, `counters` those of the engine's own, `lasting`
    the bytes of their variables. Of launches: `reads` are the values, `times` the duration on each
    device, None where that has no kernel, `rank` the time from the begin to the end of all.
    """

    graph: Graph
    hardware: Hardware
    maker: tuple[int, ...]
    group: tuple[int, ...]
    able: dict[int, tuple[int, ...]]
    pinned: dict[int, int]
    counters: tuple[int, ...]
    lasting: dict[int, int]
    reads: dict[int, tuple[ValueId, ...]]
    times: dict[int, tuple[float | None, ...]]
    rank: dict[int, float]

    def before(self, launch: int) -> list[int]:
        """Return the launches that make what one reads."""
        makers = [self.maker[value] for value in self.reads[launch]]
        return list(dict.fromkeys([maker for maker in makers if maker in self.reads]))

    def move_ns(self, start: int, end: int, size_bytes: int) -> float:
        """Return what it takes until a device has the bytes of another one."""
        link = self.hardware.link(end, start)
        time = self.hardware.message_ns(start, end)
        return time if link is None else time + link.in_ns(size_bytes)

    def made_bytes(self, launch: int) -> int:
        """Return the bytes of what a launch makes, and not over a variable."""
        node = self.graph.nodes[launch]
        over = [output for output, _ in node.writes]
        outputs = [v for position, v in enumerate(node.outputs) if position not in over]
        return sum([self.graph.types[v].size_bytes for v in outputs])


class PlacementTrial:
    """One schedule on a simulated machine, which fills a share of each device's memory.

    With `only` all goes to one device, as far as that has kernels. `chosen` has the device of each
    group; `excess_bytes` what the fullest device has too much.
    """

    def __init__(self, work: PlacementWork, share: float, only: int | None = None) -> None:
        self._work = work
        self._only = only
        count = len(work.hardware.devices)
        self._cap_bytes = [work.hardware.room_bytes(device) for device in range(count)]
        self._room_bytes = [share * cap for cap in self._cap_bytes]
        self.chosen: dict[int, int] = {}
        self._free_ns = [0.0] * count
        self._link_ns: dict[tuple[int, int], float] = {}
        self._end_ns: dict[int, float] = {}
        self._there_ns: dict[tuple[ValueId, int], float] = {}
        self._lives, self._peak = [0] * count, [0] * count
        self._held: dict[int, dict[int, int]] = {}
        """By a launch and a device, the bytes there of what it made."""

    @property
    def cost_ns(self) -> float:
        """When the last launch ends; over several devices, so much later that they are worth it."""
        end_ns = max(self._end_ns.values(), default=0.0)
        return end_ns if self._only is not None else end_ns * _WORTH

    @property
    def excess_bytes(self) -> float:
        """Bytes that the fullest device would hold beyond its memory."""
        pairs = zip(self._peak, self._cap_bytes, strict=True)
        return max([0.0, *[peak - cap for peak, cap in pairs]])

    def run(self) -> None:
        """Place launch after launch, those with the most before them first."""
        work = self._work
        readers: dict[int, list[int]] = {launch: [] for launch in work.reads}
        for launch in work.reads:
            for maker in work.before(launch):
                readers[maker].append(launch)
        waits = {launch: len(work.before(launch)) for launch in work.reads}
        num_waiting = {launch: len(launch_readers) for launch, launch_readers in readers.items()}
        # A root is read at the end, too: its count never falls to 0, so its bytes stay.
        for value in work.graph.roots():
            if work.maker[value] in num_waiting:
                num_waiting[work.maker[value]] += 1
        for root, device in work.pinned.items():
            self._choose(root, device)
        for root in work.counters:  # all devices read them: none is better
            if root not in self.chosen:
                self._choose(root, self._only or 0)
        # An update frees its gradient: where memory is short it does not wait for the end.
        is_short = min(self._cap_bytes) < inf
        is_early = [bool(is_short and node.writes) for node in work.graph.nodes]
        key = {i: -inf if is_early[i] else -rank for i, rank in work.rank.items()}
        ready = [(key[launch], launch) for launch, count in waits.items() if not count]
        heapq.heapify(ready)
        while ready:
            _, launch = heapq.heappop(ready)
            self._place(launch)
            for maker in work.before(launch):
                num_waiting[maker] -= 1
                if not num_waiting[maker]:
                    self._release(maker)
            for reader in readers[launch]:
                waits[reader] -= 1
                if not waits[reader]:
                    heapq.heappush(ready, (key[reader], reader))

    def _place(self, launch: int) -> None:
        """Let a launch run, on the device of its group, or on the one where it ends first."""
        work = self._work
        root = work.group[launch]
        if root not in self.chosen:
            able: Sequence[int] = work.able[root]
            if self._only is not None and self._only in able:
                able = (self._only,)
            # Devices with room first; where none has any, the one that overflows least.
            fits = [d for d in able if not self._excess_at(launch, d)]
            cost = self._end_at if fits else self._excess_at
            self._choose(root, min(fits or able, key=lambda d: (cost(launch, d), d)))
        device = self.chosen[root]
        arrivals = self._arrivals(launch, device, self._link_ns)
        for value, at in arrivals.items():
            self._there_ns[value, device] = at
            bytes_on = self._held.get(work.maker[value])
            if bytes_on is not None and device not in bytes_on:
                bytes_on[device] = work.graph.types[value].size_bytes
                self._add(device, bytes_on[device])
        begin = max([self._free_ns[device], *arrivals.values()])
        self._free_ns[device] = self._end_ns[launch] = begin + (work.times[launch][device] or 0.0)
        self._held[launch] = {device: work.made_bytes(launch)}
        self._add(device, work.made_bytes(launch))

    def _choose(self, root: int, device: int) -> None:
        self.chosen[root] = device
        self._add(device, self._work.lasting.get(root, 0))

    def _add(self, device: int, size_bytes: int) -> None:
        self._lives[device] += size_bytes
        self._peak[device] = max(self._peak[device], self._lives[device])

    def _release(self, launch: int) -> None:
        for device, size_bytes in self._held.pop(launch).items():
            self._lives[device] -= size_bytes

    def _excess_at(self, launch: int, device: int) -> float:
        """Return by how much a device would be fuller than it may be with a launch there."""
        if self._room_bytes[device] == inf:
            return 0.0
        work = self._work
        new = work.lasting.get(work.group[launch], 0) + work.made_bytes(launch)
        for value in work.reads[launch]:
            if device not in self._held.get(work.maker[value], (device,)):
                new += work.graph.types[value].size_bytes
        return max(0.0, self._lives[device] + new - self._room_bytes[device])

    def _end_at(self, launch: int, device: int) -> float:
        """Return when a launch would end on a device."""
        # A copy: to ask does not take the link.
        arrivals = self._arrivals(launch, device, dict(self._link_ns))
        begin = max([self._free_ns[device], *arrivals.values()])
        return begin + (self._work.times[launch][device] or 0.0)

    def _arrivals(
        self, launch: int, device: int, link_ns: dict[tuple[int, int], float]
    ) -> dict[ValueId, float]:
        """Return when a device has what a launch reads; links are busy with it until then."""
        work, arrivals = self._work, dict[ValueId, float]()
        for value in work.reads[launch]:
            maker = work.maker[value]
            home = self.chosen.get(work.group[maker], device)
            if work.graph.nodes[maker].op in _FLOATING:
                home = device
            at = self._there_ns.get((value, device), self._end_ns.get(maker, 0.0))
            if home != device and (value, device) not in self._there_ns:
                begin = max(at, link_ns.get((home, device), 0.0))
                size = work.graph.types[value].size_bytes
                at = link_ns[home, device] = begin + work.move_ns(home, device, size)
            arrivals[value] = at
        return arrivals


_ROOM = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375)
"""Shares of a device's memory that trials fill before they go on elsewhere, one after the other."""


def place_nodes(graph: Graph, hardware: Hardware) -> Graph:
    """Return the graph with a device for every node. O(n log n) per trial, times the devices.

    Raises CompileError where no device has a kernel for a node.
    """
    if all([node.device != UNPLACED for node in graph.nodes]):
        return graph
    work = _work_of(graph, hardware)
    numbers = range(len(hardware.devices))
    is_short = min([hardware.room_bytes(device) for device in numbers]) < inf
    trials = [PlacementTrial(work, 1.0, device) for device in numbers]
    trials += [PlacementTrial(work, share) for share in (_ROOM if is_short else _ROOM[:1])]
    for trial in trials:
        trial.run()
    # Fitting comes first, time second; ties go to the trial that was listed first.
    best = min(trials, key=lambda trial: (trial.excess_bytes, trial.cost_ns))
    nodes = zip(graph.nodes, _devices(work, best.chosen), strict=True)
    return replace(graph, nodes=tuple([replace(node, device=d) for node, d in nodes]))


def with_variable_devices_of(graph: Graph, training: Graph, hardware: Hardware) -> Graph:
    """Return a graph that reads the variables of another one with them where they lie there.

    Raises CompileError, with both lines, where the user placed one somewhere else.
    """
    home = {n.attrs["name"]: n for n in training.nodes if n.op is VARIABLE}
    nodes: list[Node] = []
    for node in graph.nodes:
        there = home.get(node.attrs["name"]) if node.op is VARIABLE else None
        if there is not None and node.device not in (UNPLACED, there.device):
            raise CompileError(
                f"{node.source}: the evaluation has variable {node.attrs['name']!r} on"
                f" {hardware.devices[node.device]}, the training on"
                f" {hardware.devices[there.device]} ({there.source}); place what reads it alike,"
                " or name no device in the evaluation"
            )
        nodes.append(node if there is None else replace(node, device=there.device))
    return replace(graph, nodes=tuple(nodes))


def _work_of(graph: Graph, hardware: Hardware) -> PlacementWork:
    storage, producers = assign_storage(graph), graph.producers()
    maker = list(producers)
    for node in graph.nodes:
        if view.has(node.op):
            # A view has the maker of what it shows.
            maker[node.outputs[0]] = maker[node.inputs[0]]
    group = _groups(graph, maker)
    pinned: dict[int, int] = {}
    lasting: dict[int, int] = {}
    counters: list[int] = []
    for index, node in enumerate(graph.nodes):
        if node.device != UNPLACED:
            pinned.setdefault(group[index], node.device)
        if node.op is VARIABLE:
            if node.attrs.str_("role") == "counter":
                counters.append(group[index])
            size = graph.types[node.outputs[0]].size_bytes
            lasting[group[index]] = lasting.get(group[index], 0) + size
    reads = {i: tuple(dict.fromkeys(graph.nodes[i].inputs)) for i in storage.launches}
    times = _times(graph, storage, hardware)
    able = _able(graph, hardware, group, times)
    fixed = (pinned, tuple(counters), lasting)
    work = PlacementWork(graph, hardware, tuple(maker), group, able, *fixed, reads, times, {})
    _fill_ranks(work)
    return work


def _groups(graph: Graph, maker: Sequence[int]) -> tuple[int, ...]:
    """Return, per node, the first node of those that are placed with it."""
    parent = list(range(len(graph.nodes)))

    def find(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    # The smaller number stays the root: a group is called by its first node.
    def join(one: int, other: int) -> None:
        first, second = sorted((find(one), find(other)))
        parent[second] = first

    for index, node in enumerate(graph.nodes):
        if view.has(node.op):
            join(index, maker[node.inputs[0]])
            continue
        for value in node.inputs:
            source = graph.nodes[maker[value]]
            if source.op is VARIABLE and source.attrs.str_("role") == "parameter":
                join(index, maker[value])
        for _, position in node.writes:
            join(index, maker[node.inputs[position]])
    return tuple([find(index) for index in range(len(parent))])


def _times(
    graph: Graph, storage: Storage, hardware: Hardware
) -> dict[int, tuple[float | None, ...]]:
    """Return the duration of each launch on each device; those that are alike are asked once."""
    times_of_call: dict[object, tuple[float | None, ...]] = {}
    times: dict[int, tuple[float | None, ...]] = {}
    for index in storage.launches:
        node = graph.nodes[index]
        if is_comm.get(node.op):
            times[index] = (0.0,) * len(hardware.targets)
            continue
        if expand.has(node.op) or kernel_op.get(node.op):
            call = _copy_as_long(graph, node)
        else:
            call = call_of(node, graph.types, storage.layout.__getitem__)
        if call not in times_of_call:
            times_of_call[call] = tuple([_duration_ns(target, call) for target in hardware.targets])
        times[index] = times_of_call[call]
    return times


def _copy_as_long(graph: Graph, node: Node) -> KernelCall:
    """Return a copy of as many bytes as a node moves that has no kernel before it is fused.

    It is bound by memory, as those are.
    """
    moved = sum([graph.types[v].size_bytes for v in (*node.inputs, *node.outputs)])
    # A copy reads and writes: half of the moved bytes each.
    type_ = TensorType(DType.BOOL, (max(1, moved // 2),))
    operand = CallOperand(type_, dense_layout(type_))
    return KernelCall(COPY.name, NO_ATTRS, (operand,), (operand,))


def _able(
    graph: Graph,
    hardware: Hardware,
    group: Sequence[int],
    times: dict[int, tuple[float | None, ...]],
) -> dict[int, tuple[int, ...]]:
    """Return, per group with launches, the devices that have kernels for all of them."""
    able: dict[int, tuple[int, ...]] = {}
    for launch, row in times.items():
        earlier = able.get(group[launch], tuple(range(len(row))))
        able[group[launch]] = tuple([d for d in earlier if row[d] is not None])
        if not able[group[launch]]:
            node, names = graph.nodes[launch], ", ".join(map(str, hardware.devices))
            raise CompileError(
                f"{node.source}: none of {names} has kernels for {node.op} and the ops that must"
                " run on the same device"
            )
    return able


def _duration_ns(target: Target, call: KernelCall) -> float | None:
    try:
        return target.query(call).duration_ns
    except LookupError:
        return None


def _fill_ranks(work: PlacementWork) -> None:
    """Find the time from the begin of each launch to the end, by means over devices and links."""
    # Backwards: the ranks of a launch's readers are complete.
    for launch in reversed(work.reads):
        durations = [time for time in work.times[launch] if time is not None]
        # HEFT ranks by means, as the device is not known yet.
        rank = work.rank[launch] = work.rank.get(launch, 0.0) + sum(durations) / len(durations)
        for value in work.reads[launch]:
            maker = work.maker[value]
            if maker in work.reads:
                is_moved = work.group[maker] != work.group[launch]
                size = work.graph.types[value].size_bytes
                # Devices 0 and 1 stand for any two: the places are not known yet.
                moved = work.move_ns(0, 1, size) if is_moved else 0.0
                work.rank[maker] = max(work.rank.get(maker, 0.0), rank + moved)


def _devices(work: PlacementWork, chosen: dict[int, int]) -> list[int]:
    """Return the device of every node; what lies wherever it is read lies where that is first."""
    first: dict[int, int] = {}
    for launch in work.reads:
        for value in work.reads[launch]:
            first.setdefault(work.group[work.maker[value]], chosen[work.group[launch]])
    return [chosen.get(root, first.get(root, 0)) for root in work.group]
