"""What the simulator predicts against what is measured: steps of five jobs, and launches by op.

    python benchmarks/bench_simulate.py [--rounds 7] [--only NAME] [--launches]

The machine is calibrated once, by the generic probes of `actorflow.cli.simulate`; nothing is fitted
to these jobs. Each job is then trained in rounds of about a second, the jobs in turns. A round in
which other processes took more than a twentieth of the cores is left out while there are others
(Linux; `others` says how much they took in those that count), and so is such a calibration. The
table shows the median over the rounds, and the least and the most. Prints Markdown tables.
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
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import actorflow as af
from actorflow import nn
from actorflow.cli.simulate import Calibration, calibration, priced
from actorflow.compile import num_streams
from actorflow.environment.settings import Settings
from actorflow.jobs.job_spec import capturing_plan
from actorflow.tensor.initial_values import initial_values
from actors.device.host import HostDevice
from actors.kernels.common.host_memory import quiet_floating_point
from actors.kernels.host import catalogue
from actors.kernels.host.calibration import estimate_launch_costs
from actors.kernels.library.launch import NativeChain, merge_native_launches
from actors.loop.load import load
from actors.simulation.costs import Network, Wire
from actors.simulation.ranks import Spread, simulate_ranks
from actors.simulation.simulate import simulate
from compiler.contract.placement import Mesh, MeshLink, joined
from compiler.contract.plan import Plan
from compiler.contract.rank_plans import RankPlans

WARM_UP = 5
ROUND_S = 0.8
QUIET = 0.05
"""Share of the cores that others may take in a round that counts."""

CALIBRATIONS = 4
LAUNCH_ROUNDS = 40


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


class Towers(nn.Module):
    """Two networks that meet at the end."""

    def __init__(self, width, layers):
        self.towers = [[nn.Linear(width, width) for _ in range(layers)] for _ in range(2)]

    def __call__(self, x):
        ends = []
        for layers in self.towers:
            h = x
            for layer in layers:
                h = af.tanh(layer(h))
            ends.append(h)
        return ends[0] * ends[1]


@dataclass(frozen=True, slots=True)
class Subject:
    """A job with its model and data; `evaluation` as in `fit`, `stride` steps repeat themselves."""

    train: Any
    model: Any
    data: Any
    evaluation: Any = None
    stride: int = 1
    takes_all_streams: bool = False

    def compiled(self) -> Plan:
        with self.streams():
            return self.train.compile(self.model, self.data, evaluation=self.evaluation)

    def streams(self):
        """Let the job have every stream that it asks for, if that is what is measured."""
        if self.takes_all_streams:
            return mock.patch.object(num_streams, "asks_for_choice", return_value=False)
        return mock.patch.object(num_streams, "GAIN", num_streams.GAIN)


def gpt_job(seq, batch, d, heads, layers, accumulate=1, evaluates=False):
    @af.job(optimizer=af.optim.AdamW(1e-3), accumulate=accumulate)
    def train(model, batch):
        return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())

    @af.job(train=False)
    def evaluate(model, batch):
        return {"loss": af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())}

    text = (np.arange(200_000) * 37 % 96 + 32).astype(np.uint8)
    tokens = lambda seed: af.data.Tokens(text, seq=seq, batch=batch, seed=seed)  # noqa: E731
    evaluation = af.Evaluation(evaluate, tokens(1), every=5, batches=2) if evaluates else None
    stride = 5 if evaluates else 1
    return Subject(train, GPT(seq, d, heads, layers), tokens(0), evaluation, stride)


def mlp_job(batch, widths):
    @af.job(optimizer=af.optim.AdamW(1e-3))
    def train(model, batch):
        return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())

    rng = np.random.default_rng(0)
    count = 4 * batch
    x = rng.standard_normal((count, widths[0])).astype(np.float32)
    y = rng.integers(0, widths[-1], count).astype(np.int32)
    return Subject(train, MLP(widths), af.data.ArraySource({"x": x, "y": y}, batch=batch))


def towers_job(batch, width, layers, *, takes_all):
    def towers(model, batch):
        return model(batch.x).mean()

    # Of another name, or the cache would give the one job the plan of the other.
    towers.__name__ = f"towers_{takes_all}"
    train = af.job(optimizer=af.optim.SGD(1e-3), streams=2)(towers)
    x = np.random.default_rng(0).standard_normal((4 * batch, width)).astype(np.float32)
    data = af.data.ArraySource({"x": x}, batch=batch)
    return Subject(train, Towers(width, layers), data, takes_all_streams=takes_all)


JOBS = {
    "char-gpt: GPT 2 x 128, 32 x 64": lambda: gpt_job(64, 32, 128, 4, 2),
    "GPT 3 x 256, 8 x 128": lambda: gpt_job(128, 8, 256, 8, 3),
    "MLP 256-1024-1024-10, 128": lambda: mlp_job(128, (256, 1024, 1024, 10)),
    "GPT 4 x 64, 16 x 32, accumulate=4, evaluation": lambda: gpt_job(
        32, 16, 64, 2, 4, accumulate=4, evaluates=True
    ),
    "two towers of 4 x 256, 256, streams=2": lambda: towers_job(256, 256, 4, takes_all=False),
    "the same, two streams in any case": lambda: towers_job(256, 256, 4, takes_all=True),
    "small: MLP 64-64-64-10, 32": lambda: mlp_job(32, (64, 64, 64, 10)),
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


def others_share(measure: Callable[[], Any]) -> tuple[Any, float]:
    """Return what `measure` returns, and the share of the cores that others took meanwhile."""
    busy, own_busy, start = _busy_s(), sum(os.times()[:2]), time.perf_counter()
    value = measure()
    total_s = (time.perf_counter() - start) * (os.cpu_count() or 1)
    others_s = _busy_s() - busy - (sum(os.times()[:2]) - own_busy)
    return value, max(0.0, others_s / total_s)


def _busy_s() -> float:
    """Seconds that all cores were busy so far; 0 where the system does not tell."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0.0
    ticks = [int(fields[i]) for i in (0, 1, 2, 5, 6, 7)]
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def step_ms(subject: Subject, steps: int) -> float:
    """Mean step of a real run, of whole strides."""
    ends: list[float] = []
    with subject.streams():
        subject.train.fit(
            subject.model,
            subject.data,
            steps=steps + WARM_UP,
            progress=False,
            evaluation=subject.evaluation,
            on_step=lambda step, metrics: ends.append(time.perf_counter()),
        )
    last = len(ends) - 1
    first = last - (last - WARM_UP + 1) // subject.stride * subject.stride
    return (ends[last] - ends[first]) / (last - first) * 1e3


