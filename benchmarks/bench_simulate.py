"""What the simulator predicts against what is measured: whole steps, and launches by op.

    python benchmarks/bench_simulate.py [--rounds 3] [--steps 60] [--only NAME]

For each job, rounds of: measure the machine's rates, run some steps, run the launches one by one.
The machine has slow and fast minutes, so a prediction is compared with what was measured in the
same round; the tables show medians over the rounds. A load well above 1 means that others took the
cores: a calibration takes its best moments, a run cannot. Rates come from the generic probes of
`actors.kernels.library.calibration`; nothing is fitted to these jobs. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import actorflow as af
from actorflow import nn
from actorflow.initialise import initial_values
from actors.device.host import HostDevice
from actors.kernels import catalogue
from actors.kernels.floating_point import quiet_floating_point
from actors.kernels.library.c_calibration import stopwatch_c
from actors.kernels.library.calibration import calibrate, stopwatch
from actors.kernels.library.recost import durations_ns, recost
from actors.load import load
from actors.network import Network, Wire
from actors.ranks import Spread, simulate_ranks
from actors.simulate import simulate

WARM_UP = 5
LAUNCH_ROUNDS = 9


class GPT(nn.Module):
    def __init__(self, seq, d, heads, layers, vocab=128):
        self.emb, self.pos = nn.Embedding(vocab, d), nn.Embedding(seq, d)
        self.blocks = [nn.TransformerBlock(d, heads=heads, causal=True) for _ in range(layers)]
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab)

    def __call__(self, x):
        h = self.emb(x) + self.pos.weight
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class MLP(nn.Module):
    def __init__(self, widths):
        self.layers = [nn.Linear(a, b) for a, b in pairwise(widths)]

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = af.relu(layer(x))
        return self.layers[-1](x)


def gpt_job(seq, batch, d, heads, layers):
    @af.job(optimizer=af.optim.AdamW(1e-3))
    def train(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    text = (np.arange(200_000) * 37 % 96 + 32).astype(np.uint8)
    data = af.data.Tokens(text, seq=seq, batch=batch, seed=0)
    return train, GPT(seq, d, heads, layers), data


def mlp_job(batch, widths):
    @af.job(optimizer=af.optim.AdamW(1e-3))
    def train(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    rng = np.random.default_rng(0)
    count = 4 * batch
    x = rng.standard_normal((count, widths[0])).astype(np.float32)
    y = rng.integers(0, widths[-1], count).astype(np.int32)
    return train, MLP(widths), af.data.ArraySource({"x": x, "y": y}, batch=batch)


JOBS = {
    "demo: GPT 2 x 128, 32 x 64": lambda: gpt_job(64, 32, 128, 4, 2),
    "GPT 4 x 64, 16 x 32": lambda: gpt_job(32, 16, 64, 2, 4),
    "GPT 3 x 256, 8 x 128": lambda: gpt_job(128, 8, 256, 8, 3),
    "MLP 256-1024-1024-10, 128": lambda: mlp_job(128, (256, 1024, 1024, 10)),
    "MLP 64-64-64-10, 32": lambda: mlp_job(32, (64, 64, 64, 10)),
}


class OnesPort:
    """Gives a batch of ones, once."""

    def bind(self, tokens):
        for token in tokens:
            for array in token.values():
                array[...] = 1
        return lambda: None

    def close(self):
        pass


def step_ms(train, model, data, steps: int) -> float:
    """Median step of a real run."""
    ends: list[float] = []
    train.fit(
        model,
        data,
        steps=steps + WARM_UP,
        progress=False,
        on_step=lambda step, metrics: ends.append(time.perf_counter()),
    )
    return median([b - a for a, b in pairwise(ends[WARM_UP:])]) * 1e3


class Launches:
    """The launches of a plan on memory of their own, to be timed one by one in their order."""

    def __init__(self, plan):
        ports = {a.name: OnesPort() for a in plan.actors if a.kind.value in ("source", "sink")}
        self.bound = load(plan, ports, (HostDevice(catalogue.binders(), joins=False),))
        self.step = max(plan.actors, key=lambda actor: len(actor.launches) * actor.duration_ns)
        for name, value in initial_values(plan, {}, 0).items():
            self.bound.variables.write(name, value)

    def measure_ns(self) -> list[float]:
        chain, clock = self.bound.chains[self.step.id][0], time.perf_counter_ns
        times: list[list[int]] = [[] for _ in chain]
        for _ in range(LAUNCH_ROUNDS):
            before = clock()
            for launch, row in zip(chain, times, strict=True):
                launch()
                now = clock()
                row.append(now - before)
                before = now
        return [median(row) for row in times]


def bench(name: str, rounds: int, steps: int) -> tuple[list[float], dict[str, list[float]]]:
    """Rows (predicted, measured) of steps, and [launches, measured us, predicted us] by op."""
    train, model, data = JOBS[name]()
    plan = train.compile(model, data)
    launches = Launches(plan)
    pairs: list[tuple[float, float]] = []
    by_op: dict[str, list[list[float]]] = defaultdict(list)
    for _ in range(rounds):
        rates = calibrate(stopwatch(time.perf_counter_ns), stopwatch_c(time.perf_counter_ns))
        predicted = simulate(plan, 50, durations_ns(plan, rates)).period_ns / 1e6
        pairs.append((predicted, step_ms(train, model, data, steps)))
        train.close(model)
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        prices = recost(plan, rates)[launches.step.id]
        for launch, ns, price in zip(
            launches.step.launches, launches.measure_ns(), prices, strict=True
        ):
            row = sums[launch.op]
            row[0] += 1
            row[1] += ns / 1e3
            row[2] += price.duration_ns / 1e3
        for op, row in sums.items():
            by_op[op].append(row)
    launches.bound.release()
    whole = [median(column) for column in zip(*pairs, strict=True)]
    whole.append(median([predicted / measured for predicted, measured in pairs]))
    whole.append(sum([actor.duration_ns for actor in plan.actors if actor.launches]) / 1e6)
    return whole, {
        op: [median(column) for column in zip(*rows, strict=True)] for op, rows in by_op.items()
    }


def print_ranks(num_ranks: int, steps: int) -> None:
    """How long a simulation of many ranks takes, on the demo's plan for that many."""
    train, model, data = gpt_job(64, 32, 128, 4, 2)
    plan = train.compile(model, data, num_ranks=num_ranks)
    before = time.process_time()
    run = simulate_ranks(
        plan,
        num_ranks,
        steps,
        network=Network(Wire(12.5, 5_000.0)),
        spread=Spread(1.2, 0.02),
        jitter=0.05,
    )
    seconds = time.process_time() - before
    firings = num_ranks * sum(run.slowest.firings)
    print(
        f"\n{num_ranks:,} ranks x {len(plan.actors)} actors x {steps} steps, {firings:,} firings:"
        f" {seconds:.1f} s, {seconds / firings * 1e6:.1f} us per firing"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", default="", help="jobs whose name contains this")
    args = parser.parse_args()
    quiet_floating_point()
    os.environ["ACTORFLOW_CACHE"] = tempfile.mkdtemp()
    print(
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, numpy"
        f" {np.__version__}; load average before {os.getloadavg()[0]:.2f}\n"
    )
    details = {}
    print(
        "| job | predicted ms | measured ms | predicted / measured | plan's estimate ms | load |\n"
        "|---|---|---|---|---|---|"
    )
    for name in JOBS:
        if args.only in name:
            (predicted, measured, ratio, estimate), details[name] = bench(
                name, args.rounds, args.steps
            )
            print(
                f"| {name} | {predicted:.2f} | {measured:.2f} | {ratio:.2f} | {estimate:.2f}"
                f" | {os.getloadavg()[0]:.1f} |",
                flush=True,
            )
    print(
        "\n| job | op | launches | measured us | predicted us | ratio |\n|---|---|---|---|---|---|"
    )
    for name, by_op in details.items():
        for op, (count, measured, predicted) in sorted(by_op.items(), key=lambda x: -x[1][1]):
            print(
                f"| {name} | {op} | {count:.0f} | {measured:.0f} | {predicted:.0f} |"
                f" {predicted / measured:.2f} |"
            )
    print_ranks(1000, 20)


if __name__ == "__main__":
    main()
