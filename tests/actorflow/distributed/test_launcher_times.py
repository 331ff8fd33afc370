"""What a launcher does at which time: no clock but the one that each turn is handed."""

import os
import signal
from itertools import count

import pytest
import zmq
from fake_ranks import FakeRank

from actorflow.distributed.agent import Agent
from actorflow.distributed.coordinator import Coordinator
from actorflow.distributed.hosts import HostAgents
from actorflow.distributed.launcher import Launcher, RankLaunch
from actorflow.distributed.signal_notes import SignalNotes

START_S = 40.0


class FakeCoordinator(Coordinator):
    """A coordinator to which the ranks in `heard` have said something, and nobody says more."""

    heard = (0, 1)

    def serve(self):
        pass

    def has_heard(self, rank):
        return rank in self.heard

    def has_left(self, rank):
        return True


@pytest.fixture
def launched():
    """Return a function that starts a launcher of two ranks; it sends signals to `sent` alone."""
    coordinators = []

    def start(wait_s=600.0):
        coordinators.append(FakeCoordinator(2, wait_s))
        sent, numbers = [], count()
        poller = zmq.Poller()
        agent = Agent(("x",), {}, poller, start_process=lambda *_: FakeRank(next(numbers), sent))
        agents = HostAgents(poller, agent)
        asked = RankLaunch(("x",), 2, wait_s, 10.0)
        notes = SignalNotes(lambda: START_S)
        launcher = Launcher(asked, {}, coordinators[-1], agents, notes, clock=lambda: START_S)
        launcher.start()
        return launcher, coordinators[-1], sent

    yield start
    for coordinator in coordinators:
        coordinator.close()


def test_what_falls_due_while_a_turn_goes_on_is_due_in_the_next(launched):
    launcher, coordinator, sent = launched()
    coordinator.lost(0, "fell")
    assert launcher.turn({}, 100.0) == 10_001
    assert launcher.turn({}, 109.9999999) == 1
    assert sent == []
    assert launcher.turn({}, 110.0) == 10_001
    assert launcher.turn({}, 119.9999999) == 1
    assert sent == [(0, signal.SIGTERM), (1, signal.SIGTERM)]
    assert launcher.turn({}, 120.0) is None
    assert sent[2:] == [(0, signal.SIGKILL), (1, signal.SIGKILL)]


def test_a_rank_that_runs_long_after_the_others_is_named_once(launched, capsys):
    launcher, _, sent = launched()
    assert launcher.turn({1000: 1}, 50.0) == 600_001  # rank 0 has exited
    launcher.turn({}, 649.9)
    assert capsys.readouterr().err == ""
    for _ in range(2):
        assert launcher.turn({}, 650.0) is None
    assert capsys.readouterr().err == (
        "actorflow launch: rank 1 still runs, 600 s after the others have ended\n"
    )
    assert sent == [(0, signal.SIGKILL)]  # to what it may have left behind


@pytest.mark.parametrize("silent", [(0,), (1,), (0, 1)])
def test_a_rank_that_never_says_a_word_is_given_up(launched, silent):
    """Such as one whose script blocks, and which cannot reach the coordinator."""
    launcher, coordinator, _ = launched()
    coordinator.heard = {0, 1} - {*silent}
    assert launcher.turn({}, START_S) == 630_001
    launcher.turn({}, 669.9)
    assert coordinator.failure is None
    launcher.turn({}, 670.0)
    failure = coordinator.failure
    assert (failure.rank, failure.told.split(", at tcp://127.0.0.1:")[0]) == (
        silent[0], f"rank {silent[0]} has not said a word 630 s after its start",
    )  # fmt: skip


def test_ranks_that_wait_for_ever_may_be_silent_for_ever(launched):
    launcher, coordinator, _ = launched(wait_s=0.0)
    coordinator.heard = ()
    assert launcher.turn({}, 1e9) is None
    assert coordinator.failure is None


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
def test_copies_of_a_signal_are_passed_on_once(launched, came_s, passed_on, is_ending):
    launcher, _, sent = launched()
    for at in came_s:
        launcher.notes.note(15, at)
    due_ms = launcher.turn({}, 9.0)
    both = [(rank, number) for rank in (0, 1) for number in (15, signal.SIGCONT)]
    assert sent == both * passed_on  # what is stopped goes on, to end
    assert (due_ms is not None) == is_ending


def test_ranks_of_each_epoch_have_other_keys_and_know_its_number():
    told = []

    def start_process(keys, command, environ, cores):
        told.append((keys, environ))
        rank = FakeRank(keys.rank, [])
        rank.pidfd = os.eventfd(0)  # which the agent closes
        return rank

    poller = zmq.Poller()
    agents = HostAgents(poller, Agent(("x",), {}, poller, start_process=start_process))
    asked, notes = RankLaunch(("x",), 2, 600.0, 10.0), SignalNotes(lambda: START_S)
    for epoch in (1, 2):
        coordinator = FakeCoordinator(2, 600.0, epoch=epoch)
        launcher = Launcher(asked, {}, coordinator, agents, notes, clock=lambda: START_S)
        launcher.start()
        coordinator.close()
    agents.close(0)
    assert [environ["ACTORFLOW_EPOCH"] for _, environ in told] == ["1", "1", "2", "2"]
    assert [keys.epoch for keys, _ in told] == [1, 1, 2, 2]
    assert len({keys.secret for keys, _ in told}) == 4
    assert len({keys.server_public for keys, _ in told}) == 2
