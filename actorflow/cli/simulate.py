"""`actorflow simulate`: what a plan will do, here or on many devices, before anything is run.

Firings are priced with what was measured of this machine (`calibration`), kept in the cache
folder; with `--no-calibrate` with the plan's own estimates, which are the same everywhere. A
plan for a GPU has the estimates of the GPU's description, and needs no GPU.
The report is one value, printed as text or as JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from actorflow import functional, nn
from actorflow.data import ArraySource
from actorflow.environment.host import gpu_of, processor, usable_cores
from actorflow.environment.native import enable_native
from actorflow.environment.settings import Settings, logger
from actorflow.jobs.decorator import job
from actorflow.optim import SGD
from actorflow.options.run_spec import RunSpec
from actorflow.run.runner import Runner
from actorflow.tensor.tensor import Tensor
from actors.kernels.common.cost import Rates
from actors.kernels.common.files import load_measurements, replace_object
from actors.kernels.common.host_memory import quiet_floating_point
from actors.kernels.host import catalogue
from actors.kernels.host.calibration import calibrate, firing_prices, stopwatch
from actors.kernels.library import openblas, runtime
from actors.loop.timeline import TraceProcess, write_chrome_trace
from actors.simulation.costs import ALGORITHMS, Network, RunCosts, SharedHost, Wire, on_host
from actors.simulation.ranks import RanksRun, Spread, simulate_ranks
from actors.simulation.simulate import SimulatedRun, simulate, time_per_actor
from compiler.contract.codec import from_json
from compiler.contract.errors import CompileError
from compiler.contract.placement import SINGLE_RANK, Hosts, Mesh, MeshLink, RankContext, on_hosts
from compiler.contract.plan import Plan
from compiler.contract.rank_plans import RankPlans, collective_groups
from compiler.verify.cross_rank import check_same_job, verify_cross_rank, verify_ranks

if TYPE_CHECKING:
    from actorflow.compile.compiling import JobSpec


_HOSTS = Hosts((1,), MeshLink(50.0, 1_000.0), MeshLink(12.5, 5_000.0))
"""Where nothing is said: a host for each rank."""


def add_network_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the network between ranks and of the ranks' speeds."""
    add = parser.add_argument
    add("--devices", type=int, metavar="N", help="ranks (default: those of the plan)")
    add("--link", type=float, metavar="GB/s",
        help="rate of a host's link each way, shared by its ranks (default 12.5)")  # fmt: skip
    add("--latency", type=float, metavar="US",
        help="latency of a message between hosts (default 5)")  # fmt: skip
    add("--per-host", type=int, metavar="K", help="ranks per host (default 1)")
    add("--inside", type=float, metavar="GB/s",
        help="rate of each rank inside its host (default 50)")  # fmt: skip
    add("--inside-latency", type=float, metavar="US",
        help="latency of a message inside a host (default 1)")  # fmt: skip
    add("--per-rack", type=int, default=0, metavar="H",
        help="hosts per rack (default: all hosts at one switch)")  # fmt: skip
    add("--uplink", type=float, metavar="GB/s",
        help="rate of a rack's link each way, shared by its hosts (default: --link)")  # fmt: skip
    add("--algorithm", choices=ALGORITHMS, default="hierarchical",
        help="kind of all-reduce (default hierarchical: inside hosts, then between them)",
        )  # fmt: skip
    add("--straggler", type=float, default=1.0, metavar="F", help="one rank is F times as slow")
    add("--spread", type=float, default=0.0, metavar="S",
        help="each rank is exp(S x) times as slow, x normal (default 0: all equally fast)",
        )  # fmt: skip


def with_numbers(options: argparse.Namespace, plan: Plan | None = None) -> argparse.Namespace:
    """Return options with all numbers of hosts and links.

    What is not given is what a plan is for, or a default. Raises CompileError for a plan whose
    hosts are not alike, where nothing is said of them.
    """
    hosts = (plan.hosts if plan else None) or _HOSTS
    if options.per_host is None and len(hosts.sizes) > 1:
        raise CompileError(
            f"plan {plan.name if plan else ''!r} is for hosts of {', '.join(map(str, hosts.sizes))}"
            " ranks, and those of a simulation are alike; give their ranks as --per-host"
        )
    inside, between = hosts.inside, hosts.between
    numbers = {
        "per_host": hosts.sizes[0],
        "inside": inside.bytes_per_ns,
        "inside_latency": inside.latency_ns / 1e3,
        "link": between.bytes_per_ns,
        "latency": between.latency_ns / 1e3,
    }
    said = {name: value for name, value in vars(options).items() if value is not None}
    return argparse.Namespace(**vars(options) | numbers | said)


