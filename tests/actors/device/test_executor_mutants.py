"""Mutants: each is one bug in the executor or the device, and the numbers must show it."""

from dataclasses import replace
from random import Random

import pytest
import tiers

from actors.race.waits import wait_table
from actors.testing.simulated import LateSchedule, OperationKind
from compiler.contract.errors import InternalError

SEEDS, LEAST = tiers.size(300, merge=100), tiers.size(5, merge=2)
"""Draws of a graph, and in how many of them at least a mutant gives other numbers."""

_HOST = 10
"""As in the graphs: streams from here on are the host's."""


def edit_waits(table, waits, edit, *, on_device=True):
    """Change what the actors wait for; `edit` returns a wait, or None to forget it."""
    needed, every = [
        tuple(
            [
                tuple([new for new in map(edit, row) if new is not None])
                if (table.streams[a] < _HOST) == on_device
                else row
                for a, row in enumerate(rows)
            ]
        )
        for rows in (waits.needed, waits.all)
    ]
    return replace(waits, needed=needed, all=every)


def forget_tokens(table, waits):
    return edit_waits(table, waits, lambda wait: None if wait.is_input else wait)


def forget_slots(table, waits):
    return edit_waits(table, waits, lambda wait: wait if wait.is_input else None)


def forget_tokens_on_the_host(table, waits):
    return edit_waits(table, waits, lambda wait: None if wait.is_input else wait, on_device=False)


def forget_slots_on_the_host(table, waits):
    return edit_waits(table, waits, lambda wait: wait if wait.is_input else None, on_device=False)


def wait_for_the_firing_before(table, waits):
    return edit_waits(table, waits, lambda wait: wait._replace(plus=wait.plus - wait.over))


def wait_for_the_first_token_only(table, waits):
    def edit(wait):
        edge = table.edges[wait.edge]
        return wait._replace(plus=wait.plus - (edge.consume - 1)) if wait.is_input else wait

    return edit_waits(table, waits, edit)


def one_slot_too_many(table, waits):
    return edit_waits(table, waits, lambda w: w if w.is_input else w._replace(plus=w.plus - 1))


WAITS = [
    forget_tokens, forget_slots, forget_tokens_on_the_host, forget_slots_on_the_host,
    wait_for_the_firing_before, wait_for_the_first_token_only, one_slot_too_many,
]  # fmt: skip


def lengthened(waits):
    """A ring refuses what was recorded again, and would find many a mutant before the numbers."""
    counts = [count + 8 if count else 0 for count in waits.num_events]
    return replace(waits, num_events=tuple(counts))


def is_wrong(seed, graphs, make_random, **mutant):
    return not graphs.is_equal_for(seed, make_random, **mutant)


def longer(*request):
    return lengthened(wait_table(*request))


@pytest.mark.parametrize("edit", WAITS, ids=lambda edit: edit.__name__)
def test_numbers_come_out_wrong_with_an_executor_that_would(edit, graphs, make_random):
    def find_waits(table, *request):
        return edit(table, longer(table, *request))

    killed = sum([is_wrong(s, graphs, make_random, find_waits=find_waits) for s in range(SEEDS)])
    assert killed >= LEAST


class KnowsOneTooMany(list):
    def __setitem__(self, actor, firing):
        super().__setitem__(actor, firing + 1)


def know_for_all_streams_what_one_has_waited_for(gates):
    for gate in gates:
        gate.known = gates[0].known


def know_one_firing_too_many(gates):
    for gate in gates:
        gate.known = KnowsOneTooMany(gate.known)


@pytest.mark.parametrize(
    "mutate", [know_for_all_streams_what_one_has_waited_for, know_one_firing_too_many]
)
def test_numbers_come_out_wrong_with_streams_that_would(mutate, graphs, make_random):
    def change(executor):
        streams, bodies = executor.table.streams, enumerate(executor._bodies)
        if gates := [body._gate for a, body in bodies if streams[a] < _HOST]:
            mutate(gates)

    killed = sum(
        [is_wrong(s, graphs, make_random, mutate=change, find_waits=longer) for s in range(SEEDS)]
    )
    assert killed >= LEAST


class Wrapping:
    """A device whose streams are wrapped, and its launches put on them."""

    def __init__(self, device, wrapper):
        self.device_of_streams, self.wrapper = device, wrapper

    def __getattr__(self, name):
        return getattr(self.device_of_streams, name)

    def make_stream(self, name):
        return self.wrapper(self.device_of_streams, name)

    def bind_chain(self, stream, launches):
        return (lambda: [stream.enqueue(launch) for launch in launches],)


class Wrapped:
    def __init__(self, device, name):
        self.stream = stream = device.make_stream(name)
        self.held = []
        self.enqueue, self.record, self.wait = stream.enqueue, stream.record, stream.wait


