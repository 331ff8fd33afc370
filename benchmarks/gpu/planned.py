"""Plans of the check's jobs, and the launches of a plan on memory of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engines.actorflow_models import FAMILIES, OnDemand, job_of
from rows.row import Row

from actors.kernels.cuda import catalogue
from actors.kernels.cuda.calls import LaunchCalls
from actors.kernels.cuda.kernel import DeviceView
from actors.simulation.simulate import simulate
from compiler.contract.placement import DeviceKind, Memory
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import Launch
from gpu.opened import GPU

SIMULATED_STEPS = 12


def plan_of(row: Row, precision: str) -> Plan:
    """Return the plan of a row for the GPU that the check is made for; none is needed."""
    model, loss = FAMILIES[row.family](row)
    job = job_of(row, precision, loss, device="cuda", gpu=GPU)
    return job.compile(model, OnDemand(row.batches()))


@dataclass(frozen=True, slots=True)
class BoundCalls:
    """A launch of a plan, with the views that it is bound on and what it asks of the device."""

    launch: Launch
    inputs: tuple[DeviceView, ...]
    outputs: tuple[DeviceView, ...]
    workspace: DeviceView | None
    calls: LaunchCalls

    @property
    def key(self) -> str:
        """The same for launches that take equally long."""
        lie = [(str(v.type), v.strides_bytes) for v in (*self.inputs, *self.outputs)]
        return f"{self.launch.kernel} {self.launch.attrs} {lie}"


def bound_launches(
    plan: Plan, base: int = 1 << 40, host_base: int = 1 << 44
) -> Iterator[BoundCalls]:
    """Yield the launches of a plan on a GPU, whose arena lies at `base`; nothing is asked of it.

    Of registers with several slots it is the first. `host_base` is where pinned memory begins.
    """
    kernels = catalogue.kernels_by_name(GPU)

    def view(index: int) -> DeviceView:
        window = plan.views[index]
        register = plan.registers[window.register]
        is_device = plan.arenas[register.arena].memory is Memory.DEVICE
        offset = register.offsets_bytes[0] + window.offset_bytes
        address = (base if is_device else host_base) + offset
        return DeviceView(address, window.type, window.strides_bytes)

    for actor in plan.actors:
        if plan.streams[actor.stream].device.kind is not DeviceKind.CUDA:
            continue
        for launch in actor.launches:
            inputs = tuple([view(v) for v in launch.inputs])
            outputs = tuple([view(v) for v in launch.outputs])
            workspace = None if launch.workspace is None else view(launch.workspace)
            kernel = kernels[launch.kernel]
            calls = kernel.bind(dict(launch.attrs), inputs, outputs, workspace)
            yield BoundCalls(launch, inputs, outputs, workspace, calls)


def device_bytes(plan: Plan) -> int:
    """Return the bytes of a plan's arena on the GPU."""
    return sum([a.size_bytes for a in plan.arenas if a.memory is Memory.DEVICE])


def simulated_s(plan: Plan) -> float:
    """Return the seconds of a step by the simulator, from the description of the GPU alone."""
    return simulate(plan, SIMULATED_STEPS).period_ns / 1e9
