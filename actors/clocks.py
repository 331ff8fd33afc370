"""Which firing of an actor graph happens before which: vector clocks over unrolled periods.

A firing happens before another when a path of these edges leads from its end to the other's start:
the order of an actor's own firings; *Ready*, from the firing that produces a token to the one that
consumes it; *Free*, from the firing of each consumer that hands a slot back to the firing of the
producer that takes it again. What has no path may run in either order or at the same time.

**Lines.** A clock needs one component per sequence of firings that are ordered among themselves,
not one per actor. Firings of one stream mostly are: each is appended to a line of its stream whose
last firing happens before it, and opens another where there is none. So 970 actors on two streams
have clocks of a handful of numbers. Streams only say where to look: that the firings of a line are
ordered is seen in their clocks, never assumed.

Source: Fidge, "Timestamps in message-passing systems that preserve the partial ordering", 1988;
Mattern, "Virtual time and global states of distributed systems", 1989; chains as components:
Agarwal & Garg, "Efficient dependency tracking for relevant events in shared-memory systems", 2005.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from actors.rounds import Moment, Rounds, Row
from actors.table import OUTSIDE, MachineTable
from compiler.errors import InternalError

if TYPE_CHECKING:
    from actors.conflicts import Check, ConflictFinder

_MAX_OPENED = 2
"""Lines for all of its stream that one actor may open; its next one is its own, for ever. So there
are at most three per actor, whatever the graph."""


def unroll(table: MachineTable, periods: int, limit: int) -> Iterator[tuple[int, int, Moment]]:
    """Yield actor, firing and moment, each after all that happens before it.

    Stops after `periods`, or once `limit` firings are reached. Keeps all clocks: one int per firing
    and line. Raises InternalError when no actor can fire.
    """
    rows = [Row() for _ in range(table.num_actors)]
    return _unroll(table, periods, limit, rows, _Lines(table.streams))


def watch(
    table: MachineTable,
    periods: int,
    limit: int,
    phases: Sequence[int],
    watcher: Check | ConflictFinder,
) -> None:
    """Show a watcher all firings of some periods, each after all that happens before it.

    It hears of rounds that come round again, which are left out; at least one more comes then.
    `phases` are by actor the firings after which one is like the one before to the watcher. Stops
    once `limit` firings were visited. Raises InternalError when no actor can fire.
    """
    rows = [Row() for _ in range(table.num_actors)]
    lines = _Lines(table.streams)
    rounds = Rounds(table, periods, phases, rows, lines.lengths)
    for actor, firing, moment in _unroll(table, periods, limit, rows, lines):
        watcher.visit(actor, firing, moment)
        left_out = rounds.find(actor)
        if left_out is not None:
            windows = [rounds.window(a) for a in range(table.num_actors)]
            for row, window, fired in zip(rows, windows, left_out.fired, strict=True):
                if fired:
                    row.first = row.count + left_out.times * fired - min(window, len(row.items))
                    row.items[:] = [left_out.moved(moment) for moment in row.items[-window:]]
            for line, grown in enumerate(left_out.grown):
                lines.lengths[line] += left_out.times * grown
            watcher.leave_out(left_out)


def _unroll(
    table: MachineTable, periods: int, limit: int, rows: Sequence[Row], lines: _Lines
) -> Iterator[tuple[int, int, Moment]]:
    open_ = list(range(table.num_actors))
    budget = limit
    while open_ and budget > 0:
        before = budget
        for actor in open_:
            row = rows[actor]
            firing = row.count
            past = _past(table, rows, actor, firing)
            if past is not None and firing < periods * table.repetitions[actor]:
                moment = lines.append(actor, past)
                row.items.append(moment)
                budget -= 1
                yield actor, firing, moment
        if budget == before:
            names = ", ".join([repr(table.names[actor]) for actor in open_])
            raise InternalError(f"the actor graph deadlocks: {names} wait for one another")
        open_ = [a for a in open_ if rows[a].count < periods * table.repetitions[a]]


def _past(table: MachineTable, rows: Sequence[Row], actor: int, firing: int) -> list[Moment] | None:
    """Return what a firing comes directly after, or None while some of it was not visited."""
    past: list[Moment] = [rows[actor].items[-1]] if firing else []
    for index in table.inputs[actor]:
        edge = table.edges[index]
        last, row = edge.made_by(firing), rows[edge.producer]
        if last >= row.count:
            return None
        if last >= 0:
            past.append(row.items[last - row.first])
    for index in table.outputs[actor]:
        edge = table.edges[index]
        last, row = edge.freed_by(firing), rows[edge.consumer]
        if last >= row.count:
            return None
        if last >= 0:
            past.append(row.items[last - row.first])
    return past


class _Lines:
    """Sequences of firings, each ordered in itself; `lengths` says how many each has."""

    __slots__ = ("_line", "_num_opened", "_shared", "_streams", "lengths")

    def __init__(self, streams: Sequence[int]) -> None:
        self.lengths: list[int] = []
        self._streams = streams
        self._shared: dict[int, list[int]] = {stream: [] for stream in streams}
        self._line = [-1] * len(streams)
        self._num_opened = [0] * len(streams)

    def append(self, actor: int, past: Sequence[Moment]) -> Moment:
        """Return the moment of an actor's next firing, which comes directly after `past`."""
        clock = [0] * len(self.lengths)
        for line, position, known in past:
            clock[: len(known)] = map(max, known, clock)
            clock[line] = max(clock[line], position + 1)
        line = self._line[actor]
        if line < 0 or clock[line] != self.lengths[line]:
            line = self._line[actor] = self._find(actor, clock)
        position = self.lengths[line]
        self.lengths[line] = position + 1
        return Moment(line, position, tuple(clock))

    def _find(self, actor: int, clock: list[int]) -> int:
        """Return a line of the actor's stream that ends before a clock, perhaps a new one."""
        lengths, shared = self.lengths, self._shared[self._streams[actor]]
        if self._num_opened[actor] <= _MAX_OPENED:
            for line in shared:
                if clock[line] == lengths[line]:
                    return line
        self._num_opened[actor] += 1
        if self._num_opened[actor] <= _MAX_OPENED:
            shared.append(len(lengths))
        lengths.append(0)
        clock.append(0)
        return len(lengths) - 1


