"""Ranks with different plans on virtual time, against closed forms and against all ranks run."""

import pytest
import tiers
from error_texts import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_plans import (
    Row,
    chain_plan,
    exchanged,
    gathered,
    plan_of_rows,
    reduced,
    scattered,
    sent,
)

from actors.simulation.costs import Network, Wire
from actors.simulation.ranks import FleetOptions, MultiRankSimulator, simulate_ranks
from compiler.contract.errors import InternalError
from compiler.contract.placement import Mesh
from compiler.contract.rank_plans import RankPlans
from compiler.verify.cross_rank import verify_ranks

NETWORK = Network(Wire(gb_s=0.01, latency_ns=100.0))
FAST = Network(Wire(gb_s=1e9, latency_ns=0.0))
GRID = Mesh(("data", "model"), (2, 3))


def message_ns(size):
    return size / 0.01 + 100


def local_ns(ranks):
    return [
        [0.0 if a.name.startswith("comm") else a.duration_ns for a in plan.actors]
        for plan in ranks.plans
    ]


def test_groups_along_both_axes_meet_each_on_its_own():
    """A step: 1,000 ns; a ring of 3 over 12 floats; 1,000 ns; a ring of 2 over 4; 1,000 ns."""
    plan = chain_plan(reduced(0, 12, group="model", num_ranks=3), reduced(1))
    ranks = RankPlans.same(plan, GRID)
    verify_ranks(ranks)
    run = simulate_ranks(ranks, 4, network=NETWORK)
    model, data = 4 * message_ns(16), 2 * message_ns(8)
    assert run.makespan_ns == 4 * (3000 + model + data)
    assert run.exposed_ns == model + data
    assert (run.num_ranks, run.num_kinds) == (6, 1)
    assert run.wire_bytes == pytest.approx(2 * 2 / 3 * 48 + 16)


def test_two_groups_are_under_way_at_once():
    rows = [
        Row("data", duration_ns=0.0), Row("comm.0", (reduced(0, 12, group="model", num_ranks=3),)),
        Row("comm.1", (reduced(1),)), Row("end", duration_ns=10.0),
    ]  # fmt: skip
    plan = plan_of_rows(rows, [(0, 1), (0, 2), (1, 3), (2, 3), (0, 3)])
    run = simulate_ranks(RankPlans.same(plan, GRID), 5, network=NETWORK)
    assert run.makespan_ns == 5 * (max(4 * message_ns(16), 2 * message_ns(8)) + 10)


def test_meetings_of_one_firing_come_one_after_the_other():
    both = reduced(0, 12, group="model", num_ranks=3), reduced(1)
    run = simulate_ranks(RankPlans.same(chain_plan(both), GRID), 2, network=NETWORK)
    assert run.makespan_ns == 2 * (2000 + 4 * message_ns(16) + 2 * message_ns(8))
    assert run.exposed_ns == 4 * message_ns(16) + 2 * message_ns(8)


def test_all_collectives_take_what_a_ring_of_uneven_parts_does():
    plans = [
        chain_plan(scattered(0, 5, rows), gathered(1, 5, rows), exchanged(2, 5, rows, 7, to))
        for rows, to in ((3, 4), (2, 3))
    ]
    ranks = RankPlans(Mesh(("data",), (2,)), tuple(plans), (0, 1))
    verify_ranks(ranks)
    run = simulate_ranks(ranks, 3, network=NETWORK)
    step = 4000 + 2 * message_ns(20) + message_ns(35)
    assert run.makespan_ns == 3 * step
    assert run.wire_bytes == 20 + 20 + 35


def test_a_slow_class_holds_up_those_whom_it_meets():
    quick, slow = [
        plan_of_rows(
            [Row("data", duration_ns=0.0), Row("work", duration_ns=ns), Row("comm", (reduced(0),))],
            [(0, 1), (1, 2), (0, 2)],
        )
        for ns in (100.0, 900.0)
    ]
    ranks = RankPlans(Mesh(("data", "other"), (2, 2)), (quick, slow), (0, 0, 0, 1))
    run = simulate_ranks(ranks, 3, network=NETWORK)
    comm = 2 * message_ns(8)
    assert run.makespan_ns == 3 * (900 + comm)
    assert run.slowest_rank == 3
    assert (run.num_kinds, run.alone_ns) == (3, 900)
    assert run.late_ns == 800 / 4  # rank 1 waits for rank 3; ranks 0 and 2 for nobody


def stage_plan(stage, count, forward_ns, backward_ns):
    """Forward and backward of one stage on one stream, with a stream for each end of a channel."""
    names = {"data": Row("data", duration_ns=0.0)}
    last, slots = stage == count - 1, count - stage

    def end(order, peer, op):
        return (sent(order, peer, op=op, group="stage"),)

    if stage:
        names["comm up"] = Row("comm up", end(2 * stage - 1, stage - 1, "receive"))
    names["forward"] = Row("forward", (), "compute", forward_ns)
    if not last:
        names["comm on"] = Row("comm on", end(2 * stage + 1, stage + 1, "send"))
        names["comm back"] = Row("comm back", end(2 * stage + 2, stage + 1, "receive"))
    names["backward"] = Row("backward", (), "compute", backward_ns)
    if stage:
        names["comm down"] = Row("comm down", end(2 * stage, stage - 1, "send"))
    edges = [("forward", "backward", slots), ("data", "forward", 1)]
    if stage:
        edges += [("data", "comm up", 1), ("comm up", "forward", 1), ("backward", "comm down", 1)]
    if not last:
        edges += [("forward", "comm on", 1), ("comm on", "comm back", slots)]
        edges += [("comm back", "backward", 1)]
    order = list(names)
    return plan_of_rows(
        list(names.values()), [(order.index(a), order.index(b), n) for a, b, n in edges]
    )


