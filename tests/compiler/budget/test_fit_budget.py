"""What is named as the smallest budget is one that fits, and no smaller one does."""

from itertools import pairwise
from random import Random

import pytest
from graphs import descend, made_up, variable

from compiler.budget.search import fit_by_recompute
from compiler.contract.errors import BudgetError
from compiler.graph.graph import GraphBuilder
from compiler.graph.target import BudgetChoice, CompileOptions
from compiler.ops.families.activation import RELU
from compiler.ops.families.arithmetic import EXP, MUL, NEG
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import SUM
from compiler.ops.primitives.slicing import CONCAT
from compiler.ops.primitives.sources import INPUT
from compiler.passes import autodiff, batches, simplify
from compiler.storage import order


def priced(seed):
    """Kernels of which no two take as long, some with scratch."""
    rng = Random(seed)
    duration: dict[object, float] = {}
    return made_up(
        "priced",
        ("add", "mul", "neg", "exp", "relu", "relu_grad"),
        lambda call: duration.setdefault((call.op, str(call.inputs)), rng.choice((1e2, 1e3, 1e5))),
        lambda call: {"matmul": 1000, "exp": 40}.get(call.op, 0),
    )


def joined_levels(rng):
    """Return a training graph whose levels, of many widths, are read again further up."""
    b = GraphBuilder()
    rows = rng.choice((16, 24, 40))
    widths = [rng.choice((4, 8, 24, 36, 48, 96)) for _ in range(rng.randrange(2, 5))]
    h = b.emit_one(INPUT, name="x", dtype="float64", shape=(rows, widths[0]))
    weights, skips = [], []

    def layer(h, num_in, num_out):
        weights.append(variable(b, f"w{len(weights)}", (num_in, num_out), "float64"))
        h = b.emit_one(MATMUL, h, weights[-1])
        return b.emit_one(MUL, h, b.emit_one(EXP, b.emit_one(NEG, b.emit_one(RELU, h))))

    for num_in, num_out in pairwise(widths):
        h = layer(h, num_in, num_out)
        skips.append((h, num_out))
    width = widths[-1]
    for skip, num_skip in reversed(skips):
        num_out = rng.choice((8, 17, 48, 96))
        h = layer(b.emit_one(CONCAT, h, skip, axis=1), width + num_skip, num_out)
        width = num_out
    descend(b, b.emit_one(SUM, b.emit_one(MUL, h, h), axes=(0, 1), keepdims=False), weights)
    graph = b.freeze()
    for run in (autodiff.differentiate, simplify.simplify_graph, batches.copy_outputs, order.run):
        graph = run(graph)
    return graph


@pytest.mark.parametrize("seed", [0, 1, 14, 21, 80, 90, 91, 102, 160, 201])
def test_the_smallest_budget_named_fits_and_a_smaller_one_names_it_again(budget_trials, seed):
    rng = Random(seed)
    graph, hardware = joined_levels(rng), priced(seed)

    def fitted(budget):
        trials = budget_trials(graph, hardware, CompileOptions("job", memory_budget=budget))
        choice, _ = fit_by_recompute(trials, BudgetChoice())
        return trials.arena_bytes(choice)

    def refused(budget):
        with pytest.raises(BudgetError) as caught:
            fitted(budget)
        return caught.value.smallest_bytes

    least = refused(1)
    assert fitted(least) <= least
    assert refused(least - 1) == least
