"""The GPUs of a plan, opened for one run: those that are here, or the host acting as such."""

from __future__ import annotations

from collections.abc import Sequence

from actorflow.compile.gpus import gpu_of
from actorflow.compile.native import toolchain_of
from actorflow.settings import Settings
from actors.device.cuda.cupy_driver import CupyDriver
from actors.device.cuda.device import CudaDevice
from actors.device.cuda.driver import CudaDriver
from actors.device.emulated.driver import EmulatedCuda, EmulatedDriver
from actors.device.poison import CUDA_POISON_KERNELS
from actors.device.schedule import LateSchedule
from actors.kernels.cuda import catalogue
from actors.kernels.cuda.gpu import gpu_named
from actors.kernels.cuda.kernel import CudaKernel
from actors.kernels.native.toolchain import Toolchain
from compiler.errors import DeviceError
from compiler.plan import Plan


def open_gpus(
    plan: Plan, indices: Sequence[int], settings: Settings, schedule: LateSchedule
) -> list[CudaDevice]:
    """Return a plan's CUDA devices by their numbers, with kernels of the GPU that it is for.

    Where the settings say so the host acts them, late as the schedule is. Raises DeviceError.
    """
    gpu, is_deterministic = gpu_of(plan), bool(plan.option("deterministic", False))
    kernels: dict[str, CudaKernel] = {**catalogue.binders(gpu)}
    drivers: list[CudaDriver]
    if settings.cuda_emulated:
        kernels |= CUDA_POISON_KERNELS
        toolchain, cuda = _toolchain(settings), EmulatedCuda(schedule)
        acted, seed = gpu_named(gpu), settings.sim_seed
        drivers = [EmulatedDriver(cuda, toolchain, acted, index, seed=seed) for index in indices]
    else:
        folder = None if settings.cache is None else settings.cache / "cuda"
        drivers = [CupyDriver(index, folder) for index in indices]
    return [
        CudaDevice(
            driver,
            kernels,
            index,
            is_stepwise=settings.sync,
            is_deterministic=is_deterministic,
        )
        for driver, index in zip(drivers, indices, strict=True)
    ]


def _toolchain(settings: Settings) -> Toolchain:
    toolchain = toolchain_of(settings)
    if toolchain is None:
        raise DeviceError(
            "ACTORFLOW_CUDA=emulated builds kernels for the host, and there is no C compiler (cc,"
            " gcc or clang) on the PATH; install one, or name it in CC"
        )
    return toolchain
