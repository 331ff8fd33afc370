"""When ranks are started again: decisions from failures and their times, without any process."""

import os
import signal
import time

import pytest
import tiers
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actorflow.distributed.agent import Agent
from actorflow.distributed.agreement import WINDOW_STEPS, CoordinatorState
from actorflow.distributed.hosts import HostAgents
from actorflow.distributed.launcher import Epochs, RankLaunch
from actorflow.distributed.messages import Hello, RankFailed, RunReady, StepReached
from actorflow.distributed.rank_failure import FailureKind, RankFailure
from actorflow.distributed.restart import (
    MOST_DELAY_S,
    EpochEnd,
    RestartPolicy,
    is_same_fault,
    kind_of_exit,
    supervise,
)
from actorflow.distributed.signal_notes import SignalNotes

KILLED = RankFailure(1, "was ended by SIGKILL", kind=FailureKind.KILL)
FAULT = RankFailure(1, "failed: boom", "relu", "x.py:3", kind=FailureKind.ERROR, step=7)

SLOW = [HealthCheck.too_slow]
"""Measured times are those of a machine that does other things, too."""


# The policy


def restarts_of(policy, gaps):
    """Return at which times a policy restarts, of ranks that are killed so long after each."""
    now_s, due = 0.0, []
    for gap_s in gaps:
        now_s += gap_s
        decision = policy.decide(KILLED, now_s)
        if decision.delay_s is not None:
            now_s += decision.delay_s
            due.append((now_s, decision.delay_s))
    return due


@settings(max_examples=tiers.examples(300), deadline=None, suppress_health_check=SLOW)
@given(
    st.integers(1, 8),
    st.floats(1.0, 1000.0),
    st.lists(st.floats(0.0, 400.0), max_size=60),
)
def test_a_window_never_has_more_restarts_than_were_allowed(restarts, window_s, gaps):
    due = restarts_of(RestartPolicy(restarts, window_s), gaps)
    for first_s, _ in due:
        within = [at_s for at_s, _ in due if first_s <= at_s < first_s + window_s]
        assert len(within) <= restarts


@settings(max_examples=tiers.examples(100), deadline=None, suppress_health_check=SLOW)
@given(st.integers(1, 12), st.lists(st.floats(0.0, 10.0), max_size=20))
def test_delays_grow_within_a_window_up_to_the_most(restarts, gaps):
    delays = [delay_s for _, delay_s in restarts_of(RestartPolicy(restarts, 1e6), gaps)]
    assert delays == sorted(delays)
    assert delays[:7] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, MOST_DELAY_S][: len(delays)]
    assert delays[7:] == [MOST_DELAY_S] * len(delays[7:])
    assert len(delays) == min(restarts, len(gaps))


def test_a_restart_counts_until_its_window_has_passed():
    policy = RestartPolicy(2, 100.0)
    decisions = [policy.decide(KILLED, now_s) for now_s in (0.0, 50.0, 60.0, 100.0, 151.0)]
    spent = "the limit of 2 restarts within 100 s is reached (--restarts, --restart-window)"
    assert [(one.delay_s, one.text) for one in decisions] == [
        (0.0, "restart 1 of 2"),
        (1.0, "restart 2 of 2, in 1 s"),
        (None, spent),
        (1.0, "restart 2 of 2, in 1 s"),
        (1.0, "restart 2 of 2, in 1 s"),
    ]


def test_an_error_that_every_start_meets_is_not_tried_again():
    decision = RestartPolicy(3).decide(RankFailure(0, "gave other values"), 0.0)
    assert (decision.delay_s, decision.text) == (None, "every start would meet this error")


def test_a_fault_that_comes_twice_in_a_row_ends_the_job():
    policy = RestartPolicy(3)
    assert policy.decide(FAULT, 0.0).delay_s == 0.0
    decision = policy.decide(FAULT, 9.0)
    assert decision.delay_s is None
    assert decision.text == (
        "the same fault ended two starts in a row near step 7, so it is one of the script or its"
        " data"
    )


