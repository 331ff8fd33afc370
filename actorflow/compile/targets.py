"""The bridge from planning to kernels: `compiler.graph.target.Target` answered by `actors.kernels`.

`hardware_for` returns what a plan is made for: one target per device. A CUDA target knows all from
the description of a GPU, and needs none. How many compute streams pay on the host is decided here
too, on virtual time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from actorflow.environment.host import num_threads, usable_cores
from actorflow.environment.settings import logger
from actors.kernels.common.cost import REFERENCE, reference_in_c
from actors.kernels.common.kernel import Operand, Operands
from actors.kernels.cuda import catalogue as cuda_catalogue
from actors.kernels.cuda.fused import most_joined
from actors.kernels.cuda.kernel import gpu_named
from actors.kernels.host import catalogue as host_catalogue
from actors.kernels.host.calibration import firing_prices
from actors.kernels.library import runtime
from actors.simulation.costs import RunCosts, on_host
from actors.simulation.simulate import simulate
from compiler.contract.placement import HOST, Device, DeviceKind
from compiler.contract.plan import Plan
from compiler.graph.registry import Op, kernel_op
from compiler.graph.target import (
    WIDE_IN_CACHE,
    CallOperand,
    CompileOptions,
    Hardware,
    KernelCall,
    KernelInfo,
    Link,
    Target,
    TilingPolicy,
)


def operands_of_call(call: KernelCall) -> tuple[Operands, Operands]:
    """Return inputs and outputs of a call as `query` takes them."""
    return tuple([_operand(o) for o in call.inputs]), tuple([_operand(o) for o in call.outputs])


def _operand(operand: CallOperand) -> Operand:
    return Operand(operand.type, operand.layout.offset_bytes, operand.layout.strides_bytes)


class CudaTarget:
    """The kernels of a GPU, planned from its description alone; see `actors.kernels.cuda`."""

    alignment = 256
    """What CUDA's allocator gives."""

    wide_values = TilingPolicy(256 << 20, 2048, 256 << 20, 512 << 20)
    """Chunks that keep all of a GPU busy for some tenths of a millisecond: logits of 50,304 classes
    go by 2,048 rows, a product of 16 waves of tiles on an H200. Computed, not measured."""

    epilogue_ops = ("gelu",)
    """cuBLASLt stores GELU and what it is of; see `actors.kernels.cuda.epilogues`."""

    def __init__(self, device: Device, gpu: str, *, uses_cudnn: bool = False) -> None:
        self._device = device
        self._gpu = gpu_named(gpu)
        self._uses_cudnn = uses_cudnn
        self._answers: dict[KernelCall, KernelInfo] = {}

    @property
    def message_ns(self) -> float:
        """What a stream that waits for an event of another one loses."""
        return self._gpu.event_ns

    @property
    def memory_bytes(self) -> int:
        """What the GPU has."""
        return self._gpu.memory_bytes

    @property
    def link(self) -> Link:
        """The way to pinned memory of the host."""
        rate = self._gpu.link_bytes_per_ns
        return Link(rate, rate, self._gpu.link_latency_ns)

    @property
    def fingerprint(self) -> str:
        """The generation of the kernels, the GPU, and whether cuDNN is used."""
        return cuda_catalogue.fingerprint(self._gpu.name, uses_cudnn=self._uses_cudnn)

    def query(self, call: KernelCall) -> KernelInfo:
        """Choose the first kernel that takes the call. Raises LookupError when there is none.

        Answers are kept: a search for a budget asks for the launches of every plan that it tries.
        """
        if call not in self._answers:
            self._answers[call] = self._chosen(call)
        return self._answers[call]

    def _chosen(self, call: KernelCall) -> KernelInfo:
        family = kernel_op.get(Op(call.op))
        query = (call.op, call.attrs, *operands_of_call(call), family)
        try:
            name, needs = cuda_catalogue.select_kernel(
                self._gpu.name, *query, uses_cudnn=self._uses_cudnn
            )
        except LookupError as error:
            text = f"{self._device}: {error.args[0]}{self._mend(call.op)}"
            raise LookupError(text) from None
        return KernelInfo(name, needs.workspace_bytes, needs.in_place, needs.duration_ns)

    def _mend(self, op: str) -> str:
        """Return what to do about an op that somebody's kernel computes on the host."""
        kernels = [kernel.name for kernel in host_catalogue.registered(op)]
        if not kernels:
            return ""
        return (
            f"; the kernel {kernels[0]!r} computes it on the host alone. State the op as a program"
            " (@af.op), which every device computes, or run it on the host:"
            f' @af.job(devices=["{self._device}", "host:0"]) and with af.device("host:0"):'
        )

    def max_merged_updates(self, num_full: int) -> int:
        """Return how many updates fit into the argument block of a kernel."""
        return most_joined(num_full)


