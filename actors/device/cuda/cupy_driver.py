"""CUDA on a GPU, by the low-level modules of cupy: calls on integers, no arrays and no math.

The only module that imports cupy, and only when a driver is made. cupy gives the codes of CUDA as
exceptions, but for `eventQuery`, which returns them. Streams do not block one another or the
default stream; a capture is of this thread alone, so that what other threads ask for goes on, and
an allocation is refused rather than baked into the graph.

Source: CUDA Runtime API and Driver API, versions 13; CuPy 14 (cupy_backends.cuda.api).
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from actors.device.cuda.choices import ProductChoices
from actors.device.cuda.cublaslt import CublasLt, LtChoice, find_cublaslt
from actors.device.cuda.driver import OLDEST_CUDA, CudaError, GpuSeen
from actors.device.cuda.faults import is_out_of_memory
from actors.kernels.cuda.calls import KernelText
from actors.kernels.cuda.nvrtc import cubins
from actors.kernels.cuda.product import LtProduct
from compiler.errors import DeviceError

_ANY_KIND = 4
"""cudaMemcpyDefault: addresses say where they are."""

_NON_BLOCKING, _THREAD_LOCAL = 1, 1
_BLOCKING_WITHOUT_TIMES = 1 | 2
_PORTABLE_AND_MAPPED = 1 | 2
_NOT_READY, _NOT_INITIALIZED = 600, 3
_SHARED_LIMIT, _MAX_SHARED_ATTRIBUTE, _NUM_REGISTERS = 48 << 10, 8, 4
_SCRATCH_BYTE = 0x3C
"""What products are tried on: small numbers in every type. Zeros would cost less than any data."""

_INSTALL = "python -m pip install 'actorflow[cuda]'"

_current = threading.local()
"""The device of each thread, as CUDA itself keeps it: not a call of CUDA's for every call."""


