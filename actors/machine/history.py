"""What a run did: its firings, what each of them waited for last, and the counts of all.

A firing starts when the last of four things has happened: the firing that fills its inputs, the
firing that frees its outputs' slots, and the firing before it on its stream have ended, or the run
has begun. `History` works on recorded and on simulated rows.

`Statistics` is the record of a whole run, built from the machine's columns when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from actors.machine.machine import Machine
from actors.machine.table import MachineTable
from compiler.contract.placement import HOST
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import ActorKind

Row = tuple[int, int, int, int]
"""Actor, index of the firing, start and end in nanoseconds."""


class Blocker(Enum):
    """What a firing waited for last; of equals the first counts."""

    INPUT = "input"
    SLOT = "slot"
    STREAM = "stream"
    START = "start"


@dataclass(frozen=True, slots=True)
class PathFiring:
    """A firing with what it waited for last.

    `edge` indexes the table's edges for INPUT and SLOT, else it is None; `waited_ns` is from the
    end of what was waited for to the start of the firing.
    """

    actor: int
    firing: int
    start_ns: int
    end_ns: int
    cause: Blocker
    edge: int | None
    waited_ns: int


class History:
    """The rows of a run by actor and firing, and in order on each stream."""

    def __init__(self, table: MachineTable, rows: Iterable[Row]) -> None:
        self.table = table
        # By start, then end: a firing of no length comes before what begins at the same moment.
        self.rows = sorted(rows, key=lambda row: (row[2], row[3]))
        self._origin = self.rows[0][2] if self.rows else 0
        self._by_firing = {row[:2]: row for row in self.rows}
        self._last: dict[int, Row] = {}
        self._before: dict[tuple[int, int], Row] = {}
        on_stream: dict[int, Row] = {}
        for row in self.rows:
            stream = table.streams[row[0]]
            if stream in on_stream:
                self._before[row[:2]] = on_stream[stream]
            on_stream[stream] = self._last[row[0]] = row

    def firing(self, actor: int, index: int) -> Row | None:
        """Return a firing by its actor and number, or None."""
        return self._by_firing.get((actor, index))

    def before_on_stream(self, row: Row) -> Row | None:
        """Return what ran before a firing on its stream."""
        return self._before.get(row[:2])

    def link(self, row: Row) -> tuple[PathFiring, Row | None]:
        """Return a firing's link, and the row that it waited for."""
        actor, firing, start, end = row
        best: Row | None = None
        cause: tuple[Blocker, int | None] = (Blocker.START, None)
        for kind, edge, other in self._waited_for(actor, firing):
            # Strictly later: of equal ends the first stands, inputs before slots before the stream.
            if other is not None and (best is None or other[3] > best[3]):
                best, cause = other, (kind, edge)
        waited = start - (self._origin if best is None else best[3])
        return PathFiring(actor, firing, start, end, *cause, waited), best

    def _waited_for(
        self, actor: int, firing: int
    ) -> Iterable[tuple[Blocker, int | None, Row | None]]:
        """Yield everything that must end before a firing starts."""
        table = self.table
        for index in table.inputs[actor]:
            edge = table.edges[index]
            yield Blocker.INPUT, index, self._row(edge.producer, edge.made_by(firing))
        for index in table.outputs[actor]:
            edge = table.edges[index]
            yield Blocker.SLOT, index, self._row(edge.consumer, edge.freed_by(firing))
        yield Blocker.STREAM, None, self.before_on_stream((actor, firing, 0, 0))

    def _row(self, actor: int, firing: int) -> Row | None:
        """Return a firing, or the actor's last one where it has no such: a flushed one takes less.

        None for a firing before the first, and for one that the ring no longer holds.
        """
        row, last = self._by_firing.get((actor, firing)), self._last.get(actor)
        if row is None and last is not None and 0 <= last[1] < firing:
            return last
        return row


@dataclass(frozen=True, slots=True)
class Waits:
    """How many firings began as soon as this came, because it was the last thing missing.

    `kind` is "input" (a token of `register`), "register" (a free slot of it: back-pressure) or
    "self" (the actor's own firing before; `register` is empty).
    """

    kind: str
    register: str
    count: int

    def __str__(self) -> str:
        return f"{self.kind} {self.register}" if self.register else self.kind


