"""`actorflow bench`: the same rows in actorflow and in its rivals, side by side.

With `--device cuda` all compute on the GPU that is here, and rows that are too large for a host are
measured besides.

The rows are in `benchmarks/rows` of a clone, the rivals in environments that `make bench-env`
makes. What fails is named, and the rest goes on. Each row is written as soon as it is there; ^C,
SIGTERM and the end of `--seconds` end with what was measured so far, and leave no process behind.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path

from actorflow.cli.main import TUNE_HELP, epilog_of
from actorflow.environment.host import check_gpu, processor
from actorflow.environment.native import retune
from actorflow.environment.settings import Settings, devices_named
from actors.device.cuda.nvml import NvmlDevices, listed_gpus
from compiler.contract.errors import CompileError, DeviceError

from .disturbance import HostTimes, read_host_times
from .engines import (
    OURS,
    RIVALS,
    RIVALS_ON_GPU,
    ROOT,
    Child,
    Engine,
    EngineError,
    LossMismatch,
    chosen_rivals,
    command_of,
    engines_on,
    environment_of,
)
from .measure import TOLERANCE, BenchTask, Method, measure_row
from .page import bench_page
from .report import (
    Bench,
    MachineInfo,
    RowResult,
    as_json,
    check_matplotlib,
    launches_markdown,
    markdown,
    write_png,
)

_BENCHMARKS = ROOT / "benchmarks"


def main(words: Sequence[str], tools: BenchTools | None = None) -> int:
    """Run `actorflow bench` with the words that follow it; as `run`, and SystemExit for usage."""
    return run(_parser().parse_args(words), tools or BenchTools())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="actorflow bench",
        description="Compare with other engines, row by row: the same models, alternately, after"
        " their losses are compared. `make bench-env` makes the environments of the others.",
        epilog=epilog_of("bench"),
    )
    add = parser.add_argument
    here, there = [",".join([e.name for e in rivals]) for rivals in (RIVALS, RIVALS_ON_GPU)]
    add("rows", nargs="*", metavar="ROW", help="gpt, or gpt:bf16 for one precision (default: all)")
    add(
        "--against",
        metavar="ENGINES",
        help=f"default {here}, and on a GPU {there}; '' for none",
    )
    add("--device", choices=("host", "cuda"), default="host", help="device of all engines")
    add("--gpu", metavar="NAME", help="plan our rows for this GPU (default: the one present)")
    add("--rounds", type=int, default=3, metavar="N", help="rounds of each engine (default 3)")
    add("--seconds", type=float, metavar="S", help="end then, and name the rows not measured")
    add("--busy", action="store_true", help="measure again while another process spins on a core")
    add("--cold", action="store_true", help="measure first steps with empty caches too")
    add("--tune", action="store_true", help=TUNE_HELP)
    add("--launches", action="store_true", help="print the longest launches of our plans")
    add("--json", metavar="FILE", help="write the results as JSON, after each row")
    add("--markdown", metavar="FILE", help="also write the printed report, after each row")
    add("--html", metavar="FILE", help="draw times with their ranges as a page of its own")
    add("--png", metavar="FILE", help="draw the ratios; needs matplotlib")
    add(
        "--env",
        metavar="DIR",
        default=str(ROOT / ".bench-env"),
        help="folder of the other engines' environments (default: .bench-env of the clone)",
    )
    return parser


def run(options: argparse.Namespace, tools: BenchTools) -> int:
    """Compare, print the report; 1 where ours failed or losses differ, 130 after ^C, else 0.

    After another signal it is 128 and the number of that signal.

    Raises:
        CompileError: an option means nothing.
        EngineError: a rival is not known.
        DeviceError: a GPU is asked for, and there is none.
        OSError: a file cannot be written.
    """
    ours, rivals = engines_on(options.device)
    if options.gpu is not None:
        check_gpu(options.gpu, devices_named(options.device, "--device"), "--gpu")
        ours = replace(ours, environment=(*ours.environment, ("ACTORFLOW_GPU", options.gpu)))
    rivals = chosen_rivals(options.against, rivals)
    tasks = _tasks(options.rows, options.device)
    _check(options)
    processor, untold = _processor(options.device, tools), tools.read_host().untold
    machine = MachineInfo(processor, len(os.sched_getaffinity(0)), {}, {}, untold)
    for sentence in untold:
        _say(sentence)
    if options.tune:
        tools.retune(
            replace(Settings.from_env(os.environ), cache=_cache_of(OURS, Path(options.env)))
        )
    engines = (ours, *rivals)
    start = partial(tools.start, Path(options.env))
    method = Method(start, options.rounds, options.cold, options.busy, _say, tools.read_host)
    rows: list[RowResult] = []
    code, why = 0, "not reached yet"
    try:
        with stopped_by_signals(options.seconds):
            if options.device == "host":
                gflops = _gemm(engines, start)
                machine = replace(machine, fp32_gflops=gflops["fp32"], bf16_gflops=gflops["bf16"])
            for task in tasks:
                rows.append(_measured(tools.measure_row, task, engines, method))
                if options.launches:
                    print(_launches(task, start))
                _write(_so_far(machine, rows, tasks, why), options)
    except KeyboardInterrupt as stop:
        number = stop.number if isinstance(stop, Stopped) else signal.SIGINT
        is_late = number == signal.SIGALRM
        why = f"--seconds {options.seconds:g} are over" if is_late else f"stopped by {number.name}"
        code = 0 if is_late else 128 + number
        _say(f"{why}; what follows was measured before")
    bench = _so_far(machine, rows, tasks, why)
    print(markdown(bench))
    _write(bench, options)
    if options.png:
        write_png(bench, Path(options.png))
    return code or int(any([result.ours is None for result in rows]))


class Stopped(KeyboardInterrupt):
    """A signal ends the comparison, wherever it is; `number` is that signal."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def stopped_by_signals(seconds: float | None) -> Iterator[None]:
    """Raise Stopped in this block for ^C, SIGTERM and SIGHUP, and with SIGALRM after some time."""

    def stop(number: int, _: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        raise Stopped(signal.Signals(number))

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds or 0.0)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _so_far(
    machine: MachineInfo, rows: Sequence[RowResult], tasks: Sequence[BenchTask], why: str
) -> Bench:
    names = [f"{task.row} {task.precision}" for task in tasks[len(rows) :]]
    return Bench(machine, tuple(rows), tuple(names), why if names else "")


