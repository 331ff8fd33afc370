"""What the driver's errors mean: a machine's limit, a bug of ours, or the end of a process.

Source: CUDA Runtime API, error codes of cudaError_t.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

from actors.device.cuda.driver import CudaError
from actors.device.protocol import DeviceFault, DeviceStream
from compiler.errors import ActorflowError, DeviceError, InternalError, OutOfMemory
from compiler.placement import Device

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

_CAPTURE = range(900, 909)
_LIBRARIES = ("cublas", "cudnn", "nvrtc")
"""How names of calls begin whose codes are not CUDA's."""


def is_of_library(error: CudaError) -> bool:
    """Whether a library above CUDA gave it: what it refuses, another way may compute."""
    return error.call.lower().startswith(_LIBRARIES)


def is_out_of_memory(error: CudaError) -> bool:
    """Whether the GPU had not the bytes."""
    return not is_of_library(error) and error.code == OUT_OF_MEMORY


def forked(device: str) -> DeviceError:
    """Return what to raise in a child, forked from a process with CUDA, that opens a GPU itself."""
    return DeviceError(
        f"{device} cannot be opened in process {os.getpid()}: it was forked from one that uses"
        " CUDA, which does not survive that. Start the process with multiprocessing's 'spawn'"
    )


def absent(device: str, count: int) -> DeviceError:
    """Return what to raise for a GPU beyond the last of those that are here."""
    return DeviceError(f"there is no {device} here, but {count} GPUs, counted from 0")


def explained(error: CudaError, device: Device) -> ActorflowError:
    """Return what to raise for a call that failed while a plan was loaded or memory was read."""
    if is_out_of_memory(error):
        return OutOfMemory(
            f"{device} has no memory left for what CUDA itself needs ({error.call}): kernels and"
            " graphs lie beside the plan's arenas; set a smaller memory budget or batch"
        )
    if not is_of_library(error) and error.code in _CAPTURE:
        return InternalError(f"a chain cannot be captured on {device}: {_words(error)}")
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


def _words(error: CudaError) -> str:
    return f"{error.call} gave {error.code}: {error}"
