"""What a run costs on this machine beside its launches: measured on a small job of our own.

The job is trained for a second with a listener and a trace, like a user's. Its chain keeps all
cores busy and sweeps the caches, as that of a user does: then a turn takes three times as long as
beside a small one, and so does a batch. Of each sort of moment the median of a run counts, and of
some runs the least: what others do on the machine only adds.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from actorflow import functional, nn
from actorflow.data import ArraySource
from actorflow.jobs import job
from actorflow.optim import SGD
from actorflow.run.fit_options import FitOptions
from actorflow.run.runner import Runner
from actorflow.settings import Settings
from actorflow.tensor import Tensor
from actors.kernels.library.measured_file import kept, replace_object
from actors.kernels.native.sealed import DamagedFile
from actors.run_costs import RunCosts
from compiler.plan import Plan

_RUNS, _STEPS = 3, 70
_BATCH, _WIDTH, _HIDDEN = 128, 256, 1024
"""A step of some milliseconds, over parameters that no second-level cache holds."""


class _PricedNet(nn.Module):
    def __init__(self) -> None:
        self.up, self.down = nn.Linear(_WIDTH, _HIDDEN), nn.Linear(_HIDDEN, 8)
        self.inner = nn.Linear(_HIDDEN, _HIDDEN)

    def __call__(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(functional.relu(self.inner(functional.relu(self.up(x)))))
        return made


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
            FitOptions(
                source, steps=_STEPS, progress=False, on_step=lambda step, _: heard.append(step)
            )
        )
        events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
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
    gaps = [steps[b][0] - steps[a][1] for a, b in pairwise(sorted(steps)) if b == a + 1]
    hops = [heard[n][0] - steps[n][1] for n in sorted(heard) if n in steps]
    ports = [[end - begin for begin, end in rows[name].values()] for name in ("data", "metrics")]
    turn, hop, source, sink = [_median(x) * 1e3 for x in (gaps, hops, *ports)]
    return RunCosts(turn, max(hop - turn, 0.0), source / 2, sink, source / 2 / batch_bytes)


def _median(values: Sequence[float]) -> float:
    """Return the median; 0 where there is nothing."""
    return max(median(values), 0.0) if values else 0.0


def cached_costs(folder: Path, name: str, settings: Settings, *, is_fresh: bool) -> RunCosts:
    """Return the costs kept in a folder under a name; measure and keep them when there are none.

    A line says where they are damaged, and so measured anew.
    """
    path = folder / f"run-costs-{name}.json"
    found = None if is_fresh else kept(path, _decoded, "what a run costs is measured anew")
    if found is not None:
        return found
    costs = measure_costs(settings)
    with contextlib.suppress(OSError):  # that the folder cannot be written, the rates have said
        replace_object(path, asdict(costs))
    return costs


def _decoded(found: Mapping[str, Any]) -> RunCosts:
    """Return costs as they were written. Raises DamagedFile: they were not."""
    try:
        costs = RunCosts(**{name: found[name] for name in asdict(RunCosts())})
        if not all([isinstance(v, float) and 0 <= v < 1e12 for v in asdict(costs).values()]):
            raise TypeError(f"{found}")
    except (KeyError, TypeError) as error:
        raise DamagedFile(f"these are no costs: {error}") from None
    return costs
