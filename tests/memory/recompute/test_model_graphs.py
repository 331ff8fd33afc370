"""Known models as recomputation problems: what the planner must reach on them."""

import model_graphs as models
import pytest
from problems import check_sequence, simulate

from memory.recompute.planner import Planner


def test_every_forward_op_has_one_backward_op_of_twice_its_time():
    for make in models.MODELS.values():
        problem = make()
        assert len(problem.ops) == 2 * problem.num_forward
        forward = sum(op.duration for op in problem.ops[: problem.num_forward])
        whole = simulate(problem, problem.store_all).duration
        assert whole == pytest.approx(3 * forward)


@pytest.mark.parametrize(
    ("name", "store_all_bytes", "most_percent", "least_part"),
    [
        ("ResNet-50, b32 224", 1361592320, {0.9: 1, 0.5: 7.8, 0.25: 18.5}, 0.191),
        ("GPT-2 small, b8 1024", 6505398272, {0.5: 9.3, 0.3: 19}, 0.254),
        ("the same, and loss in chunks", 2820964864, {0.5: 7.5}, 1 / 7),
    ],
)
def test_a_known_model_in_fewer_bytes_costs_little(name, store_all_bytes, most_percent, least_part):
    problem = models.MODELS[name]()
    planner = Planner(problem)
    whole = planner.store_all
    assert whole.peak_bytes == pytest.approx(store_all_bytes, rel=0.01)
    for part, percent in most_percent.items():
        plan = planner.plan(int(part * whole.peak_bytes))
        check_sequence(problem, plan.sequence)
        assert plan.peak_bytes <= part * whole.peak_bytes
        assert 100 * plan.extra < percent
    assert planner.smallest.peak_bytes < least_part * whole.peak_bytes


def test_the_least_bytes_of_a_deep_gpt_hardly_grow_with_its_layers():
    least = [Planner(models.deep_gpt(layers)).smallest.peak_bytes for layers in (6, 20)]
    assert least[1] <= 1.1 * least[0]


def test_plans_beat_checkpointing_every_block_at_its_own_bytes():
    planner = Planner(models.gpt(layers=4))
    blocks = planner.blocks
    assert planner.plan(blocks.peak_bytes).duration < blocks.duration
