"""Waits against the machine, against brute force, and in words."""

from itertools import product
from random import Random

import pytest

from actors.machine.machine import Machine
from actors.machine.table import Edge, MachineTable
from actors.machine.transitions import Message, message
from actors.race.waits import Throttle, wait_table

RATES = [
    (produce, consume, least + extra, initial)
    for produce, consume in product([1, 2, 3], repeat=2)
    for least in [produce + consume - 1]
    for extra in [0, 1, 3]
    for initial in [0, 1, least]
]


def one_edge(produce, consume, num_slots, initial):
    edge = Edge("x", 0, 1, produce, consume, num_slots, initial)
    return MachineTable.from_edges(["first", "second"], [edge], sources=[0], streams=[0, 1])


class Race:
    """Runs first and second as far as they come, while one of them is held in a firing."""

    def __init__(self, table):
        self.machine = Machine(table)
        self.machine.admit(0, 100)
        self.is_running = [False, False]
        self.ended = [0, 0]

    def settle(self, held=None, until=None):
        """End firings until nothing happens; never `held`, nor `until` = (actor, firings)."""
        machine = self.machine
        while True:
            while machine.outbox:
                machine.receive(machine.outbox.pop(0))
            while machine.fireable:
                self.is_running[machine.fireable.popleft()] = True
            able = [
                a
                for a in (0, 1)
                if self.is_running[a] and a != held and (a, self.ended[a]) != until
            ]
            if not able:
                return
            actor = able[0]
            self.is_running[actor] = False
            self.ended[actor] += 1
            machine.receive(message(Message.DONE, actor))

    def started(self, actor):
        return self.machine.firing_index(actor) + 1


@pytest.mark.parametrize(("produce", "consume", "num_slots", "initial"), RATES)
@pytest.mark.parametrize("waiting", [0, 1])
def test_rings_are_as_long_as_the_machine_can_make_them_and_no_longer(
    waiting, produce, consume, num_slots, initial
):
    """Hold firing k of one actor, run the other as far as it comes: those firings have events."""
    table = one_edge(produce, consume, num_slots, initial)
    other = 1 - waiting
    waits = wait_table(table, [0, 1], max_ahead=1)
    (wait,) = waits.all[waiting]
    longest = 0
    for firing in range(12):
        race = Race(table)
        race.settle(until=(waiting, firing))
        if race.is_running[waiting] and wait.firing(firing) >= 0:
            assert race.started(other) > wait.firing(firing)
            longest = max(longest, race.started(other) - wait.firing(firing))
    window = waits.throttles[other].window
    assert waits.num_events[other] == max(longest, window)


@pytest.mark.parametrize(("produce", "consume", "num_slots", "initial"), RATES)
def test_a_firing_starts_as_soon_as_the_firings_that_it_waits_for_have_ended_and_no_sooner(
    produce, consume, num_slots, initial
):
    table = one_edge(produce, consume, num_slots, initial)
    waits = wait_table(table, [0, 1], max_ahead=1)
    for waiting, firing in product([0, 1], range(8)):
        other = 1 - waiting
        (wait,) = waits.all[waiting]
        needed = wait.firing(firing)
        if needed >= 0:
            race = Race(table)
            race.settle(until=(other, needed))
            assert race.started(waiting) <= firing
        race = Race(table)
        race.settle(until=(other, needed + 1))
        assert race.started(waiting) > firing or wait.firing(firing) < 0


def in_words(rows, table):
    said = [
        ", ".join(f"{table.names[w.actor]} {'token' if w.is_input else 'slot'}" for w in row)
        for row in rows
    ]
    return [f"{name}: {text}" for name, text in zip(table.names, said, strict=True) if text]


def test_streams_and_the_host_need_no_waits():
    edges = [Edge("x", 0, 1, 1, 1, 1), Edge("y", 1, 2, 1, 1, 1), Edge("z", 2, 3, 1, 1, 2)]
    names = ["data", "a", "b", "log"]
    table = MachineTable.from_edges(names, edges, sources=[0], streams=[7, 0, 0, 8])
    waits = wait_table(table, [0], max_ahead=2)
    assert in_words(waits.needed, table) == ["data: a slot", "log: b token"]
    assert waits.num_events == (0, 2, 2, 0)