class RecordBeforeLaunches(Wrapped):
    def __init__(self, device, name):
        super().__init__(device, name)
        self.enqueue, self.record = self.held.append, self.record_first

    def record_first(self, event):
        self.stream.record(event)
        for launch in self.held:
            self.stream.enqueue(launch)
        self.held.clear()


class WaitAfterLaunches(Wrapped):
    def __init__(self, device, name):
        super().__init__(device, name)
        self.wait, self.record = self.held.append, self.wait_first

    def wait_first(self, event):
        for other in self.held:
            self.stream.wait(other)
        self.held.clear()
        self.stream.record(event)


class RecordOnAnIdleStream(Wrapped):
    def __init__(self, device, name):
        super().__init__(device, name)
        self.record = device.make_stream("idle").record


class LaunchInReverse(Wrapped):
    def __init__(self, device, name):
        super().__init__(device, name)
        self.enqueue, self.record = self.held.append, self.record_last

    def record_last(self, event):
        while self.held:
            self.stream.enqueue(self.held.pop())
        self.stream.record(event)


@pytest.mark.parametrize(
    "wrapper", [RecordBeforeLaunches, WaitAfterLaunches, RecordOnAnIdleStream, LaunchInReverse]
)
def test_numbers_come_out_wrong_with_a_device_that_would(wrapper, graphs, make_random):
    mutant = {"find_waits": longer, "wrap": lambda device: Wrapping(device, wrapper)}
    killed = sum([is_wrong(seed, graphs, make_random, **mutant) for seed in range(SEEDS)])
    assert killed >= LEAST


def on_device(table, rows, others):
    """Return the rows of the actors on a device, and of the actors on the host the others."""
    both = zip(table.streams, rows, others, strict=True)
    return tuple([row if stream < _HOST else other for stream, row, other in both])


def let_pass_what_an_ended_consumer_freed(table, waits):
    return replace(waits, all=on_device(table, [()] * table.num_actors, waits.all))


def trust_an_ended_consumer_for_others(table, waits):
    return replace(waits, all=on_device(table, waits.needed, waits.all))


def num_wrong(graphs, case, edit):
    """Return in how many of 100 runs an executor with other waits gives other numbers."""
    table, admitted = case

    def find_waits(table, *request):
        return edit(table, wait_table(table, *request))

    seeds = range(100)
    runs = [graphs.is_equal(table, admitted, Random(s), find_waits=find_waits) for s in seeds]
    return runs.count(False)


@pytest.mark.parametrize(
    "edit", [let_pass_what_an_ended_consumer_freed, trust_an_ended_consumer_for_others]
)
def test_the_end_of_a_run_comes_out_wrong_with_an_executor_that_would(edit, graphs):
    assert num_wrong(graphs, graphs.early_end(), edit) >= 5


def trust_a_flushed_actor_for_others(table, waits):
    """Drop a wait that the full firings of `late` imply, and the flushed one does not."""
    assert [wait.actor for wait in waits.needed[3]] == [0]
    return replace(waits, needed=(*waits.needed[:3], ()))


def test_the_last_firing_comes_out_wrong_with_an_executor_that_trusts_a_flushed_actor(graphs):
    case = graphs.flushed_end()
    assert num_wrong(graphs, case, lambda table, waits: waits) == 0
    assert num_wrong(graphs, case, trust_a_flushed_actor_for_others) >= 5


def test_no_wait_that_is_left_can_be_dropped(graphs):
    """Numbers are wrong without any one of the waits of a graph that has implied ones too."""
    case = table, _ = graphs.early_end()
    needed = graphs.make_executor(table, graphs.late(Random(0))).waits.needed
    places = [(a, w) for a, row in enumerate(needed) for w in row]
    assert len(places) == 6
    for actor, wait in places:

        def drop(table, waits, actor=actor, wait=wait):
            rows = [
                tuple([tuple([w for w in row if (a, w) != (actor, wait)])
                       for a, row in enumerate(column)])
                for column in (waits.needed, waits.all)
            ]  # fmt: skip
            return replace(waits, needed=rows[0], all=rows[1])

        wrong = num_wrong(graphs, case, drop)
        assert wrong >= 3, f"{wait} of {table.names[actor]!r} is not missed"


def test_a_ring_that_is_too_short_is_refused_when_an_event_is_recorded_again(graphs, make_random):
    def shorten(*request):
        waits = wait_table(*request)
        return replace(waits, num_events=tuple([min(count, 1) for count in waits.num_events]))

    refused = 0
    for seed in range(100):
        try:
            assert graphs.is_equal_for(seed, make_random, find_waits=shorten)
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
            assert "the devices cannot continue: the host waits for record" in text
            assert "stream 'stream 0' waits for record" in text
            hung += 1
    assert hung >= 10
