"""An instance of the placement problem, stripped to what decides it.

Left out: buffers that occupy no bytes, and those over the whole horizon, which lie at the bottom of
every best packing. Time is merged into *sections*: walking through the events with ends before
starts, a new section opens only at a start that follows an end. Which buffers overlap and the lower
bound stay as they were, and there are fewer sections than events.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memory.liveness import IntArray, lower_bound


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


@dataclass(frozen=True, slots=True, eq=False)
class SectionPacking:
    """One offset per buffer of an instance, the highest end among them, and who found it."""

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
    num_ended = np.searchsorted(np.sort(upper), starts, side="right")
    opens = np.concatenate(([0], (np.diff(num_ended) > 0).astype(np.int64)))
    section = np.cumsum(opens)
    section_lower = section[np.searchsorted(starts, lower)]
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
