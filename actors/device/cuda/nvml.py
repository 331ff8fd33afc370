"""What GPUs are here, asked of NVIDIA's management library, which makes no context on them.

The driver itself may not be asked before a run begins: a process that has asked it cannot be
forked any more, and planning must not take that away.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96


@dataclass(frozen=True, slots=True)
class NvmlDevice:
    """A GPU of this machine, by what its driver calls it."""

    name: str
    uuid: str
    capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class NvmlDevices:
    """The GPUs that a process may use, in order, and their driver.

    `cuda` is the newest version of CUDA that the driver serves, as (13, 0). `problem` says why
    there are none; it is empty where there are some.
    """

    gpus: tuple[NvmlDevice, ...] = ()
    driver: str = ""
    cuda: tuple[int, int] = (0, 0)
    problem: str = ""


class _MemoryInfo(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _NvmlError(Exception):
    """A call of the library failed; the text says which, and with what."""


def listed_gpus(
    environ: Mapping[str, str], load: Callable[[str], Any] = ctypes.CDLL
) -> NvmlDevices:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves to this process; `load` opens a library.

    Never raises: what is missing is said in the answer.
    """
    try:
        library = load(_LIBRARY)
    except OSError:
        return NvmlDevices(problem=f"no NVIDIA driver is here: there is no {_LIBRARY}")
    try:
        _call(library, "nvmlInit_v2")
    except _NvmlError as error:
        return NvmlDevices(problem=f"the NVIDIA driver does not answer: {error}")
    try:
        return _asked(library, environ)
    except _NvmlError as error:
        return NvmlDevices(problem=f"the NVIDIA driver does not say which GPUs there are: {error}")
    finally:
        library.nvmlShutdown()


def _asked(library: Any, environ: Mapping[str, str]) -> NvmlDevices:
    version, count = ctypes.c_int(), ctypes.c_uint()
    driver = _text(library, "nvmlSystemGetDriverVersion")
    _call(library, "nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(version))
    _call(library, "nvmlDeviceGetCount_v2", ctypes.byref(count))
    visible = _visible([_gpu(library, number) for number in range(count.value)], environ)
    problem = "" if visible else "the NVIDIA driver has no GPU"
    if count.value and not visible:
        setting = environ.get("CUDA_VISIBLE_DEVICES")
        problem = f"CUDA_VISIBLE_DEVICES={setting} hides all of {count.value} GPUs"
    # 13020 is CUDA 13.2.
    cuda = (version.value // 1000, version.value % 1000 // 10)
    return NvmlDevices(tuple(visible), driver, cuda, problem)


def _gpu(library: Any, number: int) -> NvmlDevice:
    handle, memory = ctypes.c_void_p(), _MemoryInfo()
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call(library, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(number), ctypes.byref(handle))
    _call(library, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    capability = (ctypes.byref(major), ctypes.byref(minor))
    _call(library, "nvmlDeviceGetCudaComputeCapability", handle, *capability)
    name = _text(library, "nvmlDeviceGetName", handle)
    uuid = _text(library, "nvmlDeviceGetUUID", handle)
    return NvmlDevice(name, uuid, (major.value, minor.value), memory.total)


def _visible(gpus: list[NvmlDevice], environ: Mapping[str, str]) -> list[NvmlDevice]:
    """Return what CUDA would show: entries in their order, up to the first that means nothing."""
    setting = environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return gpus
    visible: list[NvmlDevice] = []
    for entry in setting.split(","):
        gpu = _named(entry.strip(), gpus)
        # As CUDA itself does: an entry that names no GPU hides it and all that follow.
        if gpu is None:
            break
        visible.append(gpu)
    return visible


def _named(entry: str, gpus: list[NvmlDevice]) -> NvmlDevice | None:
    if re.fullmatch("[0-9]+", entry):
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    # CUDA takes the beginning of a UUID where it is unique.
    matching = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _text(library: Any, name: str, *arguments: Any) -> str:
    room = ctypes.create_string_buffer(_TEXT_BYTES)
    _call(library, name, *arguments, room, ctypes.c_uint(_TEXT_BYTES))
    return room.value.decode("ascii", "replace")


def _call(library: Any, name: str, *arguments: Any) -> None:
    code = getattr(library, name)(*arguments)
    if code:
        raise _NvmlError(f"{name} returned {code}")
