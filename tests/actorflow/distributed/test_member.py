"""What a rank has of its job, with all ranks in this process."""

import os
import queue
import re
import socket
import threading
from dataclasses import replace
from functools import partial

import pytest
from error_texts import raises
from ranks_in_process import Served, at_once

from actorflow.distributed import member as member_module
from actorflow.distributed.agreement import WINDOW_STEPS
from actorflow.distributed.distributed_run import DistributedRun
from actorflow.distributed.member import RankClient, current_rank, init_rank
from actorflow.distributed.messages import CheckpointAt, StepsGranted, StopRequested
from compiler.contract.errors import ActorflowError, InternalError, PeerFailed


def test_all_ranks_get_the_values_of_all_again_and_again(members, at_once):
    _, ranks = members(3)
    for name in ("plan", "data", "plan"):
        values = at_once(*[partial(r.all_gather_object, name, (r.rank, name)) for r in ranks])
        assert values == [[(0, name), (1, name), (2, name)]] * 3


def test_megabytes_go_this_way(members, at_once):
    _, ranks = members(2)
    plan = os.urandom(8 << 20)
    sent = at_once(
        lambda: ranks[0].all_gather_object("plan", plan),
        lambda: ranks[1].all_gather_object("plan", None),
    )
    assert sent == [[plan, None]] * 2


def test_ranks_that_come_to_different_names_are_told_so(members, at_once):
    _, ranks = members(2)
    errors = at_once(
        lambda: ranks[0].all_gather_object("plan", 0),
        lambda: ranks[1].all_gather_object("compare data", 1),
    )
    for error in errors:
        assert isinstance(error, PeerFailed)
        assert error.rank == 1
        text = re.sub(r"\(\S*test_member.py:\d+\)", "(LINE)", str(error))
        assert text == (
            "rank 1 is about to compare data (LINE), where rank 0 is about to plan (LINE); every"
            " rank has to do the same in the same order"
        )


def test_a_rank_that_has_left_asks_the_others_nothing_more(members, at_once):
    _, (one, _) = members(2)
    is_there = threading.Event()

    def wait():
        is_there.set()
        one.all_gather_object("plan", 0)

    def leave():
        assert is_there.wait(60)
        one.leave()

    waited, _ = at_once(wait, leave)
    with pytest.raises(PeerFailed) as caught:
        one.all_gather_object("plan", 0)
    for error in (waited, caught.value):
        assert "rank 0 has ended its script and left the process group" in str(error)


def test_a_rank_that_left_failed_or_died_is_named_to_who_waits(members, at_once):
    _, (one, other) = members(2)
    error, _ = at_once(lambda: one.all_gather_object("plan", 0), other.leave)
    text = r"rank 1 has ended its script, where rank 0 waits for it to plan \(\S+_member.py:\d+\)"
    assert re.fullmatch(text, str(error))
    _, (one, other) = members(2)
    fault = ValueError("no such file")
    error, is_known = at_once(
        lambda: one.all_gather_object("plan", 0),
        lambda: other.fail(fault, op="linear", line="train.py:4"),
    )
    assert str(error) == "rank 1 failed in linear (train.py:4): ValueError: no such file"
    assert is_known
    assert one.fail(error)  # the launcher knows
    job, (one, other) = members(2)
    error, _ = at_once(
        lambda: one.all_gather_object("plan", 0), lambda: job.lost(1, "was ended by SIGKILL")
    )
    assert (error.rank, str(error)) == (1, "rank 1 was ended by SIGKILL")
    with raises(PeerFailed):
        listening(one)[0].begin()
    with raises(PeerFailed):
        one.all_gather_object("data", 0)


def test_a_rank_that_does_not_come_in_time_is_named(members):
    _, (one, _) = members(2, wait_s=0.01)
    with raises(PeerFailed):
        one.all_gather_object("plan", 0)
    _, (one, _) = members(2, wait_s=0.01)
    with raises(PeerFailed):
        listening(one)[0].begin()


def test_an_error_that_is_anothers_fault_is_told_with_its_name(members, at_once):
    _, (one, other) = members(2)
    failed = RuntimeError("launch failed")
    failed.__cause__ = PeerFailed("rank 1 did not come to all_reduce", rank=1)
    error, _ = at_once(lambda: other.all_gather_object("x", 0), lambda: one.fail(failed))
    assert error.rank == 1
    assert str(error) == "rank 1 failed, says rank 0: rank 1 did not come to all_reduce"