@pytest.mark.parametrize(("stages", "batches"), [(2, 4), (4, 4), (4, 16), (8, 32)])
def test_slots_make_stages_run_one_forward_one_backward(stages, batches):
    """Narayanan et al., "PipeDream", 2019: (m + P - 1)(f + b) with P - s batches under way."""
    plans = tuple([stage_plan(stage, stages, 1000.0, 2000.0) for stage in range(stages)])
    class_of = tuple([stage for stage in range(stages) for _ in range(3)])
    ranks = RankPlans(Mesh(("stage", "data"), (stages, 3)), plans, class_of)
    assert verify_ranks(ranks).num_kinds == stages
    run = simulate_ranks(ranks, batches, network=FAST)
    least = (batches + stages - 1) * 3000
    assert least <= run.makespan_ns <= 1.01 * least
    assert run.num_kinds == stages


@st.composite
def fleets(draw):
    """Ranks of a grid whose plans, speeds and groups differ here and there."""
    num_moves = draw(st.integers(1, 3))
    groups = [draw(st.sampled_from(["data", "model"])) for _ in range(num_moves)]
    moves = [
        reduced(i, draw(st.integers(1, 30)), group=g, num_ranks={"data": 2, "model": 3}[g])
        for i, g in enumerate(groups)
    ]
    slots = draw(st.integers(1, 2))
    plans = []
    for _ in range(draw(st.integers(1, 2))):
        rows, edges = [Row("data", duration_ns=0.0)], []
        for move in moves:
            # Short durations, so that many things happen at the same time.
            work = Row(f"work.{move.order}", (), "work", float(draw(st.integers(0, 3))) * 100)
            rows += [work, Row(f"comm.{move.order}", (move,), "comm")]
            edges += [(0, len(rows) - 2, slots), (len(rows) - 2, len(rows) - 1, slots)]
            if move.order:
                edges.append((len(rows) - 3, len(rows) - 1))
        rows.append(Row("end"))
        edges += [(len(rows) - 2, len(rows) - 1), (2, len(rows) - 1)]
        plans.append(plan_of_rows(rows, edges))
    class_of = [draw(st.integers(0, len(plans) - 1)) for _ in range(6)]
    slowdowns = [draw(st.sampled_from([1.0, 1.0, 2.0])) for _ in range(6)]
    return RankPlans(GRID, tuple(plans), tuple(class_of)), tuple(slowdowns)


@given(fleets(), st.integers(1, 2))
@settings(max_examples=tiers.examples(60), deadline=None)
def test_ranks_that_are_alike_do_what_each_of_them_would(found, per_host):
    ranks, slowdowns = found
    network = Network(Wire(0.01, 100.0), per_host=per_host, inside=Wire(0.02, 50.0))
    options = FleetOptions(network, slowdowns)
    few = MultiRankSimulator(ranks, local_ns(ranks), options)
    kind_of = ranks.equivalence_classes(few.marks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankPlans, "equivalence_classes", lambda self, marks: tuple(range(6)))
        every = MultiRankSimulator(ranks, local_ns(ranks), options)
    assert len(every.runs) == 6
    one_of_each = list(few.run(5))
    for rank, run in enumerate(every.run(5)):
        like = one_of_each[kind_of[rank]]
        assert sorted(run.rows) == sorted(like.rows)
        sent_bytes = few.sent_bytes(kind_of[rank], like.firings)
        assert every.sent_bytes(rank, run.firings) == pytest.approx(sent_bytes)


def test_ranks_that_come_to_each_other_in_different_orders_are_named():
    one, other = [
        chain_plan(*[reduced(order, name=f"w{order}") for order in own]) for own in ((0, 1), (1, 0))
    ]
    ranks = RankPlans(Mesh(("data",), (2,)), (one, other), (0, 1))
    with raises(InternalError):
        simulate_ranks(ranks, 1, network=NETWORK)


def test_a_thousand_ranks_of_eight_stages_are_eight_kinds():
    mesh = Mesh(("stage", "model", "data"), (8, 5, 25))
    plans = [
        chain_plan(
            reduced(1 + stage, 12, group="model", num_ranks=5),
            reduced(100 + stage, 12, num_ranks=25),
        )
        for stage in range(8)
    ]
    class_of = tuple([mesh.coordinates(rank)[0] for rank in range(1000)])
    ranks = RankPlans(mesh, tuple(plans), class_of)
    assert verify_ranks(ranks).num_kinds == 8
    run = simulate_ranks(ranks, 5, network=NETWORK)
    assert (run.num_kinds, run.num_ranks) == (8, 1000)
    assert run.makespan_ns == pytest.approx(
        5 * (3000 + 8 * message_ns(48 / 5) + 48 * message_ns(48 / 25)), abs=20
    )
