"""A proof that no two live buffers share a byte, independent of the planner.

A sweep over the starts keeps the live buffers sorted by offset. As long as no two of them overlap,
a new one can only meet its neighbours below and above, so two comparisons per buffer are a complete
check. Nothing here is shared with the code it checks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush


class OverlapError(ValueError):
    """A placement is wrong: two live buffers share bytes, or one lies outside or off the grid.

    `buffers` are the indices of those at fault: two that overlap, or one.
    """

    def __init__(self, message: str, *, buffers: tuple[int, ...]) -> None:
        super().__init__(message)
        self.buffers = buffers


def check_no_overlap(
    offsets: Iterable[int],
    lower: Iterable[int],
    upper: Iterable[int],
    size: Iterable[int],
    arena_bytes: int,
    *,
    alignment: int = 1,
) -> None:
    """Check a placement of buffers with half-open live intervals [lower, upper).

    Every buffer must lie within [0, arena_bytes) at a multiple of `alignment`, and no two that are
    live at the same step may share a byte. Buffers of no bytes or with an empty interval occupy
    nothing. O(n log n), plus moves within a list as long as the live set. Arrays of integers are
    welcome.

    Raises:
        OverlapError: naming the buffers, their intervals and their address ranges.
        ValueError: the columns differ in length.
    """
    columns = [list(map(int, column)) for column in (offsets, lower, upper, size)]
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"expected offsets, lower, upper and size of one length, got {lengths[0]}, "
            f"{lengths[1]}, {lengths[2]} and {lengths[3]}"
        )
    buffers = _PlacedBuffers(*columns)
    for i in range(lengths[0]):
        fault = buffers.fault(i, arena_bytes, alignment)
        if fault:
            raise OverlapError(f"{buffers.describe(i)} {fault}", buffers=(i,))
    _sweep(buffers)


@dataclass(frozen=True, slots=True)
class _PlacedBuffers:
    """The columns, and a buffer in words."""

    at: list[int]
    first: list[int]
    last: list[int]
    size: list[int]

    def fault(self, i: int, arena_bytes: int, alignment: int) -> str:
        """Say what is wrong with buffer i alone; nothing where all is well."""
        if self.size[i] < 0 or self.last[i] < self.first[i]:
            return "has a negative size or ends before it starts"
        # Bytes that live no time reach nowhere.
        reach = self.size[i] if self.last[i] > self.first[i] else 0
        if self.at[i] < 0 or self.at[i] + reach > arena_bytes:
            return f"lies outside the arena of {arena_bytes} bytes"
        if self.at[i] % alignment:
            return f"is not aligned to {alignment} bytes"
        return ""

    def describe(self, i: int) -> str:
        """Name buffer i with its interval and address range."""
        end = self.at[i] + self.size[i]
        return f"buffer {i} (steps [{self.first[i]}, {self.last[i]}), bytes [{self.at[i]}, {end}))"


def _sweep(buffers: _PlacedBuffers) -> None:
    """Raise for the first pair, by start, that shares bytes while both are live."""
    at, first, last, size = buffers.at, buffers.first, buffers.last, buffers.size
    occupying = [i for i in range(len(at)) if size[i] > 0 and last[i] > first[i]]
    occupying.sort(key=first.__getitem__)
    ends: list[tuple[int, int]] = []
    live_at: list[int] = []  # offsets, ascending; all distinct, as none overlap
    holder: dict[int, int] = {}
    for i in occupying:
        # Intervals are half-open: what ends here is no longer live.
        while ends and ends[0][0] <= first[i]:
            del live_at[bisect_left(live_at, at[heappop(ends)[1]])]
        place = bisect_left(live_at, at[i])
        # Live buffers do not overlap, so that only the two next to this offset can.
        for offset in live_at[max(place - 1, 0) : place + 1]:
            other = holder[offset]
            if at[other] < at[i] + size[i] and at[i] < at[other] + size[other]:
                raise OverlapError(
                    f"{buffers.describe(other)} and {buffers.describe(i)} share bytes "
                    "while both are live",
                    buffers=(other, i),
                )
        live_at.insert(place, at[i])
        holder[at[i]] = i
        heappush(ends, (last[i], i))
