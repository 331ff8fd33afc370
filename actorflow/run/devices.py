"""The devices of this process that a plan runs on, opened for one run."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from actorflow.compile.gpus import gpu_of
from actorflow.compile.native import is_native
from actorflow.settings import Settings
from actors.device.host import HostDevice
from actors.device.poison import poison
from actors.device.protocol import OpenDevice
from actors.device.schedule import LateSchedule
from actors.device.simulated import SimulatedDevice
from actors.kernels import catalogue
from actors.kernels.library import openblas
from compiler.placement import Device, DeviceKind
from compiler.plan import Plan


def open_devices(plan: Plan, settings: Settings) -> tuple[OpenDevice, ...]:
    """Return the host, and every other device that a plan names.

    Those that the host acts, simulated and emulated ones, share one schedule. With the log level
    DEBUG the host makes launches one by one. Raises DeviceError where a device cannot be opened.
    """
    kernels = catalogue.binders()
    schedule = LateSchedule(Random(settings.sim_seed))
    simulated = [
        SimulatedDevice(schedule, kernels, index) for index in _indices(plan, DeviceKind.SIM)
    ]
    host = HostDevice(kernels, joins=settings.log_level != "DEBUG")
    gpus = _indices(plan, DeviceKind.CUDA)
    if not gpus:
        return host, *simulated
    from actorflow.run.open_gpus import open_gpus  # and all that speaks to CUDA, for who has it

    return host, *simulated, *open_gpus(plan, gpus, settings, schedule)


def as_run(plan: Plan, settings: Settings) -> Plan:
    """Return what is loaded: where the host acts a device, bytes that nobody may need are poisoned.

    A right plan gives the same bits with it, so that whoever runs there has a proof.
    """
    acted = [DeviceKind.SIM, *([DeviceKind.CUDA] if settings.emulated_gpus else [])]
    return poison(plan, acted) if any([_indices(plan, kind) for kind in acted]) else plan


def devices_of(plan: Plan) -> tuple[Device, ...]:
    """Return what a plan computes on, in the order that it was compiled for."""
    return tuple([a.device for a in plan.arenas if a.place == a.device.place])


def _indices(plan: Plan, kind: DeviceKind) -> tuple[int, ...]:
    """Return the numbers of the devices of a kind in a plan, in order."""
    devices = [*[s.device for s in plan.streams], *[a.device for a in plan.arenas]]
    return tuple(sorted({d.index for d in devices if d.kind is kind}))


def said_of(plan: Plan, settings: Settings) -> str:
    """Return what is worth saying of a run's devices first of all; nothing where all is real.

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


def share_cores(plan: Plan, settings: Settings, warn: Callable[[str], object]) -> None:
    """Set the threads of numpy's BLAS."""
    if is_native(plan):
        # Two pools of threads fight for the cores: numpy multiplies on one thread then.
        openblas.use_one_thread()
    elif not openblas.use_threads(settings.threads) and settings.threads is not None:
        warn("ACTORFLOW_THREADS has no effect: numpy's BLAS is not one whose threads can be set")
