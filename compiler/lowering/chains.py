"""Cut the launches of a step into chains, and give each chain a stream.

A chain is a run of launches on one stream; it becomes one actor. With one compute stream and no
communication there is one chain. Otherwise the launches are scheduled on virtual time, a message
across streams costing what their devices say, and chains end where another stream waits for a
result, and begin where they wait for one. A wait that an earlier one implies cuts nothing: each
stream keeps how far it knows the others to be (a vector clock, Fidge 1988).

Communication gets a stream of its own. Small collectives are put together into buckets, so that a
step has a handful of them, each started as soon as its last operand is there. So do copies to host
memory and those from it; which of them make a bucket is the business of whoever planned them.

Source: list scheduling with the earliest finish time (Topcuoglu, Hariri, Wu, "HEFT", 2002).
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from compiler.errors import InternalError

COMM_STREAM = -1
"""The stream of all communication; compute streams count from 0."""

H2D_STREAM = -2
"""The stream of all copies from host memory to the device."""

D2H_STREAM = -3
"""The stream of all copies from the device to host memory."""

MessageNs = Callable[[int, int], float]
"""What a wait for a stream of one device costs a stream of another, or of the same."""

MAX_BUCKETS = 8
"""Collectives per step: enough to overlap with the backward pass, few enough to cost no latency."""


@dataclass(frozen=True, slots=True)
class LaunchWork:
    """Columns by launch: duration, the launches that must be done before, bytes to communicate.

    `comm_bytes` is 0 for launches that compute. `copies` has the stream and the bucket of those
    that copy to or from host memory; a bucket begins once all that its members wait for is done.
    Launches stand in an order that obeys `before`.
    """

    duration_ns: tuple[float, ...]
    before: tuple[tuple[int, ...], ...]
    comm_bytes: tuple[int, ...]
    copies: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    def stream(self, launch: int) -> int:
        """Return the stream that a launch is bound to; 0 where any compute stream will do."""
        if self.comm_bytes[launch]:
            return COMM_STREAM
        return self.copies[launch][0] if launch in self.copies else 0


@dataclass(frozen=True, slots=True)
class ChainDraft:
    """A chain of a program, by the numbers of its launches; `span` is in ranks of time."""

    launches: tuple[int, ...]
    stream: int
    is_per_step: bool
    span: tuple[int, int]


@dataclass(frozen=True, slots=True)
class LaunchChain:
    """A run of launches on one stream, with its place on virtual time."""

    launches: tuple[int, ...]
    stream: int
    start_ns: float
    end_ns: float


@dataclass(frozen=True, slots=True)
class Chains:
    """The chains in order of start, and pairs (earlier, later) that must not overlap in time."""

    chains: tuple[LaunchChain, ...]
    order: tuple[tuple[int, int], ...]


def form_chains(
    work: LaunchWork, launches: Sequence[int], num_streams: int, message_ns: MessageNs
) -> Chains:
    """Return the chains of some launches, which stand in order; what they wait for is among them.

    O(n log n + n * streams) for n launches with few dependencies each.
    """
    if not launches:
        return Chains((), ())
    if num_streams == 1 and not any([work.stream(i) for i in launches]):
        total = sum([work.duration_ns[i] for i in launches])
        return Chains((LaunchChain(tuple(launches), 0, 0.0, total),), ())
    tasks = _tasks(work, launches)
    return _cut(_schedule(tasks, num_streams, message_ns))


@dataclass(frozen=True, slots=True)
class _Task:
    """Launches that are scheduled as one, and the tasks that must be done before.

    `stream` is as in `LaunchWork.stream`; `depth` is the number of collectives on the way to it,
    one after the other.
    """

    launches: tuple[int, ...]
    before: tuple[int, ...]
    duration_ns: float
    stream: int
    depth: int


@dataclass(frozen=True, slots=True)
class _ScheduledTask:
    """A task on its stream and on virtual time."""

    task: int
    launches: tuple[int, ...]
    before: tuple[int, ...]
    stream: int
    start_ns: float
    end_ns: float


def _tasks(work: LaunchWork, launches: Sequence[int]) -> list[_Task]:
    """Return one task per computing launch, and per bucket of the others, in order."""
    chosen = set(launches)
    depth = _depths(work, launches)
    groups = [[i] for i in launches if not work.stream(i)] + _buckets(work, launches, depth)
    copied: dict[tuple[int, int], list[int]] = {}
    for i in [i for i in launches if i in work.copies]:
        copied.setdefault(work.copies[i], []).append(i)
    groups += copied.values()
    # A bucket stands after the last launch that any of its members waits for.
    groups.sort(key=lambda group: max(_position(work, i) for i in group))
    task_of = {i: index for index, group in enumerate(groups) for i in group}
    tasks: list[_Task] = []
    for index, group in enumerate(groups):
        before = [task_of[p] for i in group for p in work.before[i] if p in chosen]
        tasks.append(
            _Task(
                tuple(group),
                tuple(sorted({p for p in before if p != index})),
                sum([work.duration_ns[i] for i in group]),
                work.stream(group[0]),
                max([depth[i] for i in group]),
            )
        )
    return tasks


def _position(work: LaunchWork, launch: int) -> float:
    if not work.stream(launch):
        return float(launch)
    return max(work.before[launch], default=-1) + 0.5


def _depths(work: LaunchWork, launches: Sequence[int]) -> dict[int, int]:
    depth: dict[int, int] = {}
    for i in launches:
        earlier = [p for p in work.before[i] if p in depth]
        depth[i] = max([depth[p] + bool(work.comm_bytes[p]) for p in earlier], default=0)
    return depth


def _buckets(work: LaunchWork, launches: Sequence[int], depth: dict[int, int]) -> list[list[int]]:
    """Put collectives that become ready one after another together, up to a share of all bytes.

    One that waits for another, however indirectly, never shares a bucket with it.
    """
    comm = [i for i in launches if work.comm_bytes[i]]
    comm.sort(key=lambda i: (depth[i], _position(work, i), i))
    enough = sum([work.comm_bytes[i] for i in comm]) / MAX_BUCKETS
    buckets: list[list[int]] = []
    held = 0
    for i in comm:
        if not buckets or held >= enough or depth[buckets[-1][0]] != depth[i]:
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += work.comm_bytes[i]
    return buckets


def _schedule(tasks: list[_Task], num_streams: int, message_ns: MessageNs) -> list[_ScheduledTask]:
    """Place every task on a stream; return them in order of start.

    Whenever a compute stream is free, the first task in order that could start by then is placed on
    the stream where it ends first; but what needs a collective comes after all that does not, so
    that no chain waits for communication while there is work. Every stream but the first waits for
    a message to begin with, so that what is short stays together.
    """
    waiting = [len(task.before) for task in tasks]
    after: list[list[int]] = [[] for _ in tasks]
    for index, task in enumerate(tasks):
        for p in task.before:
            after[p].append(index)
    own = dict.fromkeys([task.stream for task in tasks if task.stream])
    free = dict.fromkeys((*range(num_streams), *own), message_ns(0, 0)) | {0: 0.0}
    placed: dict[int, _ScheduledTask] = {}
    ready = sorted([(tasks[i].depth, i) for i, count in enumerate(waiting) if not count])
    later: list[tuple[float, int]] = []
    while ready or later:
        now = min([free[s] for s in range(num_streams)])
        if not ready:
            now = max(now, later[0][0])
        while later and later[0][0] <= now:
            index = heappop(later)[1]
            heappush(ready, (tasks[index].depth, index))
        index = heappop(ready)[1]
        placed[index] = slot = _place(tasks[index], index, placed, free, message_ns)
        free[slot.stream] = slot.end_ns
        for successor in after[index]:
            waiting[successor] -= 1
            if not waiting[successor]:
                ends = [placed[p].end_ns for p in tasks[successor].before]
                heappush(later, (max(ends), successor))
    if len(placed) < len(tasks):
        stuck = [task.launches for index, task in enumerate(tasks) if index not in placed]
        raise InternalError(f"buckets wait for each other: launches {stuck[0]} never begin")
    # Ties stay as they were placed: a task without duration may begin where the one before it does.
    return sorted(placed.values(), key=lambda slot: (slot.start_ns, slot.end_ns))


def _place(
    task: _Task,
    index: int,
    placed: dict[int, _ScheduledTask],
    free: dict[int, float],
    message_ns: MessageNs,
) -> _ScheduledTask:
    """Return the task's place on the stream where it ends first."""
    best: _ScheduledTask | None = None
    for stream, start in free.items():
        if min(stream, 0) != task.stream:
            continue
        for p in task.before:
            delay = 0.0 if placed[p].stream == stream else message_ns(0, 0)
            start = max(start, placed[p].end_ns + delay)
        if best is None or start < best.start_ns:
            end = start + task.duration_ns
            best = _ScheduledTask(index, task.launches, task.before, stream, start, end)
    if best is None:
        raise InternalError(f"no stream takes launches {task.launches}")
    return best


