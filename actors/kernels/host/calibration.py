"""The rates of this machine, measured in about two seconds, and a plan's launches at these rates.

A *probe* is one call, by the kernel that plans have for it here, which reveals one rate: what the
rates before it explain is taken off its time, and the rest is that rate. Sorts of passes that
depend on the same part of a processor are measured by one of them, and keep to each other the
proportions of `cost.REFERENCE`; nothing is fitted to any job. `estimate_launch_costs` prices every
launch of a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import cycle
from statistics import median

import numpy as np

from actors.kernels.common import cost
from actors.kernels.common.cost import DISTANCES_BYTES, FACTORS, REFERENCE, Price, Rates
from actors.kernels.common.kernel import (
    ALIGNMENT_BYTES,
    Attrs,
    BytePass,
    HostKernel,
    Operand,
    Operands,
    Work,
    require_plan,
)
from actors.kernels.host import catalogue
from actors.kernels.library import runtime
from actors.kernels.library.launch import NativeChain, NativeLaunch
from actors.machine.protocol import Array, Clock, Launch
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import Actor, View
from compiler.contract.plan_tables import Launch as PlanLaunch
from compiler.contract.program import FusedProgram, Instruction, Kind, ProgramInput
from compiler.contract.types import DType, TensorType, contiguous_strides

_SORTS = {
    "move": (BytePass.SIMPLE, BytePass.PLAIN, BytePass.REDUCE, BytePass.MOVE),
    "instruction": (
        *(BytePass.DIVIDE, BytePass.ROOT, BytePass.EXP, BytePass.TANH, BytePass.POWER),
        *(BytePass.RANDOM, BytePass.ADD, BytePass.MASKED),
    ),
    "row": (BytePass.STRIDED, BytePass.GATHER, BytePass.SCATTER),
    "score": (BytePass.SCORE,),
}
"""The sorts of passes that a probe stands for."""

_LEAST_SHARE = 0.02
"""A rate is never below this share of its probe's time, however much the known rates explain."""

_VISITS, _SAMPLES, _SAMPLE_NS, _MOST_REPEATS = 3, 25, 150_000, 1024
_ELEMENTS, _SHARED_ELEMENTS, _ROWS = 1 << 15, 1 << 17, 512


@dataclass(frozen=True, slots=True)
class Probe:
    """One call: on one thread, or on all, which sleep before it if `is_asleep`.

    It is bound `num_copies` times, and the copies take turns: with many, what a call of numpy reads
    has left the caches before it is made again, as in a step.
    """

    op: str
    attrs: Attrs
    inputs: Operands
    outputs: Operands
    on_all_threads: bool = False
    is_asleep: bool = False
    num_copies: int = 1

    @property
    def work(self) -> Work:
        """What the call does, by the kernel that a plan has for it."""
        _, needs = catalogue.select_kernel(self.op, self.attrs, self.inputs, self.outputs)
        if needs.work is None:
            raise LookupError(f"the kernel of {self.op!r} does not describe its work")
        return needs.work

    def bind(self, *, on_all_threads: bool) -> Launch:
        """Return the launch, on numbers of its own."""
        with nullcontext() if on_all_threads else runtime.at_most_threads(1):
            name, needs = catalogue.select_kernel(self.op, self.attrs, self.inputs, self.outputs)
            raw = np.zeros(needs.workspace_bytes + ALIGNMENT_BYTES, np.uint8)
            start = -raw.ctypes.data % ALIGNMENT_BYTES
            kernel = catalogue.kernels_by_name()[name]
            return require_plan(kernel, self.attrs, self.inputs, self.outputs).bind(
                tuple([_filled(operand) for operand in self.inputs]),
                tuple([_filled(operand) for operand in self.outputs]),
                raw[start : start + needs.workspace_bytes],
            )


Measure = Callable[[Probe], float]
"""Return how long the call of a probe takes, in nanoseconds, when it is repeated."""


