"""First-fit outwards from the step with the most live bytes.

What is live there is stacked without a gap, so that no byte is lost where every byte counts. Then
come the buffers after it, by start, and those before it, by end, as two sweeps over time. Buffers
of a training graph nest: what is made first is used last. Stacked with the longest at the bottom,
the live set shrinks from the top on both sides.
"""

from __future__ import annotations

import numpy as np

from memory.first_fit import sweep_onto
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
        rest = np.flatnonzero(lo > lo[stack].max())
        if not sweep_onto(stack, rest, (lo, up, instance.size), offsets, limit):
            return None
    return offsets
