"""Rounds that are left out, against every firing visited."""

from collections import Counter, deque
from random import Random

import pytest

from actors.machine.table import ENDLESS, Edge, MachineTable
from actors.race.happens_before import (
    FiringStamp,
    SkippedRounds,
    is_moved,
    unroll,
    watch,
)

PERIODS = 40


class Comparing:
    """Holds what is visited against all firings, each visited: who comes after whose last one.

    `num_earlier` firings of each actor that were visited before are compared with, too.
    """

    def __init__(self, table, periods, num_earlier):
        self.whole = {(a, k): m for a, k, m in unroll(table, periods, 10**6)}
        self.last = {}
        self.earlier = [deque(maxlen=num_earlier) for _ in table.names]
        self.num_visited = 0
        self.left_out = Counter()

    def visit(self, actor, firing, moment):
        self.num_visited += 1
        clock = self.whole[actor, firing].clock
        known = [(other, *firing) for other, firing in self.last.items()]
        known += [(other, *firing) for other, row in enumerate(self.earlier) for firing in row]
        for other, at, stamp in known:
            assert stamp.is_before(moment.clock) == self.whole[other, at].is_before(clock)
        self.last[actor] = (firing, moment)
        self.earlier[actor].append((firing, moment))

    def leave_out(self, left_out):
        assert left_out.times > 0
        for actor, fired in enumerate(left_out.fired):
            self.left_out[actor] += left_out.times * fired
            if fired:
                firing, moment = self.last[actor]
                assert left_out.is_recent(moment)
                self.last[actor] = (firing + left_out.times * fired, left_out.moved(moment))


def compared(table, periods, turns=None, num_earlier=0, long_period=0):
    """Watch a table with rounds left out and check that every firing is visited or left out.

    Rounds are looked for in periods of more than `long_period` firings.
    """
    watcher = Comparing(table, periods, num_earlier)
    watch(table, periods, 10**6, turns or [1] * table.num_actors, watcher, long_period=long_period)
    assert watcher.num_visited + watcher.left_out.total() == len(watcher.whole)
    for actor, count in enumerate(table.repetitions):
        assert watcher.last[actor][0] == periods * count - 1
    return watcher


GROWN = 2, 5, 3


def test_a_moment_moves_by_what_its_line_grew_and_a_clock_by_what_each_did():
    """A line of which nothing comes before stays one."""
    rounds = SkippedRounds(times=4, fired=(), grown=GROWN, lengths=())
    assert rounds.moved(FiringStamp(1, 6, (3, 0, 7))) == FiringStamp(1, 26, (11, 0, 19))
    assert rounds.moved(FiringStamp(2, 0, ())) == FiringStamp(2, 12, ())


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (FiringStamp(1, 9, (3, 0, 4)), True),
        (FiringStamp(1, 9, (3, 0, 4, 0)), True),
        (FiringStamp(1, 9, (3, 0, 4, 1)), False),
        (FiringStamp(1, 9, (3, 0, 5)), False),
        (FiringStamp(1, 9, (3, 5, 4)), False),
        (FiringStamp(1, 9, (1, 0, 1)), False),
        (FiringStamp(1, 9, (3,)), False),
        (FiringStamp(1, 8, (3, 0, 4)), False),
        (FiringStamp(1, 4, (3, 0, 4)), False),
        (FiringStamp(0, 9, (3, 0, 4)), False),
        (FiringStamp(0, 6, (3, 0, 4)), False),
    ],
)
def test_a_moment_is_moved_if_line_position_and_each_number_of_its_clock_are(after, expected):
    assert is_moved(FiringStamp(1, 4, (1, 0, 1)), after, (*GROWN, 1)) is expected


def test_a_clock_that_was_longer_is_compared_whole():
    assert is_moved(FiringStamp(0, 1, (1, 0)), FiringStamp(0, 3, (3,)), GROWN)
    assert not is_moved(FiringStamp(0, 1, (1, 1)), FiringStamp(0, 3, (3,)), GROWN)


def test_what_is_left_out_changes_no_order_of_what_is_visited(make_random):
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
def test_rounds_within_rounds_are_left_out_without_a_difference(every, snapshot, spare):
    watcher = compared(training(3, every, snapshot, spare=spare), 3)
    assert watcher.num_visited < len(watcher.whole)


@pytest.mark.parametrize("turns", [2, 3, 6])
def test_a_round_holds_whole_turns(turns):
    table = training(3, 60, 15)
    watcher = compared(table, 4, [turns, *[1] * (table.num_actors - 1)])
    assert watcher.left_out[0] % turns == 0
    assert watcher.left_out[0] > 0


@pytest.mark.parametrize("initial", [20, 25])
def test_a_reader_many_firings_behind_sees_what_came_before_the_last_one(initial):
    """The step's last firing repeats as soon as it follows the rare actor's, those before do not.

    The reader is 7 firings behind: its clock changes when it has read the first one that follows.
    """
    edges = [
        Edge("read", 0, 1, 1, 1, 2),
        Edge("due", 1, 2, 1, 20, 40),
        Edge("leave", 2, 1, 20, 1, ENDLESS, initial),
        Edge("late", 1, 3, 1, 1, 9, 7),
    ]
    names = ["data", "step", "rare", "reader"]
    table = MachineTable.from_edges(names, edges, sources=[0], streams=[0, 1, 2, 3])
    watcher = compared(table, 8)
    assert watcher.num_visited < len(watcher.whole)


