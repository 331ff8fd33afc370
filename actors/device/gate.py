"""What lets a firing pass: rings of events, streams with what they waited for, and the gate."""

from __future__ import annotations

from collections.abc import Callable

from actors.device.protocol import DeviceDriver, DeviceEvent, DeviceStream
from actors.device.waits import EventWait
from compiler.errors import InternalError


class EventRing:
    """The events of an actor, recorded in turn: the one of firing k is number k mod their count.

    `count` firings were enqueued. `firings` and `first_launches` say by event which firing recorded
    it last, and how many launches its stream had before.
    """

    __slots__ = ("count", "events", "firings", "first_launches", "name", "num_launches")

    def __init__(self, name: str, events: tuple[DeviceEvent, ...]) -> None:
        self.name = name
        self.events = events
        self.num_launches = 0
        self.count = 0
        self.firings = [-1] * len(events)
        self.first_launches = [0] * len(events)

    def event_of(self, firing: int) -> DeviceEvent:
        """Return the event that a firing recorded. Raises InternalError when it is another's."""
        index = firing % len(self.events)
        if self.firings[index] != firing:
            raise InternalError(
                f"firing {firing} of {self.name!r} is waited for on the device, and its event is"
                f" that of firing {self.firings[index]}; {len(self.events)} events are too few"
            )
        return self.events[index]

    def find(self, launch: int) -> tuple[int, int] | None:
        """Return firing and index in it of a launch, by its number on the stream."""
        for firing, first in zip(self.firings, self.first_launches, strict=True):
            if firing >= 0 and first <= launch < first + self.num_launches:
                return firing, launch - first
        return None

    @property
    def num_unfinished(self) -> int:
        """How many of the latest firings have not ended."""
        for ago in range(min(self.count, len(self.events))):
            if self.events[(self.count - 1 - ago) % len(self.events)].is_done:
                return ago
        return min(self.count, len(self.events))


class Lane:
    """A stream with its device.

    `num_launches` were put on it; `known` is by actor the last firing that what comes next on it
    comes after anyway.
    """

    __slots__ = ("device", "known", "num_launches", "stream")

    def __init__(self, device: DeviceDriver, name: str, num_actors: int) -> None:
        self.device = device
        self.stream: DeviceStream = device.make_stream(name)
        self.known = [-1] * num_actors
        self.num_launches = 0

    def wait_for(self, other: Lane) -> Callable[[DeviceEvent], object]:
        """Return what holds this stream until an event of another one is done.

        Devices of two kinds know nothing of each other's events: there the host waits, and with it
        all that it would put on the stream.
        """
        one, two = self.device, other.device
        if one.is_asynchronous and one.device.kind is two.device.kind:
            return self.stream.wait
        return _wait_on_host


class Gate:
    """Lets a firing of one actor pass once it has waited for all that it needs.

    `wait_for` is by actor what waits for its events; `known` is by actor the last firing that
    whatever passes comes after anyway.
    """

    __slots__ = ("every", "known", "needed", "rings", "wait_for")

    def __init__(
        self,
        needed: tuple[EventWait, ...],
        every: tuple[EventWait, ...],
        rings: tuple[EventRing, ...],
        known: list[int],
        wait_for: tuple[Callable[[DeviceEvent], object], ...],
    ) -> None:
        self.needed = needed
        self.every = every
        self.rings = rings
        self.known = known
        self.wait_for = wait_for

    def let_pass(self, firing: int) -> None:
        """Wait for what an ordinary firing needs."""
        known = self.known
        for actor, times, plus, over, _, _ in self.needed:
            last = (firing * times + plus) // over
            if last > known[actor]:
                ring = self.rings[actor]
                if last >= ring.count:
                    self.let_pass_late(firing, self.every)
                    return
                self.wait_for[actor](ring.event_of(last))
                known[actor] = last

    def let_pass_late(self, firing: int, waits: tuple[EventWait, ...]) -> None:
        """Wait for what a firing needs at the end of a run, where no wait implies another.

        A consumer that has ended hands slots back without a firing; what it read before is waited
        for then. Raises InternalError when a token was not even enqueued.
        """
        for wait in waits:
            ring = self.rings[wait.actor]
            last = wait.firing(firing)
            if last >= ring.count:
                if wait.is_input:
                    raise InternalError(
                        f"firing {last} of {ring.name!r} is waited for on the device, but only"
                        f" {ring.count} were enqueued: a message came before its firing"
                    )
                last = ring.count - 1
            if last > self.known[wait.actor]:
                self.wait_for[wait.actor](ring.event_of(last))
                self.known[wait.actor] = last


def _wait_on_host(event: DeviceEvent) -> None:
    event.synchronize()
