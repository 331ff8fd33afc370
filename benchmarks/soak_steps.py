"""A million steps of a tiny job: memory, threads, open files and step times must stay as they are.

The job trains a small network with checkpoints every 20,000 steps, so that every kind of actor
takes part. After a tenth of the steps as warm-up, RSS is sampled and a line is fitted; steps are
timed in blocks between two calls of the listener. Prints a Markdown table and fails when a mark is
missed. Run: `python benchmarks/soak_steps.py [STEPS]` (default 1,000,000).
"""

from __future__ import annotations

import os

os.environ.setdefault("ACTORFLOW_THREADS", "1")
os.environ["ACTORFLOW_CACHE"] = "off"

import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import actorflow as af
from actorflow import nn

SAMPLES = 500


class Net(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def __call__(self, x):
        return self.down(af.relu(self.up(x)))


@af.job(optimizer=af.optim.AdamW(1e-3))
def train(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)


class Samples:
    """What is measured while the run goes on, in arrays that are touched before it begins."""

    def __init__(self, steps: int) -> None:
        self.every = max(1, steps // SAMPLES)
        self.times_ns = np.ones(steps + 1, np.int64)
        self.rows = np.ones((steps // self.every, 4))

    def __call__(self, step: int, metrics: object) -> None:
        self.times_ns[step] = time.perf_counter_ns()
        if step % self.every == 0:
            files = len(os.listdir("/proc/self/fd"))
            row = (time.monotonic(), rss_mb(), threading.active_count(), files)
            self.rows[step // self.every - 1] = row


def rss_mb() -> float:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main(steps: int) -> int:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((512, 8)).astype(np.float32)
    data = af.data.ArraySource({"x": x, "y": x[:, :4].argmax(1).astype(np.int32)}, batch=16)
    samples = Samples(steps)
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        train.fit(
            Net(), data, steps=steps, checkpoint=folder, every=20_000, progress=False,
            on_step=samples,
        )  # fmt: skip
        seconds = time.monotonic() - started
    warm = samples.rows[len(samples.rows) // 10 :]
    hours, memory = warm[:, 0] / 3600, warm[:, 1]
    slope = np.polyfit(hours - hours[0], memory, 1)[0]
    threads, files = ({int(count) for count in warm[:, column]} for column in (2, 3))
    took = np.diff(samples.times_ns[steps // 10 :]) / 1e3
    p50, p99 = np.percentile(took, [50, 99])
    checks = (
        ("RSS slope after warm-up, MB/h", f"{slope:.2f}", "< 1", slope < 1),
        ("RSS growth after warm-up, MB", f"{memory[-1] - memory[0]:.2f}", "", True),
        ("threads", f"{sorted(threads)}", "constant", len(threads) == 1),
        ("open files", f"{sorted(files)}", "<= 4 apart", max(files) - min(files) <= 4),
        ("step p50, us", f"{p50:.0f}", "", True),
        ("step p99 / p50", f"{p99 / p50:.2f}", "<= 3", p99 / p50 <= 3),
    )
    print(f"{steps:,} steps in {seconds:.0f} s: {steps / seconds:,.0f} steps/s\n")
    print("| what | measured | mark |\n|---|---|---|")
    for what, value, mark, _ in checks:
        print(f"| {what} | {value} | {mark} |")
    missed = [what for what, _, _, is_met in checks if not is_met]
    if missed:
        print(f"\nmissed: {', '.join(missed)}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000))
