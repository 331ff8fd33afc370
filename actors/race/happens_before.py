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

**Rounds** of a long period that come round again are left out (`SteadyStateDetector`). `Check` and
`ConflictFinder` watch the unrolled graph and say whether accesses conflict.

Source: Fidge, "Timestamps in message-passing systems that preserve the partial ordering", 1988;
Mattern, "Virtual time and global states of distributed systems", 1989; chains as components:
Agarwal & Garg, "Efficient dependency tracking for relevant events in shared-memory systems", 2005.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import zip_longest
from math import lcm
from typing import NamedTuple

from actors.machine.table import OUTSIDE, MachineTable
from compiler.contract.errors import InternalError
from memory.registers import LONG_PERIOD

_TRIES = 64
"""Comparisons in a row that find nothing, after which an actor begins no more rounds."""

Clock = tuple[int, ...]
"""How many firings of each line end before this one starts; of a line that it lacks, none."""


class FiringStamp(NamedTuple):
    """A firing among all: it is number `position` of `line`, and comes after what `clock` says."""

    line: int
    position: int
    clock: Clock

    def is_before(self, clock: Clock) -> bool:
        """Return whether this firing happens before the one with `clock`."""
        return self.line < len(clock) and self.position < clock[self.line]


class Row:
    """The moments of one actor's firings: `items` begins with firing `first`."""

    __slots__ = ("first", "items")

    def __init__(self) -> None:
        self.first = 0
        self.items: list[FiringStamp] = []

    @property
    def count(self) -> int:
        """Number of firings so far."""
        return self.first + len(self.items)


# Why rounds are left out: an evaluation every hundred thousand steps makes a period of millions of
# firings, nearly all of them alike. A *round* is what lies between two visits of one actor. If at
# its end everything that can still be looked at is what it was at its start, moved on by as many
# firings as each actor did and as many positions as each line grew, then the next round does the
# same, moved on once more: clocks are maxima, and a maximum moves with its arguments. So as many
# rounds may be left out as nothing else interferes: no actor outside the round becomes able to fire
# by it, and no firing of the round comes after another firing from outside than before.
#
# A round is found by comparing with a kept one, which is replaced after 1, 2, 4, ... visits (Brent,
# "An improved Monte Carlo factorization algorithm", 1980), so that rounds of several visits are
# found too. One actor of each number of repetitions begins rounds: steps make an epoch, epochs an
# evaluation. One more round is always visited after those left out; whoever watches sees in it what
# held in them.


@dataclass(frozen=True, slots=True)
class SkippedRounds:
    """Rounds that are not visited: `times` rounds in which actor a fires `fired[a]` times.

    Line i grows by `grown[i]` in each, and had length `lengths[i]` when the last one visited began.
    """

    times: int
    fired: tuple[int, ...]
    grown: tuple[int, ...]
    lengths: tuple[int, ...]

    def moved(self, moment: FiringStamp) -> FiringStamp:
        """Return a moment of the last round visited, as it is in the last one left out."""
        by = [self.times * growth for growth in self.grown]
        # 0 says that nothing of this line comes before: that does not move.
        clock = tuple([n + by[i] if n else 0 for i, n in enumerate(moment.clock)])
        return FiringStamp(moment.line, moment.position + by[moment.line], clock)

    def is_recent(self, moment: FiringStamp) -> bool:
        """Return whether a moment belongs to the last round visited."""
        return moment.position >= self.lengths[moment.line]


