"""Memory of a CUDA device: its blocks, pinned memory of the host, and cells that kernels report in.

Blocks go with their object. Whatever uses a driver has the `KeptDriver`: streams, launches, blocks.
When the last of them is gone the driver is closed, and all that it made goes with it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import numpy as np

from actors.device.cuda.driver import CudaDriver, CudaError, DriverMemory
from actors.kernels.common import host_memory
from actors.kernels.cuda.calls import Explain, KernelText, RunKernel, StatusWord, Word
from actors.kernels.cuda.kernel import DeviceView
from actors.machine.protocol import Array, DeviceFault, DeviceStream
from compiler.contract.errors import DeviceError
from compiler.contract.types import TensorType, numpy_dtype


class KeptDriver:
    """A driver that stays open as long as anybody has this.

    Only the process that opened it may use it: CUDA does not survive a fork.
    """

    __slots__ = ("__weakref__", "_pid", "driver")

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        # A child inherits handles whose context stayed with its parent.
        self._pid = os.getpid()
        _when_dropped(self, driver.close)

    def check_process(self) -> None:
        """Raise DeviceError in a child that was forked from the process of the driver."""
        if os.getpid() != self._pid:
            raise DeviceError(
                f"a CUDA device is open in process {self._pid}, from which this one,"
                f" {os.getpid()}, was forked, and CUDA does not support fork. Start the process"
                " with multiprocessing's 'spawn'"
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
        # First: what is given back below must not be put on the list again.
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
    # This thread captures: cudaFree would invalidate the capture.
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
        # CUDA returns no address for 0 bytes, and an empty arena still needs one.
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


def read(driver: DriverMemory, view: DeviceView) -> Array:
    """Return a copy of a window, whatever its strides are."""
    buffer, window = _on_host(view)
    first, size = extent_of(view)
    if size:
        driver.copy(buffer.ctypes.data, first, size)
    return window if view.is_dense else np.array(window)


def write(driver: DriverMemory, view: DeviceView, array: Array) -> None:
    """Fill a window, whatever its strides are; bytes between its elements stay."""
    buffer, window = _on_host(view)
    first, size = extent_of(view)
    if not size:
        return
    # The bytes between its elements are read first, so that they go back as they were.
    if not view.is_dense:
        driver.copy(buffer.ctypes.data, first, size)
    np.copyto(window, array)
    driver.copy(first, buffer.ctypes.data, size)


def _on_host(view: DeviceView) -> tuple[Array, Array]:
    """Return bytes for all that a window spans, and the window on them."""
    first, size = extent_of(view)
    block = np.empty(size, np.uint8)
    offset = view.address - first
    return block, np.ndarray(view.shape, numpy_dtype(view.dtype), block, offset, view.strides_bytes)


def extent_of(view: DeviceView) -> tuple[int, int]:
    """Return where the bytes of a window begin, and how many they span."""
    if 0 in view.shape:
        return view.address, 0
    reach = [
        (extent - 1) * stride for extent, stride in zip(view.shape, view.strides_bytes, strict=True)
    ]
    # Strides may be negative: the lowest byte is then before the first element.
    first = view.address + sum([r for r in reach if r < 0])
    last = view.address + sum([r for r in reach if r > 0])
    return first, last - first + view.dtype.itemsize


# How kernels report bad indices: a kernel that meets an index out of range uses another one, goes
# on, and leaves place and value in the cell of its launch (`af_report` in device.cuh has the
# layout). Cells lie in pinned memory and are read when the host has waited anyway. One word says
# whether any cell has something, so that an ordinary wait looks at one number. A cell also keeps
# the *firing* of its stream in which that was: a kernel of one thread counts those before a chain
# that has cells, and the stream remembers how many launches it had been given before each.
#
# **Who is told.** A wait tells only of launches that it waited for: what steps before the bad one
# have computed comes out, however fast the device is. Streams and events know how many launches of
# every stream come before them (vector clocks: Fidge 1988), once there is any cell.

_PAGE_WORDS = 512
_CELL_WORDS = 7
_COUNTS_OF_A_BLOCK = 32

ArgumentBlock = ctypes.Array[ctypes.c_uint64]

COUNT = KernelText.of(
    "af_count",
    """
typedef struct { af_word w[1]; } NAME_arguments;
AF_KERNEL NAME(AF_ARGUMENTS(NAME) arguments) {
    volatile int64_t *count = (volatile int64_t *)arguments.w[0].p;
    if (AF_THREAD == 0) *count = *count + 1;
}
""",
    ("NAME",),
    "counts the firings of a stream whose launches may report",
    has_exchanges=False,
)


def argument_block(words: Sequence[Word]) -> ArgumentBlock:
    """Return words as a kernel gets them: integers and addresses, and doubles by their bits."""
    block = (ctypes.c_uint64 * len(words))()
    for number, word in enumerate(words):
        if isinstance(word, float):
            (block[number],) = struct.unpack("<Q", struct.pack("<d", word))
        else:
            block[number] = word  # modulo 2**64: two's complement
    return block


def counting(address: int) -> tuple[RunKernel, ArgumentBlock]:
    """Return the call that counts one firing at an address, with its argument block."""
    call = RunKernel(COUNT, COUNT.kernels[0], 1, 32, (address,))
    return call, argument_block(call.words)


Known = Mapping[int, int]
"""By number of a stream how many of its launches come before something."""


class CountedStream(DeviceStream, Protocol):
    """A stream that counts the firings whose launches may report; its number is of the run."""

    @property
    def number(self) -> int:
        """Which stream of the run this is."""

    @property
    def count_address(self) -> int:
        """Where the number of the firing stands that runs there."""

    def first_launch(self, firing: int) -> int | None:
        """Return how many launches the stream was given before a firing; None if long ago."""


class StatusCell:
    """The cell of a launch, at `address`: `index` says which of its chain on `stream` that is."""

    __slots__ = ("_explain", "_words", "address", "index", "stream")

    def __init__(self, words: Array, explain: Explain) -> None:
        self.address = int(words.ctypes.data)
        self.stream: CountedStream | None = None
        self.index = 0
        self._words = words
        self._explain = explain

    def put_on(self, stream: CountedStream, index: int) -> None:
        """Say in which chain's place of a stream the launch runs, whose firings are counted."""
        self.stream = stream
        self.index = index
        # Until then it points to `_nowhere`, which no firing counts.
        self._words[4] = stream.count_address

    @property
    def has_something(self) -> bool:
        """Whether an index was bad."""
        return bool(self._words[1])

    @property
    def launch(self) -> int | None:
        """The number on the stream of the launch whose index was bad; None where it is unknown."""
        first = None if self.stream is None else self.stream.first_launch(int(self._words[1]) - 1)
        return None if first is None else first + self.index

    def is_within(self, known: Known) -> bool:
        """Whether the launch whose index was bad comes before what `known` is of."""
        launch = self.launch
        return self.stream is None or launch is None or launch < known.get(self.stream.number, 0)

    def error(self) -> Exception:
        """Return what the host would have raised."""
        return self._explain(int(self._words[2]), int(self._words[3]))


