"""CUDA on a GPU: its runtime, its driver and its libraries behind `CudaDriver`, through cupy.

Streams do not block one another or the default stream; a capture is of this thread alone, so that
what other threads ask for goes on, and an allocation is refused rather than baked into the graph.

No module but this one and `nccl` imports cupy, and these only when a GPU is opened. Of cupy only
the low-level calls on integers are used. They raise CUDA's codes, but for `eventQuery`, which
returns them.

Source: CUDA Runtime API and Driver API, versions 13; CuPy 14 (cupy_backends.cuda.api).
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from actors.device.cuda.cublaslt import LIBRARY, CublasLt, LibraryTrial, LtChoice, ProductChoices
from actors.device.cuda.cudnn import Cudnn, CudnnChoice
from actors.device.cuda.driver import (
    OLDEST_CUDA,
    CudaError,
    DeviceProperties,
    TimedAlternatives,
    absent,
    forked,
    is_out_of_memory,
)
from actors.device.cuda.nccl import Nccl, find_nccl
from actors.kernels.cuda.calls import CudnnCall, KernelText, LtProduct, RunCollective
from actors.kernels.cuda.nvrtc import cubins, find_library
from compiler.contract.errors import DeviceError

INSTALL = "python -m pip install 'actorflow[cuda]'"

# cudaErrorInitializationError: what a forked child of a process that used CUDA gets.
_NOT_INITIALIZED = 3

_current = threading.local()
"""The device of each thread, as CUDA itself keeps it: not a call of CUDA's for every call."""