class SteadyStateDetector:
    """Finds rounds while a table is unrolled for some periods.

    `phases` are by actor the firings after which it touches the same bytes again: a round is only
    one if it holds whole phases.
    """

    def __init__(
        self,
        table: MachineTable,
        periods: int,
        phases: Sequence[int],
        rows: Sequence[Row],
        lengths: Sequence[int],
        long_period: int,
    ) -> None:
        repetitions = table.repetitions
        # Reversed, so that of actors with the same repetitions the lowest one stays.
        first = {count: a for a, count in reversed(list(enumerate(repetitions)))}
        self._table = table
        self._edges = [table.edges[e] for outputs in table.outputs for e in outputs]
        self._last = [periods * count for count in repetitions]
        self._phases = phases
        self._rows = rows
        self._lengths = lengths
        self._kept: dict[int, _RoundStart | None] = {}
        # Short periods are unrolled whole: comparing would cost more than it leaves out.
        if max(repetitions, default=0) > long_period:
            self._kept = dict.fromkeys(first.values())
        self._wait = dict.fromkeys(self._kept, 1)
        self._count = dict.fromkeys(self._kept, 0)
        self._failed = dict.fromkeys(self._kept, 0)

    def find(self, actor: int) -> SkippedRounds | None:
        """Return what may be left out now that `actor` was visited, and keep where it was."""
        if actor not in self._kept:
            return None
        earlier = self._kept[actor]
        is_try = earlier is not None and self._is_whole(earlier, actor)
        rounds = self._compared(earlier) if earlier is not None and is_try else None
        self._count[actor] += 1
        self._failed[actor] = 0 if rounds or earlier is None else self._failed[actor] + is_try
        # A graph without rounds must not pay for comparisons at every firing.
        if self._failed[actor] > _TRIES:
            del self._kept[actor]
        elif rounds:
            self._wait[actor], self._count[actor], self._kept[actor] = 1, 0, None
        elif earlier is None or self._count[actor] >= self._wait[actor]:
            self._wait[actor], self._count[actor] = 2 * self._wait[actor], 0
            self._kept[actor] = self._keep()
        return rounds

    def window(self, actor: int, fired: Sequence[int] | None = None) -> int:
        """Return how many firings back an actor is looked at by those that `fired`, or by all."""
        row, window = self._rows[actor], 1
        for e in self._table.inputs[actor] + self._table.outputs[actor]:
            edge = self._table.edges[e]
            is_consumer = edge.consumer == actor
            other = edge.producer if is_consumer else edge.consumer
            if fired is None or fired[other]:
                last = (edge.freed_by if is_consumer else edge.made_by)(self._rows[other].count)
                if last >= 0:
                    window = max(window, row.count - last)
        return window

    def _is_whole(self, kept: _RoundStart, actor: int) -> bool:
        """Return whether the firings of an actor since then are whole phases of it.

        Where a source has 16 slots, 15 of 16 stretches are not, and say nothing about a round: they
        cost no comparison and are no try that failed.
        """
        return (self._rows[actor].count - kept.counts[actor]) % self._phases[actor] == 0

    def _keep(self) -> _RoundStart:
        rows = self._rows
        recent = [tuple(row.items[-self.window(a) :]) for a, row in enumerate(rows)]
        return _RoundStart([row.count for row in rows], list(self._lengths), recent)

    def _compared(self, kept: _RoundStart) -> SkippedRounds | None:
        """Return what may be left out if all since then is a round."""
        rows = self._rows
        # A new line means a new independence: the stretch is no repetition of anything.
        if len(kept.lengths) != len(self._lengths):
            return None
        fired = [row.count - before for row, before in zip(rows, kept.counts, strict=True)]
        grown = [now - before for before, now in zip(kept.lengths, self._lengths, strict=True)]
        if not self._is_balanced(fired, kept.counts):
            return None
        for a in [a for a, f in enumerate(fired) if f]:
            window, before, now = self.window(a, fired), kept.recent[a], rows[a].items
            if window > min(len(before), len(now)):
                return None
            for k in range(1, window + 1):
                if not is_moved(before[-k], now[-k], grown):
                    return None
        # One less: the last round is visited, so that what follows finds moments of its own.
        times = self._most(fired) - 1
        if times < 1:
            return None
        return SkippedRounds(times, tuple(fired), tuple(grown), tuple(kept.lengths))

    def _is_balanced(self, fired: list[int], counts: list[int]) -> bool:
        """Return whether a round takes as many tokens as it makes, in whole phases.

        What has no predecessor at the start yet may have one in the next round, so it is none.
        """
        both = [e for e in self._edges if fired[e.producer] and fired[e.consumer]]
        return not any([f % t for f, t in zip(fired, self._phases, strict=True)]) and all(
            [
                # Clocks alone do not say so: of uneven rates they may move alike for a while.
                fired[e.producer] * e.produce == fired[e.consumer] * e.consume
                and e.made_by(counts[e.consumer]) >= 0
                and (e.is_one_way or e.freed_by(counts[e.producer]) >= 0)
                for e in both
            ]
        )

    def _most(self, fired: list[int]) -> int:
        """Return how many rounds can follow before anything outside comes into play."""
        rows = self._rows
        limits = [
            (last - row.count) // f
            for last, row, f in zip(self._last, rows, fired, strict=True)
            if f
        ]
        for edge in self._edges:
            writes, reads = rows[edge.producer].count, rows[edge.consumer].count
            if fired[edge.producer] and not fired[edge.consumer]:
                # Firings of the reader that the last firing depends on: more would change clocks in
                # the round.
                firings = max(edge.freed_by(writes - 1) + 1, 0)
                limit = (
                    firings * edge.consume + edge.num_slots - edge.initial
                ) // edge.produce - writes
                limits.append(min(limit, edge.made_by(reads) - writes + 1) // fired[edge.producer])
            if fired[edge.consumer] and not fired[edge.producer]:
                firings = max(edge.made_by(reads - 1) + 1, 0)
                tokens = firings * edge.produce + edge.initial
                limit = tokens // edge.consume
                if not edge.is_one_way:
                    limit = min(limit, edge.freed_by(writes))
                limits.append((limit - reads) // fired[edge.consumer])
        return min(limits)


class _RoundStart(NamedTuple):
    """The start of a round: numbers of firings, lengths of lines, and what is still looked at."""

    counts: list[int]
    lengths: list[int]
    recent: list[tuple[FiringStamp, ...]]


def is_moved(before: FiringStamp, after: FiringStamp, grown: Sequence[int]) -> bool:
    """Return whether a moment is another one, moved on by what lines grew."""
    if before.line != after.line or after.position - before.position != grown[before.line]:
        return False
    # A clock is as long as there were lines then; lines that it lacks count as 0.
    pairs = zip_longest(before.clock, after.clock, fillvalue=0)
    return all([m == (n + grown[i] if n else 0) for i, (n, m) in enumerate(pairs)])


_MAX_OPENED = 2
"""Lines for all of its stream that one actor may open; its next one is its own, for ever. So there
are at most three per actor, whatever the graph."""


def unroll(table: MachineTable, periods: int, limit: int) -> Iterator[tuple[int, int, FiringStamp]]:
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
    *,
    long_period: int = LONG_PERIOD,
) -> None:
    """Show a watcher all firings of some periods, each after all that happens before it.

    It hears of rounds that come round again, which are left out; at least one more comes then. They
    are looked for where an actor has more than `long_period` firings in a period.
    `phases` are by actor the firings after which one is like the one before to the watcher. Stops
    once `limit` firings were visited. Raises InternalError when no actor can fire.
    """
    rows = [Row() for _ in range(table.num_actors)]
    lines = _Lines(table.streams)
    rounds = SteadyStateDetector(table, periods, phases, rows, lines.lengths, long_period)
    for actor, firing, moment in _unroll(table, periods, limit, rows, lines):
        watcher.visit(actor, firing, moment)
        left_out = rounds.find(actor)
        if left_out is not None:
            windows = [rounds.window(a) for a in range(table.num_actors)]
            for row, window, fired in zip(rows, windows, left_out.fired, strict=True):
                if fired:
                    # Only the firings that can still be looked at are kept, renumbered as those of
                    # the last round.
                    row.first = row.count + left_out.times * fired - min(window, len(row.items))
                    row.items[:] = [left_out.moved(moment) for moment in row.items[-window:]]
            for line, grown in enumerate(left_out.grown):
                lines.lengths[line] += left_out.times * grown
            watcher.leave_out(left_out)


def _unroll(
    table: MachineTable, periods: int, limit: int, rows: Sequence[Row], lines: _Lines
) -> Iterator[tuple[int, int, FiringStamp]]:
    open_ = list(range(table.num_actors))
    budget = limit
    while open_ and budget > 0:
        before = budget
        for actor in open_:
            row = rows[actor]
            firing = row.count
            past = _past(table, rows, actor, firing)
            # One firing per actor and sweep: sources cannot run far ahead of what they feed.
            if past is not None and firing < periods * table.repetitions[actor]:
                moment = lines.append(actor, past)
                row.items.append(moment)
                budget -= 1
                yield actor, firing, moment
        if budget == before:
            names = ", ".join([repr(table.names[actor]) for actor in open_])
            raise InternalError(f"the actor graph deadlocks: {names} wait for one another")
        open_ = [a for a in open_ if rows[a].count < periods * table.repetitions[a]]


def _past(
    table: MachineTable, rows: Sequence[Row], actor: int, firing: int
) -> list[FiringStamp] | None:
    """Return what a firing comes directly after, or None while some of it was not visited."""
    past: list[FiringStamp] = [rows[actor].items[-1]] if firing else []
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

    def append(self, actor: int, past: Sequence[FiringStamp]) -> FiringStamp:
        """Return the moment of an actor's next firing, which comes directly after `past`."""
        clock = [0] * len(self.lengths)
        for line, position, stamp_clock in past:
            # Componentwise maximum over all predecessors, and each predecessor itself.
            clock[: len(stamp_clock)] = map(max, stamp_clock, clock)
            clock[line] = max(clock[line], position + 1)
        line = self._line[actor]
        # The last firing of the line happens before this one exactly if the clock counts all of
        # them.
        if line < 0 or clock[line] != self.lengths[line]:
            line = self._line[actor] = self._find(actor, clock)
        position = self.lengths[line]
        self.lengths[line] = position + 1
        return FiringStamp(line, position, tuple(clock))

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
    # Dijkstra's shortest paths: lags are never negative.
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
    reachable: set[int] = set()
    front = [origin]
    # The list grows while it is walked: a breadth-first search.
    for actor in front:
        for index in table.outputs[actor]:
            consumer = table.edges[index].consumer
            if consumer not in reachable:
                reachable.add(consumer)
                front.append(consumer)
    return reachable


# Conflicts are looked for twice: `Check` says whether there is one, `ConflictFinder` names all. A
# class of bytes keeps only its last write and, per line of firings, the last read since: what came
# before these is ordered with whatever they are (FastTrack: Flanagan & Freund 2009). Only where
# that finds a pair is the last write and read of every actor kept.


class PhasedFiring(NamedTuple):
    """An actor reads or writes in its firings k with k mod modulus = residue."""

    actor: int
    modulus: int
    residue: int
    is_write: bool


class Conflict(NamedTuple):
    """Two firings that access the bytes of a class without an order."""

    bytes_class: int
    first: PhasedFiring
    first_firing: int
    second: PhasedFiring
    second_firing: int


_Accessed = tuple[int, PhasedFiring, FiringStamp]
"""A firing that accessed the bytes of a class, and when."""

_NEVER = FiringStamp(0, -1, ())
"""Before every firing."""


class Check:
    """Says whether some two conflicting accesses are unordered, in time per access."""

    __slots__ = (
        "_phases",
        "_reads",
        "_writes",
        "is_racy",
        "num_firings",
        "num_left_out",
        "num_lines",
        "num_pairs",
        "phases",
    )  # fmt: skip

    def __init__(self, table: MachineTable, classes: Sequence[tuple[PhasedFiring, ...]]) -> None:
        self._phases: list[list[tuple[int, int, int, bool]]] = [[] for _ in range(table.num_actors)]
        for index, phases in enumerate(classes):
            # A write stands for the read of the same firings.
            for actor, modulus, residue, is_write in phases:
                if is_write or PhasedFiring(actor, modulus, residue, is_write=True) not in phases:
                    self._phases[actor].append((index, modulus, residue, is_write))
        self._writes: list[FiringStamp] = [_NEVER] * len(classes)
        self._reads: list[dict[int, FiringStamp]] = [{} for _ in classes]
        self.phases = [lcm(*[modulus for _, modulus, _, _ in row]) for row in self._phases]
        self.is_racy = False
        self.num_firings = 0
        self.num_left_out = 0
        self.num_lines = 0
        self.num_pairs = 0

    def visit(self, actor: int, firing: int, moment: FiringStamp) -> None:
        """Take the next firing."""
        self.num_firings += 1
        line, clock, writes = moment.line, moment.clock, self._writes
        self.num_lines = len(clock)
        for index, modulus, residue, is_write in self._phases[actor]:
            if modulus > 1 and firing % modulus != residue:
                continue
            write, reads = writes[index], self._reads[index]
            self.num_pairs += 1
            # Firings of one line are ordered, so only other lines have to be compared.
            if write.line != line and not write.is_before(clock):
                self.is_racy = True
            if not is_write:
                # The last read of a line stands for all its earlier ones, which happen before it.
                reads[line] = moment
                continue
            self.num_pairs += len(reads)
            for other, stamp in reads.items():
                if other != line and not stamp.is_before(clock):
                    self.is_racy = True
            # Ordered before this write, or a race was found: either way later accesses need only
            # the write.
            reads.clear()
            writes[index] = moment

    def leave_out(self, rounds: SkippedRounds) -> None:
        """Take rounds like the last one: what accessed bytes last has moved on."""
        self.num_left_out += rounds.times * sum(rounds.fired)
        self._writes = [rounds.moved(m) if rounds.is_recent(m) else m for m in self._writes]
        for reads in self._reads:
            for line, moment in reads.items():
                if rounds.is_recent(moment):
                    reads[line] = rounds.moved(moment)


class ConflictFinder:
    """Compares each access with the last conflicting one of every other actor, per class."""

    __slots__ = ("_phases", "_reads", "_writes", "conflicts")

    def __init__(self, table: MachineTable, classes: Sequence[tuple[PhasedFiring, ...]]) -> None:
        self._phases: list[list[tuple[int, PhasedFiring]]] = [[] for _ in range(table.num_actors)]
        for index, phases in enumerate(classes):
            for phase in phases:
                self._phases[phase.actor].append((index, phase))
        self._writes: list[dict[int, _Accessed]] = [{} for _ in classes]
        self._reads: list[dict[int, _Accessed]] = [{} for _ in classes]
        self.conflicts: dict[tuple[int, int, int], Conflict] = {}

    def visit(self, actor: int, firing: int, moment: FiringStamp) -> None:
        """Take the next firing; keep the first conflict of each class and pair of actors."""
        for index, phase in self._phases[actor]:
            if firing % phase.modulus != phase.residue:
                continue
            reads, writes = self._reads[index], self._writes[index]
            for earlier in (writes, reads) if phase.is_write else (writes,):
                for other, (last, last_phase, last_moment) in earlier.items():
                    if other != actor and not last_moment.is_before(moment.clock):
                        self.conflicts.setdefault(
                            (index, min(actor, other), max(actor, other)),
                            Conflict(index, last_phase, last, phase, firing),
                        )
            (writes if phase.is_write else reads)[actor] = (firing, phase, moment)

    def leave_out(self, rounds: SkippedRounds) -> None:
        """Take rounds like the last one: what accessed bytes last has moved on."""
        for accessed in (*self._writes, *self._reads):
            for actor, (firing, phase, moment) in accessed.items():
                if rounds.is_recent(moment):
                    later = firing + rounds.times * rounds.fired[actor]
                    accessed[actor] = (later, phase, rounds.moved(moment))
