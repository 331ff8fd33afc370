"""What the runtime asks of a device: memory, kernels, streams and events.

The contract of streams and events is CUDA's, and every device keeps exactly this:

- A stream executes what is put on it one at a time, in that order. Streams know nothing of one
  another, but for waits. Whatever is put on a stream returns at once.
- `record(event)` marks this place of the stream; the event is done when the stream has come there.
- `wait(event)` holds this stream until the work that the *most recent* record of the event, at the
  time of the call, has marked is done. An event never recorded is no wait. Recording the event
  again changes no wait that was put on a stream before. Devices of one kind wait for one another's
  events.
- `event.synchronize()` holds the calling thread likewise, and for the same record.

A stream is fed by one thread at a time; an event may be waited for by any. A device that is not
asynchronous (`is_asynchronous`) has done a launch when the call returns, so its events hold nobody.

Source: CUDA Runtime API, Stream Management and Event Management (cudaStreamWaitEvent,
cudaEventRecord, cudaEventSynchronize).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from actors.protocol import Array, Chain, Launch
from compiler.errors import ActorflowError
from compiler.placement import Device, Memory
from compiler.plan import AttrValue
from compiler.types import TensorType

Block = Any
"""Bytes that a device allocated; only who allocated it looks inside. They go with the object."""

PlacedArray = Any
"""A typed window on a block, which kernels of the device bind: a numpy array on memory that the
host can address, else what the device makes of an address."""


class DeviceEvent(Protocol):
    """A mark on a stream that can be set again."""

    @property
    def is_done(self) -> bool:
        """Whether the latest record is done, or there is none; never blocks."""

    def synchronize(self) -> None:
        """Block this thread until the latest record is done. Raises DeviceFault."""


class DeviceStream(Protocol):
    """An order of execution. Every method returns before what it asks for is done."""

    def record(self, event: DeviceEvent) -> None:
        """Mark the end of all that is on this stream."""

    def wait(self, event: DeviceEvent) -> None:
        """Execute what comes after this only once the event's latest record is done."""


class DeviceDriver(Protocol):
    """Where streams and events come from. Nothing is made after a run has begun."""

    @property
    def device(self) -> Device:
        """Which device this is."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether its streams execute beside the thread that feeds them."""

    def make_stream(self, name: str) -> DeviceStream:
        """Return a new stream; the name is for messages."""

    def make_event(self) -> DeviceEvent:
        """Return a new event, never recorded."""

    def bind_chain(self, stream: DeviceStream, launches: Chain) -> Chain:
        """Return what a firing calls for these launches, with as few calls as can be.

        An asynchronous device gives one call, which puts them all on the stream; where that can
        fail it says at which of them it is (`running`). On the host a call that makes several
        launches says that, and how many they are (`num_launches`).
        """

    def synchronize(self) -> None:
        """Block this thread until every stream is empty. Raises DeviceFault."""


class DeviceStore(Protocol):
    """Where memory comes from, and the kernels that work on it."""

    def has_kernel(self, name: str) -> bool:
        """Whether a launch of this kernel can be bound."""

    def bind(
        self,
        kernel: str,
        attrs: Mapping[str, AttrValue],
        inputs: tuple[PlacedArray, ...],
        outputs: tuple[PlacedArray, ...],
        workspace: PlacedArray | None,
    ) -> Launch:
        """Return the launch of a kernel on what `view` gave, for `bind_chain`.

        Raises DeviceError where the kernel fails, or what it gives is no launch.
        """

    def allocate(self, size_bytes: int, alignment: int, memory: Memory) -> Block:
        """Return a block that begins at a multiple of `alignment`.

        PINNED memory lies in the host, where this device copies from and to it; views on that are
        numpy arrays. Raises MemoryError where it cannot be had.
        """

    def view(
        self, block: Block, offset_bytes: int, type_: TensorType, strides_bytes: tuple[int, ...]
    ) -> PlacedArray:
        """Return a window on a block. Raises ValueError where it would leave the block."""

    def read(self, view: PlacedArray) -> Array:
        """Return a copy of a window, when nothing works on it."""

    def write(self, view: PlacedArray, array: Array) -> None:
        """Fill a window, when nothing works on it, from an array of its type or less dimensions."""


class OpenDevice(DeviceDriver, DeviceStore, Protocol):
    """A device that a process has opened to run plans on."""


class FullDevice(MemoryError):
    """A device has only `free_bytes` left, and was asked for more."""

    def __init__(self, free_bytes: int) -> None:
        super().__init__(f"{free_bytes} bytes are free")
        self.free_bytes = free_bytes


class DeviceFault(ActorflowError):
    """Work on the device failed; found by a later call, and by every call from then on.

    What its memory holds is nobody's any more. `stream` is where, and `launch` how many launches
    had been put there before the one that failed; None where the device cannot tell. `__cause__` is
    what it raised.
    """

    def __init__(
        self, message: str, *, stream: DeviceStream | None = None, launch: int | None = None
    ) -> None:
        super().__init__(message)
        self.stream = stream
        self.launch = launch


class DeviceFailure(ActorflowError):
    """A launch failed on the device: the one of this number in this firing of this actor.

    It may be raised in a firing of any other actor that waits for the device. `__cause__` is the
    original exception.
    """

    def __init__(self, message: str, *, actor: int, firing: int, launch: int) -> None:
        super().__init__(message)
        self.actor = actor
        self.firing = firing
        self.launch = launch
