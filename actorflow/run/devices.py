"""The devices of this process that a plan runs on, opened for one run."""

from __future__ import annotations

from random import Random

from actorflow.settings import Settings
from actors.device.host import HostDevice
from actors.device.poison import poison
from actors.device.protocol import OpenDevice
from actors.device.schedule import LateSchedule
from actors.device.simulated import SimulatedDevice
from actors.kernels import catalogue
from compiler.placement import Device, DeviceKind
from compiler.plan import Plan


def open_devices(plan: Plan, settings: Settings) -> tuple[OpenDevice, ...]:
    """Return the host, and every simulated device that a plan names; those share one schedule.

    With the log level DEBUG the host makes launches one by one.
    """
    kernels = catalogue.binders()
    schedule = LateSchedule(Random(settings.sim_seed))
    simulated = [SimulatedDevice(schedule, kernels, index) for index in simulated_in(plan)]
    return HostDevice(kernels, joins=settings.log_level != "DEBUG"), *simulated


def as_run(plan: Plan) -> Plan:
    """Return what is loaded: on simulated devices, with bytes that nobody may need scribbled over.

    A right plan gives the same bits with it, so that whoever runs there has a proof.
    """
    return poison(plan) if simulated_in(plan) else plan


def devices_of(plan: Plan) -> tuple[Device, ...]:
    """Return what a plan computes on, in the order that it was compiled for."""
    return tuple([a.device for a in plan.arenas if a.place == a.device.place])


def simulated_in(plan: Plan) -> tuple[int, ...]:
    """Return the numbers of the simulated devices of a plan, in order."""
    devices = [*[s.device for s in plan.streams], *[a.device for a in plan.arenas]]
    return tuple(sorted({d.index for d in devices if d.kind is DeviceKind.SIM}))


def said_of(plan: Plan, settings: Settings) -> str:
    """Return what is worth saying of a run's devices first of all; nothing where all is the host's.

    Whoever sees wrong numbers there needs the seed to see them again.
    """
    names = ", ".join([f"sim:{index}" for index in simulated_in(plan)])
    if not names:
        return ""
    return (
        f"plan {plan.name!r} runs on the simulated device {names}, late as"
        f" ACTORFLOW_SIM_SEED={settings.sim_seed} makes it: no measure of speed"
    )
