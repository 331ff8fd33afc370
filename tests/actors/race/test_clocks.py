"""Clocks against the machine in random orders, and the bound on how far actors drift apart."""

from random import Random

import pytest

from actors.machine.machine import Machine
from actors.machine.table import Edge, MachineTable
from actors.machine.transitions import Message
from actors.race.happens_before import downstream, lags_behind, unroll
from actors.testing.oracle import explore

PERIODS = 6


class Witness:
    """Notes for every firing how many firings of each actor had ended when it began."""

    def __init__(self, table):
        self.ended = [0 for _ in table.names]
        self.seen = {}

    def started(self, actor, firing):
        self.seen[actor, firing] = tuple(self.ended)

    def finished(self, actor, firing):
        self.ended[actor] += 1
        return Message.DONE


def clocks_of(table):
    """By firing, how many firings of each actor happen before it."""
    moments = {(a, k): moment for a, k, moment in unroll(table, PERIODS, 10**6)}
    return {
        firing: tuple(
            [
                sum([moments[a, k].is_before(moment.clock) for k in range(PERIODS * count)])
                for a, count in enumerate(table.repetitions)
            ]
        )
        for firing, moment in moments.items()
    }


def test_what_a_clock_says_has_ended_had_ended_in_every_order(make_random):
    for seed in range(150):
        rng = Random(seed)
        table = make_random(rng)
        clocks, machine, witness = clocks_of(table), Machine(table), Witness(table)
        for source in table.sources:
            machine.admit(source, PERIODS * table.repetitions[source])
        explore(machine, rng, witness, is_checked=False)
        for firing, ended in witness.seen.items():
            if firing in clocks:
                assert all(map(int.__ge__, ended, clocks[firing]))


def test_what_a_clock_leaves_open_happens_in_some_order():
    """Tight: for every pair of firings there is an order in which no more had ended."""
    edges = [Edge("x", 0, 1, 1, 2, 4, 1), Edge("y", 0, 2, 1, 1, 2), Edge("z", 1, 2, 2, 1, 2)]
    table = MachineTable.from_edges(["a", "b", "c"], edges, sources=[0])
    clocks, least = clocks_of(table), {}
    for seed in range(400):
        machine, witness = Machine(table), Witness(table)
        machine.admit(0, PERIODS * table.repetitions[0])
        explore(machine, Random(seed), witness, is_checked=False)
        for firing, ended in witness.seen.items():
            least[firing] = tuple(map(min, ended, least.get(firing, ended)))
    compared = [firing for firing in clocks if firing in least and firing[1] < 3]
    assert len(compared) >= 8
    assert {f: least[f] for f in compared} == {f: clocks[f] for f in compared}


def test_no_actor_is_farther_behind_than_the_bound(make_random):
    for seed in range(150):
        table = make_random(Random(seed))
        clocks = clocks_of(table)
        for origin in range(table.num_actors):
            lags = lags_behind(table, origin)
            for (actor, firing), clock in clocks.items():
                if actor != origin:
                    continue
                for other, lag in lags.items():
                    period = firing // table.repetitions[origin] - lag
                    if period >= 0 and other != origin:
                        assert clock[other] > period * table.repetitions[other]


@pytest.mark.parametrize(
    ("edge", "lags"),
    [
        (Edge("r", 0, 1, 1, 1, 1), ({0: 0, 1: 1}, {0: 0, 1: 0})),
        (Edge("r", 0, 1, 1, 1, 4), ({0: 0, 1: 4}, {0: 0, 1: 0})),
        (Edge("r", 0, 1, 1, 1, 4, 3), ({0: 0, 1: 1}, {0: 3, 1: 0})),
        (Edge("r", 0, 1, 1, 4, 4, 3), ({0: 0, 1: 1}, {0: 1, 1: 0})),
    ],
)
def test_slots_let_a_producer_run_ahead_and_initial_tokens_a_consumer(edge, lags):
    table = MachineTable.from_edges(["a", "b"], [edge], sources=[0])
    assert (lags_behind(table, 0), lags_behind(table, 1)) == lags


def test_downstream_follows_the_tokens():
    edges = [Edge("x", 0, 1, 1, 1, 1), Edge("y", 1, 2, 1, 1, 1), Edge("z", 2, 1, 1, 1, 1, 1)]
    table = MachineTable.from_edges(["a", "b", "c"], edges, sources=[0])
    assert downstream(table, 0) == {1, 2}
    assert downstream(table, 1) == {1, 2}


# -- how many numbers a clock has ------------------------------------------------------------------


def most_numbers(table, periods=PERIODS):
    return max([len(moment.clock) for _, _, moment in unroll(table, periods, 10**6)])


def ladder(length):
    """Two streams of `length` actors: each left one feeds the next and the right one beside it.

    The first left one starts a step, and waits until the last right one has ended the one before.
    """
    left, right = range(1, length + 1), range(length + 1, 2 * length + 1)
    edges = [Edge("batch", 0, left[0], 1, 1, 2), Edge("step", left[0], right[-1], 1, 1, 1)]
    edges += [Edge("l", a, a + 1, 1, 1, 1) for a in left[:-1]]
    edges += [Edge("r", a, a + 1, 1, 1, 1) for a in right[:-1]]
    edges += [Edge("x", a, b, 1, 1, 1) for a, b in zip(left, right, strict=True)]
    names = [f"a{i}" for i in range(2 * length + 1)]
    streams = [0] + [1] * length + [2] * length
    return MachineTable.from_edges(names, edges, sources=[0], streams=streams)


def test_clocks_of_streams_in_order_have_a_number_per_stream_however_many_actors_there_are():
    assert [most_numbers(ladder(length)) for length in (3, 40, 485)] == [3, 3, 3]


def test_clocks_never_have_more_than_three_numbers_per_actor(make_random):
    for seed in range(150):
        table = make_random(Random(seed))
        assert most_numbers(table, 20) <= 3 * table.num_actors


def test_firings_of_a_line_are_ordered_and_numbered(make_random):
    for seed in range(50):
        last = {}
        for _, _, moment in unroll(make_random(Random(seed)), PERIODS, 10**6):
            if moment.line in last:
                assert last[moment.line].is_before(moment.clock)
                assert moment.position == last[moment.line].position + 1
            else:
                assert moment.position == 0
            last[moment.line] = moment