class CupyCalls:
    """The runtime and the driver, for one GPU, from any thread. Errors are CudaError.

    Args:
        index: Which of those that CUDA shows to this process.
        modules: cupy's modules of the driver and the runtime.
        current: The device of each thread, which all GPUs of a process share.
    """

    def __init__(self, index: int, modules: tuple[Any, Any], current: threading.local) -> None:
        """Find it. Raises DeviceError, which says what is missing."""
        self._cuda, self._runtime = modules
        self._current = current
        self._errors = (self._cuda.CUDADriverError, self._runtime.CUDARuntimeError)
        self._index = index
        self._check(f"cuda:{index}")

    def _check(self, device: str) -> None:
        runtime = self._runtime
        # 1000 * major + 10 * minor.
        version = runtime.driverGetVersion()
        if version == 0:
            raise DeviceError(f"{device} needs an NVIDIA driver, and none is here")
        serves = (version // 1000, version % 1000 // 10)
        if serves < OLDEST_CUDA:
            raise DeviceError(
                f"{device} needs CUDA 13.0, and the NVIDIA driver here serves CUDA"
                f" {serves[0]}.{serves[1]} at most: install a driver of version 580 or later"
            )
        try:
            count = runtime.getDeviceCount()
            if self._index >= count:
                raise absent(device, count)
            runtime.setDevice(self._index)
        except self._errors as error:
            if error.status == _NOT_INITIALIZED:
                raise forked(device) from error
            raise DeviceError(f"{device} cannot be opened: {error}") from error

    def ask(self, name: str, *given: Any) -> Any:
        """Make a call of the runtime."""
        self._enter()
        return self._call(self._runtime, name, given)

    def ask_driver(self, name: str, *given: Any) -> Any:
        """Make a call of the driver."""
        self._enter()
        return self._call(self._cuda, name, given)

    def put(self, name: str, *given: Any) -> None:
        """Make a call of the runtime that steps are made of: on the dispatcher's own thread."""
        self.here()
        self._call(self._runtime, name, given)

    def put_kernel(self, *given: int) -> None:
        """Launch a kernel, likewise."""
        self.here()
        self._call(self._cuda, "launchKernel", given)

    def _call(self, module: Any, name: str, given: tuple[Any, ...]) -> Any:
        try:
            return getattr(module, name)(*given)
        except self._errors as error:
            raise CudaError(str(error), code=error.status, call=name) from error

    def _enter(self) -> None:
        """Make this GPU that of the thread, where code of others may have set another one."""
        self._call(self._runtime, "setDevice", (self._index,))
        self._current.index = self._index

    def here(self) -> None:
        """Make this GPU that of the thread, unless it is, as far as we know."""
        if getattr(self._current, "index", None) != self._index:
            self._enter()


def modules() -> tuple[Any, Any]:
    """Return cupy's modules of the driver and the runtime. Raises DeviceError."""
    try:
        driver = importlib.import_module("cupy_backends.cuda.api.driver")
        runtime = importlib.import_module("cupy_backends.cuda.api.runtime")
    except ImportError as error:
        raise DeviceError(
            f"a CUDA device needs the package cupy, which cannot be imported: {INSTALL} ({error})"
        ) from error
    return driver, runtime


@dataclass(frozen=True, slots=True)
class CudaLibraries:
    """What a driver loads, each when it is first needed.

    `modules` are cupy's modules of the driver and the runtime; `current` the device of each thread;
    `build` compiles kernels; `find` gives the path of a library, from which `products` makes
    cuBLASLt; `cudnn` takes what a GPU is called and a folder.
    """

    modules: Callable[[], tuple[Any, Any]] = modules
    current: threading.local = _current
    build: Callable[..., tuple[bytes, ...]] = cubins
    find: Callable[[str], str] = find_library
    products: Callable[[str], CublasLt] = CublasLt
    cudnn: Callable[[str, Path | None], Cudnn] = Cudnn


_INSTALLED = CudaLibraries()

ANY_KIND = 4
"""cudaMemcpyDefault: addresses say where they are."""

# cudaStreamNonBlocking: no order with the default stream. cudaStreamCaptureModeThreadLocal: calls
# of other threads do not break a capture.
NON_BLOCKING, THREAD_LOCAL = 1, 1
# cudaEventBlockingSync | cudaEventDisableTiming: the thread sleeps and frees its core.
BLOCKING_WITHOUT_TIMES = 1 | 2
# cudaHostAllocPortable | cudaHostAllocMapped: all devices see it, at one address.
PORTABLE_AND_MAPPED = 1 | 2
# cudaErrorNotReady.
_NOT_READY = 600
_SHARED_LIMIT, MAX_SHARED_ATTRIBUTE, NUM_REGISTERS = 32 << 10, 8, 4


class CupyDriver:
    """A GPU of this machine; see `CudaDriver`.

    Args:
        index: Which of those that CUDA shows to this process.
        folder: Keeps kernels and plans that were built, products that were timed; None for none.
    """

    def __init__(
        self, index: int, folder: Path | None = None, libraries: CudaLibraries = _INSTALLED
    ) -> None:
        """Open it. Raises DeviceError, which says what is missing."""
        self._calls = CupyCalls(index, libraries.modules(), libraries.current)
        self._libraries = libraries
        self._ask, self._put = self._calls.ask, self._calls.put
        self._index = index
        self._folder = folder
        self._streams: list[int] = []
        self._events: list[int] = []
        self._graphs: list[int] = []
        self._modules: dict[str, int] = {}
        self._functions: dict[tuple[str, str], int] = {}
        self._parameters: dict[int, ctypes.Array[ctypes.c_void_p]] = {}
        self._with_shared: dict[int, int] = {}
        self._library: CublasLt | None = None
        self._kept: ProductChoices | None = None
        self._warm: set[tuple[str, int]] = set()
        self._choices: list[LtChoice] = []
        self._cudnn: Cudnn | None = None
        self._cudnn_choices: list[CudnnChoice] = []
        self._collectives: Nccl | None = None
        properties = self._ask("getDeviceProperties", index)
        self._seen = DeviceProperties(
            properties["name"].decode(),
            (properties["major"], properties["minor"]),
            properties["multiProcessorCount"],
            properties["totalGlobalMem"],
            self._ask("driverGetVersion"),
        )

    def seen(self) -> DeviceProperties:
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
        return int(self._ask("hostAlloc", size_bytes, PORTABLE_AND_MAPPED))

    def free_pinned(self, address: int) -> None:
        """Give pinned memory back."""
        self._ask("freeHost", address)

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Copy bytes between any two places, and wait until that is done."""
        self._ask("memcpy", target, source, size_bytes, ANY_KIND)
        # Pageable memory is only staged when the copy returns, and no stream of ours waits for it.
        self._ask("streamSynchronize", 0)

    def copy_later(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Copy bytes between device and pinned memory, or within either."""
        self._put("memcpyAsync", target, source, size_bytes, ANY_KIND, stream)

    def fill_later(self, target: int, value: int, size_bytes: int, stream: int) -> None:
        """Set every byte of a range of device memory."""
        self._put("memsetAsync", target, value, size_bytes, stream)

    # -- streams and events ----------------------------------------------------------------------

    def make_stream(self, name: str) -> int:
        """Return a new stream."""
        self._streams.append(self._ask("streamCreateWithFlags", NON_BLOCKING))
        return self._streams[-1]

    def make_event(self) -> int:
        """Return a new event, which takes no times and on which a thread can sleep."""
        self._events.append(self._ask("eventCreateWithFlags", BLOCKING_WITHOUT_TIMES))
        return self._events[-1]

    def record(self, event: int, stream: int) -> None:
        """Mark this place of a stream."""
        self._put("eventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        """Hold a stream until the latest record of an event is done."""
        self._put("streamWaitEvent", stream, event)

    def is_done(self, event: int) -> bool:
        """Whether the latest record of an event is done; never blocks."""
        code = self._ask("eventQuery", event)
        if code not in (0, _NOT_READY):
            raise CudaError("the work before an event failed", code=code, call="eventQuery")
        return bool(code == 0)

    def synchronize_event(self, event: int) -> None:
        """Block this thread until the latest record of an event is done; other threads go on."""
        self._put("eventSynchronize", event)

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
        # NVRTC compiles texts on threads of their own; loading is done by this one.
        images = self._libraries.build(missing, self._arch, self._folder, os.cpu_count() or 1)
        for text, image in zip(missing, images, strict=True):
            self._modules[text.text] = self._calls.ask_driver("moduleLoadData", image)

    @property
    def _arch(self) -> str:
        major, minor = self._seen.capability
        # The suffix gives instructions of this very architecture, which later ones do not run.
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")

    def function(self, text: KernelText, name: str) -> int:
        """Return a kernel of a text that was loaded."""
        key = text.text, name
        if key not in self._functions:
            ask = self._calls.ask_driver
            self._functions[key] = ask("moduleGetFunction", self._modules[text.text], name)
            # Asking for something loads it: a capture is no time for that.
            ask("funcGetAttribute", NUM_REGISTERS, self._functions[key])
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
        if words not in self._parameters:
            # The one parameter is the whole block, by value: CUDA knows its size from the kernel.
            self._parameters[words] = (ctypes.c_void_p * 1)(words)
        # More than 48 KiB of shared memory, with what the text has itself, must be asked for.
        if shared_bytes > self._with_shared.get(function, _SHARED_LIMIT):
            setting = (function, MAX_SHARED_ATTRIBUTE, shared_bytes)
            self._calls.ask_driver("funcSetAttribute", *setting)
            self._with_shared[function] = shared_bytes
        parameters = ctypes.addressof(self._parameters[words])
        grid, block = (num_blocks, 1, 1), (num_threads, 1, 1)
        self._calls.put_kernel(function, *grid, *block, shared_bytes, stream, parameters, 0)

    # -- products --------------------------------------------------------------------------------

    def make_product(self, product: LtProduct, workspace_bytes: int) -> int:
        """Choose how to compute a product in so much workspace, and return the choice."""
        library = self._cublaslt()
        with LibraryTrial(self, self._ask) as trial:
            choice = library.choose(product, workspace_bytes, trial, self._product_choices())
            # One algorithm is a kernel for each way that operands lie, and a capture loads none.
            key = product.key, workspace_bytes
            if key not in self._warm:
                # Before the run: a product that finds no room to try is not tried again.
                self._warm.add(key)
                self._warm_up(library, product, choice, trial)
        self._choices.append(choice)
        return len(self._choices) - 1

    def _product_choices(self) -> ProductChoices:
        if self._kept is None:
            made_for = f"{self._cublaslt().version} {self._seen.name}"
            self._kept = ProductChoices(self._folder, made_for)
        return self._kept

    def choose_way(
        self, key: str, trial: Callable[[], AbstractContextManager[TimedAlternatives]]
    ) -> int:
        """Return the number of the fastest of some ways to do the same."""
        choices = self._product_choices()
        choice = choices.get(key)
        if choice is None:
            try:
                with LibraryTrial(self, self._ask) as clock, trial() as ways:
                    best = clock.fastest_way(ways)
            except CudaError as error:
                if not is_out_of_memory(error):
                    raise
                return 0  # and not kept
            choice = choices.keep(key, bytes([best]))
        return choice[0]

    def _warm_up(
        self, library: CublasLt, product: LtProduct, choice: LtChoice, trial: LibraryTrial
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
        self._calls.here()
        self._cublaslt().run(self._choices[choice], a, b, c, d, workspace, stream)

    def _cublaslt(self) -> CublasLt:
        if self._library is None:
            path = self._libraries.find(LIBRARY)
            try:
                library = self._libraries.products(path)
            except OSError as error:
                raise DeviceError(
                    f"products on cuda:{self._index} need cuBLAS of CUDA 13, and {path} cannot be"
                    f" loaded: {INSTALL} ({error})"
                ) from error
            self._calls.here()  # a handle is for the GPU of its thread
            library.open()
            self._library = library
        return self._library

    # -- cuDNN -----------------------------------------------------------------------------------

    def make_cudnn(self, call: CudnnCall, workspace_bytes: int) -> int:
        """Choose how cuDNN computes a call in so much workspace, and return the choice.

        It runs once, on scratch: what the library loads then it need not load in a capture.
        """
        self._calls.here()  # plans are made for the GPU of their thread, as the handle is
        library = self._cudnn_library()
        choice = library.choose(call, workspace_bytes)
        with LibraryTrial(self, self._ask) as trial:
            try:
                sizes = [tensor.span_bytes for tensor in call.tensors]
                *places, workspace = trial.scratch((*sizes, workspace_bytes))
                trial.duration_ns(partial(library.run, choice, tuple(places), workspace))
            except CudaError as error:
                if not is_out_of_memory(error):  # then it is loaded when it runs
                    raise
        self._cudnn_choices.append(choice)
        return len(self._cudnn_choices) - 1

    def cudnn_later(
        self, choice: int, addresses: tuple[int, ...], workspace: int, stream: int
    ) -> None:
        """Run a call of cuDNN."""
        self._calls.here()
        self._cudnn_library().run(self._cudnn_choices[choice], addresses, workspace, stream)

    def _cudnn_library(self) -> Cudnn:
        """Return the library, opened for the GPU that is current in this thread."""
        if self._cudnn is None:
            major, minor = self._seen.capability
            library = self._libraries.cudnn(f"{self._seen.name}, {major}.{minor}", self._folder)
            library.open()
            self._cudnn = library
        return self._cudnn

    # -- collectives -----------------------------------------------------------------------------

    def unique_id(self) -> bytes:
        """Return what the ranks of a new communicator know it by."""
        return self._nccl().unique_id()

    def join_communicator(
        self, unique_id: bytes, num_ranks: int, rank: int, deadline_s: float
    ) -> int:
        """Wait for all ranks and return the communicator."""
        return self._nccl().join(unique_id, num_ranks, rank, deadline_s)

    def collective_later(self, call: RunCollective, stream: int) -> None:
        """Put a call on a stream."""
        self._calls.here()
        self._nccl().run(call, stream)

    def check_communicator(self, communicator: int) -> None:
        """Raise CudaError where a call has failed."""
        self._nccl().check(communicator)

    def abort_communicator(self, communicator: int) -> None:
        """Let the streams go on that wait for other ranks."""
        self._nccl().abort(communicator)

    def _nccl(self) -> Nccl:
        if self._collectives is None:
            self._collectives = Nccl(find_nccl(), self._calls.here)
        return self._collectives

    # -- graphs ----------------------------------------------------------------------------------

    def begin_capture(self, stream: int) -> None:
        """Record from here on what this thread puts on a stream."""
        self._ask("streamBeginCapture", stream, THREAD_LOCAL)

    def end_capture(self, stream: int) -> int:
        """Return what was recorded as a graph that can be launched."""
        graph = self._ask("streamEndCapture", stream)
        try:
            self._graphs.append(self._ask("graphInstantiate", graph))
        finally:
            # The executable graph is a copy of its own.
            self._ask("graphDestroy", graph)
        # What the first launch would do else.
        self._ask("graphUpload", self._graphs[-1], stream)
        return self._graphs[-1]

    def graph_later(self, graph: int, stream: int) -> None:
        """Run a graph."""
        self._put("graphLaunch", graph, stream)

    def close(self) -> None:
        """Give everything back. Raises CudaError where the GPU has failed."""
        # Nothing may be given back while the device still works on it.
        self.synchronize()
        for name, handles in (
            ("graphExecDestroy", self._graphs),
            ("eventDestroy", self._events),
            ("streamDestroy", self._streams),
        ):
            while handles:
                self._ask(name, handles.pop())
        if self._collectives is not None:
            self._collectives.close()  # it waits for graphs that have its calls
        if self._library is not None:
            self._library.close()
        if self._cudnn is not None:
            self._cudnn_choices.clear()
            self._cudnn.close()
        while self._modules:
            self._calls.ask_driver("moduleUnload", self._modules.popitem()[1])
