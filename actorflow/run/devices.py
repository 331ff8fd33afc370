"""The devices of this process that a plan runs on, opened for one run.

`verify_and_build` says before whether the plan may run here (its ranks, kernels and proof), and
builds its kernels.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

from actorflow.compile.extensions import load_plugins
from actorflow.compile.hardware import hardware_for
from actorflow.compile.prove import prove
from actorflow.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from actorflow.environment.host import cudnn_of, gpu_of, is_cuda
from actorflow.environment.native import NATIVE, build, is_native, kernel_choice_lock
from actorflow.environment.settings import Settings, logger
from actors.device.host import HostDevice
from actors.kernels.host import catalogue
from actors.kernels.library import openblas
from actors.machine.protocol import OpenDevice
from compiler.contract.errors import CompileError, PlanFormatError
from compiler.contract.placement import Device, DeviceKind
from compiler.contract.plan import Plan


def open_devices(
    plan: Plan, settings: Settings, rank: int = 0, local_rank: int = 0
) -> tuple[OpenDevice, ...]:
    """Return the host, and every other device that a plan names.

    Each rank of a host has GPUs of its own: the first ones are of that with `local_rank` 0. Those
    that the host acts, simulated and emulated ones, share one schedule. With the log level
    DEBUG the host makes launches one by one. Raises DeviceError where a device cannot be opened.
    """
    kernels = catalogue.kernels_by_name()
    host = HostDevice(kernels, joins=settings.log_level != "DEBUG")
    sims, gpus = [_indices(plan, kind) for kind in (DeviceKind.SIM, DeviceKind.CUDA)]
    if not sims and not gpus:
        return (host,)
    from actors.testing.simulated import LateSchedule, SimulatedDevice

    schedule = LateSchedule(Random(settings.sim_seed + rank))
    simulated = [SimulatedDevice(schedule, kernels, index) for index in sims]
    if not gpus:
        return host, *simulated
    from actorflow.run.open_gpus import open_gpus  # and all that speaks to CUDA, for who has it

    return host, *simulated, *open_gpus(plan, gpus, settings, schedule, local_rank)


def with_poison(plan: Plan, settings: Settings) -> Plan:
    """Return the plan to load: on a device that the host emulates, unused bytes are poisoned.

    A right plan gives the same bits with it, so that whoever runs there has a proof.
    """
    acted = [DeviceKind.SIM, *([DeviceKind.CUDA] if settings.emulated_gpus else [])]
    if not any([_indices(plan, kind) for kind in acted]):
        return plan
    from actors.testing.simulated import poison

    return poison(plan, acted)


def devices_of(plan: Plan) -> tuple[Device, ...]:
    """Return what a plan computes on, in the order that it was compiled for."""
    return tuple([a.device for a in plan.arenas if a.place == a.device.place])


def _indices(plan: Plan, kind: DeviceKind) -> tuple[int, ...]:
    """Return the numbers of the devices of a kind in a plan, in order."""
    devices = [*[s.device for s in plan.streams], *[a.device for a in plan.arenas]]
    return tuple(sorted({d.index for d in devices if d.kind is kind}))


def device_notice(plan: Plan, settings: Settings) -> str:
    """Return a notice if devices of a run are simulated or emulated; "" if all are real.

    Whoever sees wrong numbers there needs the seed to see them again.
    """
    simulated = [f"sim:{index}" for index in _indices(plan, DeviceKind.SIM)]
    names = [f"the simulated device {', '.join(simulated)}"] if simulated else []
    if settings.emulated_gpus:
        gpus = _indices(plan, DeviceKind.CUDA)
        acted = settings.gpu.lower() or gpu_of(plan)
        names += [f"cuda:{index}, emulated by the host as {acted}" for index in gpus]
    if not names:
        return ""
    return (
        f"plan {plan.name!r} runs on {', '.join(names)}, late as"
        f" ACTORFLOW_SIM_SEED={settings.sim_seed} makes it: no measure of speed"
    )


def set_blas_threads(plan: Plan, settings: Settings, warn: Callable[[str], object]) -> None:
    """Set the threads of numpy's BLAS."""
    if is_native(plan):
        # Two pools of threads fight for the cores: numpy multiplies on one thread then.
        openblas.use_one_thread()
    elif not openblas.use_threads(settings.threads) and settings.threads is not None:
        warn("ACTORFLOW_THREADS has no effect: numpy's BLAS is not one whose threads can be set")


