"""The launches of GPT-2's step one by one on random numbers: products, attention, all by op.

What is timed is what a plan launches, on an arena of its size. Launches that are alike are timed
once, and counted.
"""

from __future__ import annotations

from collections import defaultdict
from types import MappingProxyType

import numpy as np
from rows.all_rows import find_row
from rows.gpt2 import gpt2_row

from actors.device.cuda.driver import CudaDriver
from actors.kernels.cuda.calls import (
    AlternativeCalls,
    LaunchCalls,
    RunKernel,
    RunProduct,
    every_call,
)
from compiler.contract.errors import ActorflowError
from gpu.jobs import TINY
from gpu.opened import device_seconds, open_device, open_driver
from gpu.planned import BoundCalls, bound_launches, device_bytes, plan_of
from gpu.section import Findings, Place

_BLOCK = 16 << 20
_TOLD = 16
"""Kinds of launches after which what was found is told."""


def run(found: Findings, place: Place) -> None:
    row = gpt2_row("tiny-gpt2", TINY) if place.is_emulated else find_row("gpt2-b64")
    plan = plan_of(row, "bf16")
    driver = open_driver(place)
    device = open_device(place, driver)
    stream = device.make_stream("products")
    size = device_bytes(plan)
    arena = driver.allocate(size)
    pinned = sum([a.size_bytes for a in plan.arenas]) - size
    launches = list(bound_launches(plan, arena, driver.allocate_pinned(max(pinned, 1))))
    _scatter(driver, arena, size)
    _zero_integers(driver, launches)
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
    found.metric("launches", len(launches))
    found.metric("kinds", len(alike))
    table = []
    # What the plan gives most of the time comes first: a section may be killed before its end.
    order = sorted(alike.values(), key=lambda g: -len(g) * g[0].launch.duration_ns)
    for number, group in enumerate(order):
        seconds = _seconds(found, driver, device, stream, group[0])
        if seconds is not None:
            table.append((seconds * len(group), seconds, group, number))
        if number % _TOLD == 0 or number == len(alike) - 1:
            _report(found, sorted(table, key=lambda entry: -entry[0]))


def _seconds(
    found: Findings, driver: CudaDriver, device, stream, bound: BoundCalls
) -> float | None:
    """Return what a launch takes on the device; one that fails is a failed check."""
    launch = bound.launch
    try:
        kernel = device.bind(
            launch.kernel, MappingProxyType(dict(launch.attrs)), bound.inputs, bound.outputs,
            bound.workspace,
        )  # fmt: skip
        (chain,) = device.bind_chain(stream, (kernel,))
        seconds = device_seconds(driver, chain, 0.005, 3)
        device.synchronize()
    except ActorflowError as error:
        found.check(f"{launch.op} {launch.scope} runs alone", False, error)
        return None
    return seconds


def _report(found: Findings, table) -> None:
    by_op: dict[str, float] = defaultdict(float)
    total = planned = products_s = attention_s = 0.0
    rates = []
    for spent, seconds, group, _ in table:
        launch = group[0].launch
        by_op[launch.op] += spent
        total += spent
        planned += len(group) * launch.duration_ns / 1e9
        flops = _flops(group[0].calls)
        if launch.op.startswith("attention"):
            attention_s += spent
        elif flops:
            products_s += spent
            rates.append((flops / seconds / 1e12, launch))
    found.metric("product_ms", 1e3 * products_s)
    found.metric("attention_ms", 1e3 * attention_s)
    found.metric("all_ms", 1e3 * total)
    if planned:
        found.metric("of_plan", total / planned)
    if rates:
        found.metric("best_tflops", max(rate for rate, _ in rates))
        found.metric("worst_tflops", min(rate for rate, _ in rates))
    for op, spent in sorted(by_op.items(), key=lambda item: -item[1]):
        found.metric(f"{op}_ms", 1e3 * spent)
    for spent, seconds, group, number in table:
        launch = group[0].launch
        flops = _flops(group[0].calls)
        shapes = " ".join([str(list(v.shape)) for v in (*group[0].inputs, *group[0].outputs)])
        rate = f", {flops / seconds / 1e12:.0f} TFLOP/s" if flops else ""
        found.facts[f"{number}: {len(group)} x {launch.op} {launch.scope} {shapes[:90]}"] = (
            f"{1e6 * seconds:.1f} us each, planned {launch.duration_ns / 1e3:.1f}{rate},"
            f" {1e3 * spent:.2f} ms together"
        )
    found.write()


def _flops(calls: LaunchCalls) -> float:
    """Return what products of a launch multiply and add; every way to do it has the same ones."""
    first = [
        call.alternatives[0] if isinstance(call, AlternativeCalls) else (call,) for call in calls
    ]
    products = [c.product for calls in first for c in calls if isinstance(c, RunProduct)]
    return sum([2.0 * p.batch * p.d.rows * p.d.columns * p.inner for p in products])


def _scatter(driver: CudaDriver, address: int, size: int) -> None:
    """Fill an arena with small numbers, as float32 and as bfloat16; zeros would be too easy."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 16, min(size, _BLOCK) // 2 + 1, np.uint16)
    signs, exponents = words & np.uint16(0x8000), np.uint16(0x3C00)
    block = signs | exponents | (words & np.uint16(0x01FF))
    for begin in range(0, size, _BLOCK):
        driver.copy(address + begin, block.ctypes.data, min(_BLOCK, size - begin))


def _zero_integers(driver: CudaDriver, launches: list[BoundCalls]) -> None:
    """Let every index be 0, which is one in any table."""
    views = {view for bound in launches for view in bound.inputs if view.dtype.is_integer}
    for view in views:
        if view.is_dense:
            zeros = np.zeros(view.type.size_bytes, np.uint8)
            driver.copy(view.address, zeros.ctypes.data, zeros.nbytes)
