from random import Random

import pytest
from error_texts import raises
from problems import simulate

from memory.recompute.problem import Problem, ProblemOp, floor_op


def test_the_floor_is_what_an_op_reads_and_writes_with_its_scratch():
    small, large = ProblemOp((), (0,), temp_bytes=1), ProblemOp((0,), (1,), temp_bytes=5)
    assert floor_op(Problem((small, large, ProblemOp((1,), ())), (8, 4), 2)) == (1, 17)


def test_an_output_in_place_counts_once():
    in_place = ProblemOp((0,), (1,), in_place=((1, 0),))
    assert floor_op(Problem((ProblemOp((), (0,)), in_place, ProblemOp((1,), ())), (8, 8), 2)) == (
        0,
        8,
    )


def test_an_output_in_place_of_a_gradient_that_lives_on_counts_beside_it():
    ops = (ProblemOp((), (0,)), ProblemOp((0,), (1,), in_place=((1, 0),)), ProblemOp((0, 1), ()))
    assert floor_op(Problem(ops, (8, 8), 0)) == (1, 16)


def test_gradients_that_cross_an_op_that_runs_once_count_for_it():
    gradient, between, update = (
        ProblemOp((0,), (1,)),
        ProblemOp((0,), (), temp_bytes=2),
        ProblemOp((1,), ()),
    )
    assert floor_op(Problem((ProblemOp((), (0,)), gradient, between, update), (8, 4), 1)) == (2, 14)
    # The forward op may run before that gradient exists.
    assert floor_op(Problem((ProblemOp((), (0,), 20), gradient, update), (8, 4), 1)) == (0, 28)


@pytest.mark.parametrize("seed", range(40))
def test_no_sequence_goes_below_the_floor(seed):
    rng = Random(seed)
    forward = [ProblemOp((i - 1,) if i else (), (i,), 0, 1.0) for i in range(5)]
    pairs = [((5 + k, 4 + k),) if rng.random() < 0.5 and k else () for k in range(5)]
    others = [
        ProblemOp((4 - k, *((4 + k,) if k else ())), (5 + k,), rng.randint(0, 4), 1.0, pairs[k])
        for k in range(5)
    ]
    problem = Problem((*forward, *others), tuple(rng.randint(1, 3) for _ in range(10)), 5)
    sequence = list(problem.store_all)
    for _ in range(4):  # from the second op on, so that what is read has been written
        step = rng.randrange(5, len(sequence))
        sequence.insert(step, rng.randrange(5))
    assert floor_op(problem).size_bytes <= simulate(problem, sequence).peak_bytes


def test_a_problem_without_ops_has_no_floor():
    with raises(ValueError):
        floor_op(Problem((), (), 0))
