from itertools import pairwise, product
from random import Random

import numpy as np
import pytest

import memory.recompute.options as options_module
from memory.recompute.blocks import NO_BUFFER, GraphBlock
from memory.recompute.local import place_runs
from memory.recompute.options import block_options, candidates, joined_options
from memory.recompute.problem import Problem, ProblemOp
from memory.recompute.save_sets import SweepPass, judge


def chain_step(rng, num_forward, *, needs=0.7):
    """A chain with some branches: one block, or two cut at op `num_forward // 2`."""
    sizes = [rng.randint(2, 9) for _ in range(num_forward)]
    forward, middle = [], num_forward // 2
    for i in range(num_forward):
        reads = {i - 1} if i else set()
        if i and i not in (middle, middle + 1) and rng.random() < 0.5:
            reads.add(i - 2 if i not in (0, 1) else 0)
        forward.append(ProblemOp(tuple(sorted(reads)), (i,), 0, rng.randint(1, 9)))
    others = []
    for i in reversed(range(num_forward)):
        reads = [b for b in (*forward[i].reads, i) if rng.random() < needs]
        if others:
            reads.append(len(sizes) - 1)
        sizes.append(rng.randint(1, 4))
        others.append(ProblemOp(tuple(dict.fromkeys(reads)), (len(sizes) - 1,)))
    return Problem((*forward, *others), tuple(sizes), num_forward)


def placed_blocks(problem, *cuts):
    """Blocks cut behind some ops, with one op of the stage per forward op."""
    last = 2 * problem.num_forward
    edges = [0, *[c + 1 for c in cuts], problem.num_forward]
    return tuple(
        GraphBlock(
            first,
            end,
            last - end,
            last - first,
            first - 1 if first else NO_BUFFER,
            end - 1 if end < problem.num_forward else NO_BUFFER,
        )
        for first, end in pairwise(edges)
    )


def every_set(local, choices):
    sets = np.zeros((1 << len(choices), len(local.size_bytes)), bool)
    for lane, chosen in enumerate(product([False, True], repeat=len(choices))):
        sets[lane, list(choices)] = chosen
    return sets


def columns(costs):
    return np.stack([costs.saved, costs.forward_peak, costs.stage_peak, costs.duration], axis=1)


@pytest.mark.parametrize("seed", range(25))
def test_no_set_beats_the_front_and_no_option_of_it_another(seed, monkeypatch):
    monkeypatch.setattr(options_module, "MAX_FRONT", 64)
    problem = chain_step(Random(seed), 6)
    local = place_runs(problem, placed_blocks(problem), 1)[0][0].local
    choices, always = candidates(local)
    assert always == ()
    costs = columns(judge(local, every_set(local, choices))[SweepPass.FIRST])
    front = np.array(
        [
            [o.saved_bytes, o.forward_peak, o.stage_peak, o.duration]
            for o in block_options(local).first
        ]
    )
    assert {tuple(row) for row in front} <= {tuple(row) for row in costs}
    for row in costs:
        assert (front <= row).all(axis=1).any()
    for k, row in enumerate(front):
        others = np.delete(front, k, axis=0)
        assert not (others <= row).all(axis=1).any()


def test_small_buffers_beside_large_ones_are_saved_where_the_stage_reads_them():
    forward = [
        ProblemOp((), (0,), 0, 1.0),
        ProblemOp((0,), (1, 2), 0, 1.0),
        ProblemOp((1,), (3,), 0, 1.0),
    ]
    backward = [ProblemOp((1, 2, 3), (4,)), ProblemOp((0, 4), (5,))]
    problem = Problem((*forward, *backward), (6400, 6400, 64, 6400, 1, 1), 3)
    block = GraphBlock(0, 3, 3, 5, NO_BUFFER, NO_BUFFER)
    local = place_runs(problem, (block,), 1)[0][0].local
    choices, always = candidates(local)
    assert sorted(choices) == [0, 1, 3]
    assert always == (2,)
    assert all(2 in option.saves for option in block_options(local).first)


def test_a_thin_front_still_has_its_ends():
    problem = chain_step(Random(3), 22, needs=1.0)
    local = place_runs(problem, placed_blocks(problem), 1)[0][0].local
    front = block_options(local).again
    assert len(front) <= options_module.MAX_FRONT + 2
    choices, _ = candidates(local)
    sets = np.zeros((2, len(local.size_bytes)), bool)
    sets[1, list(choices)] = True
    nothing, everything = columns(judge(local, sets)[SweepPass.AGAIN])
    assert min(o.saved_bytes for o in front) <= nothing[0]
    assert min(o.duration for o in front) <= everything[3]


@pytest.mark.parametrize("seed", range(8))
def test_the_greedy_trails_come_close_to_judging_every_set(seed, monkeypatch):
    problem = chain_step(Random(seed), 9, needs=0.9)
    local = place_runs(problem, placed_blocks(problem), 1)[0][0].local
    exact = block_options(local).first
    monkeypatch.setattr(options_module, "MAX_ENUMERATED", 0)
    trails = block_options(local).first

    def least_time(front, saved_bytes):
        return min(o.duration for o in front if o.saved_bytes <= saved_bytes)

    most = max(o.saved_bytes for o in exact)
    for saved_bytes in range(0, most + 1, max(1, most // 6)):
        best, found = least_time(exact, saved_bytes), least_time(trails, saved_bytes)
        assert best <= found <= 1.15 * best


@pytest.mark.parametrize("seed", range(20))
def test_two_blocks_as_one_may_drop_what_crosses_between_them(seed):
    problem = chain_step(Random(seed), 6, needs=0.8)
    placed = place_runs(problem, placed_blocks(problem, 3), 2)
    sides = [(runs[0], block_options(runs[0].local)) for runs in placed]
    run = placed[0][1]
    joined = joined_options(run, *sides)
    choices, _ = candidates(run.local)
    costs = columns(judge(run.local, every_set(run.local, choices))[SweepPass.FIRST])
    assert min(o.saved_bytes for o in joined.first) == costs[:, 0].min()
    assert min(o.duration for o in joined.first) == costs[:, 3].min()
    assert min(o.stage_peak for o in joined.first) <= np.sort(costs[:, 2])[len(costs) // 2]
