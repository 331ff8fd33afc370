"""What happened when: a bounded ring of firings, and its picture for chrome://tracing or Perfetto.

A row is one firing. The ring is allocated once; when it is full the oldest rows are overwritten.
Any thread may record: the place of a row comes from `itertools.count`, whose step is atomic.

Messages and waits are not recorded: they follow from the rows. Firing k of an actor needs, of every
input, the firing that made its last token, and of every output, the one that freed its last slot.

Source: the Trace Event Format of Chrome's tracing tools (phases X, M, s and f).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from actors.table import MachineTable

Row = tuple[int, int, int, int]
"""Actor, index of the firing, start and end in nanoseconds."""

MoreEvents = Callable[[int], list[dict[str, Any]]]


class Timeline:
    """A ring of the last `capacity` firings. Memory: 32 bytes per row."""

    __slots__ = ("_actors", "_capacity", "_ends", "_firings", "_next", "_starts")

    def __init__(self, capacity: int = 1 << 16) -> None:
        if capacity < 1:
            raise ValueError(f"a timeline needs a capacity of 1 row or more, got {capacity}")
        zeros = bytes(8 * capacity)
        self._capacity = capacity
        self._next = count()
        self._actors = array("q", zeros)
        self._firings = array("q", zeros)
        self._starts = array("q", zeros)
        self._ends = array("q", zeros)

    def record(self, actor: int, firing: int, start_ns: int, end_ns: int) -> None:
        """Note one firing. Callable from any thread; builds nothing."""
        index = next(self._next) % self._capacity
        self._actors[index] = actor
        self._firings[index] = firing
        self._starts[index] = start_ns
        # A row with an end of 0 is not read: the end is written last.
        self._ends[index] = end_ns

    def rows(self) -> tuple[Row, ...]:
        """Return the recorded firings in order of start. Call it when no firing runs."""
        columns = zip(self._actors, self._firings, self._starts, self._ends, strict=True)
        return tuple(sorted([row for row in columns if row[3]], key=lambda row: row[2]))

    def write_chrome_trace(
        self,
        path: str | Path,
        table: MachineTable,
        *,
        stream_names: tuple[str, ...] = (),
        has_arrows: bool = False,
        more: MoreEvents | None = None,
    ) -> None:
        """Write the rows as a Chrome trace: see the function of this name."""
        rows = self.rows()
        write_chrome_trace(
            path, rows, table, stream_names=stream_names, has_arrows=has_arrows, more=more
        )


def write_chrome_trace(
    path: str | Path,
    rows: Iterable[Row],
    table: MachineTable,
    *,
    stream_names: tuple[str, ...] = (),
    has_arrows: bool = False,
    more: MoreEvents | None = None,
) -> None:
    """Write firings as JSON for chrome://tracing or Perfetto, one track per stream.

    A firing tells what it waited for last, and how long its actor had been idle by then.
    `has_arrows` draws an arrow for every message that carries tokens, to each firing that reads
    them. Rows may come from a `Timeline` or a `SimulatedRun`. `more` returns further events, from
    the time that is 0 in the picture.
    """
    rows = tuple(rows)
    origin = min([row[2] for row in rows], default=0)
    events: list[dict[str, Any]] = []
    for stream in sorted(set(table.streams)):
        name = stream_names[stream] if stream_names else f"stream {stream}"
        track = {"ph": "M", "pid": 0, "tid": stream}
        events.append({**track, "name": "thread_name", "args": {"name": name}})
        events.append({**track, "name": "thread_sort_index", "args": {"sort_index": stream}})
    ends = {row[:2]: row[3] for row in rows}
    before: dict[int, Row] = {}
    for actor, firing, start, end in sorted(rows, key=lambda row: row[2]):
        waited = _wait(ends, table, actor, firing, before.get(table.streams[actor]))
        before[table.streams[actor]] = (actor, firing, start, end)
        events.append(
            {
                "ph": "X",
                "name": table.names[actor],
                "pid": 0,
                "tid": table.streams[actor],
                "ts": (start - origin) / 1e3,
                "dur": (end - start) / 1e3,
                "args": {"firing": firing, **waited},
            }
        )
    if has_arrows:
        events.extend(_arrows(rows, table, origin))
    if more is not None:
        events.extend(more(origin))
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))


def _wait(
    ends: Mapping[tuple[int, int], int],
    table: MachineTable,
    actor: int,
    firing: int,
    before: Row | None,
) -> dict[str, Any]:
    """Return what came last of all that a firing needs, and how long after the firing before.

    `before` is the row before it on its stream.
    """
    needs = []
    for index in table.inputs[actor]:
        edge = table.edges[index]
        token = (firing + 1) * edge.consume - edge.initial - 1
        needs.append((edge.producer, token // edge.produce, f"input {edge.name}"))
    for index in table.outputs[actor]:
        edge = table.edges[index]
        freed = (firing + 1) * edge.produce + edge.initial - edge.num_slots
        needs.append((edge.consumer, -(-freed // edge.consume) - 1, f"register {edge.name}"))
    if before is not None:
        needs.append((*before[:2], f"stream, after {table.names[before[0]]}"))
    idle_ns = last_ns = ends.get((actor, firing - 1), 0)
    cause = ""
    for other, needed, words in needs:
        end_ns = ends.get((other, needed), 0)
        if end_ns > last_ns:
            last_ns, cause = end_ns, words
    if not cause:
        return {}
    waited = {"waited_us": (last_ns - idle_ns) / 1e3} if idle_ns else {}
    return {"waited_for": cause, **waited}


def _arrows(rows: tuple[Row, ...], table: MachineTable, origin: int) -> Iterator[dict[str, Any]]:
    """Yield the two ends of every arrow."""
    by_firing = {row[:2]: row for row in rows}
    by_actor: dict[int, list[Row]] = {}
    for row in rows:
        by_actor.setdefault(row[0], []).append(row)
    number = count()
    for edge in table.edges:
        for _, firing, start, _ in by_actor.get(edge.consumer, []):
            first = firing * edge.consume - edge.initial
            last = first + edge.consume - 1
            for producing in range(first // edge.produce, last // edge.produce + 1):
                made = by_firing.get((edge.producer, producing))
                if made is None:  # before the ring's first row, or an initial token
                    continue
                arrow = {"name": edge.name, "cat": "message", "pid": 0, "id": next(number)}
                tail, head = table.streams[edge.producer], table.streams[edge.consumer]
                yield {**arrow, "ph": "s", "tid": tail, "ts": (made[3] - origin) / 1e3}
                yield {**arrow, "ph": "f", "bp": "e", "tid": head, "ts": (start - origin) / 1e3}
