"""What the random scheduler may do with a run, and that it does all of it."""

from collections import Counter, deque
from random import Random

import pytest
from error_texts import raises

from actors.machine.machine import Machine
from actors.machine.table import Edge, MachineTable
from actors.machine.transitions import Message, kind_of, message
from actors.testing.oracle import channel_of, explore, make_scenario, play
from compiler.contract.errors import InternalError


class Recorder(Machine):
    """A machine that records what was sent and what was received."""

    def __init__(self, table):
        self.sent, self.received = [], []
        super().__init__(table)
        send = self.outbox.extend

        def record(codes):
            self.sent.extend(codes)
            send(codes)

        self._send = self._ending.send = record

    def receive(self, code):
        self.received.append(code)
        super().receive(code)


class Bodies:
    """Firings that are always done; records who runs when."""

    def __init__(self):
        self.rows = []

    def started(self, actor, firing):
        self.rows.append(("start", actor, firing))

    def finished(self, actor, firing):
        self.rows.append(("end", actor, firing))
        return Message.DONE


def run(seed, table, steps=5, machine_type=Machine):
    machine, bodies = machine_type(table), Bodies()
    for source in table.sources:
        machine.admit(source, steps * table.firings_per_step[source])
        machine.end_admission(source)
    num_events = explore(machine, Random(seed), bodies)
    assert machine.is_finished
    return machine, bodies.rows, num_events


@pytest.fixture
def fork():
    """A source that feeds two actors, which feed a third; the two share a stream."""
    edges = [
        Edge("x", 0, 1, 1, 1, 2), Edge("x", 0, 2, 1, 1, 2),
        Edge("y", 1, 3, 1, 1, 2), Edge("z", 2, 3, 1, 1, 2),
    ]  # fmt: skip
    names = ["data", "left", "right", "join"]
    return MachineTable.from_edges(names, edges, sources=[0], streams=[0, 1, 1, 2])


def test_messages_of_a_channel_arrive_in_the_order_in_which_they_were_sent(make_random):
    for seed in range(100):
        table = make_random(Random(seed))
        machine, _, _ = run(seed, table, machine_type=Recorder)
        by_channel = {}
        for code in machine.sent:
            by_channel.setdefault(channel_of(code), deque()).append(code)
        admissions = {edge for edge in table.admission if edge is not None}
        for code in machine.received:
            if kind_of(code) <= Message.END and code >> 3 not in admissions:
                assert by_channel[channel_of(code)].popleft() == code
        assert not any(by_channel.values())


def test_messages_of_different_channels_overtake_one_another(fork):
    orders = set()
    for seed in range(200):
        machine, _, _ = run(seed, fork, machine_type=Recorder)
        orders.add([c for c in machine.received if kind_of(c) is Message.READY][1:3].__repr__())
    assert len(orders) >= 2


def test_firings_of_one_stream_never_overlap_and_others_do(fork):
    overlaps = Counter()
    for seed in range(200):
        running = set()
        for what, actor, _ in run(seed, fork)[1]:
            if what == "end":
                running.remove(actor)
                continue
            overlaps.update(frozenset((actor, other)) for other in running)
            running.add(actor)
    assert overlaps[frozenset((1, 2))] == 0
    assert overlaps[frozenset((0, 1))] > 100
    assert overlaps[frozenset((1, 3))] > 100


def test_a_firing_can_take_longer_than_all_messages_and_be_shorter_than_any(make_chain):
    lengths = Counter()
    for seed in range(200):
        machine, bodies = Machine(make_chain(3, num_slots=4)), Bodies()
        machine.admit(0, 4)
        machine.end_admission(0)
        explore(machine, Random(seed), bodies)
        rows = bodies.rows
        start = rows.index(("start", 1, 0))
        lengths[rows.index(("end", 1, 0)) - start] += 1
    assert lengths[1] > 20
    assert sum(n for length, n in lengths.items() if length > 4) > 20


def test_commands_are_given_in_order_at_different_moments(fork):
    moments = set()
    for seed in range(100):
        machine, given = Machine(fork), []

        def admit(k, machine=machine, given=given):
            given.append(k)
            machine.admit(0, 1)

        commands = [lambda k=k, admit=admit: admit(k) for k in range(4)]
        bodies = Bodies()

        def end(machine=machine, given=given, bodies=bodies):
            given.append("end")
            moments.add(len(bodies.rows))
            machine.end_admission(0)

        explore(machine, Random(seed), bodies, [*commands, end])
        assert given == [0, 1, 2, 3, "end"]
        assert machine.is_finished
    assert {1, 32} < moments
    assert len(moments) > 10


def test_a_checked_run_finds_a_broken_machine_at_once(fork):
    machine = Machine(fork)
    machine.admit(0, 1)
    machine.columns.level[message(Message.FREE, 0)] += 1
    with raises(InternalError):
        explore(machine, Random(0), Bodies())


def test_equal_seeds_replay_the_same_run_and_other_seeds_another():
    def trace(seed):
        rng = Random(3)
        scenario = make_scenario(rng)
        machine = Recorder(scenario.table)
        play(scenario, machine, Random(seed), is_checked=False)
        return machine.received

    assert trace(7) == trace(7)
    assert trace(7) != trace(8)


def run_by(table, deliver, rng):
    """Admit six steps and end firings in an order of `rng`; return the machine after each."""
    machine, running, seen = Machine(table), [], []
    columns = machine.columns
    for source in table.sources:
        machine.admit(source, 6 * table.firings_per_step[source])
        machine.end_admission(source)
    while not machine.is_finished:
        deliver(machine)
        for started in (machine.detached, machine.fireable, machine.flushing):
            running += started
            started.clear()
        seen.append([repr(getattr(columns, name)) for name in ("level", "state", "unmet", "ring")])
        if running:
            machine.receive(message(Message.DONE, running.pop(rng.randrange(len(running)))))
    return seen


def deliver_together(machine):
    machine.deliver(machine.outbox)
    machine.outbox.clear()


def deliver_one_by_one(machine):
    while machine.outbox:
        machine.receive(machine.outbox.pop(0))


@pytest.mark.parametrize("seed", range(40))
def test_messages_delivered_together_do_what_they_do_one_by_one(make_random, seed):
    table = make_random(Random(seed))
    together = run_by(table, deliver_together, Random(seed))
    assert together == run_by(table, deliver_one_by_one, Random(seed))
    assert len(together) > 10
