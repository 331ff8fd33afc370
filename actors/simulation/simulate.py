"""The machine on virtual time: how long a plan will take, and where it will wait.

The same machine as in the loop; only the clock and the streams are simulated. A stream executes
one firing at a time in the order in which they were started. Equal seeds give equal runs.

A `VirtualRank` is one machine with its streams; the `Calendar` holds the events to come, of one
rank here and of many in `actors.simulation.ranks`.

The critical path says why a run took as long as it did. Walking back from the firing that ends
last, each time to what ended last of what a firing waited for (`actors.machine.history`), gives the
path: nothing off it can make the run shorter. It is read off the rows of a run, so it works for
simulated and for recorded ones; in these, what lies between the end of one firing and the start of
the next is the time of messages.

Source: discrete event simulation with a heap of events (Knuth, TAOCP 1, 2.2.5); critical path
(Kelley & Walker 1959).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random

from actors.machine.history import Blocker, History, PathFiring, Row
from actors.machine.machine import Machine
from actors.machine.table import MachineTable
from actors.machine.transitions import KIND_MASK, Message, message, subject_of
from actors.simulation.costs import RunningFirings, SharedHost
from compiler.contract.errors import InternalError
from compiler.contract.plan import Plan


@dataclass(frozen=True, slots=True)
class Bubble:
    """Idle time of a stream between its first and its last firing, by what it waited for."""

    stream: int
    cause: Blocker
    edge: int | None
    idle_ns: int

    def describe(self, table: MachineTable) -> str:
        """Return the cause in words."""
        if self.edge is None:
            return "its own messages"
        name = table.edges[self.edge].name
        return f"input {name!r}" if self.cause is Blocker.INPUT else f"a free slot of {name!r}"


def critical_path(table: MachineTable, rows: Iterable[Row]) -> tuple[PathFiring, ...]:
    """Return the chain that determines the end of the run, first firing first.

    Durations and waits along it add up to the time from the start of the run to its end.
    """
    history = History(table, rows)
    row = max(history.rows, key=lambda row: row[3], default=None)
    path: list[PathFiring] = []
    while row is not None:
        link, row = history.link(row)
        path.append(link)
    return tuple(reversed(path))


def time_per_actor(table: MachineTable, path: Iterable[PathFiring]) -> tuple[int, ...]:
    """Return the time that each actor has on a path, its firings and its waits."""
    total = [0] * table.num_actors
    for link in path:
        total[link.actor] += link.end_ns - link.start_ns + link.waited_ns
    return tuple(total)


def bubbles(table: MachineTable, rows: Iterable[Row]) -> tuple[Bubble, ...]:
    """Return the idle times of all streams, by stream, the longest first."""
    history = History(table, rows)
    idle: dict[tuple[int, Blocker, int | None], int] = {}
    for row in history.rows:
        before = history.before_on_stream(row)
        # Nothing ran before, or without a gap.
        if before is None or before[3] >= row[2]:
            continue
        link, _ = history.link(row)
        key = (table.streams[row[0]], link.cause, link.edge)
        idle[key] = idle.get(key, 0) + row[2] - before[3]
    gaps = [Bubble(*key, idle_ns) for key, idle_ns in idle.items()]
    return tuple(sorted(gaps, key=lambda bubble: (bubble.stream, -bubble.idle_ns)))


_DONE = Message.DONE.value
"""A plain int: an enum's comparisons are three times as slow, and there are many."""

# Above every number of an event: joint events sort after all others of their time.
_LATE = 1 << 62

