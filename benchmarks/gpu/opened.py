"""A GPU, or what acts as one, opened for a section; and clocks for what it does.

Times are the host's, around many calls between two waits: what is timed takes long beside a wait,
and no clock of the device is needed.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from random import Random
from statistics import median
from types import MappingProxyType

from actorflow.environment.host import EMULATED, gpu_for
from actorflow.environment.native import toolchain_of
from actorflow.environment.settings import Settings
from actors.device.cuda.device import CudaDevice
from actors.device.cuda.driver import CudaDriver
from actors.kernels.cuda import catalogue
from actors.kernels.cuda.kernel import CudaKernel, gpu_named
from actors.testing.emulated.driver import EmulatedCuda, EmulatedDriver
from actors.testing.simulated import LateSchedule
from compiler.contract.errors import CompileError
from compiler.contract.placement import Device, DeviceKind
from gpu.section import Place, Skipped


def planned_gpu() -> str:
    """Return the name of the GPU that is here, as jobs find it.

    Without one, or with one that has no description, it is what the emulation acts as.
    """
    try:
        return gpu_for((Device(DeviceKind.CUDA),), None, Settings.from_env(os.environ))
    except CompileError:
        return EMULATED


GPU = planned_gpu()
"""What everything is planned for."""

_DISPATCHER = "actorflow-dispatch"
_TURNS = 5
_NO_MORE: Mapping[str, CudaKernel] = MappingProxyType({})
COUNTED = (
    "allocate", "free", "allocate_pinned", "free_pinned", "load", "make_product", "make_event",
    "make_stream", "copy", "synchronize", "synchronize_event", "graph_later", "launch_later",
    "product_later", "make_cudnn", "cudnn_later", "copy_later", "fill_later", "record",
    "wait",
)  # fmt: skip


def open_driver(place: Place) -> CudaDriver:
    """Return the driver of the GPU, or of the emulation.

    Raises Skipped where that has no compiler. A GPU that is here and cannot be opened is an error
    of the section: DeviceError says what is missing.
    """
    if not place.is_emulated:
        return driver_class(place)(0, kept_folder())
    toolchain = toolchain_of(Settings.from_env(os.environ))
    if toolchain is None:
        raise Skipped("the emulation needs a C compiler")
    return EmulatedDriver(EmulatedCuda(LateSchedule(Random(0))), toolchain, gpu_named(GPU))


def kept_folder() -> Path | None:
    """Return where kernels and choices are kept: where jobs look for them too."""
    cache = Settings.from_env(os.environ).cache
    return None if cache is None else cache / "cuda"


def driver_class(place: Place) -> type:
    """Return what drivers are made of, here or on the host."""
    if place.is_emulated:
        return EmulatedDriver
    from actors.device.cuda.cupy_driver import CupyDriver

    return CupyDriver


def open_device(
    place: Place, driver: CudaDriver | None = None, more: Mapping[str, CudaKernel] = _NO_MORE
) -> CudaDevice:
    """Return the device on a driver, with every kernel that there is, and more."""
    return CudaDevice(driver or open_driver(place), {**catalogue.kernels_by_name(GPU), **more})


@contextmanager
def counted_calls(place: Place) -> Iterator[Counter[str]]:
    """Count the calls of every driver that is used in here: all by name, and the dispatcher's.

    Those of the thread that fires actors are counted again under "dispatcher: NAME".
    """
    counts: Counter[str] = Counter()
    kind = driver_class(place)
    originals = {name: getattr(kind, name) for name in COUNTED}

    def counting(name: str, call: Callable[..., object]) -> Callable[..., object]:
        @wraps(call)
        def counted(*given: object, **named: object) -> object:
            counts[name] += 1
            if threading.current_thread().name == _DISPATCHER:
                counts[f"dispatcher: {name}"] += 1
            return call(*given, **named)

        return counted

    for name, call in originals.items():
        setattr(kind, name, counting(name, call))
    try:
        yield counts
    finally:
        for name, call in originals.items():
            setattr(kind, name, call)


def device_seconds(
    driver: CudaDriver, run: Callable[[], object], least_s: float = 0.02, turns: int = _TURNS
) -> float:
    """Return what `run` takes on the device, put there many times: the median of some turns."""
    run()
    driver.synchronize()

    def turn(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            run()
        driver.synchronize()
        return (time.perf_counter() - began) / count

    count = (
        2
        if isinstance(driver, EmulatedDriver)
        else max(2, min(1000, int(least_s / max(turn(2), 1e-6))))
    )
    return median([turn(count) for _ in range(turns)])


def host_seconds(driver: CudaDriver, run: Callable[[], object], count: int = 300) -> float:
    """Return what the host takes for one call that returns at once: the best of some turns."""
    times, count = [], 2 if isinstance(driver, EmulatedDriver) else count
    for _ in range(_TURNS):
        driver.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            run()
        times.append((time.perf_counter() - began) / count)
    driver.synchronize()
    return min(times)
