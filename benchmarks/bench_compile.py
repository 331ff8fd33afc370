"""Compile time and memory against the number of nodes, for training graphs of several kinds.

    python benchmarks/bench_compile.py [--kinds mlp,transformer,branches,chain]
        [--nodes 1000,10000,30000,100000] [--rounds 1] [--passes] [--start]

Nothing is run. Every measurement has a process of its own: one compiles as a job does, from the
model to the plan, and tells its time and what the resident set grew by; with `--passes` another one
takes the processor time of each pass, which others on the machine disturb less. The nodes are those
of the graph that is lowered, of which a forward pass has about a third. The slope is that of time
over nodes on log-log axes, by least squares.

`--start` times what a process does from its start to the end of its first step on the GPT of
`gpt_jobs.py`, with a plan in the cache.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

BATCH, WIDTH, HEADS, SEQ = 4, 8, 2, 4
NUM_BRANCHES = 64
"""Branches that start at one value and end in one sum."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=",".join(MODELS))
    parser.add_argument("--nodes", default="1000,10000,30000,100000")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--passes", action="store_true")
    parser.add_argument("--start", action="store_true")
    parser.add_argument("--one", choices=("whole", "passes", "start"), help=argparse.SUPPRESS)
    parser.add_argument("--units", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("ACTORFLOW_CACHE", "off")
    if args.one:
        print(json.dumps(_ONE[args.one](args.kinds, args.units)))
        return
    print(f"load {os.getloadavg()[0]:.2f}, {os.cpu_count()} cores, Python {sys.version.split()[0]}")
    sizes = [int(n) for n in args.nodes.split(",")]
    for kind in args.kinds.split(",") if not args.start else ():
        print_kind(kind, sizes, args.rounds, with_passes=args.passes)
    if args.start:
        print_start(args.rounds)


# -- the graphs ----------------------------------------------------------------------------------


def mlp(units: int):
    """Return a deep MLP; a unit is a layer."""
    import actorflow as af
    from actorflow import nn

    class Deep(nn.Module):
        def __init__(self):
            self.layers = [nn.Linear(WIDTH, WIDTH) for _ in range(units)]

        def __call__(self, x):
            for layer in self.layers:
                x = af.relu(layer(x))
            return x

    return Deep()


def transformer(units: int):
    """Return a stack of transformer blocks; a unit is a block."""
    from actorflow import nn

    class Stack(nn.Module):
        def __init__(self):
            self.blocks = [nn.TransformerBlock(WIDTH, heads=HEADS) for _ in range(units)]

        def __call__(self, x):
            x = x.reshape(1, BATCH, WIDTH)
            for block in self.blocks:
                x = block(x)
            return x

    return Stack()


def branches(units: int):
    """Return branches that meet in one sum; a unit is one layer in each of them."""
    import actorflow as af
    from actorflow import nn

    class Wide(nn.Module):
        def __init__(self):
            self.rows = [
                [nn.Linear(WIDTH, WIDTH) for _ in range(units)] for _ in range(NUM_BRANCHES)
            ]

        def __call__(self, x):
            total = x
            for row in self.rows:
                y = x
                for layer in row:
                    y = af.tanh(layer(y))
                total = total + y
            return total

    return Wide()


def chain(units: int):
    """Return many small ops on one parameter; a unit is four of them."""
    import actorflow as af
    from actorflow import nn

    class Small(nn.Module):
        def __init__(self):
            self.scale = nn.Linear(WIDTH, WIDTH)

        def __call__(self, x):
            y = self.scale(x)
            for k in range(units):
                y = af.tanh(y * (1.0 + 1.0 / (k + 1)) + x) * y
            return y

    return Small()


MODELS: dict[str, Callable] = {
    "mlp": mlp,
    "transformer": transformer,
    "branches": branches,
    "chain": chain,
}


def make(kind: str, units: int):
    """Return a training job, its model and the types of its batches."""
    import actorflow as af

    @af.job(optimizer=af.optim.AdamW(1e-3))
    def train(model, batch):
        return (model(batch.x) * batch.x).mean()

    types = {"x": af.TensorType(af.DType.FLOAT32, (BATCH, WIDTH))}
    return train, MODELS[kind](units), types


def count_nodes(kind: str, units: int) -> int:
    """Return the nodes of the graph that is lowered."""
    from actorflow.compile.hardware import hardware_for
    from compiler.contract.placement import HOST
    from compiler.graph.target import CompileOptions
    from compiler.pipeline.pipeline import PASSES
    from compiler.pipeline.rewrites import PassContext

    job, model, types = make(kind, units)
    graph, options, hardware = (
        job.graph(model, types),
        CompileOptions("train"),
        hardware_for((HOST,)),
    )
    context = PassContext(hardware, options)
    for step in [step for step in PASSES if step.is_wanted(options)]:
        graph = step.run(graph, context)
    return len(graph.nodes)


def units_for(kind: str, num_nodes: int) -> tuple[int, int]:
    """Return how many units make about that many nodes, and how many exactly."""
    few, more = count_nodes(kind, 3), count_nodes(kind, 7)
    each = (more - few) // 4
    units = max(1, round((num_nodes - few) / each) + 3)
    return units, few + (units - 3) * each


# -- one process per measurement -----------------------------------------------------------------


def whole(kind: str, units: int) -> dict[str, float]:
    """Compile as a job does; return seconds and bytes."""
    from gpt_jobs import forget_peak, peak_bytes, resident_bytes

    small, tiny_model, types = make(kind, 1)
    small.compile(tiny_model, types)  # imports and what is made once belong to no graph
    job, model, types = make(kind, units)
    forget_peak()
    base = resident_bytes()
    before, cpu = time.perf_counter(), time.process_time()
    graph = job.graph(model, types)
    traced = time.perf_counter()
    plan = job.compile(model, types)
    compiled = time.perf_counter()
    return {
        "trace": traced - before,
        "compile": compiled - traced,
        "cpu": time.process_time() - cpu,
        "grown": peak_bytes() - base,
        "kept": resident_bytes() - base,
        "traced_nodes": len(graph.nodes),
        "launches": sum([len(actor.launches) for actor in plan.actors]),
    }


def by_pass(kind: str, units: int) -> dict[str, float]:
    """Return the processor's seconds for each pass and for what surrounds them."""
    from actorflow.compile.compiling import cache_key
    from actorflow.compile.hardware import hardware_for
    from actorflow.environment.native import enable_native
    from actorflow.environment.settings import Settings, collector_paused
    from actors.race.race import check_races
    from compiler.contract.placement import HOST
    from compiler.contract.plan import Plan
    from compiler.graph.target import CompileOptions
    from compiler.lowering.lower import lower
    from compiler.pipeline.pipeline import PASSES
    from compiler.pipeline.rewrites import PassContext
    from compiler.verify.verify import verify_plan

    small, tiny_model, types = make(kind, 1)
    small.compile(tiny_model, types)
    job, model, types = make(kind, units)
    seconds: dict[str, float] = {}

    def timed(name: str, run: Callable):
        before = time.process_time()
        with collector_paused():
            result = run()
            seconds[name] = time.process_time() - before
        return result

    graph = timed("trace", lambda: job.graph(model, types))
    timed("same graph?", lambda: job.graph(model, types))
    settings = Settings.from_env(os.environ)
    enable_native(settings)
    options, hardware = CompileOptions("train"), hardware_for((HOST,))
    timed("key", lambda: cache_key(graph, options, hardware))
    context = PassContext(hardware, options)
    for step in [step for step in PASSES if step.is_wanted(options)]:
        graph = timed(step.name, lambda step=step, graph=graph: step.run(graph, context))
    plan = timed("lower", lambda: lower(graph, hardware, options, ""))
    timed("verify", lambda: verify_plan(plan))
    timed("races", lambda: check_races(plan))
    data = timed("to bytes", plan.to_bytes)
    timed("from bytes", lambda: Plan.from_bytes(data))
    return seconds


def start(kind: str, units: int) -> dict[str, float]:
    """Return the milliseconds of each part from the start of this process to its first step."""
    began = _seconds_since_start()
    marks = {"python": began}

    def mark(name: str) -> None:
        marks[name] = _seconds_since_start() - sum(marks.values())

    import gpt_jobs

    mark("numpy")
    import actorflow  # noqa: F401

    mark("import actorflow")
    model, data = gpt_jobs.make_model(6)
    mark("model")
    job = gpt_jobs.make_job()
    plan = job.compile(model, data)
    mark("trace and find plan")
    ends: list[float] = []
    job.fit(
        model,
        data,
        steps=1,
        progress=False,
        on_step=lambda step, metrics: ends.append(_seconds_since_start()),
    )
    marks["load and first step"] = ends[0] - sum(marks.values())
    return {**{name: value * 1e3 for name, value in marks.items()}, "launches": len(plan.actors)}


def _seconds_since_start() -> float:
    """Return the age of this process."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


_ONE: dict[str, Callable[[str, int], dict[str, float]]] = {
    "whole": whole,
    "passes": by_pass,
    "start": start,
}


def measured(what: str, kind: str, units: int, rounds: int, **env: str) -> list[dict[str, float]]:
    """Return what some processes, one after the other, found."""
    command = [sys.executable, __file__, "--one", what, "--kinds", kind, "--units", str(units)]
    rows = []
    for _ in range(rounds):
        process = subprocess.run(
            command, check=False, capture_output=True, text=True, env={**os.environ, **env}
        )
        if process.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{process.stderr}")
        rows.append(json.loads(process.stdout))
    return rows


def medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median([row[name] for row in found]) for name in found[0]}


# -- tables --------------------------------------------------------------------------------------


def print_kind(kind: str, sizes: list[int], rounds: int, *, with_passes: bool) -> None:
    print(f"\n### {kind}\n")
    print(
        "| nodes | traced | launches | trace s | compile s | CPU s of both | us/node |"
        " peak kB/node | kept kB/node |"
    )
    print("|---" * 9 + "|", flush=True)
    points, columns = [], []
    for size in sizes:
        units, nodes = units_for(kind, size)
        median = medians(measured("whole", kind, units, rounds))
        total = median["trace"] + median["compile"]
        points.append((nodes, total))
        print(
            f"| {nodes:,} | {median['traced_nodes']:,.0f} | {median['launches']:,.0f} |"
            f" {median['trace']:.2f} | {median['compile']:.2f} | {median['cpu']:.2f} |"
            f" {total / nodes * 1e6:.0f} |"
            f" {median['grown'] / nodes / 1e3:.1f} | {median['kept'] / nodes / 1e3:.1f} |",
            flush=True,
        )
        if with_passes:
            columns.append((nodes, medians(measured("passes", kind, units, rounds))))
    print(f"\nslope {slope(points):.2f}")
    if columns:
        print_passes(columns)


def print_passes(columns: list[tuple[int, dict[str, float]]]) -> None:
    print(f"\n| pass, CPU ms at nodes | {' | '.join([f'{n:,}' for n, _ in columns])} | slope |")
    print("|---" * (len(columns) + 2) + "|")
    for name in columns[0][1]:
        times = [(nodes, seconds[name]) for nodes, seconds in columns]
        cells = " | ".join([f"{seconds * 1e3:.0f}" for _, seconds in times])
        print(f"| {name} | {cells} | {slope(times):.2f} |", flush=True)


def slope(points: list[tuple[int, float]]) -> float:
    """Return the exponent of a power law through the points, by least squares on logarithms."""
    xs, ys = [math.log(n) for n, _ in points], [math.log(max(t, 1e-6)) for _, t in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum([(x - mean_x) ** 2 for x in xs])
    both = sum([(x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)])
    return both / spread if spread else math.nan


def print_start(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        measured("start", "gpt", 1, 1, ACTORFLOW_CACHE=folder)
        median = medians(measured("start", "gpt", 1, rounds, ACTORFLOW_CACHE=folder))
    print("\n### From the start of a process to its first step, GPT, plan in the cache\n")
    print("| part | ms |\n|---|---|")
    for name, value in median.items():
        if name != "launches":
            print(f"| {name} | {value:.0f} |")
    total = sum([value for name, value in median.items() if name != "launches"])
    print(f"| **all** | **{total:.0f}** |")


if __name__ == "__main__":
    main()
