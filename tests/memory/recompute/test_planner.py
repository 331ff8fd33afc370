import pytest
from problems import check_sequence, simulate

from memory.offsets import plan_offsets
from memory.recompute.planner import Planner
from memory.recompute.problem import Problem, ProblemOp, buffer_intervals


def network(sizes, *, skip=None, time=1.0):
    """A chain whose backward ops read what their forward ops made; one late op reads a skip too."""
    num = len(sizes)
    forward, backward = [], []
    for i in range(num):
        reads = (i - 1,) if i else ()
        if skip is not None and i == num - 1:
            reads = (*reads, skip)
        forward.append(ProblemOp(reads, (i,), 0, time))
    for i in reversed(range(num)):
        before = (2 * num - 2 - i,) if backward else ()
        backward.append(ProblemOp((i, *before), (2 * num - 1 - i,), 0, time))
    return Problem((*forward, *backward), (*sizes, *reversed(sizes)), num)


CHAIN = network([100, 300, 200, 400, 100, 300, 200, 100])
SKIP = network([400, 300, 200, 400, 100, 300, 200, 100], skip=0)


def check(problem, plan, alignment=64):
    """What a plan says of itself equals what the judges say of its sequence."""
    check_sequence(problem, plan.sequence)
    arena = plan_offsets(*buffer_intervals(problem, plan.sequence), alignment=alignment)
    assert plan.duration == pytest.approx(simulate(problem, plan.sequence).duration)
    assert plan.peak_bytes == arena.peak_bytes
    base = simulate(problem, problem.store_all).duration
    assert plan.extra == pytest.approx(plan.duration / base - 1)


def test_nothing_runs_again_where_everything_fits():
    needs = Planner(CHAIN).store_all.peak_bytes
    plan = Planner(CHAIN).plan(needs)
    check(CHAIN, plan)
    assert (plan.sequence, plan.method, plan.extra) == (CHAIN.store_all, "store all", 0.0)
    assert plan.certificate == "nothing runs again: optimal"
    assert Planner(CHAIN).plan(needs - 1).method != "store all"


@pytest.mark.parametrize("problem", [CHAIN, SKIP])
@pytest.mark.parametrize("alignment", [1, 64])
def test_the_arena_of_a_plan_is_within_the_budget(problem, alignment):
    planner = Planner(problem, alignment=alignment)
    most, least = planner.store_all.peak_bytes, planner.smallest.peak_bytes
    for budget in range(least, most, max(1, (most - least) // 6)):
        plan = planner.plan(budget)
        check(problem, plan, alignment)
        assert plan.peak_bytes <= budget
        assert plan.extra > 0


def test_no_budget_below_what_was_found_is_promised():
    planner = Planner(SKIP)
    smallest = planner.smallest
    check(SKIP, smallest)
    assert smallest == Planner(SKIP).smallest
    assert planner.plan(smallest.peak_bytes).peak_bytes == smallest.peak_bytes
    assert planner.plan(smallest.peak_bytes - 64) is None
    assert planner.floor.size_bytes <= smallest.peak_bytes


def test_blocks_is_a_plan_of_its_own_whatever_the_budget():
    planner = Planner(CHAIN)
    check(CHAIN, planner.blocks)
    assert planner.blocks.method == "blocks"


def test_a_graph_without_blocks_has_nothing_to_run_again_by_blocks():
    problem = network([64, 64])
    assert Planner(problem).blocks.sequence == problem.store_all


def test_an_answer_does_not_depend_on_those_before():
    planner = Planner(CHAIN)
    budgets = [planner.store_all.peak_bytes * k // 8 for k in (7, 5, 6, 4)]
    assert [planner.plan(b) for b in budgets] == [Planner(CHAIN).plan(b) for b in budgets]
