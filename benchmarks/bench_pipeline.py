"""A pipeline of two processes beside what `actorflow simulate` says of it.

    python benchmarks/bench_pipeline.py [--batches 4,16] [--rounds 3] [--steps 40] [--width 256]

A GPT in two stages of one thread each, on stage=2, with SGD; the numbers of batches of a step are
tried in turns. Each round simulates the job, with the machine measured once before, and launches
it; a step's time is the median of those after the first ten, on the slower rank. Beside it is the
same job in one process of one thread. The mark is measured / simulated within 1.2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 10

SCRIPT = """
import json, os, sys, time
import numpy as np
import actorflow as af
from actorflow import nn

stages, batches, width, steps, layers = {stages}, {batches}, {width}, {steps}, 4

class GPT(nn.Module):
    def __init__(self):
        self.table = nn.Embedding(512, width)
        self.blocks = [nn.TransformerBlock(width, heads=4, causal=True) for _ in range(layers)]
        self.head = nn.Linear(width, 512)

    def __call__(self, x):
        with af.stage(0):
            h = self.table(x)
        for number, block in enumerate(self.blocks):
            with af.stage(number * stages // layers):
                h = block(h)
        return self.head(h)

mesh = af.Mesh(stage=stages) if stages > 1 else None

@af.job(optimizer=af.optim.SGD(1e-3, momentum=0.9), mesh=mesh, accumulate=batches)
def train(model, batch):
    return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())

data = af.data.Tokens(np.arange(100_000) ** 2 % 509, seq=64, batch=4, seed=1)
times, losses = [], []

def on_step(step, outputs):
    times.append(time.perf_counter())
    losses.append(float(outputs["loss"]))

train.fit(GPT(), data, steps=steps, progress=False, on_step=on_step)
with open("rank" + os.environ.get("RANK", "0") + ".json", "w") as file:
    json.dump([times, losses], file)
"""


class Trial:
    """A folder with the job as a script, for so many stages and batches."""

    def __init__(self, folder: Path, stages: int, batches: int, width: int, steps: int) -> None:
        self.folder = folder / f"{stages}-{batches}"
        self.folder.mkdir()
        self.stages = stages
        sizes = {"stages": stages, "batches": batches, "width": width, "steps": steps}
        text = SCRIPT
        for name, value in sizes.items():
            text = text.replace(f"{{{name}}}", str(value))
        (self.folder / "job.py").write_text(text)

    def run(self, *command: str) -> str:
        """Run `actorflow` or the script itself, with a thread for each rank; return stdout."""
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "ACTORFLOW_THREADS": "1"}
        argv = [sys.executable, *command]
        process = subprocess.run(
            argv, capture_output=True, text=True, cwd=self.folder, env=environ, check=False
        )
        if process.returncode:
            raise SystemExit(process.stderr)
        return process.stdout

    def simulated_ms(self) -> float:
        """Return the time of a step as `actorflow simulate` has it."""
        output = self.run(
            "-m", "actorflow", "simulate", "job.py", "--json", "--steps", "20",
            "--per-host", str(self.stages),
        )  # fmt: skip
        report = json.loads(output)
        return report["ranks"]["step_ms"] if self.stages > 1 else report["step_ms"]

    def measured(self) -> tuple[float, list[float]]:
        """Return the time of a step, in milliseconds, and the losses."""
        start = ["-m", "actorflow", "launch", "-n", str(self.stages)] if self.stages > 1 else []
        self.run(*start, "job.py")
        spans = []
        for rank in range(self.stages):
            times, losses = json.loads((self.folder / f"rank{rank}.json").read_text())
            apart = [after - before for before, after in pairwise(times)][WARM_UP:]
            spans.append(1e3 * statistics.median(apart))
        return max(spans), losses


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", default="4,16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()
    print("| batches | one process, ms | simulated, ms | two stages, ms | measured / simulated |")
    print("|---|---|---|---|---|")
    for batches in [int(n) for n in args.batches.split(",")]:
        with tempfile.TemporaryDirectory() as folder:
            sizes = (batches, args.width, args.steps)
            alone, two = Trial(Path(folder), 1, *sizes), Trial(Path(folder), 2, *sizes)
            rows: list[tuple[float, float, float]] = []
            for _ in range(args.rounds):
                one_ms, losses = alone.measured()
                simulated = two.simulated_ms()
                both_ms, same = two.measured()
                for a, b in zip(losses, same, strict=True):
                    if abs(a - b) > 1e-4 * abs(a):
                        raise SystemExit(f"other losses than one process has: {a} and {b}")
                rows.append((one_ms, simulated, both_ms))
            columns = [spread(list(column)) for column in zip(*rows, strict=True)]
            ratio = spread([both / simulated for _, simulated, both in rows])
            print(f"| {batches} | {' | '.join(columns)} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
