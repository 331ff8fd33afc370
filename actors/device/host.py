"""The host as a device: a launch is done when it returns, and events hold nobody.

`HostKernels` binds kernels to numpy arrays, for this device and for those that the host acts.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from actors.kernels.common import host_memory
from actors.kernels.common.kernel import Operand, require_plan
from actors.kernels.library.launch import merge_native_launches
from actors.machine.protocol import Array, Arrays, Chain, DeviceEvent, DeviceStream, Launch
from compiler.contract.attrs import AttrValue
from compiler.contract.errors import ActorflowError, DeviceError
from compiler.contract.placement import HOST, Device
from compiler.contract.types import TensorType

if TYPE_CHECKING:
    from actors.kernels.common.kernel import HostKernel


NO_KERNELS: Mapping[str, HostKernel] = MappingProxyType({})


class HostKernels:
    """What a device has whose kernels bind numpy arrays: see `DeviceStore`.

    Args:
        kernels: By the name that launches use.
    """

    def __init__(self, kernels: Mapping[str, HostKernel]) -> None:
        self._kernels = kernels

    def has_kernel(self, name: str) -> bool:
        """Whether a launch of this kernel can be bound."""
        return name in self._kernels

    def bind(
        self,
        kernel: str,
        attrs: Mapping[str, AttrValue],
        inputs: Arrays,
        outputs: Arrays,
        workspace: Array | None,
        types: tuple[TensorType, ...],
    ) -> Launch:
        """Return the launch of a kernel; see `DeviceStore.bind`."""
        arrays, count = (*inputs, *outputs), len(inputs)
        operands = tuple([Operand(t, 0, x.strides) for t, x in zip(types, arrays, strict=True)])
        try:
            plan = require_plan(self._kernels[kernel], attrs, operands[:count], operands[count:])
            launch = plan.bind(inputs, outputs, workspace)
        except ActorflowError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise DeviceError(f"{kernel} cannot be bound: {reason}") from error
        if not callable(launch):
            raise DeviceError(f"{kernel} was bound to {launch!r}, expected a launch")
        return launch


class HostDevice(HostKernels):
    """This process's processor and memory.

    Args:
        kernels: Its kernels, by name.
        joins: Whether neighbouring native launches become one call.
    """

    is_asynchronous = False
    allocate = staticmethod(host_memory.allocate)
    view = staticmethod(host_memory.view_on)
    read = staticmethod(host_memory.read)
    write = staticmethod(host_memory.write)

    def __init__(self, kernels: Mapping[str, HostKernel], *, joins: bool = True) -> None:
        super().__init__(kernels)
        self.device: Device = HOST
        self._joins = joins

    def make_stream(self, name: str) -> HostStream:
        """Return a stream, which the thread that calls its launches is."""
        return HostStream()

    def make_event(self) -> HostEvent:
        """Return an event, which is always done."""
        return HostEvent()

    def bind_chain(self, stream: DeviceStream, launches: Chain) -> Chain:
        """Return the launches, with neighbouring native ones as one call."""
        return merge_native_launches(launches) if self._joins else launches

    def synchronize(self) -> None:
        """Wait for nothing."""


class HostStream:
    """What comes next in a thread is a thread's own order."""

    def record(self, event: DeviceEvent) -> None:
        """Mark nothing: all before it is done."""

    def wait(self, event: DeviceEvent) -> None:
        """Hold this thread."""
        event.synchronize()


class HostEvent:
    """The end of a launch that has returned."""

    is_done = True

    def synchronize(self) -> None:
        """Wait for nothing."""