def ranks_of(options: argparse.Namespace) -> RankContext:
    """Return the ranks that a plan is asked for, on hosts and links that it is made for.

    Without a number of devices only the hosts: the ranks are those of the job's mesh.
    """
    options = with_numbers(options)
    inside = MeshLink(options.inside, options.inside_latency * 1e3)
    between = MeshLink(options.link, options.latency * 1e3)
    hosts = Hosts((options.per_host,), inside, between)
    if options.devices is None:
        return replace(SINGLE_RANK, hosts=hosts)
    return on_hosts(Mesh(("data",), (options.devices,)), hosts)


def spread_of(options: argparse.Namespace) -> Spread:
    """Return how the speeds of the ranks differ."""
    return Spread(options.straggler, options.spread)


def network_of(options: argparse.Namespace) -> Network:
    """Return what joins the ranks."""
    link, inside = options.latency * 1e3, options.inside_latency * 1e3
    return Network(
        Wire(options.link, link),
        options.algorithm,
        options.per_host,
        Wire(options.inside, inside),
        options.per_rack,
        Wire(options.uplink or options.link, link),
    )


def check_network(options: argparse.Namespace) -> None:
    """Raise CompileError for numbers that no network has."""
    devices = 1 if options.devices is None else options.devices
    uplink = options.link if options.uplink is None else options.uplink
    speeds = (("--link", options.link), ("--inside", options.inside), ("--uplink", uplink))
    times = (("--latency", options.latency), ("--inside-latency", options.inside_latency))
    expected = (
        ("--devices", devices, "1 or more", devices >= 1),
        *[(name, v, "more than 0 GB/s", 0 < v < math.inf) for name, v in speeds],
        *[(name, v, "0 us or more", 0 <= v < math.inf) for name, v in times],
        ("--per-host", options.per_host, "1 or more", options.per_host >= 1),
        ("--per-rack", options.per_rack, "0 or more", options.per_rack >= 0),
        ("--straggler", options.straggler, "1 or more", 1 <= options.straggler < math.inf),
        ("--spread", options.spread, "0 or more", 0 <= options.spread < math.inf),
    )
    for name, value, rule, is_good in expected:
        if not is_good:
            raise CompileError(f"{name} must be {rule}, got {value}")
    if options.uplink is not None and not options.per_rack:
        raise CompileError(
            f"--uplink {options.uplink:g} is the rate between racks, and no racks are defined;"
            " give the number of hosts of a rack as --per-rack"
        )


# What a run costs on this machine beside its launches is measured on a small job, which is trained
# for a second with a listener and a trace, like a user's. Its chain keeps all cores busy and sweeps
# the caches, as that of a user does: then a turn takes three times as long as beside a small one,
# and so does a batch. Of each sort of moment the median of a run counts, and of some runs the
# least: what others do on the machine only adds.

_RUNS, _STEPS = 3, 70
_BATCH, _WIDTH, _HIDDEN = 128, 256, 1024
"""A step of some milliseconds, over parameters that no second-level cache holds."""


class _PricedNet(nn.Module):
    def __init__(self) -> None:
        self.up, self.down = nn.Linear(_WIDTH, _HIDDEN), nn.Linear(_HIDDEN, 8)
        self.inner = nn.Linear(_HIDDEN, _HIDDEN)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(functional.relu(self.inner(functional.relu(self.up(x)))))
        return y


def measure_costs(settings: Settings) -> RunCosts:
    """Train a small job and return what its firings cost beside their launches."""

    @job(optimizer=SGD(1e-3), deterministic=True)
    def calibration(model: Any, batch: Any) -> Tensor:
        loss: Tensor = model(batch.x).mean()
        return loss

    x = np.ones((4 * _BATCH, _WIDTH), np.float32)
    source = ArraySource({"x": x}, batch=_BATCH)
    plan = calibration.compile(_PricedNet(), source)
    runs = [costs_of(_traced(plan, source, settings), _BATCH * _WIDTH * 4) for _ in range(_RUNS)]
    return least_of(runs)


