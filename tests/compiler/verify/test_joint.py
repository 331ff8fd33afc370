"""Plans of several ranks together: what is refused by name, and the same as all states say."""

from dataclasses import replace
from itertools import pairwise

import tiers
from error_texts import raises
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from plans import with_register
from rank_plans import (
    Row,
    chain_plan,
    exchanged,
    gathered,
    plan_of_rows,
    reduced,
    scattered,
    sent,
    with_moves,
)
from rank_search import RankSearch, TooMany

from compiler.contract.errors import CompileError, InternalError
from compiler.contract.placement import Mesh
from compiler.contract.rank_plans import RankPlans
from compiler.verify.cross_rank import verify_ranks
from compiler.verify.verify import edges_of
from memory.registers import play_period, repetition_vector

PAIR = Mesh(("data",), (2,))
GRID = Mesh(("data", "model"), (2, 2))
FOUR = Mesh(("data",), (4,))


def refused(mesh, plans, class_of=None, error=InternalError):
    """Expect that the plans of ranks are refused."""
    class_of = range(len(plans)) if class_of is None else class_of
    with raises(error):
        verify_ranks(RankPlans(mesh, tuple(plans), tuple(class_of)))


def test_ranks_with_one_plan_fit_together_and_are_played_as_one():
    plan = chain_plan(reduced(0, num_ranks=4), reduced(1, num_ranks=4))
    report = verify_ranks(RankPlans.same(plan, FOUR))
    assert (report.num_ranks, report.num_kinds, report.num_actors) == (4, 1, 6)


def test_all_collectives_with_uneven_parts_fit_together():
    of_rank = [
        chain_plan(
            reduced(0), scattered(1, 5, rows), gathered(2, 5, rows), exchanged(3, 5, rows, 7, to)
        )
        for rows, to in ((3, 4), (2, 3))
    ]
    assert verify_ranks(RankPlans(PAIR, tuple(of_rank), (0, 1))).num_kinds == 2


def test_groups_of_two_axes_in_one_firing_fit_together():
    both = reduced(0), reduced(1, group="model")
    plan = chain_plan(both, reduced(2))
    assert verify_ranks(RankPlans.same(plan, GRID)).num_kinds == 1
    lone = replace(plan, sources=(*plan.sources, plan.sources[0]))  # another class with the same
    assert verify_ranks(RankPlans(GRID, (plan, lone), (0, 1, 1, 0))).num_kinds == 2


def test_what_a_stage_sends_the_next_one_receives():
    mesh = Mesh(("stage", "data"), (2, 2))
    first = chain_plan(sent(0, 1, group="stage"), sent(1, 1, op="receive", group="stage"))
    second = chain_plan(sent(0, 0, op="receive", group="stage"), sent(1, 0, group="stage"))
    assert verify_ranks(RankPlans(mesh, (first, second), (0, 0, 1, 1))).num_kinds == 2
    longer = chain_plan(sent(0, 0, 5, op="receive", group="stage"), sent(1, 0, group="stage"))
    refused(mesh, (first, longer), (0, 0, 1, 1))
    silent = chain_plan(sent(0, 0, op="receive", group="stage"))
    refused(mesh, (first, silent), (0, 0, 1, 1))
    swapped = chain_plan(sent(1, 0, group="stage"), sent(0, 0, op="receive", group="stage"))
    refused(mesh, (first, swapped), (0, 0, 1, 1))


# -- mutants -------------------------------------------------------------------------------------

GOOD = chain_plan(reduced(0, name="a"), reduced(1, 6, name="b"), reduced(2, name="c"))


def test_two_collectives_swapped_on_one_rank_are_named():
    swapped = chain_plan(reduced(0, name="a"), reduced(2, name="c"), reduced(1, 6, name="b"))
    refused(PAIR, (GOOD, swapped))


def test_a_bucket_of_another_size_is_named():
    other = chain_plan(reduced(0, name="a"), reduced(1, 7, name="b"), reduced(2, name="c"))
    refused(PAIR, (GOOD, other))


def test_buckets_cut_elsewhere_are_named():
    other = chain_plan((reduced(0, name="a"), reduced(1, 6, name="b")), reduced(2, name="c"))
    refused(PAIR, (GOOD, other))
    fewer = chain_plan(reduced(0, name="a"), reduced(1, 6, name="b"))
    refused(PAIR, (GOOD, fewer))


def test_another_group_another_reduction_and_other_elements_are_named():
    across = chain_plan(reduced(0), reduced(1, group="model"))
    refused(GRID, (across, chain_plan(reduced(0), reduced(1))), (0, 0, 0, 1))
    largest = with_moves(GOOD, "comm.0", reduced(0, attrs=(("by", "max"),)))
    refused(PAIR, (GOOD, largest))
    silent = with_moves(GOOD, "comm.0", reduced(0, attrs=()))
    with raises(InternalError):
        verify_ranks(RankPlans(PAIR, (GOOD, silent), (0, 1)))


