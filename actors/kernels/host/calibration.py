"""The rates of this machine, measured in about two seconds, and a plan's launches at these rates.

A *probe* is one call of one kernel, chosen so that it depends on one rate that is not known yet:
what the known rates explain is taken off its time, the rest is that rate. So the probes stand in
order, the first ones simple, and nothing is fitted to any job. Rates are kept in a file per machine
and set of libraries; the caller says what a machine is. `estimate_launch_costs` prices every launch
of a plan.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from actors.kernels.common import cost
from actors.kernels.common.cost import DISTANCES_BYTES, EXTENTS, CRates, Price, Rates
from actors.kernels.common.files import DamagedFile, load_measurements, replace_object
from actors.kernels.common.kernel import (
    ALIGNMENT_BYTES,
    Attrs,
    BytePass,
    CWork,
    Kernel,
    Operand,
    Operands,
    SelectableKernel,
    Work,
)
from actors.kernels.common.strides import BLOCK_BYTES
from actors.kernels.host import catalogue
from actors.kernels.host.c_calibration import MeasureC, calibrate_c
from actors.machine.protocol import Array, Clock, Launch
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import Actor, View
from compiler.contract.plan_tables import Launch as PlanLaunch
from compiler.contract.program import FusedProgram, Instruction, Kind, ProgramInput
from compiler.contract.types import DType, TensorType, contiguous_strides

FORMAT = 4
_report = logging.getLogger("actorflow").warning
_BLOCK = BLOCK_BYTES // 4
_LEAST_SHARE = 0.02
"""A rate is never below this share of its probe's time, however much the known rates explain."""

_ROUNDS = 2
_SAMPLES = 5
_PROBE_NS = 3e6
_BATCH_FLOPS = 2e6
_MANY = 512
"""Copies of a launch of 14 calls whose objects, about a KiB each, leave the second-level cache."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One call that reveals one rate: the one at `place` of the column `field` of `Rates`.

    It is bound `num_copies` times and the copies take turns: with many, the objects of a call have
    left the caches before it is made again, as in a step. `call_ns` is revealed twice, the second
    time for good.
    """

    op: str
    attrs: Attrs
    inputs: Operands
    outputs: Operands
    field: str
    place: int = 0
    num_copies: int = 1

    @property
    def kernel(self) -> Kernel:
        """The kernel of numpy for the call: rates are numpy's, also where C does the work."""
        return next(k for k in catalogue.NUMPY_KERNELS if k.op == self.op)

    @property
    def work(self) -> Work:
        """What the call does."""
        needs = self.kernel.query(self.attrs, self.inputs, self.outputs)
        if needs is None or needs.work is None:
            raise LookupError(f"kernel {self.kernel.name!r} does not describe its work")
        return needs.work

    @property
    def operands(self) -> Operands:
        """The operands that the call sweeps."""
        return cost.swept((*self.inputs, *self.outputs), self.work)


Measure = Callable[[Probe], float]
"""Return how long the call of a probe takes, in nanoseconds, when it is repeated."""


