"""Live intervals: from when to when a buffer holds bytes, and how many bytes live at each step.

The lower bound of every placement comes from here: at the step with the most live bytes all of them
need addresses of their own, so no placement for this order has a smaller peak.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int64]
"""One-dimensional int64: a column with one entry per buffer, step or event."""

_MAX_TOTAL_BYTES = 1 << 61
"""Sums of sizes stay below this, so that int64 sums of two of them cannot overflow."""


def as_intervals(
    lower: npt.ArrayLike, upper: npt.ArrayLike, size: npt.ArrayLike
) -> tuple[IntArray, IntArray, IntArray]:
    """Check one column each of starts, ends and bytes, and return them as int64 arrays.

    Raises:
        ValueError: the columns differ in length, are not integers, an interval ends before it
            starts, a size is negative, or all sizes together reach 2^61 bytes.
    """
    columns = [
        as_column(values, name)
        for values, name in ((lower, "lower"), (upper, "upper"), (size, "size"))
    ]
    lo, up, sz = columns
    if not lo.size == up.size == sz.size:
        raise ValueError(
            f"expected lower, upper and size of one length, got {lo.size}, {up.size} and {sz.size}"
        )
    for bad, what in ((lo > up, "ends before it starts"), (sz < 0, "has a negative size")):
        if bad.any():
            i = int(bad.argmax())
            raise ValueError(f"buffer {i} {what}: [{lo[i]}, {up[i]}) of {sz[i]} bytes")
    # In float64, which cannot overflow: in int64 the sum itself might wrap around.
    if sz.sum(dtype=np.float64) >= _MAX_TOTAL_BYTES:
        raise ValueError("the sizes add up to 2^61 bytes or more: are they really in bytes?")
    return lo, up, sz


def align_up(size_bytes: int, alignment: int) -> int:
    """Round bytes up to a multiple of the alignment."""
    # The negative floor division is a ceiling.
    return -(-size_bytes // alignment) * alignment


def as_column(values: npt.ArrayLike, name: str) -> IntArray:
    """Return `values` as a one-dimensional int64 array.

    Raises:
        ValueError: they are not one-dimensional or not integers of 64 bits.
    """
    column = np.asarray(values)
    if column.ndim == 1 and column.size == 0:
        return np.zeros(0, np.int64)
    if column.ndim != 1 or column.dtype.kind not in "iu":
        raise ValueError(
            f"expected {name} as a one-dimensional sequence of 64-bit integers, got "
            f"{column.ndim} dimensions of {column.dtype}"
        )
    return column.astype(np.int64, copy=False)


def lifetimes(
    num_steps: int,
    reads: Sequence[Sequence[int]],
    writes: Sequence[Sequence[int]],
    num_buffers: int,
    *,
    live_out: Iterable[int] = (),
    live_in: Iterable[int] = (),
) -> tuple[IntArray, IntArray]:
    """Return the half-open live interval of each buffer as (lower, upper).

    A buffer lives from the first step that writes it to after the last step that reads or writes
    it; one that is written and never read lives for that one step. `live_in` buffers hold bytes
    before step 0, `live_out` buffers still hold them after the last step; one that is both lives
    over the whole horizon [0, num_steps). A buffer that nothing touches and that is not live in has
    the empty interval [0, 0). O(E) for E reads and writes.

    Args:
        num_steps: the number of steps.
        reads: per step, the buffers it reads.
        writes: per step, the buffers it writes (scratch memory is written).
        num_buffers: buffers are numbered 0 .. num_buffers - 1.
        live_out: buffers that are read after the last step.
        live_in: buffers that are written before the first step.

    Raises:
        ValueError: a step reads, or `live_out` names, a buffer that nothing has written; or an
            index is out of range.
    """
    write_step, write_buffer = _accesses(num_steps, writes, num_buffers, "writes")
    read_step, read_buffer = _accesses(num_steps, reads, num_buffers, "reads")
    first_write = np.full(num_buffers, num_steps, np.int64)
    # `minimum.at` is unbuffered: several steps may write one buffer.
    np.minimum.at(first_write, write_buffer, write_step)
    is_live_in = _mask(num_buffers, live_in, "live_in")
    # -1: before any step, so that a read in step 0 is not too early.
    lower = np.where(is_live_in, -1, first_write)

    # `>=`: a read in the step of the first write does not find it yet.
    too_early = lower[read_buffer] >= read_step
    if too_early.any():
        i = int(too_early.argmax())
        raise ValueError(
            f"step {read_step[i]} reads buffer {read_buffer[i]}, which no earlier step writes: "
            "add the step that writes it, or list it in live_in"
        )
    is_live_out = _mask(num_buffers, live_out, "live_out")
    is_missing = is_live_out & ~is_live_in & (first_write == num_steps)
    if is_missing.any():
        raise ValueError(
            f"live_out names buffer {int(is_missing.argmax())}, which no step writes: "
            "add the step that writes it, or list it in live_in"
        )

    upper = np.zeros(num_buffers, np.int64)
    np.maximum.at(upper, write_buffer, write_step + 1)
    np.maximum.at(upper, read_buffer, read_step + 1)
    upper[is_live_out] = num_steps
    # Also what nothing touches, whose interval is then [0, 0).
    lower[is_live_in | (upper == 0)] = 0
    return lower, upper


def live_bytes(
    lower: npt.ArrayLike, upper: npt.ArrayLike, size: npt.ArrayLike
) -> tuple[IntArray, IntArray]:
    """Return the profile (times, bytes): bytes[i] are live from times[i] until times[i + 1].

    Times are the distinct starts and ends of the buffers that occupy bytes, ascending; the last
    entry is always 0 bytes. Both are empty where no buffer occupies bytes. O(n log n).

    Raises:
        ValueError: as for `as_intervals`.
    """
    lo, up, sz = as_intervals(lower, upper, size)
    occupies = (up > lo) & (sz > 0)
    lo, up, sz = lo[occupies], up[occupies], sz[occupies]
    times, event = np.unique(np.concatenate((lo, up)), return_inverse=True)
    change = np.zeros(times.size, np.int64)
    np.add.at(change, event, np.concatenate((sz, -sz)))
    return times, np.cumsum(change)


def lower_bound(lower: npt.ArrayLike, upper: npt.ArrayLike, size: npt.ArrayLike) -> tuple[int, int]:
    """Return (the most live bytes, the first step with that many); (0, 0) where nothing lives.

    No placement of these intervals has a peak below it. O(n log n).

    Raises:
        ValueError: as for `as_intervals`.
    """
    times, profile = live_bytes(lower, upper, size)
    if times.size == 0:
        return 0, 0
    # `argmax` returns the first of equal ones.
    peak = int(profile.argmax())
    return int(profile[peak]), int(times[peak])


def _accesses(
    num_steps: int, per_step: Sequence[Sequence[int]], num_buffers: int, name: str
) -> tuple[IntArray, IntArray]:
    """Flatten the accesses per step into (step, buffer), one entry per access."""
    if len(per_step) != num_steps:
        raise ValueError(f"expected {name} for {num_steps} steps, got {len(per_step)}")
    counts = np.fromiter(map(len, per_step), np.int64, num_steps)
    buffers = np.fromiter(chain.from_iterable(per_step), np.int64, int(counts.sum()))
    _check_range(buffers, num_buffers, name)
    return np.repeat(np.arange(num_steps), counts), buffers


def _mask(num_buffers: int, buffers: Iterable[int], name: str) -> npt.NDArray[np.bool_]:
    indices = np.fromiter(buffers, np.int64)
    _check_range(indices, num_buffers, name)
    mask = np.zeros(num_buffers, np.bool_)
    mask[indices] = True
    return mask


def _check_range(buffers: IntArray, num_buffers: int, name: str) -> None:
    outside = (buffers < 0) | (buffers >= num_buffers)
    if outside.any():
        raise ValueError(
            f"{name} names buffer {buffers[int(outside.argmax())]}, "
            f"but there are {num_buffers} buffers"
        )
