"""Why a run took as long as it did: what every firing waited for, and the chain that decides.

A firing starts when the last of four things has happened: the firing that fills its inputs, the
firing that frees its outputs' slots, and the firing before it on its stream have ended, or the run
has begun. Walking back from the firing that ends last, each time to what ended last, gives the
critical path (Kelley & Walker 1959): nothing off it can make the run shorter. It is read off the
rows of a run, so it works for simulated and for recorded ones; in these, what lies between the end
of one firing and the start of the next is the time of messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from actors.table import MachineTable
from actors.timeline import Row


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
    history = _History(table, rows)
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
    history = _History(table, rows)
    idle: dict[tuple[int, Blocker, int | None], int] = {}
    for row in history.rows:
        before = history.before_on_stream(row)
        if before is None or before[3] >= row[2]:
            continue
        link, _ = history.link(row)
        key = (table.streams[row[0]], link.cause, link.edge)
        idle[key] = idle.get(key, 0) + row[2] - before[3]
    found = [Bubble(*key, idle_ns) for key, idle_ns in idle.items()]
    return tuple(sorted(found, key=lambda bubble: (bubble.stream, -bubble.idle_ns)))


class _History:
    """The rows of a run by actor and firing, and in order on each stream."""

    def __init__(self, table: MachineTable, rows: Iterable[Row]) -> None:
        self.table = table
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

    def before_on_stream(self, row: Row) -> Row | None:
        """Return what ran before a firing on its stream."""
        return self._before.get(row[:2])

    def link(self, row: Row) -> tuple[PathFiring, Row | None]:
        """Return a firing's link, and the row that it waited for."""
        actor, firing, start, end = row
        best: Row | None = None
        cause: tuple[Blocker, int | None] = (Blocker.START, None)
        for kind, edge, other in self._waited_for(actor, firing):
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
            needed = (firing + 1) * edge.consume - edge.initial
            if needed > 0:
                yield Blocker.INPUT, index, self._row(edge.producer, (needed - 1) // edge.produce)
        for index in table.outputs[actor]:
            edge = table.edges[index]
            freed = (firing + 1) * edge.produce + edge.initial - edge.num_slots
            if freed > 0:
                yield Blocker.SLOT, index, self._row(edge.consumer, -(-freed // edge.consume) - 1)
        yield Blocker.STREAM, None, self.before_on_stream((actor, firing, 0, 0))

    def _row(self, actor: int, firing: int) -> Row | None:
        """Return a firing, or the actor's last one: a flushed firing takes what is there."""
        return self._by_firing.get((actor, firing), self._last.get(actor))
