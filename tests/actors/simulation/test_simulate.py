from dataclasses import replace
from itertools import pairwise

import pytest
import tiers
from error_texts import raises
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.machine.table import Edge, MachineTable
from actors.simulation.simulate import simulate
from compiler.contract.errors import InternalError
from compiler.contract.plan_tables import ActorKind


def pipeline(durations, num_slots, streams=None):
    names = [f"a{i}" for i in range(len(durations))]
    edges = [Edge(f"r{i}", i, i + 1, 1, 1, num_slots) for i in range(len(durations) - 1)]
    return MachineTable.from_edges(names, edges, sources=[0], streams=streams)


durations_lists = st.lists(st.integers(1, 50), min_size=2, max_size=5)


@given(durations_lists, st.integers(1, 12))
@settings(max_examples=tiers.examples(60), deadline=None)
def test_enough_slots_let_the_slowest_actor_set_the_pace(durations, steps):
    run = simulate(pipeline(durations, num_slots=steps + 1), steps, durations)
    assert run.makespan_ns == sum(durations) + (steps - 1) * max(durations)


@given(durations_lists, st.integers(1, 12))
@settings(max_examples=tiers.examples(60), deadline=None)
def test_one_slot_makes_neighbours_take_turns(durations, steps):
    run = simulate(pipeline(durations, num_slots=1), steps, durations)
    turns = max(a + b for a, b in pairwise(durations))
    assert run.makespan_ns == sum(durations) + (steps - 1) * turns


@given(durations_lists, st.integers(1, 8))
@settings(max_examples=tiers.examples(30), deadline=None)
def test_actors_on_one_stream_never_overlap(durations, steps):
    run = simulate(pipeline(durations, 3, streams=[0] * len(durations)), steps, durations)
    assert run.makespan_ns == steps * sum(durations)
    assert run.utilisation == (1.0,)


@given(st.integers(0, 10_000))
@settings(max_examples=tiers.examples(30), deadline=None)
def test_jitter_and_delays_change_times_and_never_firings(seed):
    table = pipeline([10, 20, 30], 2)
    run = simulate(table, 9, [10, 20, 30], seed=seed, jitter=0.9)
    assert run.firings == (9, 9, 9)
    assert run == simulate(table, 9, [10, 20, 30], seed=seed, jitter=0.9)
    assert sum(run.busy_ns) == sum(end - start for _, _, start, end in run.rows)


def test_no_steps_take_no_time():
    run = simulate(pipeline([10, 10], 1), 0, [10, 10])
    assert (run.makespan_ns, run.firings, run.rows) == (0, (0, 0), ())
    assert run.utilisation == (0.0, 0.0)


def test_a_plan_is_simulated_with_its_own_durations(plan_maker):
    make = plan_maker()
    batch = make.edge("batch", 2)
    make.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)], duration_ns=100.0)
    make.actor("step", ActorKind.COMPUTE, inputs=[(batch, 1)], duration_ns=300.0)
    run = simulate(make.plan(), 4)
    assert run.makespan_ns == 100 + 4 * 300
    assert run.utilisation == (400 / 1300, 1200 / 1300)


def test_a_table_without_durations_is_refused():
    with raises(ValueError):
        simulate(pipeline([1, 1], 1), 1)
    with raises(ValueError):
        simulate(pipeline([1, 1], 1), 1, [1])


def test_a_plan_that_cannot_finish_is_an_error_that_names_who_waits():
    # c needs three tokens of a before its first firing, and the direct edge has room for one.
    edges = [
        Edge("direct", 0, 2, 1, 1, 1),
        Edge("fast", 0, 1, 1, 3, 3),
        Edge("gathered", 1, 2, 3, 1, 3),
    ]
    table = MachineTable.from_edges(["a", "b", "c"], edges, sources=[0])
    with raises(InternalError):
        simulate(table, 3, [1, 1, 1])


@given(durations_lists, st.integers(2, 12))
@settings(max_examples=tiers.examples(60), deadline=None)
def test_the_period_is_that_of_the_slowest_actor_once_slots_suffice(durations, steps):
    run = simulate(pipeline(durations, num_slots=steps + 1), steps, durations)
    assert run.period_ns == max(durations)


def test_a_period_is_a_step_even_where_an_actor_fires_once_in_several_steps():
    edges = [Edge("r", 0, 1, 1, 4, 8)]
    table = MachineTable.from_edges(["a", "b"], edges, sources=[0])
    run = simulate(table, 32, [10, 400])
    assert run.period_ns == 100


def test_a_single_step_has_the_makespan_as_its_period():
    assert simulate(pipeline([10, 20], 1), 1, [10, 20]).period_ns == 30
    assert simulate(pipeline([10, 20], 1), 0, [10, 20]).period_ns == 0


def test_a_step_that_accumulates_has_all_its_batches(plan_maker):
    make = plan_maker()
    batch, done = make.edge("batch", 2), make.edge("done", 4)
    make.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)], duration_ns=1.0)
    make.actor("gradient", ActorKind.COMPUTE, inputs=[(batch, 1)], outputs=[(done, 1)],
               duration_ns=100.0)  # fmt: skip
    make.actor("update", ActorKind.COMPUTE, inputs=[(done, 4)], duration_ns=50.0)
    plan = replace(make.plan(), options=(("accumulate", 4),))
    run = simulate(plan, 6)
    assert run.firings == (24, 24, 6)
    assert run.period_ns == pytest.approx(450, abs=50)