class CupyDriver:
    """A GPU of this machine; see `CudaDriver`.

    Args:
        index: Which of those that CUDA shows to this process.
        folder: Keeps kernels that were built and products that were timed; None for none.
    """

    def __init__(self, index: int, folder: Path | None = None) -> None:
        """Open it. Raises DeviceError, which says what is missing."""
        self._cuda, self._runtime = _modules()
        self._errors = (self._cuda.CUDADriverError, self._runtime.CUDARuntimeError)
        self._index = index
        self._folder = folder
        self._streams: list[int] = []
        self._events: list[int] = []
        self._graphs: list[int] = []
        self._modules: dict[str, int] = {}
        self._functions: dict[tuple[str, str], int] = {}
        self._parameters: dict[int, ctypes.Array[ctypes.c_void_p]] = {}
        self._with_shared: set[int] = set()
        self._library: CublasLt | None = None
        self._kept: ProductChoices | None = None
        self._warm: set[bytes] = set()
        self._choices: list[LtChoice] = []
        self._check()
        self._seen = self._properties()

    def _check(self) -> None:
        runtime, device = self._runtime, f"cuda:{self._index}"
        version = runtime.driverGetVersion()
        if version == 0:
            raise DeviceError(f"{device} needs an NVIDIA driver, and none is here")
        if (version // 1000, version % 1000 // 10) < OLDEST_CUDA:
            raise DeviceError(
                f"{device} needs CUDA 13.0, and the NVIDIA driver here serves CUDA"
                f" {_dotted(version)} at most: install a driver of version 580 or later"
            )
        try:
            count = runtime.getDeviceCount()
            if self._index >= count:
                raise DeviceError(f"there is no {device} here, but {count} GPUs, counted from 0")
            self._here()
        except self._errors as error:
            if error.status == _NOT_INITIALIZED:
                raise DeviceError(
                    f"{device} cannot be opened in process {os.getpid()}: it was forked from one"
                    " that uses CUDA, which does not survive that. Start the process with"
                    " multiprocessing's 'spawn'"
                ) from error
            raise DeviceError(f"{device} cannot be opened: {error}") from error

    def _properties(self) -> GpuSeen:
        said = self._ask("getDeviceProperties", self._index)
        return GpuSeen(
            said["name"].decode(),
            (said["major"], said["minor"]),
            said["multiProcessorCount"],
            said["totalGlobalMem"],
            self._runtime.driverGetVersion(),
        )

    def _here(self) -> None:
        """Make this GPU the one that the calls of this thread are for."""
        if getattr(_current, "index", None) != self._index:
            self._runtime.setDevice(self._index)
            _current.index = self._index

    def _enter(self) -> None:
        """Do so whatever is known: other code may have set another device on this thread."""
        with self._told("setDevice"):
            self._runtime.setDevice(self._index)
        _current.index = self._index

    def _ask(self, name: str, *given: Any) -> Any:
        """Make a call of the runtime. Raises CudaError."""
        self._enter()
        with self._told(name):
            return getattr(self._runtime, name)(*given)

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise self._as_ours(name, error) from error

    def _as_ours(self, name: str, error: Any) -> CudaError:
        return CudaError(str(error), code=error.status, call=name)

    def seen(self) -> GpuSeen:
        """Return what the GPU is."""
        return self._seen

    def free_bytes(self) -> int:
        """Return the bytes of device memory that can be had."""
        return int(self._ask("memGetInfo")[0])

    # -- memory ----------------------------------------------------------------------------------

    def allocate(self, size_bytes: int) -> int:
        """Return the address of new device memory."""
        return int(self._ask("malloc", size_bytes))

    def free(self, address: int) -> None:
        """Give device memory back."""
        self._ask("free", address)

    def allocate_pinned(self, size_bytes: int) -> int:
        """Return the address of new host memory, for host and device alike."""
        return int(self._ask("hostAlloc", size_bytes, _PORTABLE_AND_MAPPED))

    def free_pinned(self, address: int) -> None:
        """Give pinned memory back."""
        self._ask("freeHost", address)

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Copy bytes between any two places, and wait until that is done."""
        self._ask("memcpy", target, source, size_bytes, _ANY_KIND)
        # Pageable memory is only staged when the copy returns, and no stream of ours waits for it.
        self._ask("streamSynchronize", 0)

    def copy_later(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Copy bytes between device and pinned memory, or within either."""
        self._ask("memcpyAsync", target, source, size_bytes, _ANY_KIND, stream)

    def fill_later(self, target: int, value: int, size_bytes: int, stream: int) -> None:
        """Set every byte of a range of device memory."""
        self._ask("memsetAsync", target, value, size_bytes, stream)

    # -- streams and events ----------------------------------------------------------------------

    def make_stream(self, name: str) -> int:
        """Return a new stream."""
        self._streams.append(self._ask("streamCreateWithFlags", _NON_BLOCKING))
        return self._streams[-1]

    def make_event(self) -> int:
        """Return a new event, which takes no times and on which a thread can sleep."""
        self._events.append(self._ask("eventCreateWithFlags", _BLOCKING_WITHOUT_TIMES))
        return self._events[-1]

    def record(self, event: int, stream: int) -> None:
        """Mark this place of a stream."""
        self._here()
        try:
            self._runtime.eventRecord(event, stream)
        except self._errors as error:
            raise self._as_ours("eventRecord", error) from error

    def wait(self, stream: int, event: int) -> None:
        """Hold a stream until the latest record of an event is done."""
        self._here()
        try:
            self._runtime.streamWaitEvent(stream, event)
        except self._errors as error:
            raise self._as_ours("streamWaitEvent", error) from error

    def is_done(self, event: int) -> bool:
        """Whether the latest record of an event is done; never blocks."""
        code = self._ask("eventQuery", event)
        if code not in (0, _NOT_READY):
            raise CudaError("the work before an event failed", code=code, call="eventQuery")
        return bool(code == 0)

    def synchronize_event(self, event: int) -> None:
        """Block this thread until the latest record of an event is done; other threads go on."""
        self._here()
        with self._told("eventSynchronize"):
            self._runtime.eventSynchronize(event)

    def synchronize(self) -> None:
        """Block this thread until all streams of this driver are empty."""
        for stream in self._streams:
            self._ask("streamSynchronize", stream)

    # -- kernels ---------------------------------------------------------------------------------

    def load(self, texts: Sequence[KernelText]) -> None:
        """Build and load the kernels of some texts that are not there yet, several at once."""
        missing = [text for text in texts if text.text not in self._modules]
        if not missing:
            return
        images = cubins(missing, self._arch, self._folder, os.cpu_count() or 1)
        for text, image in zip(missing, images, strict=True):
            self._enter()
            with self._told("moduleLoadData"):
                self._modules[text.text] = self._cuda.moduleLoadData(image)

    @property
    def _arch(self) -> str:
        major, minor = self._seen.capability
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")

    def function(self, text: KernelText, name: str) -> int:
        """Return a kernel of a text that was loaded."""
        key = text.text, name
        if key not in self._functions:
            self._enter()
            with self._told("moduleGetFunction"):
                found = self._cuda.moduleGetFunction(self._modules[text.text], name)
                # Asking for something loads it: a capture is no time for that.
                self._cuda.funcGetAttribute(_NUM_REGISTERS, found)
            self._functions[key] = found
        return self._functions[key]

    def launch_later(
        self,
        function: int,
        num_blocks: int,
        num_threads: int,
        shared_bytes: int,
        words: int,
        num_words: int,
        stream: int,
    ) -> None:
        """Run a kernel on an argument block at a host address, which is read at once."""
        self._here()
        if words not in self._parameters:
            # The one parameter is the whole block, by value: CUDA knows its size from the kernel.
            self._parameters[words] = (ctypes.c_void_p * 1)(words)
        with self._told("launchKernel"):
            if shared_bytes > _SHARED_LIMIT and function not in self._with_shared:
                self._cuda.funcSetAttribute(function, _MAX_SHARED_ATTRIBUTE, shared_bytes)
                self._with_shared.add(function)
            parameters = ctypes.addressof(self._parameters[words])
            grid, block = (num_blocks, 1, 1), (num_threads, 1, 1)
            self._cuda.launchKernel(function, *grid, *block, shared_bytes, stream, parameters, 0)

    # -- products --------------------------------------------------------------------------------

    def make_product(self, product: LtProduct, workspace_bytes: int) -> int:
        """Choose how to compute a product in so much workspace, and return the choice."""
        library = self._cublaslt()
        if self._kept is None:
            self._kept = ProductChoices(self._folder, f"{library.version} {self._seen.name}")
        with _ProductTrial(self) as trial:
            choice = library.choose(product, workspace_bytes, trial, self._kept)
            if choice.algorithm not in self._warm:
                self._warm.add(choice.algorithm)
                self._warm_up(library, product, choice, trial)
        self._choices.append(choice)
        return len(self._choices) - 1

    def _warm_up(
        self, library: CublasLt, product: LtProduct, choice: LtChoice, trial: _ProductTrial
    ) -> None:
        try:
            library.warm(product, choice, trial)
        except CudaError as error:
            if not is_out_of_memory(error):  # then it is loaded when it runs
                raise

    def product_later(
        self, choice: int, a: int, b: int, c: int, d: int, workspace: int, stream: int
    ) -> None:
        """Run a product."""
        self._here()
        self._cublaslt().run(self._choices[choice], a, b, c, d, workspace, stream)

    def _cublaslt(self) -> CublasLt:
        if self._library is None:
            path = find_cublaslt()
            try:
                library = CublasLt(path)
            except OSError as error:
                raise DeviceError(
                    f"products on cuda:{self._index} need cuBLAS of CUDA 13, and {path} cannot be"
                    f" loaded: {_INSTALL} ({error})"
                ) from error
            self._enter()
            library.open()
            self._library = library
        return self._library

    # -- graphs ----------------------------------------------------------------------------------

    def begin_capture(self, stream: int) -> None:
        """Record from here on what this thread puts on a stream."""
        self._ask("streamBeginCapture", stream, _THREAD_LOCAL)

    def end_capture(self, stream: int) -> int:
        """Return what was recorded as a graph that can be launched."""
        graph = self._ask("streamEndCapture", stream)
        try:
            self._graphs.append(self._ask("graphInstantiate", graph))
        finally:
            self._ask("graphDestroy", graph)
        # What the first launch would do else.
        self._ask("graphUpload", self._graphs[-1], stream)
        return self._graphs[-1]

    def graph_later(self, graph: int, stream: int) -> None:
        """Run a graph."""
        self._here()
        try:
            self._runtime.graphLaunch(graph, stream)
        except self._errors as error:
            raise self._as_ours("graphLaunch", error) from error

    def close(self) -> None:
        """Give everything back. Raises CudaError where the GPU has failed."""
        self.synchronize()
        for name, handles in (
            ("graphExecDestroy", self._graphs),
            ("eventDestroy", self._events),
            ("streamDestroy", self._streams),
        ):
            while handles:
                self._ask(name, handles.pop())
        self._enter()
        if self._library is not None:
            self._library.close()
        with self._told("moduleUnload"):
            while self._modules:
                self._cuda.moduleUnload(self._modules.popitem()[1])


class _ProductTrial:
    """Memory and a clock on which products are timed; both go at the end of the `with`."""

    def __init__(self, driver: CupyDriver) -> None:
        self._driver = driver
        self._blocks: list[int] = []

    def __enter__(self) -> _ProductTrial:
        return self

    def __exit__(self, *_: object) -> None:
        self._free()

    def scratch(self, sizes_bytes: Sequence[int]) -> tuple[int, ...]:
        """Return addresses of so many bytes each, until the next call."""
        self._free()
        for size in sizes_bytes:
            self._blocks.append(self._driver.allocate(max(size, 1)))
            self._driver._ask("memset", self._blocks[-1], _SCRATCH_BYTE, max(size, 1))
        return tuple(self._blocks)

    def duration_ns(self, run: Callable[[int], None]) -> float:
        """Return what `run(stream)` takes on the device, by events around it."""
        ask = self._driver._ask
        stream = ask("streamCreateWithFlags", _NON_BLOCKING)
        begin, end = ask("eventCreate"), ask("eventCreate")
        try:
            ask("eventRecord", begin, stream)
            run(stream)
            ask("eventRecord", end, stream)
            ask("eventSynchronize", end)
            return float(ask("eventElapsedTime", begin, end)) * 1e6
        finally:
            for name, handle in (("eventDestroy", begin), ("eventDestroy", end)):
                ask(name, handle)
            ask("streamDestroy", stream)

    def _free(self) -> None:
        while self._blocks:
            self._driver.free(self._blocks.pop())


def _modules() -> tuple[Any, Any]:
    """Return cupy's modules of the driver and the runtime. Raises DeviceError."""
    try:
        return tuple(
            [importlib.import_module(f"cupy_backends.cuda.api.{n}") for n in ("driver", "runtime")]
        )  # type: ignore[return-value]  # two of them
    except ImportError as error:
        raise DeviceError(
            f"a CUDA device needs the package cupy, which cannot be imported: {_INSTALL} ({error})"
        ) from error


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
