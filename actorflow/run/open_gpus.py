"""The GPUs of a plan, opened for one run: those that are here, or the host acting as such."""

from __future__ import annotations

import os
from collections.abc import Sequence

from actorflow.environment.host import dotted, gpu_called, gpu_of
from actorflow.environment.native import toolchain_of
from actorflow.environment.settings import Settings, logger
from actors.device.cuda import cudnn
from actors.device.cuda.cupy_driver import CupyDriver
from actors.device.cuda.device import CudaDevice
from actors.device.cuda.driver import CudaDriver, DeviceProperties
from actors.device.cuda.memory import StatusReports
from actors.device.cuda.nvml import listed_gpus
from actors.kernels.cuda import catalogue
from actors.kernels.cuda.cudnn_library import CUDNN, oldest_for
from actors.kernels.cuda.kernel import CudaKernel, Gpu, gpu_named
from actors.kernels.library.toolchain import Toolchain
from actors.testing.emulated.driver import EmulatedCuda, EmulatedDriver
from actors.testing.simulated import CUDA_POISON_KERNELS, LateSchedule
from compiler.contract.errors import DeviceError, OutOfMemory
from compiler.contract.placement import Device, DeviceKind
from compiler.contract.plan import Plan
from memory.report import format_bytes


def open_gpus(
    plan: Plan,
    indices: Sequence[int],
    settings: Settings,
    schedule: LateSchedule,
    local_rank: int = 0,
) -> list[CudaDevice]:
    """Return a plan's CUDA devices by their numbers, with kernels of the GPU that it is for.

    All ranks may have one plan, whose cuda:0 is another GPU on each: as many as a plan names, up to
    the highest number, are for the first rank of a host, and so on. Where the settings say so the
    host acts them, late as the schedule is. Raises DeviceError where one cannot be opened or is of
    another kind than the plan is for, OutOfMemory for one too small.
    """
    gpu, is_deterministic = gpu_of(plan), bool(plan.option("deterministic", False))
    kernels: dict[str, CudaKernel] = {**catalogue.kernels_by_name(gpu)}
    first = local_rank * (max(indices) + 1)
    numbers = [first + index for index in indices]
    if settings.emulated_gpus:
        kernels |= CUDA_POISON_KERNELS
    try:
        drivers = _drivers(plan, numbers, settings, schedule)
    except DeviceError as error:
        if not local_rank:
            raise
        raise DeviceError(
            f"rank {local_rank} of its host needs GPUs of its own, and its"
            f" {Device(DeviceKind.CUDA, indices[0])} is number {numbers[0]} of those here: {error}"
        ) from error
    if settings.gpu or not settings.emulated_gpus:
        for index, driver in zip(indices, drivers, strict=True):
            _check_planned(plan, Device(DeviceKind.CUDA, index), gpu_named(gpu), driver.seen())
    reports = StatusReports()
    return [
        CudaDevice(
            driver,
            kernels,
            index,
            is_stepwise=settings.sync,
            is_deterministic=is_deterministic,
            reports=reports,
        )
        for driver, index in zip(drivers, indices, strict=True)
    ]


def _drivers(
    plan: Plan, numbers: Sequence[int], settings: Settings, schedule: LateSchedule
) -> list[CudaDriver]:
    """Return the drivers of GPUs by their numbers here."""
    if not settings.emulated_gpus:
        _check_packages(plan)
        return _real_drivers(plan, numbers, settings)
    toolchain, cuda = _toolchain(settings), EmulatedCuda(schedule, settings.emulated_gpus)
    # Whoever names a GPU wants to see what would happen there, be the plan for it or not.
    acted = gpu_called(settings.gpu, "ACTORFLOW_GPU") if settings.gpu else gpu_named(gpu_of(plan))
    seed = settings.sim_seed
    return [EmulatedDriver(cuda, toolchain, acted, number, seed=seed) for number in numbers]


def _toolchain(settings: Settings) -> Toolchain:
    toolchain = toolchain_of(settings)
    if toolchain is None:
        raise DeviceError(
            "ACTORFLOW_CUDA=emulated builds kernels for the host, and there is no C compiler (cc,"
            " gcc or clang) on the PATH; install one, or name it in CC"
        )
    return toolchain


def _check_packages(plan: Plan) -> None:
    """Refuse a plan that needs cuDNN where that is not."""
    kernels = [launch.kernel for actor in plan.actors for launch in actor.launches]
    names = tuple(dict.fromkeys([k for k in kernels if k.startswith(CUDNN)]))
    missing = cudnn.why_not(oldest_for(names)) if names else ""
    if missing:
        raise DeviceError(
            f"plan {plan.name!r} was compiled for a GPU with cuDNN ({', '.join(names)}), and here"
            f" {missing}: {cudnn.INSTALL}"
        )


def _real_drivers(plan: Plan, indices: Sequence[int], settings: Settings) -> list[CudaDriver]:
    folder = None if settings.cache is None else settings.cache / "cuda"
    try:
        return [CupyDriver(index, folder) for index in indices]
    except DeviceError as error:
        # Whoever has no GPU needs no package either.
        problem = listed_gpus(os.environ).problem or str(error)
        raise DeviceError(
            f"plan {plan.name!r} cannot run on a GPU here: {problem}. Run it where its GPU is;"
            " ACTORFLOW_CUDA=emulated runs it on the host, slowly"
        ) from error


def _check_planned(plan: Plan, device: Device, planned: Gpu, seen: DeviceProperties) -> None:
    """Hold the GPU that is here against the one that the plan was made for."""
    what = f"plan {plan.name!r} was compiled for {planned.says}, and {device} is {seen.name}"
    if seen.capability != planned.capability:
        raise DeviceError(
            f"{what}: its kernels are built for compute capability {dotted(planned.capability)},"
            f" and this GPU has {dotted(seen.capability)}; compile the job here"
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
