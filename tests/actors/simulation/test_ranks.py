from dataclasses import replace

import pytest
import tiers
from error_texts import raises
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.simulation.costs import Network, Wire
from actors.simulation.ranks import Spread, simulate_ranks
from actors.simulation.simulate import simulate
from compiler.contract.errors import InternalError
from compiler.contract.placement import Mesh
from compiler.contract.plan_tables import ActorKind
from compiler.contract.rank_plans import RankPlans

ATTRS = (("by", "sum"), ("group", "data"), ("num_ranks", 2), ("order", 0))
SIZE = 8  # bytes of the plan maker's field
NETWORK = Network(Wire(gb_s=0.004, latency_ns=50.0))


def ring_ns(num_ranks, wire=NETWORK.between):
    """Patarasuk & Yuan (2009), written out: 2 (N-1) messages of 1/N of the bytes."""
    return 2 * (num_ranks - 1) * (SIZE / num_ranks / wire.gb_s + wire.latency_ns)


def alike(plan, num_ranks):
    return RankPlans.same(plan, Mesh(("data",), (num_ranks,)))


def on_streams(plan, names):
    """Give every actor the stream of the one named."""
    by_name = {actor.name: actor.stream for actor in plan.actors}
    actors = [replace(a, stream=by_name[names.get(a.name, a.name)]) for a in plan.actors]
    return replace(plan, actors=tuple(actors))


@pytest.fixture(scope="session")
def data_parallel(plan_maker):
    """data -> backward -> reduce -> update, with some slots of gradients."""

    def make(num_slots, compute_ns=1000.0):
        maker = plan_maker()
        batch, grads, means = [
            maker.edge(name, slots) for name, slots in (("batch", 4), ("g", num_slots), ("m", 2))
        ]
        reduce = maker.launch("any", [maker.field_view(grads)], [maker.field_view(means)])
        maker.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)], duration_ns=0.0)
        maker.actor(
            "backward", ActorKind.COMPUTE, inputs=[(batch, 1)], outputs=[(grads, 1)],
            duration_ns=compute_ns,
        )  # fmt: skip
        maker.actor(
            "reduce", ActorKind.COMM, inputs=[(grads, 1)], outputs=[(means, 1)],
            launches=[replace(reduce, op="all_reduce", attrs=ATTRS)], duration_ns=7.0,
        )  # fmt: skip
        maker.actor("update", ActorKind.SINK, inputs=[(means, 1)], duration_ns=0.0)
        return maker.plan()

    return make


@given(st.integers(1, 9), st.integers(0, 5))
@settings(max_examples=tiers.examples(30), deadline=None)
def test_one_rank_runs_as_if_alone(data_parallel, steps, seed):
    plan = data_parallel(2)
    durations = [0.0 if a.kind is ActorKind.COMM else a.duration_ns for a in plan.actors]
    run = simulate_ranks(alike(plan, 1), steps, network=NETWORK, seed=seed)
    assert run.slowest == simulate(plan, steps, durations)
    assert (run.efficiency, run.exposed_ns, run.late_ns, run.wire_bytes) == (1.0, 0.0, 0.0, 0.0)


@given(st.integers(0, 1000))
@settings(max_examples=tiers.examples(20), deadline=None)
def test_ranks_that_never_meet_run_each_as_if_alone(plan_maker, seed):
    maker = plan_maker()
    batch = maker.edge("batch", 2)
    maker.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)], duration_ns=100.0)
    maker.actor("step", ActorKind.COMPUTE, inputs=[(batch, 1)], duration_ns=300.0)
    plan = maker.plan()
    run = simulate_ranks(alike(plan, 1), 8, network=NETWORK, jitter=0.4, seed=seed)
    assert run.slowest == simulate(plan, 8, jitter=0.4, seed=seed)


@given(st.integers(2, 12), st.integers(1, 8))
@settings(max_examples=tiers.examples(40), deadline=None)
def test_with_one_slot_of_gradients_nothing_overlaps(data_parallel, num_ranks, steps):
    run = simulate_ranks(alike(data_parallel(1), num_ranks), steps, network=NETWORK)
    comm = round(ring_ns(num_ranks))
    assert run.makespan_ns == steps * (1000 + comm)
    assert run.exposed_ns == comm
    assert run.late_ns == 0


