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

from actors.history import Blocker, History, PathFiring, Row
from actors.table import MachineTable


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
        if before is None or before[3] >= row[2]:
            continue
        link, _ = history.link(row)
        key = (table.streams[row[0]], link.cause, link.edge)
        idle[key] = idle.get(key, 0) + row[2] - before[3]
    found = [Bubble(*key, idle_ns) for key, idle_ns in idle.items()]
    return tuple(sorted(found, key=lambda bubble: (bubble.stream, -bubble.idle_ns)))
