"""Whether the GPUs of this machine can run a plan: asked before anything of theirs is loaded."""

from __future__ import annotations

import importlib.util
import os

from actorflow.compile.gpus import OLDEST_CUDA, gpu_of, is_cuda
from actorflow.logs import logger
from actorflow.settings import Settings
from actors.device.cuda.nvml import GpuListed, Listing, listed_gpus
from actors.kernels.cuda.gpu import Gpu, gpu_named, known_gpus
from compiler.errors import DeviceError, OutOfMemory, PlanFormatError
from compiler.placement import Device
from compiler.plan import Plan
from memory.report import format_bytes

_EMULATED = "ACTORFLOW_CUDA=emulated runs it on the host, slowly"


def check_gpus(plan: Plan, settings: Settings) -> None:
    """Refuse a plan for CUDA devices that are not here, or are others than it was made for.

    Raises PlanFormatError, DeviceError or OutOfMemory. Nothing to do for any other plan.
    """
    devices = [*[s.device for s in plan.streams], *[a.device for a in plan.arenas]]
    wanted = tuple(dict.fromkeys([device for device in devices if is_cuda(device)]))
    if not wanted:
        return
    name = gpu_of(plan)
    if name not in known_gpus():
        raise PlanFormatError(
            f"plan {plan.name!r} was compiled for a GPU called {name!r}, and there are descriptions"
            f" of {', '.join(known_gpus())} here; compile the job again"
        )
    if settings.cuda_emulated:
        return
    here = listed_gpus(os.environ)
    _check_driver(plan, wanted, here)
    for device in wanted:
        _check_gpu(plan, device, gpu_named(name), here.gpus[device.index])


def _check_driver(plan: Plan, wanted: tuple[Device, ...], here: Listing) -> None:
    what = f"plan {plan.name!r} runs on {', '.join(map(str, wanted))}, and"
    beyond = [str(device) for device in wanted if device.index >= len(here.gpus)]
    if here.problem or beyond:
        problem = here.problem or f"there is no {', '.join(beyond)}, but {len(here.gpus)} GPUs"
        raise DeviceError(f"{what} {problem}. Run it where its GPU is; {_EMULATED}")
    if here.cuda < OLDEST_CUDA:
        raise DeviceError(
            f"{what} the NVIDIA driver here, {here.driver}, serves CUDA {_dotted(here.cuda)} at"
            f" most; {_dotted(OLDEST_CUDA)} is needed: install a driver of version 580 or later;"
            f" {_EMULATED}"
        )
    if importlib.util.find_spec("cupy") is None:
        raise DeviceError(
            f"{what} the package cupy is missing, through which the driver is asked: python -m pip"
            f" install 'actorflow[cuda]'; {_EMULATED}"
        )


def _check_gpu(plan: Plan, device: Device, planned: Gpu, seen: GpuListed) -> None:
    what = f"plan {plan.name!r} was compiled for {planned.says}, and {device} is {seen.name}"
    if seen.capability != planned.capability:
        raise DeviceError(
            f"{what}: its kernels are built for compute capability {_dotted(planned.capability)},"
            f" and it has {_dotted(seen.capability)}; compile the job here"
        )
    needed = sum([a.size_bytes for a in plan.arenas if a.place == device.place])
    if needed > seen.memory_bytes:
        raise OutOfMemory(
            f"{what}: it needs {format_bytes(needed)} there, and the GPU has"
            f" {format_bytes(seen.memory_bytes)}; compile the job with a smaller batch or a"
            " memory_budget"
        )
    if seen.name != planned.says:
        logger.warning("%s: results are the same, and it may be slower than it could be", what)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