def test_another_failure_in_between_gives_a_fault_one_more_start():
    policy = RestartPolicy(9)
    for failure in (FAULT, KILLED, FAULT, KILLED, KILLED):
        assert policy.decide(failure, 0.0).delay_s is not None


def fault(**changes):
    told = {"text": "failed: boom", "op": "relu", "line": "x.py:3", "kind": FailureKind.ERROR}
    return RankFailure(**{"rank": 1, "step": 7, **told, **changes})


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({}, True),
        ({"rank": 0}, True),  # the same script: the first to report is any of them
        ({"step": 7 + WINDOW_STEPS}, True),
        ({"step": 8 + WINDOW_STEPS}, False),
        ({"step": 6 - WINDOW_STEPS}, False),
        ({"step": None}, True),
        ({"text": "failed: boom\nand a trace of another step"}, True),
        ({"text": "failed: bang"}, False),
        ({"op": "linear"}, False),
        ({"line": "x.py:4"}, False),
        ({"kind": FailureKind.EXIT}, False),
    ],
)
def test_faults_are_the_same_by_place_text_and_step(changes, is_same):
    assert is_same_fault(FAULT, fault(**changes)) is is_same
    assert is_same_fault(fault(**changes), FAULT) is is_same


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (0, FailureKind.EXIT),
        (3, FailureKind.EXIT),
        (-signal.SIGSEGV, FailureKind.CRASH),
        (-signal.SIGABRT, FailureKind.CRASH),
        (-signal.SIGKILL, FailureKind.KILL),
        (-signal.SIGTERM, FailureKind.KILL),
    ],
)
def test_an_exit_is_a_choice_a_crash_or_a_kill(code, kind):
    assert kind_of_exit(code) is kind
    failure = RankFailure(0, "ended", kind=kind)
    assert is_same_fault(failure, failure) is (kind is not FailureKind.KILL)


# What the agreement says of a failure


def agreed(*said, num_ranks=2):
    agreement = CoordinatorState(num_ranks)
    for rank, message in said:
        agreement.on_message(rank, message)
    return agreement.failure


def test_a_failure_has_its_kind_and_the_step_that_the_rank_came_to():
    begun = [(0, RunReady(1, 4)), (1, RunReady(1, 4)), (1, StepReached(1, 6))]
    error = RankFailed(1, "boom", "", "", "")
    assert agreed(*begun, (1, error)).step == 6
    assert agreed(*begun, (0, RankFailed(0, "boom", "", "", ""))).step == 4
    failure = agreed((1, error))
    assert (failure.kind, failure.step) == (FailureKind.ERROR, None)
    mistake = RankFailed(1, "no such op", "", "", "", is_mistake=True)
    assert agreed((1, mistake)).kind is FailureKind.MISTAKE
    assert agreed((0, RankFailed(1, "did not come", "", "", ""))).kind is FailureKind.SILENCE
    apart = [(0, RunReady(1, 4)), (1, RunReady(1, 5))]
    assert agreed(*apart).kind is FailureKind.MISTAKE


def test_a_death_that_explains_hearsay_has_its_own_kind_and_the_step_of_the_failure():
    agreement = CoordinatorState(2)
    for message in (Hello(), RunReady(1, 0), StepReached(1, 3)):
        agreement.on_message(1, message)
    agreement.on_message(0, RankFailed(1, "did not come", "", "", ""))
    agreement.on_process_exit(1, "was ended by SIGSEGV", explains=True, kind=FailureKind.CRASH)
    assert (agreement.failure.kind, agreement.failure.step) == (FailureKind.CRASH, 3)


# Epochs


class Job:
    """Ends its epochs as told, and notes what happens; waits are noted, and not made."""

    def __init__(self, *ends, signals=()):
        self.ends, self.signals = [*ends], {**dict(signals)}
        self.now_s, self.told, self.waited = 0.0, [], []

    def run_epoch(self, epoch):
        self.told.append(f"epoch {epoch}")
        self.now_s += 10.0
        return self.ends.pop(0)

    def wait(self, seconds):
        self.waited.append(seconds)
        self.now_s += seconds
        return self.signals.get(len(self.waited))

    def supervised(self, policy):
        return supervise(
            self.run_epoch, policy, clock=lambda: self.now_s, wait=self.wait,
            report=self.told.append,
        )  # fmt: skip


