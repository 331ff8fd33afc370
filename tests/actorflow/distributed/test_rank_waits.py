"""The rank that the others wait for: named from counters and a clock that a test says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorflow.distributed.distributed_run import DistributedRun
from actorflow.distributed.messages import RunReady, StepReached, StepsGranted
from actorflow.distributed.rank_waits import (
    CLEARLY,
    NUM_WINDOWS,
    WINDOW_S,
    RankWaits,
    pack_waits,
    rank_behind,
    unpack_waits,
)

HOSTS = ("0 (nodeA)", "0 (nodeA)", "1 (nodeB)", "1 (nodeB)")


def after(windows, hosts=()):
    """Return what is known when ranks have waited these shares of windows, one after the other."""
    waits, waited_us = RankWaits(hosts), [0] * len(windows[0])
    waits.take(100.0, tuple(waited_us))
    for number, shares in enumerate(windows, 1):
        waited_us = [us + int(s * WINDOW_S * 1e6) for us, s in zip(waited_us, shares, strict=True)]
        waits.take(100.0 + number * WINDOW_S, tuple(waited_us))
    return waits


@pytest.mark.parametrize(
    ("windows", "behind"),
    [
        ([(0.5, 0.5, 0.02, 0.5)] * NUM_WINDOWS, 2),
        ([(0.5, 0.5, 0.02, 0.5)] * (NUM_WINDOWS - 1), None),  # it may be a pause
        ([*[(0.5, 0.5, 0.02, 0.5)] * (NUM_WINDOWS - 1), (0.1, 0.5, 0.5, 0.5)], None),
        ([*[(0.5, 0.5, 0.02, 0.5)] * NUM_WINDOWS, (0.1, 0.1, 0.1, 0.1)], None),  # no longer
        ([(0.3, 0.28, 0.31, 0.29)] * NUM_WINDOWS, None),
        ([(0.0, 0.4)] * NUM_WINDOWS, 0),
        ([(0.0, 0.4, 0.4)] * NUM_WINDOWS, 0),
        ([(0.4, 0.4, 0.02, 0.03)] * NUM_WINDOWS, 2),  # a host of two slow ranks
        ([(0.4, 0.4, 0.03, 0.02), (0.4, 0.4, 0.01, 0.04), (0.4, 0.4, 0.03, 0.03)], 2),
    ],
)
def test_the_rank_that_waits_least_is_behind_where_it_is_so_clearly_and_for_long(windows, behind):
    assert after(windows).behind == behind


def test_the_line_names_rank_and_host_and_what_the_ranks_wait():
    waits = after([(0.4, 0.42, 0.02, 0.4)] * NUM_WINDOWS, HOSTS)
    assert str(waits) == (
        "rank 2 on host 1 (nodeB) is behind: it waits 2% of the time for other ranks, and they 40%"
    )
    assert waits.row() == {"waiting_by_rank": [0.4, 0.42, 0.02, 0.4], "rank_behind": 2}


def test_nothing_is_said_before_a_window_is_over():
    waits = RankWaits()
    waits.take(0.0, (0, 0))
    waits.take(WINDOW_S / 2, (900_000, 0))
    assert (waits.shares, waits.row(), str(waits)) == ((), {}, "")
    waits.take(WINDOW_S, (1_000_000, 0))
    assert waits.shares == (1e6 / (WINDOW_S * 1e6), 0.0)


def test_collectives_that_wait_side_by_side_are_no_more_than_all_of_the_time():
    assert after([(3.0, 0.0)]).shares == (1.0, 0.0)


SHARES = st.integers(2, 9).flatmap(
    lambda n: st.lists(
        st.lists(st.floats(0, 1), min_size=n, max_size=n), min_size=NUM_WINDOWS, max_size=9
    )
)


@given(SHARES)
def test_who_is_named_waits_less_than_half_of_the_ranks_by_far_in_every_window(windows):
    behind = rank_behind(windows)
    for shares in windows:
        others = sum([share - shares[behind or 0] > CLEARLY - 1e-9 for share in shares])
        assert behind is None or 2 * others >= len(shares)


@given(st.lists(st.integers(0, 2**63), max_size=9), st.binary(max_size=7))
def test_waits_come_as_they_were(waited_us, rest):
    assert unpack_waits(pack_waits(waited_us) + rest) == tuple(waited_us)


class Member:
    """A rank of which a test says when it heard what."""

    rank, failure = 0, None

    def __init__(self):
        self.said = []
        self.say = self.said.append

    def begin_run(self, run):
        run.number = 1
        self.say(RunReady(1, run.first_step))


def test_a_run_says_how_long_its_rank_has_waited_and_hears_it_of_all():
    member, granted, now_s = Member(), [], 0.0
    run = DistributedRun(
        member, 0, obey=granted.append, abort=print, hosts=HOSTS[1:3], clock=lambda: now_s
    )
    run.begin()
    run.waited_ns = lambda: 1_234_567
    run.report_data_ready(1)
    assert member.said[1:] == [StepReached(1, 1, 1234)]
    for window in range(NUM_WINDOWS + 1):
        now_s = window * WINDOW_S
        run.hear(StepsGranted(1, 4 + window, False, "", pack_waits((window * 1_500_000, 0))))
    assert (run.waits.behind, run.waits.shares) == (1, (0.75, 0.0))
    assert len(granted) == NUM_WINDOWS + 1