def probes() -> Iterator[Probe]:
    """Yield every probe, each after those that it builds on."""
    one, block = _dense(1), _dense(_BLOCK)
    yield _fused("add", (one, one), one, "call_ns")
    yield Probe("copy", {}, (block,), (block,), "pass_ns", _place(BytePass.SIMPLE))
    yield _fused("add", (block, block), block, "pass_ns", _place(BytePass.PLAIN))
    rows = _dense(_BLOCK // 64, 64)
    yield _fused("mul", (rows, _dense(_BLOCK // 64, 1)), rows, "loop_ns")
    for place, distance in enumerate(DISTANCES_BYTES):
        x = _dense(distance // 12)
        yield _fused("add", (x, x), x, "miss_ns", place)
    for op, sort in _UNARY:
        yield _fused(op, (block,), block, "pass_ns", _place(sort))
    yield _fused("div", (block, block), block, "pass_ns", _place(BytePass.DIVIDE))
    yield _fused("pow", (block, block), block, "pass_ns", _place(BytePass.POWER))
    row_sum = Instruction("row_sum", (0,), DType.FLOAT32, Kind.ROW)
    row_sums = FusedProgram((ProgramInput(DType.FLOAT32, Kind.FULL),), (row_sum,), (1,))
    attrs: Attrs = {"program": row_sums, "rows": 1, "columns": _BLOCK}
    yield Probe("fused", attrs, (block,), (one,), "pass_ns", _place(BytePass.REDUCE))
    side = _dense(256, 256)
    transposed = replace(side, strides_bytes=side.strides_bytes[::-1])
    yield Probe("copy", {}, (transposed,), (side,), "pass_ns", _place(BytePass.STRIDED))
    table, ids, picks = _dense(256, 64), _dense(1024, dtype=DType.INT32), _dense(1024, 64)
    yield Probe("embedding", {}, (table, ids), (picks,), "pass_ns", _place(BytePass.GATHER))
    yield Probe(
        "embedding_grad", {"rows": 256}, (picks, ids), (table,), "pass_ns", _place(BytePass.SCATTER)
    )
    seed = _dense(dtype=DType.INT64)
    mask = _dense(_BLOCK, dtype=DType.BOOL)
    yield _fused(
        "philox", (seed, seed), mask, "pass_ns", _place(BytePass.RANDOM), constants=(1, 0.1)
    )
    for place, (m, n, k) in enumerate(product(EXTENTS, repeat=3)):
        batch = max(1, min(4096, int(_BATCH_FLOPS / (2 * m * n * k))))
        a, b, out = [_dense(batch, *extents) for extents in ((m, k), (k, n), (m, n))]
        yield Probe("matmul", {}, (a, b), (out,), "flops_per_ns", place)
    # The probes before this one repeat one call, which is quicker than calls that vary.
    yield _fused("add", (one, one), one, "call_ns", num_copies=_MANY, times=14)


_UNARY = (("sqrt", BytePass.ROOT), ("exp", BytePass.EXP), ("tanh", BytePass.TANH))


def _fused(
    op: str,
    inputs: Operands,
    out: Operand,
    field: str,
    place: int = 0,
    *,
    constants: tuple[int | float, ...] = (),
    num_copies: int = 1,
    times: int = 1,
) -> Probe:
    """Return the probe of an instruction, or of the same one several times over."""
    columns = out.shape[-1]
    rows = out.type.num_elements // columns
    kinds = {1: Kind.SCALAR, rows: Kind.ROW} if rows > 1 else {1: Kind.SCALAR}
    kinds[out.type.num_elements] = Kind.FULL
    program_inputs = [ProgramInput(x.type.dtype, kinds[x.type.num_elements]) for x in inputs]
    steps = [
        Instruction(
            op,
            (*((0,) if n == 0 else (len(program_inputs) + n - 1,)), *range(1, len(program_inputs))),
            out.type.dtype,
            Kind.FULL,
            constants,
        )
        for n in range(times)
    ]
    program = FusedProgram(tuple(program_inputs), tuple(steps), (len(program_inputs) + times - 1,))
    attrs: Attrs = {"program": program, "rows": rows, "columns": columns}
    return Probe("fused", attrs, inputs, (out,), field, place, num_copies)


def _dense(*shape: int, dtype: DType = DType.FLOAT32) -> Operand:
    return Operand(TensorType(dtype, shape), 0, contiguous_strides(shape, dtype.itemsize))


def _place(sort: BytePass) -> int:
    return list(BytePass).index(sort)


def calibrate(measure: Measure, measure_c: MeasureC | None = None) -> Rates:
    """Return the rates that explain the times of all probes, and with `measure_c` those of C.

    Each is measured in several rounds and the least time counts: a neighbour that makes the machine
    slow for a moment rarely meets the same probe twice.
    """
    all_probes = tuple(probes())
    # Whole rounds, not each probe twice in a row: a slow moment then meets a probe once.
    rounds = [[measure(probe) for probe in all_probes] for _ in range(_ROUNDS)]
    rates = Rates(
        0.0,
        0.0,
        (0.0,) * len(BytePass),
        (0.0,) * len(DISTANCES_BYTES),
        (0.0,) * len(EXTENTS) ** 3,
    )
    for probe, duration_ns in zip(all_probes, map(min, *rounds), strict=True):
        rates = _solve(probe, duration_ns, rates)
    return rates if measure_c is None else replace(rates, in_c=calibrate_c(measure_c))


def _solve(probe: Probe, duration_ns: float, rates: Rates) -> Rates:
    """Return the rates with the one that the probe reveals."""
    work, name, place = probe.work, probe.field, probe.place
    if name == "call_ns":
        # Revealed a second time: the first value must not be taken off as known.
        rates = replace(rates, call_ns=0.0)
    products = work.products if name == "flops_per_ns" else ()
    if products:
        work = replace(work, products=())
    known_ns = cost.duration_ns(probe.operands, work, rates)
    # Noise may make the known part larger than the whole; a rate is never 0 or negative.
    rest_ns = max(duration_ns - known_ns, _LEAST_SHARE * duration_ns)
    if name == "flops_per_ns":
        rate = sum([item.flops for item in products]) / rest_ns
        return replace(rates, flops_per_ns=_put(rates.flops_per_ns, place, rate))
    if name == "pass_ns":
        rate = rest_ns / sum([size for sort, size in work.passes if _place(sort) == place])
        return replace(rates, pass_ns=_put(rates.pass_ns, place, rate))
    if name == "miss_ns":
        # A level may be as fast as the one that PLAIN was measured in: then nothing is left.
        total = sum([cost.footprint_bytes(operand) for operand in probe.operands])
        rate = max(duration_ns - known_ns, 0.0) / total
        return replace(rates, miss_ns=_put(rates.miss_ns, place, rate))
    if name == "call_ns":
        return replace(rates, call_ns=rest_ns / work.calls)
    return replace(rates, loop_ns=rest_ns / work.loops)


def _put(column: tuple[float, ...], place: int, value: float) -> tuple[float, ...]:
    return (*column[:place], value, *column[place + 1 :])


def stopwatch(clock: Clock) -> Measure:
    """Return how to measure a probe here: a low quartile, because others only ever slow it down."""

    def measure(probe: Probe) -> float:
        # Powers and exponentials of the test numbers may overflow, which is no fault here.
        with np.errstate(all="ignore"):
            launches = [_bind(probe) for _ in range(probe.num_copies)]
            # The first run meets cold caches and is not counted.
            _run(launches, 1, clock)
            once_ns = max(_run(launches, 1, clock), 1)
            repeats = max(1, int(_PROBE_NS / _SAMPLES / once_ns))
            samples = sorted([_run(launches, repeats, clock) for _ in range(_SAMPLES)])
            return samples[_SAMPLES // 4] / (repeats * len(launches))

    return measure


def _run(launches: list[Launch], repeats: int, clock: Clock) -> int:
    before = clock()
    for _ in range(repeats):
        for launch in launches:
            launch()
    return clock() - before


def _bind(probe: Probe) -> Launch:
    needs = probe.kernel.query(probe.attrs, probe.inputs, probe.outputs)
    size = needs.workspace_bytes if needs is not None else 0
    raw = np.zeros(size + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    arrays = [_filled(operand) for operand in (*probe.inputs, *probe.outputs)]
    count = len(probe.inputs)
    return probe.kernel.bind(
        probe.attrs, tuple(arrays[:count]), tuple(arrays[count:]), raw[start : start + size]
    )


def _filled(operand: Operand) -> Array:
    """Return an array of small varied numbers; integers are indices below 256."""
    # 37 and 256 have no common divisor: a permutation, whose neighbours lie far apart.
    pattern = (np.arange(256) * 37 % 256).astype(operand.dtype)
    if operand.type.dtype.is_float:
        pattern = pattern / 256 + 0.25
    dense = np.resize(pattern.astype(operand.dtype), operand.shape)
    if operand.is_dense:
        return dense
    return dense.reshape(operand.shape[::-1]).T


def cached_rates(
    folder: Path,
    machine: str,
    measure: Measure,
    *,
    measure_c: MeasureC | None = None,
    is_fresh: bool = False,
) -> Rates:
    """Return the rates kept in a folder for a machine; measure and keep them when there are none.

    Args:
        folder: Where the file is or will be; it is made.
        machine: What rates depend on: processor, its threads, libraries.
        measure: How to measure, see `stopwatch`.
        measure_c: The same for native kernels; None where they are off.
        is_fresh: Measure although there are rates.

    A line says where rates are damaged, and so measured anew, or cannot be kept.
    """
    key = f"{FORMAT} {machine} {catalogue.fingerprint()}"
    path = folder / f"rates-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}.json"
    anew = "the rates of this machine are measured anew"
    stored_rates = None if is_fresh else load_measurements(path, _decoded, anew)
    if stored_rates is not None:
        return stored_rates
    rates = calibrate(measure, measure_c)
    try:
        replace_object(path, asdict(rates))
    except OSError as error:
        _report("%s cannot be written (%s): the rates are not kept", path, error.strerror)
    return rates


def _decoded(found: dict[str, Any]) -> Rates:
    """Return rates as they were written. Raises DamagedFile: they were not written by `Rates`."""
    try:
        in_c = None if found["in_c"] is None else CRates(**_columns(found["in_c"]))
        return Rates(**{**_columns(found), "in_c": in_c})
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(f"these are no rates: {error}") from None


def _columns(found: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}


# The price of a launch. Its own work comes from its kernel, asked again with the operands of the
# plan. What the caches hold depends on the launches before it: every granule of an arena remembers
# how many bytes had been touched when it was touched last, and the difference is its reuse
# distance. The chain is walked twice, because a step begins with the caches that the step before it
# left. The helpers of the pool sleep where a chain begins, and wherever it goes on for long on one
# thread.

GRANULE_BYTES = 64 << 10


def estimate_launch_costs(plan: Plan, rates: Rates) -> tuple[tuple[Price, ...], ...]:
    """Return the price of every launch, per actor in the order of its chain.

    A kernel that does not describe its work keeps the duration that the plan has. Pure; linear in
    launches and in the granules that they touch.
    """
    kernels = catalogue.kernels_by_name()
    return tuple([_chain(plan, actor, rates, kernels) for actor in plan.actors])


def firing_prices(plan: Plan, rates: Rates) -> tuple[Price, ...]:
    """Return the price of a firing per actor; an actor without launches keeps the plan's."""
    return tuple(
        [
            Price(sum([x.duration_ns for x in costs]), sum([x.busy_ns for x in costs]))
            if costs
            else Price(actor.duration_ns, actor.duration_ns)
            for actor, costs in zip(plan.actors, estimate_launch_costs(plan, rates), strict=True)
        ]
    )


def durations_ns(plan: Plan, rates: Rates) -> tuple[float, ...]:
    """Return the duration of a firing per actor; an actor without launches keeps the plan's."""
    return tuple([price.duration_ns for price in firing_prices(plan, rates)])


def _chain(
    plan: Plan, actor: Actor, rates: Rates, kernels: Mapping[str, Kernel]
) -> tuple[Price, ...]:
    works = [_work(plan, launch, kernels.get(launch.kernel)) for launch in actor.launches]
    caches = _Caches(plan)
    total: list[Price] = []
    # The second walk counts: a step finds the caches as the step before left them.
    for _ in range(2):
        total, idle_ns = [], math.inf
        for launch, work in zip(actor.launches, works, strict=True):
            in_c = None if work is None or work.in_c is None else work.in_c()
            miss_ns_at = _misses(in_c, rates)
            unswept = work.unswept if work is not None else ()
            missed_ns = 0.0
            for index, view in enumerate((*launch.inputs, *launch.outputs)):
                if index not in unswept:
                    missed_ns += caches.touch(plan.views[view], miss_ns_at)
            if in_c is not None and rates.in_c is not None:
                total.append(rates.in_c.price(in_c, missed_ns, idle_ns))
                if rates.in_c.is_shared(in_c):
                    idle_ns = 0.0
                    continue
            else:
                total.append(_price(launch, work, rates, missed_ns))
            idle_ns += total[-1].duration_ns
    return tuple(total)


def _misses(in_c: CWork | None, rates: Rates) -> Callable[[float], float]:
    """Return the time per byte at a reuse distance, for one launch."""
    if in_c is None or rates.in_c is None:
        return rates.miss_ns_at
    if not rates.in_c.is_shared(in_c):
        return rates.in_c.miss_ns_at
    return rates.in_c.shared_miss_ns_at


def _price(launch: PlanLaunch, work: Work | None, rates: Rates, missed_ns: float) -> Price:
    if work is None:
        return Price(launch.duration_ns, launch.duration_ns)
    duration = rates.work_ns(work) + missed_ns
    products = sum([rates.product_ns(item) for item in work.products])
    return Price(duration, duration + products * (rates.blas_threads - 1))


def _work(plan: Plan, launch: PlanLaunch, kernel: Kernel | None) -> Work | None:
    if kernel is None:
        return None
    inputs = tuple([_operand(plan.views[view]) for view in launch.inputs])
    outputs = tuple([_operand(plan.views[view]) for view in launch.outputs])
    ask = kernel.needs if isinstance(kernel, SelectableKernel) else kernel.query
    needs = ask(dict(launch.attrs), inputs, outputs)
    return None if needs is None else needs.work


def _operand(view: View) -> Operand:
    return Operand(view.type, view.offset_bytes, view.strides_bytes)


class _Caches:
    """When each granule of the arenas was touched last, in bytes touched by the chain."""

    __slots__ = ("_last", "_now_bytes", "_plan")

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._last: dict[tuple[int, int], float] = {}
        self._now_bytes = 0.0

    def touch(self, view: View, miss_ns_at: Callable[[float], float]) -> float:
        """Touch the bytes of a view; return the time that their way to the caches takes.

        What was never touched is as far away as can be: only the first walk meets it.
        """
        size_bytes = cost.footprint_bytes(_operand(view))
        if not size_bytes:
            return 0.0
        register = self._plan.registers[view.register]
        # The first slot stands for all: which one a firing has depends on its number.
        start = register.offsets_bytes[0] + view.offset_bytes
        granules = range(start // GRANULE_BYTES, (start + size_bytes - 1) // GRANULE_BYTES + 1)
        share = size_bytes / len(granules)
        missed_ns = 0.0
        for granule in granules:
            place = (register.arena, granule)
            distance = self._now_bytes - self._last.get(place, -cost.DISTANCES_BYTES[-1])
            missed_ns += share * miss_ns_at(distance)
            self._now_bytes += share
            self._last[place] = self._now_bytes
        return missed_ns
