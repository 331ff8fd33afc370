"""Cut the launches of a step into chains, and give each chain a stream.

A chain is a run of launches on one stream; it becomes one actor. With one compute stream and no
communication there is one chain. Otherwise the launches are scheduled on virtual time, a message
across streams costing what their devices say, and chains end where another stream waits for a
result, and begin where they wait for one. A wait that an earlier one implies cuts nothing: each
stream keeps how far it knows the others to be (a vector clock, Fidge 1988).

A device has compute streams of its own, and a launch runs on any of those. Communication gets a
stream of its own. Which collectives make a bucket, and in which order they go, says the graph, and
nothing here changes it: ranks whose kernels take another time must all do the same. Each bucket is
a chain, begun as soon as its last operand is there and the one before it is done. Copies into a
device and those out of it have streams and buckets, too, in any order.

Source: list scheduling with the earliest finish time (Topcuoglu, Hariri, Wu, "HEFT", 2002).
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from compiler.contract.errors import InternalError
from compiler.contract.placement import StreamRole

MessageNs = Callable[[int, int], float]
"""What a wait for a stream of one device costs a stream of another, or of the same."""


class StreamKey(NamedTuple):
    """The `nth` stream of a role on a device, which is called by its number in the job."""

    device: int
    role: StreamRole
    nth: int = 0

    @property
    def computes(self) -> bool:
        """Whether it is one of the device's streams for what computes."""
        return self.role is StreamRole.COMPUTE

    @property
    def rank(self) -> tuple[int, int, int]:
        """A place in a fixed order: what computes stands first."""
        return _ROLES.index(self.role), self.device, self.nth


_ROLES = (
    StreamRole.COMPUTE,
    StreamRole.D2H,
    StreamRole.H2D,
    StreamRole.COMM,
    StreamRole.PORT,
)

COMPUTE = StreamKey(0, StreamRole.COMPUTE)
"""The first compute stream of a job's first device: that of a plan that has no other."""


@dataclass(frozen=True, slots=True)
class LaunchWork:
    """Columns by launch: duration, the launches that must be done before, its stream.

    What computes may run on any compute stream of its device, and its stream is the first of them.
    `buckets` are those of copies and collectives; a bucket begins once all that its members wait
    for is done. `turns` are those of collectives, which go in this order; of these `late` are what
    nothing but the end of a step waits for. Launches stand in an order that obeys `before`.
    """

    duration_ns: tuple[float, ...]
    before: tuple[tuple[int, ...], ...]
    stream: tuple[StreamKey, ...]
    buckets: Mapping[int, int] = field(default_factory=dict)
    turns: Mapping[int, int] = field(default_factory=dict)
    late: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ChainDraft:
    """A chain of a program, by the numbers of its launches; `span` is in ranks of time.

    One that is `beside` runs while other steps do: see `compiler.passes.batches`.
    """

    launches: tuple[int, ...]
    stream: StreamKey
    is_per_step: bool
    span: tuple[int, int]
    is_beside: bool = False


@dataclass(frozen=True, slots=True)
class LaunchChain:
    """A run of launches on one stream, with its place on virtual time."""

    launches: tuple[int, ...]
    stream: StreamKey
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
    only = work.stream[launches[0]]
    # One compute stream and nothing else: nothing to schedule.
    if num_streams == 1 and only.computes and all([work.stream[i] == only for i in launches]):
        total = sum([work.duration_ns[i] for i in launches])
        return Chains((LaunchChain(tuple(launches), only, 0.0, total),), ())
    tasks = _tasks(work, launches)
    return _cut(_schedule(tasks, num_streams, message_ns))


@dataclass(frozen=True, slots=True)
class _Task:
    """Launches that are scheduled as one, and the tasks that must be done before.

    `stream` is as in `LaunchWork`; `depth` is the number of collectives on the way to it,
    one after the other.
    """

    launches: tuple[int, ...]
    before: tuple[int, ...]
    duration_ns: float
    stream: StreamKey
    depth: int


@dataclass(frozen=True, slots=True)
class _ScheduledTask:
    """A task on its stream and on virtual time."""

    task: int
    launches: tuple[int, ...]
    before: tuple[int, ...]
    stream: StreamKey
    start_ns: float
    end_ns: float