def _traced(plan: Plan, source: ArraySource, settings: Settings) -> list[dict[str, Any]]:
    """Run a plan and return the events of its trace."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        runner = Runner(plan, settings=replace(settings, trace=trace))
        heard: list[int] = []
        runner.run(
            RunSpec(
                source, steps=_STEPS, progress=False, on_step=lambda step, _: heard.append(step)
            )
        )
        events: list[dict[str, Any]] = from_json(trace.read_bytes())["traceEvents"]
    return events


def least_of(runs: Sequence[RunCosts]) -> RunCosts:
    """Return the least of each cost."""
    return RunCosts(*[min(costs) for costs in zip(*[astuple(run) for run in runs], strict=True)])


def costs_of(events: Sequence[Mapping[str, Any]], batch_bytes: int) -> RunCosts:
    """Return the costs from a trace of firings `data`, `step` and `metrics`, in microseconds."""
    rows: dict[str, dict[int, tuple[float, float]]] = {"data": {}, "step": {}, "metrics": {}}
    for event in events:
        if event.get("ph") == "X" and event["name"] in rows and "firing" in event["args"]:
            begin = float(event["ts"])
            rows[event["name"]][event["args"]["firing"]] = (begin, begin + float(event["dur"]))
    steps, heard = rows["step"], rows["metrics"]
    # Only neighbours: a firing may be missing from the trace.
    gaps = [steps[b][0] - steps[a][1] for a, b in pairwise(sorted(steps)) if b == a + 1]
    hops = [heard[n][0] - steps[n][1] for n in sorted(heard) if n in steps]
    ports = [[end - begin for begin, end in rows[name].values()] for name in ("data", "metrics")]
    turn, hop, source, sink = [_median(x) * 1e3 for x in (gaps, hops, *ports)]
    return RunCosts(turn, max(hop - turn, 0.0), source / 2, sink, source / 2 / batch_bytes)


def _median(values: Sequence[float]) -> float:
    """Return the median; 0 where there is nothing."""
    return max(median(values), 0.0) if values else 0.0


# A calibration has some twenty numbers and knows no job. It is kept in the cache folder by
# processor, cores, threads and libraries; nothing that a plan is made from depends on it.


@dataclass(frozen=True, slots=True)
class Calibration:
    """What launches take on this machine, and what a run costs beside them."""

    rates: Rates
    costs: RunCosts

    @property
    def capacity(self) -> float:
        """What all cores do in the time of one alone."""
        cores = usable_cores()
        return self.rates.capacity_of(cores) if runtime.is_enabled() else float(cores)


def calibration(settings: Settings, *, is_fresh: bool = False) -> Calibration:
    """Return what was measured of this machine; measure it when nothing is kept, or anew.

    It takes some seconds, which a line of the log says. A file that is damaged is measured anew,
    with a line too, and so is a machine whose file an earlier version wrote.
    """
    quiet_floating_point()
    enable_native(settings)
    # What is measured must be what runs have, and its name may not depend on what ran before.
    openblas.use_threads(1 if runtime.is_enabled() else settings.threads)
    machine = f"{processor()} {os.cpu_count()} {openblas.loaded_blas()} {catalogue.fingerprint()}"
    name = hashlib.blake2b(f"{_FORMAT} {machine}".encode(), digest_size=8).hexdigest()
    path = None if settings.cache is None else settings.cache / "rates" / f"host-{name}.json"
    if path is not None and not is_fresh:
        stored = load_measurements(path, Calibration, "this machine is measured again")
        if stored is not None:
            return stored
    start_s = time.perf_counter()
    fresh = Calibration(calibrate(stopwatch(time.perf_counter_ns)), measure_costs(settings))
    if path is not None:
        seconds = time.perf_counter() - start_s
        try:
            replace_object(path, fresh)
            logger.info("this machine was measured in %.1f s; kept in %s", seconds, path.parent)
        except OSError as error:
            text = "%s cannot be written (%s): the measurements of this machine are not kept"
            logger.warning(text, path, error.strerror)
    return fresh


_FORMAT = 5
"""Part of the name of a file of measurements: raised when they mean something else."""


def priced(plan: Plan, measured: Calibration) -> tuple[tuple[float, ...], SharedHost]:
    """Return the durations of a plan's firings here, by actor, and who shares the cores."""
    rates, capacity = measured.rates, measured.capacity
    if not runtime.is_enabled():
        rates = replace(rates, blas_threads=capacity)
    return on_host(plan, firing_prices(plan, rates), capacity, measured.costs)


_TOP = 5

