import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.machine.table import Edge, MachineTable
from actors.simulation.costs import RunningFirings, SharedHost, fair_shares
from actors.simulation.simulate import simulate

demands = st.lists(st.floats(0.01, 8.0), max_size=6)


def host(capacity, *wanted, wake=0.0, post=0.0):
    size = len(wanted)
    return SharedHost(capacity, tuple(map(float, wanted)), (wake,) * size, (post,) * size)


def fork(slots=2):
    """A source, and two actors beside each other, each on a stream of its own."""
    edges = [Edge("left", 0, 1, 1, 1, slots), Edge("right", 0, 2, 1, 1, slots)]
    return MachineTable.from_edges(["s", "a", "b"], edges, sources=[0], streams=[0, 1, 2])


@given(demands, st.floats(0.1, 16.0))
def test_shares_use_the_machine_and_nobody_has_more_than_who_wants_more(wanted, capacity):
    shares = fair_shares(wanted, capacity)
    assert sum(shares) == pytest.approx(min(sum(wanted), capacity))
    for own, demand in zip(shares, wanted, strict=True):
        assert 0 <= own <= demand
        is_cut = own < demand * (1 - 1e-9)
        assert not is_cut or all(own >= other * (1 - 1e-9) for other in shares)


@pytest.mark.parametrize(
    ("wanted", "shares"),
    [
        ((2, 2), (1, 1)),
        ((2, 1), (1, 1)),
        ((0.5, 2, 2), (0.5, 0.75, 0.75)),
        ((0.25, 0.5), (0.25, 0.5)),
        ((), ()),
    ],
)
def test_two_cores_are_shared_like_this(wanted, shares):
    assert fair_shares(wanted, 2.0) == shares


def test_firings_that_use_one_core_each_do_not_disturb_each_other():
    run = simulate(fork(), 10, [0, 100, 100], host=host(2, 1, 1, 1))
    assert run.makespan_ns == 1000


def test_firings_that_use_all_cores_gain_nothing_from_each_other():
    run = simulate(fork(), 10, [0, 100, 100], host=host(2, 1, 2, 2))
    assert run.makespan_ns == 2000


@pytest.mark.parametrize(
    ("demand", "capacity", "factor"), [(1.5, 2, 1.5), (1.2, 1.2, 2), (1, 1.25, 1.6), (3, 4, 1.5)]
)
def test_two_equal_firings_take_as_long_as_the_machine_has_less_than_they_want(
    demand, capacity, factor
):
    run = simulate(fork(), 10, [0, 300, 300], host=host(capacity, 1, demand, demand))
    assert run.makespan_ns == pytest.approx(3000 * factor, abs=20)


def test_a_firing_speeds_up_when_its_neighbour_ends():
    """Both want both cores: 100 + 100 ns at half speed for the short one, the rest alone."""
    running = RunningFirings(host(2, 2, 2))
    running.begin(0, 0, 100)
    running.begin(1, 0, 300)
    assert dict(running.due()) == {0: 200, 1: 600}
    assert running.is_due(0, 200)
    assert not running.is_due(1, 200)
    running.end(0, 200)
    assert dict(running.due()) == {1: 400}


@given(st.lists(st.tuples(st.integers(1, 400), st.floats(0.5, 4)), min_size=1, max_size=5))
def test_no_work_is_lost_or_made(firings):
    """All begin at once; each has work of its demand for its time, done at the capacity at most."""
    running = RunningFirings(host(2, *[demand for _, demand in firings]))
    for actor, (duration, _) in enumerate(firings):
        running.begin(actor, 0, duration)
    now = 0
    for _ in firings:
        actor, now = min(running.due(), key=lambda pair: pair[1])
        running.end(actor, now)
    work = sum(duration * demand for duration, demand in firings)
    alone = max(duration * max(1, demand / 2) for duration, demand in firings)
    assert (
        max(work / 2, alone) - len(firings)
        <= now
        <= sum(duration * max(1, demand / 2) for duration, demand in firings) + len(firings)
    )


def test_a_message_between_threads_takes_its_time():
    edges = [Edge("r", 0, 1, 1, 1, 1)]
    table = MachineTable.from_edges(["a", "b"], edges, sources=[0], streams=[0, 1])
    run = simulate(table, 1, [100, 100], host=host(2, 1, 1, wake=30, post=7))
    assert [row[2:] for row in run.rows] == [(30, 130), (167, 267)]


@given(st.integers(1, 40), st.integers(0, 50), st.integers(0, 50))
def test_a_host_with_cores_enough_and_no_costs_changes_nothing(source, left, right):
    durations = [source, left, right]
    free = simulate(fork(), 7, durations)
    shared = simulate(fork(), 7, durations, host=host(16, 1, 2, 3))
    assert sorted(free.rows) == sorted(shared.rows)


@given(st.floats(1, 4), st.floats(1, 4), st.floats(1, 8))
def test_a_larger_machine_is_never_slower(left, right, capacity):
    durations = [5, 90, 70]
    times = [
        simulate(fork(), 5, durations, host=host(c, 1, left, right)).makespan_ns
        for c in (capacity, 2 * capacity)
    ]
    assert times[1] <= times[0] + 5
