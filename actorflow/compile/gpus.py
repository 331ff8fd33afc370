"""Which GPU a job on CUDA is planned for: one that is named, or the one that is here.

A plan needs a description of the GPU (`actors.kernels.cuda.gpu`), and no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from difflib import get_close_matches

from actorflow.settings import Settings
from actors.device.cuda import cudnn
from actors.device.cuda.nvml import GpuListed, listed_gpus
from actors.kernels.cuda.catalogue import is_with_cudnn
from actors.kernels.cuda.gpu import Gpu, gpu_named, known_gpus
from compiler.errors import CompileError
from compiler.placement import Device, DeviceKind
from compiler.plan import Plan

EMULATED = "h200"
"""What the host acts as under ACTORFLOW_CUDA=emulated, where nothing else is named."""

_HOW = '@af.job(device="cuda", gpu="{0}"), --gpu {0} or ACTORFLOW_GPU={0}'


def is_cuda(device: Device) -> bool:
    """Whether a device is a GPU."""
    return device.kind is DeviceKind.CUDA


def gpu_called(name: str, said: str = "") -> Gpu:
    """Return the description of a GPU by the user's name for it.

    `said` is what it was given by, such as "--gpu", where nobody else says that. Raises
    CompileError, which names the nearest and those that there are.
    """
    known = known_gpus()
    if name.lower() in known:
        return gpu_named(name.lower())
    near = get_close_matches(name.lower(), known, 1)
    hint = f"did you mean {near[0]!r}? There" if near else "there"
    where = f"{said}: " if said else ""
    raise CompileError(
        f"{where}no GPU is called {name!r}; {hint} are descriptions of"
        f" {', '.join(known)} (actors/kernels/cuda/*.json)"
    )


def check_gpu(named: object, devices: Sequence[Device], option: str = "") -> None:
    """Check what a job says of its GPU; `devices` may be left open, and then there are none.

    `option` is that of the command line where the name comes from one. Raises CompileError.
    """
    if not isinstance(named, str):
        raise CompileError(f'gpu must be a name such as "h200", got {named!r}')
    gpu_called(named, option)
    if devices and not any([is_cuda(device) for device in devices]):
        given = f"{option} {named}" if option else f"gpu={named!r}"
        raise CompileError(
            f"{given} is given, and it runs on {', '.join(map(str, devices))}, no GPU;"
            ' give device="cuda", --device cuda or ACTORFLOW_DEVICE=cuda, or leave gpu out'
        )


def gpu_for(devices: Sequence[Device], named: str | None, settings: Settings) -> str:
    """Return the name of the GPU that a job's CUDA devices are planned as; "" without any.

    It is the one `named` by the job, else that of ACTORFLOW_GPU, else the one that is here. Raises
    CompileError, which says how to name one, where that is not known.
    """
    if named is not None:
        check_gpu(named, devices)
    ours = [device for device in devices if is_cuda(device)]
    if not ours:
        return ""
    acted = [device for device in devices if device.kind is DeviceKind.SIM]
    if acted:
        raise CompileError(
            f"it runs on {ours[0]} and on {acted[0]}, which is simulated, and a GPU copies from and"
            " to none of those; name GPUs and the host, or simulated devices and the host"
        )
    if named is not None:
        return gpu_called(named).name
    if settings.gpu:
        return gpu_called(settings.gpu, "ACTORFLOW_GPU").name
    if settings.emulated_gpus:
        return EMULATED
    return _gpu_here(ours[0]).name


def _gpu_here(device: Device) -> Gpu:
    here = listed_gpus(os.environ)
    if here.problem or device.index >= len(here.gpus):
        problem = here.problem or f"there are {len(here.gpus)} GPUs, counted from 0"
        raise CompileError(
            f"which GPU {device} is must be known to compile for it, and {problem}. Name it:"
            f" {_HOW.format(EMULATED)}; there are descriptions of {', '.join(known_gpus())}. Plans"
            " can be made, printed and simulated without a GPU, and ACTORFLOW_CUDA=emulated runs"
            " them on the host, slowly"
        )
    return described(here.gpus[device.index])


def described(seen: GpuListed) -> Gpu:
    """Return the description of a GPU that is here. Raises CompileError where there is none."""
    known = [gpu_named(name) for name in known_gpus()]
    for gpu in known:
        if gpu.says == seen.name:
            return gpu
    alike = [gpu.name for gpu in known if gpu.capability == seen.capability]
    mend = (
        f"plan for one with the same instructions: {_HOW.format(alike[0])}"
        if alike
        else "add one (actors/kernels/cuda/*.json)"
    )
    raise CompileError(
        f"the GPU here is {seen.name!r} (compute capability {dotted(seen.capability)}), and there"
        f" is no description of it, but of {', '.join([gpu.says for gpu in known])}; {mend}"
    )


def is_cudnn_wanted(settings: Settings) -> bool:
    """Whether plans for a GPU use cuDNN: as the settings say, else where it is installed."""
    return cudnn.can_run() if settings.cudnn is None else settings.cudnn


def has_cudnn(plan: Plan) -> bool:
    """Whether a plan was compiled for a GPU with cuDNN."""
    return is_with_cudnn(plan.target)


def gpu_of(plan: Plan) -> str:
    """Return the name of the GPU that a plan was compiled for; "" for one without CUDA devices."""
    return str(plan.option("gpu", ""))


def dotted(version: tuple[int, int]) -> str:
    """Return a version, or a compute capability, as it is written: 9.0."""
    return f"{version[0]}.{version[1]}"
