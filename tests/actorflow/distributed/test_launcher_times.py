"""What a launcher does at which time: no clock but the one that each turn reads."""

import signal
from types import SimpleNamespace

import pytest

from actorflow.distributed import launcher as launcher_module
from actorflow.distributed.launcher import RankLaunch, _Launcher


@pytest.fixture
def launcher(monkeypatch):
    """Return a launcher of two ranks that live, each of which waits 600 s; it kills nobody."""
    killed = []
    monkeypatch.setattr(launcher_module, "_kill_group", lambda rank: killed.append(rank.rank))
    found = _Launcher(RankLaunch(("x",), 2, 600.0, 10.0), {})
    found._ranks = [
        SimpleNamespace(rank=number, status=None, stopped_at_s=None, is_forced=True)
        for number in range(2)
    ]
    found.killed, found._started_s = killed, 40.0
    found._coordinator._agreement._heard.update((0, 1))
    yield found
    found._coordinator.close()


def test_what_falls_due_while_a_turn_goes_on_is_due_in_the_next(launcher):
    launcher._begin_ending(100.0)
    launcher._escalate(119.9999999)
    assert launcher.killed == []
    assert launcher._timeout_ms(119.9999999) == 1
    launcher._escalate(120.0)
    assert launcher.killed == [0, 1]
    assert launcher._timeout_ms(120.0) is None


def test_a_rank_that_runs_long_after_the_others_is_named_once(launcher, capsys):
    launcher._ranks[0].status = 0
    launcher._waiting_since_s = 50.0
    assert launcher._timeout_ms(50.0) == 600_001
    launcher._tell_who_runs(649.9)
    assert capsys.readouterr().err == ""
    for _ in range(2):
        launcher._tell_who_runs(650.0)
    assert capsys.readouterr().err == (
        "actorflow launch: rank 1 still runs, 600 s after the others have ended\n"
    )
    assert launcher._timeout_ms(650.0) is None
    assert launcher.killed == []


@pytest.mark.parametrize("silent", [(0,), (1,), (0, 1)])
def test_a_rank_that_never_says_a_word_is_given_up(launcher, silent):
    """Such as one whose script blocks, and which cannot reach the coordinator."""
    launcher._coordinator._agreement._heard.difference_update(silent)
    assert launcher._timeout_ms(40.0) == 630_001
    launcher._look_for_silent(669.9)
    assert launcher._coordinator.failure is None
    launcher._look_for_silent(670.0)
    failure = launcher._coordinator.failure
    assert (failure.rank, failure.told.split(", at tcp://127.0.0.1:")[0]) == (
        silent[0], f"rank {silent[0]} has not said a word 630 s after its start",
    )  # fmt: skip
    assert launcher._timeout_ms(670.0) is None


def test_ranks_that_wait_for_ever_may_be_silent_for_ever(launcher):
    launcher._asked = RankLaunch(("x",), 2, 0.0, 10.0)
    launcher._coordinator._agreement._heard.clear()
    assert launcher._timeout_ms(1e9) is None
    launcher._look_for_silent(1e9)
    assert launcher._coordinator.failure is None


@pytest.mark.parametrize(
    ("came_s", "passed_on", "is_ending"),
    [
        ([0.0], 1, False),
        ([0.0, 0.001, 0.3, 1.9], 1, False),
        ([0.0, 2.0], 2, True),
        ([0.0, 0.001, 3.0], 2, True),
        ([5.0, 5.5, 6.0, 6.9], 1, False),
    ],
)
def test_copies_of_a_signal_are_passed_on_once(launcher, monkeypatch, came_s, passed_on, is_ending):
    sent = []
    monkeypatch.setattr(launcher_module, "_send", lambda rank, number: sent.append(number))
    launcher._noted = [(15, at) for at in came_s]
    launcher._pass_on_signals(9.0)
    assert sent == [15, signal.SIGCONT] * 2 * passed_on  # what is stopped goes on, to end
    assert (launcher._ending_since_s is not None) == is_ending
