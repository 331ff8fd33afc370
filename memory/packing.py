"""Packing without search: instances in sections, first-fit in several orders, sets of buffers.

First-fit lays buffers in some order, each at the lowest offset that is free all its life. No single
order wins, so several run and the smallest peak stays; the run ends as soon as a peak equals the
lower bound. Two engines give the same answer where both apply:

- Orders by start or by end are a sweep over time. What has been placed and overlaps is exactly what
  is live, so a list of free gaps suffices: array work of O(gaps) per buffer, however many are live.
- Any other order needs the placed neighbours of a buffer. Buffers lie sorted by start, and at every
  B-th of them the set that is live is kept (a checkpoint). The neighbours of a buffer are among its
  checkpoint and one contiguous range: O(m log m) per buffer for m of them.

The second engine is limited by counted work, so that a plan depends on its input alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt

import numpy as np

from memory.liveness import IntArray, lower_bound

# An instance of the placement problem, stripped to what decides it.
#
# Left out: buffers that occupy no bytes, and those over the whole horizon, which lie at the bottom
# of every best packing. Time is merged into *sections*: walking through the events with ends before
# starts, a new section opens only at a start that follows an end. Which buffers overlap and the
# lower bound stay as they were, and there are fewer sections than events.


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """Columns of the buffers that are left to place.

    lower, upper: half-open intervals of sections, each at least one section long. size: bytes,
    rounded up, each at least 1. lifespan: steps before time was merged. bound: the most live bytes.
    """

    lower: IntArray
    upper: IntArray
    size: IntArray
    lifespan: IntArray
    num_sections: int
    bound: int


class WorkBudget:
    """Counted work and its limit: a plan depends on its input alone, and on no clock."""

    __slots__ = ("done", "limit")

    def __init__(self, limit: int) -> None:
        self.done, self.limit = 0, limit


@dataclass(frozen=True, slots=True, eq=False)
class SectionPacking:
    """One offset per buffer of an instance, the highest end, and the algorithm's name."""

    offsets: IntArray
    peak: int
    algorithm: str


def make_instance(lower: IntArray, upper: IntArray, size: IntArray) -> Instance:
    """Return the instance of buffers that all occupy bytes; O(n log n).

    Args:
        lower: first step of each buffer.
        upper: step after the last, above `lower`.
        size: bytes, at least 1.
    """
    section_lower, section_upper = merge_times(lower, upper)
    return Instance(
        lower=section_lower,
        upper=section_upper,
        size=size,
        lifespan=upper - lower,
        num_sections=int(section_upper.max(initial=0)),
        bound=lower_bound(lower, upper, size)[0],
    )


def live_per_section(instance: Instance) -> IntArray:
    """Return the live bytes of each section."""
    change = np.zeros(instance.num_sections + 1, np.int64)
    # `add.at`: several buffers start in one section, which `change[lower] += size` would count
    # once.
    np.add.at(change, instance.lower, instance.size)
    np.subtract.at(change, instance.upper, instance.size)
    live: IntArray = np.cumsum(change)[:-1]
    return live


def components(lower: IntArray, upper: IntArray) -> tuple[IntArray, ...]:
    """Return the buffers of each stretch of time that no buffer crosses into or out of.

    Buffers of different stretches never meet, so that each stretch is an instance of its own.
    O(n log n).
    """
    by_start = np.argsort(lower, kind="stable")
    # A cut lies where a buffer starts at or after the end of all that started before.
    reach = np.maximum.accumulate(upper[by_start])
    cuts = np.flatnonzero(lower[by_start][1:] >= reach[:-1]) + 1
    return tuple(np.split(by_start, cuts)) if lower.size else ()


def merge_times(lower: IntArray, upper: IntArray) -> tuple[IntArray, IntArray]:
    """Map half-open intervals, none of them empty, to intervals of sections with the same overlaps.

    O(n log n).
    """
    if lower.size == 0:
        return lower, upper
    starts = np.unique(lower)
    # A section opens at a start only where a buffer has ended since the start before.
    num_ended = np.searchsorted(np.sort(upper), starts, side="right")
    opens = np.concatenate(([0], (np.diff(num_ended) > 0).astype(np.int64)))
    section = np.cumsum(opens)
    section_lower = section[np.searchsorted(starts, lower)]
    # No interval is empty, so a start precedes each end; the last one is in the buffer's last
    # section.
    section_upper = section[np.searchsorted(starts, upper) - 1] + 1
    return section_lower, section_upper