_PLANNED: ContextVar[tuple[Device, ...]] = ContextVar("actorflow_planned", default=())


class HostTarget:
    """The kernels of the host: numpy for every op.

    Library kernels stand before numpy's in the catalogue.
    """

    message_ns = 20_000.0
    """A thread that waits is woken by another one."""

    alignment = 64
    """A line of the cache."""

    memory_bytes = 0
    """The machine is asked when a plan is loaded."""

    link = None

    wide_values = WIDE_IN_CACHE

    epilogue_ops = ()
    """A product ends at what is kept: a cache has it for what comes next."""

    @property
    def fingerprint(self) -> str:
        """Kernel libraries and versions."""
        return host_catalogue.fingerprint()

    def query(self, call: KernelCall) -> KernelInfo:
        """Choose the first kernel that takes the call. Raises LookupError when there is none."""
        family = kernel_op.get(Op(call.op))
        name, needs = host_catalogue.select_kernel(
            call.op, call.attrs, *operands_of_call(call), family
        )
        fields = (needs.workspace_bytes, needs.in_place, needs.duration_ns, needs.prepacked_input)
        return KernelInfo(name, *fields)

    def max_merged_updates(self, num_full: int) -> int:
        """Return 1: a call costs the host little, and an update has its gradient still in cache."""
        return 1


class SimTarget:
    """A simulated device: the host's kernels, behind a link, on streams that events order.

    What it says of link and messages is what a device on PCIe 4.0 with 16 lanes has, about.
    """

    message_ns = 2_000.0
    """A stream that waits for an event asks no thread."""

    alignment = 256
    """What CUDA's allocator gives."""

    memory_bytes = 0
    """That of the host."""

    link = Link(in_bytes_per_ns=25.0, out_bytes_per_ns=25.0, latency_ns=10_000.0)

    wide_values = WIDE_IN_CACHE
    epilogue_ops = ()

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host = HostTarget()

    @property
    def fingerprint(self) -> str:
        """The host's kernels, and that it is simulated."""
        return f"{self._host.fingerprint} simulated"

    def query(self, call: KernelCall) -> KernelInfo:
        """Choose the kernel that the host would. Raises LookupError when there is none."""
        try:
            return self._host.query(call)
        except LookupError as error:
            raise LookupError(
                f"{self._device} computes with the host's kernels, and {error.args[0]}"
            ) from None

    def max_merged_updates(self, num_full: int) -> int:
        """Return what the host says."""
        return self._host.max_merged_updates(num_full)


def hardware_for(devices: Sequence[Device], gpu: str = "", *, uses_cudnn: bool = False) -> Hardware:
    """Return what a plan for some devices is made for; see `target_for`."""
    targets = [target_for(device, gpu, uses_cudnn=uses_cudnn) for device in devices]
    return Hardware(tuple(devices), tuple(targets))