def lags_behind(table: MachineTable, origin: int, *, is_reversed: bool = False) -> dict[int, int]:
    """Return, per actor, a bound on how many periods it can be behind a firing of `origin`.

    A firing in period x comes after one in period x - lag of each of its producers, with the
    initial tokens of the edge giving the lag, and of each of its consumers, with its slots giving
    it. `is_reversed` bounds how many periods `origin` can be behind a firing of each actor instead.
    """
    steps: list[list[tuple[int, int]]] = [[] for _ in range(table.num_actors)]
    for edge in table.edges:
        if edge.producer == OUTSIDE:
            continue
        tokens = edge.produce * table.repetitions[edge.producer]
        pairs = [(edge.consumer, edge.producer, -(-edge.initial // tokens))]
        if not edge.is_one_way:
            freed = edge.num_slots - edge.initial + edge.consume - edge.produce
            pairs.append((edge.producer, edge.consumer, max(-(-freed // tokens), 0)))
        for ahead, behind, lag in pairs:
            start, end = (behind, ahead) if is_reversed else (ahead, behind)
            steps[start].append((lag, end))
    lags: dict[int, int] = {}
    heap = [(0, origin)]
    while heap:
        lag, actor = heappop(heap)
        if actor in lags:
            continue
        lags[actor] = lag
        for step, other in steps[actor]:
            if other not in lags:
                heappush(heap, (lag + step, other))
    return lags


def downstream(table: MachineTable, origin: int) -> set[int]:
    """Return the actors that tokens of `origin` lead to; itself is one of them on a cycle only."""
    found: set[int] = set()
    front = [origin]
    for actor in front:
        for index in table.outputs[actor]:
            consumer = table.edges[index].consumer
            if consumer not in found:
                found.add(consumer)
                front.append(consumer)
    return found
