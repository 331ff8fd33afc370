"""How long a launch takes: the quantities of its work at the rates of a machine.

Time = calls + inner loops + passes over cached bytes + products + what the caches do not hold. The
last is charged by *reuse distance*: the bytes touched since these bytes were touched last (Mattson,
Gecsei, Slutz & Traiger 1970), which decides the level of the hierarchy that still has them.

The planner prices with `REFERENCE`, the same on every machine, because plans must not depend on the
machine that made them; the simulator prices with measured rates (`host.calibration`). `Rates` are
of launches by numpy, and `CRates` of launches in C.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from actors.kernels.common.kernel import (
    BytePass,
    CWork,
    KernelNeeds,
    MatrixProduct,
    Operand,
    Operands,
    Work,
)

# Launches in C: how long one takes, and how many of the machine's cores it keeps busy.
#
# On one thread a launch takes what its passes and products take, and what its operands take to come
# from where they lie. Threads share it by pieces: with 5 pieces on 2 threads, one of them does 3.
# How much faster threads are together than one alone is measured, for passes and for products: two
# cores of a shared machine, or two halves of one, are rarely twice as fast.
#
# So `busy_ns` of a launch, its time on one thread alone, over its `duration_ns` is the share of the
# machine that it takes: what `actors.simulation.costs` divides among launches that run at once.
#
# Between two shared launches helpers spin for a while and sleep then: a shared launch after a
# longer time on one thread, or at the beginning of a chain, wakes them first.

C_EXTENTS = (1, 8, 32, 128, 512)
"""Extents of the measured products of one call; rates in between are interpolated."""

ATTENTION_ROWS, ATTENTION_WIDTHS = (32, 128, 512), (32, 64, 128)
"""Places and widths of the measured heads."""

C_DISTANCES_BYTES = (1 << 20, 4 << 20, 16 << 20, 32 << 20)
"""Reuse distances with a measured rate."""

MOVES = (BytePass.SIMPLE, BytePass.STRIDED, BytePass.GATHER, BytePass.SCATTER)
"""What moves bytes. Instructions run while more bytes are on their way: the longer one counts."""

HELPERS_SPIN_NS = 40_000.0
"""As in runtime.c: helpers without work for longer sleep."""

_CORE_SHARE = 0.9
"""What a core adds to a machine, where it was not measured."""

_PLACE = {sort: place for place, sort in enumerate(BytePass)}


@dataclass(frozen=True, slots=True)
class Price:
    """What a launch or a firing takes when it is alone, and what it would on one thread."""

    duration_ns: float
    busy_ns: float


@dataclass(frozen=True, slots=True)
class CRates:
    """What one thread of this machine needs in C, and what all of them gain.

    `call_ns` is for a launch, `open_ns` for handing pieces to the other threads, `wake_ns` for what
    that takes more where they sleep. `pass_ns` is per byte, by `BytePass`; `miss_ns` per byte that
    was last touched each of `C_DISTANCES_BYTES` ago; `flops_per_ns` of a product
    [m, k] [k, n] for m, n, k in `C_EXTENTS`, k fastest; `forward` and `backward` are flops per ns
    of attention, by `ATTENTION_ROWS` and `ATTENTION_WIDTHS`.
    `pass_speedup`, `miss_speedup` and `product_speedup`: how many times as fast as one thread all
    `num_threads` are.
    """

    num_threads: int
    call_ns: float
    open_ns: float
    wake_ns: float
    pass_speedup: float
    miss_speedup: float
    product_speedup: float
    pass_ns: tuple[float, ...]
    miss_ns: tuple[float, ...]
    flops_per_ns: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def capacity_of(self, num_cores: int) -> float:
        """Return what all cores do in the time of one, those included that no launch uses."""
        measured = max(self.pass_speedup, self.product_speedup, 1.0)
        return measured + _CORE_SHARE * max(0, num_cores - self.num_threads)

    def miss_ns_at(self, distance_bytes: float) -> float:
        """Return the time per byte at a reuse distance, on one thread."""
        places = (C_DISTANCES_BYTES[0] / 2, *C_DISTANCES_BYTES)
        return _interpolated(places, (0.0, *self.miss_ns), distance_bytes)

    def shared_miss_ns_at(self, distance_bytes: float) -> float:
        """Return the same for bytes that threads share: most were touched by another one last.

        They come from the cache of another core then, which is as far away as what all cores share.
        """
        share = 1 / self.num_threads
        far = max(distance_bytes, C_DISTANCES_BYTES[1])
        return share * self.miss_ns_at(distance_bytes) + (1 - share) * self.miss_ns_at(far)

    def moves_ns(self, work: CWork) -> float:
        """Return the time of moving operands in cache, on one thread."""
        return self._passes_ns(work, is_moving=True)

    def instructions_ns(self, work: CWork) -> float:
        """Return the time of all instructions of programs on one thread."""
        return self._passes_ns(work, is_moving=False)

    def _passes_ns(self, work: CWork, *, is_moving: bool) -> float:
        return sum(
            [n * self.pass_ns[_PLACE[s]] for s, n in work.passes if (s in MOVES) == is_moving]
        )

    def products_ns(self, work: CWork) -> float:
        """Return the time of all products and attention on one thread."""
        plain = sum([item.flops / self._rate(item) for item in work.products if item.flops])
        for items, rates in ((work.forward, self.forward), (work.backward, self.backward)):
            plain += sum([x.flops / _rate_of_heads(rates, x) for x in items])
        return plain

    def is_shared(self, work: CWork) -> bool:
        """Whether threads share a launch."""
        return work.pieces >= 2 and self.num_threads >= 2

    def price(self, work: CWork, missed_ns: float, idle_ns: float = 0.0) -> Price:
        """Return the price of a launch whose operands take `missed_ns` of one thread to arrive.

        `idle_ns` is since when the other threads have had nothing to do.
        """
        moves, products = self.moves_ns(work) + missed_ns, self.products_ns(work)
        instructions = self.instructions_ns(work)
        # A row reduction must end before its row is read again, so the two do not overlap.
        passes = moves + instructions if work.reduces_rows else max(moves, instructions)
        busy = self.call_ns + passes + products
        if not self.is_shared(work):
            return Price(busy, busy)
        speedup = self.miss_speedup if missed_ns > passes / 2 else self.pass_speedup
        duration = (
            self.call_ns
            + work.openings * self.open_ns
            + (self.wake_ns if idle_ns > HELPERS_SPIN_NS else 0.0)
            + passes / self._gain(speedup, work.pieces)
            + products / self._gain(self.product_speedup, work.pieces)
        )
        return Price(duration, busy)

    def _gain(self, speedup: float, pieces: float) -> float:
        """Return how many times as fast threads are that share some pieces."""
        threads = min(self.num_threads, pieces)
        # Threads take whole pieces: the one with most of them decides.
        ideal = pieces / math.ceil(pieces / threads)
        # What each further thread adds, as measured with all of them.
        share = (speedup - 1) / (self.num_threads - 1)
        return 1 + max(0.0, share) * (ideal - 1)

    def _rate(self, item: MatrixProduct) -> float:
        """Return the rate of a product; its logarithm is linear in those of the extents."""
        size, rate = len(C_EXTENTS), 0.0
        for i, u in _corners_in_c(item.m):
            for j, v in _corners_in_c(item.n):
                for k, w in _corners_in_c(item.k):
                    rate += u * v * w * math.log(self.flops_per_ns[(i * size + j) * size + k])
        return math.exp(rate)


def _interpolated(places: Sequence[float], values: Sequence[float], x: float) -> float:
    """Return the value at x, linear in the logarithm of the places, constant outside."""
    right = bisect_right(places, x)
    if right == 0 or right == len(places):
        return values[0] if right == 0 else values[-1]
    low, high = places[right - 1], places[right]
    share = math.log(x / low) / math.log(high / low)
    return values[right - 1] * (1 - share) + values[right] * share


def _rate_of_heads(rates: Sequence[float], item: MatrixProduct) -> float:
    width = len(ATTENTION_WIDTHS)
    by_rows = [
        _interpolated(ATTENTION_WIDTHS, rates[place * width : (place + 1) * width], item.k)
        for place in range(len(ATTENTION_ROWS))
    ]
    return _interpolated(ATTENTION_ROWS, by_rows, item.m)


def _corners_in_c(extent: int) -> tuple[tuple[int, float], ...]:
    """Return the measured extents around one, with their weights."""
    right = min(max(bisect_right(C_EXTENTS, extent), 1), len(C_EXTENTS) - 1)
    low, high = C_EXTENTS[right - 1], C_EXTENTS[right]
    share = min(max(math.log(max(extent, 1) / low) / math.log(high / low), 0.0), 1.0)
    return (right - 1, 1.0 - share), (right, share)


def reference_in_c(num_threads: int) -> CRates:
    """Return rounded rates of a server core of 2024, of which so many work: not of this machine.

    What must not depend on the machine that a plan is made on is decided with these.
    """
    grid = [m / (m + 4) * n / (n + 16) * k / (k + 16) for m, n, k in product(C_EXTENTS, repeat=3)]
    heads = [t / (t + 32) * w / (w + 32) for t, w in product(ATTENTION_ROWS, ATTENTION_WIDTHS)]
    gained = num_threads - 1
    return CRates(
        num_threads=num_threads,
        call_ns=15.0,
        open_ns=2_000.0,
        wake_ns=0.0,
        pass_speedup=1 + 0.9 * gained,
        miss_speedup=1 + 0.6 * gained,
        product_speedup=1 + 0.9 * gained,
        pass_ns=(0.01, 0.005, 0.04, 0.05, 0.08, 0.08, 0.6, 0.01, 0.02, 0.04, 0.06, 0.25),
        miss_ns=(0.003, 0.02, 0.025, 0.04),
        flops_per_ns=tuple([180.0 * x for x in grid]),
        forward=tuple([120.0 * x for x in heads]),
        backward=tuple([150.0 * x for x in heads]),
    )


# Launches by numpy, and the durations that the planner has from `REFERENCE`.

EXTENTS = (1, 16, 64, 256, 1024)
"""Extents of the measured products; rates in between are interpolated, beyond they stay."""

DISTANCES_BYTES = (1 << 20, 4 << 20, 16 << 20, 32 << 20, 64 << 20)
"""Reuse distances with a measured rate; below the first nothing is charged."""
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
    # A stride of 0 repeats the same bytes.
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
