"""Mutants: each is one bug in the executor or the device, and the numbers must show it."""

from random import Random

import pytest

from actors.testing.simulated import LateSchedule, OperationKind
from compiler.contract.errors import InternalError

_HOST = 10
"""As in the graphs: streams from here on are the host's."""


def bodies_of(executor, *, on_device):
    """Return what waits; an actor of the host that needs no device has no body."""
    streams, bodies = executor.table.streams, enumerate(executor._bodies)
    return [b for a, b in bodies if (streams[a] < _HOST) == on_device and b is not None]


def give_events(ring, events):
    ring.events, ring.firings = events, [-1] * len(events)
    ring.first_launches = [0] * len(events)


def lengthen_rings(executor):
    """A ring refuses what was recorded again, and would find many a mutant before the numbers."""
    for actor, ring in enumerate(executor._rings):
        if ring.events:
            device = executor._lane(actor).device
            more = tuple([device.make_event() for _ in range(8)])
            give_events(ring, ring.events + more)


def edit_waits(executor, edit, *, on_device=True):
    """Change what the actors wait for; `edit` returns a wait, or None to forget it."""
    for body in bodies_of(executor, on_device=on_device):
        gate = body._gate
        for name in ("needed", "every"):
            waits = [edit(wait) for wait in getattr(gate, name)]
            setattr(gate, name, tuple([wait for wait in waits if wait is not None]))


def forget_tokens(executor):
    edit_waits(executor, lambda wait: None if wait.is_input else wait)


def forget_slots(executor):
    edit_waits(executor, lambda wait: wait if wait.is_input else None)


def forget_tokens_on_the_host(executor):
    edit_waits(executor, lambda wait: None if wait.is_input else wait, on_device=False)


def forget_slots_on_the_host(executor):
    edit_waits(executor, lambda wait: wait if wait.is_input else None, on_device=False)


def wait_for_the_firing_before(executor):
    edit_waits(executor, lambda wait: wait._replace(plus=wait.plus - wait.over))


def wait_for_the_first_token_only(executor):
    def edit(wait):
        edge = executor.table.edges[wait.edge]
        return wait._replace(plus=wait.plus - (edge.consume - 1)) if wait.is_input else wait

    edit_waits(executor, edit)


def one_slot_too_many(executor):
    edit_waits(executor, lambda w: w if w.is_input else w._replace(plus=w.plus - 1))


def know_for_all_streams_what_one_has_waited_for(executor):
    shared = [-1] * executor.table.num_actors
    for body in bodies_of(executor, on_device=True):
        body._gate.known = shared


def know_one_firing_too_many(executor):
    class Known(list):
        def __setitem__(self, actor, firing):
            super().__setitem__(actor, firing + 1)

    for body in bodies_of(executor, on_device=True):
        body._gate.known = Known(body._gate.known)


def wrapped_streams(wrapper):
    def mutate(executor):
        for lane in executor._lanes.values():
            if lane.device.is_asynchronous:
                lane.stream = wrapper(lane.stream)
                lane.device = Wrapping(lane.device)
        for body in bodies_of(executor, on_device=True):
            body._gate.wait_for = (body._lane.stream.wait,) * executor.table.num_actors

    mutate.__name__ = wrapper.__name__
    return mutate


class Wrapping:
    """A device that puts launches on a wrapped stream."""

    is_asynchronous = True

    def __init__(self, device):
        self.device = device.device

    def bind_chain(self, stream, launches):
        return (lambda: [stream.enqueue(launch) for launch in launches],)


class Wrapped:
    def __init__(self, stream):
        self.stream = stream
        self.held = []
        self.enqueue, self.record, self.wait = stream.enqueue, stream.record, stream.wait


class RecordBeforeLaunches(Wrapped):
    def __init__(self, stream):
        super().__init__(stream)
        self.enqueue, self.record = self.held.append, self.record_first

    def record_first(self, event):
        self.stream.record(event)
        for launch in self.held:
            self.stream.enqueue(launch)
        self.held.clear()


class WaitAfterLaunches(Wrapped):
    def __init__(self, stream):
        super().__init__(stream)
        self.wait, self.record = self.held.append, self.wait_first

    def wait_first(self, event):
        for other in self.held:
            self.stream.wait(other)
        self.held.clear()
        self.stream.record(event)


class RecordOnAnIdleStream(Wrapped):
    def __init__(self, stream):
        super().__init__(stream)
        self.record = stream._schedule.make_stream(stream.device, "idle").record


class LaunchInReverse(Wrapped):
    def __init__(self, stream):
        super().__init__(stream)
        self.enqueue, self.record = self.held.append, self.record_last

    def record_last(self, event):
        while self.held:
            self.stream.enqueue(self.held.pop())
        self.stream.record(event)


