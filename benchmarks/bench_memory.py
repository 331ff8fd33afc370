"""Memory: offsets, recomputation by a cost model, real runs against torch, and the budget curve.

    python benchmarks/bench_memory.py [instances kinds models runs curve] [--data FOLDER]
        [--png FILE] [--layers 6,24] [--rounds 12]

`instances` places the public instances and graph-like ones of up to 100,000 buffers, `kinds`
perfect packings and pipelines of several seeds, in seconds of the processor. `models` plans
ResNet-50, GPT-2 and deep GPTs, which nobody runs here, within shares of what saving everything
needs. `runs` trains one GPT in fresh processes, in this engine at several budgets and in torch with
and without per-block checkpointing, and compares resident sets and bits. `curve` runs jobs at
several budgets in turns, in one process, and compares their step times.

Step times mean little while anything else runs; the load before the run is printed first.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
DATA = ROOT.parent / "shared" / "data" / "memory"
RESULTS = ROOT / "benchmarks" / "results"

CAPACITY = 1 << 20
SHARES = (1.0, 0.7, 0.5, 0.35)
TORCH = ("torch", "torch-checkpoint")
STEADY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""glibc's malloc keeps large blocks that are freed, unless this holds it to one threshold: the
best setting for torch's resident set, and of no effect on an arena."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "parts", nargs="*", default=["instances", "kinds", "models", "runs", "curve"]
    )
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--png", type=Path, default=RESULTS / "memory_curve.png")
    parser.add_argument("--layers", default="6,24")
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
        os.environ.pop(name, None)
    os.environ["ACTORFLOW_CACHE"] = "off"
    layers = [int(n) for n in args.layers.split(",")]
    print_machine()
    parts = {
        "instances": lambda: instances(args.data),
        "kinds": kinds,
        "models": models,
        "runs": lambda: [runs(n) for n in layers],
        "curve": lambda: curve(layers, args.rounds, args.png),
    }
    for part in args.parts:
        if part not in parts:
            parser.error(f"no part {part!r}; there are {', '.join(parts)}")
        print(f"\n## {part}", flush=True)
        parts[part]()


def print_machine() -> None:
    import numpy as np

    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f};"
        f" Python {platform.python_version()}, numpy {np.__version__}"
    )


# -- offsets -------------------------------------------------------------------------------------


def instances(folder: Path) -> None:
    from memory_instances import public, rows

    from memory.offsets import plan_offsets

    print("\n| instance | buffers | lower bound | peak | gap | certificate | s |")
    print("|---|---|---|---|---|---|---|")
    for row in rows(folder):
        print(
            f"| {row['name']} | {row['n']:,} | {row['lower_bound']:,} | {row['peak']:,} |"
            f" {row['gap']:.2%} | {row['certificate']} | {row['seconds']:.2f} |",
            flush=True,
        )
    print(f"\nWithin a capacity of {CAPACITY:,}:\n")
    print("| instance | buffers | peak | fits | certificate | s |\n|---|---|---|---|---|---|")
    for instance in public(folder):
        if not instance.name.endswith(str(CAPACITY)):
            continue
        before = time.perf_counter()
        plan = plan_offsets(
            instance.lower, instance.upper, instance.size, alignment=1, capacity=CAPACITY
        )
        seconds = time.perf_counter() - before
        print(
            f"| {instance.name} | {len(instance.size)} | {plan.peak_bytes:,} |"
            f" {'yes' if plan.peak_bytes <= CAPACITY else 'NO'} | {plan.certificate} |"
            f" {seconds:.2f} |",
            flush=True,
        )


def kinds() -> None:
    from memory_instances import hard_kinds

    from memory.offsets import plan_offsets

    print("\n| instance | buffers | gap | found by | CPU s |\n|---|---|---|---|---|")
    for instance in hard_kinds():
        before = time.process_time()
        plan = plan_offsets(instance.lower, instance.upper, instance.size, alignment=1)
        seconds = time.process_time() - before
        print(
            f"| {instance.name} | {len(instance.size):,} | {plan.gap:.3%} | {plan.algorithm} |"
            f" {seconds:.2f} |",
            flush=True,
        )


# -- recomputation by a cost model ---------------------------------------------------------------


def models() -> None:
    import model_graphs as graphs

    from memory.recompute.planner import Planner

    budgets = (0.9, 0.7, 0.5, 0.35, 0.25, 0.2)
    head = " | ".join(f"{b:.2f}" for b in budgets)
    print("\nExtra compute at shares of the store-all peak; least: the smallest feasible share.\n")
    print(f"| model | ops | store-all MiB | {head} | least | at | s for 0.50 | s for all |")
    print("|---" * (len(budgets) + 7) + "|")
    for name, make in graphs.MODELS.items():
        problem = make()
        top = Planner(problem).store_all.peak_bytes
        before = time.perf_counter()
        Planner(problem).plan(top // 2)
        half_seconds = time.perf_counter() - before
        before = time.perf_counter()
        planner = Planner(problem)
        cells = []
        for share in budgets:
            plan = planner.plan(int(share * top))
            cells.append(f"{plan.extra:.1%}" if plan else "-")
        least = planner.smallest
        seconds = time.perf_counter() - before
        print(
            f"| {name} | {len(problem.ops)} | {top / 2**20:,.0f} | {' | '.join(cells)} |"
            f" {least.peak_bytes / top:.3f} | {least.extra:.0%} | {half_seconds:.2f} |"
            f" {seconds:.2f} |",
            flush=True,
        )
    print("\nDeep GPTs with a vocabulary of 1,024: how the smallest peak grows with the layers.\n")
    print("| layers | ops | store-all MiB | at 0.5 | at 0.1 | least MiB | s for 0.5 | s for all |")
    print("|---|---|---|---|---|---|---|---|")
    least_of = {}
    for layers in (12, 24, 48, 96):
        problem = graphs.deep_gpt(layers)
        before = time.perf_counter()
        planner = Planner(problem)
        top = planner.store_all.peak_bytes
        half = planner.plan(top // 2).extra
        half_seconds = time.perf_counter() - before
        tenth = planner.plan(top // 10).extra
        least_of[layers] = planner.smallest.peak_bytes
        seconds = time.perf_counter() - before
        print(
            f"| {layers} | {len(problem.ops)} | {top / 2**20:,.0f} | {half:.1%} | {tenth:.1%} |"
            f" {least_of[layers] / 2**20:,.0f} | {half_seconds:.2f} | {seconds:.2f} |",
            flush=True,
        )
    power = math.log(least_of[96] / least_of[12]) / math.log(96 / 12)
    print(f"\nThe smallest peak grows like layers^{power:.2f}; a square root would be 0.50.")


# -- real runs -----------------------------------------------------------------------------------


def runs(layers: int, steps: int = 4) -> None:
    print(f"\n{layers} layers, d 384, batch 8, seq 256; fresh processes, {steps} steps\n")
    print("| engine | resident above state, MB | planned MB | losses | bits | predicted | ms |")
    print("|---|---|---|---|---|---|---|")
    free = run("actorflow", layers, steps)
    rivals = {}
    for engine in TORCH:
        for label, env in (("", {}), (", malloc held", STEADY)):
            rivals[engine + label] = run(engine, layers, steps, env=env)
    checkpointed = min(rivals[n]["above_bytes"] for n in rivals if n.startswith(TORCH[1]))
    _print_run("actorflow, store all", free, free)
    state = free["arena_bytes"] - free["step_bytes"]
    beside = 0
    for share in SHARES[1:]:
        budget = int(state + share * free["step_bytes"])
        measured = run("actorflow", layers, steps, "--budget", str(budget))
        beside = max(beside, measured["above_bytes"] - measured["step_bytes"])
        _print_run(f"actorflow, {share:.2f} of store-all", measured, free)
    # What the process has beside its arena counts too, where resident sets are compared.
    budget = state + checkpointed - beside
    measured = run("actorflow", layers, steps, "--budget", str(budget))
    _print_run("actorflow, torch's checkpointing", measured, free)
    blocks = run("actorflow", layers, steps, "--recompute", "blocks")
    _print_run("actorflow, recompute='blocks'", blocks, free)
    for label, measured in rivals.items():
        _print_run(label, measured, free)


def run(engine: str, layers: int, steps: int, *more: str, env: dict[str, str] | None = None):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpt_jobs.py"), engine]
    command += ["--layers", str(layers), "--steps", str(steps), *more]
    settings = {**os.environ, **(env or {})}
    process = subprocess.run(command, check=False, capture_output=True, text=True, env=settings)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{process.stderr}")
    return json.loads(process.stdout)


def _print_run(label: str, found: dict, free: dict) -> None:
    difference = max(abs(a - b) for a, b in zip(found["losses"], free["losses"], strict=True))
    losses = "equal" if difference == 0 else f"within {difference:.1g}"
    bits = (
        {True: "equal", False: "DIFFERENT"}[found["hash"] == free["hash"]]
        if "hash" in found
        else "-"
    )
    planned = f"{found['step_bytes'] / 1e6:.0f}" if "step_bytes" in found else "-"
    extra = f"+{found['extra']:.1%}" if "extra" in found else "-"
    print(
        f"| {label} | {found['above_bytes'] / 1e6:.0f} | {planned} | {losses} | {bits} | {extra} |"
        f" {found['ms']:.0f} |",
        flush=True,
    )


# -- the budget curve ----------------------------------------------------------------------------


def curve(all_layers: list[int], rounds: int, png: Path) -> None:
    points = {layers: _curve(layers, rounds) for layers in all_layers}
    _draw(points, png)


def _curve(layers: int, rounds: int) -> list[tuple[float, float, float, float]]:
    """Return (share, step MB, ratio of step time, predicted ratio) per budget."""
    import gpt_jobs
    import numpy as np

    gpt_jobs.warm_blas()
    model, data = gpt_jobs.make_model(layers)
    free = gpt_jobs.make_job().compile(model, data).memory[0]
    fixed = free.peak_bytes - free.temporary_bytes
    aims = {f"{s:.2f}": int(fixed + s * free.temporary_bytes) for s in SHARES}
    aims["checkpointing's"] = _torch_room(layers, fixed)
    batch = {k: np.asarray(v) for k, v in next(data).items()}
    jobs = []
    for label, budget in aims.items():
        job = gpt_jobs.make_job(None if label == "1.00" else budget)
        job_model, source = gpt_jobs.make_model(layers)
        plan = job.compile(job_model, source)
        jobs.append((label, job, job_model, plan))
    times: dict[str, list[float]] = {label: [] for label, *_ in jobs}
    for turn in range(rounds + 1):
        for label, job, job_model, _ in jobs:
            before = time.perf_counter()
            job.step(job_model, batch)
            if turn:
                times[label].append(time.perf_counter() - before)
    base = times["1.00"]
    print(f"\n{layers} layers, {rounds} rounds in turns, one process\n")
    print("| budget for temporaries | planned MB | method | again | predicted | measured | ms |")
    print("|---|---|---|---|---|---|---|")
    points = []
    for label, job, job_model, plan in jobs:
        note = plan.recomputation[0] if plan.recomputation else None
        ratio = statistics.median([a / b for a, b in zip(times[label], base, strict=True)])
        predicted = 1 + (note.extra if note else 0.0)
        planned = plan.memory[0].temporary_bytes
        print(
            f"| {label} | {planned / 1e6:.0f} | {note.method if note else 'store all'} |"
            f" {note.num_launches if note else 0} | {predicted:.3f} | {ratio:.3f} |"
            f" {statistics.median(times[label]) * 1e3:.0f} |",
            flush=True,
        )
        points.append((planned / free.temporary_bytes, planned / 1e6, ratio, predicted))
        job.close(job_model)
    return points


def _torch_room(layers: int, fixed: int) -> int:
    """Return the arena that leaves as much above the state as torch's checkpointing takes."""
    above_bytes = min(
        [run("torch-checkpoint", layers, 3, env=env)["above_bytes"] for env in ({}, STEADY)]
    )
    return fixed + above_bytes


def _draw(found: dict[int, list[tuple[float, float, float, float]]], png: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("\nno picture: matplotlib is not installed (pip install matplotlib)")
        return
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for layers, points in found.items():
        ordered = sorted(points)
        shares = [p[0] * 100 for p in ordered]
        (line,) = axes.plot(
            shares, [p[2] for p in ordered], "o-", label=f"{layers} layers, measured"
        )
        axes.plot(
            shares,
            [p[3] for p in ordered],
            "--",
            color=line.get_color(),
            label=f"{layers} layers, by the cost model",
        )
    axes.set_xlabel("bytes of a step, % of saving everything")
    axes.set_ylabel("step time, 1 = saving everything")
    axes.set_title("What a byte budget costs")
    axes.grid(alpha=0.3)
    axes.legend()
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png)
    print(f"\npicture: {png}")


if __name__ == "__main__":
    main()
