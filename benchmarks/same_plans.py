"""Two checkouts, the same jobs: are their plans equal to the byte, and does what one stored load?

    python benchmarks/same_plans.py --before DIR [--after DIR] [ROW ...]

For each row of `actorflow bench` (default: `JOBS`), with numpy's kernels and natively with
`deterministic=True`: the bytes of both sides' plans are compared. Then the later side takes what
the earlier one stored: it loads and proves its plan files, and goes on from its checkpoint; the
losses of the following steps are compared to the bit with those of the earlier side, which was not
interrupted. Prints a table, and exits with 1 where anything differs.

Every side has processes of its own, and PYTHONPATH says which checkout they import. Both read the
rows of this checkout by public names alone. They share a folder of measured rates, since estimated
durations are part of a plan, and have caches of plans of their own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

JOBS = (
    "tiny", "mlp", "mlp:bf16", "char-gpt", "gpt", "gpt:bf16", "gpt-vocab", "bert", "gpt2-block",
    "wide-deep", "lstm", "lenet", "resnet-18", "inference",
)  # fmt: skip
"""Rows, with a precision where it is not float32."""

KERNELS = {"numpy": "0", "native": "1"}
STEPS, MORE = 3, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", default=JOBS)
    parser.add_argument("--before", type=Path, metavar="DIR")
    parser.add_argument("--after", type=Path, default=ROOT, metavar="DIR")
    parser.add_argument("--child", nargs=2, metavar=("TASK", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        task, folder = args.child
        print(json.dumps(TASKS[task](Path(folder), args.rows)))
        return
    if args.before is None:
        parser.error("the following arguments are required: --before")
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(report(Path(folder), args.before.resolve(), args.after.resolve(), args.rows))


def report(folder: Path, before: Path, after: Path, rows: list[str]) -> int:
    """Print what is equal, row by row; return how many things are not."""
    faults = 0
    print(
        "| kernels | job | bytes of the plan | equal | loads and is proven | goes on to the bit |"
    )
    print("|---|---|---:|---|---|---|")
    for kernels in KERNELS:
        place = folder / kernels
        for name in ("before", "after"):
            (place / name).mkdir(parents=True)
        plans = [
            child(root, "plans", place, place / name, kernels, rows)
            for root, name in ((before, "before"), (after, "after"))
        ]
        loaded = child(after, "load", place, place / "before", kernels, rows)
        first = child(before, "train", place, place / "before", kernels, rows)
        went_on = child(after, "resume", place, place / "before", kernels, rows)
        for row in rows:
            size, digest = plans[0][row]
            checks = [
                plans[1][row] == [size, digest],
                loaded[row] == digest,
                first[row] is None or went_on[row] == first[row],
            ]
            faults += checks.count(False)
            words = ["yes" if is_equal else "NO" for is_equal in checks]
            if first[row] is None:
                words[2] = "-"
            print(f"| {kernels} | {row} | {size:,} | {' | '.join(words)} |", flush=True)
    print(f"\n{faults} differences")
    return 1 if faults else 0


def child(root: Path, task: str, place: Path, folder: Path, kernels: str, rows: list[str]) -> dict:
    """Let a process of one side do a task, and return what it found. Exits where it fails."""
    cache = place / f"cache-{'before' if task in ('plans', 'train') else task}"
    rates = place / "rates"
    rates.mkdir(exist_ok=True)
    shutil.copytree(rates, cache, dirs_exist_ok=True)
    cache.chmod(0o700)
    dropped = ("OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    environment = {n: v for n, v in os.environ.items() if n not in dropped} | {
        "PYTHONPATH": str(root),
        "PYTHONPYCACHEPREFIX": str(place / f"pycache-{root.name}-{folder.name}"),
        "ACTORFLOW_CACHE": str(cache),
        "ACTORFLOW_NATIVE": KERNELS[kernels],
    }
    command = [sys.executable, str(Path(__file__).resolve()), *rows, "--child", task, str(folder)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if process.returncode:
        sys.exit(f"{task} by {root} failed:\n{process.stderr}")
    for file in cache.rglob("*"):
        if file.is_file() and "rates" in file.name:
            target = rates / file.relative_to(cache)
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            shutil.copy(file, target)
    return json.loads(process.stdout.splitlines()[-1])


def session(name: str):
    """Return a row's job, model and data, by public names."""
    from engines.actorflow_models import Running, start
    from rows.all_rows import find_row

    row, _, precision = name.partition(":")
    return start(find_row(row), precision or "fp32", Running, deterministic=True)


def file_of(folder: Path, name: str, end: str) -> Path:
    return folder / f"{name.replace(':', '-')}{end}"


def plans(folder: Path, rows: list[str]) -> dict[str, list[object]]:
    """Compile each job, save its plan; return bytes and digest."""
    digests = {}
    for name in rows:
        data = session(name).plan().to_bytes()
        file_of(folder, name, ".plan").write_bytes(data)
        digests[name] = [len(data), hashlib.sha256(data).hexdigest()]
    return digests


def load(folder: Path, rows: list[str]) -> dict[str, str]:
    """Load each plan file, open it for a run, which proves it; return the digests of its bytes."""
    import actorflow as af

    digests = {}
    for name in rows:
        plan = af.Plan.load(file_of(folder, name, ".plan"))
        af.Runner(plan)
        digests[name] = hashlib.sha256(plan.to_bytes()).hexdigest()
    return digests


def fit(folder: Path, name: str, steps: int) -> list[str] | None:
    """Train to a step with checkpoints; return the losses of the steps that ran, exactly."""
    running = session(name)
    if name.startswith("inference"):
        return None
    running.data.allow(1_000_000)
    losses = {}
    running.job.fit(
        running.model, running.data, steps=steps, checkpoint=file_of(folder, name, ".run"),
        every=STEPS, progress=False,
        on_step=lambda step, metrics: losses.__setitem__(step, float(metrics["loss"]).hex()),
    )  # fmt: skip
    return [losses[step] for step in sorted(losses)]


def train(folder: Path, rows: list[str]) -> dict[str, list[str] | None]:
    """Train each job past a checkpoint, then take the later ones away; return the later losses."""
    curves = {}
    for name in rows:
        losses = fit(folder, name, STEPS + MORE)
        curves[name] = None if losses is None else losses[STEPS:]
        for later in file_of(folder, name, ".run").glob("step-*"):
            if later.name.rpartition("-")[2].isdigit() and int(later.name[5:]) > STEPS:
                shutil.rmtree(later)
    return curves


def resume(folder: Path, rows: list[str]) -> dict[str, list[str] | None]:
    """Go on from each checkpoint; return the losses of the steps that ran, the later ones alone."""
    return {name: fit(folder, name, STEPS + MORE) for name in rows}


TASKS = {"plans": plans, "load": load, "train": train, "resume": resume}

if __name__ == "__main__":
    main()
