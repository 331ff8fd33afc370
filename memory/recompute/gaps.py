"""The gaps of a schedule: where a buffer lies idle between two uses, and so could be dropped."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from memory.liveness import IntArray
from memory.recompute.schedule import RecomputeSchedule

FloatArray = npt.NDArray[np.float64]


class DroppableGaps:
    """The droppable gaps as columns, one row each; the row of a gap that is gone has size 0.

    buffer: who lies idle. slot: the use that ends the gap. first: the first slot that dropping
    frees; [first, slot) is freed. size: bytes. cost: the time that dropping costs as far as known,
    at first that of the buffer's maker alone; whoever learns better writes it.
    """

    def __init__(self, schedule: RecomputeSchedule) -> None:
        self._schedule = schedule
        self._rows: list[dict[tuple[int, int], int]] = [{} for _ in schedule.problem.size_bytes]
        self._free: list[int] = []
        self._num_rows = 0
        self.buffer: IntArray = np.zeros(64, np.int64)
        self.first: IntArray = np.zeros(64, np.int64)
        self.slot: IntArray = np.zeros(64, np.int64)
        self.size: IntArray = np.zeros(64, np.int64)
        self.cost: FloatArray = np.zeros(64)

    def refresh(self) -> None:
        """Bring the rows up to date with the schedule; O(uses of the buffers that changed)."""
        schedule = self._schedule
        for b in schedule.changed:
            if schedule.maker[b] >= 0 and schedule.problem.size_bytes[b]:
                self._refresh_buffer(b)
        schedule.changed.clear()

    def rows(self, op: int, slot: int) -> list[int]:
        """Return the rows of the gaps that end at a slot and whose buffers the op makes."""
        rows = [self._rows[b] for b in self._schedule.writes[op]]
        return [row for gaps in rows for (_, end), row in gaps.items() if end == slot]

    def gains(self, excess: IntArray) -> FloatArray:
        """Return per row about how much excess dropping it covers, in bytes times slots.

        The excess of a slot is what its bytes exceed a limit by. O(rows + slots).
        """
        num_over = np.concatenate(([0], np.cumsum(excess > 0)))
        covered = num_over[self.slot] - num_over[self.first]
        gains: FloatArray = np.minimum(self.size, excess.max()) * covered.astype(np.float64)
        return gains

    def _refresh_buffer(self, b: int) -> None:
        uses, makings = self._schedule.uses[b], self._schedule.makings[b]
        old = self._rows[b]
        gaps = [
            (before, slot)
            for before, slot in pairwise(uses)
            if slot not in makings and slot > before + 1
        ]
        new = {gap: old[gap] for gap in gaps if gap in old}
        for gap, row in old.items():
            if gap not in new:
                self.size[row] = 0
                self._free.append(row)
        for gap in gaps:
            if gap not in new:
                new[gap] = self._enter(b, *gap)
        self._rows[b] = new

    def _enter(self, b: int, before: int, slot: int) -> int:
        row = self._free.pop() if self._free else self._num_rows
        if row == self._num_rows:
            self._num_rows += 1
            if row == self.size.size:
                self._grow()
        schedule = self._schedule
        self.buffer[row] = b
        # A slot with a group may end long after its last access to the buffer: that part counts.
        self.first[row] = before if schedule.groups[before] else before + 1
        self.slot[row] = slot
        self.size[row] = schedule.problem.size_bytes[b]
        self.cost[row] = schedule.problem.ops[schedule.maker[b]].duration
        return row

    def _grow(self) -> None:
        for name in ("buffer", "first", "slot", "size", "cost"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate((column, np.zeros_like(column))))