_VERSION = re.compile(r"\b(?:host|cuda)-\d+")
"""What of a fingerprint says which kernels there are; the rest is with what they were built."""


def verify_and_build(plan: Plan, settings: Settings, group: ProcessGroup = SINGLE_PROCESS) -> None:
    """Prove a plan and build its kernels.

    Only ranks that are among others run a plan of several.
    Raises CompileError, OutOfMemory or PlanFormatError where it cannot run here.
    """
    if group is SINGLE_PROCESS:
        _check_ranks(plan)
    _check_gpu(plan)
    load_plugins()  # the ops and kernels of a plan from a file may be theirs
    with kernel_choice_lock(settings, devices_of(plan), deterministic=False) as is_on:
        _check_target(plan, is_native=is_on)
        # Proven before anything is built: what a C compiler gets comes from a file.
        prove(plan)
        _build(plan)


def _check_ranks(plan: Plan) -> None:
    mesh = plan.mesh
    if mesh.num_ranks > 1:
        raise CompileError(
            f"plan {plan.name!r} is for one of {mesh.num_ranks} ranks (mesh {mesh}), and this"
            " process has no other ranks: call the job in a script that 'actorflow launch -n"
            f" {mesh.num_ranks}' starts, or compile the job without mesh. A plan of one rank can"
            " be printed, and simulated ('actorflow simulate')"
        )


def _check_gpu(plan: Plan) -> None:
    """Refuse a plan for a GPU that nobody described here; the one that is here is asked later."""
    name = gpu_of(plan)
    devices = [*[a.device for a in plan.arenas], *[s.device for s in plan.streams]]
    if not any([is_cuda(device) for device in devices]):
        return
    from actors.kernels.cuda.kernel import known_gpus  # late: a plan of the host loads none

    if name not in known_gpus():
        raise PlanFormatError(
            f"plan {plan.name!r} was compiled for a GPU called {name!r}, and there are descriptions"
            f" of {', '.join(known_gpus())} here; compile the job again"
        )


def _check_target(plan: Plan, *, is_native: bool) -> None:
    """Refuse a plan that was made for other kernels than this machine has."""
    names = dict.fromkeys([launch.kernel for actor in plan.actors for launch in actor.launches])
    native = [name for name in names if name.startswith(NATIVE)]
    if native and not is_native:
        raise PlanFormatError(
            f"plan {plan.name!r} was compiled for native kernels ({', '.join(native)}), and here"
            " is no C compiler, or ACTORFLOW_NATIVE=0 forbids them; compile the job again"
        )
    devices, gpu, there = devices_of(plan), gpu_of(plan), plan.target
    here = hardware_for(devices, gpu, cudnn_of(plan)).fingerprint
    if _VERSION.findall(here) != _VERSION.findall(there):
        raise PlanFormatError(
            f"plan {plan.name!r} was compiled for kernels {there!r}, this actorflow has {here!r};"
            " compile the job again"
        )
    if here != there:
        logger.warning(
            "plan %r was compiled with %s and runs with %s: results may differ in their last bits",
            plan.name,
            there,
            here,
        )


def _build(plan: Plan) -> None:
    """Build the native kernels of a plan, once it is proven that there is nothing else in them."""
    if not build(plan):
        raise PlanFormatError(
            f"the C compiler of this machine refuses what plan {plan.name!r} needs (the log has its"
            " words); compile the job again, and numpy's kernels take its place"
        )
