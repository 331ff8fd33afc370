"""The launches of steps one by one on random numbers: products, attention, all by op.

What is timed is what a plan launches, on an arena of its size. Launches that are alike are timed
once, and counted.
"""

from __future__ import annotations

from collections import defaultdict
from types import MappingProxyType

import numpy as np
from rows.all_rows import find_row
from rows.gpt2 import gpt2_row
from rows.row import Row

from actors.device.cuda.device import CudaDevice
from actors.device.cuda.driver import CudaDriver
from actors.kernels.cuda.calls import (
    AlternativeCalls,
    DeviceCalls,
    RunCudnn,
    RunKernel,
    RunProduct,
    every_call,
)
from compiler.contract.errors import ActorflowError
from compiler.contract.types import numpy_dtype
from gpu.jobs import TAKEN_APART, TINY
from gpu.launched import fill_random, launch_ns
from gpu.opened import open_device, open_driver
from gpu.planned import BoundCalls, bound_launches, device_bytes, flops, plan_of
from gpu.section import Findings, Place

_TOLD = 16
"""Kinds of launches after which what was found is told."""


def run(found: Findings, place: Place) -> None:
    driver = open_driver(place)
    device = open_device(place, driver)  # one for all rows: it closes the driver when it ends
    rows = [find_row(name) for name in TAKEN_APART]
    for row in [gpt2_row("tiny-gpt2", TINY)] if place.is_emulated else rows:
        with found.part(f"launches of {row.name}"):
            _launches(found, driver, device, row)


def _launches(found: Findings, driver: CudaDriver, device: CudaDevice, row: Row) -> None:
    plan = plan_of(row, row.precisions[-1])
    stream = device.make_stream(row.name)
    size = device_bytes(plan)
    arena = driver.allocate(size)
    pinned = max(sum([a.size_bytes for a in plan.arenas]) - size, 1)
    host = driver.allocate_pinned(pinned)
    launches = list(bound_launches(plan, arena, host))
    fill_random(driver, arena, size)
    _fill_integers(driver, launches)
    driver.load(
        list(
            {
                c.text.text: c.text
                for b in launches
                for c in every_call(b.calls)
                if isinstance(c, RunKernel)
            }.values()
        )
    )
    alike: dict[str, list[BoundCalls]] = defaultdict(list)
    for bound in launches:
        alike[bound.key].append(bound)
    found.metric(f"{row.name}_launches", len(launches))
    found.metric(f"{row.name}_kinds", len(alike))
    table = []
    # What the plan gives most of the time comes first: a section may be killed before its end.
    order = sorted(alike.values(), key=lambda g: -len(g) * g[0].launch.duration_ns)
    for number, group in enumerate(order):
        timed = _seconds(found, driver, device, stream, group[0])
        if timed is not None:
            seconds, way = timed
            table.append((seconds * len(group), seconds, group, number, way))
        if number % _TOLD == 0 or number == len(alike) - 1:
            _report(found, row.name, sorted(table, key=lambda entry: -entry[0]))
    driver.free(arena)
    driver.free_pinned(host)


def _seconds(
    found: Findings, driver: CudaDriver, device, stream, bound: BoundCalls
) -> tuple[float, str] | None:
    """Return what a launch takes on the device, and how it is done where there are several ways.

    One that fails is a failed check.
    """
    launch = bound.launch
    try:
        kernel = device.bind(
            launch.kernel, MappingProxyType(dict(launch.attrs)), bound.inputs, bound.outputs,
            bound.workspace, tuple([x.type for x in (*bound.inputs, *bound.outputs)]),
        )  # fmt: skip
        seconds = launch_ns(driver, device, stream, kernel, launch.duration_ns) / 1e9
    except ActorflowError as error:
        found.check(f"{launch.op} {launch.scope} runs alone", False, error)
        return None
    has_ways = any([isinstance(call, AlternativeCalls) for call in bound.calls])
    return seconds, f", by {_about(kernel.calls)}" if has_ways else ""


def _about(calls: DeviceCalls) -> str:
    """Return what a person is told of a way: the libraries' calls, and how many kernels."""
    texts = []
    for call in calls:
        if isinstance(call, RunProduct):
            texts.append(f"a product {call.product.epilogue.name}")
        elif isinstance(call, RunCudnn):
            shapes = [list(tensor.shape) for tensor in call.record.tensors]
            texts.append(f"cuDNN on {' '.join(map(str, shapes))}")
    num_kernels = len([call for call in calls if isinstance(call, RunKernel)])
    return " and ".join([*dict.fromkeys(texts), f"{num_kernels} kernels"])


def _report(found: Findings, name: str, table) -> None:
    by_op: dict[str, float] = defaultdict(float)
    total = planned = products_s = attention_s = 0.0
    rates = []
    for spent, seconds, group, *_ in table:
        launch = group[0].launch
        by_op[launch.op] += spent
        total += spent
        planned += len(group) * launch.duration_ns / 1e9
        work = flops(group[0].calls)
        if launch.op.startswith("attention"):
            attention_s += spent
        elif work:
            products_s += spent
            rates.append((work / seconds / 1e12, launch))
    found.metric(f"{name}_product_ms", 1e3 * products_s)
    found.metric(f"{name}_attention_ms", 1e3 * attention_s)
    found.metric(f"{name}_all_ms", 1e3 * total)
    if planned:
        found.metric(f"{name}_of_plan", total / planned)
    if rates:
        found.metric(f"{name}_best_tflops", max(rate for rate, _ in rates))
        found.metric(f"{name}_worst_tflops", min(rate for rate, _ in rates))
    for op, spent in sorted(by_op.items(), key=lambda item: -item[1]):
        found.metric(f"{name}_{op}_ms", 1e3 * spent)
    for spent, seconds, group, number, way in table:
        launch = group[0].launch
        work = flops(group[0].calls)
        shapes = " ".join([str(list(v.shape)) for v in (*group[0].inputs, *group[0].outputs)])
        rate = f", {work / seconds / 1e12:.0f} TFLOP/s" if work else ""
        found.facts[f"{name} {number}: {len(group)} x {launch.op} {launch.scope} {shapes[:90]}"] = (
            f"{1e6 * seconds:.1f} us each, planned {launch.duration_ns / 1e3:.1f}{rate},"
            f" {1e3 * spent:.2f} ms together{way}"
        )
    found.write()


def _fill_integers(driver: CudaDriver, launches: list[BoundCalls]) -> None:
    """Let every integer be 0, and then those that choose rows of a table such rows."""
    for bound in launches:
        for view in bound.inputs:
            if view.dtype.is_integer and view.is_dense:
                zeros = np.zeros(view.type.size_bytes, np.uint8)
                driver.copy(view.address, zeros.ctypes.data, zeros.nbytes)
    rng = np.random.default_rng(0)
    for bound in launches:
        if not bound.launch.op.startswith("embedding"):
            continue
        ids = next(x for x in bound.inputs if x.dtype.is_integer)
        rows = min([x.shape[0] for x in (*bound.inputs, *bound.outputs) if len(x.shape) == 2])
        if ids.is_dense:
            chosen = rng.integers(0, rows, ids.type.num_elements).astype(numpy_dtype(ids.dtype))
            driver.copy(ids.address, chosen.ctypes.data, chosen.nbytes)