def test_what_another_wait_implies_is_dropped_and_counted(graphs):
    table, _ = graphs.early_end()
    waits = wait_table(table, [0, 1, 2], max_ahead=2)
    assert in_words(waits.needed, table) == [
        "left: split slot", "right: join slot", "split: join slot", "side: split token, join slot",
        "join: side token",
    ]  # fmt: skip
    assert [len(row) for row in waits.all] == [1, 1, 2, 2, 2]


def test_a_period_too_long_to_unroll_keeps_every_wait():
    edges = [
        Edge("x", 0, 1, 1, 30_000, 30_000),
        Edge("y", 1, 2, 1, 1, 1),
        Edge("z", 0, 2, 1, 30_000, 30_000),
    ]
    table = MachineTable.from_edges(["a", "b", "c"], edges, sources=[0], streams=[0, 1, 2])
    waits = wait_table(table, [0, 1, 2], max_ahead=1)
    assert waits.needed == waits.all


def reached(table, waits, streams):
    """Brute force: per firing, all that a device with these waits has ended before it starts."""
    periods = 12
    before = {}
    pending = [
        (a, k) for a in range(table.num_actors) for k in range(periods * table.repetitions[a])
    ]
    while pending:
        later = []
        for actor, k in pending:
            direct = [(actor, k - 1)] if k else []
            for index in table.inputs[actor]:
                e = table.edges[index]
                last = ((k + 1) * e.consume - 1 - e.initial) // e.produce
                is_order = e.producer not in streams or streams[e.producer] == streams.get(actor)
                if last >= 0 and is_order:
                    direct.append((e.producer, last))
            direct += [(w.actor, w.firing(k)) for w in waits[actor] if w.firing(k) >= 0]
            if any([place not in before for place in direct]):
                later.append((actor, k))
                continue
            before[actor, k] = set(direct).union(*[before[place] for place in direct])
        if len(later) == len(pending):
            break
        pending = later
    return before


def test_the_waits_that_are_left_order_all_that_the_dropped_ones_did(graphs, make_random):
    dropped = 0
    for seed in range(150):
        table, _ = graphs.random_case(Random(seed), make_random)
        executor = graphs.make_executor(table, graphs.late(Random(0)))
        streams = {a: s for a, s in enumerate(table.streams) if s < graphs.HOST}
        waits = executor.waits
        before = reached(table, waits.needed, streams)
        checked = 0
        for (actor, k), earlier in before.items():
            for wait in waits.all[actor]:
                if wait.firing(k) >= 0:
                    checked += 1
                    assert (wait.actor, wait.firing(k)) in earlier
        dropped += sum([len(w) for w in waits.all]) - sum([len(w) for w in waits.needed])
        assert checked or not any(waits.all)
    assert dropped >= 30


# -- how far ahead -------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "window"), [(1, 1), (1, 3), (4, 4), (4, 12), (1, 5)])
def test_a_throttle_lets_a_window_of_firings_go_unfinished_and_no_more(batch, window):
    throttle = Throttle(batch, window)
    ended = most = 0
    for k in range(100):
        ended = max(ended, throttle.firing(k) + 1)
        most = max(most, k + 1 - ended)
    assert most == window


def test_windows_are_in_steps_of_the_source_not_in_periods():
    edges = [
        Edge("micro", 0, 1, 1, 1, 2),
        Edge("gradient", 1, 2, 1, 4, 4),
        Edge("updated", 2, 3, 1, 100, 100),
        Edge("batch", 4, 0, 4, 1, 8),
    ]
    names = ["copy", "backward", "update", "snapshot", "data"]
    table = MachineTable.from_edges(names, edges, sources=[4], streams=[0, 1, 1, 2, 9])
    throttles = wait_table(table, [0, 1, 2], max_ahead=2).throttles
    assert table.repetitions[0] == 400
    assert throttles[:4] == (Throttle(4, 8), Throttle(4, 8), Throttle(1, 2), Throttle(1, 1))