@dataclass(frozen=True, slots=True)
class ActorStatistics:
    """One actor. `firings` were started; `busy_ns` is time in its launches, of ended firings."""

    name: str
    stream: str
    firings: int
    busy_ns: int
    launches: int
    waits: tuple[Waits, ...]

    @property
    def ns_per_firing(self) -> float:
        """Mean time of a firing's chain of launches; 0 before the first."""
        return self.busy_ns / self.firings if self.firings else 0.0


@dataclass(frozen=True, slots=True)
class StreamStatistics:
    """One stream. `num_waits` counts how often its own thread found nothing to do."""

    name: str
    busy_ns: int
    num_waits: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """A run until now, or until its end; approximate while it goes on.

    Tuples follow the plan: its actors, its streams. `source_wait_ns` is how long nothing was
    computed because a source had not ended its firing; None where that is not known: on devices
    other than the host, and on several compute streams.
    """

    elapsed_ns: int
    actors: tuple[ActorStatistics, ...]
    streams: tuple[StreamStatistics, ...]
    source_wait_ns: int | None = None

    def busy_share(self, stream: int, since: Statistics | None = None) -> float:
        """Return the share of time in which a stream was busy, from `since` (or the start) on."""
        elapsed_ns = self.elapsed_ns - (since.elapsed_ns if since is not None else 0)
        busy_ns = self.streams[stream].busy_ns
        if since is not None:
            busy_ns -= since.streams[stream].busy_ns
        return busy_ns / elapsed_ns if elapsed_ns > 0 else 0.0

    def source_wait(self, since: Statistics | None = None) -> float | None:
        """Return the share of time that waited for sources, from `since` (or the start) on."""
        if self.source_wait_ns is None:
            return None
        elapsed_ns = self.elapsed_ns - (since.elapsed_ns if since is not None else 0)
        waited_ns = self.source_wait_ns - ((since.source_wait_ns or 0) if since is not None else 0)
        return min(1.0, waited_ns / elapsed_ns) if elapsed_ns > 0 else 0.0


def collect(
    plan: Plan,
    machine: Machine,
    *,
    elapsed_ns: int,
    busy_ns: Sequence[int],
    awaited_ns: Sequence[int],
    thread_waits: Mapping[str, int],
) -> Statistics:
    """Return the record of a run from its columns. Linear in actors and edges.

    `busy_ns` is by actor, and so is `awaited_ns`: how long the dispatcher stood idle for the end of
    its firings. `thread_waits` is by name of the streams with a thread of their own.
    """
    actors = tuple([_actor(plan, machine, a, busy_ns[a]) for a in range(machine.table.num_actors)])
    streams = [
        StreamStatistics(
            stream.name,
            sum([busy_ns[a] for a, id_ in enumerate(machine.table.streams) if id_ == stream.id]),
            thread_waits.get(stream.name, 0),
        )
        for stream in plan.streams
    ]
    computing = [a for a in plan.actors if a.kind is ActorKind.COMPUTE]
    is_inline = not any([machine.table.is_detached[a.id] for a in computing])
    is_known = is_inline and all([plan.streams[a.stream].device == HOST for a in computing])
    sources = [a.id for a in plan.actors if a.kind is ActorKind.SOURCE]
    waited_ns = sum([awaited_ns[source] for source in sources]) if is_known else None
    return Statistics(elapsed_ns, actors, tuple(streams), waited_ns)


def _actor(plan: Plan, machine: Machine, actor: int, busy_ns: int) -> ActorStatistics:
    entry = plan.actors[actor]
    firings = machine.firing_index(actor) + 1
    counts: dict[tuple[str, str], int] = {}
    for kind, register, count in machine.causes(actor):
        # A register has a row per consumer.
        counts[kind, register] = counts.get((kind, register), 0) + count
    return ActorStatistics(
        entry.name,
        plan.streams[entry.stream].name,
        firings,
        busy_ns,
        firings * max(1, len(entry.launches)),
        tuple([Waits(*key, count) for key, count in counts.items() if count]),
    )
