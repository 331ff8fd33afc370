"""Run actors on the streams of devices: on an asynchronous one a firing is enqueued.

For every actor the executor makes the chains that dispatcher and workers run, whatever devices a
plan has. DONE means *ended* for an actor on the host, and *enqueued* for one on an asynchronous
device:

- **On the host**, an actor that needs nothing from such a device runs its chain itself: there is
  nothing of the executor in it. One that does waits first, then runs its launches as ever.
- **On an asynchronous device**, firing k puts on its stream: a wait for the event of every firing
  that it needs (`actors.race.waits` says which, and which others imply), the launches, and the
  record of its own event. The host waits for one thing only: not to be more than `max_ahead` steps
  ahead. An actor there that has a thread of its own waits for its launches on that thread, and DONE
  means ended (`actors.machine.table` says which do).

**Why it is right.** When a firing starts, the messages say that every firing it needs has been
enqueued, so its event is recorded and a wait sees that record. By induction over the order of
enqueueing, no stream waits for something that is put on a stream later: no device can deadlock, nor
several of them. A ring remembers which firing recorded an event, and refuses to give one that was
recorded again.

What a stream has waited for it need not wait for again: a column per stream knows the last firing
of each actor. Nothing is built per firing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from traceback import clear_frames
from typing import NamedTuple

from actors.machine.protocol import (
    Chain,
    DeviceDriver,
    DeviceEvent,
    DeviceFailure,
    DeviceFault,
    DeviceStream,
    Launch,
)
from actors.machine.table import MachineTable
from actors.race.waits import EventWait, Throttle, WaitTable, wait_table
from compiler.contract.errors import InternalError


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
        """Return a firing's event. Raises InternalError when it was recorded again since."""
        index = firing % len(self.events)
        # A wait on it would be satisfied by another firing: wrong data, and no error from the
        # device.
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
        # Firings of one stream end in order: the newest that is done says that all older ones are.
        for ago in range(min(self.count, len(self.events))):
            if self.events[(self.count - 1 - ago) % len(self.events)].is_done:
                return ago
        return min(self.count, len(self.events))


class StreamState:
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

    def wait_for(self, other: StreamState) -> Callable[[DeviceEvent], object]:
        """Return what holds this stream until an event of another one is done.

        Devices of two kinds cannot wait for each other's events: there the host waits, and with it
        everything that it would put on the stream next.
        """
        one, two = self.device, other.device
        # Devices of one kind hold a stream for each other's events without the host.
        if one.is_asynchronous and one.device.kind is two.device.kind:
            return self.stream.wait
        return _wait_on_host


class EventWaiter:
    """Makes the firings of one actor wait for the events of all that they need.

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

    def wait_for_inputs(self, firing: int) -> None:
        """Wait for what an ordinary firing needs."""
        known = self.known
        for actor, times, plus, over, _, _ in self.needed:
            last = (firing * times + plus) // over
            if last > known[actor]:
                ring = self.rings[actor]
                # Never enqueued: a consumer that has ended handed the slot back without a firing.
                if last >= ring.count:
                    self.wait_at_end(firing, self.every)
                    return
                self.wait_for[actor](ring.event_of(last))
                # What comes later on this stream comes after it anyway.
                known[actor] = last

    def wait_at_end(self, firing: int, waits: tuple[EventWait, ...]) -> None:
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
                # No such firing will come; the last one that was enqueued is what read the slot.
                last = ring.count - 1
            if last > self.known[wait.actor]:
                self.wait_for[wait.actor](ring.event_of(last))
                self.known[wait.actor] = last


def _wait_on_host(event: DeviceEvent) -> None:
    event.synchronize()


Blame = Callable[[DeviceFault], DeviceFailure | DeviceFault]


class StreamHome(NamedTuple):
    """A stream's name and device."""

    name: str
    device: DeviceDriver


FindWaits = Callable[[MachineTable, Collection[int], int], WaitTable]
"""As `wait_table`: from a graph, its asynchronous streams and `max_ahead`."""