def test_a_value_that_cannot_travel_is_refused_before_anybody_waits(members, at_once):
    _, ranks = members(2)
    with raises(ValueError):
        ranks[0].all_gather_object("plan", object())
    assert at_once(*[lambda r=r: r.all_gather_object("plan", 1) for r in ranks]) == [[1, 1]] * 2


def listening(rank, first_step=0, *, is_stepped=False):
    """Return a run that has not begun, and a queue of its instructions and its error's text."""
    told = queue.SimpleQueue()
    run = DistributedRun(
        rank,
        first_step,
        obey=told.put,
        abort=lambda error: told.put(str(error)),
        is_stepped=is_stepped,
    )
    return run, told


def begun(at_once, ranks, first_step=0):
    """Begin a run on all ranks; return the runs with what each is told."""
    runs = [listening(rank, first_step) for rank in ranks]
    at_once(*[run.begin for run, _ in runs])
    for run, told in runs:
        assert told.get(timeout=60) == granted(run, first_step + WINDOW_STEPS)
    return runs


def granted(run, steps):
    return StepsGranted(run.number, steps, is_last=False, reason="")


def test_a_run_is_granted_step_by_step_stopped_and_followed_by_another(members, at_once):
    _, ranks = members(2)
    for first in (0, 10):
        runs = begun(at_once, ranks, first)
        for run, _ in runs:
            run.report_data_ready(first + 2)
        for run, told in runs:
            assert told.get(timeout=60) == granted(run, first + 2 + WINDOW_STEPS)
        runs[1][0].ask_checkpoint()
        for run, told in runs:
            assert told.get(timeout=60) == CheckpointAt(run.number, first + 3 + WINDOW_STEPS)
        last = first + 2 + WINDOW_STEPS
        runs[0][0].ask_stop("SIGINT")
        for run, told in runs:
            assert told.get(timeout=60) == StepsGranted(run.number, last, True, "SIGINT")
            run.ended(last)
    at_once(*[r.leave for r in ranks])
    assert all([told.empty() for _, told in runs])


def test_several_runs_are_open_at_a_time_and_each_is_granted_its_own_steps(members, at_once):
    _, ranks = members(2)
    first, second = begun(at_once, ranks), begun(at_once, ranks, 10)
    for step in (2, 4):
        # In turn, so that what is said of one run is no news of the other.
        for runs, begin in ((first, 0), (second, 10), (first, 0)):
            for run, _ in runs:
                run.report_data_ready(begin + step)
        for runs, begin in ((first, 0), (second, 10)):
            for run, told in runs:
                assert told.get(timeout=60) == granted(run, begin + step + WINDOW_STEPS)
    ranks[1].fail(ValueError("boom"))
    for told in (first[0][1], second[0][1]):
        assert told.get(timeout=60) == "rank 1 failed: ValueError: boom"


class NumberedRank:
    """A rank that meets nobody: it numbers a run and keeps what it says."""

    rank, failure = 0, None

    def __init__(self):
        self.says = []
        self.say = self.says.append

    def begin_run(self, run):
        run.number = 2


def test_a_stop_asked_for_before_the_ranks_meet_is_told_when_the_run_begins():
    rank = NumberedRank()
    run = DistributedRun(rank, 3, obey=print, abort=print)
    run.report_data_ready(4)
    run.ask_stop("SIGTERM")
    run.ask_stop("SIGINT")
    assert rank.says == []
    run.begin()
    assert rank.says == [StopRequested(2, "SIGTERM")]


def test_a_script_that_ends_between_two_steps_has_ended_its_runs(members, at_once):
    _, ranks = members(2)
    runs = [listening(rank, 3, is_stepped=True)[0] for rank in ranks]
    at_once(*[run.begin for run in runs])
    for run in runs:
        run.report_data_ready(5)
    ranks[0].leave()
    assert [run.is_over for run in runs] == [True, False]
    ranks[1].leave()
    assert runs[1].is_over
    assert ranks[0].failure is ranks[1].failure is None


def test_a_failure_aborts_the_runs_of_the_others(members, at_once):
    job, ranks = members(3)
    runs = begun(at_once, ranks)
    assert ranks[2].fail(ValueError("boom"), op="linear", line="train.py:4")
    for _, told in runs[:2]:
        text = "rank 2 failed in linear (train.py:4): ValueError: boom"
        assert told.get(timeout=60) == text
    assert job.coordinator.failure.rank == 2


