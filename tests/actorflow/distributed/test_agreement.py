"""What ranks agree on, in any order of messages, with copies, and with deaths at any point."""

import copy
from dataclasses import replace
from random import Random

import pytest
import tiers
from acted_ranks import Meet, Play, Train, play_on
from hypothesis import given, settings
from hypothesis import strategies as st

from actorflow.distributed.agreement import MOST_DIGESTS, WINDOW_STEPS, CoordinatorState
from actorflow.distributed.messages import (
    Aborted,
    Ack,
    BatchDigest,
    CheckpointAt,
    CheckpointRequested,
    CutAt,
    DataEnded,
    DataGivenUp,
    DataRemains,
    EndAt,
    GatherDone,
    GatherEntered,
    GatherTimedOut,
    GiveUpData,
    Hello,
    HoldRequested,
    LastStarted,
    PeerDataEnded,
    RankFailed,
    RunReady,
    ScriptEnded,
    StepReached,
    StepsGranted,
    StopRequested,
    Welcome,
)
from actorflow.distributed.rank_waits import pack_waits


def joined(num_ranks):
    agreement = CoordinatorState(num_ranks)
    for rank in range(num_ranks):
        assert agreement.on_message(rank, Hello()) == [(rank, Welcome(num_ranks))]
    return agreement


def begun(num_ranks, first=0):
    agreement = joined(num_ranks)
    for rank in range(num_ranks):
        told = agreement.on_message(rank, RunReady(1, first))
    granted = StepsGranted(1, first + WINDOW_STEPS, False, "")
    assert told == [(rank, granted) for rank in range(num_ranks)]
    return agreement


# Any order


SCRIPT = st.lists(
    st.one_of(
        st.sampled_from([Meet("plan"), Meet("data")]),
        st.builds(
            Train,
            st.integers(0, 9),
            st.integers(0, 3),
            stop_before=st.none() | st.integers(1, 9),
            checkpoint_before=st.none() | st.integers(1, 9),
            holds=st.booleans(),
        ),
    ),
    max_size=4,
)


@settings(max_examples=tiers.examples(200), deadline=None)
@given(st.integers(2, 4), SCRIPT, st.randoms(use_true_random=False), st.integers(1, 3))
def test_ranks_that_do_the_same_come_to_the_same_end(num_ranks, script, random, copies):
    play = play_on(Play([script] * num_ranks, copies=copies), random.choice)
    assert play.agreement.failure is None
    assert all([rank.has_left for rank in play.ranks])
    logs = [[row for row in rank.log if row[0] != "checkpoint"] for rank in play.ranks]
    assert all([log == logs[0] for log in logs])
    # A checkpoint beyond the end may be told to a rank that has ended already.
    ends = {row[1]: row[2] for row in logs[0] if row[0] == "trained"}
    marks = [
        [r for r in rank.log if r[0] == "checkpoint" and r[2] <= ends[r[1]]] for rank in play.ranks
    ]
    assert all([mark == marks[0] for mark in marks])


@settings(max_examples=tiers.examples(200), deadline=None)
@given(st.integers(2, 4), SCRIPT, st.randoms(use_true_random=False), st.integers(0, 60))
def test_a_rank_that_dies_at_any_point_ends_the_others_with_its_name(
    num_ranks, script, random, moves
):
    play = Play([script] * num_ranks)
    victim = random.randrange(num_ranks)
    for _ in range(moves):
        if possible := play.moves():
            play.make(random.choice(possible))
    play.kill(victim)
    play_on(play, random.choice)
    assert play.agreement.failure.rank == victim
    for rank in play.ranks:
        if not (rank.is_dead or rank.has_left):
            assert rank.aborted.rank == victim
            assert rank.aborted.text == f"rank {victim} was ended by SIGKILL"


