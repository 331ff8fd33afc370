"""The host as a device: a launch is done when it returns, and events hold nobody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from actors.device import host_memory
from actors.device.host_kernels import HostKernels
from actors.device.protocol import DeviceEvent, DeviceStream
from actors.kernels.native.chain import join
from actors.protocol import Chain
from compiler.placement import HOST, Device

if TYPE_CHECKING:
    from actors.kernels.kernel import Kernel


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

    def __init__(self, kernels: Mapping[str, Kernel], *, joins: bool = True) -> None:
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
        return join(launches) if self._joins else launches

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
