"""The bridge from planning to kernels: `compiler.target.Target` answered by `actors.kernels`.

`hardware_for` is how the roof says what a plan is made for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from actorflow.compile.cuda_target import CudaTarget
from actorflow.compile.operands import operands_of_call
from actorflow.logs import logger
from actors.kernels import catalogue
from compiler.placement import Device, DeviceKind
from compiler.registry import Op, runs_as
from compiler.target import WIDE_IN_CACHE, Hardware, KernelCall, KernelInfo, Link, Target

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

    product_finishes = ()
    """A product ends at what is kept: a cache has it for what comes next."""

    @property
    def fingerprint(self) -> str:
        """Kernel libraries and versions."""
        return catalogue.fingerprint()

    def query(self, call: KernelCall) -> KernelInfo:
        """Choose the first kernel that takes the call. Raises LookupError when there is none."""
        family = runs_as.get(Op(call.op))
        name, needs = catalogue.choose(call.op, call.attrs, *operands_of_call(call), family)
        made = (needs.workspace_bytes, needs.in_place, needs.duration_ns, needs.keeps)
        return KernelInfo(name, *made)

    def joined_updates(self, num_full: int) -> int:
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
    product_finishes = ()

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

    def joined_updates(self, num_full: int) -> int:
        """Return what the host says."""
        return self._host.joined_updates(num_full)


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
    """Let `is_taken_elsewhere` know what the devices are that are planned for, by their numbers."""
    token = _PLANNED.set(devices)
    try:
        yield
    finally:
        _PLANNED.reset(token)


def is_taken_elsewhere(call: KernelCall, device: int) -> bool:
    """Whether a kernel that was registered from outside takes a call on a device of the job.

    Such kernels work on the host's memory: a GPU computes the op by ours, which a line says once.
    """
    given = (call.attrs, *operands_of_call(call))
    kernels = catalogue.registered(call.op)
    taking = [k.name for k in kernels if catalogue.query_registered(k, *given) is not None]
    devices = _PLANNED.get()
    if taking and device < len(devices) and devices[device].kind is DeviceKind.CUDA:
        _say_unused(taking[0], call.op)
        return False
    return bool(taking)


@functools.cache
def _say_unused(kernel: str, op: str) -> None:
    logger.warning("kernel %r is for the host: on CUDA devices %r has kernels of ours", kernel, op)