@settings(max_examples=tiers.examples(200), deadline=None)
@given(SCRIPT, SCRIPT, st.randoms(use_true_random=False))
def test_ranks_that_do_different_things_never_wait_for_ever(ours, theirs, random):
    play = play_on(Play([ours, theirs]), random.choice)
    if play.agreement.failure is None:
        # Nobody may be left waiting, but for a meeting or a run that its deadline ends.
        stuck = [r for r in play.ranks if not r.has_left]
        assert len(stuck) in (0, 2)
        if stuck:
            assert {type(r.doing) for r in stuck} == {Meet, Train}
        else:
            assert [row for row in play.ranks[0].log if row[0] == "trained"] == [
                row for row in play.ranks[1].log if row[0] == "trained"
            ]
    else:
        for rank in play.ranks:
            assert rank.has_left or rank.aborted is not None


def states_of(play):
    """Return what tells two plays apart."""
    ranks = [repr(r) for r in play.ranks]
    agreement = play.agreement
    return repr((ranks, {k: v for k, v in vars(agreement).items() if k != "num_ranks"}))


def every_end(scripts, **options):
    """Return the plays that all orders of moves end in, each state visited once."""
    seen, ends, open_ = set(), [], [Play(scripts, **options)]
    while open_:
        play = open_.pop()
        moves = play.moves()
        if not moves:
            ends.append(play)
        for move in moves:
            after = copy.deepcopy(play)
            after.make(move)
            key = states_of(after)
            if key not in seen:
                seen.add(key)
                open_.append(after)
    return ends


@pytest.mark.parametrize(
    "script",
    [
        (Meet("plan"), Meet("data")),
        (Train(1),),
        (Meet("plan"), Train(0)),
    ],
)
def test_every_order_of_two_ranks_comes_to_one_end(script):
    ends = every_end([script, script])
    assert {repr([r.log for r in play.ranks]) for play in ends} == {
        repr([r.log for r in ends[0].ranks])
    }
    assert all([play.agreement.failure is None for play in ends])
    assert all([r.has_left for play in ends for r in play.ranks])


@pytest.mark.parametrize(
    ("asks", "steps"),
    [(Train(3, stop_before=3), {2, 3}), (Train(2, checkpoint_before=2), {3})],
)
def test_every_order_of_a_stop_or_a_checkpoint_is_one_step_on_both_ranks(asks, steps):
    ends = every_end([(asks,), (Train(asks.steps),)], window_steps=2)
    assert all([play.ranks[0].log == play.ranks[1].log for play in ends])
    assert all([play.agreement.failure is None for play in ends])
    # Another one in other orders, but the same on both.
    assert {play.ranks[0].log[0][2] for play in ends} == steps


@settings(max_examples=tiers.examples(200), deadline=None)
@given(st.randoms(use_true_random=False), st.booleans(), st.integers(2, 3))
def test_a_stop_for_which_ranks_hold_is_one_step_on_all(random, other, num_ranks):
    scripts = [[Train(9, stop_before=2, holds=True)], *[[Train(9, holds=other)]] * (num_ranks - 1)]
    play = play_on(Play(scripts), random.choice)
    assert play.agreement.failure is None
    assert all([rank.log == play.ranks[0].log for rank in play.ranks])
    assert 1 <= play.ranks[0].log[0][2] < 9


@settings(max_examples=tiers.examples(200), deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.lists(st.none() | st.integers(3, 6), min_size=2, max_size=4),
)
def test_a_stop_while_sources_block_is_one_step_that_no_rank_lacks(random, blocked):
    """Whoever blocks, and wherever the others are: none is beyond the step that all end after."""
    blocked[random.randrange(len(blocked))] = 3
    scripts = [[Train(9, stop_before=2, holds=True, blocks=step)] for step in blocked]
    play = play_on(Play(scripts, copies=random.choice([1, 2])), random.choice)
    assert play.agreement.failure is None
    assert all([rank.has_left for rank in play.ranks])
    assert all([rank.log == play.ranks[0].log for rank in play.ranks])
    assert play.ranks[0].log[0][2] <= 2