def whole_horizon(lower: IntArray, upper: IntArray) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which buffers live from the first start of all to the last end of all."""
    if lower.size == 0:
        return np.zeros(0, np.bool_)
    mask: np.ndarray[tuple[int], np.dtype[np.bool_]] = (lower == lower.min()) & (
        upper == upper.max()
    )
    return mask


_WORK_PER_PLACEMENT = 800
"""The fixed cost of placing a buffer, in units of one examined neighbour: about 15 us to 20 ns."""

_WORK_LIMIT, _WORK_LIMIT_PER_BUFFER = 8_000_000, 2500
"""Work over all neighbour orders of one call, about 0.15 s + 50 us per buffer; an order that would
pass it does not begin. All orders run below some 1,300 buffers, whatever their lifetimes."""

_ABOVE_ALL = 1 << 62
"""Above every end: the length of the gap on top, and the limit that no peak reaches."""


def pack_by_sweeps(instance: Instance, target: int) -> SectionPacking:
    """Return the better first-fit packing of the two sweeps; one where it meets the target."""
    best = SectionPacking(np.zeros(instance.size.size, np.int64), _ABOVE_ALL, "")
    for name, is_reversed in (("start", False), ("end", True)):
        if best.peak > target:
            best = better(best, instance, sweep(instance, is_reversed, best.peak), name)
    return best


def pack_by_orders(instance: Instance, best: SectionPacking, target: int) -> SectionPacking:
    """Return the best first-fit packing over the orders that need neighbours, or `best`.

    They run while their work stays below a fixed limit and no peak is at most `target`. An order is
    given up at the first buffer that would reach the best peak so far.
    """
    work_left = _WORK_LIMIT + _WORK_LIMIT_PER_BUFFER * instance.size.size
    work = neighbour_work(instance)
    if work > work_left or best.peak <= target:
        return best
    index = OverlapIndex.build(instance)
    for name, order in neighbour_orders(instance):
        work_left -= work
        if best.peak <= target or work_left < 0:
            break
        best = better(best, instance, place(instance, index, order, best.peak), name)
    return best


def better(
    best: SectionPacking, instance: Instance, offsets: IntArray | None, name: str
) -> SectionPacking:
    """Return the packing of first-fit at these offsets, which is better; `best` without any."""
    if offsets is None:
        return best
    peak = int((offsets + instance.size).max(initial=0))
    return SectionPacking(offsets, peak, f"first-fit by {name}")


def sweep(instance: Instance, is_reversed: bool, limit: int) -> IntArray | None:
    """First-fit by ascending start (larger first), or by descending end where `is_reversed`.

    Returns None as soon as a buffer would end at or above `limit`.
    """
    lower, upper, size = instance.lower, instance.upper, instance.size
    if is_reversed:
        # Time backwards: [lower, upper) becomes [n - upper, n - lower).
        lower, upper = instance.num_sections - upper, instance.num_sections - lower
    offsets, indices = np.zeros(size.size, np.int64), np.arange(size.size)
    is_packed = sweep_onto(indices[:0], indices, (lower, upper, size), offsets, limit)
    return offsets if is_packed else None


def sweep_onto(
    stack: IntArray,
    rest: IntArray,
    columns: tuple[IntArray, IntArray, IntArray],
    offsets: IntArray,
    limit: int,
) -> bool:
    """Place the buffers `rest` by start, where those of `stack` lie from 0 on without a gap.

    `columns` are starts, ends and sizes. Returns whether all end below `limit`; else `offsets` are
    of no use.
    """
    lower, upper, size = columns
    by_start = rest[np.lexsort((-size[rest], lower[rest]))].tolist()
    both = np.concatenate((stack, rest))
    by_end = both[np.argsort(upper[both], kind="stable")].tolist()
    # Lists, for the loop reads single elements, which are slow to take from arrays.
    starts, ends, sizes, placed = lower.tolist(), upper.tolist(), size.tolist(), offsets.tolist()
    gaps = AddressGaps(both.size)
    # The stack has no gap, so that one range stands for it.
    gaps.take(int(size[stack].sum()))
    num_ended = 0
    for i in by_start:
        # Intervals are half-open: what ends at this start is free for it.
        while ends[by_end[num_ended]] <= starts[i]:
            ended = by_end[num_ended]
            gaps.give(placed[ended], sizes[ended])
            num_ended += 1
        placed[i] = gaps.take(sizes[i])
        # Only a packing with a smaller peak than `limit` is of use.
        if placed[i] + sizes[i] >= limit:
            return False
    offsets[:] = placed
    return True


class AddressGaps:
    """The free address ranges, ascending and never adjacent; the last one is endless."""

    __slots__ = ("length", "num_gaps", "start")

    def __init__(self, num_buffers: int) -> None:
        self.start = np.zeros(num_buffers + 2, np.int64)
        self.length = np.zeros(num_buffers + 2, np.int64)
        self.length[0] = _ABOVE_ALL
        self.num_gaps = 1

    def take(self, size: int) -> int:
        """Cut `size` bytes from the lowest gap that holds them; return their offset."""
        start, length, n = self.start, self.length, self.num_gaps
        # argmax finds the first True; the endless gap is always one.
        g = int((length[:n] >= size).argmax())
        offset = int(start[g])
        if length[g] == size:
            start[g : n - 1] = start[g + 1 : n]
            length[g : n - 1] = length[g + 1 : n]
            self.num_gaps = n - 1
        else:
            start[g] += size
            # The endless gap keeps its length, so that it never runs out.
            if g < n - 1:
                length[g] -= size
        return offset

    def give(self, offset: int, size: int) -> None:
        """Return a range, joined with the gaps that touch it."""
        start, length, n = self.start, self.length, self.num_gaps
        # The endless gap begins at or above the end of every range, so g is an index.
        g = int(start[:n].searchsorted(offset))
        touches_above = offset + size == start[g]
        touches_below = g > 0 and start[g - 1] + length[g - 1] == offset
        if touches_above and touches_below:
            length[g - 1] = _ABOVE_ALL if g == n - 1 else length[g - 1] + size + length[g]
            start[g : n - 1] = start[g + 1 : n]
            length[g : n - 1] = length[g + 1 : n]
            self.num_gaps = n - 1
        elif touches_above:
            start[g] = offset
            if g < n - 1:
                length[g] += size
        elif touches_below:
            length[g - 1] += size
        else:
            start[g + 1 : n + 1] = start[g:n]
            length[g + 1 : n + 1] = length[g:n]
            start[g], length[g] = offset, size
            self.num_gaps = n + 1


def neighbour_orders(instance: Instance) -> tuple[tuple[str, IntArray], ...]:
    """Return the orders that need the overlap index, by name; ties end at the buffer's number."""
    lower, size = instance.lower, instance.size
    duration = instance.upper - lower
    area = size.astype(np.float64) * duration
    return (
        ("size", np.lexsort((lower, -duration, -size))),
        ("size x duration", np.lexsort((-size, -area))),
        ("size x sqrt(duration)", np.lexsort((lower, -size * np.sqrt(duration)))),
        ("duration", np.lexsort((-size, -duration))),
    )


