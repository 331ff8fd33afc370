"""Stages of a pipeline on virtual time: what follows from slots, and from slots alone."""

from unittest.mock import patch

import pytest
from error_texts import raises
from staged_plans import Layers, computing, most_under_way, runs_of, staged_plans

import actorflow as af
from actors.race.race import check_races
from compiler.contract.errors import InternalError
from compiler.contract.placement import Mesh
from compiler.contract.plan_tables import ActorKind, RegisterKind
from compiler.contract.rank_plans import RankPlans
from compiler.lowering import actor_graph, step_program
from compiler.sbp.stages import _StageGraph
from compiler.storage import order
from compiler.verify.cross_rank import verify_ranks
from compiler.verify.verify import edges_of
from memory.registers import repetition_vector

F, B = 1_000, 2_000


def ideal(num_stages, batches):
    """Return the time of a step with one forward, one backward (PipeDream-flush)."""
    return (batches + num_stages - 1) * (F + B)


def time_of(plans, batches, **how):
    runs = runs_of(plans, batches, F, B, **how)
    return max([run.makespan_ns for run in runs]), runs


@pytest.mark.parametrize(("num_stages", "batches"), [(4, 4), (4, 16), (8, 32)])
def test_a_pipeline_takes_no_longer_than_one_forward_one_backward(num_stages, batches):
    plans = staged_plans(Layers(num_stages), num_stages, batches)
    time, runs = time_of(plans, batches)
    assert time <= 1.01 * ideal(num_stages, batches)
    under_way = [most_under_way(*pair) for pair in zip(plans, runs, strict=True)]
    assert under_way == [num_stages - stage for stage in range(num_stages)]
    twice, _ = time_of(plans, 2 * batches)
    assert twice <= 2 * time
    # What moves is covered but for the way there and back.
    slower, _ = time_of(plans, batches, transfer_ns=F // 10)
    assert slower <= time + 2 * num_stages * F // 10


@pytest.mark.parametrize("num_stages", [2, 4])
def test_one_slot_lets_one_batch_be_under_way(num_stages):
    """The mutant: as many slots as stages are what makes the difference."""
    batches = 4 * num_stages
    with patch.object(step_program, "batches_in_flight", lambda graph: 1):
        plans = staged_plans(Layers(num_stages), num_stages, batches)
    time, runs = time_of(plans, batches)
    assert time > 1.3 * ideal(num_stages, batches)
    assert {most_under_way(*pair) for pair in zip(plans, runs, strict=True)} == {1}


@pytest.mark.parametrize("is_rich", [False, True])
@pytest.mark.parametrize(("num_stages", "every"), [(2, 1), (3, 2), (3, 5)])
def test_plans_of_stages_have_no_races_and_never_wait_for_each_other(num_stages, every, is_rich):
    model = Layers(num_stages, is_rich=is_rich)
    plans = staged_plans(model, num_stages, every, clip_norm=1.0)
    for plan in plans:
        check_races(plan)
    mesh = Mesh(("stage",), (num_stages,))
    verify_ranks(RankPlans(mesh, tuple(plans), tuple(range(num_stages))))
    for seed in range(5):
        time_of(plans, 3 * every, jitter=0.9, seed=seed, transfer_ns=100)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("given", [{}, {"clip_norm": 1.0}, {"skips": True}])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("without", range(3))
def test_a_stage_may_have_nothing_to_train(without, is_frozen, every, given):
    """Its step has as many batches, though it sums nothing; nor has it a part of the norm."""
    model = Layers(3, without=without, is_frozen=is_frozen)
    plans = staged_plans(model, 3, every, **given)
    for plan in plans:
        check_races(plan)
        batches = next(a.id for a in plan.actors if a.kind is ActorKind.SOURCE)
        assert repetition_vector(len(plan.actors), edges_of(plan)[0])[batches] == every
    verify_ranks(RankPlans(Mesh(("stage",), (3,)), tuple(plans), tuple(range(3))))
    for seed in range(3):
        time_of(plans, 3 * every, jitter=0.9, seed=seed, transfer_ns=100)


def test_what_all_stages_make_together_waits_for_all_that_the_batch_hands_on():
    """The mutant: a stage without a part of the norm waits for it before it hands gradients on."""
    model = Layers(3, without=1)
    with patch.object(order, "is_over_stages", lambda node: False):
        plans = staged_plans(model, 3, 1, clip_norm=1.0)
    with raises(InternalError):
        verify_ranks(RankPlans(Mesh(("stage",), (3,)), tuple(plans), tuple(range(3))))


def test_counters_that_batches_hand_on_do_not_hold_the_next_one_back():
    plans = staged_plans(Layers(4, is_rich=True), 4, 8)
    time, runs = time_of(plans, 8)
    assert time <= 1.01 * ideal(4, 8)
    under_way = [most_under_way(*pair) for pair in zip(plans, runs, strict=True)]
    assert under_way == [4, 3, 2, 1]


def test_what_is_kept_has_a_slot_for_each_batch_under_way_and_its_bytes_are_the_plans():
    for stage, plan in enumerate(staged_plans(Layers(4), 4, 8)):
        first, last = [computing(plan)[i] for i in (0, -1)]
        made = {port.register for port in first.outputs}
        kept = [plan.registers[p.register] for p in last.inputs if p.register in made]
        kept = [r for r in kept if r.kind is RegisterKind.DATA]
        assert {r.num_slots for r in kept} <= {4 - stage}
        assert kept or stage
        for register in kept:
            assert len({*register.offsets_bytes}) == register.num_slots
        (taken,) = [a for a in plan.actors if a.name == "receive_up"] or [None] * (stage == 0)
        if taken is not None:
            slots = [plan.registers[port.register] for port in taken.outputs]
            slots = [r.num_slots for r in slots if r.kind is RegisterKind.DATA]
            assert slots == [4 - stage + 1]


def test_a_job_that_is_cut_has_the_plan_of_one_that_is_not_where_one_rank_runs_all():
    def whole(model, batch):
        x = batch.x
        for layer in model.layers:
            x = af.relu(layer(x))
        return {"loss": ((x - batch.y) ** 2).mean()}

    (cut_,) = staged_plans(Layers(3), 1, 4)
    (plain,) = staged_plans(Layers(3), 1, 4, fn=whole)
    assert cut_.graph_hash != plain.graph_hash
    assert not [a for a in cut_.actors if a.kind is ActorKind.COMM]
    for part in ("actors", "registers", "arenas"):
        assert len(getattr(cut_, part)) == len(getattr(plain, part))
    assert cut_.arenas == plain.arenas


def test_a_variable_that_both_ways_touch_is_handed_on_in_turn():
    """Without copies of what is counted the way back reads the counter itself."""

    def plans():
        return staged_plans(Layers(2, is_rich=True), 2, 4)

    with patch.object(_StageGraph, "_handed_on", lambda self, stages: set()):
        in_turn = plans()
        check_races(in_turn[0])
        _, runs = time_of(in_turn, 4)
        assert most_under_way(in_turn[0], runs[0]) == 1
        lost = patch.object(actor_graph, "_turns", lambda program: [])
        with lost, raises(InternalError):
            plans()
