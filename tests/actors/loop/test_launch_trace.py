"""Launches of a watched run, and how they lie in the picture."""

from itertools import count

import pytest

from actors.loop.timeline import LaunchTrace


@pytest.fixture
def clock():
    return count(100, 10).__next__


def test_a_watched_chain_does_the_same_and_notes_each_launch(clock):
    trace, seen = LaunchTrace(8, clock), []
    chain = trace.watch(3, (lambda: seen.append("a"), lambda: seen.append("b")))
    for launch in chain:
        launch()
    assert seen == ["a", "b"]
    assert list(trace.rows()) == [(3, 0, 100, 110), (3, 1, 120, 130)]


def test_the_oldest_rows_give_way(clock):
    trace = LaunchTrace(2, clock)
    (launch,) = trace.watch(0, (lambda: None,))
    for _ in range(3):
        launch()
    assert sorted(row[2] for row in list(trace.rows())) == [120, 140]


def test_a_launch_that_raises_leaves_no_row(clock):
    trace = LaunchTrace(2, clock)
    (launch,) = trace.watch(0, (lambda: 1 / 0,))
    with pytest.raises(ZeroDivisionError):
        launch()
    assert list(trace.rows()) == []
