"""What an LSTM over many steps costs before its first step, against one over few.

    python benchmarks/bench_scan.py [--steps 30,300] [--rounds 3]

An LSTM language model of two layers of 128 is compiled for batches of 16 texts of so many steps.
Every measurement has a process of its own, and the lengths take turns: cold, with nothing in the
cache (C is compiled, products are measured), and warm, with the plan and all it uses there. Printed
are medians of wall clock and of processor time, that of children included, which others on the
machine disturb less: from the model to the plan, and from the plan to the end of the first step.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

BATCH, WIDTH, VOCAB = 16, 128, 1000


def measured(steps: int) -> dict[str, float]:
    """Return the seconds of this process: "plan" and "first", each as "wall" and as "cpu"."""
    import numpy as np
    from engines.actorflow_models import Recurrent

    import actorflow as af
    from actorflow.data.source import spec_of

    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        return af.cross_entropy(model(batch.x).flatten(0, 1), batch.y.flatten())

    model = Recurrent(layers=2, width=WIDTH, vocab=VOCAB)
    ids = np.arange(2 * (steps + 1) * BATCH, dtype=np.int32) % VOCAB
    rows = ids.reshape(2, steps + 1, BATCH)
    data = {"x": rows[0, :-1], "y": rows[0, 1:]}
    seconds: dict[str, float] = {}
    for name, call in (
        ("plan", lambda: train.compile(model, spec_of(data))),
        ("first", lambda: train.step(model, data)),
    ):
        wall, cpu = time.perf_counter(), cpu_s()
        call()
        seconds[f"{name} wall"] = time.perf_counter() - wall
        seconds[f"{name} cpu"] = cpu_s() - cpu
    return seconds


def cpu_s() -> float:
    """Return the processor time of this process and of the children that have ended."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum([usage.ru_utime + usage.ru_stime for usage in both])


def in_process(steps: int, cache: Path) -> dict[str, float]:
    """Return what a process of its own measures with a cache."""
    process = subprocess.run(
        [sys.executable, __file__, "--one", str(steps)],
        capture_output=True, text=True, check=False,
        env=os.environ | {"ACTORFLOW_CACHE": str(cache)},
    )  # fmt: skip
    if process.returncode:
        sys.exit(process.stderr)
    return json.loads(process.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", default="30,300")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(args.one)))
        return
    lengths = [int(n) for n in args.steps.split(",")]
    runs: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for heat in ("cold", "warm"):
                for steps in lengths:
                    cache = Path(folder) / str(steps)
                    cache.mkdir(mode=0o700, exist_ok=True)
                    runs.setdefault((heat, steps), []).append(in_process(steps, cache))
    names = ["plan wall", "plan cpu", "first wall", "first cpu"]
    print("| cache | steps | " + " | ".join([f"{name} s" for name in names]) + " |")
    print("|---|---:" + "|---:" * len(names) + "|")
    for (heat, steps), rounds in runs.items():
        middles = [statistics.median([one[name] for one in rounds]) for name in names]
        print(f"| {heat} | {steps} | " + " | ".join([f"{m:.2f}" for m in middles]) + " |")
    for heat in ("cold", "warm"):
        for name in names[:2]:
            few, *_, many = [
                statistics.median([one[name] for one in runs[heat, steps]]) for steps in lengths
            ]
            print(f"{heat}: {lengths[-1]} steps take {many / few:.2f} x as long ({name})")


if __name__ == "__main__":
    main()
