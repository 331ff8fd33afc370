"""Memory of a CUDA device and pinned memory of the host: blocks that go with their object.

Whatever uses a driver has the `KeptDriver`: streams, launches, blocks. When the last of them is
gone the driver is closed, and all that it made goes with it.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np

from actors.device import host_memory
from actors.device.cuda.driver import CudaDriver, CudaError
from actors.kernels.cuda.views import DeviceView
from actors.protocol import Array
from compiler.errors import DeviceError
from compiler.types import TensorType, numpy_dtype


class KeptDriver:
    """A driver that stays open as long as anybody has this.

    Only the process that opened it may use it: CUDA does not survive a fork.
    """

    __slots__ = ("__weakref__", "_pid", "driver")

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self._pid = os.getpid()
        _when_dropped(self, driver.close)

    def check_process(self) -> None:
        """Raise DeviceError in a child that was forked from the process of the driver."""
        if os.getpid() != self._pid:
            raise DeviceError(
                f"a CUDA device is open in process {self._pid}, from which this one,"
                f" {os.getpid()}, was forked: CUDA does not survive that. Start the process with"
                " multiprocessing's 'spawn'"
            )

    def free(self, address: int) -> None:
        """Give device memory back; with this, the driver is open until then."""
        self.driver.free(address)

    def free_pinned(self, address: int) -> None:
        """Give pinned memory back."""
        self.driver.free_pinned(address)


_captures = threading.local()
"""What a thread that captures frees afterwards. Of all devices alike: CUDA knows but one capture of
a thread, and the collector may find a block of any device at any moment, on that very thread."""


@contextmanager
def capturing() -> Iterator[None]:
    """Keep this thread from freeing memory meanwhile, which a capture does not survive.

    The collector rests, too: what it finds may be a graph of cuDNN, which lies in cycles and gives
    back what it has of the device at once, unseen by us.
    """
    late: list[Callable[[], object]] = []
    _captures.late = late
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _captures.late = None
        if is_collecting:
            gc.enable()
        for give in late:
            give()


def _when_dropped(thing: object, call: Callable[..., object], *args: int) -> None:
    """Make a call when something is dropped, unless that is in a child or at the process's end.

    At the end threads may still be in a call: the system takes it all.
    """
    weakref.finalize(thing, _give_back, os.getpid(), call, *args).atexit = False


def _give_back(pid: int, call: Callable[..., object], *args: int) -> None:
    late = getattr(_captures, "late", None)
    if late is not None:
        late.append(partial(_give_back, pid, call, *args))
    elif os.getpid() == pid:
        with suppress(CudaError):  # the memory of a device that has failed is gone already
            call(*args)


class DeviceBlock:
    """A block of a device's memory, which goes with this object."""

    __slots__ = ("__weakref__", "_kept", "address", "size_bytes")

    def __init__(self, kept: KeptDriver, size_bytes: int) -> None:
        self._kept = kept
        self.size_bytes = size_bytes
        self.address = kept.driver.allocate(max(1, size_bytes))
        _when_dropped(self, kept.free, self.address)


class _PinnedMemory:
    """Bytes of the host that host and device see at one address; numpy keeps this for its base."""

    def __init__(self, kept: KeptDriver, size_bytes: int) -> None:
        address = kept.driver.allocate_pinned(max(1, size_bytes))
        _when_dropped(self, kept.free_pinned, address)
        self.__array_interface__: dict[str, Any] = {
            "shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def pinned_bytes(kept: KeptDriver, size_bytes: int) -> Array:
    """Return new pinned memory as bytes; it goes with the last array on it."""
    return np.asarray(_PinnedMemory(kept, size_bytes))


def view_on(
    block: DeviceBlock | Array,
    offset_bytes: int,
    type_: TensorType,
    strides_bytes: tuple[int, ...],
) -> DeviceView | Array:
    """Return a window on a block: see `DeviceStore.view`."""
    if not isinstance(block, DeviceBlock):
        return host_memory.view_on(block, offset_bytes, type_, strides_bytes)
    first, size = extent_of(DeviceView(offset_bytes, type_, strides_bytes))
    if size and not 0 <= first <= first + size <= block.size_bytes:
        raise ValueError(
            f"bytes {first} to {first + size} are not within the {block.size_bytes} of the block"
        )
    return DeviceView(block.address + offset_bytes, type_, strides_bytes)


def read(driver: CudaDriver, view: DeviceView) -> Array:
    """Return a copy of a window, whatever its strides are."""
    held, window = _on_host(view)
    first, size = extent_of(view)
    if size:
        driver.copy(held.ctypes.data, first, size)
    return window if view.is_dense else np.array(window)


def write(driver: CudaDriver, view: DeviceView, array: Array) -> None:
    """Fill a window, whatever its strides are; bytes between its elements stay."""
    held, window = _on_host(view)
    first, size = extent_of(view)
    if not size:
        return
    if not view.is_dense:
        driver.copy(held.ctypes.data, first, size)
    np.copyto(window, array)
    driver.copy(first, held.ctypes.data, size)


def _on_host(view: DeviceView) -> tuple[Array, Array]:
    """Return bytes for all that a window spans, and the window on them."""
    first, size = extent_of(view)
    held = np.empty(size, np.uint8)
    offset = view.address - first
    return held, np.ndarray(view.shape, numpy_dtype(view.dtype), held, offset, view.strides_bytes)


def extent_of(view: DeviceView) -> tuple[int, int]:
    """Return where the bytes of a window begin, and how many they span."""
    if 0 in view.shape:
        return view.address, 0
    reach = [
        (extent - 1) * stride for extent, stride in zip(view.shape, view.strides_bytes, strict=True)
    ]
    first = view.address + sum([r for r in reach if r < 0])
    last = view.address + sum([r for r in reach if r > 0])
    return first, last - first + view.dtype.itemsize