def probes() -> dict[str, Probe]:
    """Return every probe by what it reveals."""
    table, ids, picks = _dense(256, 64), _dense(1024, dtype=DType.INT32), _dense(1024, 64)
    heads, statistic = _dense(1, 4, 128, 64), _dense(1, 4, 128)
    attention: Attrs = {"scale": 0.125, "causal": True}
    by_rate = {
        "call": _program("add", 1, 1),
        "move": _program("add", 1, _ELEMENTS),
        "instruction": _program("sqrt", 1, _ELEMENTS, times=4),
        "loop": _program("mul", _ELEMENTS // 8, 8),
        **{f"product {size}": _product(math.isqrt(size)) for size in FACTORS},
        "row": Probe("embedding", {}, (table, ids), (picks,)),
        "score": Probe("attention", attention, (heads,) * 3, (heads, statistic, statistic)),
        **{f"miss {size}": _program("add", 1, size // 8) for size in DISTANCES_BYTES},
    }
    if runtime.is_enabled() and runtime.num_threads() > 1:
        by_rate["all product"] = replace(by_rate[_NEAREST], on_all_threads=True)
        by_rate["all miss"] = replace(by_rate[_FARTHEST], on_all_threads=True)
        awake = replace(_program("sqrt", 1, _SHARED_ELEMENTS, times=4), on_all_threads=True)
        by_rate |= {"awake": awake, "asleep": replace(awake, is_asleep=True)}
    if not runtime.is_enabled():
        by_rate["varied call"] = replace(_program("add", 1, 1, times=14), num_copies=128)
    return by_rate


_FARTHEST, _NEAREST = f"miss {DISTANCES_BYTES[-1]}", f"product {FACTORS[0]}"


def _product(side: int) -> Probe:
    """Return the product of some rows with a square matrix."""
    x = _dense(_ROWS, side)
    return Probe("matmul", {}, (x, _dense(side, side)), (x,))


def _program(op: str, rows: int, columns: int, times: int = 1) -> Probe:
    """Return an instruction over a matrix, several times: "add" a scalar, "mul" by a column."""
    kind, second_rows = (Kind.ROW, rows) if op == "mul" else (Kind.SCALAR, 1)
    inputs = (ProgramInput(DType.FLOAT32, Kind.FULL), ProgramInput(DType.FLOAT32, kind))
    second = () if op == "sqrt" else (1,)
    steps = [
        Instruction(op, (n + 1 if n else 0, *second), DType.FLOAT32, Kind.FULL)
        for n in range(times)
    ]
    program = FusedProgram(inputs, tuple(steps), (1 + times,))
    attrs: Attrs = {"program": program, "rows": rows, "columns": columns}
    matrix = _dense(rows, columns)
    return Probe("fused", attrs, (matrix, _dense(second_rows, 1)), (matrix,))


def calibrate(measure: Measure) -> Rates:
    """Return the rates that explain the times of all probes.

    All are visited several times, and of the visits the least counts: what others do on the machine
    only adds, for moments, and rarely meets a probe each time.
    """
    by_rate = probes()
    visits = [{rate: measure(probe) for rate, probe in by_rate.items()} for _ in range(_VISITS)]
    times = {rate: min([visit[rate] for visit in visits]) for rate in by_rate}
    work = {rate: probe.work for rate, probe in by_rate.items()}

    def rest_ns(rates: Rates, rate: str, known: Work) -> float:
        """Return what the known part of its work leaves of a probe's time."""
        return max(times[rate] - rates.price(known, 0.0).busy_ns, _LEAST_SHARE * times[rate])

    def with_passes(rates: Rates, rate: str) -> Rates:
        sorts = _SORTS[rate]
        passes = [(sort, size) for sort, size in work[rate].passes if sort in sorts]
        # None, where numpy computes what is probed, and describes it by passes of other sorts.
        reference_ns = sum([size * REFERENCE.pass_ns_of(sort) for sort, size in passes])
        factor = rest_ns(rates, rate, replace(work[rate], passes=())) / (reference_ns or math.inf)
        column = zip(BytePass, rates.pass_ns, strict=True)
        return replace(
            rates, pass_ns=tuple([ns * factor if s in sorts else ns for s, ns in column])
        )

    rates = replace(REFERENCE, call_ns=times["call"] / work["call"].calls)
    rates = with_passes(with_passes(rates, "move"), "instruction")
    instructions = tuple([x for x in work["loop"].passes if x[0] is not BytePass.MOVE])
    loops_ns = rest_ns(rates, "loop", replace(work["loop"], loops=0.0, passes=instructions))
    flops_per_ns: list[float] = []
    for rate in [f"product {size}" for size in FACTORS]:
        slow_ns = replace(rates, flops_per_ns=(1.0, 1.0)).products_ns(work[rate])
        flops_per_ns.append(slow_ns / rest_ns(rates, rate, replace(work[rate], products=())))
    rates = replace(rates, loop_ns=loops_ns / work["loop"].loops, flops_per_ns=tuple(flops_per_ns))
    rates = with_passes(with_passes(rates, "row"), "score")
    misses: list[float] = []
    for size in DISTANCES_BYTES:
        rate = f"miss {size}"
        known = work[rate]
        if known.is_native:  # computing hides behind what is measured
            known = replace(known, passes=tuple([x for x in known.passes if x[0] is BytePass.MOVE]))
        known_ns = rates.price(known, 0.0).busy_ns
        # A level may be as fast as the one that operands were measured in: then nothing is left.
        misses.append(max(times[rate] - known_ns, 0.0) / size)
    rates = replace(rates, miss_ns=tuple(misses))
    if "varied call" in times:
        # The probes before repeat one call of numpy, which is quicker than calls that vary.
        rates = replace(rates, call_ns=times["varied call"] / work["varied call"].calls)
    return _with_threads(rates, times) if "asleep" in times else rates


def _with_threads(rates: Rates, times: Mapping[str, float]) -> Rates:
    """Return the rates with what all threads gain, and what it takes to wake them."""
    threads = runtime.num_threads()
    pairs = ((_FARTHEST, "all miss"), (_NEAREST, "all product"))
    # Noise may say that threads slow a launch down, or gain more than there are.
    move, compute = [min(max(times[a] / times[b], 1.0), float(threads)) for a, b in pairs]
    wake_ns = max(times["asleep"] - times["awake"], 0.0)
    return replace(
        rates, num_threads=threads, move_gain=move, compute_gain=compute, wake_ns=wake_ns
    )


def _dense(*shape: int, dtype: DType = DType.FLOAT32) -> Operand:
    type_ = TensorType(dtype, shape)
    return Operand(type_, 0, contiguous_strides(shape, 4))


def _filled(operand: Operand) -> Array:
    """Return an array of small varied numbers; integers are indices below 256."""
    # 37 and 256 have no common divisor: a permutation, whose neighbours lie far apart.
    pattern = np.arange(256) * 37 % 256
    if operand.type.dtype.is_float:
        return np.resize((pattern / 256 + 0.25).astype(operand.dtype), operand.shape)
    return np.resize(pattern.astype(operand.dtype), operand.shape)


def stopwatch(clock: Clock) -> Measure:
    """Return how to measure a probe here: the median of some short samples.

    A chain takes the sum of what its launches usually take; the least of each is shorter.
    """

    def measure(probe: Probe) -> float:
        copies = [probe.bind(on_all_threads=probe.on_all_threads) for _ in range(probe.num_copies)]
        before = probe.bind(on_all_threads=False) if probe.is_asleep else _nothing
        once = _in_turns(copies)
        once()
        once_ns = max(_time(once, clock) // len(copies), 1)
        repeats = 1 if probe.is_asleep else max(1, min(_MOST_REPEATS, _SAMPLE_NS // once_ns))
        # A sample runs the next few copies, not all: one that is long is rarely undisturbed.
        turns = cycle(copies)
        chains = [_in_turns([next(turns) for _ in range(repeats)]) for _ in copies]
        samples = list[int]()
        for n in range(_SAMPLES):
            before()
            samples.append(_time(chains[n % len(chains)], clock))
        return median(samples) / repeats

    return measure


def _nothing() -> None:
    """Return at once."""


def _in_turns(launches: list[Launch]) -> Launch:
    """Return the launches one after the other; in C without the interpreter in between."""
    native = tuple([launch for launch in launches if isinstance(launch, NativeLaunch)])
    if len(native) == len(launches):
        return NativeChain(native)

    def run() -> None:
        for launch in launches:
            launch()

    return run


def _time(launch: Launch, clock: Clock) -> int:
    before = clock()
    launch()
    return clock() - before


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


def _chain(
    plan: Plan, actor: Actor, rates: Rates, kernels: Mapping[str, HostKernel]
) -> tuple[Price, ...]:
    works = [_work(plan, launch, kernels.get(launch.kernel)) for launch in actor.launches]
    caches = _Caches(plan)
    total: list[Price] = []
    # The second walk counts: a step finds the caches as the step before left them.
    for _ in range(2):
        total, idle_ns = [], math.inf
        for launch, work in zip(actor.launches, works, strict=True):
            unswept = work.unswept if work is not None else ()
            missed_ns = 0.0
            for index, view in enumerate((*launch.inputs, *launch.outputs)):
                if index not in unswept:
                    missed_ns += caches.touch(plan.views[view], rates.miss_ns_at)
            price = Price(launch.duration_ns, launch.duration_ns)
            if work is not None:
                price = rates.price(work, missed_ns, idle_ns)
            idle_ns = 0.0 if price.is_shared else idle_ns + price.duration_ns
            total.append(price)
    return tuple(total)


def _work(plan: Plan, launch: PlanLaunch, kernel: HostKernel | None) -> Work | None:
    if kernel is None:
        return None
    inputs = tuple([_operand(plan.views[view]) for view in launch.inputs])
    outputs = tuple([_operand(plan.views[view]) for view in launch.outputs])
    kernel_plan = kernel.plan(dict(launch.attrs), inputs, outputs)
    return None if kernel_plan is None else kernel_plan.needs.work


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
