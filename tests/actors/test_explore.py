"""Random graphs in random orders, against an oracle that shares nothing with the machine.

The oracle is memory: a slot carries the number of the token in it, is torn while it is written, and
is looked at when a reader starts and when it ends. How often each actor fires is computed from the
graph alone.
"""

from collections import Counter
from random import Random

import pytest

from actors.errors import ProtocolError
from actors.explore import explore
from actors.machine import Machine
from actors.transitions import (
    TRANSITIONS,
    Message,
    Reaction,
    State,
    kind_of,
    message,
)

TORN = -1


class OracleError(Exception):
    pass


class Memory:
    """Plays the bodies of the actors on stamped slots; `ends` says after how many firings a source
    has no more data, `fails` names one firing that raises."""

    def __init__(self, table, admitted, ends, fails=None):
        self.table = table
        self.ends = ends
        self.fails = fails
        self.counts = [0] * table.num_actors
        self.slots = {}
        for edge in table.edges:
            self.slots[edge.producer, edge.name] = [TORN] * edge.num_slots
        self.expected, self.flushes = expected_run(table, admitted, ends)

    def tokens_read(self, index, firing):
        edge = self.table.edges[index]
        if firing < self.expected[edge.consumer] or not self.table.is_flushed[edge.consumer]:
            return edge.consume
        return self.flushes[edge.consumer][index]

    def check_inputs(self, actor, firing, when):
        for index in self.table.inputs[actor]:
            edge = self.table.edges[index]
            slots = self.slots[edge.producer, edge.name]
            for i in range(self.tokens_read(index, firing)):
                token = firing * edge.consume + i
                found = slots[token % len(slots)]
                if found != token:
                    raise OracleError(f"{edge} holds {found} instead of {token} at {when}")

    def stamp_outputs(self, actor, firing, is_torn):
        for index in self.table.outputs[actor]:
            edge = self.table.edges[index]
            slots = self.slots[actor, edge.name]
            for token in range(firing * edge.produce, (firing + 1) * edge.produce):
                slots[token % len(slots)] = TORN if is_torn else token

    def started(self, actor, firing):
        if firing != self.counts[actor]:
            raise OracleError(f"actor {actor} starts firing {firing}, not {self.counts[actor]}")
        most = self.expected[actor] + self.table.is_flushed[actor] + (actor in self.ends)
        if firing >= most:
            raise OracleError(f"actor {actor} starts firing {firing} of {most}")
        self.check_inputs(actor, firing, "start")
        self.stamp_outputs(actor, firing, is_torn=True)

    def finished(self, actor, firing):
        self.check_inputs(actor, firing, "end")
        if self.fails == (actor, firing):
            return Message.FAILED
        if firing == self.ends.get(actor):
            return Message.EXHAUSTED
        self.stamp_outputs(actor, firing, is_torn=False)
        self.counts[actor] += 1
        return Message.DONE

    def check_end(self):
        whole = [n + bool(f) for n, f in zip(self.expected, self.table.is_flushed, strict=True)]
        if self.counts != whole:
            raise OracleError(f"fired {self.counts}, expected {whole}")


