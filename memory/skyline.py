"""The state of a search for a packing: what is placed, seen from above.

The *skyline* is the height of every section: no buffer that is still to be placed can lie lower
there. It starts at 0 and is kept as segments of equal height. A *pit* is a segment whose neighbours
are both higher (the edges of time count as higher). The *spare* of a section is the capacity minus
its height minus the bytes still to be placed in it. Laying a buffer on the floor of a pit costs no
spare. Raising a floor costs as many bytes as it is raised, and a spare below zero is a dead end.

So the state is settled after each change: sections of a pit over which no unplaced buffer fits are
raised to the lower wall, until all of every pit can be covered, or a spare would fall below zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from memory.buffer_sets import BufferSets

EDGE = 1 << 62
"""The height at both edges of time, above every capacity."""

_ENDLESS = 1 << 61
"""Above every rise to a neighbour or onto a buffer: a single segment has no walls."""

NO_PIT = 1 << 80
"""The urgency of a segment on which nothing is to be decided."""


class SkylineSegment(NamedTuple):
    """Sections [start, end) of one height.

    On a pit the next decision is what covers `section` there: one of `options`, or none of them.
    The pit of the smallest `urgency` is decided first.
    """

    start: int
    end: int
    height: int
    urgency: int = NO_PIT
    section: int = 0
    options: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Skyline:
    """One state; it is never changed, so that going back to it costs nothing.

    `barred` buffers are not laid on the floor that is below them now: they must lie higher.
    """

    unplaced: int
    barred: int
    segments: list[SkylineSegment]
    urgencies: list[int]
    spare: list[int]


class SkylineSpan:
    """A growing range of sections [start, end); empty at first."""

    __slots__ = ("end", "start")

    def __init__(self) -> None:
        self.start, self.end = EDGE, -1

    def add(self, start: int, end: int) -> None:
        """Grow to hold [start, end) too."""
        if start < self.start:
            self.start = start
        if end > self.end:
            self.end = end


class Style(Enum):
    """What a decision is about; no style is best everywhere.

    None of them leaves out a packing in which no buffer can be moved to a lower place.
    """

    CORNERS = "corners"
    """What lies over one section of a pit: the one with the fewest choices among both ends and the
    tightest section. Tightest pit first. Best where little is spare."""

    UNDER_BEST = "under best"
    """As before, but the tightest section under the buffer of best rank: preorders have their way.
    """

    LEFT_TO_RIGHT = "left to right"
    """Whether the best buffer that fits into a pit lies there; where not, the next best is asked.
    First pit first. Best where much is spare almost everywhere, as in graphs."""


@dataclass(frozen=True, slots=True, eq=False)
class Terrain:
    """The rules of one search: the sets of buffers, the smallest step of heights, and the style.

    The methods report the sections they have changed, and those their answer depends on.
    """

    sets: BufferSets
    granule: int
    style: Style

    def start(self, spare: list[int]) -> Skyline | None:
        """Return the state with nothing placed; None where a section holds more than all bytes."""
        if min(spare, default=0) < 0:
            return None
        draft = _NextSkyline(
            self, self.sets.full, 0, [SkylineSegment(0, len(spare), 0)], [NO_PIT], spare
        )
        return draft.settle(0, 1)

    def lay(
        self, state: Skyline, k: int, i: int, changed: SkylineSpan, seen: SkylineSpan
    ) -> Skyline | None:
        """Return the state with buffer i on the floor of pit k; None for a dead end."""
        sets = self.sets
        draft = _NextSkyline.of(self, state, changed, seen)
        draft.unplaced &= ~(1 << i)
        draft.barred &= ~(1 << i)
        draft.raise_part(k, sets.lower[i], sets.upper[i], sets.size[i])
        return draft.settle(k - 1, k + 2 + len(draft.segments) - len(state.segments))

    def leave(
        self, state: Skyline, k: int, changed: SkylineSpan, seen: SkylineSpan
    ) -> Skyline | None:
        """Return the state with none of the options of pit k on its floor; None for a dead end."""
        if self.style is not Style.LEFT_TO_RIGHT:
            return self._leave_section(state, k, changed, seen)
        pit = state.segments[k]
        best = (pit.options & -pit.options).bit_length() - 1
        changed.add(self.sets.lower[best], self.sets.upper[best])
        draft = _NextSkyline.of(self, state, changed, seen)
        draft.barred |= self.sets.alike[best] & state.unplaced
        return draft.settle(k, k + 1)

    def _leave_section(
        self, state: Skyline, k: int, changed: SkylineSpan, seen: SkylineSpan
    ) -> Skyline | None:
        """Raise the section of pit k to the lowest height at which something can lie over it.

        What does lies on a buffer beside it in the pit, or reaches over a wall. A dead end, too,
        where the bytes left free would hold a buffer that could have been laid there.
        """
        pit, sets = state.segments[k], self.sets
        section = pit.section
        beside = sets.clear_of(
            sets.within(state.unplaced, pit.start, pit.end), section, section + 1
        )
        rise = sets.least_size(beside, lower_wall(state.segments, k) - pit.height)
        seen.add(pit.start - 1, pit.end + 1)
        if state.spare[section] < rise:
            return None
        on_section = sets.within(pit.options, section, section + 1)
        if sets.least_size(on_section, EDGE) <= rise:
            return None
        draft = _NextSkyline.of(self, state, changed, seen)
        draft.spend(section, section + 1, rise)
        draft.raise_part(k, section, section + 1, rise)
        return draft.settle(k - 1, k + 2 + len(draft.segments) - len(state.segments))


def lower_wall(segments: list[SkylineSegment], k: int) -> int:
    """Return the height of the lower neighbour of segment k."""
    left = segments[k - 1].height if k else EDGE
    right = segments[k + 1].height if k + 1 < len(segments) else EDGE
    return min(left, right)


class _NextSkyline:
    """A state in the making, and the spans of sections that were changed and looked at."""

    __slots__ = (
        "barred", "changed", "is_own", "seen", "segments", "spare", "terrain", "unplaced",
        "urgencies",
    )  # fmt: skip

    def __init__(
        self,
        terrain: Terrain,
        unplaced: int,
        barred: int,
        segments: list[SkylineSegment],
        urgencies: list[int],
        spare: list[int],
    ) -> None:
        self.terrain, self.unplaced, self.barred = terrain, unplaced, barred
        self.segments, self.urgencies, self.spare = segments, urgencies, spare
        self.changed, self.seen = SkylineSpan(), SkylineSpan()
        self.is_own = False

    @classmethod
    def of(
        cls, terrain: Terrain, state: Skyline, changed: SkylineSpan, seen: SkylineSpan
    ) -> _NextSkyline:
        segments, urgencies = state.segments.copy(), state.urgencies.copy()
        draft = cls(terrain, state.unplaced, state.barred, segments, urgencies, state.spare)
        draft.changed, draft.seen = changed, seen
        return draft

    def spend(self, start: int, end: int, rise: int) -> None:
        """Take `rise` spare bytes from each of the sections [start, end)."""
        if not self.is_own:
            self.spare, self.is_own = self.spare.copy(), True
        self.spare[start:end] = [spare - rise for spare in self.spare[start:end]]

    def raise_part(self, k: int, start: int, end: int, rise: int) -> None:
        """Raise the sections [start, end) of segment k; what was barred above them may lie there.

        Adds up to two segments.
        """
        self.changed.add(start, end)
        if self.barred:
            self.barred = self.terrain.sets.clear_of(self.barred, start, end)
        old = self.segments[k]
        pieces = [SkylineSegment(start, end, old.height + rise)]
        if old.start < start:
            pieces.insert(0, SkylineSegment(old.start, start, old.height))
        if end < old.end:
            pieces.append(SkylineSegment(end, old.end, old.height))
        self.segments[k : k + 1] = pieces
        self.urgencies[k : k + 1] = [NO_PIT] * len(pieces)

    def settle(self, first: int, stop: int) -> Skyline | None:
        """Find the pits among segments [first, stop), and raise what nothing fits over.

        None where the spare bytes do not suffice, or where a barred buffer fits into a pit that
        nothing else will fill: then it could be moved down there.
        """
        segments, urgencies = self.segments, self.urgencies
        sets = self.terrain.sets
        k, stop = max(first, 0), min(stop, len(segments))
        while k < stop:
            start, end, height = segments[k][:3]
            left = segments[k - 1].height if k else EDGE
            right = segments[k + 1].height if k + 1 < len(segments) else EDGE
            self.seen.add(start - 1, end + 1)
            if left == height or right == height:
                k -= left == height
                merged = SkylineSegment(segments[k].start, segments[k + 1].end, height)
                segments[k : k + 2], urgencies[k : k + 2] = [merged], [NO_PIT]
                stop = max(stop - 1, k + 1)
                continue
            rise = min(left, right) - height
            if rise < 0 or not self.unplaced:
                segments[k], urgencies[k] = SkylineSegment(start, end, height), NO_PIT
                k += 1
                continue
            inside = sets.within(self.unplaced, start, end)
            fitting = inside & ~self.barred
            if fitting or not inside:
                a, b = _hole(sets, inside, start, end)
            elif sets.least_size(inside, EDGE) <= rise:
                return None
            else:
                a, b = start, end
            if a == b or rise > _ENDLESS:
                segments[k] = pit = self._pit(start, end, height, fitting)
                urgencies[k] = pit.urgency
                k += 1
                continue
            if min(self.spare[a:b]) < rise:
                return None
            self.spend(a, b, rise)
            num_segments = len(segments)
            self.raise_part(k, a, b, rise)
            stop += len(segments) - num_segments
        return Skyline(self.unplaced, self.barred, segments, urgencies, self.spare)

    def _pit(self, start: int, end: int, height: int, fitting: int) -> SkylineSegment:
        """Choose the decision to take on a pit, and say how urgent it is."""
        spare, sets = self.spare, self.terrain.sets
        part = spare[start:end]
        least = min(part)
        style = self.terrain.style
        best = (fitting & -fitting).bit_length() - 1
        if style is Style.LEFT_TO_RIGHT:
            return SkylineSegment(start, end, height, start, start, 1 << best)
        sections: tuple[int, ...] = (start, start + part.index(least), end - 1)
        if style is Style.UNDER_BEST:
            lower, upper = sets.lower[best], sets.upper[best]
            under = spare[lower:upper]
            sections = (lower + under.index(min(under)),)
        num_choices, section, options = EDGE, start, 0
        for s in sections:
            over = fitting & sets.covering[s]
            count = over.bit_count() + (spare[s] >= self.terrain.granule)
            if count < num_choices:
                num_choices, section, options = count, s, over
        return SkylineSegment(
            start, end, height, (least << 8) + min(num_choices, 255), section, options
        )


def _hole(sets: BufferSets, fitting: int, start: int, end: int) -> tuple[int, int]:
    """Return the first sections [a, b) of a pit over which nothing fits; (end, end) for none."""
    covering, upper = sets.covering, sets.upper
    section = start
    while section < end:
        over = fitting & covering[section]
        if not over:
            first = section
            while section < end and not fitting & covering[section]:
                section += 1
            return first, section
        section = upper[(over & -over).bit_length() - 1]
    return end, end
