"""A row, measured: first steps, equal losses, the best settings, interleaved rounds.

Every engine has a process of its own, and they take turns: all run a few steps, then all run a few
more, in the opposite order, so that whatever else happens on the machine happens to all. Nothing is
timed before the losses of the first steps have been found equal.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from statistics import fmean, median

from .disturbance import Disturbance, HostTimes, disturbance_between, read_host_times
from .engines import Child, Engine, EngineError, LossMismatch, end_process, start_process
from .report import MB, Measured, RowResult

NUM_LOSSES = 10
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
_TURN_MS = 300.0
_CHUNKS = 5
_TRIAL_CHUNKS = 3
_SPIN = "while True: pass"


@dataclass(frozen=True, slots=True)
class BenchTask:
    """What to measure: a row by its name, one precision, and the items of one step."""

    row: str
    precision: str
    items: int
    item: str
    is_training: bool = True


@dataclass(frozen=True, slots=True)
class Method:
    """How to measure it.

    `start(engine, task, variant, is_cold)` starts a process; `is_cold` empties its caches
    first. `rounds` are turns of each engine, and as many at most are run again because the host was
    taken away, which `read` tells. `say` is told what is under way.
    """

    start: Callable[[Engine, BenchTask, str, bool], Child]
    rounds: int
    is_cold: bool
    is_busy: bool
    say: Callable[[str], None]
    read: Callable[[], HostTimes] = read_host_times


@dataclass(frozen=True, slots=True)
class _Turn:
    """The times of a step in each chunk of a turn, and what the host took from it."""

    times: tuple[float, ...]
    disturbance: Disturbance


@dataclass(slots=True, eq=False)
class _Racer:
    """An engine under way."""

    engine: Engine
    variant: str
    child: Child
    losses: tuple[float, ...]
    first: dict[str, object]
    first_step_s: float
    cold_first_step_s: float | None
    steps: int = 1
    turns: list[_Turn] = field(default_factory=list)
    busy_turns: list[_Turn] = field(default_factory=list)
    num_repeated: int = 0
    idle_s: float = 0.0
    idle_cpu_s: float = 0.0


def measure_row(task: BenchTask, engines: Sequence[Engine], method: Method) -> RowResult:
    """Measure one row; the first engine is ours, and judges the others' losses if it runs.

    An engine that fails is named in the result, and the others go on.

    Raises:
        LossMismatch: the losses of two engines differ.
    """
    failures: list[str] = []
    with ExitStack() as stack:
        ready: list[_Racer] = []
        for engine in [e for e in engines if e.takes(task.precision, task.is_training)]:
            method.say(f"{task.row} {task.precision}: {engine.name}")
            for variant in engine.variants_of(task.row):
                ready += _started(task, engine, variant, method, stack, failures)
                check_losses(task, ready)
        racers: list[_Racer] = []
        for engine in engines:
            racers += _fastest([r for r in ready if r.engine is engine], failures)
        method.say(f"{task.row} {task.precision}: {method.rounds} rounds")
        _race(racers, method.rounds, method, failures, is_busy=False)
        if method.is_busy:
            with busy_core():
                _race(racers, max(1, method.rounds // 2), method, failures, is_busy=True)
        measurements = [m for m in (_ended(racer, failures) for racer in racers) if m is not None]
    ours = next((m for m in measurements if m.engine == engines[0].name), None)
    flops = [r.first.get("flops") for r in racers]
    num_flops = next((float(f) for f in flops if isinstance(f, (int, float))), 0.0)
    rivals = tuple([m for m in measurements if m is not ours])
    names = task.row, task.precision, task.items, task.item
    return RowResult(*names, num_flops, ours, rivals, tuple(failures))


def check_losses(task: BenchTask, ready: Sequence[_Racer]) -> None:
    """Raise LossMismatch where the losses of the newest engine are not those of the first."""
    if not ready:
        return
    judge, racer, tolerance = ready[0], ready[-1], TOLERANCE[task.precision]
    for step, (want, got) in enumerate(zip(judge.losses, racer.losses, strict=True), 1):
        if not math.isfinite(got) or abs(got - want) > tolerance * abs(want):
            raise LossMismatch(
                f"{task.row} {task.precision}: the loss of step {step} is {got!r} in"
                f" {_name(racer)} and {want!r} in {_name(judge)}, which is more than {tolerance:g}"
                " apart: they do not compute the same, so nothing of it is timed"
            )


def _name(racer: _Racer) -> str:
    return f"{racer.engine.name} {racer.variant}".strip()


def _started(
    task: BenchTask,
    engine: Engine,
    variant: str,
    method: Method,
    stack: ExitStack,
    failures: list[str],
) -> list[_Racer]:
    """Start an engine twice, the second time with warm caches; return it if it does not fail."""
    try:
        cold = None
        if engine.cache_variables:
            with method.start(engine, task, variant, method.is_cold) as child:
                child.ask("first")
                cold = child.age_s if method.is_cold else None
                child.ask("losses", count=1)
        child = stack.enter_context(method.start(engine, task, variant, False))
        first = child.ask("first")
        first_step_s = child.age_s
        rest = child.ask("losses", count=NUM_LOSSES - 1)["losses"]
    except EngineError as error:
        failures.append(str(error))
        return []
    losses = (float(first["loss"]), *map(float, rest))
    return [_Racer(engine, variant, child, losses, first, first_step_s, cold)]


def _fastest(ready: Sequence[_Racer], failures: list[str]) -> list[_Racer]:
    """Give each enough steps for a turn, end all but the fastest, and return that one, if any."""
    alive: list[tuple[float, _Racer]] = []
    for racer in ready:
        try:
            ms = median(racer.child.ask("run", steps=1, chunks=_TRIAL_CHUNKS)["ms"])
            racer.steps = max(1, int(_TURN_MS / _CHUNKS / max(ms, 1e-3)))
            alive.append((median(_times_of_one_turn(racer)), racer))
        except EngineError as error:
            failures.append(str(error))
    best = [racer for _, racer in sorted(alive, key=lambda pair: pair[0])[:1]]
    for racer in ready:
        if racer not in best:
            racer.child.end()
    return best


def _times_of_one_turn(racer: _Racer) -> list[float]:
    answer = racer.child.ask("run", steps=racer.steps, chunks=_CHUNKS)
    return [float(ms) for ms in answer["ms"]]


def _turn(racer: _Racer, method: Method) -> _Turn:
    """Run one turn; again while too much of it was stolen and repeats are left.

    Of one turn's runs that of least stolen time counts, however long its steps took.
    """
    runs: list[_Turn] = []
    while not runs or (runs[-1].disturbance.is_over and racer.num_repeated < method.rounds):
        racer.num_repeated += bool(runs)
        before, cpu_s = method.read(), racer.child.cpu_s()
        times = tuple(_times_of_one_turn(racer))
        own_s = racer.child.cpu_s() - cpu_s
        runs.append(_Turn(times, disturbance_between(before, method.read(), own_s)))
    return min(runs, key=lambda turn: turn.disturbance.stolen or 0.0)


def _race(
    racers: list[_Racer], rounds: int, method: Method, failures: list[str], *, is_busy: bool
) -> None:
    """Let the racers take turns; one that fails leaves the list."""
    for number in range(rounds):
        for racer in list(racers if number % 2 == 0 else reversed(racers)):
            others = [(r, r.child.cpu_s()) for r in racers if r is not racer]
            begin = racer.child.age_s
            try:
                (racer.busy_turns if is_busy else racer.turns).append(_turn(racer, method))
            except EngineError as error:
                failures.append(str(error))
                racers.remove(racer)
                continue
            for other, before in others:
                other.idle_s += racer.child.age_s - begin
                other.idle_cpu_s += other.child.cpu_s() - before


def _ended(racer: _Racer, failures: list[str]) -> Measured | None:
    try:
        answer = racer.child.ask("quit")
    except EngineError as error:
        failures.append(str(error))
        return None
    state = racer.first.get("state_bytes", 0)
    above = answer["run_rss"] - answer["base_rss"] - (state if isinstance(state, int) else 0)
    times = [ms for turn in racer.turns for ms in turn.times]
    rounds = [median(turn.times) for turn in racer.turns]
    shares = [turn.disturbance for turn in racer.turns]
    measured = Measured(
        racer.engine.name,
        racer.variant,
        str(racer.first.get("settings", "")),
        median(times),
        len(times),
        answer["peak_rss"] / MB,
        above / MB,
        racer.first_step_s,
        racer.cold_first_step_s,
        idle_share=racer.idle_cpu_s / racer.idle_s if racer.idle_s else 0.0,
        low_ms=min(rounds),
        high_ms=max(rounds),
        host=Disturbance(
            *[_mean([getattr(s, f.name) for s in shares]) for f in fields(Disturbance)]
        ),
        num_repeated=racer.num_repeated,
        num_disturbed=sum([share.is_over for share in shares]),
    )
    if not racer.busy_turns:
        return measured
    busy = median([ms for turn in racer.busy_turns for ms in turn.times])
    return replace(measured, busy_slowdown=busy / measured.ms)


def _mean(shares: Sequence[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return fmean(known) if known else None


@contextmanager
def busy_core() -> Iterator[None]:
    """Let another process keep one core busy."""
    process = start_process([sys.executable, "-c", _SPIN])
    try:
        yield
    finally:
        end_process(process)
