"""Which way a budget is met, by what the link costs and by what recomputation costs."""

import pytest
from graphs import made_up

from compiler.budget import search as budget_module
from compiler.budget.search import meet_budget
from compiler.contract.attrs import Attrs
from compiler.contract.errors import BudgetError
from compiler.contract.types import Phase
from compiler.graph.graph import Output, UpdateRule
from compiler.graph.target import CompileOptions, Link
from compiler.ops.families.arithmetic import EXP
from compiler.ops.families.updates import MOMENTUM_UPDATE
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import SUM
from compiler.passes import autodiff, batches, simplify
from compiler.storage import order
from compiler.verify.verify import verify_plan

N = 4096
TENSOR = 4 * N * N


def linked(bytes_per_ns):
    """Kernels that take a millisecond, with a link of so many bytes per nanosecond."""
    link = Link(bytes_per_ns, bytes_per_ns, 1000.0) if bytes_per_ns else None
    return made_up(f"linked-{bytes_per_ns}", ("exp", "mul"), lambda call: 1e6, link=link)


@pytest.fixture
def graph(sketch):
    """Eight layers of [N, N] with a momentum buffer each."""
    b = sketch.b
    h = sketch.input("x", (N, N), "float32")
    weights = [sketch.variable(f"w{i}", (N, N), "float32") for i in range(8)]
    for weight in weights:
        h = b.emit_one(EXP, b.emit_one(MATMUL, h, weight))
    loss = b.emit_one(SUM, h, axes=(0, 1), keepdims=False)
    b.outputs = [Output("loss", loss)]
    rate = sketch.variable("rate", (), "float32", role="counter")
    attrs = Attrs({"momentum": 0.9, "nesterov": False, "weight_decay": 0.0})
    b.updates = [
        UpdateRule(
            MOMENTUM_UPDATE,
            weight,
            (sketch.variable(f"momentum/w{i}", (N, N), "float32", role="optimizer"),),
            (rate,),
            attrs,
            loss,
        )
        for i, weight in enumerate(weights)
    ]
    built = b.freeze()
    for run in (autodiff.differentiate, simplify.simplify_graph, batches.copy_outputs, order.run):
        built = run(built)
    return built


@pytest.fixture
def plan_for(budget_trials):
    def make(graph, bytes_per_ns, **options):
        given = CompileOptions("budgeted", verify=True, **options)
        _, plan = meet_budget(budget_trials(graph, linked(bytes_per_ns), given))
        verify_plan(plan)
        return plan

    return make


def num_again(plan):
    return sum(x.phase is Phase.RECOMPUTE for a in plan.actors for x in a.launches)


def test_without_a_link_launches_run_again(plan_for, graph):
    free = plan_for(graph, 0)
    plan = plan_for(graph, 0, memory_budget=free.arenas[0].size_bytes - TENSOR)
    assert len(plan.arenas) == 1
    assert num_again(plan) > 0


def test_over_a_fast_link_bytes_move_and_nothing_runs_again(plan_for, graph):
    free = plan_for(graph, 0)
    budget = free.arenas[0].size_bytes - TENSOR
    plan = plan_for(graph, 100.0, memory_budget=budget)
    assert plan.arenas[0].size_bytes <= budget
    assert plan.recomputation[0].method == "offload"
    assert num_again(plan) == 0
    assert len(plan.arenas) == 2


def test_over_a_slow_link_launches_run_again_instead(plan_for, graph):
    free = plan_for(graph, 0)
    budget = free.arenas[0].size_bytes - TENSOR
    plan = plan_for(graph, 0.001, memory_budget=budget)
    assert plan.arenas[0].size_bytes <= budget
    assert num_again(plan) > 0
    assert len(plan.arenas) == 1


def test_a_link_is_left_alone_where_the_job_says_so_or_the_budget_is_large_enough(plan_for, graph):
    free = plan_for(graph, 0).arenas[0].size_bytes
    assert len(plan_for(graph, 100.0, memory_budget=free - TENSOR, offload="none").arenas) == 1
    assert len(plan_for(graph, 100.0, memory_budget=free).arenas) == 1
    assert len(plan_for(graph, 100.0).arenas) == 1


def test_what_neither_way_can_do_alone_is_tried_with_both(plan_for, graph, monkeypatch):
    """As if the choice found nothing: then all state moves, and launches run again for the rest."""
    with pytest.raises(BudgetError) as alone:
        plan_for(graph, 0, memory_budget=1)
    least = alone.value.smallest_bytes
    monkeypatch.setattr(budget_module, "choose_offload", lambda trials: budget_module.NOTHING)
    plan = plan_for(graph, 100.0, memory_budget=least - TENSOR)
    assert plan.arenas[0].size_bytes <= least - TENSOR
    assert plan.memory[0].optimizer_bytes == 0
    with pytest.raises(BudgetError) as caught:
        plan_for(graph, 100.0, memory_budget=1)
    assert caught.value.smallest_bytes < least


@pytest.mark.parametrize("recompute", ["auto", "none"])
def test_a_budget_out_of_reach_names_the_least_that_any_way_takes_and_that_is_enough(
    recompute, plan_for, graph
):
    least = {}
    for rate in (0, 0.001, 100.0):
        with pytest.raises(BudgetError) as caught:
            plan_for(graph, rate, memory_budget=1, recompute=recompute)
        least[rate] = caught.value.smallest_bytes
        plan = plan_for(graph, rate, memory_budget=least[rate], recompute=recompute)
        assert plan.arenas[0].size_bytes <= least[rate]
    assert least[100.0] <= least[0.001] <= least[0]
