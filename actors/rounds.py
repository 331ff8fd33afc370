"""Rounds of an unrolled actor graph that come round again: seen, and left out.

An evaluation every hundred thousand steps makes a period of millions of firings, nearly all of them
alike. A *round* is what lies between two visits of one actor. If at its end everything that can
still be looked at is what it was at its start, moved on by as many firings as each actor did and as
many positions as each line grew, then the next round does the same, moved on once more: clocks are
maxima, and a maximum moves with its arguments. So as many rounds may be left out as nothing else
interferes: no actor outside the round becomes able to fire by it, and no firing of the round comes
after another firing from outside than before.

A round is found by comparing with a kept one, which is replaced after 1, 2, 4, ... visits (Brent,
"An improved Monte Carlo factorization algorithm", 1980), so that rounds of several visits are found
too. One actor of each number of repetitions begins rounds: steps make an epoch, epochs an
evaluation. One more round is always visited after those left out; whoever watches sees in it what
held in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import zip_longest
from typing import NamedTuple

from actors.table import OUTSIDE, MachineTable
from memory.registers import LONG_PERIOD

_TRIES = 64
"""Comparisons in a row that find nothing, after which an actor begins no more rounds."""

Clock = tuple[int, ...]
"""How many firings of each line end before this one starts; of a line that it lacks, none."""


class Moment(NamedTuple):
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
        self.items: list[Moment] = []

    @property
    def count(self) -> int:
        """Number of firings so far."""
        return self.first + len(self.items)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Rounds that are not visited: `times` rounds in which actor a fires `fired[a]` times.

    Line i grows by `grown[i]` in each, and had length `lengths[i]` when the last one visited began.
    """

    times: int
    fired: tuple[int, ...]
    grown: tuple[int, ...]
    lengths: tuple[int, ...]

    def moved(self, moment: Moment) -> Moment:
        """Return a moment of the last round visited, as it is in the last one left out."""
        by = [self.times * growth for growth in self.grown]
        clock = tuple([n + by[i] if n else 0 for i, n in enumerate(moment.clock)])
        return Moment(moment.line, moment.position + by[moment.line], clock)

    def is_recent(self, moment: Moment) -> bool:
        """Return whether a moment belongs to the last round visited."""
        return moment.position >= self.lengths[moment.line]


class Rounds:
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
    ) -> None:
        every = table.repetitions
        first = {count: a for a, count in reversed(list(enumerate(every)))}
        self._table = table
        self._last = [periods * count for count in every]
        self._phases = phases
        self._rows = rows
        self._lengths = lengths
        self._kept: dict[int, _RoundStart | None] = {}
        if max(every, default=0) > LONG_PERIOD:
            self._kept = dict.fromkeys(first.values())
        self._wait = dict.fromkeys(self._kept, 1)
        self._count = dict.fromkeys(self._kept, 0)
        self._failed = dict.fromkeys(self._kept, 0)

    def find(self, actor: int) -> LeftOut | None:
        """Return what may be left out now that `actor` was visited, and keep where it was."""
        if actor not in self._kept:
            return None
        kept = self._kept[actor]
        found = None if kept is None else self._compared(kept)
        self._count[actor] += 1
        self._failed[actor] = 0 if found or kept is None else self._failed[actor] + 1
        if self._failed[actor] > _TRIES:
            del self._kept[actor]
        elif found:
            self._wait[actor], self._count[actor], self._kept[actor] = 1, 0, None
        elif kept is None or self._count[actor] >= self._wait[actor]:
            self._wait[actor], self._count[actor] = 2 * self._wait[actor], 0
            self._kept[actor] = self._keep()
        return found

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

    def _keep(self) -> _RoundStart:
        rows = self._rows
        recent = [tuple(row.items[-self.window(a) :]) for a, row in enumerate(rows)]
        return _RoundStart([row.count for row in rows], list(self._lengths), recent)

    def _compared(self, kept: _RoundStart) -> LeftOut | None:
        """Return what may be left out if all since then is a round."""
        rows = self._rows
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
                if not _is_moved(before[-k], now[-k], grown):
                    return None
        times = self._most(fired) - 1
        if times < 1:
            return None
        return LeftOut(times, tuple(fired), tuple(grown), tuple(kept.lengths))

    def _is_balanced(self, fired: list[int], counts: list[int]) -> bool:
        """Return whether a round takes as many tokens as it makes, in whole phases.

        What has no predecessor at the start yet may have one in the next round, so it is none.
        """
        table = self._table
        shares = {Fraction(f, n) for f, n in zip(fired, table.repetitions, strict=True) if f}
        if len(shares) != 1 or any([f % t for f, t in zip(fired, self._phases, strict=True)]):
            return False
        both = [e for e in table.edges if e.producer != OUTSIDE]
        both = [e for e in both if fired[e.producer] and fired[e.consumer]]
        return all(
            [
                e.made_by(counts[e.consumer]) >= 0
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
        for edge in self._table.edges:
            if edge.producer == OUTSIDE:
                continue
            made, read = rows[edge.producer].count, rows[edge.consumer].count
            if fired[edge.producer] and not fired[edge.consumer]:
                known = max(edge.freed_by(made - 1) + 1, 0)
                alone = (
                    known * edge.consume + edge.num_slots - edge.initial
                ) // edge.produce - made
                limits.append(min(alone, edge.made_by(read) - made + 1) // fired[edge.producer])
            if fired[edge.consumer] and not fired[edge.producer]:
                known = max(edge.made_by(read - 1) + 1, 0)
                tokens = known * edge.produce + edge.initial
                alone = tokens // edge.consume
                if not edge.is_one_way:
                    alone = min(alone, edge.freed_by(made) + 1)
                limits.append((alone - read) // fired[edge.consumer])
        return min(limits)


class _RoundStart(NamedTuple):
    """The start of a round: numbers of firings, lengths of lines, and what is still looked at."""

    counts: list[int]
    lengths: list[int]
    recent: list[tuple[Moment, ...]]


def _is_moved(before: Moment, after: Moment, grown: Sequence[int]) -> bool:
    """Return whether a moment is another one, moved on by what lines grew."""
    if before.line != after.line or after.position - before.position != grown[before.line]:
        return False
    pairs = zip_longest(before.clock, after.clock, fillvalue=0)
    return all([m == (n + grown[i] if n else 0) for i, (n, m) in enumerate(pairs)])