def target_for(device: Device, gpu: str = "", *, uses_cudnn: bool = False) -> Target:
    """Return what is known of a device.

    `gpu` is the name of the GPU that a CUDA device is, `uses_cudnn` whether that has cuDNN. Raises
    LookupError for a GPU that there is no description of.
    """
    if device.kind is DeviceKind.CUDA:
        return CudaTarget(device, gpu, uses_cudnn=uses_cudnn)
    return HostTarget() if device.kind is DeviceKind.HOST else SimTarget(device)


@contextmanager
def planned_for(devices: tuple[Device, ...]) -> Iterator[None]:
    """Set the devices that `is_taken_elsewhere` looks up by number, for a block."""
    token = _PLANNED.set(devices)
    try:
        yield
    finally:
        _PLANNED.reset(token)


def is_taken_elsewhere(call: KernelCall, device: int) -> bool:
    """Whether a kernel that was registered from outside takes a call on a device of the job.

    Such kernels work on the host's memory: a GPU computes the op by ours, which a line says once.
    """
    query = (call.attrs, *operands_of_call(call))
    kernels = host_catalogue.registered(call.op)
    taking = [k.name for k in kernels if host_catalogue.query_registered(k, *query) is not None]
    devices = _PLANNED.get()
    if taking and device < len(devices) and devices[device].kind is DeviceKind.CUDA:
        _say_unused(taking[0], call.op)
        return False
    return bool(taking)


@functools.cache
def _say_unused(kernel: str, op: str) -> None:
    logger.warning("kernel %r is for the host: on CUDA devices %r has kernels of ours", kernel, op)


# How many compute streams a plan has: as many as pay, and never more than were asked for.
#
# A plan of each number is made, and its steps are run on virtual time, on a host whose cores all
# streams share (`actors.simulation.costs`). More streams are taken only where a step takes clearly
# less. The rates are fixed ones, never measured: two machines with as many cores make the same
# plan.

GAIN = 1.1
"""So many times as fast must a step be for a stream more: what the rates are sure of."""

COSTS = RunCosts(25_000.0, 20_000.0, 30_000.0, 15_000.0, 0.2)
"""What a run costs beside its launches, on a machine with other work: streams that only pay on an
idle one would make steps longer on any other."""

_STEPS = 12


def asks_for_choice(hardware: Hardware, options: CompileOptions) -> bool:
    """Whether several streams were asked for on a host, whose cores they share."""
    return options.num_streams > 1 and hardware.devices == (HOST,)


def choose_num_streams(name: str, asked: int, make: Callable[[int], Plan]) -> Plan:
    """Return the fastest of the plans with 1 to `asked` streams, fewest first; a line tells which.

    `make` returns the plan with so many streams. The plan says what was asked for and used.
    """
    best, used = make(1), 1
    best_ns = alone_ns = step_ns(best)
    last_ns = best_ns
    for number in range(2, asked + 1):
        plan = make(number)
        last_ns = step_ns(plan)
        if last_ns * GAIN < best_ns:
            best, used, best_ns = plan, number, last_ns
    of = f"{used} of {asked} used"
    text = (
        f"{of}: a step takes {best_ns / alone_ns:.2f} times as long as with 1"
        if used > 1
        else f"{of}: with {asked}, a step would take {last_ns / alone_ns:.2f} times as long"
    )
    logger.info("plan %r: compute streams: %s (the planner's estimate)", name, text)
    return replace(best, options=(*best.options, ("streams", text)))


def step_ns(plan: Plan) -> float:
    """Return the time of a step at fixed rates, in nanoseconds."""
    threads = num_threads()
    in_c = reference_in_c(threads)
    rates = replace(
        REFERENCE, in_c=in_c, blas_threads=1.0 if runtime.is_enabled() else float(threads)
    )
    capacity = in_c.capacity_of(usable_cores())
    durations, host = on_host(plan, firing_prices(plan, rates), capacity, COSTS)
    return simulate(plan, _STEPS, durations, host=host).period_ns