def test_every_order_of_a_stop_while_a_source_blocks_ends_both_ranks():
    scripts = [(Train(3, stop_before=1, holds=True),), (Train(3, blocks=2),)]
    ends = every_end(scripts, window_steps=2)
    assert all([play.agreement.failure is None for play in ends])
    assert all([play.ranks[0].log == play.ranks[1].log for play in ends])
    assert all([rank.has_left for play in ends for rank in play.ranks])
    # With a cut, and where the stop came before anybody had begun the step that never comes.
    assert {any(rank.given_up for rank in play.ranks) for play in ends} == {True, False}


def test_every_order_of_two_ranks_finds_data_of_another_length():
    ends = every_end([(Train(0),), (Train(1),)])
    assert {play.agreement.failure.rank for play in ends} == {0}


def test_every_order_of_two_ranks_finds_another_meeting():
    for play in every_end([(Meet("plan"),), (Meet("data"),)]):
        assert " to plan" in play.agreement.failure.told
        assert " to data" in play.agreement.failure.told
        assert all([r.aborted is not None for r in play.ranks])


# Meetings


def test_all_get_the_values_of_all_when_the_last_has_come():
    agreement = joined(3)
    assert agreement.on_message(2, GatherEntered(1, "plan", b"c")) == []
    assert agreement.on_message(0, GatherEntered(1, "plan", b"a")) == []
    assert agreement.meeting() == ("plan", (1,))
    met = GatherDone(1, (b"a", b"b", b"c"))
    assert agreement.on_message(1, GatherEntered(1, "plan", b"b")) == [(0, met), (1, met), (2, met)]
    assert agreement.meeting() == ("", ())


def test_ranks_may_come_to_a_meeting_from_lines_of_their_own():
    agreement, compiling = joined(2), "compile job 'train'"
    agreement.on_message(0, GatherEntered(1, compiling, b"a", "train.py:4"))
    told = agreement.on_message(1, GatherEntered(1, compiling, b"b", "train.py:7"))
    assert told == [(0, GatherDone(1, (b"a", b"b"))), (1, GatherDone(1, (b"a", b"b")))]
    agreement.on_message(0, GatherEntered(2, compiling, b"a", "train.py:4"))
    told = agreement.on_message(1, ScriptEnded())
    assert told[-1][1].text == (
        "rank 1 has ended its script, where rank 0 waits for it to compile job 'train' (train.py:4)"
    )


def test_a_rank_that_has_left_is_missed_by_who_waits_or_comes_later():
    for order in ([0, 1], [1, 0]):
        agreement = joined(2)
        said = {0: GatherEntered(1, "plan", b""), 1: ScriptEnded()}
        for rank in order:
            told = agreement.on_message(rank, said[rank])
        text = "rank 1 has ended its script, where rank 0 waits for it to plan"
        assert told[-1] == (0, Aborted(1, text, "", ""))


def test_a_wait_in_vain_names_who_did_not_come_and_one_that_is_over_is_nothing():
    agreement = joined(3)
    agreement.on_message(0, GatherEntered(1, "plan", b""))
    asked = GatherTimedOut(1, 600, False)
    assert agreement.on_message(0, asked) == [(0, asked)], "the coordinator is awake"
    told = agreement.on_message(0, GatherTimedOut(1, 600, True))
    assert told[0][1].text.startswith(
        "rank 1 did not arrive within 600 s where rank 0 waits for ranks 1, 2 to plan: it hangs"
    )
    agreement = joined(1)
    agreement.on_message(0, GatherEntered(1, "plan", b""))
    assert agreement.on_message(0, GatherTimedOut(1, 600, False)) == []
    assert agreement.on_message(0, GatherTimedOut(1, 600, True)) == []


