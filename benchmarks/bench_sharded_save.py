"""How long a checkpoint of several ranks stalls their steps, and what memory it takes.

    python benchmarks/bench_sharded_save.py [--ranks 2] [--width 4096] [--every 20] [--steps 60]

A linear layer of width x width with AdamW and `zero=True` (4096: 201 MB of state on all ranks),
each rank pinned to its cores, as `actorflow launch` does. The job runs twice: without checkpoints
and with one `every` steps. Printed for each rank: the median step; the longest step of the run
without saves, and of the other while it saves and while it does not; the median step beside a save,
and the step of the first snapshot; the times of its saves; and by how much its resident set grew
while it saved, sampled each 2 ms. The mark: no step takes longer than the longest without saves by
more than 5 % of a save, and rank 0 holds its own state 1.1 times.
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

SCRIPT = """
import json, os, sys, threading, time
import numpy as np
import actorflow as af
from actorflow import nn
from actorflow.run.saving import Saver

rank, width, every, steps = int(os.environ["RANK"]), *[int(word) for word in sys.argv[1:4]]

class Net(nn.Module):
    def __init__(self):
        self.layer = nn.Linear(width, width, bias=False)

    def __call__(self, x):
        return self.layer(x)

@af.job(optimizer=af.optim.AdamW(1e-4), mesh=af.Mesh(data=int(os.environ["WORLD_SIZE"])), zero=True)
def train(model, batch):
    return af.mse_loss(model(batch.x), batch.x)

saves, ends, grown = [], [], []
really = Saver.save

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def save(*given):
    begun, before, most, is_over = time.monotonic(), resident(), [0], threading.Event()
    def look():
        while not is_over.wait(0.002):
            most[0] = max(most[0], resident() - before)
    watch = threading.Thread(target=look)
    watch.start()
    try:
        really(*given)
    finally:
        is_over.set()
        watch.join()
        saves.append((begun, time.monotonic()))
        grown.append(most[0])

Saver.save = save
x = np.random.default_rng(0).normal(size=(8 * 32, width)).astype(np.float32)
options = {"checkpoint": "run", "every": every} if every else {}
train.fit(Net(), af.data.ArraySource({"x": x}, batch=32), steps=steps, progress=False,
          on_step=lambda step, metrics: ends.append(time.monotonic()), **options)
with open(f"rank{rank}.json", "w") as file:
    json.dump({"saves": saves, "ends": ends, "grown": grown}, file)
"""


def run(num_ranks: int, width: int, every: int, steps: int) -> list[dict[str, list[float]]]:
    """Train, and return what each rank has noted."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        command = [sys.executable, "-m", "actorflow", "launch", "-n", str(num_ranks), "train.py"]
        words = [str(width), str(every), str(steps)]
        subprocess.run([*command, *words], cwd=folder, env=environ, check=True)
        return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(num_ranks)]


def steps_ms(noted: dict[str, list[float]], *, in_saves: bool) -> list[float]:
    """Return the steps that a save overlaps, or the others, in ms; without the first ten."""
    ends, saves = noted["ends"], noted["saves"]
    return [
        1000 * (end - begin)
        for begin, end in pairwise(ends[10:])
        if any([s[0] < end and begin < s[1] for s in saves]) == in_saves
    ]


def first_snapshot_ms(noted: dict[str, list[float]], every: int) -> float:
    """Return the longer one of the two steps around the first snapshot, in ms."""
    ends = noted["ends"][every - 2 : every + 2]
    return 1000 * max([end - begin for begin, end in pairwise(ends)])


def main() -> None:
    """Measure, and print a row for each rank."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    own_mb = 12 * options.width**2 / options.ranks / 1e6
    alone = run(options.ranks, options.width, 0, options.steps)
    saving = run(options.ranks, options.width, options.every, options.steps)
    for rank, (before, noted) in enumerate(zip(alone, saving, strict=True)):
        plain, quiet = steps_ms(before, in_saves=False), steps_ms(noted, in_saves=False)
        stalled = steps_ms(noted, in_saves=True)
        saves = [end - begin for begin, end in noted["saves"]]
        print(
            f"rank {rank}: step {statistics.median(plain):.0f} ms; longest {max(plain):.0f} ms"
            f" without saves, {max(stalled, default=0):.0f} in a save,"
            f" {max(quiet, default=0):.0f} between; median in a save"
            f" {statistics.median(stalled or [0]):.0f}, first snapshot"
            f" {first_snapshot_ms(noted, options.every):.0f};"
            f" saves {min(saves):.2f} to {max(saves):.2f} s, 5 % is {50 * min(saves):.0f} ms;"
            f" grew by {max(noted['grown']) / 1e6:.1f} MB, own state {own_mb:.0f} MB"
        )


if __name__ == "__main__":
    main()
