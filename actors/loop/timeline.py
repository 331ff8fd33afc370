"""What happened when: a bounded ring of firings, and its picture for chrome://tracing or Perfetto.

A row is one firing. The ring is allocated once; when it is full the oldest rows are overwritten.
Any thread may record: the place of a row comes from `itertools.count`, whose step is atomic.

Messages and waits are not recorded: they follow from the rows. Firing k of an actor needs, of every
input, the firing that made its last token, and of every output, the one that freed its last slot.

`LaunchTrace` times the launches inside the firings, where somebody asked for a trace.

A trace is of one process of ranks. Those of all ranks can be put together into one: each has a
number of its own (`TraceProcess`), and times that all count from one moment.

Source: the Trace Event Format of Chrome's tracing tools (phases X, M, C, s and f).
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from actors.loop.trace_counters import byte_counters, slot_counters
from actors.machine.history import Blocker, History, Row
from actors.machine.protocol import Chain, Clock, Launch
from actors.machine.table import MachineTable
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import Launch as PlannedLaunch

MoreEvents = Callable[[int], list[dict[str, Any]]]

_PERIOD_NS = 10 * 86_400 * 10**9
"""Of times in a trace: below it microseconds with three places are exact in a float64."""
_ARROWS_OF_RANK = 1 << 32


@dataclass(frozen=True, slots=True)
class TraceProcess:
    """Whose trace it is: a title that stands above all tracks, and the rank.

    `origin_ns` is the moment that is 0 in the picture; None is that of the first firing.
    """

    title: str = ""
    rank: int = 0
    origin_ns: int | None = None


def shared_origin_ns() -> int:
    """Return a moment on the clock of firings that is the same one in all processes of a job.

    On one host it is exact to some microseconds, on several as exact as their times of day.
    """
    # The first clock is read before the second, so a pause between them makes a difference smaller.
    ahead_ns = max([time.perf_counter_ns() - time.time_ns() for _ in range(5)])
    return ahead_ns + time.time_ns() // _PERIOD_NS * _PERIOD_NS


class Timeline:
    """A ring of the last `capacity` firings. Memory: 32 bytes per row."""

    __slots__ = ("_actors", "_capacity", "_ends", "_firings", "_next", "_starts")

    def __init__(self, capacity: int = 1 << 16) -> None:
        if capacity < 1:
            raise ValueError(f"a timeline needs a capacity of 1 row or more, got {capacity}")
        # 8 bytes of a signed 64-bit integer, typecode q.
        zeros = bytes(8 * capacity)
        self._capacity = capacity
        self._next = count()
        self._actors = array("q", zeros)
        self._firings = array("q", zeros)
        self._starts = array("q", zeros)
        self._ends = array("q", zeros)

    def record(self, actor: int, firing: int, start_ns: int, end_ns: int) -> None:
        """Note one firing. Callable from any thread; builds nothing."""
        # `next` of itertools.count is one call of C under the interpreter lock: no two rows share a
        # place.
        index = next(self._next) % self._capacity
        self._actors[index] = actor
        self._firings[index] = firing
        self._starts[index] = start_ns
        # The end is written last, for a row with an end of 0 is not read: so nobody meets half of a
        # new row, and no firing takes a lock.
        self._ends[index] = end_ns

    def rows(self) -> tuple[Row, ...]:
        """Return the recorded firings in order of start. Call it when no firing runs."""
        columns = zip(self._actors, self._firings, self._starts, self._ends, strict=True)
        return tuple(sorted([row for row in columns if row[3]], key=lambda row: row[2]))


def write_chrome_trace(
    path: str | Path,
    rows: Iterable[Row],
    table: MachineTable,
    *,
    stream_names: tuple[str, ...] = (),
    has_arrows: bool = False,
    more: MoreEvents | None = None,
    process: TraceProcess = TraceProcess(),
) -> None:
    """Write firings as JSON for chrome://tracing or Perfetto, one track per stream.

    A firing tells what it waited for last, and how long its actor had been idle by then; counters
    show the slots of each register that are ready. `has_arrows` draws an arrow for every message
    that carries tokens, to each firing that reads them. Rows may come from a `Timeline` or a
    `SimulatedRun`. `more` returns further events, from the time that is 0 in the picture.
    """
    rows = tuple(rows)
    # Nanoseconds here, microseconds in the file: the format's unit of ts and dur.
    origin = process.origin_ns
    if origin is None:
        origin = min([row[2] for row in rows], default=0)
    events: list[dict[str, Any]] = []
    if process.title:
        events.append({"ph": "M", "name": "process_name", "args": {"name": process.title}})
    events.append({"ph": "M", "name": "process_sort_index", "args": {"sort_index": process.rank}})
    for stream in sorted(set(table.streams)):
        name = stream_names[stream] if stream_names else f"stream {stream}"
        track = {"ph": "M", "tid": stream}
        events.append({**track, "name": "thread_name", "args": {"name": name}})
        events.append({**track, "name": "thread_sort_index", "args": {"sort_index": stream}})
    history = History(table, rows)
    for row in history.rows:
        actor, firing, start, end = row
        events.append(
            {
                "ph": "X",
                "name": table.names[actor],
                "tid": table.streams[actor],
                "ts": (start - origin) / 1e3,
                "dur": (end - start) / 1e3,
                "args": {"firing": firing, **_waited(history, row)},
            }
        )
    if has_arrows:
        events.extend(_arrows(rows, table, origin))
    events.extend(slot_counters(rows, table, origin))
    if more is not None:
        events.extend(more(origin))
    for event in events:
        _number(event, process.rank)
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))


def _number(event: dict[str, Any], rank: int) -> None:
    """Give an event the number of its process, and its track and arrow numbers no other rank has.

    Process and track 0 are the idle processor's to readers of traces.
    """
    event["pid"] = rank + 1
    if "tid" in event:
        event["tid"] += 1
    if "id" in event:
        event["id"] += rank * _ARROWS_OF_RANK


def _waited(history: History, row: Row) -> dict[str, Any]:
    """Return what came last of all that a firing needs, and how long after the firing before."""
    link, last = history.link(row)
    previous = history.firing(row[0], row[1] - 1)
    if last is None or (previous is not None and last[3] <= previous[3]):
        return {}
    names = history.table.names
    words = f"stream, after {names[last[0]]}"
    if link.edge is not None:
        kind = "input" if link.cause is Blocker.INPUT else "register"
        words = f"{kind} {history.table.edges[link.edge].name}"
    wait = {} if previous is None else {"waited_us": (last[3] - previous[3]) / 1e3}
    return {"waited_for": words, **wait}


def _arrows(rows: tuple[Row, ...], table: MachineTable, origin: int) -> Iterator[dict[str, Any]]:
    """Yield the two ends of every arrow."""
    by_firing = {row[:2]: row for row in rows}
    by_actor: dict[int, list[Row]] = {}
    for row in rows:
        by_actor.setdefault(row[0], []).append(row)
    number = count()
    for edge in table.edges:
        for _, firing, start, _ in by_actor.get(edge.consumer, []):
            # Tokens by number; negative for initial ones, which no firing produced.
            first = firing * edge.consume - edge.initial
            last = first + edge.consume - 1
            for producing in range(first // edge.produce, last // edge.produce + 1):
                source = by_firing.get((edge.producer, producing))
                if source is None:  # before the ring's first row, or an initial token
                    continue
                arrow = {"name": edge.name, "cat": "message", "id": next(number)}
                tail, head = table.streams[edge.producer], table.streams[edge.consumer]
                yield {**arrow, "ph": "s", "tid": tail, "ts": (source[3] - origin) / 1e3}
                yield {**arrow, "ph": "f", "bp": "e", "tid": head, "ts": (start - origin) / 1e3}


# Launches are timed only on request, because each of them goes through Python then, one by one. In
# the picture a launch lies inside its firing, named by op, with the kernel, the module path and the
# user's line.


class LaunchTrace:
    """The last `capacity` launches, by actor and number in its chain."""

    __slots__ = ("_clock", "_ring")

    def __init__(self, capacity: int = 1 << 16, clock: Clock = time.perf_counter_ns) -> None:
        self._ring = Timeline(capacity)
        self._clock = clock

    def watch(self, actor: int, chain: Chain) -> Chain:
        """Return a chain that does the same and notes each launch."""
        return tuple([self._watched(actor, index, launch) for index, launch in enumerate(chain)])

    def rows(self) -> tuple[Row, ...]:
        """Return the launches that are kept: actor, index in its chain, begin and end."""
        return self._ring.rows()

    def events(self, plan: Plan, origin_ns: int) -> list[dict[str, Any]]:
        """Return the launches and the live bytes as events of a Chrome trace.

        Call it when no launch runs.
        """
        events = byte_counters(self.rows(), plan, origin_ns)
        for actor, index, start, end in self.rows():
            entry = plan.actors[actor]
            if index >= len(entry.launches) or start < origin_ns:
                continue
            launch = entry.launches[index]
            events.append(
                {
                    "ph": "X",
                    "name": launch.label,
                    "cat": "launch",
                    "tid": int(entry.stream),
                    "ts": (start - origin_ns) / 1e3,
                    "dur": (end - start) / 1e3,
                    "args": {
                        "kernel": launch.kernel,
                        "scope": launch.scope,
                        "line": str(plan.sources[launch.source]),
                        **_variables(launch),
                    },
                }
            )
        return events

    def _watched(self, actor: int, index: int, launch: Launch) -> Launch:
        clock, record = self._clock, self._ring.record

        def watched() -> None:
            start = clock()
            launch()
            record(actor, index, start, clock())

        return watched


def _variables(launch: PlannedLaunch) -> dict[str, str]:
    """Return the names of the variables that a launch updates, where it updates several."""
    names = dict(launch.attrs).get("variables")
    return {"variables": ", ".join(map(str, names))} if isinstance(names, tuple) else {}
