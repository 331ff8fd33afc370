"""How often a writer has fired when what it updates is read in another actor."""

from types import SimpleNamespace

import pytest
from error_texts import raises

from compiler.contract.errors import InternalError
from compiler.verify.places import LoopCarried, LoopCarriedCount, LoopCarriedRead, ReadTime

READER, WRITER, OTHER = range(3)


def plan_of(*roles):
    launch = SimpleNamespace(op="matmul", source=0)
    names = ("reader", "writer", "other")
    return SimpleNamespace(
        actors=[SimpleNamespace(name=name, launches=[launch]) for name in names],
        registers=[SimpleNamespace(name="w"), SimpleNamespace(name="v")],
        variables=[SimpleNamespace(name=f"v{i}", role=role) for i, role in enumerate(roles)],
        sources=["train.py:7"],
    )


def play(when, repetitions, firings, writers=(WRITER,)):
    """Play pairs (actor, times) in order."""
    reads = [LoopCarriedRead(READER, 0, writer, i, when) for i, writer in enumerate(writers)]
    count = LoopCarriedCount(plan_of(), LoopCarried(tuple(reads), ()), repetitions)
    fired = [0, 0, 0]
    for actor, times in firings:
        count.visit(actor, fired[actor], times)
        fired[actor] += times


R, W, X = (READER, 1), (WRITER, 1), (OTHER, 1)
RIGHT = [
    (ReadTime.BEFORE, (1, 1, 1), [R, W]),
    (ReadTime.AFTER, (1, 1, 1), [W, R]),
    (ReadTime.BEFORE, (2, 2, 1), [R, W, R, W]),
    (ReadTime.AFTER, (2, 2, 1), [W, R, W, R]),
    (ReadTime.BEFORE, (4, 2, 1), [(READER, 2), W, (READER, 2), W]),  # two batches per update
    (ReadTime.AFTER, (1, 2, 1), [W, W, R]),  # the sums of two batches
    (ReadTime.AFTER, (2, 4, 1), [(WRITER, 2), R, (WRITER, 2), R]),
    (ReadTime.BETWEEN, (3, 2, 1), [W, (READER, 3), W]),  # three batches of an evaluation
]
WRONG = [
    (ReadTime.BEFORE, (1, 1, 1), [W, R]),
    (ReadTime.AFTER, (1, 1, 1), [R, W]),
    (ReadTime.BEFORE, (2, 2, 1), [R, R, W, W]),
    (ReadTime.BEFORE, (4, 2, 1), [(READER, 3), W, R, W]),
    (ReadTime.AFTER, (1, 2, 1), [W, R, W]),
    (ReadTime.AFTER, (2, 4, 1), [(WRITER, 4), (READER, 2)]),
    (ReadTime.BEFORE, (3, 2, 1), [(READER, 3), (WRITER, 2)]),  # no rate fits the other
]


@pytest.mark.parametrize(("when", "repetitions", "firings"), RIGHT)
def test_a_read_at_the_right_firing_passes(when, repetitions, firings):
    play(when, repetitions, firings)


@pytest.mark.parametrize(("when", "repetitions", "firings"), WRONG)
def test_a_read_at_another_firing_names_launch_line_and_counts(when, repetitions, firings):
    with raises(InternalError):
        play(when, repetitions, firings)


def test_who_reads_between_steps_reads_all_writers_after_the_same_step():
    both = (WRITER, OTHER)
    play(ReadTime.BETWEEN, (1, 2, 2), [W, X, R, W, X], both)
    with raises(InternalError):
        play(ReadTime.BETWEEN, (1, 2, 2), [W, X, W, R, X], both)


def test_state_is_written_at_one_rate_and_scratch_at_one():
    plan = plan_of("parameter", "scratch", "optimizer", "scratch")
    right = ((0, OTHER), (1, WRITER), (2, OTHER), (3, WRITER))
    LoopCarriedCount(plan, LoopCarried((), right), (1, 2, 1))
    for index, actor in ((2, WRITER), (3, OTHER)):
        wrong = tuple([(i, actor if i == index else a) for i, a in right])
        with raises(InternalError):
            LoopCarriedCount(plan, LoopCarried((), wrong), (1, 2, 1))
