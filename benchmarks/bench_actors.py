"""What the actors make possible: overlap, bounded memory, silence when idle, cheap watching.

Every comparison interleaves its two sides in one process and takes medians of rounds. Prints
Markdown tables. Run: `python benchmarks/bench_actors.py [PART ...]` with parts among firing, hop,
idle, overlap, consumer, timeline, streams; default: all.
"""

from __future__ import annotations

import os

os.environ.setdefault("ACTORFLOW_THREADS", "1")  # one core computes, the other one loads
os.environ["ACTORFLOW_CACHE"] = "off"

import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import actorflow as af
from actorflow import nn
from actorflow.environment.settings import Settings
from actorflow.options.run_spec import RunSpec
from actorflow.run.saving import RunContext
from actorflow.run.training_run import Run
from actorflow.tensor.initial_values import initial_values
from actors.device.host import HostDevice
from actors.loop.dispatch import LoopOptions
from actors.loop.load import load
from actors.loop.loop import Loop
from actors.loop.timeline import Timeline
from benchmarks import bench_machine
from compiler.contract.placement import HOST, StreamRole
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import (
    Actor,
    ActorKind,
    Port,
    Register,
    RegisterKind,
    SourceLine,
    Stream,
)
from compiler.contract.types import ActorId, RegisterId, StreamId

ROUNDS = 7
BATCH, WIDTH = 256, 512


class Net(nn.Module):
    def __init__(self, layers=4):
        self.layers = [nn.Linear(WIDTH, WIDTH) for _ in range(layers)]

    def __call__(self, x):
        for layer in self.layers:
            x = af.gelu(layer(x), approximate="tanh")
        return x


@af.job(optimizer=af.optim.AdamW(1e-3))
def train(model, batch):
    return af.mse_loss(model(batch.x), batch.y)


class Batches:
    """A source whose batches take `seconds` each: of sleep, or of work on a core.

    `work` is the side of the square arrays that it multiplies element by element, 0 for sleep: the
    larger, the more seldom it needs Python's lock.
    """

    def __init__(self, seconds=0.0, *, work=0):
        rng = np.random.default_rng(0)
        self.batch = {
            name: rng.standard_normal((BATCH, WIDTH)).astype(np.float32) for name in ("x", "y")
        }
        self.seconds, self.work = seconds, work
        self.left = np.ones((work, work), np.float32)
        self.out = np.empty_like(self.left)

    def spec(self):
        return {n: af.TensorType(af.DType.FLOAT32, a.shape) for n, a in self.batch.items()}

    def __next__(self):
        end = time.perf_counter() + self.seconds
        if self.work:
            while time.perf_counter() < end:
                np.multiply(self.left, self.left, out=self.out)
        elif self.seconds:
            time.sleep(self.seconds)
        return self.batch

    def state(self):
        return {}

    def restore(self, state):
        pass

    def fingerprint(self):
        return "batches"


def step_ms(plan: Plan, source: Batches, steps: int, settings: Settings, listen=None) -> float:
    """Median time between two ends of a step, in steady state, as the listener sees them."""
    ends: list[int] = []

    def on_step(step, metrics):
        ends.append(time.perf_counter_ns())
        if listen is not None:
            listen(step)

    values = initial_values(plan, {}, 0)
    run = Run(
        plan,
        RunSpec(source, steps=steps, on_step=on_step),
        RunContext(settings=settings),
        values,
    )
    run.start()
    run.wait()
    run.close()
    return statistics.median(np.diff(ends[3:])) / 1e6


