"""What a run costs on this machine beside its launches: measured on a small job of our own.

The job is trained for a fraction of a second with a listener and a trace, like a user's. Of each
sort of moment the lower quartile counts: what others do on the machine only adds.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
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

_STEPS = 400
_BATCH, _WIDTH = 128, 256
"""A step of about half a millisecond: long enough for the ports to be done before it ends."""


class _PricedNet(nn.Module):
    def __init__(self) -> None:
        self.up, self.down = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 8)

    def __call__(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(functional.relu(self.up(x)))
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
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        runner = Runner(plan, settings=replace(settings, trace=trace))
        heard: list[int] = []
        runner.run(
            FitOptions(
                source, steps=_STEPS, progress=False, on_step=lambda step, _: heard.append(step)
            )
        )
        events = json.loads(trace.read_text())["traceEvents"]
    return costs_of(events, _BATCH * _WIDTH * 4)


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
    turn, hop, source, sink = [_quartile(x) * 1e3 for x in (gaps, hops, *ports)]
    return RunCosts(turn, max(hop - turn, 0.0), source / 2, sink, source / 2 / batch_bytes)


def _quartile(values: Sequence[float]) -> float:
    """Return the lower quartile; 0 where there is nothing."""
    return max(sorted(values)[len(values) // 4], 0.0) if values else 0.0


def cached_costs(folder: Path, name: str, settings: Settings, *, is_fresh: bool) -> RunCosts:
    """Return the costs kept in a folder under a name; measure and keep them when there are none.

    A line says where they are damaged, and so measured anew.
    """
    path = folder / f"costs-{name}.json"
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
