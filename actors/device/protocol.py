"""What the executor asks of an asynchronous device: streams, events, and a way to wait.

The contract is CUDA's, and every backend keeps exactly this:

- A stream executes what is put on it one at a time, in that order. Streams know nothing of one
  another, but for waits. Whatever is put on a stream returns at once.
- `record(event)` marks this place of the stream; the event is done when the stream has come there.
- `wait(event)` holds this stream until the work that the *most recent* record of the event, at the
  time of the call, has marked is done. An event never recorded is no wait. Recording the event
  again changes no wait that was put on a stream before.
- `event.synchronize()` holds the calling thread likewise, and for the same record.

A stream is fed by one thread at a time; an event may be waited for by any.

Source: CUDA Runtime API, Stream Management and Event Management (cudaStreamWaitEvent,
cudaEventRecord, cudaEventSynchronize).
"""

from __future__ import annotations

from typing import Protocol

from actors.protocol import Launch
from compiler.errors import ActorflowError


class DeviceEvent(Protocol):
    """A mark on a stream that can be set again."""

    @property
    def is_done(self) -> bool:
        """Whether the latest record is done, or there is none; never blocks."""

    def synchronize(self) -> None:
        """Block this thread until the latest record is done. Raises DeviceFault."""


class DeviceStream(Protocol):
    """An order of execution. Every method returns before what it asks for is done."""

    def enqueue(self, launch: Launch) -> None:
        """Execute a launch after all that is on this stream."""

    def record(self, event: DeviceEvent) -> None:
        """Mark the end of all that is on this stream."""

    def wait(self, event: DeviceEvent) -> None:
        """Execute what comes after this only once the event's latest record is done."""


class DeviceDriver(Protocol):
    """Where streams and events come from. Nothing is made after a run has begun."""

    def make_stream(self, name: str) -> DeviceStream:
        """Return a new stream; the name is for messages."""

    def make_event(self) -> DeviceEvent:
        """Return a new event, never recorded."""

    def synchronize(self) -> None:
        """Block this thread until every stream is empty. Raises DeviceFault."""


class DeviceFault(ActorflowError):
    """Work on the device failed; found by a later call, and by every call from then on.

    `stream` is where, and `launch` how many launches had been put there before the one that failed;
    None where the device cannot tell. `__cause__` is what it raised.
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