def expected_run(table, admitted, ends):
    """Full firings per actor, and the tokens that each flush finds: from the graph alone."""
    firings, flushes = [], []
    for actor in range(table.num_actors):
        totals = {}
        for index in table.inputs[actor]:
            edge = table.edges[index]
            producer = edge.producer
            totals[index] = edge.produce * (firings[producer] + table.is_flushed[producer])
        if totals:
            full = min(total // table.edges[i].consume for i, total in totals.items())
        else:
            full = min(admitted[actor], ends.get(actor, admitted[actor]))
        firings.append(full)
        flushes.append(
            {
                i: min(table.edges[i].consume, total - full * table.edges[i].consume)
                for i, total in totals.items()
            }
        )
    return firings, flushes


def make_run(rng, make_random, machine_type=Machine):
    table = make_random(rng)
    steps = rng.randint(0, 6)
    admitted = {s: steps * table.firings_per_step[s] for s in table.sources}
    ends = {s: rng.randint(0, n) for s, n in admitted.items() if rng.random() < 0.25}
    machine = machine_type(table)
    return machine, Memory(table, admitted, ends), admitted


def admit(machine, admitted):
    for source, count in admitted.items():
        if count:
            machine.admit(source, count)
        machine.end_admission(source)


def run_one(seed, make_random):
    rng = Random(seed)
    machine, memory, admitted = make_run(rng, make_random)
    admit(machine, admitted)
    explore(machine, rng, memory, is_checked=seed % 4 == 0)
    memory.check_end()
    assert machine.is_finished
    machine.validate()
    assert all(machine.state(a) is State.ENDED for a in range(machine.table.num_actors))


@pytest.mark.parametrize("block", range(4))
def test_every_order_of_messages_gives_the_same_run_and_brings_every_slot_home(block, make_random):
    for seed in range(block * 1000, block * 1000 + 1000):
        run_one(seed, make_random)


def test_a_failure_halts_every_graph_with_all_slots_accounted_for(make_random):
    failed = 0
    for seed in range(400):
        rng = Random(seed)
        machine, memory, admitted = make_run(rng, make_random)
        actor = rng.randrange(machine.table.num_actors)
        memory.fails = (actor, rng.randint(0, 3))
        admit(machine, admitted)
        explore(machine, rng, memory)
        assert machine.is_quiescent
        if machine.is_halted:
            failed += 1
            assert machine.state(actor) is State.FAILED
            assert not machine.is_finished
        else:
            memory.check_end()
    assert failed > 100


def test_every_transition_of_the_table_happens_and_no_other(make_random):
    seen = Counter()

    class Watched(Machine):
        __slots__ = ()

        def receive(self, code):
            actor = self._owner[code]
            before = self.state(actor)
            super().receive(code)
            seen[before, kind_of(code), self.state(actor)] += 1

    for seed in range(2500):
        rng = Random(seed)
        machine, memory, admitted = make_run(rng, make_random, Watched)
        if seed % 3 == 0:
            memory.fails = (rng.randrange(machine.table.num_actors), rng.randint(0, 2))
        admit(machine, admitted)
        explore(machine, rng, memory, is_checked=False)
    allowed = {
        (state, kind, after)
        for state, row in TRANSITIONS.items()
        for kind, transition in row.items()
        if transition.reaction is not Reaction.ILLEGAL
        for after in transition.to
    }
    assert set(seen) - allowed == set()
    assert allowed - set(seen) == set()


# -- mutants: each is one bug in the machine; the oracle must find all of them ----


def edit_sent(machine, rng, edit):
    send = machine.outbox.extend
    machine._send = lambda codes: send(edit([*codes], rng))


def drop(kind, share=1.0):
    return lambda codes, rng: [c for c in codes if kind_of(c) is not kind or rng.random() > share]


def double(kind):
    return lambda codes, rng: [c for c in codes for _ in range(1 + (kind_of(c) is kind))]


def lose_some_frees(machine, rng):
    edit_sent(machine, rng, drop(Message.FREE, 0.1))


def lose_some_readies(machine, rng):
    edit_sent(machine, rng, drop(Message.READY, 0.1))


def lose_end(machine, rng):
    edit_sent(machine, rng, drop(Message.END))


def double_ready(machine, rng):
    edit_sent(machine, rng, double(Message.READY))


def double_free(machine, rng):
    edit_sent(machine, rng, double(Message.FREE))


def end_before_ready(machine, rng):
    def send(codes):
        is_end = bool(codes) and kind_of(codes[0]) is Message.END
        (machine.outbox.extendleft if is_end else machine.outbox.extend)(codes)

    machine._send = send


def one_credit_too_many(machine, rng):
    for index in range(len(machine.table.edges)):
        machine._level[message(Message.FREE, index)] += 1


def forget_a_consumer(machine, rng):
    machine._posts = tuple([posts[1:] for posts in machine._posts])


def tokens_not_taken(machine, rng):
    machine._takes = tuple(
        [tuple([t for t in takes if kind_of(t[0]) is Message.FREE]) for takes in machine._takes]
    )


def slots_not_taken(machine, rng):
    machine._takes = tuple(
        [tuple([t for t in takes if kind_of(t[0]) is Message.READY]) for takes in machine._takes]
    )


def at_start(machine, kind):
    """Send the messages of one kind when a firing starts instead of when it is done."""
    posts = machine._posts
    early = [[c for c in codes if kind_of(c) is kind] for codes in posts]
    machine._posts = tuple([tuple([c for c in p if kind_of(c) is not kind]) for p in posts])

    def start(actor):
        machine.fireable.append(actor)
        machine.outbox.extend(early[actor])

    machine._start_in = [start] * machine.table.num_actors


def freed_before_done(machine, rng):
    at_start(machine, Message.FREE)


def ready_before_done(machine, rng):
    at_start(machine, Message.READY)


def missed_wake_up(machine, rng):
    machine._unmet[rng.randrange(machine.table.num_actors)] += 1


def woken_too_early(machine, rng):
    machine._unmet[rng.randrange(machine.table.num_actors)] -= 1


def two_firings_at_once(machine, rng):
    """Forget that to be firing is an unmet condition."""

    def start(actor):
        machine.fireable.append(actor)
        machine._unmet[actor] -= 1

    machine._start_in = [start] * machine.table.num_actors


MUTANTS = [
    lose_some_frees, lose_some_readies, lose_end, double_ready, double_free, end_before_ready,
    one_credit_too_many, forget_a_consumer, tokens_not_taken, slots_not_taken, freed_before_done,
    ready_before_done, missed_wake_up, woken_too_early, two_firings_at_once,
]  # fmt: skip


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda m: m.__name__)
def test_the_oracle_kills_a_machine_that(mutate, make_random):
    killed = 0
    for seed in range(60):
        rng = Random(seed)
        machine, memory, admitted = make_run(rng, make_random)
        # The machine's own check of limits would find many mutants first; the oracle has to.
        machine._limit = tuple([1 << 62] * len(machine._limit))
        mutate(machine, rng)
        try:
            admit(machine, admitted)
            explore(machine, rng, memory, is_checked=False)
            memory.check_end()
        except OracleError:
            killed += 1
        except ProtocolError:
            pass
    assert killed >= 5


def test_equal_seeds_replay_the_same_run(make_random):
    def trace(seed):
        rng = Random(seed)
        machine, memory, admitted = make_run(rng, make_random)
        admit(machine, admitted)
        explore(machine, rng, memory, is_checked=False)
        return machine._ring

    assert trace(7) == trace(7)
    assert trace(7) != trace(8)
