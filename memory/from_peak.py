"""First-fit outwards from the step with the most live bytes.

What is live there is stacked without a gap, so that no byte is lost where every byte counts. Then
come the buffers after it, by start, and those before it, by end, as two sweeps over time. Buffers
of a training graph nest: what is made first is used last. Stacked with the longest at the bottom,
the live set shrinks from the top on both sides.
"""

from __future__ import annotations

import numpy as np

from memory.first_fit import AddressGaps
from memory.liveness import IntArray
from memory.sections import Instance, live_per_section


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
    offsets[stack] = np.cumsum(instance.size[stack]) - instance.size[stack]
    if instance.size[stack].sum() >= limit:
        return None
    lower, upper = instance.lower, instance.upper
    for lo, up in ((lower, upper), (-upper, -lower)):
        if not _sweep(lo, up, instance.size, stack, offsets, limit):
            return None
    return offsets


def _sweep(
    lower: IntArray, upper: IntArray, size: IntArray, stack: IntArray, offsets: IntArray, limit: int
) -> bool:
    """Place the buffers that start after the stack does; whether all end below `limit`."""
    rest = np.flatnonzero(lower > lower[stack].max())
    by_start = rest[np.lexsort((-size[rest], lower[rest]))].tolist()
    both = np.concatenate((stack, rest))
    by_end = both[np.argsort(upper[both], kind="stable")].tolist()
    starts, ends, sizes = lower.tolist(), upper.tolist(), size.tolist()
    gaps = AddressGaps(both.size)
    gaps.take(int(size[stack].sum()))
    num_ended = 0
    for i in by_start:
        while ends[by_end[num_ended]] <= starts[i]:
            ended = by_end[num_ended]
            gaps.give(int(offsets[ended]), sizes[ended])
            num_ended += 1
        offsets[i] = offset = gaps.take(sizes[i])
        if offset + sizes[i] >= limit:
            return False
    return True
