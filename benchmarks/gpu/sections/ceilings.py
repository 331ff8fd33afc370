"""The best there is: a product, a copy; and what launches, events and graphs cost besides."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from actors.device.cuda.driver import CudaDriver
from actors.device.cuda.memory import argument_block
from actors.kernels.cuda.calls import KernelText, LtLayout, LtProduct
from compiler.contract.types import DType, to_bits
from gpu.opened import device_seconds, host_seconds, open_driver
from gpu.section import CEILINGS, Findings, Place

SIDE, COPY_BYTES = 8192, 2 << 30
NODES, MANY_NODES, PAIR_NODES, PAIRS = (1, 10, 100, 1000), 1500, 100, 50
_WORKSPACE = 32 << 20

_SMALL = KernelText.of(
    "small",
    "typedef struct { af_word w[1]; } NAME_arguments;\n"
    "AF_KERNEL NAME(AF_ARGUMENTS(NAME) arguments) {\n"
    "    if (AF_THREAD == 0) *(int32_t *)arguments.w[0].p += 1;\n"
    "}\n",
    ("NAME",),
    "one is added",
    has_exchanges=False,
)


@dataclass(frozen=True, slots=True)
class Product:
    """A square product in bfloat16 on random numbers, and how to put it on a stream."""

    driver: CudaDriver
    side: int
    places: tuple[int, int, int, int]
    choice: int

    @staticmethod
    def made(driver: CudaDriver, side: int) -> Product:
        size = 2 * side * side
        places = tuple([driver.allocate(n) for n in (size, size, size, _WORKSPACE)])
        rng = np.random.default_rng(0)
        for place in places[:2]:
            numbers = to_bits(rng.standard_normal((side, side), np.float32))
            driver.copy(place, numbers.ctypes.data, size)
        layout = LtLayout(DType.BFLOAT16, side, side, side, alignment=256)
        product = LtProduct(layout, layout, layout, transpose_a=False, transpose_b=False)
        choice = driver.make_product(product, _WORKSPACE)
        return Product(driver, side, places, choice)

    def put(self, stream: int) -> None:
        a, b, d, workspace = self.places
        self.driver.product_later(self.choice, a, b, d, d, workspace, stream)

    def free(self) -> None:
        for place in self.places:
            self.driver.free(place)


def run(found: Findings, place: Place) -> None:
    driver = open_driver(place)
    stream = driver.make_stream("ceilings")
    side, size = (64, 1 << 16) if place.is_emulated else (SIDE, COPY_BYTES)
    best: dict[str, float] = {}
    with found.part("a product"):
        product = Product.made(driver, side)
        for again in ("", "_again"):
            seconds = device_seconds(driver, partial(product.put, stream), 0.1)
            found.metric(f"product_tflops{again}", 2 * side**3 / seconds / 1e12)
            best["product"] = max(best.get("product", 0.0), 2 * side**3 / seconds)
        product.free()
    with found.part("a copy"):
        source, target = driver.allocate(size), driver.allocate(size)
        driver.fill_later(source, 0x3C, size, stream)
        for again in ("", "_again"):
            copy = partial(driver.copy_later, target, source, size, stream)
            seconds = device_seconds(driver, copy, 0.05)
            found.metric(f"copy_tb_s{again}", 2 * size / seconds / 1e12)
            best["copy"] = max(best.get("copy", 0.0), 2 * size / seconds)
        place.tell(CEILINGS, best)
        driver.free(source)
        driver.free(target)
    with found.part("launches and graphs"):
        _launches(found, driver, stream, is_tiny=place.is_emulated)


def small_launch(driver: CudaDriver, stream: int) -> partial[None]:
    """Return what puts a kernel that adds one on a stream."""
    driver.load([_SMALL])
    cell = driver.allocate(256)
    driver.fill_later(cell, 0, 256, stream)
    _blocks.append(argument_block((cell,)))
    function, block = driver.function(_SMALL, _SMALL.kernels[0]), ctypes.addressof(_blocks[-1])
    return partial(driver.launch_later, function, 1, 32, 0, block, 1, stream)


_blocks: list[object] = []
"""Arguments of launches live as long as the process."""


def _launches(found: Findings, driver: CudaDriver, stream: int, *, is_tiny: bool) -> None:
    enqueue = small_launch(driver, stream)
    event, other = driver.make_event(), driver.make_stream("other")
    found.metric("launch_us", 1e6 * host_seconds(driver, enqueue))
    found.metric("launch_device_us", 1e6 * device_seconds(driver, enqueue))
    found.metric("record_us", 1e6 * host_seconds(driver, partial(driver.record, event, stream)))
    found.metric("wait_us", 1e6 * host_seconds(driver, partial(driver.wait, other, event)))
    found.metric("is_done_us", 1e6 * host_seconds(driver, partial(driver.is_done, event)))
    for count in NODES[:2] if is_tiny else NODES:
        graph = graph_of(driver, stream, enqueue, count)
        launch = partial(driver.graph_later, graph, stream)
        found.metric(f"graph_{count}_launch_us", 1e6 * host_seconds(driver, launch, 20))
        found.metric(f"graph_{count}_us", 1e6 * device_seconds(driver, launch))
        found.metric("graph_node_us", 1e6 * device_seconds(driver, launch) / count)
    began, free_bytes = time.perf_counter(), driver.free_bytes()
    many = graph_of(driver, stream, enqueue, 20 if is_tiny else MANY_NODES)
    found.metric("graph_1500_make_ms", 1e3 * (time.perf_counter() - began))
    driver.graph_later(many, stream)
    driver.synchronize()
    found.metric("graph_1500_mib", (free_bytes - driver.free_bytes()) / (1 << 20))
    gap_s = event_gap_s(driver, stream, other, enqueue, is_tiny=is_tiny)
    found.metric("event_gap_us", 1e6 * gap_s)


def graph_of(driver: CudaDriver, stream: int, put: Callable[[], object], count: int) -> int:
    """Return a graph of a call so many times."""
    driver.begin_capture(stream)
    for _ in range(count):
        put()
    return driver.end_capture(stream)


def event_gap_s(
    driver: CudaDriver, stream: int, other: int, put: Callable[[], object], *, is_tiny: bool
) -> float:
    """Return what an event costs between graphs on two streams, long enough for the host."""
    graph = graph_of(driver, stream, put, 2 if is_tiny else PAIR_NODES)
    here, there = driver.make_event(), driver.make_event()

    def alone() -> None:
        for _ in range(2 * PAIRS):
            driver.graph_later(graph, stream)

    def in_turns() -> None:
        for _ in range(PAIRS):
            driver.graph_later(graph, stream)
            driver.record(here, stream)
            driver.wait(other, here)
            driver.graph_later(graph, other)
            driver.record(there, other)
            driver.wait(stream, there)

    extra = device_seconds(driver, in_turns, 0.1) - device_seconds(driver, alone, 0.1)
    return max(0.0, extra / (2 * PAIRS))