def test_a_group_of_another_size_is_named():
    refused(FOUR, (GOOD,), (0,) * 4, CompileError)
    refused(Mesh(("x",), (2,)), (GOOD,), (0, 0), CompileError)


def test_parts_that_do_not_add_up_are_named():
    wrong = [chain_plan(gathered(0, 5, rows)) for rows in (3, 3)]
    refused(PAIR, wrong)


def test_a_foreign_plan_is_named():
    other = replace(GOOD, name="other")
    refused(PAIR, (GOOD, other), None, CompileError)
    changed = replace(GOOD, graph_hash="of another script")
    refused(PAIR, (GOOD, changed), None, CompileError)
    twice = replace(GOOD, options=(("accumulate", 2),))
    refused(PAIR, (GOOD, twice), None, CompileError)
    skips = replace(GOOD, options=(("skips_broken_steps", True),))
    refused(PAIR, (GOOD, skips), None, CompileError)
    held = replace(GOOD, options=(("evaluation", "of another script"),))
    refused(PAIR, (GOOD, held), None, CompileError)
    meant = replace(GOOD, options=(("mesh", (("data", 3),)),))
    refused(PAIR, (meant,), (0, 0), CompileError)
    apart = replace(GOOD, options=(("hosts", ((1,), (10.0, 0.0), (1.0, 5.0))),))
    refused(PAIR, (GOOD, apart), None, CompileError)


def test_plans_of_one_job_that_do_not_fit_are_no_fault_of_the_user():
    """Whoever reads it is told what may be left out until it is mended."""
    options = (("accumulate", 2), ("clip_norm", 1.0), ("recompute", "auto"), ("num_streams", 1))
    swapped = chain_plan(reduced(0, name="a"), reduced(2, name="c"), reduced(1, 6, name="b"))
    refused(PAIR, [replace(plan, options=options) for plan in (GOOD, swapped)])


def test_plans_for_too_few_or_unknown_ranks_are_refused():
    refused(PAIR, (GOOD,), None, CompileError)
    refused(PAIR, (GOOD,), (0, 1), CompileError)


def test_a_dropped_slot_is_named():
    rows = [Row("data"), Row("one", (reduced(0),), "comm"), Row("sum"), Row("end")]
    edges = [(0, 1), (1, 2, 2, 1, 2), (2, 3), (0, 2, 2, 1, 2)]
    plan = plan_of_rows(rows, edges)
    verify_ranks(RankPlans.same(plan, PAIR))
    dropped = with_register(plan, "one>sum", num_slots=1, offsets_bytes=(0,))
    refused(PAIR, (plan, dropped))


def test_ranks_that_fire_at_other_rates_are_named():
    rows = [Row("data"), Row("one", (reduced(0),), "comm"), Row("two", (reduced(1),), "comm")]
    plans = [
        plan_of_rows(rows, [(0, 1), (1, 2, slots, 1, slots), (0, 2, slots, 1, slots)])
        for slots in (2, 3)
    ]
    refused(PAIR, plans)


def test_collectives_whose_order_a_plan_leaves_open_are_named():
    rows = [
        Row("data"), Row("one", (reduced(0, name="a"),), "comm"),
        Row("two", (reduced(1, name="b"),), "comm"),
    ]  # fmt: skip
    refused(PAIR, (plan_of_rows(rows, [(0, 1), (0, 2)]),), (0, 0))
    # So does the next step's first one, where nothing holds it back.
    open_ = plan_of_rows(rows, [(0, 1), (1, 2, 2)])
    refused(PAIR, (open_,), (0, 0))
    verify_ranks(RankPlans.same(plan_of_rows(rows, [(0, 1), (1, 2), (0, 2)]), PAIR))


def test_ranks_without_one_order_of_all_groups_are_named():
    """Nobody waits for ever: the pair that meets second waits for the one that meets first."""
    one, other = [
        chain_plan(*[reduced(o, group=("data", "model")[o], name="ab"[o]) for o in own])
        for own in ((0, 1), (1, 0))
    ]
    class_of = (1, 0, 0, 0)
    assert not RankSearch(GRID, (one, other), class_of).is_stuck([(1,) * 6] * 4)
    refused(GRID, (one, other), class_of)


