"""`actorflow simulate`: what a plan will do, here or on many devices, before anything is run.

Firings are priced with what was measured of this machine (`actorflow.run.pricing`), kept in the
cache folder; with `--no-calibrate` with the plan's own estimates, which are the same everywhere. A
plan for a GPU has the estimates of the GPU's description, and needs no GPU.
The report is one value, printed as text or as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING, Any

from actorflow.cli.network_options import (
    add_network_arguments,
    check_network,
    network_of,
    spread_of,
)
from actorflow.compile.gpus import gpu_of
from actorflow.run.pricing import calibration, priced
from actorflow.settings import Settings
from actors.critical_path import time_per_actor
from actors.ranks import RanksRun, simulate_ranks
from actors.simulate import SimulatedRun, simulate
from actors.timeline import write_chrome_trace
from compiler.errors import CompileError
from compiler.joint import fit_together, verify_ranks
from compiler.joint_job import check_one_job
from compiler.meetings import meetings_of
from compiler.mesh import Mesh
from compiler.plan import Plan
from compiler.rank_plans import RankPlans

if TYPE_CHECKING:
    from actorflow.compile.compiling import Compilation

_TOP = 5

_ORIGINS = {"measured": "measured on this machine", "estimated": "the plan's estimates"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `actorflow simulate` to its parser."""
    add = parser.add_argument
    add("--steps", type=int, default=100, help="steps to simulate (default 100)")
    add_network_arguments(parser)
    add("--jitter", type=float, default=0.0, metavar="J", help="durations vary by a share of J")
    add("--seed", type=int, default=0, metavar="S", help="of jitter and speeds (default 0)")
    add(
        "--calibrate",
        action=argparse.BooleanOptionalAction,
        help="measure this machine anew; --no-calibrate: use the plan's estimates (default: what"
        " was measured before)",
    )
    add("--trace", metavar="FILE.json", help="write the timeline for chrome://tracing or Perfetto")
    add("--json", action="store_true", help="print the report as JSON")


def run(plan: Plan, options: argparse.Namespace, asked: Compilation | None = None) -> int:
    """Simulate a plan, print the report, and return the exit code.

    With what it was `asked` for the plans of other classes of ranks are compiled, too.

    Raises:
        CompileError: An option has a value that means nothing, or the plan's ranks never meet.
        OSError: The trace cannot be written.
    """
    devices = _devices(plan, options)
    _check(plan, devices, options)
    prices, host, found = None, None, None
    gpu = gpu_of(plan)
    if options.calibrate and gpu:
        raise CompileError(
            f"--calibrate measures this machine's processor, and plan {plan.name!r} runs on a GPU:"
            f" its launches are priced as the description of {gpu} says; leave --calibrate out"
        )
    if options.calibrate is not False and not gpu:
        settings = Settings.from_env(os.environ)
        found = calibration(settings, is_fresh=bool(options.calibrate))
        prices, host = priced(plan, found)
    ranks: RanksRun | None = None
    classes: list[dict[str, Any]] = []
    if _meets(plan):
        # Ranks by their number have a batch each, of one size: what one has all have.
        plans = _ranks(plan, devices, asked if options.devices is None else None)
        own = None if found is None else [priced(one, found)[0] for one in plans.plans]
        ranks = simulate_ranks(
            plans,
            options.steps,
            network=network_of(options, devices),
            spread=spread_of(options),
            jitter=options.jitter,
            seed=options.seed,
            durations_ns=own,
        )
        result, plan = ranks.slowest, plans.plans[plans.class_of[ranks.slowest_rank]]
        classes = _classes(plans)
    else:
        result = simulate(
            plan, options.steps, prices, seed=options.seed, jitter=options.jitter, host=host
        )
    names = tuple([stream.name for stream in plan.streams])
    if options.trace:
        write_chrome_trace(
            options.trace, result.rows, result.table, stream_names=names, has_arrows=True
        )
    rates = f"the description of {gpu}" if gpu else "estimated" if prices is None else "measured"
    report = _report(plan.name, names, result, ranks, rates) | {"classes": classes}
    print(json.dumps(report, indent=1) if options.json else "\n".join(_lines(report)))
    return 0


def _devices(plan: Plan, options: argparse.Namespace) -> int:
    if options.devices is None:
        return plan.mesh.num_ranks
    return int(options.devices)


def check_options(options: argparse.Namespace) -> None:
    """Raise CompileError for numbers that nothing can be simulated with."""
    expected = (
        ("--steps", options.steps, "1 or more", options.steps >= 1),
        ("--jitter", options.jitter, "0 or more and below 1", 0 <= options.jitter < 1),
    )
    for name, value, wanted, is_good in expected:
        if not is_good:
            raise CompileError(f"{name} must be {wanted}, got {value}")
    check_network(options)


def _check(plan: Plan, devices: int, options: argparse.Namespace) -> None:
    if devices > 1 and not _meets(plan):
        raise CompileError(
            f"--devices {devices}: plan {plan.name!r} has no all-reduce, so its ranks would"
            " never meet; compile the job for several ranks, or leave --devices out"
        )
    if options.straggler != 1 and not _meets(plan):
        raise CompileError(
            f"--straggler {options.straggler:g}: plan {plan.name!r} runs on one rank, so no other"
            " waits for it; leave --straggler out"
        )


def _meets(plan: Plan) -> bool:
    return bool(meetings_of(plan))


