"""What one thread of this machine needs in C, and what all of them gain: measured in seconds.

Of the samples of a probe the median counts: a chain takes the sum of what its launches usually
take. The least of each is 1 to 10 % shorter, most where threads meet at the end of a launch, and no
step is ever as fast as their sum. All probes are visited several times, and of the visits the least
counts: what others do on the machine only adds, for seconds, and rarely meets a probe each time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median

from actors.kernels.c_rates import (
    ATTENTION_ROWS,
    ATTENTION_WIDTHS,
    C_DISTANCES_BYTES,
    C_EXTENTS,
    CRates,
)
from actors.kernels.library import c_probes
from actors.kernels.library.c_probes import CProbe
from actors.kernels.library.gemm_onednn import OneDnn
from actors.kernels.native import runtime
from actors.kernels.native.chain import JoinedLaunches
from actors.kernels.native.gemm import ThreadCut
from actors.kernels.native.gemm_launch import Library
from actors.kernels.native.gemm_products import OpenBlas, Small
from actors.kernels.work import BytePass
from actors.protocol import Clock

MeasureC = Callable[[CProbe], float]
"""Return how long the launch of a probe takes, in nanoseconds, when it is repeated."""

_LIBRARIES: tuple[Library, ...] = (OneDnn(ThreadCut.ROWS), OpenBlas(ThreadCut.ROWS), Small())
_SMALL_FLOPS = 2 << 20
"""Products with more are not for the small one."""

_ELEMENTS = 1 << 15
"""Of a vector in the second-level cache, with what is made of it."""

_SHARED_ELEMENTS = 1 << 17
"""Of a vector that is cut into pieces enough for all threads."""

_SAMPLE_NS = 150_000
_SAMPLES, _FEW_SAMPLES = 24, 12
_SHARED_SAMPLES = 40
"""Where all threads take part: how far they get varies more."""

_VISITS = 3
"""A second each."""

_MOST_COPIES = 64
_LEAST = 1e-6
"""Per byte or flop: what a difference of two times may not fall below."""


def calibrate_c(measure: MeasureC) -> CRates:
    """Return the rates of C on this machine. Native kernels must be on."""
    visits: list[list[float]] = []
    for _ in range(_VISITS):
        times: list[float] = []
        _rates(partial(_noted, measure, times))
        visits.append(times)
    least = iter([min(column) for column in zip(*visits, strict=True)])
    return _rates(lambda probe: next(least))


def _noted(measure: MeasureC, times: list[float], probe: CProbe) -> float:
    times.append(measure(probe))
    return times[-1]


def _rates(measure: MeasureC) -> CRates:
    """Return the rates that follow from the times of probes: the same ones in the same order."""
    call_ns = measure(c_probes.program("add", 1, 1))
    one = measure(c_probes.program("add", 1, _ELEMENTS))
    passes = dict.fromkeys(BytePass, 0.0)
    passes[BytePass.SIMPLE] = max((one - call_ns) / (8.0 * _ELEMENTS), _LEAST)
    for op, times in c_probes.INSTRUCTIONS.items():
        probe = c_probes.program(op, times, _ELEMENTS)
        sort, size = probe.work.passes[-1]
        passes[sort] = max((measure(probe) - call_ns) / size, _LEAST)
    for probe in (
        c_probes.row_sums(64, 512),
        c_probes.random_bits(_ELEMENTS),
        c_probes.moved(256),
        c_probes.taken(1024, 64),
        c_probes.added(1024, 64),
    ):
        sort, size = probe.work.passes[-1]
        passes[sort] = max((measure(probe) - call_ns) / size, _LEAST)
    return CRates(
        runtime.num_threads(),
        call_ns,
        *_shared(measure, call_ns),
        tuple([passes[sort] for sort in BytePass]),
        _misses(measure, passes),
        _products(measure, call_ns),
        *_attention(measure, call_ns),
    )


def _misses(measure: MeasureC, passes: dict[BytePass, float]) -> tuple[float, ...]:
    found: list[float] = []
    for distance in C_DISTANCES_BYTES:
        probe = c_probes.program("add", 1, distance // 8, leaves_caches=True)
        known = probe.touched_bytes * passes[BytePass.SIMPLE]
        found.append(max((measure(probe) - known) / probe.touched_bytes, 0.0))
    return tuple(found)


def _products(measure: MeasureC, call_ns: float) -> tuple[float, ...]:
    """Return the best rate of any library at every point of the grid."""
    found: list[float] = []
    for m, n, k in product(C_EXTENTS, repeat=3):
        flops = 2 * m * n * k
        asked = [x for x in _LIBRARIES if flops <= _SMALL_FLOPS or not isinstance(x, Small)]
        probes = [c_probes.product(library, m, n, k) for library in asked]
        times = [measure(probe) for probe in probes if c_probes.is_taken(probe)]
        found.append(flops / max(min(times) - call_ns, flops * _LEAST))
    return tuple(found)


def _attention(measure: MeasureC, call_ns: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    columns = []
    for is_forward in (True, False):
        rates = []
        for rows, width in product(ATTENTION_ROWS, ATTENTION_WIDTHS):
            probe = c_probes.attention(rows, width, is_forward=is_forward)
            items = probe.work.forward or probe.work.backward
            flops = sum([item.flops for item in items])
            rates.append(flops / max(measure(probe) - call_ns, flops * _LEAST))
        columns.append(tuple(rates))
    return columns[0], columns[1]


def _shared(measure: MeasureC, call_ns: float) -> tuple[float, float, float, float, float]:
    """Return what opening and waking the pool cost, and what its threads gain.

    That is in passes, beyond the caches, and in products.
    """
    threads = runtime.num_threads()
    if threads < 2:
        return 0.0, 0.0, 1.0, 1.0, 1.0
    far = C_DISTANCES_BYTES[-1] // 8

    def times(probe: Callable[..., CProbe]) -> tuple[float, float]:
        return measure(probe(on_all_threads=False)), measure(probe(on_all_threads=True))

    def gain(probe: Callable[..., CProbe]) -> float:
        alone, together = times(probe)
        return min(max(alone / together, 1.0), float(threads))

    # Of a long and a short program, so that what opening costs is no part of what threads gain.
    long, short = [
        times(partial(c_probes.program, "exp", 8, _SHARED_ELEMENTS // part, pieces=16 // part))
        for part in (1, 4)
    ]
    passes = (long[0] - short[0]) / max(long[1] - short[1], 1.0)
    passes = min(max(passes, 1.0), float(threads))
    open_ns = max(short[1] - call_ns - (short[0] - call_ns) / passes, 0.0)
    wide = partial(c_probes.program, "add", 1, far, pieces=32, leaves_caches=True)
    alone, together = [
        c_probes.program("exp", 8, _SHARED_ELEMENTS // part, pieces=pieces, on_all_threads=shares)
        for part, pieces, shares in ((8, 1, False), (4, 4, True))
    ]
    wake_ns = max(measure(c_probes.after(alone, together)) - measure(alone) - short[1], 0.0)
    return open_ns, wake_ns, passes, gain(wide), gain(partial(c_probes.shared_product, 256))


def stopwatch_c(clock: Clock) -> MeasureC:
    """Return how to measure a probe here: the median of some short samples."""

    def measure(probe: CProbe) -> float:
        if probe.on_all_threads:
            first = probe.make()
        else:
            with runtime.as_one_thread():
                first = probe.make()
        first()
        before = clock()
        first()
        once = max(clock() - before, 1)
        copies = max(1, min(_MOST_COPIES, _SAMPLE_NS // once))
        chain = JoinedLaunches((first,) * copies)
        samples = _FEW_SAMPLES if once > 10 * _SAMPLE_NS else _SAMPLES
        if probe.on_all_threads:
            samples = _SHARED_SAMPLES
        return median([_run(chain, clock) for _ in range(samples)]) / copies

    return measure


def _run(chain: JoinedLaunches, clock: Clock) -> int:
    before = clock()
    chain()
    return clock() - before