def _cut(slots: list[_ScheduledTask]) -> Chains:
    """Return the chains of a schedule, which stands in order of start."""
    streams = tuple(dict.fromkeys([slot.stream for slot in slots]))
    on_stream: dict[int, list[_ScheduledTask]] = {stream: [] for stream in streams}
    place: dict[int, tuple[int, int]] = {}
    known: dict[int, dict[int, int]] = {}
    starts: dict[int, list[int]] = {stream: [0] for stream in streams}
    waits: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for slot in slots:
        own = on_stream[slot.stream]
        clock = dict(known[own[-1].task]) if own else dict.fromkeys(streams, -1)
        place[slot.task] = here = (slot.stream, len(own))
        # The last result of each stream first: whoever waits for it has waited for all before.
        for p in sorted(slot.before, key=lambda p: -place[p][1]):
            stream, index = place[p]
            if stream != slot.stream and clock[stream] < index:
                starts[stream].append(index + 1)
                starts[slot.stream].append(len(own))
                waits.append((place[p], here))
                clock = {s: max(clock[s], known[p][s]) for s in streams}
        clock[slot.stream] = len(own)
        known[slot.task] = clock
        own.append(slot)
    return _number(on_stream, starts, waits)


def _number(
    on_stream: dict[int, list[_ScheduledTask]],
    starts: dict[int, list[int]],
    waits: list[tuple[tuple[int, int], tuple[int, int]]],
) -> Chains:
    """Number the chains in order of start; `starts` are the places where one may begin."""
    runs: list[tuple[float, float, int, int]] = []
    begins: dict[int, list[int]] = {}
    for stream, own in [(stream, own) for stream, own in on_stream.items() if own]:
        begins[stream] = [b for b in sorted(set(starts[stream])) if b < len(own)]
        for begin, end in zip(begins[stream], [*begins[stream][1:], len(own)], strict=True):
            runs.append((own[begin].start_ns, own[end - 1].end_ns, stream, begin))
    runs.sort(key=lambda run: (run[0], run[1], run[2] < 0, run[2], run[3]))
    number = {(stream, begin): i for i, (_, _, stream, begin) in enumerate(runs)}

    def chain_at(place: tuple[int, int]) -> int:
        stream, index = place
        own = begins[stream]
        return number[stream, own[bisect_right(own, index) - 1]]

    order = {(chain_at(earlier), chain_at(later)) for earlier, later in waits}
    stop: dict[tuple[int, int], int | None] = {}
    for stream, places in begins.items():
        for a, b in itertools.pairwise(places):
            order.add((number[stream, a], number[stream, b]))
            stop[stream, a] = b
    chains = []
    for started, ended, stream, begin in runs:
        run = on_stream[stream][begin : stop.get((stream, begin))]
        launches = [i for slot in run for i in slot.launches]
        chains.append(LaunchChain(tuple(launches), stream, started, ended))
    return Chains(tuple(chains), tuple(sorted(order)))
