"""What a launcher makes of what several agents say: no process, no socket to them, given times."""

import signal

import pytest
import zmq

from actorflow.distributed.agent_messages import (
    AgentHello,
    EndRanks,
    RankExited,
    RankStopped,
    RankUnstarted,
    SignalRanks,
    SignalReceived,
    StartRanks,
)
from actorflow.distributed.coordinator import Coordinator, places_on
from actorflow.distributed.hosts import AgentLost, AgentSilent, HostAgents
from actorflow.distributed.launcher import EpochSize, Launcher, RankLaunch
from actorflow.distributed.messages import RankKeys
from actorflow.distributed.signal_notes import SignalNotes
from compiler.contract.errors import ActorflowError

CORES = (8, 5)


class FakeAgents(HostAgents):
    """Two hosts that say what a test says, and note what they are told."""

    def __init__(self, hosts=(0, 1), log_dir=""):
        super().__init__(zmq.Poller(), None)
        self.num_hosts, self.hosts = hosts[-1] + 1, hosts
        self.hellos = {
            host: AgentHello(f"node{host}", "", "", "", cores, log_dir and f"{log_dir}{host}")
            for host, cores in zip(hosts, CORES, strict=True)
        }
        self.told, self.news = [], []

    def tell(self, index, message, now_s):
        self.told.append((index, message))

    def turn(self, events, now_s):
        news, self.news = self.news, []
        return news


class Job:
    """A launcher of 3 ranks on two hosts: 0 and 1 on the first one."""

    def __init__(self, hosts=(0, 1), **environ):
        self.agents = FakeAgents(hosts)
        places = places_on(self.agents.names, 3)
        self.coordinator = Coordinator(3, 600.0, places=places)
        asked = RankLaunch(("x",), 3, 600.0, 10.0)
        notes = SignalNotes(lambda: 0.0)
        self.launcher = Launcher(
            asked, environ, self.coordinator, self.agents, notes, clock=lambda: 0.0
        )
        self.launcher.start()
        self.started, self.agents.told = self.agents.told, []

    def says(self, host, news, now_s=1.0):
        """Let the agent of a host say something; return what agents are told for it."""
        self.agents.news.append((host, news))
        self.launcher.turn({}, now_s)
        told, self.agents.told = self.agents.told, []
        return told


@pytest.fixture
def job():
    made = Job()
    yield made
    made.coordinator.close()


ENDING = [(0, EndRanks(1, 10_000)), (1, EndRanks(1, 10_000))]


def test_each_host_is_told_its_ranks_and_all_have_the_same_number_of_threads(job):
    assert [(host, type(one), one.num_threads) for host, one in job.started] == [
        (0, StartRanks, 4), (1, StartRanks, 4),
    ]  # fmt: skip
    keys = [[RankKeys.from_bytes(one) for one in message.keys] for _, message in job.started]
    places = [[(k.rank, k.host, k.local_rank, k.num_local) for k in of_host] for of_host in keys]
    assert places == [[(0, "0 (node0)", 0, 2), (1, "0 (node0)", 1, 2)], [(2, "1 (node1)", 0, 1)]]


def test_a_number_of_threads_that_the_user_set_stands():
    job = Job(ACTORFLOW_THREADS="3")
    assert {one.num_threads for _, one in job.started} == {3}
    job.coordinator.close()


def test_the_hosts_that_are_there_have_the_ranks_and_keep_their_numbers(capsys):
    job = Job(hosts=(0, 2))
    keys = {host: [RankKeys.from_bytes(one) for one in told.keys] for host, told in job.started}
    places = {host: [(k.rank, k.host, k.num_local) for k in ks] for host, ks in keys.items()}
    assert places == {0: [(0, "0 (node0)", 2), (1, "0 (node0)", 2)], 2: [(2, "2 (node2)", 1)]}
    text = "host 1 (node1) has Python 3.9, host 0 (node0) none: install the same version on all"
    ((host, refused),) = job.says(1, AgentHello("node1", "", "3.9", "", 4))
    assert (host, refused.reason) == (1, f"{text} hosts")
    assert capsys.readouterr().err.startswith(f"actorflow launch: {text}")
    assert job.says(1, AgentHello("node1", "", "", "", 4)) == []
    assert job.says(1, AgentLost("was lost: its agent has ended")) == []
    assert job.coordinator.failure is None
    job.says(2, AgentLost("was lost: its agent has ended"))
    assert job.coordinator.failure.told.startswith("rank 2 on host 2 (node2) is lost")
    text = "actorflow launch: host 1 (node1) came; it has part from the next restart on\n"
    assert capsys.readouterr().err == text
    job.coordinator.close()


