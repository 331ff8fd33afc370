"""`actorflow plan --html`: a plan as one page: its actors, its memory and its predicted timeline.

plan_graph.js, plan_timeline.js and plan_page.js draw it, and page.js the memory maps in it; a
selection in one of them marks what belongs to it in the others. The numbers are tables, as in the
plan: what is many (launches, registers) goes by columns, and a register, an actor or a launch is
its number. Launches are numbered over all actors, in the order of the plan.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actorflow.cli.memory_map import PHASE_COLOURS, map_data
from actorflow.cli.page import MOST_OF_LINE, numbered_strings, scripted_page
from actorflow.cli.plan_diff import PlanDiff
from actorflow.cli.simulate import (
    ORIGINS,
    add_calibrate_argument,
    calibration_for,
    priced,
    rates_of,
)
from actors.kernels.host.calibration import estimate_launch_costs
from actors.machine.history import Row
from actors.simulation.simulate import SimulatedRun, simulate
from compiler.contract.codec import printable
from compiler.contract.errors import CompileError
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import Port
from compiler.pipeline.printer import overview
from memory.report import format_bytes

_PHASES = tuple(PHASE_COLOURS)
_STEPS = 100
"""As many as `simulate` has by default."""
_MOST_BATCHES = 4_000
_STEPS_SHOWN = 4
_MOST_ROWS = 4_000
"""Firings of the timeline; a step with more is shown up to here."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the page to those of `plan`."""
    parser.add_argument(
        "--html",
        metavar="FILE.html",
        help="write a page of the plan: actors and launches, memory and predicted timeline; of two"
        " plan files, also what changed",
    )
    add_calibrate_argument(parser, "for what is predicted: ")


