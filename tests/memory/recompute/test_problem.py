import pytest
from error_texts import raises
from problems import check_sequence

from memory.recompute.problem import Problem, ProblemOp, without_idle_runs

# x0 -> x1 -> x2, then the gradient of x2 and that of x1, which reads x1 and x0 again.
CHAIN = Problem(
    (
        ProblemOp((), (0,)),
        ProblemOp((0,), (1,)),
        ProblemOp((1,), (2,)),
        ProblemOp((2,), (3,)),
        ProblemOp((1, 3), (4,)),
        ProblemOp((0, 4), ()),
    ),
    (8, 8, 8, 8, 8),
    3,
)


def test_makers_are_forward_ops_alone():
    assert CHAIN.makers == (0, 1, 2, -1, -1)


@pytest.mark.parametrize(
    "sequence", [(0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 1, 4, 0, 5), (0, 1, 0, 1, 2, 3, 4, 5)]
)
def test_a_sequence_may_run_forward_ops_again(sequence):
    check_sequence(CHAIN, sequence)


@pytest.mark.parametrize(
    "sequence", [(0, 1, 2, 3, 5, 4), (0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 4, 5), (1, 0, 2, 3, 4, 5)]
)
def test_a_sequence_that_computes_something_else_is_refused(sequence):
    with raises(ValueError):
        check_sequence(CHAIN, sequence)


def test_a_forward_op_that_never_runs_is_missed():
    problem = Problem((ProblemOp((), (0,)), ProblemOp((), (1,)), ProblemOp((0,), ())), (1, 1), 2)
    with raises(ValueError):
        check_sequence(problem, (0, 2))


@pytest.mark.parametrize(
    ("sequence", "kept"),
    [
        ((0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5)),
        ((0, 1, 0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5)),  # the first two runs feed each other alone
        ((0, 1, 2, 3, 1, 4, 0, 5), (0, 1, 2, 3, 1, 4, 0, 5)),
        ((0, 1, 2, 3, 0, 1, 4, 0, 5), (0, 1, 2, 3, 0, 1, 4, 0, 5)),
    ],
)
def test_a_run_that_nobody_reads_before_the_next_is_left_out(sequence, kept):
    assert without_idle_runs(CHAIN, sequence) == kept


def test_a_forward_op_that_nobody_reads_keeps_one_run():
    problem = Problem((ProblemOp((), (0,)), ProblemOp((), (1,)), ProblemOp((0,), ())), (1, 1), 2)
    assert without_idle_runs(problem, (0, 1, 1, 2)) == (0, 1, 2)


@pytest.mark.parametrize(
    ("ops", "num_forward"),
    [
        ((ProblemOp((), (2,)),), 1),
        ((ProblemOp((0,), (1,)),), 1),
        ((ProblemOp((), (0,)), ProblemOp((), (0,))), 2),
        ((ProblemOp((), (0,)), ProblemOp((), (0,))), 1),
        ((ProblemOp((), (0,)),), 2),
        ((ProblemOp((), (0,)),), -1),
    ],
)
def test_ops_that_contradict_themselves_are_refused(ops, num_forward):
    with raises(ValueError):
        Problem(ops, (1, 1), num_forward)