def neighbour_work(instance: Instance) -> int:
    """Return the work of placing all buffers in one order, in examined neighbours."""
    by_start = np.sort(instance.lower)
    n = by_start.size
    step = _checkpoint_step(n)
    block_begin = np.arange(0, n, step)
    num_live = block_begin - np.searchsorted(
        np.sort(instance.upper), by_start[block_begin], side="right"
    )
    in_range = np.searchsorted(by_start, instance.upper) - np.searchsorted(by_start, instance.lower)
    of_blocks = int((num_live * np.minimum(step, n - block_begin)).sum())
    return of_blocks + int(in_range.sum()) + n * (step // 2 + _WORK_PER_PLACEMENT)


def _checkpoint_step(num_buffers: int) -> int:
    # The square root balances the live sets at the checkpoints with the ranges between them.
    return max(32, isqrt(num_buffers))


@dataclass(frozen=True, slots=True, eq=False)
class OverlapIndex:
    """An index of the buffers that overlap a buffer; shared by all orders.

    A *position* is a place in the order by start. rank[i] is the position of buffer i; lower, upper
    and size are columns by position. live_at[k] are the positions before k * step that are live
    where the buffer at position k * step starts. No position from end[p] on overlaps position p.
    """

    rank: IntArray
    lower: IntArray
    upper: IntArray
    size: IntArray
    end: IntArray
    step: int
    live_at: tuple[IntArray, ...]

    @classmethod
    def build(cls, instance: Instance) -> OverlapIndex:
        """Build the index in O(n sqrt(n)) array work."""
        by_start = np.argsort(instance.lower, kind="stable")
        lower, upper = instance.lower[by_start], instance.upper[by_start]
        n = by_start.size
        rank = np.empty(n, np.int64)
        rank[by_start] = np.arange(n)
        step = _checkpoint_step(n)
        live = np.zeros(0, np.int64)
        live_at = [live]
        for begin in range(step, n, step):
            # Live here: what was live at the checkpoint before, or started since, and has not
            # ended.
            live = np.concatenate((live, np.arange(begin - step, begin)))
            live = live[upper[live] > lower[begin]]
            live_at.append(live)
        end = np.searchsorted(lower, upper)
        return cls(rank, lower, upper, instance.size[by_start], end, step, tuple(live_at))

    def near(self, p: int, placed_upper: IntArray) -> IntArray:
        """Return the positions of the placed buffers that are live when p is.

        `placed_upper` is the end of each buffer, or below all starts where it is not placed.
        """
        lower, block = self.lower[p], p // self.step
        begin = block * self.step
        # They started before the block and are live at its begin, or start from there until p ends.
        earlier = self.live_at[block]
        earlier = earlier[placed_upper[earlier] > lower]
        later = (placed_upper[begin : self.end[p]] > lower).nonzero()[0] + begin
        return np.concatenate((earlier, later))


def place(instance: Instance, index: OverlapIndex, order: IntArray, limit: int) -> IntArray | None:
    """First-fit in the given order of buffers.

    Returns None as soon as a buffer would end at or above `limit`.
    """
    n, size = order.size, index.size.tolist()
    # What is not placed yet ends before everything: one comparison tells placed and overlapping.
    placed_upper = np.full(n, -1, np.int64)
    offset, top = np.zeros(n, np.int64), np.zeros(n, np.int64)
    for p in index.rank[order].tolist():
        near = index.near(p, placed_upper)
        x = lowest_fit(offset[near], top[near], size[p])
        if x + size[p] >= limit:
            return None
        offset[p], top[p], placed_upper[p] = x, x + size[p], index.upper[p]
    return offset[index.rank]


def lowest_fit(offset: IntArray, top: IntArray, size: int) -> int:
    """Return the lowest x where [x, x + size) meets none of the ranges [offset, top)."""
    if offset.size == 0:
        return 0
    by_offset = offset.argsort()
    offset = offset[by_offset]
    # The lowest gap is the one under all ranges.
    if offset[0] >= size:
        return 0
    # A running maximum: ranges that do not overlap each other in time may nest in address.
    top = np.maximum.accumulate(top[by_offset])
    fits = offset[1:] - top[:-1] >= size
    gap = int(fits.argmax()) if fits.size else 0
    return int(top[gap]) if fits.size and fits[gap] else int(top[-1])


# Sets are the bits of integers, of which an intersection takes some 0.1 us. Buffers are numbered by
# *rank*, their place in a preorder, so that the lowest bit of a set is its best buffer.


@dataclass(frozen=True, slots=True, eq=False)
class BufferSets:
    """An instance in the order of a preorder, with its sets; indexed by rank or by section.

    lower, upper, size: columns by rank. starting_from[s] holds the buffers that start at section s
    or later, ending_by[s] those that end at s or earlier, covering[s] those live in section s.
    alike[i] holds the buffers that equal buffer i, itself included. full holds all.
    """

    lower: tuple[int, ...]
    upper: tuple[int, ...]
    size: tuple[int, ...]
    starting_from: tuple[int, ...]
    ending_by: tuple[int, ...]
    covering: tuple[int, ...]
    alike: tuple[int, ...]
    full: int

    @classmethod
    def build(cls, instance: Instance, order: IntArray) -> BufferSets:
        """Build the sets in O((n + sections) n / 64) words of work."""
        lower = tuple(instance.lower[order].tolist())
        upper = tuple(instance.upper[order].tolist())
        size = tuple(instance.size[order].tolist())
        num_sections, full = instance.num_sections, (1 << len(size)) - 1
        starts, ends = [0] * (num_sections + 1), [0] * (num_sections + 1)
        of_shape: dict[tuple[int, int, int], int] = {}
        shapes = tuple(zip(lower, upper, size, strict=True))
        for i, shape in enumerate(shapes):
            starts[shape[0]] |= 1 << i
            ends[shape[1]] |= 1 << i
            of_shape[shape] = of_shape.get(shape, 0) | 1 << i
        # Unions by prefix: `ends` upwards in time, `starts` downwards.
        for s in range(num_sections):
            ends[s + 1] |= ends[s]
            starts[-s - 2] |= starts[-s - 1]
        # Live in s is what neither starts after it nor has ended by its begin.
        covering = tuple([full & ~starts[s + 1] & ~ends[s] for s in range(num_sections)])
        alike = tuple([of_shape[shape] for shape in shapes])
        return cls(lower, upper, size, tuple(starts), tuple(ends), covering, alike, full)

    def within(self, buffers: int, start: int, end: int) -> int:
        """Return those of `buffers` that are live within [start, end) only."""
        return buffers & self.starting_from[start] & self.ending_by[end]

    def least_size(self, buffers: int, limit: int) -> int:
        """Return the smallest size in a set, or `limit` where that is smaller."""
        return min([limit, *[self.size[i] for i in members(buffers)]])


def members(buffers: int) -> Iterator[int]:
    """Yield the ranks in a set, ascending."""
    while buffers:
        # In two's complement x & -x is the lowest bit that is set.
        lowest = buffers & -buffers
        yield lowest.bit_length() - 1
        buffers ^= lowest


# First-fit outwards from the step with the most live bytes. What is live there is stacked without a
# gap, so that no byte is lost where each counts. Then come the buffers after it, by start, and then
# those before it, by end. In a training graph what is made first is used last: stacked with the
# longest at the bottom, the live set shrinks from the top on both sides.


def stacks(instance: Instance) -> tuple[tuple[str, IntArray], ...]:
    """Return orders, by name, in which to stack what is live at the peak, from below."""
    lower, upper, size = instance.lower, instance.upper, instance.size
    peak = int(live_per_section(instance).argmax())
    live = np.flatnonzero((lower <= peak) & (upper > peak))
    keys = (("end", -upper), ("start", lower), ("size x duration", (lower - upper) * size))
    return tuple([(name, live[np.lexsort((-size[live], key[live]))]) for name, key in keys])


def sweep_outwards(instance: Instance, stack: IntArray, limit: int) -> IntArray | None:
    """First-fit outwards from a stack of all buffers live at one step; O(gaps) per buffer.

    Returns None as soon as a buffer would end at or above `limit`.
    """
    offsets = np.zeros(instance.size.size, np.int64)
    # Exclusive prefix sums: each lies on those before it.
    offsets[stack] = np.cumsum(instance.size[stack]) - instance.size[stack]
    if instance.size[stack].sum() >= limit:
        return None
    lower, upper = instance.lower, instance.upper
    # Forwards what starts after all of the stack, then with time negated what ends before it.
    for lo, up in ((lower, upper), (-upper, -lower)):
        rest = np.flatnonzero(lo > lo[stack].max())
        if not sweep_onto(stack, rest, (lo, up, instance.size), offsets, limit):
            return None
    return offsets
