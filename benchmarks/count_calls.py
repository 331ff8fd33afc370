"""How many Python functions a step calls, thread by thread; a count, so no clock is read.

A job that accumulates, evaluates and takes checkpoints runs for two numbers of steps, and the
difference is that of the steps alone. Run: `python benchmarks/count_calls.py [--functions THREAD]`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import actorflow as af
from actorflow import nn

MARKS = {"actorflow-dispatch": 40, "actorflow-metrics": 100}
"""Most calls a step of the job below may make, by thread."""

Calls = dict[str, Counter[str]]
"""How often each function was called, by thread."""


class Net(nn.Module):
    def __init__(self) -> None:
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def __call__(self, x: Any) -> Any:
        return self.down(af.gelu(self.up(x), approximate="tanh"))


@af.job(train=False)
def evaluate(model: Any, batch: Any) -> Any:
    return {"loss": af.mse_loss(model(batch.x), batch.y)}


@af.job(optimizer=af.optim.AdamW(1e-3), accumulate=4)
def train(model: Any, batch: Any) -> Any:
    return af.mse_loss(model(batch.x), batch.y)


class Batches:
    """The same batch for ever."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        sizes = {"x": 8, "y": 4}
        self.batch = {n: rng.standard_normal((6, k)).astype(np.float32) for n, k in sizes.items()}

    def spec(self) -> dict[str, af.TensorType]:
        return {n: af.TensorType(af.DType.FLOAT32, a.shape) for n, a in self.batch.items()}

    def __next__(self) -> dict[str, np.ndarray[Any, Any]]:
        return self.batch

    def state(self) -> dict[str, int]:
        return {}

    def restore(self, state: object) -> None:
        pass

    def fingerprint(self) -> str:
        return "batches"


def calls_of(act: Callable[[], object]) -> Calls:
    """Return the calls of Python functions that threads make which are started meanwhile."""
    calls: Calls = {}

    def watch(frame: Any, event: str, _: object) -> None:
        if event == "call":
            thread = threading.current_thread().name
            code = frame.f_code
            where = f"{Path(code.co_filename).name}:{code.co_qualname}"
            calls.setdefault(thread, Counter())[where] += 1

    threading.setprofile(watch)
    try:
        act()
    finally:
        threading.setprofile(None)
    return calls


def run(steps: int) -> None:
    """Train for some steps, with an evaluation and a checkpoint after every other one."""
    evaluation = af.Evaluation(evaluate, Batches(), every=2, batches=2)
    with tempfile.TemporaryDirectory() as folder:
        train.fit(
            Net(), Batches(), steps=steps, checkpoint=folder, every=2, evaluation=evaluation,
            progress=False,
        )  # fmt: skip


def calls_per_step(few: int = 20, many: int = 60) -> dict[str, dict[str, float]]:
    """Return the calls of a step by thread and function."""
    run(2)  # imports, and the plan into the cache
    counted = [calls_of(lambda n=n: run(n)) for n in (few, many)]
    return {
        thread: {
            where: (count - counted[0].get(thread, Counter())[where]) / (many - few)
            for where, count in counted[1][thread].items()
        }
        for thread in counted[1]
    }


def report(calls: dict[str, dict[str, float]], shown: Iterable[str]) -> list[str]:
    """Return the table in Markdown; of the threads `shown`, function by function."""
    lines = ["| thread | Python calls a step | mark |", "|---|---|---|"]
    for thread, counts in sorted(calls.items()):
        lines.append(f"| {thread} | {sum(counts.values()):.1f} | {MARKS.get(thread, '')} |")
    for thread in shown:
        rows = sorted(calls[thread].items(), key=lambda row: -row[1])
        lines += ["", thread, *[f"  {count:8.2f}  {where}" for where, count in rows if count > 0]]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--functions", action="append", default=[], metavar="THREAD")
    options = parser.parse_args()
    print("\n".join(report(calls_per_step(), options.functions)))


if __name__ == "__main__":
    main()