ORIGINS = {"measured": "measured on this machine", "estimated": "the plan's estimates"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `actorflow simulate` to its parser."""
    add = parser.add_argument
    add("--steps", type=int, default=100, help="steps to simulate (default 100)")
    add_network_arguments(parser)
    add("--jitter", type=float, default=0.0, metavar="J", help="durations vary by this fraction")
    add("--seed", type=int, default=0, metavar="S", help="seed of jitter and speeds (default 0)")
    add_calibrate_argument(parser)
    add("--trace", metavar="FILE.json", help="write the timeline for chrome://tracing or Perfetto")
    add("--json", action="store_true", help="print the report as JSON")


def add_calibrate_argument(parser: argparse.ArgumentParser, when: str = "") -> None:
    """Add the option that says what launches are priced with; `when` begins its help."""
    parser.add_argument(
        "--calibrate",
        action=argparse.BooleanOptionalAction,
        help=f"{when}measure this machine again; --no-calibrate: use the plan's estimates (default:"
        " use the last measurement)",
    )


def calibration_for(plan: Plan, is_asked: bool | None) -> Calibration | None:
    """Return what a plan's launches are priced with; None where its own estimates count.

    `is_asked` is the option: True measures this machine anew, False never does. Raises CompileError
    where a plan for a GPU is asked to be measured on this machine's processor.
    """
    gpu = gpu_of(plan)
    if is_asked and gpu:
        raise CompileError(
            f"--calibrate measures this machine's processor, and plan {plan.name!r} runs on a"
            f" GPU: the description of {gpu} gives the durations of its launches; leave"
            " --calibrate out"
        )
    if is_asked is False or gpu:
        return None
    return calibration(Settings.from_env(os.environ), is_fresh=bool(is_asked))


def rates_of(plan: Plan, measured: Calibration | None) -> str:
    """Return where the durations of a plan's launches come from; `ORIGINS` has two in words."""
    if gpu := gpu_of(plan):
        return f"the description of {gpu}"
    return "estimated" if measured is None else "measured"


def run(plan: Plan, options: argparse.Namespace, job_spec: JobSpec | None = None) -> int:
    """Simulate a plan, print the report, and return the exit code.

    With the `job_spec` that it was compiled for, the plans of other classes of ranks are compiled,
    too.

    Raises:
        CompileError: An option has a value that means nothing, or the plan's ranks never meet.
        OSError: The trace cannot be written.
    """
    options = with_numbers(options, plan)
    devices = _devices(plan, options)
    _check(plan, devices, options)
    prices, host = None, None
    machine = calibration_for(plan, options.calibrate)
    if machine is not None:
        prices, host = priced(plan, machine)
    ranks: RanksRun | None = None
    classes: list[dict[str, Any]] = []
    if _meets(plan):
        # Ranks by their number have a batch each, of one size: what one has all have.
        plans = _ranks(plan, devices, job_spec if options.devices is None else None)
        local_ns = None if machine is None else [priced(one, machine)[0] for one in plans.plans]
        ranks = simulate_ranks(
            plans,
            options.steps,
            network=network_of(options),
            spread=spread_of(options),
            jitter=options.jitter,
            seed=options.seed,
            durations_ns=local_ns,
        )
        simulated, plan = ranks.slowest, plans.plans[plans.class_of[ranks.slowest_rank]]
        classes = _classes(plans)
    else:
        simulated = simulate(
            plan, options.steps, prices, seed=options.seed, jitter=options.jitter, host=host
        )
    names = tuple([stream.name for stream in plan.streams])
    if options.trace:
        write_chrome_trace(
            options.trace,
            simulated.rows,
            simulated.table,
            stream_names=names,
            has_arrows=True,
            process=TraceProcess(f"plan {plan.name!r}, simulated"),
        )
    rates = rates_of(plan, machine)
    report = _report(plan.name, names, simulated, ranks, rates) | {"classes": classes}
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
    for name, value, rule, is_good in expected:
        if not is_good:
            raise CompileError(f"{name} must be {rule}, got {value}")
    check_network(with_numbers(options))


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
    return bool(collective_groups(plan))


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


def _ranks(plan: Plan, devices: int, job_spec: JobSpec | None) -> RankPlans:
    """Return the ranks of a plan's mesh, or as many as are asked for along its one axis.

    Raises CompileError where it is the plan of some of its ranks alone, and nothing says of what
    those of the others are to be compiled.
    """
    mesh = plan.mesh
    if job_spec is not None and mesh.names and mesh.num_ranks == devices:
        from actorflow.distributed.agreed_plan import plans_of_classes

        ranks = plans_of_classes(job_spec)
        verify_ranks(ranks)
        return ranks
    if mesh.names and mesh.num_ranks == devices:
        ranks = RankPlans.same(plan, mesh)
        try:
            check_same_job(ranks)
            verify_cross_rank(ranks)
        except CompileError as error:
            raise CompileError(
                f"plan {plan.name!r} is for some ranks of the mesh {mesh}, and a simulation needs"
                f" the plans of the other ranks too: {error}"
            ) from None
        return ranks
    groups = tuple(dict.fromkeys([meeting.group for meeting in collective_groups(plan)]))
    if len(mesh.names) > 1 or len(groups) > 1:
        raise CompileError(
            f"--devices {devices}: plan {plan.name!r} is for a mesh of {mesh}, and --devices does"
            " not say which axis to resize; leave --devices out, or compile the job for another"
            " mesh"
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
    origin = ORIGINS.get(report["rates"], report["rates"])
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
    for number, row in enumerate(report["classes"] if len(report["classes"]) > 1 else ()):
        lines.append(
            f"  class {number}: {row['ranks']:,} ranks, the first of them {row['first']};"
            f" {row['launches']:,} launches, {row['arena_mib']:,.1f} MiB"
        )
    return lines