@given(st.integers(2, 12), st.integers(2, 8), st.sampled_from([100.0, 1000.0, 9000.0]))
@settings(max_examples=tiers.examples(40), deadline=None)
def test_with_two_slots_the_longer_of_compute_and_transfer_sets_the_pace(
    data_parallel, num_ranks, steps, compute
):
    run = simulate_ranks(alike(data_parallel(2, compute), num_ranks), steps, network=NETWORK)
    comm = round(ring_ns(num_ranks))
    assert run.makespan_ns == compute + (steps - 1) * max(compute, comm) + comm
    assert run.step_ns == max(compute, comm)


@given(st.integers(2, 12), st.integers(0, 100))
@settings(max_examples=tiers.examples(30), deadline=None)
def test_everyone_waits_for_the_straggler(data_parallel, num_ranks, seed):
    spread = Spread(straggler=1.5)
    run = simulate_ranks(
        alike(data_parallel(1), num_ranks), 6, network=NETWORK, spread=spread, seed=seed
    )
    step = 1500 + round(ring_ns(num_ranks))
    assert run.makespan_ns == 6 * step
    assert run.efficiency == 1000 / step
    assert run.late_ns == pytest.approx(500 * (num_ranks - 1) / num_ranks)
    assert run.exposed_ns == round(ring_ns(num_ranks))
    assert run.slowdowns[run.slowest_rank] == 1.5
    assert sorted(run.slowdowns)[:-1] == [1.0] * (num_ranks - 1)


def test_a_thousand_ranks_meet_in_every_step(data_parallel):
    run = simulate_ranks(alike(data_parallel(1), 1000), 3, network=NETWORK)
    assert run.makespan_ns == 3 * (1000 + round(ring_ns(1000)))


@given(st.integers(0, 1000))
@settings(max_examples=tiers.examples(20), deadline=None)
def test_equal_seeds_give_equal_runs_and_jitter_never_changes_the_firings(data_parallel, seed):
    plan, spread = data_parallel(2), Spread(1.3, 0.1)
    runs = [
        simulate_ranks(alike(plan, 5), 6, network=NETWORK, spread=spread, jitter=0.5, seed=seed)
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert runs[0].slowest.firings == (6, 6, 6, 6)
    other = simulate_ranks(
        alike(plan, 5), 6, network=NETWORK, spread=spread, jitter=0.5, seed=seed + 1
    )
    assert other.slowdowns != runs[0].slowdowns


def test_each_rank_has_a_jitter_of_its_own(data_parallel):
    run = simulate_ranks(alike(data_parallel(1), 6), 20, network=NETWORK, jitter=0.5)
    assert run.late_ns > 0


def test_a_spread_of_zero_and_no_straggler_leave_all_ranks_alike(data_parallel):
    run = simulate_ranks(alike(data_parallel(1), 4), 2, network=NETWORK)
    assert run.slowdowns == (1.0,) * 4


def test_a_rank_sends_its_share_of_every_all_reduce(data_parallel):
    run = simulate_ranks(alike(data_parallel(1), 4), 5, network=NETWORK)
    assert run.wire_bytes == 12


def test_two_collectives_that_ranks_begin_in_different_orders_are_found_out(plan_maker):
    maker = plan_maker()
    batch = maker.edge("batch", 1)
    grads = [maker.edge(name) for name in ("g0", "g1")]
    maker.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)], duration_ns=0.0)
    for name, edge in zip(("left", "right"), grads, strict=True):
        maker.actor(
            name, ActorKind.COMPUTE, inputs=[(batch, 1)], outputs=[(edge, 1)], duration_ns=100.0
        )
    for order, (name, edge) in enumerate(zip(("reduce", "reduce too"), grads, strict=True)):
        attrs = (*ATTRS[:3], ("order", order))
        view = maker.field_view(edge)
        launch = replace(maker.launch("any", [view], [view]), op="all_reduce", attrs=attrs)
        maker.actor(name, ActorKind.COMM, inputs=[(edge, 1)], launches=[launch])
    plan = on_streams(maker.plan(), {"reduce too": "reduce"})
    assert simulate_ranks(alike(plan, 16), 9, network=NETWORK).makespan_ns > 0
    with raises(InternalError):
        simulate_ranks(alike(plan, 16), 9, network=NETWORK, jitter=0.5)


def test_wrong_numbers_are_refused(data_parallel):
    plan = data_parallel(1)
    with raises(ValueError):
        simulate_ranks(alike(plan, 2), 1, network=NETWORK, durations_ns=[[1.0]])
    with raises(ValueError):
        simulate_ranks(alike(plan, 2), 1, network=NETWORK, durations_ns=[[1.0], [1.0]])
