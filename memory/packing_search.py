"""The search for a packing: branch and bound over a skyline, in many short runs before long ones.

The *skyline* is the height of every section: no buffer that is still to be placed can lie lower
there. It starts at 0 and is kept as segments of equal height. A *pit* is a segment whose neighbours
are both higher (the edges of time count as higher). The *spare* of a section is the capacity minus
its height minus the bytes still to be placed in it. Laying a buffer on the floor of a pit costs no
spare. Raising a floor costs as many bytes as it is raised, and a spare below zero is a dead end.

So the state is settled after each change: sections of a pit over which no unplaced buffer fits are
raised to the lower wall, until all of every pit can be covered, or a spare would fall below zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from memory.liveness import IntArray
from memory.packing import BufferSets, Instance, SectionPacking, live_per_section

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
    """One state; it is never changed, so that going back to it costs nothing."""

    unplaced: int
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


@dataclass(frozen=True, slots=True, eq=False)
class PackingRules:
    """The rules of one search: the sets of buffers, the smallest step of heights, and the decision.

    What lies over one section of a pit is decided, of the tightest pit first. `under_best`: over
    the tightest section under the buffer of best rank, so that preorders have their way. Else over
    the one with the fewest choices of both ends and the tightest; best where little is spare.
    Neither leaves out a packing in which no buffer can be moved to a lower place. The methods
    report the sections they have changed, and those their answer depends on.
    """

    sets: BufferSets
    granule: int
    under_best: bool

    def start(self, spare: list[int]) -> Skyline | None:
        """Return the state with nothing placed; None where a section holds more than all bytes."""
        if min(spare, default=0) < 0:
            return None
        draft = _NextSkyline(
            self, self.sets.full, [SkylineSegment(0, len(spare), 0)], [NO_PIT], spare
        )
        return draft.settle(0, 1)

    def place_on_floor(
        self, state: Skyline, k: int, i: int, changed: SkylineSpan, seen: SkylineSpan
    ) -> Skyline | None:
        """Return the state with buffer i on the floor of pit k; None for a dead end."""
        sets = self.sets
        draft = _NextSkyline.of(self, state, changed, seen)
        draft.unplaced &= ~(1 << i)
        # No spare is spent: what rises was counted as still to be placed here.
        draft.raise_part(k, sets.lower[i], sets.upper[i], sets.size[i])
        # Neighbours of the raised part may have become pits, or equal in height.
        return draft.settle(k - 1, k + 2 + len(draft.segments) - len(state.segments))

    def raise_floor(
        self, state: Skyline, k: int, changed: SkylineSpan, seen: SkylineSpan
    ) -> Skyline | None:
        """Raise the section of pit k, without its options, to where something can lie over it.

        What does lies on a buffer beside it in the pit, or reaches over a wall. A dead end, too,
        where the bytes left free would hold a buffer that could have been laid there.
        """
        pit, sets = state.segments[k], self.sets
        section = pit.section
        beside = sets.within(state.unplaced, pit.start, pit.end) & ~sets.covering[section]
        around = [n for n in (k - 1, k + 1) if 0 <= n < len(state.segments)]
        wall = min([state.segments[n].height for n in around], default=EDGE)
        rise = sets.least_size(beside, wall - pit.height)
        seen.add(pit.start - 1, pit.end + 1)
        if state.spare[section] < rise:
            return None
        # What fits into the bytes left free could lie there: the other branch has that packing.
        on_section = sets.within(pit.options, section, section + 1)
        if sets.least_size(on_section, EDGE) <= rise:
            return None
        draft = _NextSkyline.of(self, state, changed, seen)
        draft.spend(section, section + 1, rise)
        draft.raise_part(k, section, section + 1, rise)
        return draft.settle(k - 1, k + 2 + len(draft.segments) - len(state.segments))


class _NextSkyline:
    """A state in the making, and the spans of sections that were changed and looked at."""

    __slots__ = (
        "changed", "is_own", "seen", "segments", "spare", "terrain", "unplaced",
        "urgencies",
    )  # fmt: skip

    def __init__(
        self,
        terrain: PackingRules,
        unplaced: int,
        segments: list[SkylineSegment],
        urgencies: list[int],
        spare: list[int],
    ) -> None:
        self.terrain, self.unplaced = terrain, unplaced
        self.segments, self.urgencies, self.spare = segments, urgencies, spare
        self.changed, self.seen = SkylineSpan(), SkylineSpan()
        self.is_own = False

    @classmethod
    def of(
        cls, terrain: PackingRules, state: Skyline, changed: SkylineSpan, seen: SkylineSpan
    ) -> _NextSkyline:
        segments, urgencies = state.segments.copy(), state.urgencies.copy()
        draft = cls(terrain, state.unplaced, segments, urgencies, state.spare)
        draft.changed, draft.seen = changed, seen
        return draft

    def spend(self, start: int, end: int, rise: int) -> None:
        """Take `rise` spare bytes from each of the sections [start, end)."""
        # Copied on the first write: states share the list until one spends.
        if not self.is_own:
            self.spare, self.is_own = self.spare.copy(), True
        self.spare[start:end] = [spare - rise for spare in self.spare[start:end]]

    def raise_part(self, k: int, start: int, end: int, rise: int) -> None:
        """Raise the sections [start, end) of segment k; adds up to two segments."""
        self.changed.add(start, end)
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

        None where the spare bytes do not suffice.
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
                # A bool counts as 0 or 1: merge with the left neighbour, else with the right one.
                k -= left == height
                merged = SkylineSegment(segments[k].start, segments[k + 1].end, height)
                segments[k : k + 2], urgencies[k : k + 2] = [merged], [NO_PIT]
                # One segment less, and the merged one is looked at again.
                stop = max(stop - 1, k + 1)
                continue
            rise = min(left, right) - height
            # A neighbour is lower: no pit.
            if rise < 0 or not self.unplaced:
                segments[k], urgencies[k] = SkylineSegment(start, end, height), NO_PIT
                k += 1
                continue
            fitting = sets.within(self.unplaced, start, end)
            a, b = _hole(sets, fitting, start, end)
            # Beyond `_ENDLESS` there are no walls: a single floor over all of time is never raised.
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
            # k stays: the pieces of the raised segment are looked at next.
            stop += len(segments) - num_segments
        return Skyline(self.unplaced, segments, urgencies, self.spare)

    def _pit(self, start: int, end: int, height: int, fitting: int) -> SkylineSegment:
        """Choose the decision to take on a pit, and say how urgent it is."""
        spare, sets = self.spare, self.terrain.sets
        part = spare[start:end]
        least = min(part)
        sections: tuple[int, ...] = (start, start + part.index(least), end - 1)
        if self.terrain.under_best:
            best = (fitting & -fitting).bit_length() - 1
            lower, upper = sets.lower[best], sets.upper[best]
            under = spare[lower:upper]
            sections = (lower + under.index(min(under)),)
        num_choices, section, options = EDGE, start, 0
        for s in sections:
            # To leave the section free is a choice, too, where a granule is spare.
            over = fitting & sets.covering[s]
            count = over.bit_count() + (spare[s] >= self.terrain.granule)
            if count < num_choices:
                num_choices, section, options = count, s, over
        # By the tightest section, then by the fewest choices, which take the low 8 bits.
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
        # The best buffer over this section covers all up to its own end.
        section = upper[(over & -over).bit_length() - 1]
    return end, end


# In a packing in which no buffer can be moved to a lower place, each lies on the floor or on a
# buffer live at the same time. Such packings are built from below. A node of the search takes the
# most urgent pit of the skyline and decides what lies over one section of it: one of the unplaced
# buffers that fit, or nothing. These choices exclude each other and leave none out, so a search
# that ends without a packing proves that there is none.
#
# Going back is directed by conflicts. A dead end has looked at a span of sections; what was decided
# wholly outside this span did not cause it, so the other choices of such decisions are not tried.


class Outcome(Enum):
    """What a search has shown."""

    PACKED = "packed"
    EXHAUSTED = "exhausted"
    OUT_OF_NODES = "out of nodes"


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """The outcome, the nodes it took, and where it is packed the offset of each rank."""

    outcome: Outcome
    nodes: int
    offsets: tuple[int, ...] = ()


class _SearchFrame:
    """A decision: the state before, what is left to try, and the span that failures looked at."""

    __slots__ = ("changed", "failed", "k", "left", "may_leave", "num_placed", "state")

    def __init__(self, state: Skyline, num_placed: int) -> None:
        self.state, self.num_placed = state, num_placed
        self.k = state.urgencies.index(min(state.urgencies))
        pit = state.segments[self.k]
        self.left = pit.options
        self.may_leave = True
        self.failed = self.changed = SkylineSpan()
        self.failed.add(pit.start - 1, pit.end + 1)


def search(terrain: PackingRules, spare: list[int], max_nodes: int) -> Result:
    """Search for a packing with `spare[s]` bytes free in section s; visit at most `max_nodes`.

    A node costs about 20 us for some hundred buffers, and 100 us for 4,000.
    """
    state = terrain.start(spare)
    if state is None:
        return Result(Outcome.EXHAUSTED, 0)
    placed: list[tuple[int, int]] = []
    frames: list[_SearchFrame] = []
    nodes = 0
    while state is not None and state.unplaced:
        if nodes == max_nodes:
            return Result(Outcome.OUT_OF_NODES, nodes)
        nodes += 1
        conflict: SkylineSpan | None = None
        frames.append(_SearchFrame(state, len(placed)))
        state = _descend(terrain, frames[-1], placed)
        while state is None and frames:
            frame = frames[-1]
            # The last choice of this decision has failed: its span is the conflict before it.
            if conflict is None:
                conflict = frames.pop().failed
            elif conflict.end <= frame.changed.start or frame.changed.end <= conflict.start:
                # The decision changed nothing in the conflict: no other choice of it can help.
                frames.pop()
            else:
                frame.failed.add(conflict.start, conflict.end)
                conflict = None
                state = _descend(terrain, frame, placed)
    if state is None:
        return Result(Outcome.EXHAUSTED, nodes)
    offsets = [0] * len(placed)
    for i, offset in placed:
        offsets[i] = offset
    return Result(Outcome.PACKED, nodes, tuple(offsets))


def _descend(
    terrain: PackingRules, frame: _SearchFrame, placed: list[tuple[int, int]]
) -> Skyline | None:
    """Return the state after the next choice that is no dead end at once; None when all are."""
    # Drop what was placed after this decision.
    del placed[frame.num_placed :]
    state, k = frame.state, frame.k
    pit = state.segments[k]
    while frame.left:
        i = (frame.left & -frame.left).bit_length() - 1
        # Equal buffers are interchangeable, so that one of them is tried.
        frame.left &= ~terrain.sets.alike[i]
        frame.changed, seen = SkylineSpan(), SkylineSpan()
        after = terrain.place_on_floor(state, k, i, frame.changed, seen)
        if after is not None:
            placed.append((i, pit.height))
            return after
        frame.failed.add(seen.start, seen.end)
    if frame.may_leave:
        frame.may_leave = False
        frame.changed, seen = SkylineSpan(), SkylineSpan()
        after = terrain.raise_floor(state, k, frame.changed, seen)
        if after is not None:
            return after
        frame.failed.add(seen.start, seen.end)
    return None


# How long a search takes depends on luck with the rule and the preorder, over orders of magnitude.
# So many short searches run before a long one, the later ones with noise on the preorders, which
# has a fixed seed. The first capacity is the target. While nodes are left, the capacities between
# it and the best peak are bisected. A search that ends without a packing one granule below the best
# peak proves that peak optimal.

_ROUND = ((True, "WAT"), (False, "WAT"), (False, "TWA"), (True, "TWA"))
"""The searches of a round. Preorders: descending by lifespan W, area A, live bytes at the worst
section T. The first finds most graphs in one descent, the second most tight instances."""

_NOISE, _SEED = 88, 1
"""A noisy key is multiplied by 1024 + four integers up to +-_NOISE, which deviates by a tenth.
Integers, because such products are equal on every machine, and exponentials need not be."""


@dataclass(frozen=True, slots=True, eq=False)
class Improved:
    """The best packing, a bound proved for the peak of every packing, and the nodes visited."""

    packing: SectionPacking
    bound: int
    nodes: int


def node_work(num_buffers: int) -> int:
    """Return the work of one node in units of about 20 us; it grows with the sets of buffers."""
    return 1 + num_buffers // 500


def improve(instance: Instance, best: SectionPacking, target: int, max_nodes: int) -> Improved:
    """Search for a packing whose peak is at most `target`, or as near to it as nodes allow.

    Returns `best` itself where none better is found.
    """
    # Where no buffer can be moved down, each offset is a sum of sizes: a multiple of their gcd.
    granule = int(np.gcd.reduce(instance.size))
    bound, nodes = instance.bound, 0
    # Capacities worth a try: multiples of the granule in [low, high].
    low = max(bound, target - target % granule)
    high = best.peak - granule
    capacity = low
    while low <= high and nodes < max_nodes and best.peak > target:
        # The last capacity gets all that is left, the others leave a third.
        nodes_left = max_nodes - nodes
        share = nodes_left if capacity == high else nodes_left * 2 // 3
        attempt = _search(instance, capacity, granule, max(share, 1))
        nodes += attempt.nodes
        if attempt.outcome is Outcome.PACKED:
            offsets = np.array(attempt.offsets, np.int64)
            best = SectionPacking(offsets, int((offsets + instance.size).max()), "branch and bound")
            high = best.peak - granule
        else:
            low = capacity + granule
            if attempt.outcome is Outcome.EXHAUSTED:
                # Exhausted proves that this capacity and all below are too small; out of nodes,
                # nothing.
                bound = low
        capacity = low + (high - low) // granule // 2 * granule
    return Improved(best, bound, nodes)


def _search(instance: Instance, capacity: int, granule: int, max_nodes: int) -> Result:
    """Search at one capacity, by one rule and preorder after the other; offsets are by buffer."""
    num_buffers = instance.size.size
    spare = (capacity - live_per_section(instance)).tolist()
    nodes = 0
    for under_best, order, factor in _schedule(instance):
        sets = BufferSets.build(instance, order)
        limit = min((num_buffers * 4 // 3 + 200) * factor, max_nodes - nodes)
        packing = search(PackingRules(sets, granule, under_best), spare, limit)
        nodes += packing.nodes
        if packing.outcome is not Outcome.OUT_OF_NODES or nodes >= max_nodes:
            break
    offsets = np.array(packing.offsets, np.int64)
    # From ranks in the preorder back to buffers.
    if offsets.size:
        offsets[order] = offsets.copy()
    return Result(packing.outcome, nodes, tuple(offsets.tolist()))


def _schedule(instance: Instance) -> Iterator[tuple[bool, IntArray, int]]:
    """Yield `under_best`, preorder and a factor for the nodes of ever more searches."""
    generator = np.random.default_rng(_SEED)
    keys = _keys(instance)
    for number in range(1, 1 << 30):
        for under_best, names in _ROUND:
            columns = [keys[name] for name in names]
            if number > 1:
                num_buffers = instance.size.size
                shape = (len(columns), 4, num_buffers)
                noise = 1024 + generator.integers(-_NOISE, _NOISE + 1, shape).sum(axis=1)
                columns = [column * factor for column, factor in zip(columns, noise, strict=True)]
            yield under_best, np.lexsort([-column for column in reversed(columns)]), _luby(number)


def _keys(instance: Instance) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    live = live_per_section(instance)
    lifespan = instance.lifespan.astype(np.float64)
    spans = np.stack((instance.lower, instance.upper), axis=1).ravel()
    # `reduceat` over pairs (lower, upper): every other result is of a buffer. The 0 at the end
    # keeps an upper at the last section in range.
    worst = np.maximum.reduceat(np.append(live, 0), spans)[::2]
    return {"W": lifespan, "A": lifespan * instance.size, "T": worst.astype(np.float64)}


def _luby(number: int) -> int:
    """Return term `number` >= 1 of 1, 1, 2, 1, 1, 2, 4, ... (Luby, Sinclair, Zuckerman 1993)."""
    while number + 1 & number:
        number -= (1 << number.bit_length() - 1) - 1
    return number + 1 >> 1
