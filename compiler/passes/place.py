"""Place by cost what no region places: each node where it ends earliest, memory permitting.

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

To look at one node at a time is short-sighted: branches that begin on two devices may have to
meet over a slow link. So all on one device is tried, too, and is taken unless several end sooner
by a tenth.
A chain of layers stays on one device, unless it is too small: a copy never makes a chain faster.

Guarantees: every node has a device, and it is the same one whenever graph and costs are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from compiler.attrs import NO_ATTRS
from compiler.errors import CompileError
from compiler.fusion.expansion import expand
from compiler.graph import UNPLACED, Graph, Node
from compiler.lowering.storage import Storage, assign_storage, call_of, dense_layout
from compiler.ops.shape import COPY
from compiler.ops.sources import VARIABLE
from compiler.passes.placement_trial import PlacementTrial, PlacementWork
from compiler.registry import is_comm, runs_as, view
from compiler.target import CallOperand, Hardware, KernelCall, Target
from compiler.types import DType, TensorType

_ROOM = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375)
"""Shares of a device's memory that trials fill before they go on elsewhere, one after the other."""


def run(graph: Graph, hardware: Hardware) -> Graph:
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
    best = min(trials, key=lambda trial: (trial.excess_bytes, trial.cost_ns))
    nodes = zip(graph.nodes, _devices(work, best.chosen), strict=True)
    return replace(graph, nodes=tuple([replace(node, device=d) for node, d in nodes]))


def with_homes_of(graph: Graph, training: Graph, hardware: Hardware) -> Graph:
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
    known: dict[object, tuple[float | None, ...]] = {}
    times: dict[int, tuple[float | None, ...]] = {}
    for index in storage.launches:
        node = graph.nodes[index]
        if is_comm.get(node.op):
            times[index] = (0.0,) * len(hardware.targets)
            continue
        if expand.has(node.op) or runs_as.get(node.op):
            call = _copy_as_long(graph, node)
        else:
            call = call_of(node, graph.types, storage.layout.__getitem__)
        if call not in known:
            known[call] = tuple([_duration_ns(target, call) for target in hardware.targets])
        times[index] = known[call]
    return times


def _copy_as_long(graph: Graph, node: Node) -> KernelCall:
    """Return a copy of as many bytes as a node moves that has no kernel before it is fused.

    It is bound by memory, as those are.
    """
    moved = sum([graph.types[v].size_bytes for v in (*node.inputs, *node.outputs)])
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
                f"{node.source}: none of {names} has a kernel for {node.op} and all that must run"
                " beside it"
            )
    return able


def _duration_ns(target: Target, call: KernelCall) -> float | None:
    try:
        return target.query(call).duration_ns
    except LookupError:
        return None


def _fill_ranks(work: PlacementWork) -> None:
    """Find the time from the begin of each launch to the end, by means over devices and links."""
    for launch in reversed(work.reads):
        own = [time for time in work.times[launch] if time is not None]
        rank = work.rank[launch] = work.rank.get(launch, 0.0) + sum(own) / len(own)
        for value in work.reads[launch]:
            maker = work.maker[value]
            if maker in work.reads:
                is_moved = work.group[maker] != work.group[launch]
                size = work.graph.types[value].size_bytes
                moved = work.move_ns(0, 1, size) if is_moved else 0.0
                work.rank[maker] = max(work.rank.get(maker, 0.0), rank + moved)


def _devices(work: PlacementWork, chosen: dict[int, int]) -> list[int]:
    """Return the device of every node; what lies wherever it is read lies where that is first."""
    first: dict[int, int] = {}
    for launch in work.reads:
        for value in work.reads[launch]:
            first.setdefault(work.group[work.maker[value]], chosen[work.group[launch]])
    return [chosen.get(root, first.get(root, 0)) for root in work.group]
