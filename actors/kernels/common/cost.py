"""How long a launch on the host takes: the quantities of its work at the rates of a machine.

The form is a *roofline* (Williams, Waterman & Patterson 2009), as for a GPU: a launch takes what
its calls and products take, and the longer of computing and moving bytes: a program in C does both
at once, and one that follows a product begins when that has ended. numpy computes in one call what
the call before moved into the cache, so its launches take the sum of both. Bytes move at the rate
of the cache that holds them, which their *reuse distance* decides: the bytes touched since these
bytes were touched last (Mattson, Gecsei, Slutz & Traiger 1970).

The planner prices with `REFERENCE`, the same on every machine, because plans must not depend on the
machine that made them; the simulator prices with measured rates (`host.calibration`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated

from actors.kernels.common.kernel import (
    BytePass,
    KernelNeeds,
    MatrixProduct,
    Operand,
    Operands,
    Work,
)
from compiler.contract.codec import Bounds

DISTANCES_BYTES = (1 << 20, 4 << 20, 16 << 20, 32 << 20, 64 << 20)
"""Reuse distances with a measured rate; below half of the first nothing is charged."""

FACTORS = (1 << 16, 1 << 20)
"""Elements of the second factors of the measured products."""

HELPERS_SPIN_NS = 100_000.0
"""As in runtime.c: threads without work for longer sleep, and are woken by the next shared launch,
which then begins later."""

OPEN_NS = 2_000.0
"""What it takes to hand pieces of a launch to other threads: 1.9 us on two cores of 2024."""

PIECE_NS = 10_000.0
"""What a piece of a shared launch takes at the reference rates: kernels cut their work by fixed
rates, too, because the order of sums must not depend on a machine."""

_VECTOR = 16
"""Columns of a product are multiplied so many at once: fewer take as long."""

_SHORT_ROWS, _SHORT_SUM = 1, 4
"""m and k with which a product [m, k] [k, n] has half of its rate."""

_CORE_SHARE = 0.9
"""What a core adds to a machine, where it was not measured."""

_LOG_DISTANCES = tuple([math.log(distance) for distance in (1 << 19, *DISTANCES_BYTES)])
_LOG_FACTORS = tuple([math.log(size) for size in FACTORS])
_PLACE = {sort: place for place, sort in enumerate(BytePass)}


@dataclass(frozen=True, slots=True)
class Price:
    """What a launch or a firing takes when it is alone, and what it would on one thread.

    Their quotient is the share of the machine that it takes: what `actors.simulation.costs` divides
    among launches that run at once.
    """

    duration_ns: float
    busy_ns: float
    is_shared: bool = False
    """Whether threads share the launch."""


# Hints of what was measured, with the bounds that a file is held to.

Rate = Annotated[float, Bounds(0.0, 1e12)]
Gain = Annotated[float, Bounds(1.0, 1e6)]
Speed = Annotated[float, Bounds(1e-9, 1e12)]


@dataclass(frozen=True, slots=True)
class Rates:
    """What one thread of a machine needs for each quantity of work, and what its threads gain.

    `call_ns` and `loop_ns` are for those of `Work`; `pass_ns` is per byte, by `BytePass`; `miss_ns`
    per byte that was last touched each of `DISTANCES_BYTES` ago; `flops_per_ns` of products [m, k]
    [k, n] with k n of each of `FACTORS`: a factor that no near cache holds is read again and again.

    `num_threads` share a launch in C: together they compute `compute_gain` times as fast as one,
    and move bytes `move_gain` times as fast. `wake_ns` is what a shared launch takes more where
    they sleep. `blas_threads` are those that numpy's products keep busy.
    """

    call_ns: Rate
    loop_ns: Rate
    pass_ns: Annotated[tuple[Rate, ...], len(BytePass)]
    miss_ns: Annotated[tuple[Rate, ...], len(DISTANCES_BYTES)]
    flops_per_ns: Annotated[tuple[Speed, ...], len(FACTORS)]
    num_threads: Annotated[int, Bounds(1, 1 << 20)] = 1
    compute_gain: Gain = 1.0
    move_gain: Gain = 1.0
    wake_ns: Rate = 0.0
    blas_threads: Gain = 1.0

    def pass_ns_of(self, sort: BytePass) -> float:
        """Return the time per byte of one sort of pass."""
        return self.pass_ns[_PLACE[sort]]

    def miss_ns_at(self, distance_bytes: float) -> float:
        """Return the time per byte at a reuse distance, linear in its logarithm."""
        return _interpolated(_LOG_DISTANCES, (0.0, *self.miss_ns), distance_bytes)

    def product_ns(self, item: MatrixProduct) -> float:
        """Return the time of products."""
        if not item.flops:
            return 0.0
        filled = -(-item.n // _VECTOR) * _VECTOR / item.n
        shortness = (1 + _SHORT_ROWS / item.m) * (1 + _SHORT_SUM / item.k)
        rate = _interpolated(_LOG_FACTORS, self.flops_per_ns, item.k * item.n)
        return item.flops / rate * filled * shortness

    def products_ns(self, work: Work) -> float:
        """Return the time of all products of a launch."""
        return sum([self.product_ns(item) for item in work.products])

    def moving_ns(self, work: Work) -> float:
        """Return the time of moving operands that are in cache."""
        moves = [size for sort, size in work.passes if sort is BytePass.MOVE]
        return sum(moves) * self.pass_ns_of(BytePass.MOVE)

    def computing_ns(self, work: Work) -> float:
        """Return the time of everything else that a launch does, beside calls and products."""
        passes = [(sort, size) for sort, size in work.passes if sort is not BytePass.MOVE]
        passes_ns = sum([size * self.pass_ns_of(sort) for sort, size in passes])
        return work.loops * self.loop_ns + passes_ns

    def price(self, work: Work, missed_ns: float, idle_ns: float = 0.0) -> Price:
        """Return the price of a launch whose operands take `missed_ns` to come into the cache.

        `idle_ns` is since when the threads that share launches have had nothing to do.
        """
        call, products = work.calls * self.call_ns, self.products_ns(work)
        moving, computing = missed_ns + self.moving_ns(work), self.computing_ns(work)
        if not work.is_native:
            moving, computing = 0.0, moving + computing  # one call of numpy after the other
        busy, threads = call + products + max(moving, computing), 1.0
        if work.is_native and self.num_threads > 1:
            programs_ns = max(REFERENCE.moving_ns(work), REFERENCE.computing_ns(work))
            reference_ns = REFERENCE.products_ns(work) + programs_ns
            threads = min(reference_ns / PIECE_NS, self.num_threads)
        if threads < 2:
            blas_ns = 0.0 if work.is_native else products * (self.blas_threads - 1)
            return Price(busy, busy + blas_ns)
        waking = self.wake_ns if idle_ns > HELPERS_SPIN_NS else 0.0
        # What each further thread adds, as measured with all of them.
        added = (threads - 1) / (self.num_threads - 1)
        move_gain, compute_gain = [1 + (x - 1) * added for x in (self.move_gain, self.compute_gain)]
        shared = products / compute_gain + max(moving / move_gain, computing / compute_gain)
        return Price(call + OPEN_NS + waking + shared, busy, is_shared=True)

    def capacity_of(self, num_cores: int) -> float:
        """Return what all cores do in the time of one, those included that no launch uses."""
        measured = max(self.compute_gain, self.move_gain, 1.0)
        return measured + _CORE_SHARE * max(0, num_cores - self.num_threads)


def _interpolated(log_places: tuple[float, ...], values: tuple[float, ...], x: float) -> float:
    """Return the value at x, linear in its logarithm and constant outside."""
    log_x = math.log(max(x, 1))
    right = bisect_right(log_places, log_x)
    if right in (0, len(values)):
        return values[max(0, right - 1)]
    low, high = log_places[right - 1], log_places[right]
    share = (log_x - low) / (high - low)
    return values[right - 1] * (1 - share) + values[right] * share


REFERENCE = Rates(
    call_ns=1000.0,
    loop_ns=20.0,
    pass_ns=(
        *(0.025, 0.035, 0.045, 0.1, 0.15, 0.1, 0.17, 0.05, 0.3, 0.1, 0.4, 3.0, 0.5),
        *(0.015, 0.005, 0.035),  # of two threads, which the planner takes every machine to have
    ),
    miss_ns=(0.002, 0.004, 0.01, 0.02, 0.03),
    flops_per_ns=(200.0, 200.0),
)
"""Rounded rates of a server of 2024 with two cores; the planner only compares what they give."""


def reference_of_threads(num_threads: int) -> Rates:
    """Return rounded rates of a server core of 2024, of which so many share launches in C.

    What must not depend on the machine that a plan is made on is decided with these.
    """
    gained = num_threads - 1
    return replace(
        REFERENCE,
        call_ns=150.0,
        pass_ns=(*REFERENCE.pass_ns[:-3], 0.01, 0.005, 0.15),
        miss_ns=(0.003, 0.02, 0.025, 0.04, 0.04),
        flops_per_ns=(180.0, 180.0),
        num_threads=num_threads,
        compute_gain=1 + 0.9 * gained,
        move_gain=1 + 0.6 * gained,
    )


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
    return rates.price(work, total * rates.miss_ns_at(total)).duration_ns
