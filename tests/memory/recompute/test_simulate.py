from random import Random

import numpy as np
import pytest
from problems import check_sequence, live_bytes_by_step, random_problem, simulate

from memory.liveness import lower_bound
from memory.recompute.problem import Problem, ProblemOp, buffer_intervals, make_versions


def random_sequence(rng, problem):
    """The problem's own order with forward ops that run again anywhere after what they read."""
    sequence = []
    for i in range(len(problem.ops)):
        again = [op for op in range(min(i, problem.num_forward)) if rng.random() < 0.15]
        sequence += rng.sample(again, len(again))
        sequence.append(i)
    return tuple(sequence)


def walk(problem, sequence):
    """Bytes per step from sets: the value each read means, and when it was last wanted."""
    values, value_of, wanted = [], {}, {}  # a value is (step made, buffer)
    for step, i in enumerate(sequence):
        op = problem.ops[i]
        for b in op.reads:
            wanted[value_of[b]] = step
        for b in op.writes:
            if i < problem.num_forward or b not in value_of:
                value_of[b] = (step, b)
                values.append((step, b))
            wanted[value_of[b]] = step
    live_bytes = []
    for step, i in enumerate(sequence):
        op = problem.ops[i]
        live = {v for v in values if v[0] <= step <= wanted[v]}
        total = sum(problem.size_bytes[b] for _, b in live) + op.temp_bytes
        dying = {b: v for v in live for b in [v[1]] if wanted[v] == step and b in op.reads}
        dying = {b: v for b, v in dying.items() if v[0] < step}
        born = {b for s, b in live if s == step}
        for out, given in op.in_place:
            same = problem.size_bytes[out] == problem.size_bytes[given]
            if out in born and given in dying and same:
                total -= problem.size_bytes[out]
                born.remove(out)
                del dying[given]
        live_bytes.append(total)
    return live_bytes


@pytest.mark.parametrize("seed", range(120))
def test_the_bytes_of_every_step_equal_a_walk_with_sets(seed):
    rng = Random(seed)
    problem = random_problem(rng, rng.randint(1, 7))
    sequence = random_sequence(rng, problem)
    check_sequence(problem, sequence)
    expected = walk(problem, sequence)
    assert live_bytes_by_step(problem, sequence).tolist() == expected
    usage = simulate(problem, sequence)
    assert (usage.peak_bytes, usage.peak_step) == (max(expected), expected.index(max(expected)))
    assert usage.duration == sum(problem.ops[i].duration for i in sequence)


@pytest.mark.parametrize("seed", range(60))
def test_intervals_to_place_have_the_simulated_peak(seed):
    rng = Random(seed)
    problem = random_problem(rng, rng.randint(1, 7))
    sequence = random_sequence(rng, problem)
    live = live_bytes_by_step(problem, sequence)
    lower, upper, size = buffer_intervals(problem, sequence)
    steps = np.arange(len(sequence))
    profile = ((lower[:, None] <= steps) & (steps < upper[:, None])).T @ size
    assert profile.tolist() == live.tolist()
    assert lower_bound(lower, upper, size)[0] == live.max()


def test_running_again_makes_a_new_version_and_frees_the_old_one():
    forward = (ProblemOp((), (0,)), ProblemOp((0,), (1,)), ProblemOp((1,), (2,)))
    problem = Problem((*forward, ProblemOp((0, 2), (3,))), (4, 1, 1, 1), 3)
    assert live_bytes_by_step(problem, (0, 1, 2, 3)).tolist() == [4, 5, 6, 6]
    assert live_bytes_by_step(problem, (0, 1, 2, 0, 3)).tolist() == [4, 5, 2, 5, 6]
    versions = make_versions(problem, (0, 1, 2, 0, 3))
    assert list(zip(versions.buffer, versions.lower, versions.upper, strict=True)) == [
        (0, 0, 2),
        (1, 1, 3),
        (2, 2, 5),
        (0, 3, 5),
        (3, 4, 5),
    ]


def test_an_output_in_place_counts_once_only_where_its_input_dies():
    relu = ProblemOp((0,), (1,), in_place=((1, 0),))
    dies = Problem((ProblemOp((), (0,)), relu, ProblemOp((1,), ())), (8, 8), 2)
    lives = Problem((ProblemOp((), (0,)), relu, ProblemOp((0, 1), ())), (8, 8), 2)
    assert simulate(dies, dies.store_all).peak_bytes == 8
    assert simulate(lives, lives.store_all).peak_bytes == 16
    assert buffer_intervals(dies, dies.store_all)[2].tolist() == [8]


def test_the_empty_sequence_costs_nothing():
    usage = simulate(Problem((), (), 0), ())
    assert (usage.peak_bytes, usage.peak_step, usage.duration) == (0, 0, 0.0)