HINT = "; fit continues from its newest checkpoint, a script without any from its beginning"


def test_a_job_whose_ranks_are_killed_is_started_until_it_ends_well():
    job = Job(EpochEnd(137, KILLED), EpochEnd(137, KILLED), EpochEnd(0))
    assert job.supervised(RestartPolicy(3)) == 0
    assert job.waited == [0.0, 1.0]
    assert job.told == [
        "epoch 1", f"restart 1 of 3{HINT}", "epoch 2", "restart 2 of 3, in 1 s", "epoch 3",
        "the job has ended; its ranks were started 3 times",
    ]  # fmt: skip


def test_without_restarts_nothing_more_is_told():
    job = Job(EpochEnd(137, KILLED))
    assert job.supervised(RestartPolicy()) == 137
    assert job.told == ["epoch 1"]
    job = Job(EpochEnd(0))
    assert job.supervised(RestartPolicy(3)) == 0
    assert job.told == ["epoch 1"]


def test_the_last_failure_gives_the_status_and_its_reason_is_told():
    job = Job(EpochEnd(137, KILLED), EpochEnd(1, FAULT), EpochEnd(1, FAULT))
    assert job.supervised(RestartPolicy(5)) == 1
    assert job.told[-1] == (
        "no restart: the same fault ended two starts in a row near step 7, so it is one of the"
        " script or its data; the ranks were started 3 times"
    )
    job = Job(EpochEnd(137, KILLED), EpochEnd(138, KILLED))
    assert job.supervised(RestartPolicy(1)) == 138
    assert job.told[-1] == (
        "no restart: the limit of 1 restart within 600 s is reached (--restarts, --restart-window);"
        " the ranks were started 2 times"
    )


def test_a_stop_that_the_user_asked_for_is_no_failure():
    job = Job(EpochEnd(143, KILLED, is_stopped=True))
    assert job.supervised(RestartPolicy(3)) == 143
    assert job.told == ["epoch 1"]


def test_a_signal_during_the_wait_ends_the_job():
    job = Job(EpochEnd(137, KILLED), signals={1: signal.SIGTERM})
    assert job.supervised(RestartPolicy(3)) == 143
    assert job.told[-1] == "no restart: SIGTERM came; the ranks were started once"


# Signals between epochs


@pytest.fixture
def notes():
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    noted = SignalNotes(time.monotonic)
    with noted.woken():
        yield noted
    assert before == {number: signal.getsignal(number) for number in before}


@pytest.fixture
def epochs(notes):
    """Epochs of a job whose only agent has no ranks."""
    poller = zmq.Poller()
    poller.register(notes.bell, zmq.POLLIN)
    agents = HostAgents(poller, Agent(("x",), {}, poller))
    return Epochs(RankLaunch(("x",), 1, 0.0, 0.0), {}, agents, notes)


def test_a_signal_ends_a_wait_and_is_taken_by_the_epoch_that_begins(notes, epochs):
    assert epochs.wait(0.0) is None
    os.kill(os.getpid(), signal.SIGHUP)
    assert epochs.wait(1e6) == signal.SIGHUP
    assert epochs.wait(1e6) == signal.SIGHUP, "it stays the wish of the user"
    os.kill(os.getpid(), signal.SIGTERM)
    assert [number for number, _ in notes.take()] == [signal.SIGHUP, signal.SIGTERM]
    assert notes.take() == []
    assert notes.first == signal.SIGHUP


def test_the_end_of_a_child_ends_no_wait(epochs):
    os.kill(os.getpid(), signal.SIGCHLD)
    since_s = time.monotonic()
    assert epochs.wait(0.05) is None
    assert time.monotonic() - since_s >= 0.05
