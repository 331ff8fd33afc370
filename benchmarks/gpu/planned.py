"""Plans of the check's jobs, their launches on memory of one's own, and the least they take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engines.actorflow_models import FAMILIES, OnDemand, job_of
from rows.row import Row

from actors.kernels.common.kernel import require_plan
from actors.kernels.cuda import catalogue
from actors.kernels.cuda.calls import (
    AlternativeCalls,
    LaunchCalls,
    RunCudnn,
    RunProduct,
    every_call,
)
from actors.kernels.cuda.kernel import DeviceView, gpu_named
from actors.simulation.simulate import simulate
from compiler.contract.attrs import Attrs
from compiler.contract.placement import DeviceKind, Memory
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import Launch
from compiler.contract.types import DType
from compiler.graph.registry import cost, find_op
from gpu.opened import GPU
from gpu.section import CEILINGS, Place

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
            operands = [tuple([x.as_operand for x in views]) for views in (inputs, outputs)]
            kernel_plan = require_plan(kernels[launch.kernel], dict(launch.attrs), *operands)
            calls = kernel_plan.bind(inputs, outputs, workspace)
            yield BoundCalls(launch, inputs, outputs, workspace, calls)


def flops(calls: LaunchCalls) -> float:
    """Return what products of a launch multiply and add; every way to do it has the same ones."""
    first = [
        call.alternatives[0] if isinstance(call, AlternativeCalls) else (call,) for call in calls
    ]
    products = [c.product for calls in first for c in calls if isinstance(c, RunProduct)]
    return sum([2.0 * p.batch * p.d.rows * p.d.columns * p.inner for p in products])


def limit_s(plan: Plan, place: Place) -> float:
    """Return the least seconds of a step's launches at the ceilings of the card.

    A launch takes its products at the measured rate, or its operands at that of a copy, whichever
    is longer; nothing is launched. Products of other types than bfloat16, and all before anything
    was measured, are at the rates of the description.
    """
    gpu, told = gpu_named(GPU), place.told(CEILINGS)
    measured = told if isinstance(told, dict) else {}
    bytes_per_s = measured.get("copy", 1e9 * gpu.bytes_per_ns)
    total = 0.0
    for bound in bound_launches(plan):
        views = (*bound.inputs, *bound.outputs)
        sizes = [v.type.size_bytes for v in views]
        if bound.launch.op.startswith("embedding"):  # of a table only the rows of some ids
            sizes = [min(sizes[0], sum(sizes[1:])), *sizes[1:]]
        dtype = next((v.dtype for v in views if v.dtype.is_float), DType.FLOAT32)
        rate = 1e18 / gpu.product_ns(dtype, 1e9)
        if dtype is DType.BFLOAT16:
            rate = measured.get("product", rate)
        total += max(work_of(bound) / rate, sum(sizes) / bytes_per_s)
    return total


def work_of(bound: BoundCalls) -> float:
    """Return the flops of a launch by a library, cuDNN's as the op's cost has them."""
    if not any([isinstance(call, RunCudnn) for call in every_call(bound.calls)]):
        return flops(bound.calls)
    ins, outs = [tuple([v.type for v in side]) for side in (bound.inputs, bound.outputs)]
    return cost.get(find_op(bound.launch.op))(ins, outs, Attrs(dict(bound.launch.attrs))).flops


def device_bytes(plan: Plan) -> int:
    """Return the bytes of a plan's arena on the GPU."""
    return sum([a.size_bytes for a in plan.arenas if a.memory is Memory.DEVICE])


def simulated_s(plan: Plan) -> float:
    """Return the seconds of a step by the simulator, from the description of the GPU alone."""
    return simulate(plan, SIMULATED_STEPS).period_ns / 1e9