MUTANTS = [
    forget_tokens, forget_slots, forget_tokens_on_the_host, forget_slots_on_the_host,
    wait_for_the_firing_before, wait_for_the_first_token_only, one_slot_too_many,
    know_for_all_streams_what_one_has_waited_for, know_one_firing_too_many,
    wrapped_streams(RecordBeforeLaunches), wrapped_streams(WaitAfterLaunches),
    wrapped_streams(RecordOnAnIdleStream), wrapped_streams(LaunchInReverse),
]  # fmt: skip


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda m: m.__name__)
def test_numbers_come_out_wrong_with_an_executor_that_would(mutate, graphs, make_random):
    def change(executor):
        lengthen_rings(executor)
        mutate(executor)

    killed = sum([not graphs.is_equal_for(seed, make_random, change) for seed in range(300)])
    assert killed >= 5


def let_pass_what_an_ended_consumer_freed(executor):
    for body in bodies_of(executor, on_device=True):
        body._gate.every = ()


def trust_an_ended_consumer_for_others(executor):
    for body in bodies_of(executor, on_device=True):
        body._gate.every = body._gate.needed


@pytest.mark.parametrize(
    "mutate", [let_pass_what_an_ended_consumer_freed, trust_an_ended_consumer_for_others]
)
def test_the_end_of_a_run_comes_out_wrong_with_an_executor_that_would(mutate, graphs):
    table, admitted = graphs.early_end()
    killed = [not graphs.is_equal(table, admitted, Random(s), mutate=mutate) for s in range(100)]
    assert sum(killed) >= 5


def trust_a_flushed_actor_for_others(executor):
    """Drop a wait that the full firings of `late` imply, and the flushed one does not."""
    gate = executor._bodies[3]._gate
    assert [wait.actor for wait in gate.needed] == [0]
    gate.needed = ()


def test_the_last_firing_comes_out_wrong_with_an_executor_that_trusts_a_flushed_actor(graphs):
    table, admitted = graphs.flushed_end()
    seeds = range(100)
    assert all([graphs.is_equal(table, admitted, Random(seed)) for seed in seeds])
    mutate = trust_a_flushed_actor_for_others
    killed = [not graphs.is_equal(table, admitted, Random(s), mutate=mutate) for s in seeds]
    assert sum(killed) >= 5


def test_no_wait_that_is_left_can_be_dropped(graphs):
    """Numbers are wrong without any one of the waits of a graph that has implied ones too."""
    table, admitted = graphs.early_end()
    needed = graphs.make_executor(table, graphs.late(Random(0))).waits.needed
    places = [(a, w) for a, row in enumerate(needed) for w in row]
    assert len(places) == 6
    for actor, wait in places:

        def drop(executor, actor=actor, wait=wait):
            gate = executor._bodies[actor]._gate
            gate.needed = tuple([w for w in gate.needed if w != wait])
            gate.every = tuple([w for w in gate.every if w != wait])

        killed = [not graphs.is_equal(table, admitted, Random(s), mutate=drop) for s in range(100)]
        assert sum(killed) >= 3, f"{wait} of {table.names[actor]!r} is not missed"


def test_a_ring_that_is_too_short_is_refused_when_an_event_is_recorded_again(graphs, make_random):
    def shorten(executor):
        for ring in executor._rings:
            give_events(ring, ring.events[:1])

    refused = 0
    for seed in range(100):
        try:
            assert graphs.is_equal_for(seed, make_random, shorten)
        except InternalError as error:
            refused += "events are too few" in str(error)
    assert refused >= 20


class WaitsForTheLatest(LateSchedule):
    """Devices whose waits look for the latest record when they are executed."""

    def make_event(self, device):
        event = super().make_event(device)
        self.events = [*getattr(self, "events", []), event]
        return event

    def _ready(self):
        for stream in self._streams:
            for number, operation in enumerate(stream.queue):
                if operation.kind is OperationKind.WAIT and operation.record is not None:
                    latest = self.events[operation.record.event].record
                    stream.queue[number] = operation._replace(record=latest)
        return super()._ready()


def test_a_device_whose_waits_are_no_snapshots_hangs_and_says_who_waits(graphs):
    hung = 0
    for seed in range(40):
        options = {"schedule_type": WaitsForTheLatest, "max_ahead": 3}
        try:
            graphs.is_equal(graphs.ping_pong(), {0: 20}, Random(seed), **options)
        except InternalError as error:
            text = str(error)
            assert "the devices cannot go on: the host waits for record" in text
            assert "stream 'stream 0' waits for record" in text
            hung += 1
    assert hung >= 10