def test_training_and_evaluation_have_an_order_each():
    """Whose an actor is says its name, and nothing that the other program has beside it."""

    def plan_of(*orders, size=4):
        rows = [Row("data"), *[Row(f"all_reduce.{n}", (reduced(n),), "comm") for n in orders]]
        rows += [
            Row("evaluate.all_reduce", (reduced(0, size, name="evaluated"),), "comm"),
            Row("evaluate.all_reduce.1", (reduced(2, size),), "comm"),
        ]
        return plan_of_rows(rows, [*pairwise(range(len(rows))), (0, len(rows) - 1)])

    assert verify_ranks(RankPlans.same(plan_of(0, 1), PAIR)).num_actors == 5
    refused(PAIR, (plan_of(0, 1), plan_of(0, 1, size=5)))
    # One stage's steps have a number that the other's have not; evaluations are met in by all.
    columns = Mesh(("data", "stage"), (2, 2))
    stages = plan_of(0, 3), plan_of(2, 3)
    verify_ranks(RankPlans(columns, stages, (0, 1, 0, 1)))


def test_two_collectives_of_one_number_are_refused():
    plan = chain_plan(reduced(0), reduced(1), reduced(0, name="again"))
    refused(PAIR, (plan,), (0, 0), InternalError)


def test_a_circle_of_groups_that_agree_in_pairs_is_found():
    """Around the grid: each rank does first what the next one does last."""
    orders = [(0, 1), (2, 0), (1, 3), (3, 2)]  # by rank; 0 and 3 along data, ...
    groups = {0: "model", 3: "model", 1: "data", 2: "data"}
    plans = [chain_plan(*[reduced(order, group=groups[order]) for order in own]) for own in orders]
    refused(GRID, plans)
    good = [
        chain_plan(*sorted([reduced(o, group=groups[o]) for o in own], key=str)) for own in orders
    ]
    verify_ranks(RankPlans(GRID, tuple(good), (0, 1, 2, 3)))


def test_a_launch_that_does_not_say_whom_it_meets_is_refused():
    launch = GOOD.actors[2].launches[0]
    actors = list(GOOD.actors)
    actors[2] = replace(actors[2], launches=(replace(launch, attrs=()),))
    refused(PAIR, (replace(GOOD, actors=tuple(actors)),), (0, 0))


# -- all states ----------------------------------------------------------------------------------


@st.composite
def ranks_of(draw, mesh, axes):
    """A plan with some edges for each rank: most have one order of collectives, some another."""
    num_moves = draw(st.integers(1, 3))
    orders = list(range(num_moves))
    groups = [draw(st.sampled_from(axes)) for _ in orders]
    links = [draw(st.sampled_from([(), (0,), (1,), (0, 1)])) for _ in orders]
    slots = draw(st.integers(1, 2))
    is_fenced, is_one_stream = draw(st.booleans()), draw(st.booleans())
    plans = []
    for _ in range(mesh.num_ranks):
        own = draw(st.permutations(orders)) if draw(st.integers(0, 3)) == 0 else orders
        rows = [Row("data"), Row("side")]
        rows += [
            Row(f"comm.{o}", (reduced(o, group=groups[o]),), "comm" if is_one_stream else groups[o])
            for o in own
        ]
        edges = [(0, 1)]
        for place, order in enumerate(own, 2):
            if place > 2 and 1 in links[order]:
                edges.append((place - 1, place, slots))
            edges += [(0 if 0 in links[order] else 1, place)]
        rows.append(Row("end"))
        edges += [(place, len(rows) - 1) for place in range(2, len(rows) - 1)]
        if is_fenced:
            edges.append((0, len(rows) - 1))
        plans.append(plan_of_rows(rows, edges))
    return tuple(plans)


def verdicts(mesh, plans, limit):
    """Return whether the proof refuses ranks, and whether some order of events is their end."""
    class_of = range(mesh.num_ranks)
    firings = []
    for plan in plans:
        edges, _ = edges_of(plan)
        firings.append(repetition_vector(len(plan.actors), edges))
        assume(play_period(len(plan.actors), edges, firings[-1]) is None)
    try:
        is_stuck = RankSearch(mesh, plans, class_of, limit=limit).is_stuck(firings)
    except TooMany:
        assume(False)
    try:
        verify_ranks(RankPlans(mesh, plans, tuple(class_of)))
    except (CompileError, InternalError):
        return True, is_stuck
    return False, is_stuck


@given(ranks_of(PAIR, ["data"]))
@settings(max_examples=tiers.examples(80), deadline=None)
def test_two_ranks_are_refused_where_some_order_of_events_is_their_end(plans):
    is_refused, is_stuck = verdicts(PAIR, plans, 3_000)
    assert is_refused == is_stuck


@given(ranks_of(GRID, ["data", "model"]))
@settings(max_examples=tiers.examples(25), deadline=None, suppress_health_check=list(HealthCheck))
def test_no_order_of_events_is_the_end_of_ranks_of_a_grid_that_fit_together(plans):
    is_refused, is_stuck = verdicts(GRID, plans, 4_000)
    assert is_refused or not is_stuck