def _processor(device: str, tools: BenchTools) -> str:
    """Return what computes. Raises DeviceError without the GPU that is asked for.

    The emulation is refused: it is no measure of speed.
    """
    if device == "host":
        return processor()
    if Settings.from_env(os.environ).emulated_gpus:
        raise DeviceError(
            "bench: --device cuda measures a GPU, and ACTORFLOW_CUDA=emulated runs on the host:"
            " take it out of the environment"
        )
    here = tools.listed_gpus(os.environ)
    if here.problem or not here.gpus:
        raise DeviceError(
            f"bench: --device cuda measures a GPU, and {here.problem or 'none is here'}"
        )
    return f"{here.gpus[0].name}, driver {here.driver}, {processor()}"


def _tasks(names: Sequence[str], device: str) -> tuple[BenchTask, ...]:
    """Return what to measure. Raises CompileError for unknown rows."""
    listing = _BENCHMARKS / "list_rows.py"
    listed = subprocess.run([sys.executable, str(listing), device], capture_output=True, check=True)
    all_tasks = tuple([BenchTask(*row) for row in json.loads(listed.stdout)])
    if not names:
        return all_tasks
    tasks: list[BenchTask] = []
    for name in names:
        row, _, precision = name.partition(":")
        fitting = [t for t in all_tasks if t.row == row and precision in ("", t.precision)]
        if not fitting:
            names_known = ", ".join([f"{t.row}:{t.precision}" for t in all_tasks])
            raise CompileError(f"bench: expected rows among {names_known}, got {name!r}")
        tasks += [task for task in fitting if task not in tasks]
    return tuple(tasks)


