"""What an agent does with the ranks of its host: no process, and no clock but that of a turn."""

import signal

import pytest
import zmq
from fake_ranks import FakeRank

from actorflow.distributed.agent import Agent, AwakeClock
from actorflow.distributed.agent_messages import (
    EndRanks,
    JobEnded,
    RankExited,
    RankStopped,
    RankUnstarted,
    SignalRanks,
    StartRanks,
)
from actorflow.distributed.messages import RankKeys


def keys(rank, epoch=1):
    place = ("1 (nodeB)", rank - 2, 2)
    return RankKeys(rank, 4, "tcp://10.0.0.1:5", b"", b"", b"", 0.0, epoch, *place).to_bytes()


class Host:
    """An agent of ranks 2 and 3, with the processes that it started and their signals."""

    def __init__(self):
        self.ranks, self.sent, self.environs, self.failing = [], [], [], None
        self.agent = Agent(("x.py",), {"A": "b"}, zmq.Poller(), start_process=self._start)

    def _start(self, rank_keys, command, environ, cores):
        if rank_keys.rank == self.failing:
            raise OSError("no process is left")
        self.environs.append(environ)
        self.ranks.append(FakeRank(rank_keys.rank, self.sent))
        return self.ranks[-1]

    def start(self, epoch=1):
        self.agent.take(StartRanks(epoch, 3, "", (keys(2, epoch), keys(3, epoch))), 0.0)


@pytest.fixture
def host(monkeypatch):
    monkeypatch.setattr("os.close", lambda fd: None)  # of processes that are none
    return Host()


def test_ranks_are_started_with_what_their_host_is_told(host):
    host.start()
    assert [rank.rank for rank in host.ranks] == [2, 3]
    names = ("A", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert [[environ[name] for name in names] for environ in host.environs] == [
        ["b", "2", "4", "0", "2", "10.0.0.1"],
        ["b", "3", "4", "1", "2", "10.0.0.1"],
    ]
    assert {environ["ACTORFLOW_THREADS"] for environ in host.environs} == {"3"}
    assert {environ["MASTER_PORT"] for environ in host.environs} == {"5"}


def test_what_happens_to_a_rank_is_told_once(host):
    host.start()
    assert host.agent.turn({}, 1.0) == []
    host.ranks[1].is_stopped_next = True
    assert host.agent.turn({}, 2.0) == [RankStopped(1, 3, True)]
    assert host.agent.turn({}, 3.0) == []
    host.ranks[1].is_stopped_next = False
    assert host.agent.turn({}, 4.0) == [RankStopped(1, 3, False)]
    host.ranks[0].exit_code = -9
    assert host.agent.turn({host.ranks[0].pidfd: 1}, 5.0) == [RankExited(1, 2, 0, 9, False, "")]
    assert host.sent == [(2, signal.SIGKILL)]  # to what it may have left behind
    assert host.agent.turn({host.ranks[0].pidfd: 1}, 6.0) == []


def test_a_rank_that_cannot_be_started_is_told_and_no_later_one_is_tried(host):
    host.failing = 2
    host.start()
    assert host.agent.turn({}, 1.0) == [RankUnstarted(1, 2, "no process is left")]
    assert host.ranks == []


def test_ranks_end_by_themselves_or_after_the_grace(host):
    host.start()
    host.agent.take(EndRanks(1, 2_000), 10.0)
    host.agent.take(EndRanks(1, 2_000), 11.0)
    assert host.agent.due_s() == [12.0, 14.0]
    host.agent.turn({host.ranks[0].pidfd: 1}, 11.9)
    assert host.sent == [(2, signal.SIGKILL)]
    host.agent.turn({}, 12.0)
    host.agent.turn({}, 13.9)
    assert host.sent[1:] == [(3, signal.SIGTERM)]
    host.agent.turn({}, 14.0)
    assert host.sent[2:] == [(3, signal.SIGKILL)]
    news = host.agent.turn({host.ranks[1].pidfd: 1}, 14.1)
    assert [(one.rank, one.is_forced) for one in news] == [(3, True)]


def test_without_a_grace_ranks_are_killed_at_once(host):
    host.start()
    host.agent.take(EndRanks(1, 0), 10.0)
    assert host.sent == [(2, signal.SIGKILL), (3, signal.SIGKILL)]


def test_what_was_said_to_an_older_epoch_is_not_done(host):
    host.start()
    host.start(epoch=2)
    assert host.sent == [(2, signal.SIGKILL), (3, signal.SIGKILL)]  # those of the first
    host.agent.take(SignalRanks(1, signal.SIGTERM), 1.0)
    host.agent.take(EndRanks(1, 0), 1.0)
    assert len(host.sent) == 2
    host.agent.take(SignalRanks(2, signal.SIGTERM), 1.0)
    assert host.sent[2:] == [
        (rank, number) for rank in (2, 3) for number in (signal.SIGTERM, signal.SIGCONT)
    ]


def test_with_the_job_all_its_ranks_end(host):
    host.start()
    host.agent.take(JobEnded(0), 1.0)
    assert host.sent == [(2, signal.SIGKILL), (3, signal.SIGKILL)]
    assert host.agent.turn({}, 2.0) == []


def test_time_counts_in_which_the_listener_was_awake():
    clock = AwakeClock(100.0)
    for now_s in (100.5, 101.0, 161.0, 161.5):  # stopped for a minute
        clock.turn(now_s)
    assert clock.now_s == 2.5