def check_file(file: str | None) -> None:
    """Raise CompileError or OSError where no page can be written, before anything is compiled."""
    if file is None:
        return
    path = Path(file)
    if path.suffix != ".html":
        came = path.suffix or "no suffix"
        raise CompileError(f"--html {file}: expected a file that ends in .html, came {came}")
    if not path.parent.is_dir():
        raise FileNotFoundError(2, "no such directory", str(path.parent))
    if path.is_dir():
        raise IsADirectoryError(21, "is a directory", file)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan will do: durations in ns, and the firings of its first steps.

    `rates` says where they come from, `firing_ns` is by actor and `launch_ns` by actor and launch.
    """

    rates: str
    step_ns: float
    steps: int
    rows: tuple[Row, ...]
    firing_ns: tuple[float, ...]
    launch_ns: tuple[tuple[float, ...], ...]


def predict(plan: Plan, is_measured: bool | None = None) -> Prediction:
    """Return what `simulate` predicts of a plan; of one for several ranks, on this rank alone.

    Collectives take what the plan expects then. `is_measured` is as for `calibration_for`, and so
    are the errors.
    """
    machine = calibration_for(plan, is_measured)
    prices, host = (None, None) if machine is None else priced(plan, machine)
    launch_ns = tuple([tuple([x.duration_ns for x in actor.launches]) for actor in plan.actors])
    if machine is not None:
        costs = estimate_launch_costs(plan, machine.rates)
        launch_ns = tuple([tuple([price.duration_ns for price in chain]) for chain in costs])
    steps = max(2, min(_STEPS, _MOST_BATCHES // plan.batches_per_step))
    run = simulate(plan, steps, prices, host=host)
    rates = rates_of(plan, machine)
    return Prediction(
        rates=ORIGINS.get(rates, rates),
        step_ns=run.period_ns,
        steps=min(_STEPS_SHOWN, steps),
        rows=_first_rows(run, min(_STEPS_SHOWN, steps)),
        firing_ns=prices or tuple([actor.duration_ns for actor in plan.actors]),
        launch_ns=launch_ns,
    )


def _first_rows(run: SimulatedRun, steps: int) -> tuple[Row, ...]:
    """Return the firings that begin before the first steps have ended."""
    most = [math.ceil(steps * firings / run.steps) for firings in run.firings]
    # What fires less than once a step, such as a snapshot, does not prolong the picture.
    ends = [
        row[3] for row in run.rows if row[1] < most[row[0]] and run.firings[row[0]] >= run.steps
    ]
    end = max(ends, default=run.makespan_ns)
    return tuple([row for row in run.rows if row[2] < end][:_MOST_ROWS])


def write_page(
    file: str, plan: Plan, prediction: Prediction, whose: str = "", diff: PlanDiff | None = None
) -> str:
    """Write the page of a plan, the second one of a diff, and return a line that says so.

    `whose` says which rank's plan it is. Raises OSError.
    """
    page = render(plan, prediction, whose, diff)
    Path(file).write_text(page, encoding="utf-8")
    return f"page of the plan in {printable(file)} ({format_bytes(len(page.encode()))})"


def render(
    plan: Plan, prediction: Prediction, whose: str = "", diff: PlanDiff | None = None
) -> str:
    """Return the page of a plan. Equal arguments give equal pages."""
    lines = [*overview(plan), *([whose] if whose else []), _predicted(plan, prediction)]
    data = map_data(plan) | {
        "name": printable(plan.name),
        "facts": [printable(line, MOST_OF_LINE) for line in lines],
        "streams": [[printable(s.name), str(s.device)] for s in plan.streams],
        "actors": _actors(plan, prediction),
        "registers": _registers(plan),
        "launches": _launches(plan, prediction),
        "rows": prediction.rows,
        "changes": None if diff is None else _changes(diff),
        "compared": ""
        if diff is None
        else f"{printable(diff.before.name)} {diff.before.fingerprint[:12]}",
        "is_equal": diff is not None and diff.is_equal,
    }
    return scripted_page(data, "page.js", "plan_graph.js", "plan_timeline.js", "plan_page.js")


def _predicted(plan: Plan, prediction: Prediction) -> str:
    text = f"predicted: {prediction.step_ns / 1e6:,.3f} ms a step (rates: {prediction.rates})"
    if plan.mesh.num_ranks > 1:
        text += "; this rank alone, collectives as planned: simulate runs those of all ranks"
    return text


def _actors(plan: Plan, prediction: Prediction) -> list[dict[str, Any]]:
    def ports(some: Sequence[Port]) -> list[list[int]]:
        return [[port.register, port.rate] for port in some]

    first, rows = 0, []
    for actor, firing_ns in zip(plan.actors, prediction.firing_ns, strict=True):
        rows.append(
            {
                "name": printable(actor.name),
                "kind": actor.kind.value,
                "stream": actor.stream,
                "first": first,
                "count": len(actor.launches),
                "ns": round(firing_ns),
                "inputs": ports(actor.inputs),
                "outputs": ports(actor.outputs),
            }
        )
        first += len(actor.launches)
    return rows


def _registers(plan: Plan) -> dict[str, Any]:
    strings, number = numbered_strings()
    some = plan.registers
    return {
        "name": [number(r.name) for r in some],
        "kind": [number(r.kind.value) for r in some],
        "arena": [r.arena for r in some],
        "size": [r.size_bytes for r in some],
        "slots": [r.num_slots for r in some],
        "reason": [number(r.reason) for r in some],
        "strings": list(strings),
    }


def _launches(plan: Plan, prediction: Prediction) -> dict[str, Any]:
    strings, number = numbered_strings()
    launches = [launch for actor in plan.actors for launch in actor.launches]

    def registers(views: Sequence[int]) -> list[int]:
        return list(dict.fromkeys([plan.views[view].register for view in views]))

    def size(views: Sequence[int]) -> int:
        return sum([plan.views[view].type.size_bytes for view in views])

    return {
        "label": [number(x.label) for x in launches],
        "op": [number(" + ".join(x.made_of)) for x in launches],
        "kernel": [number(x.kernel) for x in launches],
        "line": [number(str(plan.sources[x.source])) for x in launches],
        "makes": [
            number(", ".join([str(plan.views[v].type) for v in x.outputs])) for x in launches
        ],
        "phase": [_PHASES.index(x.phase) for x in launches],
        "ns": [round(ns) for chain in prediction.launch_ns for ns in chain],
        "read": [size(x.inputs) for x in launches],
        "written": [size(x.outputs) for x in launches],
        "scratch": [-1 if x.workspace is None else registers([x.workspace])[0] for x in launches],
        "inputs": [registers(x.inputs) for x in launches],
        "outputs": [registers(x.outputs) for x in launches],
        "strings": list(strings),
    }


def _changes(diff: PlanDiff) -> list[list[Any]]:
    """Return rows of the table of changes: mark, kind, name, text, and the number in the plan."""
    return [
        [change.mark, change.what, printable(change.name), change.text, change.index]
        for change in diff.changes
    ]
