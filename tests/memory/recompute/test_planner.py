import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory.offsets import plan_offsets
from memory.recompute.planner import Infeasible, Planner
from memory.recompute.problem import Problem, ProblemOp, check_sequence
from memory.recompute.simulate import buffer_intervals, simulate


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


def no_chain(problem):
    return None


CHAIN = network([100, 300, 200, 400, 100, 300, 200, 100])
SKIP = network([400, 300, 200, 400, 100, 300, 200, 100], skip=0)


def check(problem, plan, alignment=64):
    """What a plan says of itself equals what the judges say of its sequence."""
    check_sequence(problem, plan.sequence)
    arena = plan_offsets(*buffer_intervals(problem, plan.sequence), alignment=alignment)
    assert plan.duration == pytest.approx(simulate(problem, plan.sequence).duration)
    assert plan.peak_bytes == arena.peak_bytes
    assert plan.live_bytes == arena.lower_bound_bytes
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
    most, least = planner.store_all.peak_bytes, planner.smallest().peak_bytes
    for budget in range(least, most, max(1, (most - least) // 6)):
        plan = planner.plan(budget)
        check(problem, plan, alignment)
        assert plan.peak_bytes <= budget
        assert plan.extra > 0


def test_no_budget_below_what_was_found_is_promised():
    planner = Planner(SKIP)
    smallest = planner.smallest()
    check(SKIP, smallest)
    assert smallest == Planner(SKIP).smallest()
    assert planner.plan(smallest.peak_bytes).peak_bytes == smallest.peak_bytes
    with pytest.raises(Infeasible) as failure:
        planner.plan(smallest.peak_bytes - 64)
    assert failure.value.smallest_bytes == smallest.peak_bytes
    assert (failure.value.op, failure.value.floor_bytes) == planner.floor
    assert planner.floor.size_bytes <= smallest.peak_bytes


def test_an_error_says_what_would_fit_and_who_stands_in_the_way():
    problem = network([1024, 1024, 2048])
    with pytest.raises(Infeasible) as failure:
        Planner(problem).plan(1000)
    assert str(failure.value) == (
        "no plan fits 1000 B; the smallest one found needs 4.0 KiB (4,096 bytes). Op 3 alone"
        " needs 4.0 KiB (4,096 bytes) at once, and no plan goes below: raise the budget, or make"
        " that op smaller"
    )


def test_the_policy_none_runs_nothing_again():
    planner = Planner(CHAIN)
    assert planner.plan(0, policy="none") == planner.store_all
    with pytest.raises(Infeasible):
        planner.plan(planner.store_all.peak_bytes - 1, policy="none")


def test_the_policy_blocks_holds_its_plan_against_a_budget_only_where_one_is_given():
    planner = Planner(CHAIN)
    plan = planner.plan(0, policy="blocks")
    check(CHAIN, plan)
    assert planner.plan(plan.peak_bytes, policy="blocks") == plan
    with pytest.raises(Infeasible):
        planner.plan(plan.peak_bytes - 1, policy="blocks")


def test_a_graph_without_blocks_has_nothing_to_run_again_by_blocks():
    problem = network([64, 64])
    assert Planner(problem).plan(0, policy="blocks").sequence == problem.store_all


class Table:
    """A chain table with one sequence, and the budgets it was asked for."""

    def __init__(self, problem, sequence):
        self.only = sequence
        self.least_bytes = simulate(problem, sequence).peak_bytes
        self.asked = []

    def sequence(self, budget_bytes):
        self.asked.append(budget_bytes)
        return self.only if budget_bytes >= self.least_bytes else None


def test_the_faster_of_two_methods_wins():
    problem = network([640, 640, 640, 640, 64])
    without = Planner(problem, find_chain=no_chain).plan(2560)
    assert without.method == "selective"
    slow = (*without.sequence[:5], 0, 1, 2, 3, 4, *without.sequence[5:])
    table = Table(problem, without.sequence)
    assert Planner(problem, find_chain=lambda _: table).plan(2560) == without
    table = Table(problem, slow)
    assert Planner(problem, find_chain=lambda _: table).plan(2560).duration <= without.duration


def test_one_table_serves_all_budgets():
    calls = []

    def find_chain(problem):
        calls.append(problem)
        return Table(problem, problem.store_all)

    planner = Planner(CHAIN, find_chain=find_chain)
    most = planner.store_all.peak_bytes
    assert len(planner.curve([most // 2, most // 3, most - 64])) == 3
    assert len(calls) == 1


@given(st.lists(st.integers(1, 500), min_size=2, max_size=14), st.data())
@settings(max_examples=25, deadline=None)  # a shared machine may pause
def test_more_bytes_never_cost_more_time_along_a_curve(sizes, data):
    skip = data.draw(st.sampled_from([None, 0]))
    problem = network(sizes, skip=skip, time=2.0)
    planner = Planner(problem, find_chain=no_chain)
    most = planner.store_all.peak_bytes
    budgets = [most * k // 8 for k in (8, 3, 5, 6, 4, 7)]
    plans = planner.curve(budgets)
    answered = sorted(zip(budgets, plans, strict=True), key=lambda pair: pair[0])
    durations = [plan.duration for _, plan in answered if plan is not None]
    assert durations == sorted(durations, reverse=True)
    assert plans[0] == planner.store_all
    for budget, plan in answered:
        if plan is not None:
            check(problem, plan)
            assert plan.peak_bytes <= budget
