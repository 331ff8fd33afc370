from itertools import product
from random import Random

import numpy as np
import pytest
from problems import random_problem

from memory.recompute.blocks import NO_BUFFER, GraphBlock
from memory.recompute.local import place_runs
from memory.recompute.problem import Problem, ProblemOp, check_sequence
from memory.recompute.save_sets import SweepPass, judge, judge_through, steps_of
from memory.recompute.simulate import live_bytes_by_step, simulate


def whole(problem):
    """The problem as one block."""
    ops = len(problem.ops)
    block = GraphBlock(0, problem.num_forward, problem.num_forward, ops, NO_BUFFER, NO_BUFFER)
    return place_runs(problem, (block,), 1)[0][0]


def sets_of(local, rng, count):
    can = np.array(local.recomputable)
    return np.array([[rng.random() < 0.5 for _ in can] for _ in range(count)]) & can


def op_numbers(placed, steps):
    block = placed.block
    return [(block.first if s.makes else block.stage_first) + s.index for s in steps]


@pytest.mark.parametrize("seed", range(60))
def test_every_lane_costs_what_the_simulation_of_its_sequence_says(seed):
    rng = Random(seed)
    problem = random_problem(rng, rng.randint(1, 8))
    placed = whole(problem)
    sets = sets_of(placed.local, rng, 12)
    costs = judge(placed.local, sets)[SweepPass.FIRST]
    for lane in range(len(sets)):
        forward, stage = steps_of(placed.local, sets[lane : lane + 1], SweepPass.FIRST)
        sequence = (*op_numbers(placed, forward), *op_numbers(placed, stage))
        check_sequence(problem, sequence)
        live = live_bytes_by_step(problem, sequence)
        half = len(forward)
        assert costs.forward_peak[lane] == live[:half].max()
        assert costs.stage_peak[lane] == live[half:].max()
        stages = sum(op.duration for op in problem.ops[problem.num_forward :])
        assert costs.duration[lane] + stages == simulate(problem, sequence).duration


@pytest.mark.parametrize("seed", range(20))
def test_saving_everything_makes_nothing_again_and_saving_nothing_makes_everything(seed):
    problem = random_problem(Random(seed), 6)
    local = whole(problem).local
    sets = np.array([local.recomputable, [False] * len(local.recomputable)])
    costs = judge(local, sets)[SweepPass.FIRST]
    once = sum(op.duration for op in problem.ops[: problem.num_forward])
    assert costs.duration[0] == once
    read = {b for op in local.stage for b in op.reads if local.recomputable[b]}
    assert (costs.duration[1] > once) == bool(read)
    assert costs.saved[1] == 0


def three_blocks():
    """a -> b -> c -> d in three blocks: b reads its input back, c its output, d nothing."""
    forward = [
        ProblemOp((), (0,), 0, 1.0),
        ProblemOp((0,), (1,), 0, 2.0),
        ProblemOp((1,), (2,), 0, 4.0, ((2, 1),)),
        ProblemOp((2,), (3,), 5, 8.0),
    ]
    backward = [ProblemOp((2,), (4,)), ProblemOp((4, 2), (5,)), ProblemOp((5, 0), (6,))]
    problem = Problem((*forward, *backward), (10, 20, 20, 30, 7, 7, 7), 4)
    blocks = (
        GraphBlock(0, 1, 7, 7, NO_BUFFER, 0),
        GraphBlock(1, 3, 5, 7, 0, 2),
        GraphBlock(3, 4, 4, 5, 2, NO_BUFFER),
    )
    return problem, blocks


def test_a_middle_block_counts_beyond_its_input():
    problem, blocks = three_blocks()
    middle = place_runs(problem, blocks, 1)[1][0]
    local = middle.local
    assert (local.input_bytes, local.size_bytes[local.output], local.is_input_kept) == (
        10,
        20,
        False,
    )
    assert (middle.before_bytes, middle.around_bytes) == (7, 0)
    assert [problem.size_bytes[b] for b in middle.buffers] == list(local.size_bytes)
    costs = judge(local, np.zeros((1, len(local.size_bytes)), bool))
    # Again: run both ops (buffer 2 takes over 1), hold 2; then 4, 2 and 5 beside the input.
    assert costs[SweepPass.AGAIN].saved.tolist() == [20]
    assert costs[SweepPass.AGAIN].forward_peak.tolist() == [20]
    assert costs[SweepPass.AGAIN].stage_peak.tolist() == [7 + 20 + 7]
    assert costs[SweepPass.AGAIN].duration.tolist() == [6.0]
    through = judge_through(local, SweepPass.AGAIN)
    assert (through.held_peak, through.passing_peak, through.duration) == (20, 30, 6.0)


def test_alone_a_block_makes_no_output_that_its_stage_does_not_read():
    problem, blocks = three_blocks()
    first = place_runs(problem, blocks, 1)[0][0].local
    costs = judge(first, np.zeros((1, len(first.size_bytes)), bool))
    assert costs[SweepPass.ALONE].duration.tolist() == [0.0]
    assert costs[SweepPass.AGAIN].duration.tolist() == [1.0]
    assert costs[SweepPass.AGAIN].saved.tolist() == [10]


def test_equal_blocks_are_of_one_kind():
    forward = [ProblemOp((k - 1,) if k else (), (k,), 0, 1.0) for k in range(6)]
    backward = [ProblemOp((5,), (6,))]
    backward += [ProblemOp((k, k - 1, 11 - k), (12 - k,)) for k in reversed(range(1, 6))]
    problem = Problem((*forward, *backward), (8,) * 12, 6)
    blocks = tuple(
        GraphBlock(k, k + 1, 11 - k, 12 - k, k - 1, k if k < 5 else NO_BUFFER) for k in range(6)
    )
    placed = [runs[0] for runs in place_runs(problem, blocks, 2)]
    assert placed[2].local == placed[3].local
    assert placed[2].kind == placed[3].kind
    assert placed[0].kind != placed[2].kind != placed[5].kind


def test_all_passes_agree_where_every_op_is_wanted_and_the_output_is_read():
    problem, blocks = three_blocks()
    local = place_runs(problem, blocks, 1)[1][0].local
    for chosen in product([False, True], repeat=1):
        sets = np.zeros((1, len(local.size_bytes)), bool)
        sets[0, 1] = chosen[0]
        costs = judge(local, sets)
        assert len({float(costs[which].duration[0]) for which in SweepPass}) == 1
