"""From the kill of a rank to the first new step: of a job that is launched with --restarts.

    python benchmarks/bench_restart.py [--kills 10] [--ranks 2] [--fault kill,stop]

One job trains without end, saves every 10 steps, and loses a rank again and again; the seconds from
the signal to the end of the next step on rank 0 are printed, with what they consist of: until all
old processes are gone and the script of rank 0 has begun (exit, start of Python, handshake), its
imports, until `fit` is called, and until the first step of the new epoch (the plan from the cache,
the restored checkpoint, the step). `stop` is SIGSTOP, which is noticed after
ACTORFLOW_RANK_SECONDS, here 3; that time is subtracted from the first column.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WAIT_S = 3.0
MOST_S = 120.0

SCRIPT = """
import os, sys, time

def tell(word):
    with open("told", "a") as file:
        file.write(f"{os.environ['ACTORFLOW_EPOCH']} {word} {time.monotonic()}\\n")

rank = int(os.environ["RANK"])
with open(f"pid{rank}", "w") as file:
    file.write(str(os.getpid()))
if rank == 0:
    tell("script")
import numpy as np
import actorflow as af
from actorflow import nn
if rank == 0:
    tell("imported")

class Net(nn.Module):
    def __init__(self):
        self.table = nn.Embedding(64, 128)
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 64)

    def __call__(self, x):
        return self.down(af.relu(self.up(self.table(x))))

@af.job(optimizer=af.optim.AdamW(1e-3), mesh=af.Mesh(data=int(os.environ["WORLD_SIZE"])))
def train(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)

first = []

def on_step(step, metrics):
    if rank == 0 and (not first or step == first[0] + 30):
        first.append(step)
        tell("stepped" if len(first) == 1 else "saved")

x = np.random.default_rng(0).integers(0, 64, 4096)
if rank == 0:
    tell("fit")
train.fit(Net(), af.data.ArraySource({"x": x, "y": x}, batch=64), steps=10**9, checkpoint="run",
          every=10, progress=False, on_step=on_step)
"""
WORDS = ("script", "imported", "fit", "stepped")


def main() -> None:
    """Measure, and print a row for each kill and the medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--fault", default="kill")
    options = parser.parse_args()
    for fault in options.fault.split(","):
        rows = measured(options.kills, options.ranks, fault)
        print(f"{fault}, {options.ranks} ranks: seconds from the fault to the first new step")
        print(f"{'all':>8}" + "".join([f"{word:>10}" for word in WORDS]))
        for row in rows:
            print(f"{sum(row):8.2f}" + "".join([f"{part:10.2f}" for part in row]))
        middle = [statistics.median(part) for part in zip(*rows, strict=True)]
        total = [sum(row) for row in rows]
        print(f"median {statistics.median(total):.2f}, most {max(total):.2f};", end=" ")
        print(", ".join([f"{w} {s:.2f}" for w, s in zip(WORDS, middle, strict=True)]))


def measured(num_kills: int, num_ranks: int, fault: str) -> list[list[float]]:
    """Return for each kill the seconds that each part took."""
    rows = []
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        command = [
            *(sys.executable, "-m", "actorflow", "launch", "-n", str(num_ranks)),
            *("--restarts", str(num_kills), "--restart-window", "1", "train.py"),
        ]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "ACTORFLOW_RANK_SECONDS": "60"}
        # As for a user: the first epoch keeps bytecode, without which imports take twice as long.
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        environ["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
        if fault == "stop":
            environ["ACTORFLOW_RANK_SECONDS"] = str(WAIT_S)
        launcher = subprocess.Popen(
            command, cwd=folder, env=environ, stderr=(folder / "err").open("w")
        )
        try:
            for epoch in range(1, num_kills + 1):
                told(folder, epoch, "saved", launcher)
                victim = int((folder / f"pid{rng.randrange(num_ranks)}").read_text())
                since = time.monotonic()
                os.kill(victim, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
                at = [since + (WAIT_S if fault == "stop" else 0.0)]
                at += [told(folder, epoch + 1, word, launcher) for word in WORDS]
                rows.append([b - a for a, b in pairwise(at)])
        finally:
            launcher.send_signal(signal.SIGTERM)
            launcher.wait()
    return rows


def told(folder: Path, epoch: int, word: str, launcher: subprocess.Popen[bytes]) -> float:
    """Wait until rank 0 has told a word in an epoch; return when, in seconds."""
    deadline_s = time.monotonic() + MOST_S
    while time.monotonic() < deadline_s and launcher.poll() is None:
        lines = (folder / "told").read_text().splitlines() if (folder / "told").exists() else []
        for line in lines:
            parts = line.split()
            if parts[:2] == [str(epoch), word] and len(parts) == 3:
                return float(parts[2])
        time.sleep(0.01)
    said = (folder / "err").read_text()
    sys.exit(f"epoch {epoch} has not come to {word!r}: exit status {launcher.poll()}\n{said}")


if __name__ == "__main__":
    main()
