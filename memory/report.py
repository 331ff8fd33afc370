"""The memory of a plan in words: where the peak is, and which registers hold it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from memory.liveness import as_column, as_intervals, lower_bound

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def format_bytes(num_bytes: int) -> str:
    """Return a size for people: whole bytes below 1 KiB, else one decimal in a binary unit."""
    if abs(num_bytes) < 1024:
        return f"{num_bytes} B"
    value = num_bytes / 1024
    for unit in _UNITS:
        # 1023.96 would print as 1024.0: it belongs to the next unit.
        if abs(value) < 1023.95 or unit == _UNITS[-1]:
            return f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("the last unit takes any value")


def exact_bytes(num_bytes: int) -> str:
    """Return a size for people and for a program: 1.2 MiB (1,234,567 bytes)."""
    if abs(num_bytes) < 1024:
        return format_bytes(num_bytes)
    return f"{format_bytes(num_bytes)} ({num_bytes:,} bytes)"


def memory_table(
    names: Sequence[str],
    lower: npt.ArrayLike,
    upper: npt.ArrayLike,
    size: npt.ArrayLike,
    offsets: npt.ArrayLike,
    *,
    top: int = 10,
) -> tuple[str, ...]:
    """Return lines of plain text: the peak step, and the tensors that hold the peak, largest first.

    The arena is what the offsets need. The peak is the first step with the most live bytes, and
    each of the `top` largest tensors live there gets a line with its share, size, interval, offset
    and name; the others share one line.

    Raises:
        ValueError: the columns differ in length or are not intervals.
    """
    lo, up, sz = as_intervals(lower, upper, size)
    at = as_column(offsets, "offsets")
    if not len(names) == at.size == lo.size:
        raise ValueError(
            f"expected a name and an offset for each of {lo.size} buffers, "
            f"got {len(names)} and {at.size}"
        )
    live, step = lower_bound(lo, up, sz)
    if live == 0:
        return ("memory: nothing occupies a byte",)
    arena = int((at + sz)[(up > lo) & (sz > 0)].max())
    at_peak = np.flatnonzero((lo <= step) & (step < up) & (sz > 0))
    at_peak = at_peak[np.argsort(-sz[at_peak], kind="stable")]
    lines = [
        f"memory: arena {format_bytes(arena)}, {arena / live - 1:.1%} above the peak of live bytes",
        f"peak: step {step}, {at_peak.size} tensors of {format_bytes(live)} are live",
        f"{'share':>8}  {'size':>11}  {'live':<16}  {'offset':>14}  tensor",
    ]
    for i in at_peak[:top].tolist():
        share, interval = f"{sz[i] / live:.1%}", f"[{lo[i]}, {up[i]})"
        size_text = format_bytes(int(sz[i]))
        lines.append(f"{share:>8}  {size_text:>11}  {interval:<16}  {at[i]:>14}  {names[i]}")
    others = at_peak[top:]
    if others.size:
        total = int(sz[others].sum())
        lines.append(f"{total / live:>8.1%}  {format_bytes(total):>11}  in {others.size} others")
    return tuple(lines)