def interleaved(sides: dict[str, Callable[[], float]], rounds: int = ROUNDS) -> dict[str, float]:
    """Median per side over rounds in which every side runs once."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            times[name].append(side())
    return {name: statistics.median(values) for name, values in times.items()}


def bench_firing() -> list[str]:
    lines = ["| actors in a chain | us per firing | mark |", "|---|---|---|"]
    for num_actors in (10, 100, 1000, 10_000):
        measured = bench_machine.us_per_firing(num_actors)
        lines += [f"| {num_actors} | {measured:.2f} | 1.2 |"]
    launch = bench_machine.us_per_launch()
    return [*lines, "", f"{launch:.3f} us per launch in a chain (mark 0.15)"]


def bench_hop(steps: int = 20_000) -> list[str]:
    """A source and a sink on threads of their own with one slot between: four hops per step."""
    streams = tuple([Stream(StreamId(i), HOST, StreamRole.PORT, 0, f"s{i}") for i in range(2)])
    register = Register(RegisterId(0), "r", RegisterKind.CONTROL, 0, 0, 1, (0,), (0, 1), "")
    port = (Port(RegisterId(0), 1),)
    actors = (
        Actor(ActorId(0), "source", ActorKind.SOURCE, StreamId(0), (), (), port, False, 0.0),
        Actor(ActorId(1), "sink", ActorKind.SINK, StreamId(1), (), port, (), False, 0.0),
    )
    plan = Plan(
        "hop",
        streams,
        (),
        (register,),
        (),
        actors,
        (),
        (),
        (),
        (SourceLine("", 0),),
        (),
        "",
        "",
        (),
    )
    ports = {"source": bench_machine.EmptyPort(), "sink": bench_machine.EmptyPort()}
    medians = []
    for _ in range(ROUNDS):
        timeline = Timeline(1 << 16)
        loop = Loop(load(plan, ports, (HostDevice({}),)), LoopOptions(timeline=timeline))
        loop.admit(steps)
        loop.end()
        loop.start()
        loop.wait()
        loop.close()
        starts = [start for actor, _, start, _ in timeline.rows() if actor == 0]
        medians.append(statistics.median(np.diff(starts)) / 4e3)
    return [
        f"message between two threads through the loop: p50 {statistics.median(medians):.1f} us"
        f" (best round {min(medians):.1f}, mark 15)"
    ]


def bench_idle(seconds: float = 4.0) -> list[str]:
    """CPU time of a process whose run waits for a source that gives nothing."""
    gate = threading.Event()

    class Silent(Batches):
        def __next__(self):
            gate.wait()
            raise StopIteration

        def close(self):
            gate.set()

    source = Silent()
    plan = train.compile(Net(), source)
    values = initial_values(plan, {}, 0)
    settings = Settings.from_env(os.environ)
    run = Run(plan, RunSpec(source, steps=5), RunContext(settings=settings), values)
    run.start()
    before, wall = time.process_time(), time.perf_counter()
    threading.Event().wait(seconds)
    share = (time.process_time() - before) / (time.perf_counter() - wall)
    gate.set()
    run.wait()
    run.close()
    return [f"idle run, watchdog on: {share:.2%} of a core (mark < 1 %)"]


def bench_overlap() -> list[str]:
    settings = Settings.from_env(os.environ)
    plan = train.compile(Net(), Batches())
    alone = step_ms(plan, Batches(), 40, settings)
    lines = [
        "| loader | compute alone, ms | with loader, ms | lost | if nothing overlapped |",
        "|---|---|---|---|---|",
    ]
    loaders = (
        ("sleeps 0.9 of a step", 0),
        ("computes 0.9 of a step, 1 MiB per call of numpy", 512),
        ("computes 0.9 of a step, 4 KiB per call of numpy", 32),
    )
    for name, work in loaders:

        def loaded(work=work):
            return step_ms(plan, Batches(0.9 * alone / 1e3, work=work), 40, settings)

        times = interleaved(
            {"alone": lambda: step_ms(plan, Batches(), 40, settings), "with": loaded}
        )
        lost = 1 - times["alone"] / times["with"]
        lines.append(
            f"| {name} | {times['alone']:.2f} | {times['with']:.2f} | {lost:.1%} |"
            f" {1 - 1 / 1.9:.0%} |"
        )
    return [*lines, "", "mark: < 5 % lost"]


def bench_consumer(steps: int = 60) -> list[str]:
    """A listener that takes 100 steps' time per step: the run waits for it and holds no more."""
    settings = Settings.from_env(os.environ)
    plan = train.compile(Net(layers=1), Batches())
    quick = step_ms(plan, Batches(), 100, settings)
    sizes: list[float] = []

    def slow(step):
        sizes.append(rss_mb())
        time.sleep(100 * quick / 1e3)

    slowed = step_ms(plan, Batches(), steps, settings, slow)
    growth = max(sizes[5:]) - sizes[4]
    return [
        f"listener 100 times slower than the step ({quick:.2f} ms): a step takes {slowed:.0f} ms,"
        f" RSS grows {growth:.2f} MB over {steps} steps"
    ]


def bench_timeline() -> list[str]:
    """The same steps with and without a timeline, which records every firing."""
    plain = Settings.from_env(os.environ)
    traced = replace(plain, trace=Path("/tmp/actorflow-bench-trace.json"))
    plan = train.compile(Net(layers=2), Batches())
    times = interleaved(
        {
            "off": lambda: step_ms(plan, Batches(), 60, plain),
            "on": lambda: step_ms(plan, Batches(), 60, traced),
        },
        rounds=2 * ROUNDS + 1,
    )
    overhead = times["on"] / times["off"] - 1
    return [
        f"step of {times['off']:.2f} ms without timeline, {times['on']:.2f} ms with:"
        f" {overhead:+.2%} (mark < 2 %)"
    ]


class Towers(nn.Module):
    def __init__(self):
        self.a, self.b = Net(3), Net(3)

    def __call__(self, x, y):
        return self.a(x) * self.b(y)


def bench_streams() -> list[str]:
    """Two towers that meet at the end, on one and on two compute streams, one core each."""
    settings = Settings.from_env(os.environ)
    plans = {}
    for streams in (1, 2):

        @af.job(optimizer=af.optim.SGD(1e-3), streams=streams)
        def towers(model, batch):
            return (model(batch.x, batch.y) * model(batch.y, batch.x)).mean()

        plans[streams] = towers.compile(Towers(), Batches())
    times = interleaved(
        {str(n): lambda n=n: step_ms(plans[n], Batches(), 20, settings) for n in plans}
    )
    return [
        f"two towers, BLAS on one thread: one stream {times['1']:.1f} ms, two streams"
        f" {times['2']:.1f} ms: {times['1'] / times['2']:.2f} times as fast"
        f" ({len(plans[2].actors)} actors)"
    ]


def rss_mb() -> float:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


PARTS = {
    "firing": bench_firing,
    "hop": bench_hop,
    "idle": bench_idle,
    "overlap": bench_overlap,
    "consumer": bench_consumer,
    "timeline": bench_timeline,
    "streams": bench_streams,
}


def main(arguments: list[str]) -> None:
    unknown = [name for name in arguments if name not in PARTS]
    if unknown:
        sys.exit(f"bench_actors: no part called {unknown[0]!r}; there are {', '.join(PARTS)}")
    for name in arguments or list(PARTS):
        print(f"\n## {name}\n")
        print("\n".join(PARTS[name]()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
