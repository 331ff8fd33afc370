"""How long a launch takes: the quantities of its work at the rates of a machine.

Time = calls + inner loops + passes over cached bytes + products + what the caches do not hold. The
last is charged by *reuse distance*: the bytes touched since these bytes were touched last (Mattson,
Gecsei, Slutz & Traiger 1970), which decides the level of the hierarchy that still has them.

The planner prices with `REFERENCE`, the same on every machine, because plans must not depend on the
machine that made them; the simulator prices with measured rates (`calibration`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from actors.kernels.c_rates import CRates
from actors.kernels.kernel import KernelNeeds, Operand, Operands
from actors.kernels.work import BytePass, MatrixProduct, Work

EXTENTS = (1, 16, 64, 256, 1024)
"""Extents of the measured products; rates in between are interpolated, beyond they stay."""

DISTANCES_BYTES = (1 << 20, 4 << 20, 16 << 20, 32 << 20, 64 << 20)
"""Reuse distances with a measured rate; below the first nothing is charged."""

_PLACE = {sort: place for place, sort in enumerate(BytePass)}
_LOG_EXTENTS = tuple([math.log(extent) for extent in EXTENTS])
_LOG_DISTANCES = tuple([math.log(distance) for distance in (1 << 19, *DISTANCES_BYTES)])


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine needs for a unit of each quantity of work.

    `pass_ns` is per byte, by `BytePass`; `miss_ns` per byte that was last touched each of
    `DISTANCES_BYTES` ago; `flops_per_ns` of a product [m, k] [k, n] for m, n, k in `EXTENTS`, k
    fastest. `in_c` is what native launches need, where they were measured;
    `blas_threads` are those that numpy's products keep busy.
    """

    call_ns: float
    loop_ns: float
    pass_ns: tuple[float, ...]
    miss_ns: tuple[float, ...]
    flops_per_ns: tuple[float, ...]
    in_c: CRates | None = None
    blas_threads: float = 1.0

    def pass_ns_of(self, sort: BytePass) -> float:
        """Return the time per byte of one sort of pass."""
        return self.pass_ns[_PLACE[sort]]

    def miss_ns_at(self, distance_bytes: float) -> float:
        """Return the time per byte at a reuse distance, linear in its logarithm."""
        return _interpolate(_LOG_DISTANCES, (0.0, *self.miss_ns), math.log(max(distance_bytes, 1)))

    def product_ns(self, item: MatrixProduct) -> float:
        """Return the time of products; the logarithm of the rate is trilinear in the extents'."""
        if not item.flops:
            return 0.0
        corners = [_corners(extent) for extent in (item.m, item.n, item.k)]
        rate = 0.0
        for (i, u), (j, v), (k, w) in product(*corners):
            place = (i * len(EXTENTS) + j) * len(EXTENTS) + k
            rate += u * v * w * math.log(self.flops_per_ns[place])
        return item.flops / math.exp(rate)

    def work_ns(self, work: Work) -> float:
        """Return the time of work on operands that are in cache."""
        return (
            work.calls * self.call_ns
            + work.loops * self.loop_ns
            + sum([size * self.pass_ns_of(sort) for sort, size in work.passes])
            + sum([self.product_ns(item) for item in work.products])
        )


def _interpolate(places: tuple[float, ...], values: tuple[float, ...], x: float) -> float:
    """Return the value at x of a piecewise linear function that is constant outside."""
    right = bisect_right(places, x)
    if right == 0:
        return values[0]
    if right == len(places):
        return values[-1]
    share = (x - places[right - 1]) / (places[right] - places[right - 1])
    return values[right - 1] * (1 - share) + values[right] * share


def _corners(extent: int) -> tuple[tuple[int, float], ...]:
    """Return the measured extents around one, with their weights."""
    x = math.log(max(extent, 1))
    right = min(bisect_right(_LOG_EXTENTS, x), len(EXTENTS) - 1)
    low, high = _LOG_EXTENTS[right - 1], _LOG_EXTENTS[right]
    share = min((x - low) / (high - low), 1.0)
    return (right - 1, 1.0 - share), (right, share)


def _reference_flops_per_ns() -> tuple[float, ...]:
    """Return a smooth stand-in for a server core: half of the peak at m = 8, n = 24, k = 32."""
    return tuple(
        [
            200.0 * m / (m + 8) * n / (n + 24) * k / (k + 32)
            for m, n, k in product(EXTENTS, repeat=3)
        ]
    )


REFERENCE = Rates(
    call_ns=1000.0,
    loop_ns=20.0,
    pass_ns=(0.025, 0.035, 0.045, 0.1, 0.15, 0.1, 0.17, 0.05, 0.3, 0.1, 0.4, 0.5),
    miss_ns=(0.002, 0.004, 0.01, 0.02, 0.03),
    flops_per_ns=_reference_flops_per_ns(),
)
"""Rounded rates of a server of 2024 with two cores; the planner only compares what they give."""


def footprint_bytes(operand: Operand) -> int:
    """Return the bytes an operand touches; repeated axes count once."""
    extents = [n for n, s in zip(operand.shape, operand.strides_bytes, strict=True) if s]
    return math.prod(extents) * operand.dtype.itemsize


def needs(
    inputs: Operands,
    outputs: Operands,
    work: Work,
    workspace_bytes: int = 0,
    in_place: tuple[tuple[int, int], ...] = (),
) -> KernelNeeds:
    """Return what a call needs, its duration as if it were repeated at the reference rates."""
    duration = duration_ns(swept((*inputs, *outputs), work), work, REFERENCE)
    return KernelNeeds(workspace_bytes, in_place, duration, work)


def swept(operands: Operands, work: Work) -> Operands:
    """Return the operands that the work reads or writes as a whole."""
    return tuple([x for index, x in enumerate(operands) if index not in work.unswept])


def duration_ns(operands: Iterable[Operand], work: Work, rates: Rates) -> float:
    """Return the time of a launch that is repeated on the same operands."""
    total = sum([footprint_bytes(operand) for operand in operands])
    return rates.work_ns(work) + total * rates.miss_ns_at(total)