def _tasks(work: LaunchWork, launches: Sequence[int]) -> list[_Task]:
    """Return one task per computing launch, and per bucket of the others, in order."""
    members = set(launches)
    depth = _depths(work, launches)
    groups = [[i] for i in launches if work.stream[i].computes]
    buckets: dict[tuple[StreamKey, int], list[int]] = {}
    # By turn, so that `buckets` has them in the order that all ranks keep.
    for i in sorted([i for i in launches if i in work.buckets], key=lambda i: work.turns.get(i, 0)):
        buckets.setdefault((work.stream[i], work.buckets[i]), []).append(i)
    groups += buckets.values()
    turn: dict[int, int] = {}
    for nth in dict.fromkeys(
        [stream.nth for stream, _ in buckets]
    ):  # collectives, or one channel's
        row = [
            group for (s, _), group in buckets.items() if s.nth == nth and group[0] in work.turns
        ]
        turn |= {later[0]: earlier[0] for earlier, later in itertools.pairwise(row)}
    # A bucket stands after the last launch that any of its members waits for.
    groups.sort(key=lambda group: max(_position(work, i) for i in group))
    task_of = {i: index for index, group in enumerate(groups) for i in group}
    tasks: list[_Task] = []
    for index, group in enumerate(groups):
        before = [task_of[p] for i in group for p in work.before[i] if p in members]
        before += [task_of[turn[i]] for i in group if i in turn]
        tasks.append(
            _Task(
                tuple(group),
                tuple(sorted({p for p in before if p != index})),
                sum([work.duration_ns[i] for i in group]),
                work.stream[group[0]],
                max([depth[i] for i in group]),
            )
        )
    return tasks


def _position(work: LaunchWork, launch: int) -> float:
    if work.stream[launch].computes:
        return float(launch)
    # After the last launch it waits for, before the next one.
    return max(work.before[launch], default=-1) + 0.5


def _depths(work: LaunchWork, launches: Sequence[int]) -> dict[int, int]:
    """Return how many collectives are on the way to each; late ones count more than all others."""
    steps = {p: len(work.turns) if p in work.late else 1 for p in work.turns}
    depth: dict[int, int] = {}
    for i in launches:
        earlier = [p for p in work.before[i] if p in depth]
        depth[i] = max([depth[p] + steps.get(p, 0) for p in earlier], default=0)
    return depth


@dataclass(frozen=True, slots=True)
class _DeviceQueue:
    """Tasks of a device that wait for nothing any more, by depth and number; and those to come.

    `later` has, by time and number, the tasks that can begin at that time.
    """

    compute: tuple[StreamKey, ...]
    ready: list[tuple[int, int]]
    later: list[tuple[float, int]]

    def now_ns(self, free: dict[StreamKey, float]) -> float:
        """Return when the next task is chosen: a compute stream is free, and there is one."""
        now = min([free[stream] for stream in self.compute])
        return now if self.ready else max(now, self.later[0][0])

    def take(self, now_ns: float, tasks: list[_Task]) -> int:
        """Take the first task in order that could begin by now."""
        while self.later and self.later[0][0] <= now_ns:
            index = heappop(self.later)[1]
            heappush(self.ready, (tasks[index].depth, index))
        return heappop(self.ready)[1]


def _schedule(tasks: list[_Task], num_streams: int, message_ns: MessageNs) -> list[_ScheduledTask]:
    """Place every task on a stream; return them in order of start.

    Whenever a compute stream is free, the first task in order that could start by then is placed on
    the stream of its device where it ends first; but what needs a collective comes after all that
    does not, so that no chain waits for communication while there is work. Every stream but the
    first of a device waits for a message to begin with, so that what is short stays together.
    """
    waiting = [len(task.before) for task in tasks]
    after: list[list[int]] = [[] for _ in tasks]
    for index, task in enumerate(tasks):
        for p in task.before:
            after[p].append(index)
    free: dict[StreamKey, float] = {}
    queues: dict[int, _DeviceQueue] = {}
    for device in sorted({task.stream.device for task in tasks}):
        compute = [StreamKey(device, StreamRole.COMPUTE, index) for index in range(num_streams)]
        queues[device] = _DeviceQueue(tuple(compute), [], [])
        others = [t.stream for t in tasks if t.stream.device == device and not t.stream.computes]
        free |= dict.fromkeys([*compute, *others], message_ns(device, device))
        free[compute[0]] = 0.0
    for index in [index for index, count in enumerate(waiting) if not count]:
        queues[tasks[index].stream.device].ready.append((tasks[index].depth, index))
    for queue in queues.values():
        heapify(queue.ready)
    placed: dict[int, _ScheduledTask] = {}
    while turns := [(q.now_ns(free), d) for d, q in queues.items() if q.ready or q.later]:
        # The earliest choice of all devices; ties go to the lower number.
        now, device = min(turns)
        index = queues[device].take(now, tasks)
        placed[index] = slot = _place(tasks[index], index, placed, free, message_ns)
        free[slot.stream] = slot.end_ns
        for successor in after[index]:
            waiting[successor] -= 1
            if not waiting[successor]:
                task = tasks[successor]
                begin_ns = max([_known_ns(placed[p], task, message_ns) for p in task.before])
                heappush(queues[task.stream.device].later, (begin_ns, successor))
    if len(placed) < len(tasks):
        stuck = [task.launches for index, task in enumerate(tasks) if index not in placed]
        raise InternalError(f"buckets wait for each other: launches {stuck[0]} never begin")
    # Ties stay as they were placed: a task without duration may begin where the one before it does.
    return sorted(placed.values(), key=lambda slot: (slot.start_ns, slot.end_ns))