Meet = Callable[[int], None]
"""Called with an actor that begins a firing which others must end: a collective."""


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What a simulated run did.

    `rows` are its firings in order of their end, `busy_ns` is by stream, `firings` by actor.
    """

    steps: int
    makespan_ns: int
    firings: tuple[int, ...]
    busy_ns: tuple[int, ...]
    rows: tuple[Row, ...]
    table: MachineTable = field(repr=False)

    @property
    def utilisation(self) -> tuple[float, ...]:
        """Busy share of the makespan, per stream."""
        return tuple([busy / max(self.makespan_ns, 1) for busy in self.busy_ns])

    @property
    def period_ns(self) -> float:
        """Time per step in steady state: over the second half of the run, at its busiest actor.

        The makespan over the steps where no actor has fired twice.
        """
        busy = [0] * self.table.num_actors
        for actor, _, start, end in self.rows:
            busy[actor] += end - start
        actor = max(range(len(busy)), key=busy.__getitem__, default=0)
        ends = [row[3] for row in self.rows if row[0] == actor]
        # The first half fills the pipeline, which is no steady state.
        half = len(ends) // 2
        if half < 1:
            return self.makespan_ns / max(self.steps, 1)
        firings_per_step = len(ends) / self.steps
        return (ends[-1] - ends[half - 1]) / (len(ends) - half) * firings_per_step

    def bubbles(self) -> tuple[Bubble, ...]:
        """Return the idle times of the streams by cause."""
        return bubbles(self.table, self.rows)

    def critical_path(self) -> tuple[PathFiring, ...]:
        """Return the chain of firings that determines the makespan."""
        return critical_path(self.table, self.rows)


def simulate(
    plan: Plan | MachineTable,
    steps: int,
    durations_ns: Sequence[float] | None = None,
    *,
    seed: int = 0,
    jitter: float = 0.0,
    host: SharedHost | None = None,
) -> SimulatedRun:
    """Run `steps` steps of a plan to their end on virtual time.

    Args:
        plan: A plan, or its table together with `durations_ns`.
        steps: Steps to admit before admission ends; of a table, periods of its sources.
        durations_ns: Duration of a firing per actor; default: as the plan estimates.
        seed: Seed of the jitter.
        jitter: Durations are scaled by a factor within 1 - jitter and 1 + jitter.
        host: The machine whose cores all streams share; None where each has cores of its own.

    Raises:
        ValueError: A table came without durations, or their number is wrong.
        InternalError: The plan cannot finish; the message says who waits for what.
    """
    table = MachineTable.of(plan) if isinstance(plan, Plan) else plan
    if durations_ns is None and isinstance(plan, Plan):
        durations_ns = [actor.duration_ns for actor in plan.actors]
    if durations_ns is None or len(durations_ns) != table.num_actors:
        raise ValueError(
            f"expected durations_ns for {table.num_actors} actors, got"
            f" {'none' if durations_ns is None else len(durations_ns)}"
        )
    calendar = Calendar()
    rank = VirtualRank(0, table, durations_ns, calendar, rng=Random(seed), jitter=jitter, host=host)
    # A source fires once per batch, and a step may accumulate several.
    batches = plan.int_option("accumulate", 1) if isinstance(plan, Plan) else 1
    rank.start(steps * batches)
    while calendar:
        now, _, code = calendar.next()
        rank.take(now, code)
    return rank.finish(steps)


class Calendar:
    """The events to come, earliest first; equal times in the order of their scheduling.

    What several ranks do together, `together`, comes after what one does at the same time, in the
    order of its numbers: so that ranks which are alike see the same order.
    """

    __slots__ = ("_heap", "_num_events")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, int]] = []
        self._num_events = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def schedule(self, at: int, rank: int, code: int) -> None:
        """Add an event: at a time, a message for a rank."""
        heappush(self._heap, (at, self._num_events, rank, code))
        self._num_events += 1

    def together(self, at: int, number: int) -> None:
        """Add an event of several ranks; `next` returns -1 - number in the place of a rank."""
        heappush(self._heap, (at, _LATE + number, -1 - number, 0))

    def next(self) -> tuple[int, int, int]:
        """Take the next event: time, rank, message."""
        at, _, rank, code = heappop(self._heap)
        return at, rank, code


class VirtualRank:
    """One machine on virtual time: its streams, and what runs on each since when.

    Args:
        rank: Its number in the calendar.
        table: The actor graph.
        durations_ns: Duration of a firing per actor.
        calendar: Where its events go.
        rng: Draws the jitter.
        jitter: See `simulate`.
        meets: Per actor what to call when a firing begins that others must end, with
            `take(DONE)`, or None for those that end after their duration.
        host: The machine whose cores the streams share; None where each has cores of its own.
    """

    __slots__ = (
        "_busy_ns", "_calendar", "_done", "_durations_ns", "_host", "_jitter", "_meets", "_queues",
        "_rank", "_rng", "_rows", "_running", "_started_at", "_streams", "machine", "now",
    )  # fmt: skip

    def __init__(
        self,
        rank: int,
        table: MachineTable,
        durations_ns: Sequence[float],
        calendar: Calendar,
        *,
        rng: Random,
        jitter: float = 0.0,
        meets: Sequence[Meet | None] | None = None,
        host: SharedHost | None = None,
    ) -> None:
        num_streams = max(table.streams, default=-1) + 1
        self.machine = Machine(table)
        self.now = 0
        self._rank = rank
        self._done = [message(Message.DONE, actor) for actor in range(table.num_actors)]
        self._calendar = calendar
        self._durations_ns = durations_ns
        self._rng = rng
        self._jitter = jitter
        self._meets = (None,) * table.num_actors if meets is None else meets
        self._streams = table.streams
        self._queues: list[deque[int]] = [deque() for _ in range(num_streams)]
        self._started_at = [0] * num_streams
        self._busy_ns = [0] * num_streams
        self._host = host
        self._running = None if host is None else RunningFirings(host)
        # Rows without their tuples: a fleet has millions.
        self._rows = array("q")

    def start(self, steps: int) -> None:
        """Admit steps and let the first firings begin."""
        machine = self.machine
        for source in machine.table.sources:
            if steps:
                machine.admit(source, steps * machine.table.firings_per_step[source])
            machine.end_admission(source)
        self._collect()

    def take(self, now: int, code: int) -> None:
        """Receive a message at its time."""
        self.now = now
        if code < 0:
            self._take_own(code)
            return
        if code & KIND_MASK == _DONE and self._host is None:
            self._end_firing(subject_of(code))
        self.machine.receive(code)
        self._collect()

    def _take_own(self, code: int) -> None:
        """Begin or end a firing on its stream: what the machine hears of a moment later."""
        running, host = self._running, self._host
        # The reverse of `_begin_of` and `_end_of`.
        actor, is_end = divmod(-1 - code, 2)
        if running is None or host is None:
            return
        if not is_end:
            self._started_at[self._streams[actor]] = self.now
            running.begin(actor, self.now, self._scaled(self._durations_ns[actor]))
        elif not running.is_due(actor, self.now):
            return  # others began or ended meanwhile, and it was announced anew
        else:
            running.end(actor, self.now)
            self._calendar.schedule(
                self.now + round(host.post_ns[actor]), self._rank, self._done[actor]
            )
            self._end_firing(actor)
        for other, end in running.due():
            self._calendar.schedule(end, self._rank, _end_of(other))

    def finish(self, steps: int) -> SimulatedRun:
        """Return the run. Raises InternalError when something still waits."""
        machine = self.machine
        if not machine.is_finished:
            raise InternalError("the plan cannot finish: " + machine.stall())
        machine.validate()
        firings = [machine.firing_index(a) + 1 for a in range(machine.table.num_actors)]
        numbers = iter(self._rows)
        rows = tuple(zip(numbers, numbers, numbers, numbers, strict=True))
        # Rows are in order of their ends.
        makespan = rows[-1][3] if rows else 0
        busy = tuple(self._busy_ns)
        return SimulatedRun(steps, makespan, tuple(firings), busy, rows, machine.table)

    def _collect(self) -> None:
        machine = self.machine
        machine.deliver(machine.outbox)
        machine.outbox.clear()
        # In the order of the real dispatcher: other threads get their work first.
        for started in (machine.detached, machine.fireable, machine.flushing):
            while started:
                actor = started.popleft()
                queue = self._queues[self._streams[actor]]
                queue.append(actor)
                # The stream was idle; else the firing waits for those before it in the queue.
                if len(queue) == 1:
                    self._begin_firing(actor)

    def _begin_firing(self, actor: int, *, is_awake: bool = False) -> None:
        self._started_at[self._streams[actor]] = self.now
        meet = self._meets[actor]
        if meet is not None:
            meet(actor)
            return
        if self._host is not None:
            wake_ns = 0.0 if is_awake else self._host.wake_ns[actor]
            self._calendar.schedule(self.now + round(wake_ns), self._rank, _begin_of(actor))
            return
        end = self.now + self._scaled(self._durations_ns[actor])
        self._calendar.schedule(end, self._rank, self._done[actor])

    def _end_firing(self, actor: int) -> None:
        stream = self._streams[actor]
        start = self._started_at[stream]
        self._rows.extend((actor, self.machine.firing_index(actor), start, self.now))
        self._busy_ns[stream] += self.now - start
        queue = self._queues[stream]
        queue.popleft()
        if queue:
            self._begin_firing(queue[0], is_awake=True)

    def _scaled(self, duration_ns: float) -> int:
        if not self._jitter:
            return round(duration_ns)
        return round(duration_ns * self._rng.uniform(1 - self._jitter, 1 + self._jitter))


def _begin_of(actor: int) -> int:
    """Return the event of a rank itself that a firing begins; messages are never negative."""
    return -1 - 2 * actor


def _end_of(actor: int) -> int:
    """Return the event of a rank itself that a firing ends on its stream."""
    return -2 - 2 * actor
