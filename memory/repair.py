"""Repair of a packing: what ends above a capacity is put back among the rest.

A buffer that fits nowhere takes the place where the buffers in its way weigh least, and these are
put back in turn, first out, first in (ejection chains: Glover 1996). A buffer's weight is its size
times the square root of its lifetime. It grows whenever the buffer does not fit or is in the way,
so that those hard to place stay and the easy ones move (Nagata, Braysy 2009). That suits pipelines,
which have a narrow place in each period: first-fit never takes a decision back.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from memory.liveness import IntArray
from memory.packing import Instance, OverlapIndex, SectionPacking, WorkBudget, lowest_fit

_IN_WAY, _UNPLACED = 10, 5
"""A buffer's weight grows by one such part of its first weight. Weights are integers, whose sums
are equal in any order, and so on every machine."""

_WORK_PER_MOVE, _WORK_PER_NEIGHBOUR = 2500, 7
"""Work of a move: about 50 us, and 0.14 us for each buffer that is live when the moved one is."""


def repair(
    instance: Instance, offsets: IntArray, best: SectionPacking, target: int, work: WorkBudget
) -> SectionPacking:
    """Return a packing whose peak is at most `target`, or as near to it as the work allows.

    It is repaired from the packing `offsets`. Returns `best` itself where none better is found.
    """
    granule = int(np.gcd.reduce(instance.size))
    low = capacity = max(instance.bound, target - target % granule)
    moves = _Moves(instance, offsets, capacity)
    while low < best.peak and work.done < work.limit:
        # A sixth of what is left: a capacity within reach takes few moves.
        if moves.run(capacity, work, work.done + (work.limit - work.done) // 6 + 1):
            offsets = moves.offset[moves.index.rank]
            best = SectionPacking(offsets, int((offsets + instance.size).max()), "repair")
        else:
            low = capacity + granule
        middle = low + (best.peak - granule - low) // 2 // granule * granule
        # After a failure the moves go on from where they are: less is left to put back.
        if middle < capacity:
            moves.load(best.offsets, middle)
        capacity = middle
    return best


class _Moves:
    """A packing with holes, and the buffers that are to be put back; columns are by position."""

    def __init__(self, instance: Instance, offsets: IntArray, capacity: int) -> None:
        self.index = OverlapIndex.build(instance)
        share = self.index.size / self.index.size.max()
        lifetime = np.sqrt(self.index.upper - self.index.lower)
        self.first_weight = (1024 * share * lifetime).astype(np.int64) + _IN_WAY
        self.weight = self.first_weight.copy()
        self.load(offsets, capacity)

    def load(self, offsets: IntArray, capacity: int) -> None:
        """Take a packing, without what ends above the capacity."""
        self.offset = np.empty_like(offsets)
        self.offset[self.index.rank] = offsets
        self.top = self.offset + self.index.size
        self.placed_upper = np.where(self.top > capacity, -1, self.index.upper)
        above = np.flatnonzero(self.top > capacity)
        self.unplaced = deque(above[np.argsort(-self.first_weight[above], kind="stable")].tolist())

    def run(self, capacity: int, work: WorkBudget, limit: int) -> bool:
        """Put back one buffer after the other; return whether all are placed at the limit."""
        while self.unplaced and work.done < limit:
            p = self.unplaced.popleft()
            size, near = int(self.index.size[p]), self.index.near(p, self.placed_upper)
            work.done += _WORK_PER_MOVE + _WORK_PER_NEIGHBOUR * near.size
            offset, top = self.offset[near], self.top[near]
            x = lowest_fit(offset, top, size)
            if x + size > capacity:
                x = _lightest(offset, top, self.weight[near], size, capacity)
                in_way = near[(offset < x + size) & (top > x)]
                self.weight[in_way] += self.first_weight[in_way] // _IN_WAY
                self.weight[p] += self.first_weight[p] // _UNPLACED
                self.placed_upper[in_way] = -1
                self.unplaced.extend(in_way.tolist())
            self.offset[p], self.top[p], self.placed_upper[p] = x, x + size, self.index.upper[p]
        return not self.unplaced


def _lightest(offset: IntArray, top: IntArray, weight: IntArray, size: int, capacity: int) -> int:
    """Return the x where the ranges [offset, top) that meet [x, x + size) weigh least."""
    by_offset, by_top = offset.argsort(), top.argsort()
    starts, ends = offset[by_offset], top[by_top]
    begun = np.concatenate(([0], weight[by_offset].cumsum()))
    ended = np.concatenate(([0], weight[by_top].cumsum()))
    # The weight changes only where the range begins at an end, or ends at a start.
    x = np.concatenate((ends, starts - size, [0, capacity - size]))
    x = x[(x >= 0) & (x <= capacity - size)]
    met = begun[starts.searchsorted(x + size)] - ended[ends.searchsorted(x, side="right")]
    return int(x[met.argmin()])