def test_a_change_of_ranks_or_threads_is_told_since_bits_depend_on_both():
    some = EpochSize(2, 4, 1)
    assert EpochSize(4, 8, 1).difference(None, 4) == some.difference(some, 4) == ""
    assert EpochSize(1, 4, 1).difference(some, 4) == ""
    assert some.difference(None, 4) == (
        "4 ranks with 1 thread each on 2 of 4 hosts; one that comes later has part from the next"
        " restart on"
    )
    assert EpochSize(1, 1, 2).difference(some, 4) == (
        "1 rank with 2 threads each from here on, 4 ranks with 1 thread each before: batches stay,"
        " and losses differ in their last bits from those of a run without this change"
    )


def test_a_rank_that_dies_is_named_with_its_host_and_ends_the_others(job):
    assert job.says(1, RankExited(1, 2, 0, 9, False, "tail")) == ENDING
    assert job.coordinator.failure.told == "rank 2 on host 1 (node1) was ended by SIGKILL"


def test_all_ranks_of_a_host_that_is_lost_are_lost(job):
    assert job.says(0, AgentLost("was lost: its agent has ended")) == ENDING
    assert job.coordinator.failure.told == (
        "rank 0 on host 0 (node0) is lost: its host was lost: its agent has ended"
    )
    assert job.says(0, AgentLost("was lost: its agent has ended")) == []


def test_a_host_that_is_silent_is_named_before_it_is_lost(job, capsys):
    assert job.says(1, AgentSilent(15.0)) == []
    assert job.coordinator.failure is None
    assert capsys.readouterr().err == (
        "actorflow launch: host 1 (node1) has been silent for 4 s: it is stopped or its link is"
        " down; its ranks are lost after 15 s (--host-timeout)\n"
    )


@pytest.mark.parametrize(
    "news",
    [
        RankExited(1, 0, 0, 9, False, ""),  # a rank of another host
        RankExited(1, 7, 0, 9, False, ""),  # of none
        RankExited(2, 2, 0, 9, False, ""),  # of another epoch
        RankStopped(1, 0, True),
    ],
)
def test_what_an_agent_says_of_ranks_that_it_has_not_is_not_heard(job, news):
    assert job.says(1, news) == []
    assert job.says(1, news, 620.0) == []
    assert job.coordinator.failure is None


def test_a_rank_that_stays_stopped_is_found_and_one_that_goes_on_is_not(job):
    job.coordinator.lost = lambda rank, text, **_: found.append((rank, text))
    found = []
    job.says(1, RankStopped(1, 2, True))
    job.says(1, RankStopped(1, 2, False), 600.0)
    job.says(1, RankStopped(1, 2, True), 601.0)
    job.launcher.turn({}, 1200.9)
    is_stopped = [text for rank, text in found if "SIGSTOP" in text]
    assert is_stopped == []
    job.launcher.turn({}, 1201.0)
    assert (2, "was stopped (SIGSTOP) 600 s ago and has not continued") in found


def test_a_rank_that_cannot_be_started_is_an_error_with_its_host(job):
    with pytest.raises(ActorflowError, match=r"rank 2 of 3 cannot be started on host 1 \(node1\)"):
        job.says(1, RankUnstarted(1, 2, "no process is left"))


def test_signals_to_several_hosts_are_one_wish_and_a_second_one_of_a_host_ends_all(job):
    both = [(host, SignalRanks(1, signal.SIGTERM)) for host in (0, 1)]
    assert job.says(1, SignalReceived(signal.SIGTERM), 1.0) == both
    assert job.says(0, SignalReceived(signal.SIGTERM), 9.0) == []
    assert job.says(1, SignalReceived(signal.SIGTERM), 2.9) == []
    assert job.says(1, SignalReceived(signal.SIGTERM), 9.0) == [*ENDING, *both]


def test_a_failure_is_followed_by_the_files_of_each_host_with_what_its_ranks_printed(capsys):
    agents, notes = FakeAgents(log_dir="/logs"), SignalNotes(lambda: 0.0)
    coordinator = Coordinator(3, 600.0, places=places_on(agents.names, 3))
    asked = RankLaunch(("x",), 3, 600.0, 10.0)
    launcher = Launcher(asked, {}, coordinator, agents, notes, clock=lambda: 0.0)
    agents.news = [
        (1, RankExited(1, 2, 3, 0, False, "the last words")),
        (1, AgentLost("was lost: its agent has ended")),
        (0, RankExited(1, 0, 1, 0, True, "")),
        (0, RankExited(1, 1, 1, 0, True, "")),
    ]
    with notes.woken():
        end = launcher.run()
    assert end.status == 3
    assert capsys.readouterr().err.splitlines() == [
        "--- what rank 2 printed last:",
        "the last words",
        "---",
        "actorflow launch: rank 2 on host 1 (node1) ended with exit status 3",
        "what ranks above 0 printed is in /logs0/rank-1.log on host 0 (node0), /logs1/rank-2.log"
        " on host 1 (node1)",
    ]