@dataclass(slots=True)
class Race:
    """One job under way: its prediction, and every round as (ms, share of others)."""

    subject: Subject
    plan: Plan
    predicted_ms: float
    steps: int
    rounds: list[tuple[float, float]]

    def run(self) -> None:
        self.rounds.append(others_share(lambda: step_ms(self.subject, self.steps)))

    def counted(self) -> list[tuple[float, float]]:
        """The quiet rounds, or the three quietest where there are none."""
        quiet = [row for row in self.rounds if row[1] <= QUIET]
        return quiet or sorted(self.rounds, key=lambda row: row[1])[:3]


def race_of(subject: Subject, found: Calibration) -> Race:
    plan = subject.compiled()
    durations, host = priced(plan, found)
    predicted = simulate(plan, 200, durations, host=host).period_ns / 1e6
    steps = max(4 * subject.stride, int(ROUND_S * 1e3 / max(predicted, 0.05)))
    return Race(subject, plan, predicted, steps // subject.stride * subject.stride, [])


def quiet_calibration(settings: Settings) -> tuple[Calibration, float]:
    """Measure this machine, again and again while others take cores; return the quietest."""
    tries: list[tuple[Calibration, float]] = []
    while len(tries) < CALIBRATIONS and all(others > QUIET for _, others in tries):
        tries.append(others_share(lambda: calibration(settings, is_fresh=True)))
    return min(tries, key=lambda row: row[1])


class Launches:
    """The launches of a plan on memory of their own, to be timed one by one in their order."""

    def __init__(self, plan):
        ports = {a.name: OnesPort() for a in plan.actors if a.kind.value in ("source", "sink")}
        self.bound = load(plan, ports, (HostDevice(catalogue.kernels_by_name(), joins=False),))
        self.step = max(plan.actors, key=lambda actor: len(actor.launches) * actor.duration_ns)
        for name, value in initial_values(plan, {}, 0).items():
            self.bound.variables.write(name, value)

    def measure_ns(self) -> list[float]:
        """The least time of every launch over some rounds."""
        best: list[int] = []
        for _ in range(LAUNCH_ROUNDS):
            times: list[int] = []
            for part in merge_native_launches(self.bound.chains[self.step.id][0]):
                if isinstance(part, NativeChain):
                    times += part.timed()
                    continue
                before = time.perf_counter_ns()
                part()
                times.append(time.perf_counter_ns() - before)
            best = [min(pair) for pair in zip(best or times, times, strict=True)]
        return [float(ns) for ns in best]


def print_launches(races: dict[str, Race], found: Calibration) -> None:
    """Launches one by one, by kernel: where a prediction comes from."""
    print(
        "\n| job | kernel | launches | measured us | predicted us | ratio |\n"
        "|---|---|---|---|---|---|"
    )
    for name, race in races.items():
        launches = Launches(race.plan)
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        prices = estimate_launch_costs(race.plan, found.rates)[launches.step.id]
        measured = launches.measure_ns()
        for launch, ns, price in zip(launches.step.launches, measured, prices, strict=True):
            row = sums[launch.kernel]
            row[:] = [row[0] + 1, row[1] + ns / 1e3, row[2] + price.duration_ns / 1e3]
        launches.bound.release()
        for kernel, (count, ns, price) in sorted(sums.items(), key=lambda x: -x[1][1]):
            print(
                f"| {name} | {kernel} | {count:.0f} | {ns:.0f} | {price:.0f} | {price / ns:.2f} |"
            )


def print_races(races: dict[str, Race]) -> None:
    print(
        "| job | predicted ms | measured ms (least, most) | predicted / measured"
        " | rounds that count | others |\n|---|---|---|---|---|---|"
    )
    for name, race in races.items():
        rows = race.counted()
        times, others = [ms for ms, _ in rows], median([share for _, share in rows])
        print(
            f"| {name} | {race.predicted_ms:.2f} | {median(times):.2f} ({min(times):.2f},"
            f" {max(times):.2f}) | {race.predicted_ms / median(times):.2f} |"
            f" {len(rows)} of {len(race.rounds)} | {others:.0%} |",
            flush=True,
        )
    for name, race in races.items():
        if isinstance(text := race.plan.option("streams"), str):
            print(f"\n{name}: {text}")


def print_ranks(num_ranks: int, steps: int) -> None:
    """How long a simulation of many ranks takes, on the demo's plan for that many."""
    subject = gpt_job(64, 32, 128, 4, 2)
    with capturing_plan(joined(Mesh(("data",), (num_ranks,)), MeshLink())):
        plan = subject.train.compile(subject.model, subject.data)
    before = time.process_time()
    run = simulate_ranks(
        RankPlans.same(plan, plan.mesh),
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
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="jobs whose name contains this")
    parser.add_argument("--launches", action="store_true", help="a table of launches by kernel too")
    args = parser.parse_args()
    quiet_floating_point()
    os.environ["ACTORFLOW_CACHE"] = tempfile.mkdtemp()
    settings = Settings.from_env(os.environ)
    speeds, others = quiet_calibration(settings)
    rates = speeds.rates
    print(
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, numpy"
        f" {np.__version__}; calibrated while others took {others:.0%} of the cores\n"
    )
    print(
        f"{rates.num_threads} threads compute {rates.compute_gain:.2f} times as fast as one, and"
        f" move {rates.move_gain:.2f} times as fast; {speeds.costs}\n"
    )
    races = {n: race_of(make(), speeds) for n, make in JOBS.items() if args.only in n}
    for _ in range(args.rounds):
        for race in races.values():
            race.run()
    print_races(races)
    if args.launches:
        print_launches(races, speeds)
    if not args.only:
        print_ranks(1000, 20)


if __name__ == "__main__":
    main()
