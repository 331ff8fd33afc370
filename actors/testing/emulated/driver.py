"""A CUDA driver on the host: what is put on a stream is done late, and strictly.

Streams and events are those of `LateSchedule`. Memory lies at real addresses with known bounds, and
what a call says of its operands is checked before it is done: ranges, kinds of memory, alignments.
Kernels run as fibers, products and calls of cuDNN by numpy. What fails on a stream is a fault that
stays: every later call fails with its code, as after an error that CUDA calls sticky.

Stricter than CUDA: a copy on a stream from or to memory that is not pinned is an error, where CUDA
would quietly wait; so is a library's result that lies over an operand, and a workspace is full of
0xFF after its call.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from random import Random
from typing import TypeVar

from actors.device.cuda.driver import (
    CudaError,
    DeviceProperties,
    DriverStreams,
    TimedAlternatives,
    absent,
    forked,
    is_out_of_memory,
)
from actors.kernels.cuda.calls import CudnnCall, KernelText, LtProduct, RunCollective
from actors.kernels.cuda.kernel import Gpu
from actors.kernels.library.toolchain import CompilerError, Toolchain
from actors.machine.protocol import DeviceFault, Launch
from actors.testing.emulated import kernels, library_calls, nccl
from actors.testing.emulated.library_calls import library_call
from actors.testing.emulated.memory import INVALID_VALUE, OUT_OF_MEMORY, Captures, EmulatedMemory
from actors.testing.simulated import LateSchedule, OperationKind, SimulatedEvent, SimulatedStream
from compiler.contract.placement import Device, DeviceKind, Memory


def tried(
    driver: DriverStreams, key: str, trial: Callable[[], AbstractContextManager[TimedAlternatives]]
) -> int:
    """Run all ways on their scratch, and return the number of one. Raises CudaError.

    No time is measured: the number follows from the key, and of many keys about as many fall to
    each way.
    """
    stream = driver.make_stream("trial")
    try:
        with trial() as ways:
            for run in (ways.fill, *ways.runs):
                run(stream)
                driver.synchronize()
            return hashlib.blake2b(key.encode()).digest()[0] % len(ways.runs)
    except CudaError as error:
        if not is_out_of_memory(error):
            raise
        return 0


NOT_FOUND, INVALID_HANDLE, INVALID_PTX, LAUNCH_FAILURE = 500, 400, 218, 719
NOT_SUPPORTED = 15
CUDNN_NOT_SUPPORTED = 3000
"""cuBLAS's; all others are CUDA's."""

_DRIVER_VERSION = 13_000
_T = TypeVar("_T")

_users: list[int] = []
"""The process that used CUDA first, which the driver of NVIDIA knows of its own: a forked child
inherits that, and can use CUDA no more."""


class EmulatedCuda:
    """What the drivers of one run have in common: when things happen, and all addresses."""

    def __init__(self, schedule: LateSchedule, num_gpus: int = 8) -> None:
        self.schedule = schedule
        self.num_gpus = num_gpus
        self.memory = EmulatedMemory()
        self._made: list[object] = []

    def keep(self, made: object) -> int:
        """Return the handle of something that was made."""
        self._made.append(made)
        return len(self._made)

    def found(self, handle: int, kind: type[_T]) -> _T:
        """Return what has a handle. Raises CudaError where it is nothing of this kind."""
        entry = self._made[handle - 1] if 0 < handle <= len(self._made) else None
        if not isinstance(entry, kind):
            message = f"{handle} is no handle of a {kind.__name__}"
            raise CudaError(message, code=INVALID_HANDLE, call="handle")
        return entry


class EmulatedDriver:
    """One GPU, acted by the host. See `CudaDriver`, of which this is one.

    Args:
        cuda: The same for all devices of a run.
        toolchain: The C compiler that takes the texts.
        gpu: What it says it is.
        index: Which CUDA device it is.
        seed: Draws the order of blocks and threads.
        memory_bytes: How much memory it has; what the description says if None.
        product_bytes: Workspace that each product of the library wants.

    Raises DeviceError for one beyond the last, and in a forked child of a process with any.
    """

    def __init__(
        self,
        cuda: EmulatedCuda,
        toolchain: Toolchain,
        gpu: Gpu,
        index: int = 0,
        *,
        seed: int = 0,
        memory_bytes: int | None = None,
        product_bytes: int = 0,
    ) -> None:
        self._cuda = cuda
        self._device = Device(DeviceKind.CUDA, index)
        if index >= cuda.num_gpus:
            raise absent(str(self._device), cuda.num_gpus)
        if not _users:
            _users.append(os.getpid())
        if _users[0] != os.getpid():
            raise forked(str(self._device))
        self._toolchain = toolchain
        self._gpu = gpu
        self._memory_bytes = gpu.memory_bytes if memory_bytes is None else memory_bytes
        self._product_bytes = product_bytes
        self._captures = Captures()
        self._rng = Random(seed)
        self._loaded: set[str] = set()
        self._offered = nccl.OfferedIds(cuda.num_gpus)
        self._communicators: list[nccl.EmulatedCommunicator] = []

    def seen(self) -> DeviceProperties:
        """Return what the GPU would be."""
        gpu = self._gpu
        return DeviceProperties(
            gpu.says, gpu.capability, gpu.num_sms, self._memory_bytes, _DRIVER_VERSION
        )

    # -- DriverMemory ------------------------------------------------------------------------------

    def free_bytes(self) -> int:
        """Return the bytes of device memory that can be had."""
        return self._memory_bytes - self._cuda.memory.used_bytes(self)

    def allocate(self, size_bytes: int) -> int:
        """Return the address of new device memory."""
        with self._outside_capture("allocate"):
            if size_bytes > self.free_bytes():
                message = f"{size_bytes} bytes were asked for, {self.free_bytes()} are free"
                raise CudaError(message, code=OUT_OF_MEMORY, call="allocate")
            return self._cuda.memory.allocate(size_bytes, Memory.DEVICE, self)

    def free(self, address: int) -> None:
        """Give device memory back, when the device is done; CUDA waits as well."""
        self._drain()
        self._cuda.memory.free(address, Memory.DEVICE)

    def allocate_pinned(self, size_bytes: int) -> int:
        """Return the address of new pinned memory."""
        with self._outside_capture("allocate_pinned"):
            return self._cuda.memory.allocate(size_bytes, Memory.PINNED, self)

    def free_pinned(self, address: int) -> None:
        """Give pinned memory back, when the device is done."""
        self._drain()
        self._cuda.memory.free(address, Memory.PINNED)

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Copy at once: no stream is waited for, since none here waits for this."""
        with self._outside_capture("copy"):
            for address in (target, source):
                if self._cuda.memory.find(address, 1) is not None:
                    self._inside(address, size_bytes, "copy")
            ctypes.memmove(target, source, size_bytes)

    def copy_later(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Put a copy on a stream."""
        for address in (target, source):
            self._inside(address, size_bytes, "copy_later")
        self._put(stream, "copy_later", partial(self._copy, target, source, size_bytes))

    def fill_later(self, target: int, value: int, size_bytes: int, stream: int) -> None:
        """Put a fill on a stream."""
        self._inside(target, size_bytes, "fill_later")
        self._put(stream, "fill_later", partial(self._fill, target, value, size_bytes))

    def _copy(self, target: int, source: int, size_bytes: int) -> None:
        self._cuda.memory.expect(target, size_bytes)
        self._cuda.memory.expect(source, size_bytes)
        ctypes.memmove(target, source, size_bytes)

    def _fill(self, target: int, value: int, size_bytes: int) -> None:
        self._cuda.memory.expect(target, size_bytes)
        ctypes.memset(target, value, size_bytes)

    def _inside(self, address: int, size_bytes: int, call: str) -> None:
        if self._cuda.memory.find(address, size_bytes) is None:
            nearest = self._cuda.memory.find(address, 1)
            where = (
                f"leave {nearest}" if nearest is not None else "are neither of a device nor pinned"
            )
            message = f"{size_bytes} bytes at {address:#x} {where}"
            raise CudaError(message, code=INVALID_VALUE, call=call)

    # -- DriverStreams -----------------------------------------------------------------------------

    def make_stream(self, name: str) -> int:
        """Return a new stream."""
        with self._outside_capture("make_stream"):
            return self._cuda.keep(self._cuda.schedule.make_stream(self._device, name))

    def make_event(self) -> int:
        """Return a new event."""
        return self._cuda.keep(self._cuda.schedule.make_event(self._device))

    def record(self, event: int, stream: int) -> None:
        """Mark this place of a stream."""
        mark = partial(self._stream(stream).record, self._event(event))
        with self._sticky("record"):
            self._captures.record(event, stream, mark)

    def wait(self, stream: int, event: int) -> None:
        """Hold a stream until the latest record of an event is done."""
        marked = self._event(event)
        with self._sticky("wait"):
            hold = partial(self._stream(stream).wait, marked)
            self._captures.wait(stream, event, hold, is_new=marked.record is None)

    def is_done(self, event: int) -> bool:
        """Whether the latest record of an event is done."""
        with self._outside_capture("is_done"):
            self._captures.refuse_event(event, "is_done")
            return self._event(event).is_done

    def synchronize_event(self, event: int) -> None:
        """Execute until the latest record of an event is done."""
        with self._outside_capture("synchronize_event"):
            self._captures.refuse_event(event, "synchronize_event")
            self._event(event).synchronize()

    def synchronize(self) -> None:
        """Execute all that was put on the streams."""
        with self._outside_capture("synchronize"):
            self._cuda.schedule.synchronize(self._device)

    def _stream(self, handle: int) -> SimulatedStream:
        return self._cuda.found(handle, SimulatedStream)

    def _event(self, handle: int) -> SimulatedEvent:
        return self._cuda.found(handle, SimulatedEvent)

    # -- DriverKernels -----------------------------------------------------------------------------

    def load(self, texts: Sequence[KernelText]) -> None:
        """Build and load the kernels of some texts."""
        with self._outside_capture("load"):
            try:
                kernels.load(texts, self._toolchain)
            except CompilerError as error:
                raise CudaError(str(error), code=INVALID_PTX, call="load") from error
            self._loaded.update([name for text in texts for name in text.kernels])

    def function(self, text: KernelText, name: str) -> int:
        """Return a kernel of a text that was loaded."""
        if name not in self._loaded or name not in text.kernels:
            raise CudaError(f"no kernel {name!r} was loaded", code=NOT_FOUND, call="function")
        return self._cuda.keep(kernels.built(name))

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
        """Put a kernel on a stream; its argument block is read now."""
        kernel = self._cuda.found(function, kernels.BuiltKernel)
        grid = num_blocks, num_threads
        wrong = kernels.wrong_launch(kernel, self._gpu, grid, shared_bytes, num_words)
        if wrong:
            raise CudaError(f"{kernel.name}: {wrong}", code=INVALID_VALUE, call="launch_later")
        block = ctypes.create_string_buffer(ctypes.string_at(words, 8 * num_words), 8 * num_words)
        run = partial(self._run, kernel, grid, shared_bytes, block)
        self._put(stream, "launch_later", run)

    def _run(
        self,
        kernel: kernels.BuiltKernel,
        grid: tuple[int, int],
        shared_bytes: int,
        block: ctypes.Array[ctypes.c_char],
    ) -> None:
        seed = self._rng.getrandbits(64)
        try:
            kernels.run(kernel, grid, shared_bytes, ctypes.addressof(block), seed)
        except kernels.EmulationError as error:
            raise CudaError(str(error), code=LAUNCH_FAILURE, call="launch") from error
        self._cuda.memory.check_guards(kernel.name)

    # -- DriverLibraries ---------------------------------------------------------------------------

    def make_product(self, product: LtProduct, workspace_bytes: int) -> int:
        """Return a product that was checked against its workspace."""
        with self._outside_capture("make_product"):
            if self._product_bytes > workspace_bytes:
                message = (
                    f"no algorithm takes this product within {workspace_bytes} bytes of workspace;"
                    f" the least needs {self._product_bytes}"
                )
                raise CudaError(message, code=NOT_SUPPORTED, call="cublasLtMatmulAlgoGetHeuristic")
            record = library_calls.described_product(product, workspace_bytes)
            return self._cuda.keep(library_calls.ChosenProduct(record, workspace_bytes))

    def choose_way(
        self, key: str, trial: Callable[[], AbstractContextManager[TimedAlternatives]]
    ) -> int:
        """Run every way on its scratch, and return the number of one by a fixed rule."""
        return tried(self, key, trial)

    def product_later(
        self, choice: int, a: int, b: int, c: int, d: int, workspace: int, stream: int
    ) -> None:
        """Put a product on a stream."""
        matmul = self._cuda.found(choice, library_calls.ChosenProduct)
        self._put(stream, "product_later", partial(self._multiply, matmul, (a, b, c, d), workspace))

    def _multiply(
        self, chosen: library_calls.ChosenProduct, places: tuple[int, int, int, int], workspace: int
    ) -> None:
        over, operands = chosen.lies_over_itself(*places), chosen.operands(*places)
        scratch = workspace, chosen.workspace_bytes
        with library_call(self._cuda.memory, "cublasLtMatmul", operands, scratch, is_over=over):
            library_calls.run_product(chosen.product, *places)

    def make_cudnn(self, call: CudnnCall, workspace_bytes: int) -> int:
        """Return a call of cuDNN that was checked, and that has the workspace it needs."""
        with self._outside_capture("make_cudnn"):
            least = library_calls.least_workspace_bytes(call)
            if workspace_bytes < least:
                message = (
                    f"{call.about} needs {least:,} bytes of workspace, not {workspace_bytes:,}"
                )
                raise CudaError(message, code=CUDNN_NOT_SUPPORTED, call="cudnnGraphBuild")
            chosen_call = library_calls.ChosenCall(
                library_calls.described_cudnn_call(call), workspace_bytes
            )
            return self._cuda.keep(chosen_call)

    def cudnn_later(
        self, choice: int, addresses: tuple[int, ...], workspace: int, stream: int
    ) -> None:
        """Put a call of cuDNN on a stream."""
        chosen_call = self._cuda.found(choice, library_calls.ChosenCall)
        run = partial(self._compute, chosen_call, addresses, workspace)
        self._put(stream, "cudnn_later", run)

    def _compute(
        self, chosen: library_calls.ChosenCall, places: tuple[int, ...], workspace: int
    ) -> None:
        over, operands = chosen.lies_over_itself(places), chosen.operands(places)
        scratch = workspace, chosen.workspace_bytes
        with library_call(
            self._cuda.memory, "cudnnBackendExecute", operands, scratch, is_over=over
        ):
            library_calls.run_cudnn_call(chosen.call, places)

    # -- DriverCollectives -------------------------------------------------------------------------

    def unique_id(self) -> bytes:
        """Return what the ranks of a new communicator know it by."""
        with self._outside_capture("unique_id"):
            return self._offered.make()

    def join_communicator(
        self, unique_id: bytes, num_ranks: int, rank: int, deadline_s: float
    ) -> int:
        """Wait for all ranks and return the communicator."""
        with self._outside_capture("join_communicator"):
            segment = self._offered.open(unique_id)
            made = nccl.EmulatedCommunicator(segment, num_ranks, rank, self._toolchain, deadline_s)
            try:
                made.check_gpus(self._device.index)
            finally:
                self._offered.close(unique_id)
            self._communicators.append(made)
            return self._cuda.keep(made)

    def collective_later(self, call: RunCollective, stream: int) -> None:
        """Put a call on a stream, as a launch that blocks."""
        communicator = self._communicator(call.communicator)
        wrong = nccl.wrong_call(call, communicator.num_ranks)
        if wrong or communicator.is_aborted:
            message = wrong or "the communicator was aborted"
            raise CudaError(message, code=nccl.INVALID_ARGUMENT, call="nccl")
        is_captured = self._captures.of_stream(stream) is not None
        work = nccl.CollectiveWork(communicator, call, self._cuda.memory, is_captured)
        work.operands()  # which must be there
        self._put(stream, "collective_later", work)

    def check_communicator(self, communicator: int) -> None:
        """Raise CudaError where a call has failed."""
        error = self._communicator(communicator).error
        if error is not None:
            raise error

    def abort_communicator(self, communicator: int) -> None:
        """Let the streams go on."""
        self._communicator(communicator).abort()

    def _communicator(self, handle: int) -> nccl.EmulatedCommunicator:
        return self._cuda.found(handle, nccl.EmulatedCommunicator)

    # -- DriverGraphs ------------------------------------------------------------------------------

    def begin_capture(self, stream: int) -> None:
        """Record from here on what is put on a stream."""
        self._stream(stream)
        with self._sticky("begin_capture"):
            self._captures.begin(stream)

    def end_capture(self, stream: int) -> int:
        """Return what was recorded."""
        with self._sticky("end_capture"):
            return self._cuda.keep(_EmulatedGraph(self._captures.end(stream)))

    def graph_later(self, graph: int, stream: int) -> None:
        """Put all calls of a graph on a stream, one by one."""
        for launch in self._cuda.found(graph, _EmulatedGraph).launches:
            self._put(stream, "graph_later", launch)

    def close(self) -> None:
        """Give everything back, when the device is done."""
        for communicator in self._communicators:
            communicator.abort()
        self._drain()
        for block in self._cuda.memory.of(self):
            self._cuda.memory.free(block.address, block.memory)

    def _drain(self) -> None:
        """Let all that was put on streams end: nothing may use memory that is given back."""
        with suppress(DeviceFault):  # what failed has been told, or will be by whoever waits
            self._cuda.schedule.synchronize(self._device)

    def _put(self, stream: int, call: str, launch: Launch) -> None:
        into = self._stream(stream)
        with self._sticky(call):
            capture = self._captures.of_stream(stream)
            if capture is not None:
                capture.put(stream, launch)
            else:
                is_blocking = isinstance(launch, nccl.CollectiveWork)
                kind = OperationKind.BLOCKING if is_blocking else OperationKind.LAUNCH
                self._cuda.schedule.put(into, kind, launch=launch)

    @contextmanager
    def _outside_capture(self, call: str) -> Iterator[None]:
        self._captures.refuse_while_capturing(call)
        with self._sticky(call):
            self._cuda.schedule.check(self._device)
            yield

    @contextmanager
    def _sticky(self, call: str) -> Iterator[None]:
        try:
            yield
        except DeviceFault as fault:
            cause = fault.__cause__
            code = cause.code if isinstance(cause, CudaError) else LAUNCH_FAILURE
            raise CudaError(f"{call}: {fault}", code=code, call=call) from fault


class _EmulatedGraph:
    """The calls of a graph, with the argument blocks that they had when it was captured."""

    def __init__(self, launches: tuple[Launch, ...]) -> None:
        self.launches = launches
