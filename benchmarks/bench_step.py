"""What one step of a small network costs beside its launches, by `step` and by a predictor.

    python benchmarks/bench_step.py [--steps 2000] [--rounds 3]

Microseconds of a call on one row: the median, the 99th of a hundred, and the median without what
the launches of the plan take, as the run itself counts them. Rounds of all ways come in turn; each
figure is the median of the rounds. numpy computes the same with its products. The marks are 30 us
beside the launches, and a 99th of at most twice the median.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

import actorflow as af
from actorflow import nn

NETS = {
    "x + 1": (),
    "3 x 64": (64,) * 4,
    "8 x 256": (256,) * 9,
    "784-1024-1024-10": (784, 1024, 1024, 10),
}
Array = np.ndarray[Any, Any]


class Net(nn.Module):
    """Layers of some widths, or x + 1 without any."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        self.layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]

    def __call__(self, x: af.Tensor) -> af.Tensor:
        for layer in self.layers[:-1]:
            x = af.relu(layer(x))
        return self.layers[-1](x) if self.layers else x + 1.0


def by_numpy(model: Net, x: Array) -> Callable[[], Array]:
    """Return what computes the same with numpy."""
    state = model.state()
    paths = [f"layers.{number}" for number in range(len(model.layers))]
    layers = [(state[f"{path}.weight"].T, state[f"{path}.bias"]) for path in paths]

    def compute() -> Array:
        h = x
        for weight, bias in layers[:-1]:
            h = np.maximum(h @ weight + bias, 0)
        return h @ layers[-1][0] + layers[-1][1] if layers else h + np.float32(1)

    return compute


def timed(call: Callable[[], object], steps: int) -> tuple[float, float]:
    """Return the median of some calls and the 99th of a hundred, in microseconds."""
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return median(seconds) * 1e6, float(np.percentile(seconds, 99)) * 1e6


def launches_us(job: af.Job, model: Net, x: Array, steps: int) -> float:
    """Return what the launches of a step take, in microseconds."""
    plan = job.compile(model, {"x": af.TensorType(af.DType.FLOAT32, x.shape)})
    runner = af.Runner(plan, values=model.state())
    for _ in range(steps):
        runner.step({"x": x})
    statistics = runner.statistics()
    runner.close()
    if statistics is None:
        raise RuntimeError("a runner that has made steps has no statistics")
    computing = [a for a in statistics.actors if a.stream.startswith("compute")]
    return sum([actor.ns_per_firing for actor in computing]) / 1e3


def report(name: str, widths: tuple[int, ...], steps: int, num_rounds: int) -> None:
    """Print the rows of a network."""
    model = Net(widths).init(0)
    job = af.job(train=False)(lambda model, batch: {"y": model(batch.x)})
    shape = (1, widths[0] if widths else 8)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    compute = by_numpy(model, x)
    with job.predictor(model, {"x": x}) as predict:
        ways: dict[str, Callable[[], Any]] = {
            "step": lambda: job.step(model, {"x": x})["y"],
            "predictor": lambda: predict({"x": x})["y"],
            "numpy": compute,
        }
        for call in ways.values():
            np.testing.assert_allclose(call(), compute(), rtol=1e-3, atol=1e-5)
        rounds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(num_rounds):
            for way, call in ways.items():
                timed(call, steps // 10)
                rounds[way].append(timed(call, steps))
        launches = launches_us(job, model, x, steps)
    for way, figures in rounds.items():
        middle, late = [median(column) for column in zip(*figures, strict=True)]
        own = "" if way == "numpy" else f"{launches:.1f} | {middle - launches:.1f}"
        print(f"| {name} | {way} | {middle:.1f} | {late:.1f} | {own or ' | '} |", flush=True)
    job.close(model)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print("| network | way | median us | 99th | launches | beside them |")
    print("|---|---|--:|--:|--:|--:|")
    for name, widths in NETS.items():
        report(name, widths, args.steps, args.rounds)


if __name__ == "__main__":
    main()
