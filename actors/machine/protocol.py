"""What the runtime asks of what it drives: launches, host ports, clocks, devices, transports.

**Launches and host ports.** A launch is prebound: it takes no argument, allocates no array and
works on planned bytes. A host port is the blocking end of a SOURCE or SINK actor (data, metrics,
checkpoint). It is bound once per slot at load, like a kernel; its launches run on a thread of their
own.

**Devices.** The contract of streams and events is CUDA's, and every device keeps exactly this:

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

**Transports.** A rank runs its own plan. Its collectives have one order on all ranks (attribute
`order`), and a launch of one of them completes on all ranks of its group together. Ranks whose
graphs differ have plans that differ: registers lie elsewhere and have other slots. So a transport
asks each rank where its operands are, and assumes nothing but that all know the mesh.

Source: CUDA Runtime API, Stream Management and Event Management (cudaStreamWaitEvent,
cudaEventRecord, cudaEventSynchronize).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from compiler.contract.attrs import AttrValue, PlainValue
from compiler.contract.collective import Collective
from compiler.contract.errors import ActorflowError
from compiler.contract.placement import Device, Memory, Mesh
from compiler.contract.types import TensorType

Array = NDArray[np.generic]
Arrays = tuple[Array, ...]
Launch = Callable[[], object]
"""One prebound call. Its return value is ignored; an exception fails the actor."""

Clock = Callable[[], int]
"""Monotonic time in nanoseconds."""

Chain = tuple[Launch, ...]
"""The launches of one firing, in order."""

Token = Mapping[str, Array]
"""The tensors of one slot by field name; views on planned bytes, valid only during a launch."""


class HostPort(Protocol):
    """The host's end of a SOURCE or SINK actor."""

    def bind(self, tokens: tuple[Token, ...]) -> Launch:
        """Return the launch for these slots, one token per unit of the port's rate.

        A source's launch fills the arrays, or raises `SourceExhausted` when there is no more data.
        A sink's launch reads them. A flushed sink may be bound with fewer tokens than its rate.
        """

    def close(self) -> None:
        """Make a launch that blocks return or raise soon; called once, from another thread."""


@runtime_checkable
class AbandonablePort(Protocol):
    """A port of which a firing that blocks need not be waited for."""

    def abandon(self) -> bool:
        """Block in no firing more; return whether one is under way.

        Whatever that one still brings no longer counts: it must not touch its slot from now on
        where it can help it, and raise. Called on the dispatcher's thread, which runs the launches
        of further firings, and that of this one again, where the port is not admitted.
        """


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
    """Makes streams and events. Nothing is made after a run has begun."""

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
    """Allocates memory and binds the kernels that work on it."""

    def has_kernel(self, name: str) -> bool:
        """Whether a launch of this kernel can be bound."""

    def bind(
        self,
        kernel: str,
        attrs: Mapping[str, AttrValue],
        inputs: tuple[PlacedArray, ...],
        outputs: tuple[PlacedArray, ...],
        workspace: PlacedArray | None,
        types: tuple[TensorType, ...],
    ) -> Launch:
        """Return the launch of a kernel on what `view` gave, for `bind_chain`.

        `types` are those of inputs and outputs: numpy's arrays do not tell bfloat16 from uint16.

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


class AllGatherObject(Protocol):
    """An all-gather of small Python values between ranks; no tensors go this way."""

    def __call__(self, name: str, value: PlainValue) -> list[PlainValue]:
        """Return the values of all ranks, by rank, once every rank has called it with this name.

        The name completes "to ..." in the error about a rank that does not come. All ranks use the
        same names in the same order; a name may repeat. Blocks; raises PeerFailed where another
        rank has failed, or does not come in time.
        """
        ...


class Communicator(Protocol):
    """A rank's end of a transport, for one loaded plan.

    Used in this order: `allocate` and `bind`, `ready`, then the launches, at last `close`. `abort`
    may come at any time.
    """

    @property
    def rank(self) -> int:
        """Which rank this is."""
        ...

    @property
    def mesh(self) -> Mesh:
        """All ranks."""
        ...

    def allocate(self, size_bytes: int, alignment: int) -> Block:
        """Return memory of the host that collectives work on, as `DeviceStore.allocate`.

        Raises MemoryError where it cannot be had.
        """
        ...

    @property
    def has_clean_abort(self) -> bool:
        """Whether no later launch runs once `abort` has ended one.

        False on a GPU, where later launches are enqueued already and read invalid bytes: an abort
        gives up the device and its variables.
        """
        ...

    @property
    def waited_ns(self) -> int:
        """How long launches have waited for other ranks so far; 0 on a GPU, where streams wait."""
        ...

    def beside(self) -> Callable[[], Communicator]:
        """Return what makes the ends of other plans that take turns on the memory of this one.

        It may be called as often as there are plans, once this end is `ready`, and after `close` as
        well. Such an end is used as any other is, but that it allocates nothing.
        """
        ...

    def bind(
        self,
        collective: Collective,
        inputs: tuple[PlacedArray, ...],
        outputs: tuple[PlacedArray, ...],
    ) -> Launch:
        """Return what meets the other ranks each time that it is called.

        It is for one slot of each register that the launch touches. On the host, what peers work on
        lies in memory of `allocate`. The launch raises PeerFailed where another rank does not come,
        or comes to something else. Raises DeviceError for what this transport does not move.
        """
        ...

    def ready(self) -> None:
        """Meet all ranks once, when everything is bound, and agree on the collectives to come.

        Blocks. Raises PeerFailed, on every rank, where ranks of a group have other collectives; the
        message names both.
        """
        ...

    def abort(self, reason: str, at_fault: int | None = None) -> None:
        """Make every launch that waits, on any rank, raise PeerFailed at once; from any thread.

        `at_fault` is the rank to blame, by default this one. All ranks report the first reason. No
        launch succeeds after that. Between GPUs only this rank is woken: the others are told.
        """
        ...

    def close(self) -> None:
        """Release the memory of other ranks, when no launch runs. May be called twice."""
        ...
