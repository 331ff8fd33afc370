"""Offsets: one address per buffer, no two live buffers on one byte, the peak as low as possible.

First-fit in several orders, each stopped at the lower bound. A search that tries harder takes the
instance and the best packing so far and returns a packing; it is one more call in `_pack`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memory import first_fit
from memory.liveness import as_intervals, lower_bound
from memory.sections import Instance, Packing, make_instance, whole_horizon


@dataclass(frozen=True, slots=True)
class OffsetPlan:
    """Where each buffer lies, and how good that is.

    offsets: bytes from the start of the arena, one per buffer, multiples of the alignment.
    peak_bytes: the size the arena must have. lower_bound_bytes: the most live bytes at any step,
    with sizes rounded up to the alignment; no placement for this order has a smaller peak.
    peak_step: the first step with that many live bytes. algorithm: who found the placement.
    certificate: what is proved about it, in words.
    """

    offsets: tuple[int, ...]
    peak_bytes: int
    lower_bound_bytes: int
    peak_step: int
    algorithm: str
    certificate: str

    @property
    def gap(self) -> float:
        """How far the peak lies above the lower bound, as a fraction of the bound; 0 is optimal."""
        if self.lower_bound_bytes == 0:
            return 0.0
        return self.peak_bytes / self.lower_bound_bytes - 1


def plan_offsets(
    lower: npt.ArrayLike, upper: npt.ArrayLike, size: npt.ArrayLike, *, alignment: int = 64
) -> OffsetPlan:
    """Place buffers with half-open live intervals [lower, upper) so that live ones share no byte.

    Sizes are rounded up to the alignment first, which aligns every offset. Buffers that occupy
    nothing (no bytes, or an empty interval) get offset 0; those that live as long as all buffers
    together lie at the bottom. Equal arguments give equal plans: the search is limited by counted
    work, not by time. About O(n log n) for the orders by start and end, O(n m) for the others with
    m neighbours per buffer.

    Raises:
        ValueError: the columns are not intervals (see `as_intervals`), or the alignment is not
            positive.
    """
    if alignment < 1:
        raise ValueError(f"expected an alignment of at least 1 byte, got {alignment}")
    lo, up, exact = as_intervals(lower, upper, size)
    sz = -(-exact // alignment) * alignment
    bound, step = lower_bound(lo, up, sz)

    occupies = np.flatnonzero((up > lo) & (sz > 0))
    is_bottom = whole_horizon(lo[occupies], up[occupies])
    bottom, rest = occupies[is_bottom], occupies[~is_bottom]
    base = int(sz[bottom].sum())
    packing = _pack(make_instance(lo[rest], up[rest], sz[rest]))

    offsets = np.zeros(lo.size, np.int64)
    offsets[bottom] = np.cumsum(sz[bottom]) - sz[bottom]
    offsets[rest] = packing.offsets + base
    peak = base + packing.peak
    return OffsetPlan(
        offsets=tuple(offsets.tolist()),
        peak_bytes=peak,
        lower_bound_bytes=bound,
        peak_step=step,
        algorithm=packing.algorithm,
        certificate=_certificate(peak, bound),
    )


def _pack(instance: Instance) -> Packing:
    """Return the best packing found; every method stops at the lower bound."""
    if instance.size.size == 0:
        return Packing(instance.size, 0, "stacked")
    return first_fit.pack(instance)


def _certificate(peak: int, bound: int) -> str:
    if peak == bound:
        return "peak = max live bytes: optimal for this order"
    return f"gap {(peak / bound - 1) * 100:.1f} % to max live bytes"
