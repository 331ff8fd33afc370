"""Simulated devices: numpy's memory and the host's kernels, on streams that a schedule makes late.

Memory begins as 0xFF, which is NaN for floating point, so that what is read before it is written
shows.
"""

from __future__ import annotations

from collections.abc import Mapping

from actors.device import host_memory
from actors.device.host_kernels import NO_KERNELS, HostKernels
from actors.device.poison import POISON_KERNELS
from actors.device.protocol import DeviceStream
from actors.device.schedule import LateSchedule, SimulatedEvent, SimulatedStream
from actors.kernels.kernel import Kernel
from actors.protocol import Array, Chain
from compiler.errors import InternalError
from compiler.placement import Device, DeviceKind, Memory


class SimulatedDevice(HostKernels):
    """Numpy's memory and kernels behind streams that a schedule makes late.

    Args:
        schedule: The same for all devices of a run.
        kernels: Its kernels, by name.
        index: Which simulated device this is.
    """

    is_asynchronous = True
    view = staticmethod(host_memory.view_on)
    read = staticmethod(host_memory.read)
    write = staticmethod(host_memory.write)

    def __init__(
        self, schedule: LateSchedule, kernels: Mapping[str, Kernel] = NO_KERNELS, index: int = 0
    ) -> None:
        super().__init__({**kernels, **POISON_KERNELS})
        self.device = Device(DeviceKind.SIM, index)
        self._schedule = schedule

    def allocate(self, size_bytes: int, alignment: int, memory: Memory) -> Array:
        """Return a block of bytes that mean nothing; see `DeviceStore.allocate`."""
        block = host_memory.allocate(size_bytes, alignment, memory)
        block.fill(0xFF)
        return block

    def make_stream(self, name: str) -> SimulatedStream:
        """Return a new stream."""
        return self._schedule.make_stream(self.device, name)

    def make_event(self) -> SimulatedEvent:
        """Return a new event."""
        return self._schedule.make_event(self.device)

    def bind_chain(self, stream: DeviceStream, launches: Chain) -> Chain:
        """Return one call that puts all launches on the stream, one by one."""
        if not isinstance(stream, SimulatedStream):
            raise InternalError(f"a stream of {type(stream).__name__} is not a simulated device's")
        return (_EnqueuedChain(stream, launches),)

    def synchronize(self) -> None:
        """Execute all that was put on the streams."""
        self._schedule.synchronize(self.device)


class _EnqueuedChain:
    """Launches that are put on a stream one by one; `running` is the one that is being put."""

    __slots__ = ("_launches", "_stream", "running")

    def __init__(self, stream: SimulatedStream, launches: Chain) -> None:
        self._stream = stream
        self._launches = launches
        self.running = 0

    def __call__(self) -> None:
        for number, launch in enumerate(self._launches):
            self.running = number
            self._stream.enqueue(launch)
