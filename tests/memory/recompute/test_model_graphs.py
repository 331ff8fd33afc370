"""Known models as recomputation problems: what the planner must reach on them."""

import model_graphs as models
import pytest

from memory.recompute.chain import block_checkpointing, chain_plans
from memory.recompute.problem import check_sequence
from memory.recompute.simulate import simulate


def extra_percent(problem, table, part):
    """Extra time in percent at a part of the store-all peak."""
    whole = simulate(problem, problem.store_all)
    sequence = table.sequence(int(part * whole.peak_bytes))
    check_sequence(problem, sequence)
    usage = simulate(problem, sequence)
    assert usage.peak_bytes <= part * whole.peak_bytes
    return 100 * (usage.duration / whole.duration - 1)


def least_part(problem, table):
    return table.least_bytes / simulate(problem, problem.store_all).peak_bytes


def test_every_forward_op_has_one_backward_op_of_twice_its_time():
    for make in models.MODELS.values():
        problem = make()
        assert len(problem.ops) == 2 * problem.num_forward
        forward = sum(op.duration for op in problem.ops[: problem.num_forward])
        whole = simulate(problem, problem.store_all).duration
        assert whole == pytest.approx(3 * forward)


def test_resnet_50_in_half_its_bytes_costs_less_than_eight_percent():
    problem = models.resnet50()
    assert simulate(problem, problem.store_all).peak_bytes == pytest.approx(1361592320, rel=0.01)
    table = chain_plans(problem)
    assert extra_percent(problem, table, 0.9) < 1
    assert extra_percent(problem, table, 0.5) < 7.8
    assert extra_percent(problem, table, 0.25) < 18.5
    assert least_part(problem, table) < 0.191


def test_gpt_2_in_half_its_bytes_costs_less_than_nine_and_a_half_percent():
    problem = models.gpt()
    assert simulate(problem, problem.store_all).peak_bytes == pytest.approx(6505398272, rel=0.01)
    table = chain_plans(problem)
    assert extra_percent(problem, table, 0.5) < 9.3
    assert extra_percent(problem, table, 0.3) < 19
    assert least_part(problem, table) < 0.254


def test_without_whole_logits_gpt_2_fits_a_seventh():
    problem = models.gpt(flash=True, fused_loss=True)
    table = chain_plans(problem)
    assert extra_percent(problem, table, 0.5) < 7.5
    assert least_part(problem, table) < 1 / 7


def test_the_least_bytes_of_a_deep_gpt_do_not_grow_with_its_layers():
    least = [chain_plans(models.deep_gpt(layers)).least_bytes for layers in (6, 20)]
    assert least[1] <= 1.05 * least[0]


def test_plans_beat_checkpointing_every_block_at_its_own_bytes():
    problem = models.gpt(layers=4)
    blocks = simulate(problem, block_checkpointing(problem))
    sequence = chain_plans(problem).sequence(blocks.peak_bytes)
    assert simulate(problem, sequence).duration < blocks.duration
