"""What a launcher does at which time: no clock but the one that each turn reads."""

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
    found.killed = killed
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