def _check(options: argparse.Namespace) -> None:
    if options.rounds < 1:
        raise CompileError(f"--rounds: expected 1 or more, got {options.rounds}")
    if options.seconds is not None and not 0 < options.seconds < float("inf"):
        raise CompileError(f"--seconds: expected more than 0, got {options.seconds:g}")
    if options.launches and options.device != "host":
        raise CompileError(
            "--launches times the host's launches; those of a GPU are timed by the section products"
            " of benchmarks/gpu/check.sh"
        )
    if options.png:
        check_matplotlib()
    for name in (options.json, options.markdown, options.html, options.png):
        if name and not Path(name).absolute().parent.is_dir():
            raise FileNotFoundError(2, "no such directory", str(Path(name).parent))
        if name and Path(name).exists() and not Path(name).is_file():
            raise CompileError(f"{name} is no file, and a file is to be put in its place")


def start_engine(
    environments: Path, engine: Engine, task: BenchTask | None, variant: str, is_cold: bool
) -> Child:
    """Start an engine, with a row or for its matrix products alone."""
    cache = _cache_of(engine, environments)
    if is_cold:
        shutil.rmtree(cache, ignore_errors=True)
    if engine.cache_variables:
        cache.mkdir(parents=True, exist_ok=True)
    command = command_of(engine, _BENCHMARKS / "engines", environments)
    arguments = () if task is None else (task.row, task.precision, variant, engine.device)
    num_threads = len(os.sched_getaffinity(0))
    environment = environment_of(engine, os.environ, cache, num_threads)
    return Child(f"{engine.name} {variant}".strip(), (*command, *arguments), environment)


MeasureRow = Callable[[BenchTask, Sequence[Engine], Method], RowResult]


@dataclass(frozen=True, slots=True)
class BenchTools:
    """What a comparison does on a machine: it lists GPUs, starts engines, measures and forgets."""

    start: Callable[..., Child] = start_engine
    measure_row: MeasureRow = measure_row
    listed_gpus: Callable[[Mapping[str, str]], NvmlDevices] = listed_gpus
    retune: Callable[[Settings], bool] = retune
    read_host: Callable[[], HostTimes] = read_host_times


def _cache_of(engine: Engine, environments: Path) -> Path:
    """Return the folder that an engine keeps compiled programs in, for comparisons alone."""
    return environments / "cache" / engine.name


def _gemm(engines: Sequence[Engine], start: partial[Child]) -> dict[str, dict[str, float]]:
    """Return, by precision, the GFLOP/s of each library that is in the environments."""
    gflops: dict[str, dict[str, float]] = {precision: {} for precision in TOLERANCE}
    for engine in {engine.script: engine for engine in reversed(engines)}.values():
        _say(f"peak: {engine.name}")
        try:
            with start(engine, None, "", False) as child:
                answer = child.ask("gemm")
            for precision, found in gflops.items():
                found |= answer[precision]
        except EngineError as error:
            _say(str(error))
    return gflops


def _measured(
    measure_row: MeasureRow, task: BenchTask, engines: Sequence[Engine], method: Method
) -> RowResult:
    """Return the result of a row; one whose losses differ has no times, but the difference."""
    try:
        return measure_row(task, engines, method)
    except LossMismatch as error:
        _say(f"ERROR: {error}")
        names = task.row, task.precision, task.items, task.item
        return RowResult(*names, 0.0, None, (), (f"ERROR: {error}",))


def _launches(task: BenchTask, start: partial[Child]) -> str:
    try:
        with start(OURS, task, "", False) as child:
            child.ask("first")
            launches = child.ask("launches")["launches"]
    except EngineError as error:
        return f"{task.row}: {error}"
    return launches_markdown(f"{task.row} {task.precision}", launches)


def _write(bench: Bench, options: argparse.Namespace) -> None:
    """Put what is known into the files, each of which is the old one or the new one at any time."""
    values = as_json(bench)
    texts = {
        options.json: json.dumps(values, indent=1) + "\n",
        options.markdown: markdown(bench),
        options.html: bench_page(values, date.today()),
    }
    for name, text in texts.items():
        if name:
            part = Path(f"{name}.part")
            part.write_text(text, encoding="utf-8")
            part.replace(name)


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)
