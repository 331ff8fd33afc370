"""The jobs that are timed, in actorflow: items a second, bytes as planned, no calls in between.

Losses of the first steps are left for torch's sections, which time nothing that computes otherwise.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from statistics import median

import numpy as np
from engines.actorflow_models import OnDemand, Running, start
from rows.row import Row

import actorflow as af
from actorflow import nn
from actors.device.cuda.driver import CudaDriver
from gpu.jobs import measured_rows
from gpu.opened import GPU, counted_calls, open_driver
from gpu.planned import device_bytes, limit_s, simulated_s
from gpu.section import Findings, Place

NUM_LOSSES = 5
TURN_S, TURNS = 0.6, 3
LEAST_S = 3.0
"""What the smallest row takes."""

_WIDTH, _ROWS, _AHEAD = 4096, 4096, 4
_NEVER = (
    "allocate", "free", "allocate_pinned", "free_pinned", "load", "make_product", "make_event",
    "make_stream", "make_cudnn", "copy", "synchronize",
)  # fmt: skip
"""Calls that no step makes."""


def run(found: Findings, place: Place) -> None:
    clock = open_driver(place)
    for row, precision in measured_rows(is_tiny=place.is_emulated):
        if place.left_s < LEAST_S:
            found.fact(row.name, "not measured: no time was left")
            continue
        with found.part(f"{row.name} runs"):
            _measure(found, place, clock, row, precision)
    if place.left_s > LEAST_S:
        with found.part("products fed by a loader"):
            found.metric("loader", _loader(place))


def _measure(found: Findings, place: Place, clock: CudaDriver, row: Row, precision: str) -> None:
    gc.collect()  # what the job before had on the GPU goes with its objects
    name, began, free_bytes = row.name, time.perf_counter(), clock.free_bytes()
    with counted_calls(place) as counts:
        running = start(row, precision, Running, device="cuda", gpu=GPU)
        losses = [running.step() for _ in range(NUM_LOSSES)]
        found.metric(f"{name}_first_steps_s", time.perf_counter() - began)
        place.tell(f"losses-{name}", losses)
        found.check(f"{name}: losses are finite", bool(np.isfinite(losses).all()), losses)
        planned = device_bytes(running.plan())
        found.metric(f"{name}_planned_gib", planned / (1 << 30))
        real = free_bytes - clock.free_bytes()
        found.metric(f"{name}_real_gib", real / (1 << 30))
        found.metric(f"{name}_of_planned_bytes", real / planned)
        step_s, host_s, steps, calls = _timed(running, counts, place)
    place.tell(f"step-{name}", {"seconds": step_s, "bytes": real})
    found.metric(f"{name}_{row.item}_s", row.items / step_s)
    found.metric(f"{name}_ms", 1e3 * step_s)
    found.metric(f"{name}_simulated_ms", 1e3 * simulated_s(running.plan()))
    found.metric(f"{name}_of_simulated", step_s / simulated_s(running.plan()))
    found.metric(f"{name}_limit_ms", 1e3 * limit_s(running.plan(), place))
    found.metric(f"{name}_items", row.items)
    if name == "tiny":
        found.metric("tiny_steps_s", 1 / step_s)
    found.metric(f"{name}_host_us", 1e6 * host_s)
    found.fact(f"{name}: calls of {steps} steps", dict(sorted(calls.items())))
    never = {call: calls[call] for call in _NEVER if calls[call]}
    found.check(f"{name}: no step allocates, makes or waits for all", not never, never or 0, 0)
    found.metric(f"{name}_waits", calls["dispatcher: synchronize_event"] / steps)
    found.metric(f"{name}_calls", _all_of(calls, "dispatcher: ") / steps)
    running.stream.close()


def _timed(
    running: Running, counts: Counter[str], place: Place
) -> tuple[float, float, int, Counter[str]]:
    """Return seconds of a step, of the host in it, and the driver's calls in so many steps."""
    running.run(2)
    began = time.perf_counter()
    running.run(2)
    step_s = max((time.perf_counter() - began) / 2, 1e-6)
    count = 2 if place.is_emulated else max(2, int(TURN_S / step_s / TURNS))
    times, before, cpu_s = [], counts.copy(), time.process_time()
    for _ in range(TURNS):
        began = time.perf_counter()
        running.run(count)
        times.append((time.perf_counter() - began) / count)
    steps = TURNS * count
    return median(times), (time.process_time() - cpu_s) / steps, steps, counts - before


def _all_of(calls: Counter[str], prefix: str) -> int:
    return sum([count for name, count in calls.items() if name.startswith(prefix)])


class Sums(nn.Module):
    """Products of a large array: that of the batch, or one that is there already."""

    def __init__(self, rows: int, width: int):
        self.x = nn.Parameter((rows, width), (("kind", "ones"),))
        self.layers = [nn.Linear(width, width, bias=False) for _ in range(8)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def _loader(place: Place) -> float:
    """Return what a step takes with its data copied in beside others, by one that has it there."""
    rows, width = (8, 16) if place.is_emulated else (_ROWS, _WIDTH)
    large = [{"x": np.full((rows, width), 0.01 * i, np.float32)} for i in range(3)]
    small = [{"x": np.full((1,), 0.01 * i, np.float32)} for i in range(3)]
    model = Sums(rows, width)

    @af.job(train=False, device="cuda", gpu=GPU)
    def fed(model, batch):
        return model(batch.x)

    @af.job(train=False, device="cuda", gpu=GPU)
    def there(model, batch):
        return model(model.x) + batch.x.mean()

    times = []
    for job, batches in ((fed, large), (there, small)):
        data = OnDemand(batches)
        running = Running(job, model, data, job.stream(model, data))
        data.allow(_AHEAD)  # batches are read before they are needed, as from any other source
        seconds, *_ = _timed(running, Counter(), place)
        times.append(seconds)
        running.stream.close()
    return times[0] / times[1]
