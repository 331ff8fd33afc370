import pytest
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
    ("sequence", "message"),
    [
        ((0, 1, 2, 3, 5, 4), "every op that is not forward once, in the problem's order"),
        ((0, 1, 2, 3, 4), "every op that is not forward once, in the problem's order"),
        ((0, 1, 2, 3, 4, 4, 5), "every op that is not forward once, in the problem's order"),
        ((1, 0, 2, 3, 4, 5), r"step 0 \(op 1\) reads buffer 0 before it is written"),
    ],
)
def test_a_sequence_that_computes_something_else_is_refused(sequence, message):
    with pytest.raises(ValueError, match=message):
        check_sequence(CHAIN, sequence)


def test_a_forward_op_that_never_runs_is_missed():
    problem = Problem((ProblemOp((), (0,)), ProblemOp((), (1,)), ProblemOp((0,), ())), (1, 1), 2)
    with pytest.raises(ValueError, match="op 1 never runs"):
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
    ("ops", "num_forward", "message"),
    [
        ((ProblemOp((), (2,)),), 1, "op 0 names buffer 2, but there are 2 buffers"),
        ((ProblemOp((0,), (1,)),), 1, "op 0 reads buffer 0, which no earlier op writes"),
        (
            (ProblemOp((), (0,)), ProblemOp((), (0,))),
            2,
            "forward op 1 writes buffer 0, which an earlier op",
        ),
        (
            (ProblemOp((), (0,)), ProblemOp((), (0,))),
            1,
            "op 1 writes buffer 0, which forward op 0 makes",
        ),
        ((ProblemOp((), (0,)),), 2, "expected 0 to 1 forward ops, got num_forward=2"),
        ((ProblemOp((), (0,)),), -1, "expected 0 to 1 forward ops, got num_forward=-1"),
    ],
)
def test_ops_that_contradict_themselves_are_refused(ops, num_forward, message):
    with pytest.raises(ValueError, match=message):
        Problem(ops, (1, 1), num_forward)
