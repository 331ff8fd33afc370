"""Run actors on the streams of an asynchronous device: a firing is enqueued, and the host goes on.

For every actor the executor makes the chains that the host's machinery runs in place of the bound
ones, so dispatcher, workers and machine stay as they are. DONE then means *enqueued* for an actor
on the device, and *ended* for an actor on the host:

- **On the device**, firing k puts on its stream: a wait for the event of every firing that it needs
  (`waits` says which, and which go without saying), the launches, and the record of its own event.
  The host waits for one thing only: not to be more than `max_ahead` steps ahead.
- **On the host**, firing k waits for those events itself, then runs its launches as ever.

**Why it is right.** When a firing starts, the messages say that every firing it needs has been
enqueued, so its event is recorded and a wait sees that record. By induction over the order of
enqueueing, no stream waits for something that is put on a stream later: the device cannot deadlock.
A ring remembers which firing recorded an event, and refuses to give one that was recorded again.

What a stream has waited for it need not wait for again: a column per stream knows the last firing
of each actor. Nothing is built per firing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import length_hint

from actors.device.protocol import (
    DeviceDriver,
    DeviceEvent,
    DeviceFailure,
    DeviceFault,
    DeviceStream,
)
from actors.device.waits import EventWait, Throttle, wait_table
from actors.protocol import Chain, Launch
from actors.table import MachineTable
from compiler.errors import InternalError

Blame = Callable[[DeviceFault], DeviceFailure | DeviceFault]


class Executor:
    """One run of an actor graph on a device.

    Args:
        table: The graph. Actors on streams that are not in `device_streams` are on the host.
        device_streams: Names of the device's streams, by number in the table.
        device: Where they are.
        max_ahead: Steps that may be enqueued and not ended, 1 or more; of an actor that fires less
            than once in so many steps, one firing.
    """

    __slots__ = ("_bodies", "_device", "_lanes", "_rings", "table", "waits")

    def __init__(
        self,
        table: MachineTable,
        device_streams: Mapping[int, str],
        device: DeviceDriver,
        *,
        max_ahead: int = 2,
    ) -> None:
        if max_ahead < 1:
            raise ValueError(f"expected max_ahead of 1 step or more, got {max_ahead}")
        self.table = table
        self.waits = waits = wait_table(table, device_streams, max_ahead)
        self._device = device
        self._rings = tuple(
            [
                _Ring(name, tuple([device.make_event() for _ in range(num_events)]))
                for name, num_events in zip(table.names, waits.num_events, strict=True)
            ]
        )
        self._lanes = {
            number: _Lane(device.make_stream(name), table.num_actors)
            for number, name in device_streams.items()
        }
        self._bodies = tuple([self._make_body(actor) for actor in range(table.num_actors)])

    def _make_body(self, actor: int) -> _DeviceBody | _HostBody:
        lane = self._lanes.get(self.table.streams[actor])
        known = [-1] * self.table.num_actors if lane is None else lane.known
        wait_for = _wait_on_host if lane is None else lane.stream.wait
        needed, every = self.waits.needed[actor], self.waits.all[actor]
        gate = _Gate(needed, every, self._rings, known, wait_for)
        if lane is None:
            return _HostBody(gate, self._blame)
        ring, throttle = self._rings[actor], self.waits.throttles[actor]
        return _DeviceBody(actor, gate, ring, lane, throttle, self._blame)

    def bind(self, actor: int, phases: tuple[Chain, ...]) -> tuple[Chain, ...]:
        """Return what the host's machinery runs for an actor, instead of its chains by phase.

        Firing k of a run is the k-th call of these, in whatever phase.
        """
        return tuple([self._bodies[actor].bind(chain, None) for chain in phases])

    def bind_flush(self, actor: int, num_tokens_per_input: tuple[int, ...], chain: Chain) -> Chain:
        """Return what the last firing of a flushed actor runs, with so many tokens."""
        missing = {
            edge: self.table.edges[edge].consume - count
            for edge, count in zip(self.table.inputs[actor], num_tokens_per_input, strict=True)
        }
        waits = [w.flushed(missing[w.edge]) if w.is_input else w for w in self.waits.all[actor]]
        return self._bodies[actor].bind(chain, tuple(waits))

    def num_unfinished(self, actor: int) -> int:
        """Return how many firings of an actor are enqueued and have not ended; 0 on the host."""
        return self._rings[actor].num_unfinished

    def synchronize(self) -> None:
        """Wait until all that was enqueued has ended. Raises DeviceFailure or DeviceFault."""
        try:
            self._device.synchronize()
        except DeviceFault as fault:
            raise self._blame(fault) from fault.__cause__

    def restart(self) -> None:
        """Wait for the device, and let the next firing of every actor be firing 0 again."""
        self.synchronize()
        for ring in self._rings:
            ring.restart()
        for lane in self._lanes.values():
            lane.restart()
        for body in self._bodies:
            body.restart()

    def _blame(self, fault: DeviceFault) -> DeviceFailure | DeviceFault:
        """Return the failure of the launch that a fault is about, or the fault with its suspects.

        A launch is known by its number on its stream; an actor's ring knows the numbers of all
        firings that can be unfinished.
        """
        suspects = []
        for actor, ring in enumerate(self._rings):
            lane = self._lanes.get(self.table.streams[actor])
            found = None
            if lane is not None and lane.stream is fault.stream and fault.launch is not None:
                found = ring.find(fault.launch)
            if found is not None:
                firing, launch = found
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


class _Ring:
    """The events of an actor, recorded in turn: the one of firing k is number k mod their count.

    `count` firings were enqueued. `firings` and `first_launches` say by event which firing recorded
    it last, and how many launches its stream had before.
    """

    __slots__ = ("count", "events", "firings", "first_launches", "name", "num_launches")

    def __init__(self, name: str, events: tuple[DeviceEvent, ...]) -> None:
        self.name = name
        self.events = events
        self.num_launches = 0
        self.restart()

    def restart(self) -> None:
        self.count = 0
        self.firings = [-1] * len(self.events)
        self.first_launches = [0] * len(self.events)

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


class _Lane:
    """A stream, with how many launches were put on it and, by actor, the last firing before it."""

    __slots__ = ("known", "num_launches", "stream")

    def __init__(self, stream: DeviceStream, num_actors: int) -> None:
        self.stream = stream
        self.known = [-1] * num_actors
        self.num_launches = 0

    def restart(self) -> None:
        """Forget what was waited for. Launches are counted for as long as the stream lives."""
        self.known[:] = [-1] * len(self.known)


class _Gate:
    """Lets a firing of one actor pass once `wait_for` was called for all that it needs.

    `known` is by actor the last firing that whatever passes comes after anyway.
    """

    __slots__ = ("every", "known", "needed", "rings", "wait_for")

    def __init__(
        self,
        needed: tuple[EventWait, ...],
        every: tuple[EventWait, ...],
        rings: tuple[_Ring, ...],
        known: list[int],
        wait_for: Callable[[DeviceEvent], object],
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
                self.wait_for(ring.event_of(last))
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
                self.wait_for(ring.event_of(last))
                self.known[wait.actor] = last


class _DeviceBody:
    """Enqueues the firings of one actor on its stream."""

    __slots__ = ("_actor", "_blame", "_gate", "_lane", "_ring", "_throttle")

    def __init__(
        self, actor: int, gate: _Gate, ring: _Ring, lane: _Lane, throttle: Throttle, blame: Blame
    ) -> None:
        self._actor = actor
        self._gate = gate
        self._ring = ring
        self._lane = lane
        self._throttle = throttle
        self._blame = blame

    def bind(self, chain: Chain, waits: tuple[EventWait, ...] | None) -> Chain:
        self._ring.num_launches = len(chain)
        return (partial(self._fire, chain, waits),)

    def restart(self) -> None:
        """Nothing to do: the ring counts."""

    def _fire(self, chain: Chain, waits: tuple[EventWait, ...] | None) -> None:
        ring, lane = self._ring, self._lane
        firing = ring.count
        try:
            ahead = self._throttle.firing(firing)
            if ahead >= 0:
                ring.event_of(ahead).synchronize()
            if waits is None:
                self._gate.let_pass(firing)
            else:
                self._gate.let_pass_late(firing, waits)
            index = firing % len(ring.events)
            ring.firings[index] = firing
            ring.first_launches[index] = lane.num_launches
            lane.num_launches += len(chain)
            self._enqueue(chain, firing)
            lane.stream.record(ring.events[index])
        except DeviceFault as fault:
            # The traceback keeps this frame, and the launches the arena.
            del chain
            raise self._blame(fault) from fault.__cause__
        ring.count = firing + 1

    def _enqueue(self, chain: Chain, firing: int) -> None:
        enqueue = self._lane.stream.enqueue
        launches = iter(chain)
        try:
            for launch in launches:
                enqueue(launch)
        except DeviceFault:
            raise
        except Exception as error:
            index = len(chain) - length_hint(launches) - 1
            del chain, launches, launch
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

    def __init__(self, gate: _Gate, blame: Blame) -> None:
        self._gate = gate
        self._blame = blame
        self._firing = 0

    def bind(self, chain: Chain, waits: tuple[EventWait, ...] | None) -> Chain:
        if not self._gate.every:
            return chain
        # Part of the first launch, so that the launches keep their numbers.
        first, *rest = chain or (_nothing,)
        return (partial(self._fire, first, waits), *rest)

    def restart(self) -> None:
        self._firing = 0
        self._gate.known[:] = [-1] * len(self._gate.known)

    def _fire(self, first: Launch, waits: tuple[EventWait, ...] | None) -> None:
        firing = self._firing
        self._firing = firing + 1
        try:
            if waits is None:
                self._gate.let_pass(firing)
            else:
                self._gate.let_pass_late(firing, waits)
        except DeviceFault as fault:
            del first
            raise self._blame(fault) from fault.__cause__
        first()


def _wait_on_host(event: DeviceEvent) -> None:
    event.synchronize()


def _nothing() -> None:
    """Stand for a chain without launches."""