def test_a_meeting_out_of_turn_is_a_failure():
    told = joined(2).on_message(1, GatherEntered(3, "plan", b""))
    assert told[0][1].text == "rank 1 wants to plan out of turn"


# Runs


def test_a_run_begins_when_all_are_ready_and_goes_on_by_windows():
    agreement = begun(2, first=10)
    assert agreement.on_message(0, StepReached(1, 14)) == []
    assert agreement.on_message(1, StepReached(1, 11)) == []
    assert agreement.on_message(1, StepReached(1, 12)) == [
        (0, StepsGranted(1, 12 + WINDOW_STEPS, False, "")),
        (1, StepsGranted(1, 12 + WINDOW_STEPS, False, "")),
    ]
    assert agreement.on_message(1, StepReached(1, 11)) == []


def test_the_first_rank_is_told_with_a_grant_how_long_all_have_waited():
    agreement = begun(2)
    grant = StepsGranted(1, 2 + WINDOW_STEPS, False, "")
    assert agreement.on_message(0, StepReached(1, 2, 700)) == []
    assert agreement.on_message(1, StepReached(1, 2, 50)) == [
        (0, replace(grant, waits=pack_waits((700, 50)))),
        (1, grant),
    ]
    assert agreement.on_message(0, StepReached(1, 4, 800)) == []
    assert agreement.on_message(1, StepReached(1, 1, 40)) == []  # an older one, which came late
    assert agreement.on_message(1, StepReached(1, 4, 90))[0] == (
        0,
        StepsGranted(1, 4 + WINDOW_STEPS, False, "", pack_waits((800, 90))),
    )


def test_a_stop_is_at_the_largest_total_that_was_granted():
    agreement = begun(2)
    agreement.on_message(0, StepReached(1, 3))
    last = StepsGranted(1, WINDOW_STEPS, True, "SIGINT")
    assert agreement.on_message(1, StopRequested(1, "SIGINT")) == [(0, last), (1, last)]
    assert agreement.on_message(0, StopRequested(1, "SIGTERM")) == []
    assert (
        agreement.on_message(0, StepReached(1, 4))
        == agreement.on_message(1, StepReached(1, 4))
        == []
    )


@pytest.mark.parametrize("is_late", [False, True])
def test_a_rank_that_holds_after_its_data_ended_is_told_where_the_run_ends(is_late):
    agreement = begun(2)
    agreement.on_message(0, StopRequested(1, "asked"))
    agreement.on_message(0, DataEnded(1, 2))
    told = [] if is_late else agreement.on_message(0, LastStarted(1, 2))
    told += agreement.on_message(1, DataEnded(1, 2))
    if is_late:  # the other one has ended meanwhile
        told += agreement.on_message(0, LastStarted(1, 2))
    assert (0, EndAt(1, 2)) in told


def test_a_stop_for_which_a_rank_holds_is_at_the_last_step_that_any_has_begun():
    agreement = begun(2)
    agreement.on_message(0, StopRequested(1, "SIGINT"))
    assert agreement.on_message(1, LastStarted(1, 1)) == [(0, HoldRequested(1))]
    assert agreement.on_message(0, LastStarted(1, 3)) == [(0, EndAt(1, 3)), (1, EndAt(1, 3))]
    assert agreement.on_message(0, LastStarted(1, 3)) == []