@pytest.mark.parametrize(
    ("initial", "slots"), [(30, 31), (30, ENDLESS), (0, 30), (10, 30)], ids=str
)
def test_no_round_begins_before_what_it_comes_after_later(initial, slots):
    """The late actor follows the data after `initial` firings, or is followed after `slots`."""
    edges = [Edge("late", 0, 1, 1, 1, slots, initial), Edge("read", 0, 2, 1, 1, 1)]
    names = ["data", "late", "reader"]
    watcher = compared(MachineTable.from_edges(names, edges, sources=[0]), 200)
    assert watcher.num_visited < len(watcher.whole)


@pytest.mark.parametrize("slots", [4, 5, 7])
def test_a_stretch_is_no_round_where_an_edge_gains_tokens(slots):
    """Of three tokens made and two read, 1 firing of each moves all clocks alike now and then."""
    table = MachineTable.from_edges(
        ["data", "reader"], [Edge("batch", 0, 1, 3, 2, slots)], sources=[0]
    )
    watcher = compared(table, PERIODS)
    assert watcher.num_visited < len(watcher.whole)
    assert 3 * watcher.left_out[0] == 2 * watcher.left_out[1]


def checkpointed(every, slots):
    """A source with `slots` buffers, steps, and a checkpoint of every so many steps."""
    edges = [
        Edge("batch", 0, 1, 1, 1, slots),
        Edge("metrics", 1, 2, 1, 1, 2),
        Edge("updated", 1, 3, 1, every, every),
        Edge("staging", 3, 4, 1, 1, 1),
    ]
    names = ["data", "step", "metrics", "snapshot", "checkpoint"]
    return MachineTable.from_edges(names, edges, sources=[0], streams=[0, 1, 2, 1, 3])


def num_visited(table, slots=1):
    """Return how many firings are visited where the first actor has so many slots."""

    class Count:
        num_visited = 0

        def visit(self, actor, firing, moment):
            self.num_visited += 1

        def leave_out(self, left_out):
            pass

    count = Count()
    watch(table, 3, 10**6, [slots, *[1] * (table.num_actors - 1)], count)
    return count.num_visited


def test_a_long_period_costs_hardly_more_than_a_short_one():
    short, long = [num_visited(training(64, every, 500)) for every in (10_000, 1_000_000)]
    assert short == long < 2_000


@pytest.mark.parametrize("slots", [1, 16, 60])
def test_a_source_of_many_slots_lets_rounds_be_found(slots):
    short, long = [num_visited(checkpointed(every, slots), slots) for every in (10**4, 10**6)]
    assert short == long < 4_000


@pytest.mark.parametrize("is_one_way", [False, True])
def test_rounds_are_found_though_rare_actors_have_handed_nothing_on_yet(is_one_way):
    """Tokens of the rare actor are there for a whole period; readers hold makers up or do not."""

    def table(every):
        edges = [
            Edge("read", 0, 1, 1, 1, 2),
            Edge("due", 1, 2, 1, every, 2 * every),
            Edge("leave", 2, 1, every, 1, ENDLESS if is_one_way else every, every),
            Edge("seen", 1, 3, 1, 1, ENDLESS if is_one_way else 2),
        ]
        return MachineTable.from_edges(["data", "step", "rare", "reader"], edges, sources=[0])

    short, long = [num_visited(table(every)) for every in (10**4, 10**6)]
    assert short == long < 4_000


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


def test_rare_actors_with_slots_to_spare_are_never_jumped_over():
    num_shorter = 0
    for seed in range(300):
        watcher = compared(nested(Random(seed)), 6)
        num_shorter += watcher.num_visited < len(watcher.whole)
    assert num_shorter > 150


def fed(rng):
    """A step that rare actors feed or follow, at uneven rates, and readers far behind it."""
    edges = [Edge("batch", 0, 1, 1, 1, rng.randint(1, 2))]
    names, sources = ["data", "step"], [0]
    for _ in range(rng.randint(1, 2)):
        rare, one, many = len(names), rng.randint(1, 3), rng.choice((2, 4, 6, 12))
        names.append(f"rare{rare}")
        initial = rng.choice((0, 0, rng.randint(1, 2 * many)))
        slots = one + many + initial + rng.choice((0, 1, many // 2, many))
        if rng.random() < 0.6:
            sources.append(rare)
            slots = rng.choice((slots, slots, ENDLESS))
            edges.append(Edge(f"shard{rare}", rare, 1, many, one, slots, initial))
        else:
            edges.append(Edge(f"due{rare}", 1, rare, one, many, slots, initial))
    for _ in range(rng.randint(0, 2)):
        delay = rng.randint(0, 7)
        edges.append(Edge(f"late{delay}", 1, len(names), 1, 1, delay + rng.randint(1, 3), delay))
        names.append(f"reader{len(names)}")
    streams = [rng.randrange(len(names)) for _ in names]
    return MachineTable.from_edges(names, edges, sources=sources, streams=streams)


def test_rounds_end_where_what_a_rare_actor_feeds_or_takes_changes_their_clocks():
    num_shorter = 0
    for seed in range(300):
        watcher = compared(fed(Random(seed)), 6, num_earlier=12)
        num_shorter += watcher.num_visited < len(watcher.whole)
    assert num_shorter > 90


def repeating(count):
    """One firing of the first actor for `count` of the second, on streams of their own."""
    edges = [Edge("many", 0, 1, count, 1, count)]
    return MachineTable.from_edges(["one", "many"], edges, sources=[0], streams=[0, 1])


@pytest.mark.parametrize(("long_period", "is_left_out"), [(7, True), (8, False), (9, False)])
def test_rounds_are_looked_for_in_periods_above_the_bound(long_period, is_left_out):
    watcher = compared(repeating(8), PERIODS, long_period=long_period)
    assert (watcher.left_out.total() > 0) == is_left_out