class Executor:
    """One run of an actor graph on its devices.

    `fault` is what a device has reported, or None.

    Args:
        table: The graph.
        streams: Where each stream of the table is, by its number there.
        max_ahead: Steps that may be enqueued and not ended, 1 or more; of an actor that fires less
            than once in so many steps, one firing.
        find_waits: Says which firings wait for which.
    """

    __slots__ = ("_bodies", "_devices", "_lanes", "_rings", "_waiting", "fault", "table", "waits")

    def __init__(
        self,
        table: MachineTable,
        streams: Mapping[int, StreamHome],
        *,
        max_ahead: int = 2,
        find_waits: FindWaits = wait_table,
    ) -> None:
        if max_ahead < 1:
            raise ValueError(f"expected max_ahead of 1 step or more, got {max_ahead}")
        self.table = table
        self.fault: DeviceFault | None = None
        self._devices = {h.device.device: h.device for h in streams.values()}
        # Only of these does DONE mean enqueued, so only their firings need events.
        late = [number for number, home in streams.items() if home.device.is_asynchronous]
        self.waits = waits = find_waits(table, late, max_ahead)
        self._lanes = {
            number: StreamState(home.device, home.name, table.num_actors)
            for number, home in streams.items()
        }
        self._rings = tuple(
            [
                EventRing(name, tuple([self._lane(a).device.make_event() for _ in range(count)]))
                for a, (name, count) in enumerate(zip(table.names, waits.num_events, strict=True))
            ]
        )
        self._waiting = {number: self._wait_for(lane) for number, lane in self._lanes.items()}
        self._bodies = tuple([self._make_body(actor) for actor in range(table.num_actors)])

    def _lane(self, actor: int) -> StreamState:
        return self._lanes[self.table.streams[actor]]

    def _wait_for(self, lane: StreamState) -> tuple[Callable[[DeviceEvent], object], ...]:
        """Return by actor what makes a stream wait for its events."""
        return tuple([lane.wait_for(self._lane(actor)) for actor in range(self.table.num_actors)])

    def _make_body(self, actor: int) -> _DeviceBody | _HostBody | None:
        lane, every = self._lane(actor), self.waits.all[actor]
        is_late = lane.device.is_asynchronous
        if not is_late and not every:
            return None
        # An actor of the host knows what it waited for itself: its stream may be several threads.
        known = lane.known if is_late else [-1] * self.table.num_actors
        wait_for = self._waiting[self.table.streams[actor]]
        gate = EventWaiter(self.waits.needed[actor], every, self._rings, known, wait_for)
        if not is_late:
            return _HostBody(gate, self._blame)
        ring, throttle = self._rings[actor], self.waits.throttles[actor]
        is_awaited = self.table.is_detached[actor]
        return _DeviceBody(actor, gate, ring, lane, throttle, self._blame, is_awaited=is_awaited)

    def bind_chain(self, actor: int, launches: Chain) -> Chain:
        """Return the chain as the actor's device runs it, for `bind` to make firings of."""
        lane = self._lane(actor)
        self._rings[actor].num_launches = len(launches)
        return lane.device.bind_chain(lane.stream, launches)

    def bind(self, actor: int, phases: tuple[Chain, ...]) -> tuple[Chain, ...]:
        """Return what the firings of an actor run, of its chains from `bind_chain` by phase.

        Firing k of a run is the k-th call of these, in whatever phase.
        """
        body = self._bodies[actor]
        return phases if body is None else tuple([body.bind(chain, None) for chain in phases])

    def bind_flush(self, actor: int, num_tokens_per_input: tuple[int, ...], chain: Chain) -> Chain:
        """Return what the last firing of a flushed actor runs, with so many tokens."""
        body = self._bodies[actor]
        if body is None:
            return chain
        missing = {
            edge: self.table.edges[edge].consume - count
            for edge, count in zip(self.table.inputs[actor], num_tokens_per_input, strict=True)
        }
        waits = [w.flushed(missing[w.edge]) if w.is_input else w for w in self.waits.all[actor]]
        return body.bind(chain, tuple(waits))

    def num_unfinished(self, actor: int) -> int:
        """Return how many firings of an actor are enqueued and have not ended; 0 on the host."""
        return self._rings[actor].num_unfinished

    def synchronize(self) -> None:
        """Wait until all that was enqueued has ended. Raises DeviceFailure or DeviceFault."""
        try:
            for device in self._devices.values():
                device.synchronize()
        except DeviceFault as fault:
            raise self._blame(fault) from fault.__cause__

    def _blame(self, fault: DeviceFault) -> DeviceFailure | DeviceFault:
        """Return the failure of the launch that faulted, or the fault with a note of the suspects.

        A launch is known by its number on its stream; an actor's ring knows the numbers of all
        firings that can be unfinished.
        """
        if self.fault is None:
            self.fault = fault
        suspects = []
        for actor, ring in enumerate(self._rings):
            position = None
            if self._lane(actor).stream is fault.stream and fault.launch is not None:
                position = ring.find(fault.launch)
            if position is not None:
                firing, launch = position
                return DeviceFailure(
                    f"launch {launch + 1} of {ring.num_launches} of actor {ring.name!r} failed on"
                    f" the device in firing {firing}: {fault.__cause__ or fault}",
                    actor=actor,
                    firing=firing,
                    launch=launch,
                )
            if ring.num_unfinished:
                first = ring.count - ring.num_unfinished
                suspects.append(f"{ring.name!r} firings {first} to {ring.count - 1}")
        fault.add_note("enqueued and not ended: " + ("; ".join(suspects) or "nothing"))
        return fault


