"""The host as the compiler sees it: `compiler.graph.target.Target` answered by `actors.kernels`.

A simulated device has the host's kernels. A kernel that was registered from outside is the host's,
too: `is_taken_elsewhere` says where one takes a call.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from actorflow.environment.settings import logger
from actors.kernels.common.kernel import Operand, Operands
from actors.kernels.host import catalogue as host_catalogue
from compiler.contract.placement import Device, DeviceKind
from compiler.graph.registry import Op, kernel_op
from compiler.graph.target import (
    WIDE_IN_CACHE,
    CallOperand,
    KernelCall,
    KernelInfo,
    Link,
)


def operands_of_call(call: KernelCall) -> tuple[Operands, Operands]:
    """Return inputs and outputs of a call as `query` takes them."""
    return tuple([_operand(o) for o in call.inputs]), tuple([_operand(o) for o in call.outputs])


def _operand(operand: CallOperand) -> Operand:
    return Operand(operand.type, operand.layout.offset_bytes, operand.layout.strides_bytes)


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
    reduced_dtypes = None

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
    reduced_dtypes = None
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
    operands = operands_of_call(call)
    kernels = host_catalogue.registered(call.op)
    taking = [k.name for k in kernels if k.plan(call.attrs, *operands) is not None]
    devices = _PLANNED.get()
    if taking and device < len(devices) and devices[device].kind is DeviceKind.CUDA:
        _say_unused(taking[0], call.op)
        return False
    return bool(taking)


@functools.cache
def _say_unused(kernel: str, op: str) -> None:
    logger.warning(
        "kernel %r runs on the host only: on CUDA devices op %r has actorflow's kernels", kernel, op
    )