@pytest.mark.parametrize("is_late", [False, True])
def test_data_that_ends_earlier_on_one_rank_is_an_error_that_names_both(members, at_once, is_late):
    _, ranks = members(2)
    runs = begun(at_once, ranks)
    if not is_late:
        runs[1][0].report_data_ready(3)
    runs[0][0].data_ended(2)
    if is_late:
        runs[1][0].report_data_ready(3)
    while not isinstance(told := runs[1][1].get(timeout=60), str):
        runs[1][0].report_data_ready(3)
    assert told == (
        "rank 0 ended after step 2, rank 1 not before step 3: the data of all ranks must have the"
        " same number of batches"
    )


def test_ranks_that_resume_at_different_steps_are_an_error(members, at_once):
    _, ranks = members(2)
    runs = [listening(rank, 10 * rank.rank) for rank in ranks]
    at_once(*[run.begin for run, _ in runs])
    for _, told in runs:
        assert told.get(timeout=60).startswith("rank 1 would train on after step 10, rank 0")


def test_a_callback_that_raises_is_no_silence(members, at_once):
    _, ranks = members(2)
    aborted = threading.Event()

    def obey(message):
        raise RuntimeError("in the callback")

    raising = DistributedRun(ranks[0], 0, obey=obey, abort=lambda error: aborted.set())
    at_once(raising.begin, listening(ranks[1])[0].begin)
    assert aborted.wait(60)
    with raises(InternalError):
        ranks[0].all_gather_object("x", 0)


def test_a_forked_child_is_no_rank(members, child_says):
    _, ranks = members(2)
    said = child_says(lambda: ranks[0].all_gather_object("x", 0))
    assert said.startswith(f"ActorflowError: rank 0 is process {os.getpid()}, from which this one")
    assert child_says(lambda: ranks[0].fail(ValueError("x"))) == "False"
    assert child_says(lambda: ranks[0].leave()) == "None"


def test_who_was_not_launched_is_alone():
    assert current_rank({}) is None
    assert current_rank({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert current_rank({"WORLD_SIZE": "4"}) is None
    with raises(ActorflowError):
        current_rank({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_process_becomes_a_rank_once(served, monkeypatch, num_ranks):
    monkeypatch.setattr(member_module, "_given", [])
    job = served(num_ranks)
    made = init_rank(job.coordinator.keys(0))
    assert current_rank({}) is (made if num_ranks > 1 else None)
    with raises(InternalError):
        init_rank(job.coordinator.keys(0))
    made.leave()


def test_ranks_of_several_hosts_learn_which_is_where(served):
    job = served(3)
    places = zip(range(3), ("a", "a", "b"), strict=True)
    keys = [replace(job.coordinator.keys(rank), host=host) for rank, host in places]
    members = [RankClient(one) for one in keys]
    at_once(*[member.learn_hosts for member in members])
    assert [member.hosts for member in members] == [("a", "a", "b")] * 3
    for member in members:
        member.leave()


def test_a_rank_of_one_host_asks_nobody_for_hosts(served):
    member = RankClient(served(2).coordinator.keys(0))
    member.learn_hosts()
    assert member.hosts == ()
    member.leave()


# The link


@pytest.mark.parametrize("call", ["gather", "begin_run"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_coordinator_that_cannot_be_reached_is_an_error_with_its_address(
    served, monkeypatch, is_there, call
):
    """Nobody takes the connection, or somebody who does not answer."""
    monkeypatch.setattr(member_module, "CONTACT_S", 0.05)
    server = socket.create_server(("127.0.0.1", 0))
    endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    if not is_there:
        server.close()
    keys = replace(served(2).coordinator.keys(0), endpoint=endpoint, wait_s=0.01)
    member = RankClient(keys)
    try:
        text = f"rank 0 to its coordinator at {endpoint} was not established within 0.05 s"
        with pytest.raises(PeerFailed, match=text) as caught:
            member.all_gather_object("up", 0) if call == "gather" else listening(member)[0].begin()
        assert not member.fail(caught.value), "who runs the script prints it"
    finally:
        member._link.close()
        server.close()


def test_a_link_that_is_lost_ends_who_waits(monkeypatch):
    job = Served(1)
    member = RankClient(job.coordinator.keys(0))
    assert member.all_gather_object("up", 7) == [7]
    job.close()
    try:
        with pytest.raises(PeerFailed, match=r"its coordinator at tcp://.* was lost"):
            member.all_gather_object("up", 8)
    finally:
        member._link.close()