class StatusReports:
    """What kernels of all devices of a run have reported: one may compute what another brings out.

    `has_cells`: whether any kernel may report. `given_up`: why no result counts any more, if so.
    """

    __slots__ = ("_memories", "_num_streams", "given_up", "has_cells")

    def __init__(self) -> None:
        self._memories: list[StatusMemory] = []
        self._num_streams = 0
        self.has_cells = False
        self.given_up: Exception | None = None

    def give_up(self, error: Exception) -> None:
        """Have every wait raise a fault with this cause from now on; the first one stays."""
        if self.given_up is None:
            self.given_up = error

    def join(self, memory: StatusMemory) -> None:
        """Take a device's cells in."""
        self._memories.append(memory)

    def add_stream(self) -> int:
        """Return the number of a new stream."""
        self._num_streams += 1
        return self._num_streams - 1

    @property
    def has_something(self) -> bool:
        """Whether any kernel has reported anything; any thread may ask."""
        # By a loop: every wait for an event asks this, and there is mostly one device.
        for memory in self._memories:  # noqa: SIM110
            if memory.said.value:
                return True
        return False

    def raised_cells(self) -> list[StatusCell]:
        """Return the cells that have something."""
        return [c for memory in self._memories for c in memory.cells if c.has_something]

    def fault(self) -> DeviceFault:
        """Return the earliest bad index as a fault, when nothing works on the devices."""
        cell = min(self.raised_cells(), key=_order)
        error = cell.error()
        text = f"{type(error).__name__}: {error}"
        fault = DeviceFault(text, stream=cell.stream, launch=cell.launch)
        fault.__cause__ = error
        return fault


class StatusMemory:
    """The cells of a device and its counts of firings. The memory goes with this object.

    `said` is not 0 once a kernel has reported anything; any thread may look at it. Pages are taken
    as they are needed, the first one at once.
    """

    __slots__ = (
        "_any", "_counts", "_free", "_kept", "_nowhere", "_num_counts", "_reports", "cells", "said",
    )  # fmt: skip

    def __init__(self, kept: KeptDriver, reports: StatusReports) -> None:
        self._kept = kept
        self._reports = reports
        self._counts: list[DeviceBlock] = []
        self._num_counts = 0
        self.cells: list[StatusCell] = []
        self._free = self._page()
        self._any = self._take(1)
        self.said = ctypes.c_int64.from_address(int(self._any.ctypes.data))
        self._nowhere = self._take(1)
        reports.join(self)

    @property
    def texts(self) -> tuple[KernelText, ...]:
        """What has to be loaded where there are cells."""
        return (COUNT,) if self.cells else ()

    def add_cell(self, status: StatusWord) -> StatusCell:
        """Return a new cell, which has nothing; its firings are not counted yet."""
        guards = [word for guard in status.guards for word in guard]
        words = self._take(_CELL_WORDS + len(guards))
        # Layout of af_report in device.cuh: [4] count of firings, [5] the word for all cells, [6]
        # guards.
        words[4:7] = self._nowhere.ctypes.data, self._any.ctypes.data, len(status.guards)
        words[7:] = guards
        cell = StatusCell(words, status.explain)
        self.cells.append(cell)
        self._reports.has_cells = True
        return cell

    def add_count(self) -> int:
        """Return the address of a new count, which is -1: its first firing is 0.

        It is the device's own, where counting takes no way over the link.
        """
        place = self._num_counts % _COUNTS_OF_A_BLOCK
        if place == 0:
            self._counts.append(DeviceBlock(self._kept, 8 * _COUNTS_OF_A_BLOCK))
        self._num_counts += 1
        address = self._counts[-1].address + 8 * place
        # -1, because the kernel counts before the chain's launches run.
        before = ctypes.c_int64(-1)
        self._kept.driver.copy(address, ctypes.addressof(before), 8)
        return address

    def _take(self, num_words: int) -> Array:
        if len(self._free) < num_words:
            self._free = self._page()
        words, self._free = self._free[:num_words], self._free[num_words:]
        return words

    def _page(self) -> Array:
        # Pages stay alive by the views that cells keep on them.
        page = pinned_bytes(self._kept, 8 * _PAGE_WORDS).view("int64")
        page.fill(0)
        return page


def _order(cell: StatusCell) -> float:
    launch = cell.launch
    # An unknown place sorts last: a report that names its launch is told first.
    return float("inf") if launch is None else launch
