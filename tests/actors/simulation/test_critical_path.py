from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.machine.history import Blocker
from actors.machine.table import Edge, MachineTable
from actors.simulation.simulate import Bubble, bubbles, critical_path, simulate, time_per_actor

seeds = st.integers(0, 10_000)


def pipeline(num_actors, num_slots, streams=None):
    edges = [Edge(f"r{i}", i, i + 1, 1, 1, num_slots) for i in range(num_actors - 1)]
    names = [f"a{i}" for i in range(num_actors)]
    return MachineTable.from_edges(names, edges, sources=[0], streams=streams)


def whole_periods(table, periods):
    """Steps after which no token is left anywhere."""
    source = table.sources[0]
    return periods * table.repetitions[source] // table.firings_per_step[source]


def random_run(make_random, seed, *, has_own_streams=False, **options):
    rng = Random(seed)
    table = make_random(rng)
    table = replace(table, is_flushed=(False,) * table.num_actors)
    if has_own_streams:
        table = replace(table, streams=tuple(range(table.num_actors)))
    durations = [rng.randint(1, 50) for _ in table.names]
    steps = whole_periods(table, 4)
    return table, durations, steps, simulate(table, steps, durations, seed=seed, **options)


def test_the_slowest_actor_of_a_pipeline_is_its_critical_path():
    run = simulate(pipeline(3, 2), 3, [10, 30, 5])
    assert [(link.actor, link.firing, link.cause) for link in run.critical_path()] == [
        (0, 0, Blocker.START),
        (1, 0, Blocker.INPUT),
        (1, 1, Blocker.STREAM),
        (1, 2, Blocker.STREAM),
        (2, 2, Blocker.INPUT),
    ]


def test_a_path_goes_back_through_the_slots_that_were_missing():
    run = simulate(pipeline(2, 1), 2, [10, 30])
    path = run.critical_path()
    assert [(link.actor, link.firing, link.cause, link.edge) for link in path] == [
        (0, 0, Blocker.START, None),
        (1, 0, Blocker.INPUT, 0),
        (0, 1, Blocker.SLOT, 0),
        (1, 1, Blocker.INPUT, 0),
    ]
    assert time_per_actor(run.table, path) == (20, 60)


@given(seeds)
@settings(max_examples=tiers.examples(60), deadline=None)
def test_the_firings_of_the_path_fill_the_run_without_a_gap(make_random, seed):
    _, _, _, run = random_run(make_random, seed, jitter=0.5)
    path = run.critical_path()
    assert path[0].start_ns == 0
    assert path[-1].end_ns == run.makespan_ns
    assert all(before.end_ns == after.start_ns for before, after in pairwise(path))
    assert sum(link.end_ns - link.start_ns for link in path) == run.makespan_ns


@given(seeds)
@settings(max_examples=tiers.examples(40), deadline=None)
def test_with_late_messages_firings_and_waits_of_the_path_add_up_to_the_run(make_random, seed):
    table, _, _, run = random_run(make_random, seed, jitter=0.5)
    path = run.critical_path()
    assert all(link.waited_ns >= 0 for link in path)
    assert sum(time_per_actor(table, path)) == run.makespan_ns


@given(seeds)
@settings(max_examples=tiers.examples(60), deadline=None)
def test_what_is_off_the_path_can_be_made_faster_without_any_gain(make_random, seed):
    table, durations, steps, run = random_run(make_random, seed, has_own_streams=True)
    on_path = {link.actor for link in run.critical_path()}
    faster = [d if a in on_path else d // 2 for a, d in enumerate(durations)]
    assert simulate(table, steps, faster).makespan_ns == run.makespan_ns


@given(seeds)
@settings(max_examples=tiers.examples(60), deadline=None)
def test_unlimited_slots_never_make_the_path_longer(make_random, seed):
    table, durations, steps, run = random_run(make_random, seed, has_own_streams=True)
    edges = tuple([replace(e, num_slots=e.num_slots + 10_000) for e in table.edges])
    free = simulate(replace(table, edges=edges), steps, durations)
    assert free.critical_path()[-1].end_ns <= run.makespan_ns
    assert not any(link.cause is Blocker.SLOT for link in free.critical_path())


@given(seeds)
@settings(max_examples=tiers.examples(60), deadline=None)
def test_bubbles_are_what_a_stream_is_idle_between_its_ends(make_random, seed):
    table, _, _, run = random_run(make_random, seed, jitter=0.3)
    for stream in sorted(set(table.streams)):
        rows = [row for row in run.rows if table.streams[row[0]] == stream]
        span = max(row[3] for row in rows) - min(row[2] for row in rows)
        idle = sum(b.idle_ns for b in run.bubbles() if b.stream == stream)
        assert idle == span - run.busy_ns[stream]


def test_a_bubble_names_the_register_that_was_waited_for():
    run = simulate(pipeline(3, 1), 3, [10, 30, 5])
    assert [(b.stream, b.describe(run.table)) for b in run.bubbles()] == [
        (0, "a free slot of 'r0'"),
        (1, "input 'r0'"),
        (2, "input 'r1'"),
    ]
    assert run.bubbles()[1] == Bubble(1, Blocker.INPUT, 0, 20)


def test_a_stream_that_waits_for_its_own_messages_says_so():
    table = pipeline(1, 1)
    run = simulate(table, 1, [10])
    rows = [*run.rows, (0, 1, 13, 20)]
    assert [b.describe(table) for b in bubbles(table, rows)] == ["its own messages"]


@pytest.mark.parametrize("origin", [0, 5_000])
def test_recorded_rows_are_read_from_wherever_their_clock_begins(origin):
    table = pipeline(2, 1)
    rows = [(0, 0, origin, origin + 10), (1, 0, origin + 12, origin + 20)]
    path = critical_path(table, rows)
    assert time_per_actor(table, path) == (10, 10)


def test_a_run_of_nothing_has_no_path_and_no_bubbles():
    table = pipeline(2, 1)
    assert critical_path(table, ()) == ()
    assert bubbles(table, ()) == ()
