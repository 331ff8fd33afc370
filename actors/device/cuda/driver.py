"""What is asked of CUDA: some thirty calls on numbers, answered by a GPU or by an emulation.

The calls are named by role: memory, streams and events, kernels, libraries, collectives, graphs.
Code that needs one role takes a driver as that, and `CudaDriver` is all of them for one GPU.

Addresses and handles are integers. Whatever ends in `_later` is put on a stream and returns at
once. Every call raises `CudaError` with the driver's code; codes of work that was put on a stream
before may come out of any later call.

While a stream is captured, what is put on it is recorded and not executed; nothing may be
allocated, loaded or waited for then.

What an error means (a machine's limit, a bug of ours, or the end of a process) is told here, too.

Source: CUDA Runtime API, error codes of cudaError_t.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from actors.kernels.cuda.calls import CudnnCall, KernelText, LtProduct, RunCollective
from actors.machine.protocol import DeviceFault, DeviceStream
from compiler.contract.errors import ActorflowError, DeviceError, InternalError, OutOfMemory
from compiler.contract.placement import Device

OLDEST_CUDA = (13, 0)
"""What a driver must serve: what the packages of the extra [cuda] are made for."""


class CudaError(Exception):
    """A call of the driver or a library failed: `code` is its number, `call` its name.

    Callers of a device see one of our errors instead, made by `explained` or `fault_of`.

    Codes of the driver and the runtime are those of CUDA (2: out of memory); a library's are given
    with the library's name in `call`.
    """

    def __init__(self, message: str, *, code: int, call: str) -> None:
        super().__init__(message)
        self.code = code
        self.call = call


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """What a driver says of a GPU that is here."""

    name: str
    capability: tuple[int, int]
    num_sms: int
    memory_bytes: int
    driver_version: int


SCRATCH_BYTE = 0x3C
"""What is in scratch of trials: small numbers in every type. Zeros would cost less than any data.
"""

RunOn = Callable[[int], None]
"""Puts some calls on a stream, by its handle."""


@dataclass(frozen=True, slots=True)
class TimedAlternatives:
    """Ways to do the same on scratch: `fill` comes before the first run of any."""

    fill: RunOn
    runs: tuple[RunOn, ...]


class DriverMemory(Protocol):
    """Memory of a GPU and pinned memory of the host."""

    def free_bytes(self) -> int:
        """Return the bytes of device memory that can be had."""

    def allocate(self, size_bytes: int) -> int:
        """Return the address of new device memory, a multiple of 256."""

    def free(self, address: int) -> None:
        """Give device memory back."""

    def allocate_pinned(self, size_bytes: int) -> int:
        """Return the address of new host memory, which host and device see at this address."""

    def free_pinned(self, address: int) -> None:
        """Give pinned memory back."""

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Copy bytes between any two places, and wait until that is done."""

    def copy_later(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Copy bytes between device and pinned memory, or within either."""

    def fill_later(self, target: int, value: int, size_bytes: int, stream: int) -> None:
        """Set every byte of a range of device memory."""


class DriverStreams(Protocol):
    """Streams and events of a GPU."""

    def make_stream(self, name: str) -> int:
        """Return a new stream, which waits for no other by itself."""

    def make_event(self) -> int:
        """Return a new event, which takes no times and on which a thread can sleep."""

    def record(self, event: int, stream: int) -> None:
        """Mark this place of a stream."""

    def wait(self, stream: int, event: int) -> None:
        """Hold a stream until the latest record of an event is done."""

    def is_done(self, event: int) -> bool:
        """Whether the latest record of an event is done; never blocks."""

    def synchronize_event(self, event: int) -> None:
        """Block this thread until the latest record of an event is done."""

    def synchronize(self) -> None:
        """Block this thread until all streams are empty."""


class DriverKernels(Protocol):
    """Kernels of our own texts."""

    def load(self, texts: Sequence[KernelText]) -> None:
        """Build and load the kernels of some texts, several at once; those that are there stay."""

    def function(self, text: KernelText, name: str) -> int:
        """Return a kernel of a text that was loaded."""

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


class DriverLibraries(Protocol):
    """Products of cuBLASLt and calls of cuDNN."""

    def make_product(self, product: LtProduct, workspace_bytes: int) -> int:
        """Choose how to compute a product in so much workspace, and return the choice.

        The best is timed once on scratch of its own, and kept; a deterministic one is the first
        without a split of the inner extent. Raises CudaError where none fits.
        """

    def product_later(
        self, choice: int, a: int, b: int, c: int, d: int, workspace: int, stream: int
    ) -> None:
        """Run a product."""

    def choose_way(
        self, key: str, trial: Callable[[], AbstractContextManager[TimedAlternatives]]
    ) -> int:
        """Return the number of the fastest of some ways to do the same.

        They are timed on the scratch of `trial()`, once, and the number is kept by `key`. The first
        one where there is no room to try.
        """

    def make_cudnn(self, call: CudnnCall, workspace_bytes: int) -> int:
        """Choose how cuDNN computes a call in so much workspace, and return the choice.

        Raises CudaError where nothing fits.
        """

    def cudnn_later(
        self, choice: int, addresses: tuple[int, ...], workspace: int, stream: int
    ) -> None:
        """Run a call of cuDNN on tensors in the order of its record."""


class DriverCollectives(Protocol):
    """Communicators of NCCL, each of some ranks with a GPU of its own.

    All ranks of a communicator put the same calls on a stream in the same order, all captured or
    none. Any thread may check or abort one. It ends with the driver.
    """

    def unique_id(self) -> bytes:
        """Return what the ranks of a new communicator know it by; one of them makes it for all."""

    def join_communicator(
        self, unique_id: bytes, num_ranks: int, rank: int, deadline_s: float
    ) -> int:
        """Wait for all ranks and return the communicator.

        Raises CudaError where one does not come in time, or where two ranks have one GPU.
        """

    def collective_later(self, call: RunCollective, stream: int) -> None:
        """Put a call on a stream, which goes on when all ranks have done their part."""

    def check_communicator(self, communicator: int) -> None:
        """Raise CudaError where a call that was put on a stream has failed; never blocks."""

    def abort_communicator(self, communicator: int) -> None:
        """Let the streams go on that wait for other ranks; what they leave means nothing.

        Never blocks. Nothing is put on a stream by this communicator afterwards.
        """


class DriverGraphs(Protocol):
    """Captures of a stream, as graphs that are launched at once."""

    def begin_capture(self, stream: int) -> None:
        """Record from here on what this thread puts on a stream."""

    def end_capture(self, stream: int) -> int:
        """Return what was recorded as a graph that can be launched."""

    def graph_later(self, graph: int, stream: int) -> None:
        """Run a graph."""


class CudaDriver(
    DriverMemory,
    DriverStreams,
    DriverKernels,
    DriverLibraries,
    DriverCollectives,
    DriverGraphs,
    Protocol,
):
    """One GPU. Any thread may wait (`synchronize_event`, `synchronize`) or free memory.

    For all else one thread uses a driver at a time: the one that loads a plan, then the dispatcher,
    which runs all actors of devices. Those of the host have threads of their own, which only wait.
    """

    def seen(self) -> DeviceProperties:
        """Return what the GPU is."""

    def close(self) -> None:
        """Give everything back; nothing may be asked for afterwards."""


# cudaErrorMemoryAllocation, and CUDA_ERROR_OUT_OF_MEMORY of the driver.
OUT_OF_MEMORY = 2

STICKY: Mapping[int, str] = MappingProxyType(
    {
        214: "its memory has an error that cannot be corrected",
        700: "a kernel addressed memory that is not its own",
        702: "a kernel ran longer than this GPU lets one run",
        710: "an assertion of a kernel failed",
        714: "the stack of a kernel is damaged",
        715: "a kernel came to an illegal instruction",
        716: "a kernel read or wrote at a misaligned address",
        717: "a kernel used an address of another kind of memory",
        718: "a kernel left its program",
        719: "a kernel failed",
    }
)
"""Codes with which the context of the process is dead: every later call gives them, too."""

# cudaErrorStreamCapture...: what may not happen while a stream is captured.
_CAPTURE = range(900, 909)
_LIBRARIES = ("cublas", "cudnn", "nvrtc", "nccl")
"""How names of calls begin whose codes are not CUDA's."""


def is_of_library(error: CudaError) -> bool:
    """Whether a library above CUDA raised it; another algorithm may then work."""
    return error.call.lower().startswith(_LIBRARIES)


def is_out_of_memory(error: CudaError) -> bool:
    """Whether the GPU had too little memory left."""
    return not is_of_library(error) and error.code == OUT_OF_MEMORY


def forked(device: str) -> DeviceError:
    """Return what to raise in a child, forked from a process with CUDA, that opens a GPU itself."""
    return DeviceError(
        f"{device} cannot be opened in process {os.getpid()}: it was forked from a process that"
        " uses CUDA, and CUDA does not support fork. Start the process with multiprocessing's"
        " 'spawn'"
    )


def absent(device: str, count: int) -> DeviceError:
    """Return what to raise for a GPU beyond the last of those that are here."""
    return DeviceError(f"there is no {device} here, but {count} GPUs, counted from 0")


def explained(error: CudaError, device: Device) -> ActorflowError:
    """Return what to raise for a call that failed while a plan was loaded or memory was read."""
    if is_out_of_memory(error):
        return OutOfMemory(
            f"{device} has no memory left for what CUDA itself needs ({error.call}): kernels and"
            " graphs need memory besides the arenas of the plan; set a smaller memory budget or"
            " batch"
        )
    if not is_of_library(error) and error.code in _CAPTURE:
        return InternalError(f"a chain cannot be captured on {device}: {_words(error)}")
    # Libraries number their errors themselves: 700 of theirs is no 700 of CUDA's.
    if not is_of_library(error) and error.code in STICKY:
        return fault_of(error, device)
    return DeviceError(f"{device} refuses a call: {_words(error)}")


def fault_of(
    error: CudaError,
    device: Device,
    *,
    stream: DeviceStream | None = None,
    launch: int | None = None,
) -> DeviceFault:
    """Return the fault of work that was put on a stream.

    Its cause is the error; `launch` is by its number on the stream, None where it can be any.
    """
    if not is_of_library(error) and error.code in STICKY:
        text = (
            f"{device} failed: {STICKY[error.code]} ({_words(error)}). CUDA takes no further call"
            " of this process, which must be started again, from its newest checkpoint"
        )
    else:
        text = f"{device} failed: {_words(error)}"
    if launch is None:
        text += "; ACTORFLOW_SYNC=1 runs launch by launch, and names the one that fails"
    fault = DeviceFault(text, stream=stream, launch=launch)
    fault.__cause__ = error
    return fault


def fault_by(error: Exception, device: Device) -> DeviceFault:
    """Return the fault of a device that was given up because another rank failed: its cause."""
    fault = DeviceFault(f"{device} was given up: {error}")
    fault.__cause__ = error
    return fault


def _words(error: CudaError) -> str:
    return f"{error.call} gave {error.code}: {error}"
