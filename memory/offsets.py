"""Offsets: one address per buffer, no two live buffers on one byte, the peak as low as possible.

The instance is stripped first: what occupies nothing, what lives throughout, and stretches of time
that no buffer crosses (see `memory.packing`). Each stretch is packed by ever dearer methods until
its peak is at most the lower bound of the whole: first-fit as sweeps over time, first-fit in other
orders, dissection where no byte is to be free, branch and bound, repair. What the search proves
goes into the certificate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from memory import packing
from memory.dissection import dissect
from memory.liveness import IntArray, as_intervals, lower_bound
from memory.packing import (
    Instance,
    SectionPacking,
    WorkBudget,
    components,
    make_instance,
    stacks,
    sweep_outwards,
    whole_horizon,
)
from memory.packing_search import Improved, improve, node_work
from memory.repair import repair

_MAX_TOTAL_BYTES = 1 << 61

DEFAULT_WORK = 60_000
"""Work of the search in units of about 20 us: about a second, where first-fit does not suffice."""


@dataclass(frozen=True, slots=True)
class OffsetPlan:
    """The offset of each buffer, and how good the placement is.

    offsets: bytes from the start of the arena, one per buffer, multiples of the alignment.
    peak_bytes: the size the arena must have. lower_bound_bytes: the most live bytes at any step,
    with sizes rounded up to the alignment; no placement for this order has a smaller peak.
    peak_step: the first step with that many live bytes. algorithm: who found the placement.
    certificate: what is proved about it, in words. proved_bytes: no placement for this order has a
    smaller peak; the lower bound, or more where a search was exhausted. nodes: how many the search
    visited.
    """

    offsets: tuple[int, ...]
    peak_bytes: int
    lower_bound_bytes: int
    peak_step: int
    algorithm: str
    certificate: str
    proved_bytes: int
    nodes: int

    @property
    def gap(self) -> float:
        """How far the peak lies above the lower bound, as a fraction of the bound; 0 is optimal."""
        if self.lower_bound_bytes == 0:
            return 0.0
        return self.peak_bytes / self.lower_bound_bytes - 1

    @property
    def is_optimal(self) -> bool:
        """Whether it is proved that no placement for this order has a smaller peak."""
        return self.peak_bytes == self.proved_bytes


def plan_offsets(
    lower: npt.ArrayLike,
    upper: npt.ArrayLike,
    size: npt.ArrayLike,
    *,
    alignment: int = 64,
    capacity: int | None = None,
    max_work: int = DEFAULT_WORK,
) -> OffsetPlan:
    """Place buffers with half-open live intervals [lower, upper) so that live ones share no byte.

    Sizes are rounded up to the alignment first, which aligns every offset. Buffers that occupy
    nothing (no bytes, or an empty interval) get offset 0; those that live as long as all buffers
    together lie at the bottom. Equal arguments give equal plans: the search is limited by counted
    work, not by time.

    Args:
        lower: first step of each buffer.
        upper: step after the last.
        size: bytes.
        alignment: of every offset, in bytes.
        capacity: stop as soon as the peak is at most this many bytes, and search for no less.
        max_work: limit of branch and bound, in units of about 20 us; dissection and repair have
            one in proportion. Branch and bound leaves alone what is so large that this does not
            cover one descent: at the default, above some 5,000 buffers.

    Raises:
        ValueError: the columns are not intervals (see `as_intervals`), the alignment is not
            positive, or sizes of 2^61 bytes may come of rounding up.
    """
    if alignment < 1:
        raise ValueError(f"expected an alignment of at least 1 byte, got {alignment}")
    lo, up, exact = as_intervals(lower, upper, size)
    if float(exact.sum()) + float(alignment) * max(exact.size, 1) >= _MAX_TOTAL_BYTES:
        raise ValueError(
            f"{exact.size} sizes rounded up to {alignment} bytes may add up to 2^61 bytes or more"
        )
    sz = -(-exact // alignment) * alignment
    bound, step = lower_bound(lo, up, sz)

    # What has no bytes or no time lies at 0 and takes part in nothing.
    occupies = np.flatnonzero((up > lo) & (sz > 0))
    is_bottom = whole_horizon(lo[occupies], up[occupies])
    bottom, rest = occupies[is_bottom], occupies[~is_bottom]
    base = int(sz[bottom].sum())
    target = max(bound, capacity or 0) - base
    improved = _pack(lo[rest], up[rest], sz[rest], target, max_work)

    offsets = np.zeros(lo.size, np.int64)
    # Exclusive prefix sums: what lives all the time is stacked at the bottom.
    offsets[bottom] = np.cumsum(sz[bottom]) - sz[bottom]
    offsets[rest] = improved.packing.offsets + base
    peak = base + improved.packing.peak
    # What lives all the time is in every placement: a bound of the rest holds on top of it.
    proved = max(bound, base + improved.bound)
    return OffsetPlan(
        offsets=tuple(offsets.tolist()),
        peak_bytes=peak,
        lower_bound_bytes=bound,
        peak_step=step,
        algorithm=improved.packing.algorithm,
        certificate=certificate(peak, bound, proved),
        proved_bytes=proved,
        nodes=improved.nodes,
    )


def _pack(lower: IntArray, upper: IntArray, size: IntArray, target: int, max_work: int) -> Improved:
    """Pack each stretch of time on its own; the work that is left goes to the next."""
    # Repair has a quarter of the time of branch and bound, and more for more buffers.
    moves = WorkBudget(max_work * (200 + size.size // 40))
    offsets = np.zeros(size.size, np.int64)
    peak = bound = nodes = 0
    algorithm = "stacked"
    for stretch in components(lower, upper):
        instance = make_instance(lower[stretch], upper[stretch], size[stretch])
        improved = _pack_stretch(instance, target, max_work, moves)
        max_work -= improved.nodes * node_work(stretch.size)
        offsets[stretch] = improved.packing.offsets
        bound, nodes = max(bound, improved.bound), nodes + improved.nodes
        if improved.packing.peak > peak:
            peak, algorithm = improved.packing.peak, improved.packing.algorithm
    return Improved(SectionPacking(offsets, peak, algorithm), bound, nodes)


def _pack_stretch(instance: Instance, target: int, max_work: int, moves: WorkBudget) -> Improved:
    """Return the best packing found; no method begins once a peak is at most `target`."""
    swept = packing.pack_by_sweeps(instance, target)
    for name, stack in stacks(instance) if swept.peak > target else ():
        if swept.peak > target:
            placed = sweep_outwards(instance, stack, swept.peak)
            swept = packing.better(swept, instance, placed, f"{name}, from the peak")
    best = packing.pack_by_orders(instance, swept, target)
    dissected = dissect(instance, WorkBudget(max_work * 2 // 3)) if best.peak > target else None
    packed = best if dissected is None else SectionPacking(dissected, instance.bound, "dissection")
    improved = Improved(packed, instance.bound, 0)
    max_nodes = max_work // node_work(instance.size.size)
    # A search that cannot make one descent, a node per buffer, finds nothing.
    if packed.peak > target and max_nodes >= instance.size.size:
        improved = improve(instance, packed, target, max_nodes)
    least = max(target, improved.bound)
    # With more overlaps than that, their index would take more than some 100 MB.
    if improved.packing.peak > least and packing.neighbour_work(instance) < 1 << 32:
        # More of a sweep is to be repaired than of other orders, but it is easier to repair.
        repaired = repair(instance, swept.offsets, improved.packing, least, moves)
        improved = replace(improved, packing=repaired)
    return improved


def certificate(peak: int, bound: int, proved: int) -> str:
    """Say what is proved of a peak: `bound` bytes live at once, and none below `proved` exists."""
    if peak == bound:
        return "peak = max live bytes: optimal for this order"
    if peak == proved:
        return "search exhausted at one unit less: optimal for this order"
    percent = (peak / bound - 1) * 100
    percent_text = f"{percent:.1f}" if percent >= 0.05 else f"{percent:.1g}"
    return f"gap {percent_text} % to max live bytes"