def _classes(plans: RankPlans) -> list[dict[str, Any]]:
    return [
        {
            "ranks": plans.class_of.count(number),
            "first": plans.class_of.index(number),
            "launches": sum([len(actor.launches) for actor in plan.actors]),
            "arena_mib": sum([arena.size_bytes for arena in plan.arenas]) / 2**20,
        }
        for number, plan in enumerate(plans.plans)
    ]


def _ranks(plan: Plan, devices: int, asked: Compilation | None) -> RankPlans:
    """Return the ranks of a plan's mesh, or as many as are asked for along its one axis.

    Raises CompileError where it is the plan of some of its ranks alone, and nothing says of what
    those of the others are to be compiled.
    """
    mesh = plan.mesh
    if asked is not None and mesh.names and mesh.num_ranks == devices:
        from actorflow.compile.agreed_plan import plans_of_classes

        ranks = plans_of_classes(asked)
        verify_ranks(ranks)
        return ranks
    if mesh.names and mesh.num_ranks == devices:
        ranks = RankPlans.same(plan, mesh)
        try:
            check_one_job(ranks)
            fit_together(ranks)
        except CompileError as error:
            raise CompileError(
                f"plan {plan.name!r} is that of some ranks of a mesh of {mesh}, and others have"
                f" another one, without which they cannot be simulated: {error}"
            ) from None
        return ranks
    groups = tuple(dict.fromkeys([meeting.group for meeting in meetings_of(plan)]))
    if len(mesh.names) > 1 or len(groups) > 1:
        raise CompileError(
            f"--devices {devices}: plan {plan.name!r} is for a mesh of {mesh}, and which of its"
            " axes is to have another extent is not said; leave --devices out, or compile the job"
            " for another mesh"
        )
    return RankPlans.same(plan, Mesh(groups, (devices,)))


def _report(
    name: str,
    stream_names: tuple[str, ...],
    result: SimulatedRun,
    ranks: RanksRun | None,
    rates: str,
) -> dict[str, Any]:
    makespan = max(result.makespan_ns, 1)
    path = time_per_actor(result.table, result.critical_path())
    top = sorted(range(len(path)), key=lambda actor: -path[actor])[:_TOP]
    return {
        "plan": name,
        "rates": rates,
        "steps": result.steps,
        "makespan_ms": (ranks.makespan_ns if ranks else result.makespan_ns) / 1e6,
        "step_ms": (ranks.step_ns if ranks else result.period_ns) / 1e6,
        "streams": _streams(stream_names, result),
        "critical_path": [
            {"actor": result.table.names[a], "share": path[a] / makespan} for a in top if path[a]
        ],
        "ranks": None if ranks is None else _scaling(ranks),
    }


def _streams(names: tuple[str, ...], result: SimulatedRun) -> list[dict[str, Any]]:
    idle = result.bubbles()
    return [
        {
            "name": name,
            "busy": result.utilisation[stream],
            "bubbles": [
                {"waits_for": bubble.describe(result.table), "idle_ms": bubble.idle_ns / 1e6}
                for bubble in idle
                if bubble.stream == stream
            ],
        }
        for stream, name in enumerate(names[: len(result.busy_ns)])
    ]


def _scaling(ranks: RanksRun) -> dict[str, Any]:
    return {
        "devices": ranks.num_ranks,
        "step_ms": ranks.step_ns / 1e6,
        "alone_ms": ranks.alone_ns / 1e6,
        "efficiency": ranks.efficiency,
        "exposed_ms": ranks.exposed_ns / 1e6,
        "late_ms": ranks.late_ns / 1e6,
        "wire_mb": ranks.wire_bytes / 1e6,
        "slowest_rank": ranks.slowest_rank,
        "slowdown": ranks.slowdowns[ranks.slowest_rank],
    }


def _lines(report: dict[str, Any]) -> list[str]:
    origin = _ORIGINS.get(report["rates"], report["rates"])
    lines = [
        f"{report['steps']} steps of {report['plan']!r} take {report['makespan_ms']:,.1f} ms,"
        f" {report['step_ms']:,.2f} ms per step in steady state (rates: {origin})"
    ]
    for stream in report["streams"]:
        causes = [f"{b['waits_for']} {b['idle_ms']:,.1f} ms" for b in stream["bubbles"][:_TOP]]
        idle = f", waits for {', '.join(causes)}" if causes else ""
        lines.append(f"  stream {stream['name']:<12} busy {stream['busy']:6.1%}{idle}")
    shares = [f"{part['actor']} {part['share']:.1%}" for part in report["critical_path"]]
    lines.append(f"  critical path: {', '.join(shares) or 'nothing ran'}")
    if (ranks := report["ranks"]) is not None:
        lines += [
            f"  the streams and the path are those of rank {ranks['slowest_rank']}, the slowest"
            f" ({ranks['slowdown']:.2f} times)",
            "",
            "| devices | ms per step | alone | efficiency | exposed ms | waits for late ranks, ms"
            " | MB sent per rank |",
            "|---|---|---|---|---|---|---|",
            f"| {ranks['devices']:,} | {ranks['step_ms']:,.2f} | {ranks['alone_ms']:,.2f}"
            f" | {ranks['efficiency']:.1%} | {ranks['exposed_ms']:,.2f} | {ranks['late_ms']:,.2f}"
            f" | {ranks['wire_mb']:,.2f} |",
        ]
    for number, own in enumerate(report["classes"] if len(report["classes"]) > 1 else ()):
        lines.append(
            f"  class {number}: {own['ranks']:,} ranks, the first of them {own['first']};"
            f" {own['launches']:,} launches, {own['arena_mib']:,.1f} MiB"
        )
    return lines