def test_ranks_that_give_up_their_data_end_after_the_last_step_of_which_all_have_it():
    agreement = begun(3)
    assert agreement.on_message(1, DataGivenUp(1, 2)) == []  # nobody asked for a stop
    agreement.on_message(0, StopRequested(1, "SIGTERM"))
    for rank, step in enumerate((3, 2, 1)):
        told = agreement.on_message(rank, LastStarted(1, step))
    assert told == [(rank, EndAt(1, 3)) for rank in range(3)]
    assert agreement.on_message(1, DataGivenUp(1, 2)) == [(0, GiveUpData(1)), (2, GiveUpData(1))]
    assert agreement.on_message(1, DataGivenUp(1, 2)) == []
    assert agreement.on_message(0, DataEnded(1, 3)) == [
        (1, PeerDataEnded(1, 3)),
        (2, PeerDataEnded(1, 3)),
    ]
    assert agreement.on_message(0, DataGivenUp(1, 3)) == []
    assert agreement.on_message(2, DataGivenUp(1, 2)) == [(rank, CutAt(1, 2)) for rank in range(3)]
    for rank in range(3):
        agreement.on_message(rank, DataEnded(1, 2))
    assert agreement.failure is None
    assert agreement.on_message(0, ScriptEnded()) == [(0, Ack())]


def test_one_that_was_given_another_batch_is_told_with_the_other_and_the_mend():
    agreement = begun(3)
    for rank in (2, 0):
        assert agreement.on_message(rank, BatchDigest(1, 1, 5, "train.py:4")) == []
        assert agreement.on_message(rank, BatchDigest(1, 2, 6, "train.py:4")) == []
    agreement.on_message(1, BatchDigest(1, 2, 6, "train.py:4"))
    agreement.on_message(1, BatchDigest(1, 1, 7, "train.py:4"))
    assert agreement.failure.told == (
        "rank 2 was given another batch for step 1 (train.py:4) than rank 1: every rank gives the"
        " whole batch of all ranks, of which each takes its part. Do not shard the data, nor draw"
        " or shuffle it by RANK: the same batches, from the same seed, on all ranks"
    )


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (
            [5, 0],
            "rank 0 wrote to the variables of the job before step 3 (x.py:0), which rank 1 did",
        ),
        (
            [0, 5],
            "rank 1 wrote to the variables of the job before step 3 (x.py:1), which rank 0 did",
        ),
        (
            [5, 6],
            "rank 1 wrote to the variables of the job before step 3 (x.py:1), other values than",
        ),
    ],
)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_ranks_that_write_apart_are_told_in_any_order_of_messages(written, told, order):
    agreement = begun(2)
    for rank in order:
        agreement.on_message(rank, BatchDigest(1, 2, 9, "", 4, "x.py:2"))
    assert agreement.failure is None
    for rank in order:
        agreement.on_message(rank, BatchDigest(1, 3, 9, "", written[rank], f"x.py:{rank}"))
    assert agreement.failure.told.startswith(told)
    assert agreement.failure.told.endswith("the same values on all ranks, before the same step")


def test_batches_of_long_ago_are_forgotten():
    agreement = begun(2)
    for step in range(1, 500):
        for rank in (0, 1):
            agreement.on_message(rank, BatchDigest(1, step, step, ""))
    assert len(agreement._runs[1].given) == MOST_DIGESTS


def test_a_stop_before_the_run_begins_ends_it_with_no_step():
    agreement = joined(2)
    agreement.on_message(0, RunReady(1, 7))
    assert agreement.on_message(0, StopRequested(1, "SIGINT")) == []
    last = StepsGranted(1, 7, True, "SIGINT")
    assert agreement.on_message(1, RunReady(1, 7)) == [(0, last), (1, last)]


def test_a_checkpoint_is_after_the_first_step_that_nobody_may_have_begun():
    agreement = begun(2)
    step = CheckpointAt(1, WINDOW_STEPS + 1)
    assert agreement.on_message(1, CheckpointRequested(1)) == [(0, step), (1, step)]
    assert agreement.on_message(0, CheckpointRequested(1)) == []
    for done in range(1, WINDOW_STEPS + 2):
        agreement.on_message(0, StepReached(1, done))
        told = agreement.on_message(1, StepReached(1, done))
    granted = max([m.steps for _, m in told if isinstance(m, StepsGranted)], default=0) or 8
    later = agreement.on_message(1, CheckpointRequested(1))
    assert later[0][1].step > granted - 1 > WINDOW_STEPS


