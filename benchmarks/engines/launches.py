"""What each launch of a plan computes, and how fast: its chains, run outside of any loop."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actorflow.tensor.initial_values import initial_values
from actors.device.host import HostDevice
from actors.kernels.host import catalogue
from actors.kernels.library import openblas
from actors.kernels.library.launch import NativeChain, merge_native_launches
from actors.loop.bound import BoundPlan
from actors.loop.load import load
from actors.machine.protocol import Array, Launch, Token
from compiler.contract.attrs import Attrs
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import PORTED
from compiler.contract.plan_tables import Launch as PlannedLaunch
from compiler.graph.registry import CostOf, all_ops, cost


def launch_table(
    plan: Plan, durations_ns: Sequence[float] | None = None
) -> list[dict[str, str | float]]:
    """Return a row per launch of the plan's chains, the longest first.

    Args:
        plan: whose launches.
        durations_ns: measured, in the order of the plan; the plan's estimates without them.
    """
    launches = [launch for actor in plan.actors for launch in actor.launches]
    if durations_ns is None:
        durations_ns = [launch.duration_ns for launch in launches]
    ops = {op.name: op for op in all_ops()}
    rows: list[dict[str, str | float]] = []
    for launch, duration in zip(launches, durations_ns, strict=True):
        op = ops.get(launch.op)
        flops = 0.0 if op is None or not cost.has(op) else _flops(plan, launch, cost.get(op))
        rows.append(
            {
                "op": launch.op,
                "kernel": launch.kernel,
                "scope": launch.scope,
                "us": duration / 1e3,
                "gflops": flops / duration if duration else 0.0,
            }
        )
    return sorted(rows, key=lambda row: -float(row["us"]))


def _flops(plan: Plan, launch: PlannedLaunch, price: CostOf) -> float:
    inputs = tuple([plan.views[v].type for v in launch.inputs])
    outputs = tuple([plan.views[v].type for v in launch.outputs])
    return float(price(inputs, outputs, Attrs(dict(launch.attrs))).flops)


@dataclass(frozen=True, slots=True)
class _IdlePort:
    """A port that fills its tokens once, and reads nothing.

    What is not in `batch` is 0. How long a kernel takes may hang on values: with zeros alone, those
    that follow a mask guessed every branch right, and half of a step was missing.
    """

    batch: Mapping[str, Array]

    def bind(self, tokens: tuple[Token, ...]) -> Launch:
        for token in tokens:
            for name, array in token.items():
                array[...] = self.batch.get(name, 0)
        return lambda: None

    def close(self) -> None:
        """Do nothing: no launch blocks."""


def launch_times_ns(
    plan: Plan,
    values: Mapping[str, Array],
    batch: Mapping[str, Array] | None = None,
    rounds: int = 15,
) -> list[float]:
    """Return the median nanoseconds of every launch, in the order of the plan.

    Args:
        plan: whose launches; its generated functions must have been built.
        values: of its variables, as far as they are not to start from their initialisers.
        batch: what every step is fed; zeros without it.
        rounds: times that every chain is run, after two to warm it.
    """
    openblas.use_one_thread()
    ports = {actor.name: _IdlePort(batch or {}) for actor in plan.actors if actor.kind in PORTED}
    bound = load(plan, ports, (HostDevice(catalogue.kernels_by_name(), joins=False),))
    try:
        for name, array in initial_values(plan, dict(values), 0).items():
            bound.variables.write(name, array)
        times = [_chains_ns(bound, plan) for _ in range(rounds + 2)][2:]
    finally:
        bound.release()
    return [statistics.median(samples) for samples in zip(*times, strict=True)]


def _chains_ns(bound: BoundPlan, plan: Plan) -> list[int]:
    times: list[int] = []
    for actor, phases in zip(plan.actors, bound.chains, strict=True):
        if not actor.launches:
            continue
        for item in merge_native_launches(phases[0]):
            if isinstance(item, NativeChain):
                times += item.timed()
            else:
                begin = time.perf_counter_ns()
                item()
                times.append(time.perf_counter_ns() - begin)
    return times
