import pytest
from error_texts import raises

from actorflow.checkpoint.errors import CheckpointError, Every


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (500, Every(steps=500)),
        ("500", Every(steps=500)),
        ("500 steps", Every(steps=500)),
        ("1 step", Every(steps=1)),
        ("5s", Every(seconds=5.0)),
        ("0.5 s", Every(seconds=0.5)),
        ("30 sec", Every(seconds=30.0)),
        ("10min", Every(seconds=600.0)),
        ("1.5h", Every(seconds=5400.0)),
        (Every(steps=3), Every(steps=3)),
    ],
)
def test_a_written_period_is_understood(text, expected):
    assert Every.parse(text) == expected


@pytest.mark.parametrize(
    "text", ["", "x", "5 weeks", "-5", "1.5", "1.5 steps", "0", "0s", 0, -1, True, None, 2.5, "5s5"]
)
def test_what_is_no_period_is_refused_with_an_example(text):
    with raises(CheckpointError):
        Every.parse(text)


@pytest.mark.parametrize("period", [{}, {"steps": 1, "seconds": 1.0}, {"seconds": float("inf")}])
def test_a_period_has_exactly_one_finite_unit(period):
    with raises(CheckpointError):
        Every(**period)


def due_steps(every, first, last, clock):
    saved, last_step, last_ns = [], first, clock(first)
    for step in range(first + 1, last + 1):
        if every.is_due(step=step, now_ns=clock(step), last_step=last_step, last_ns=last_ns):
            saved.append(step)
            last_step, last_ns = step, clock(step)
    return saved


def test_steps_are_saved_at_the_multiples_wherever_the_run_resumed():
    assert due_steps(Every(steps=4), 0, 17, int) == [4, 8, 12, 16]
    assert due_steps(Every(steps=4), 6, 17, int) == [8, 12, 16]


def test_a_multiple_that_was_passed_over_is_made_up_for():
    every = Every(steps=4)
    assert every.is_due(step=9, now_ns=0, last_step=7, last_ns=0)
    assert not every.is_due(step=11, now_ns=0, last_step=9, last_ns=0)


def test_seconds_are_counted_from_the_last_save():
    assert due_steps(Every(seconds=2.0), 0, 10, lambda step: step * 700_000_000) == [3, 6, 9]


def test_nothing_is_due_before_a_new_step():
    assert not Every(seconds=1.0).is_due(step=3, now_ns=10**12, last_step=3, last_ns=0)
    assert not Every(steps=1).is_due(step=3, now_ns=10**12, last_step=3, last_ns=0)