def test_ranks_that_begin_at_different_steps_are_told_both():
    agreement = joined(2)
    agreement.on_message(1, RunReady(1, 40))
    told = agreement.on_message(0, RunReady(1, 30))
    assert told[0][1].text == (
        "rank 1 would train on after step 40, rank 0 after step 30; give all ranks the same"
        " checkpoint and model"
    )


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_data_that_ends_at_different_steps_is_told_with_both(order):
    for said in (DataEnded(1, 3), DataRemains(1, 3)):
        agreement = begun(2)
        messages = {0: DataEnded(1, 2), 1: said}
        for rank in order:
            agreement.on_message(rank, messages[rank])
        what = "after step 3" if isinstance(said, DataEnded) else "not before step 3"
        assert agreement.failure.told == (
            f"rank 0 ended after step 2, rank 1 {what}: the data of all ranks must have the same"
            " number of batches"
        )


def test_data_that_one_rank_ends_by_itself_is_told_with_what_ended_it():
    agreement = begun(2)
    agreement.on_message(0, StepReached(1, 3))
    agreement.on_message(1, DataEnded(1, 2, "StopTraining in the data source (late)"))
    assert agreement.failure.told == (
        "rank 1 ended after step 2 by StopTraining in the data source (late), rank 0 not before"
        " step 3: others have begun steps that need its data. Raise StopTraining in on_step, which"
        " ends all ranks after one and the same step, or in the data of all at the same batch"
    )


def test_a_rank_may_leave_after_its_own_end_and_not_before():
    agreement = begun(2)
    agreement.on_message(0, DataEnded(1, 2))
    assert agreement.on_message(0, ScriptEnded()) == [(0, Ack())]
    assert agreement.on_message(1, DataEnded(1, 2)) == []
    agreement = begun(2)
    told = agreement.on_message(0, ScriptEnded())
    assert told[-1] == (
        1,
        Aborted(0, "rank 0 ended its script while the other ranks train", "", ""),
    )


def test_late_copies_of_what_was_said_in_a_run_that_is_over_say_nothing():
    agreement = begun(2)
    for rank in (0, 1):
        agreement.on_message(rank, DataEnded(1, 2))
    for copy_ in (
        RunReady(1, 0),
        StepReached(1, 2),
        StopRequested(1, ""),
        DataEnded(1, 2),
        DataRemains(1, 2),
    ):
        assert agreement.on_message(0, copy_) == []
    assert agreement.on_message(1, ScriptEnded()) == [(1, Ack())]
    assert agreement.failure is None


# Failures


def test_the_first_failure_counts_and_names_op_and_line():
    agreement = begun(3)
    told = agreement.on_message(
        2, RankFailed(2, "no such file", "linear", "train.py:4", "Traceback ...")
    )
    text = "rank 2 failed in linear (train.py:4): no such file"
    abort = Aborted(2, text, "linear", "train.py:4")
    assert told == [(2, Ack()), (0, abort), (1, abort), (2, abort)]
    assert agreement.failure.shown == "Traceback ..."
    assert agreement.on_message(2, RankFailed(2, "late", "", "", "late")) == [(2, Ack())]
    assert agreement.failure.shown == "Traceback ..."
    assert agreement.on_message(1, RankFailed(1, "peer failed", "", "", "")) == [(1, Ack())]
    assert agreement.on_process_exit(0, "was ended by SIGKILL") == []
    assert agreement.failure.rank == 2


def test_a_rank_may_tell_of_another_whose_fault_it_is():
    agreement = joined(3)
    agreement.on_message(0, RankFailed(1, "rank 1 did not come", "all_reduce", "", ""))
    assert agreement.failure.rank == 1
    text = "rank 1 failed in all_reduce, says rank 0: rank 1 did not come"
    assert agreement.failure.told == text
    agreement = joined(2)
    agreement.on_message(0, RankFailed(9, "of nobody", "", "", ""))
    assert agreement.failure.told == "rank 0 failed: of nobody"