def _known_ns(done: _ScheduledTask, task: _Task, message_ns: MessageNs) -> float:
    """Return when a device can know at the earliest that what its task waits for is done."""
    own, other = task.stream.device, done.stream.device
    return done.end_ns + (0.0 if own == other else message_ns(other, own))


def _place(
    task: _Task,
    index: int,
    placed: dict[int, _ScheduledTask],
    free: dict[StreamKey, float],
    message_ns: MessageNs,
) -> _ScheduledTask:
    """Return the task's place on its stream; of those that compute, where it ends first."""
    best: _ScheduledTask | None = None
    for stream, start in free.items():
        is_like = stream.computes and task.stream.computes and stream.device == task.stream.device
        if not is_like and stream != task.stream:
            continue
        for p in task.before:
            other = placed[p].stream
            delay = 0.0 if other == stream else message_ns(other.device, stream.device)
            start = max(start, placed[p].end_ns + delay)
        # Strictly earlier: ties go to the stream that is listed first.
        if best is None or start < best.start_ns:
            end = start + task.duration_ns
            best = _ScheduledTask(index, task.launches, task.before, stream, start, end)
    if best is None:
        raise InternalError(f"no stream takes launches {task.launches}")
    return best


_Position = tuple[StreamKey, int]
"""A stream and a number among the tasks on it."""


def _cut(slots: list[_ScheduledTask]) -> Chains:
    """Return the chains of a schedule, which stands in order of start."""
    streams = tuple(dict.fromkeys([slot.stream for slot in slots]))
    on_stream: dict[StreamKey, list[_ScheduledTask]] = {stream: [] for stream in streams}
    place: dict[int, _Position] = {}
    clocks: dict[int, dict[StreamKey, int]] = {}
    starts: dict[StreamKey, list[int]] = {stream: [0] for stream in streams}
    waits: list[tuple[_Position, _Position]] = []
    for slot in slots:
        queue = on_stream[slot.stream]
        # The clock of the task before: how far this stream knows the others to be.
        clock = dict(clocks[queue[-1].task]) if queue else dict.fromkeys(streams, -1)
        place[slot.task] = here = (slot.stream, len(queue))
        if slot.stream.role is StreamRole.COMM:
            starts[slot.stream].append(len(queue))  # an actor for each bucket, on every rank
        # The last result of each stream first: whoever waits for it has waited for all before.
        for p in sorted(slot.before, key=lambda p: -place[p][1]):
            stream, index = place[p]
            if stream != slot.stream and clock[stream] < index:
                starts[stream].append(index + 1)
                starts[slot.stream].append(len(queue))
                waits.append((place[p], here))
                # Who waits for p knows all that p's stream knew then.
                clock = {s: max(clock[s], clocks[p][s]) for s in streams}
        clock[slot.stream] = len(queue)
        clocks[slot.task] = clock
        queue.append(slot)
    return _number(on_stream, starts, waits)


def _number(
    on_stream: dict[StreamKey, list[_ScheduledTask]],
    starts: dict[StreamKey, list[int]],
    waits: list[tuple[_Position, _Position]],
) -> Chains:
    """Number the chains in order of start; `starts` are the places where one may begin."""
    runs: list[tuple[float, float, StreamKey, int]] = []
    begins: dict[StreamKey, list[int]] = {}
    for stream, slots in [(stream, slots) for stream, slots in on_stream.items() if slots]:
        begins[stream] = [b for b in sorted(set(starts[stream])) if b < len(slots)]
        for begin, end in zip(begins[stream], [*begins[stream][1:], len(slots)], strict=True):
            runs.append((slots[begin].start_ns, slots[end - 1].end_ns, stream, begin))
    runs.sort(key=lambda run: (run[0], run[1], run[2].rank, run[3]))
    number = {(stream, begin): i for i, (_, _, stream, begin) in enumerate(runs)}

    def chain_at(place: _Position) -> int:
        stream, index = place
        firsts = begins[stream]
        return number[stream, firsts[bisect_right(firsts, index) - 1]]

    order = {(chain_at(earlier), chain_at(later)) for earlier, later in waits}
    stop: dict[_Position, int | None] = {}
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