class _DeviceBody:
    """Enqueues the firings of one actor on its stream."""

    __slots__ = ("_actor", "_blame", "_gate", "_is_awaited", "_lane", "_ring", "_throttle")

    def __init__(
        self,
        actor: int,
        gate: EventWaiter,
        ring: EventRing,
        lane: StreamState,
        throttle: Throttle,
        blame: Blame,
        *,
        is_awaited: bool,
    ) -> None:
        self._is_awaited = is_awaited
        self._actor = actor
        self._gate = gate
        self._ring = ring
        self._lane = lane
        self._throttle = throttle
        self._blame = blame

    def bind(self, chain: Chain, waits: tuple[EventWait, ...] | None) -> Chain:
        return (partial(self._fire, chain, waits),)

    def _fire(self, chain: Chain, waits: tuple[EventWait, ...] | None) -> None:
        ring, lane = self._ring, self._lane
        firing = ring.count
        try:
            ahead = self._throttle.firing(firing)
            if ahead >= 0:
                # Before anything is enqueued: the host holds here, with no half of a firing on the
                # stream.
                ring.event_of(ahead).synchronize()
            if waits is None:
                self._gate.wait_for_inputs(firing)
            else:
                self._gate.wait_at_end(firing, waits)
            index = firing % len(ring.events)
            # Before the launches: one that fails is found by these columns (`_blame`).
            ring.firings[index] = firing
            ring.first_launches[index] = lane.num_launches
            lane.num_launches += ring.num_launches
            for enqueue in chain:
                self._enqueue(enqueue, firing)
            lane.stream.record(ring.events[index])
            if self._is_awaited:
                ring.events[index].synchronize()
        except DeviceFault as fault:
            # The traceback keeps this frame, and the launches the arena.
            del chain
            raise self._blame(fault) from fault.__cause__
        # Last: a firing that failed half-way has recorded no event and is not waited for.
        ring.count = firing + 1

    def _enqueue(self, enqueue: Launch, firing: int) -> None:
        try:
            enqueue()
        except DeviceFault:
            raise
        except Exception as error:
            index = getattr(enqueue, "running", 0)
            # Frames of the launch hold views, and with them the arena, as long as the error lives.
            clear_frames(error.__traceback__)
            del enqueue
            raise DeviceFailure(
                f"launch {index + 1} of {self._ring.num_launches} of actor {self._ring.name!r}"
                f" could not be enqueued in firing {firing}: {error}",
                actor=self._actor,
                firing=firing,
                launch=index,
            ) from error


class _HostBody:
    """Runs the firings of one actor on the host, each after what it needs has ended."""

    __slots__ = ("_blame", "_firing", "_gate")

    def __init__(self, gate: EventWaiter, blame: Blame) -> None:
        self._gate = gate
        self._blame = blame
        self._firing = 0

    def bind(self, chain: Chain, waits: tuple[EventWait, ...] | None) -> Chain:
        # Part of the first call, so that the launches keep their numbers.
        first, *rest = chain or (_nothing,)
        return (_Gated(self, first, waits), *rest)

    def let_pass(self, waits: tuple[EventWait, ...] | None) -> None:
        firing = self._firing
        self._firing = firing + 1
        try:
            if waits is None:
                self._gate.wait_for_inputs(firing)
            else:
                self._gate.wait_at_end(firing, waits)
        except DeviceFault as fault:
            raise self._blame(fault) from fault.__cause__


class _Gated:
    """The first call of a chain on the host, with the waits before it."""

    __slots__ = ("_body", "_first", "_has_passed", "_waits")

    def __init__(self, body: _HostBody, first: Launch, waits: tuple[EventWait, ...] | None) -> None:
        self._body = body
        self._first = first
        self._waits = waits
        self._has_passed = False

    def __call__(self) -> None:
        # A fault while it waits is no launch's of this chain: `running` then says 0.
        self._has_passed = False
        self._body.let_pass(self._waits)
        self._has_passed = True
        self._first()

    @property
    def num_launches(self) -> int:
        """How many launches of the plan this is."""
        return int(getattr(self._first, "num_launches", 1))

    @property
    def running(self) -> int:
        """The launch that runs now, or ran last, counted from 0."""
        return int(getattr(self._first, "running", 0)) if self._has_passed else 0


def _nothing() -> None:
    """Stand for a chain without launches."""
