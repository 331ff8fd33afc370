"""Rounds that are left out, against every firing visited."""

from collections import Counter
from random import Random

import pytest

from actors.machine.table import Edge, MachineTable
from actors.race import happens_before
from actors.race.happens_before import unroll, watch

PERIODS = 40


class Comparing:
    """Holds what is visited against all firings, each visited: who comes after whose last one."""

    def __init__(self, table, periods):
        self.whole = {(a, k): m for a, k, m in unroll(table, periods, 10**6)}
        self.last = {}
        self.num_visited = 0
        self.left_out = Counter()

    def visit(self, actor, firing, moment):
        self.num_visited += 1
        clock = self.whole[actor, firing].clock
        for other, (at, known) in self.last.items():
            assert known.is_before(moment.clock) == self.whole[other, at].is_before(clock)
        self.last[actor] = (firing, moment)

    def leave_out(self, left_out):
        assert left_out.times > 0
        for actor, fired in enumerate(left_out.fired):
            self.left_out[actor] += left_out.times * fired
            if fired:
                firing, moment = self.last[actor]
                assert left_out.is_recent(moment)
                self.last[actor] = (firing + left_out.times * fired, left_out.moved(moment))


def compared(table, periods, turns=None):
    """Watch a table with rounds left out and check that every firing is visited or left out."""
    watcher = Comparing(table, periods)
    watch(table, periods, 10**6, turns or [1] * table.num_actors, watcher)
    assert watcher.num_visited + watcher.left_out.total() == len(watcher.whole)
    for actor, count in enumerate(table.repetitions):
        assert watcher.last[actor][0] == periods * count - 1
    return watcher


@pytest.fixture
def always(monkeypatch):
    """Look for rounds however short the period is."""
    monkeypatch.setattr(happens_before, "LONG_PERIOD", 0)


def test_what_is_left_out_changes_no_order_of_what_is_visited(always, make_random):
    num_shorter = 0
    for seed in range(200):
        watcher = compared(make_random(Random(seed)), PERIODS)
        num_shorter += watcher.num_visited < len(watcher.whole)
    assert num_shorter > 150


def training(batches, every, snapshot, *, spare=0):
    """data -> gradient -> update -> metrics; a snapshot, and an evaluation of eight batches."""
    edges = [
        Edge("batch", 0, 1, 1, 1, 4),
        Edge("sum", 1, 2, 1, batches, batches),
        Edge("metrics", 2, 3, 1, 1, 2),
        Edge("updated", 2, 4, 1, snapshot, snapshot + spare),
        Edge("staging", 4, 5, 1, 1, 1),
        Edge("due", 2, 6, 1, every, every + spare),
        Edge("due.gradient", 1, 6, 1, batches * every, batches * (every + spare)),
        Edge("leave", 6, 7, 8, 1, 8),
        Edge("evaluated", 7, 8, 1, 8, 8),
    ]
    names = ["data", "gradient", "update", "metrics", "snapshot", "save", "go", "evaluate", "end"]
    streams = [0, 1, 1, 2, 1, 3, 1, 1, 1]
    return MachineTable.from_edges(names, edges, sources=[0], streams=streams)


@pytest.mark.parametrize("spare", [0, 1, 7])
@pytest.mark.parametrize(("every", "snapshot"), [(60, 15), (40, 9), (64, 64)])
def test_rounds_within_rounds_are_left_out_without_a_difference(always, every, snapshot, spare):
    watcher = compared(training(3, every, snapshot, spare=spare), 3)
    assert watcher.num_visited < len(watcher.whole)


@pytest.mark.parametrize("turns", [2, 3, 6])
def test_a_round_holds_whole_turns(always, turns):
    table = training(3, 60, 15)
    watcher = compared(table, 4, [turns, *[1] * (table.num_actors - 1)])
    assert watcher.left_out[0] % turns == 0
    assert watcher.left_out[0] > 0


def test_a_long_period_costs_hardly_more_than_a_short_one():
    class Count:
        num_visited = 0

        def visit(self, actor, firing, moment):
            self.num_visited += 1

        def leave_out(self, left_out):
            pass

    visited = []
    for every in (10_000, 1_000_000):
        table, count = training(64, every, 500), Count()
        watch(table, 3, 10**6, [1] * table.num_actors, count)
        visited.append(count.num_visited)
    assert visited[0] == visited[1] < 2_000


def nested(rng):
    """A step with rare actors after it: rates up to 12, slots for up to three of their firings."""
    edges = [Edge("batch", 0, 1, 1, 1, rng.randint(1, 3))]
    names = ["data", "step"]
    for _ in range(rng.randint(1, 3)):
        rate, rare = rng.randint(2, 12), len(names)
        names.append(f"rare{rare}")
        slots = rate + rng.randint(0, 2 * rate)
        edges.append(Edge(f"due{rare}", rng.choice([0, 1]), rare, 1, rate, slots, 0))
        if rng.random() < 0.5:
            names.append(f"after{rare}")
            many = rng.randint(1, 3)
            edges.append(Edge(f"to{rare}", rare, rare + 1, many, 1, many + rng.randint(0, 3)))
    streams = [rng.randrange(3) for _ in names]
    return MachineTable.from_edges(names, edges, sources=[0], streams=streams)


def test_rare_actors_with_slots_to_spare_are_never_jumped_over(always):
    num_shorter = 0
    for seed in range(300):
        watcher = compared(nested(Random(seed)), 6)
        num_shorter += watcher.num_visited < len(watcher.whole)
    assert num_shorter > 150


def repeating(count):
    """One firing of the first actor for `count` of the second, on streams of their own."""
    edges = [Edge("many", 0, 1, count, 1, count)]
    return MachineTable.from_edges(["one", "many"], edges, sources=[0], streams=[0, 1])


@pytest.mark.parametrize(("long_period", "is_left_out"), [(7, True), (8, False), (9, False)])
def test_rounds_are_looked_for_in_periods_above_the_bound(monkeypatch, long_period, is_left_out):
    monkeypatch.setattr(happens_before, "LONG_PERIOD", long_period)
    watcher = compared(repeating(8), PERIODS)
    assert (watcher.left_out.total() > 0) == is_left_out