def test_what_a_rank_says_of_itself_counts_more_than_what_others_said_of_it():
    agreement = joined(3)
    agreement.on_message(0, RankFailed(1, "rank 1 did not come", "all_reduce", "", "shown by 0"))
    assert agreement.on_message(2, RankFailed(2, "of its own", "", "", "")) == [(2, Ack())]
    assert agreement.failure.shown == "shown by 0"
    assert agreement.on_message(1, RankFailed(1, "no such file", "", "", "")) == [(1, Ack())]
    assert agreement.failure.told == "rank 1 failed: no such file"
    agreement.on_message(1, RankFailed(1, "no such file", "", "", "Traceback"))
    assert agreement.failure.shown == "Traceback"
    agreement = joined(2)
    agreement.on_message(0, RankFailed(1, "rank 1 did not come", "", "", ""))
    assert agreement.on_process_exit(0, "was ended by SIGSEGV", explains=True) == []
    assert agreement.on_process_exit(1, "ended with exit status 1") == []
    assert agreement.failure.is_hearsay
    assert agreement.on_process_exit(1, "was ended by SIGKILL", explains=True) == []
    assert agreement.failure.told == "rank 1 was ended by SIGKILL"


def test_a_rank_that_is_said_to_have_given_up_says_because_of_whom():
    agreement = joined(3)
    agreement.on_message(2, RankFailed(0, "rank 0 aborted the run", "", "", ""))
    agreement.on_message(0, RankFailed(1, "rank 1 did not come", "", "", ""))
    assert agreement.failure.told == "rank 1 failed, says rank 0: rank 1 did not come"
    agreement.on_message(1, RankFailed(1, "boom", "", "", ""))
    assert agreement.failure.told == "rank 1 failed: boom"


def test_who_comes_after_a_failure_hears_of_it():
    agreement = CoordinatorState(2)
    assert agreement.on_process_exit(0, "was ended by SIGKILL") == []
    _, aborted = agreement.on_message(1, Hello())
    assert aborted == (1, Aborted(0, "rank 0 was ended by SIGKILL", "", ""))
    assert agreement.on_message(1, GatherEntered(1, "plan", b"")) == []


@settings(max_examples=tiers.examples(100), deadline=None)
@given(st.data())
def test_statements_in_any_order_and_number_never_break_it(data):
    """Even what no honest rank says keeps one promise: no rank is told of two last steps."""
    number, step = st.integers(1, 3), st.integers(0, 12)
    said = st.one_of(
        st.builds(Hello),
        st.builds(GatherEntered, number, st.sampled_from(["a", "b"]), st.just(b"")),
        st.builds(GatherTimedOut, number, st.just(1), st.booleans()),
        st.builds(RunReady, number, st.integers(0, 1)),
        st.builds(StepReached, number, step),
        st.builds(StopRequested, number, st.just("")),
        st.builds(CheckpointRequested, number),
        st.builds(DataEnded, number, step),
        st.builds(DataRemains, number, step),
        st.builds(ScriptEnded),
    )
    agreement, last, granted = CoordinatorState(2), {}, {}
    for rank, message in data.draw(st.lists(st.tuples(st.integers(0, 1), said), max_size=40)):
        for to, told in agreement.on_message(rank, message):
            if isinstance(told, StepsGranted):
                assert (to, told.run) not in last
                assert told.steps >= granted.get((to, told.run), 0)
                granted[to, told.run] = told.steps
                if told.is_last:
                    last[to, told.run] = told.steps


def test_a_play_is_the_same_again():
    scripts = [(Meet("plan"), Train(5, stop_before=3), Meet("end"))] * 3
    plays = [play_on(Play(scripts), Random(5).choice) for _ in range(2)]
    assert plays[0].ranks == plays[1].ranks
