"""What each launch of a plan computes, and how fast."""

from __future__ import annotations

from collections.abc import Sequence

from compiler.attrs import Attrs
from compiler.plan import Launch, Plan
from compiler.registry import CostOf, all_ops, cost


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


def _flops(plan: Plan, launch: Launch, price: CostOf) -> float:
    inputs = tuple([plan.views[v].type for v in launch.inputs])
    outputs = tuple([plan.views[v].type for v in launch.outputs])
    return float(price(inputs, outputs, Attrs(dict(launch.attrs))).flops)
