"""Votes on checkpoints, as the coordinator passes them on: any order, repeated, amid a failure."""

from itertools import permutations
from random import Random

import pytest

from actorflow.distributed.agreement import CoordinatorState
from actorflow.distributed.messages import (
    Aborted,
    CheckpointBegun,
    CheckpointEnded,
    CheckpointTimedOut,
    CheckpointVote,
    CheckpointVotes,
    DataEnded,
    Hello,
    RankFailed,
    RunReady,
)

BEGUN = CheckpointBegun(1, 4, "a" * 32)
ENDED = CheckpointEnded(1, 4, True, 0, "")


def begun(num_ranks=3):
    """Return an agreement whose ranks are on one run."""
    state = CoordinatorState(num_ranks)
    for rank in range(num_ranks):
        state.on_message(rank, Hello())
        state.on_message(rank, RunReady(1, 0))
    return state


def vote(rank, step=4):
    return rank, CheckpointVote(1, step, b"%d" % rank)


def told(state, messages):
    return [send for message in messages for send in state.on_message(*message)]


def test_what_the_first_rank_begins_and_ends_is_told_to_the_others_once():
    for message in (BEGUN, ENDED):
        state = begun()
        assert told(state, [(0, message)] * 2) == [(1, message), (2, message)]


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_the_first_rank_is_told_all_votes_at_once_in_any_order(order):
    state = begun()
    told(state, [(0, BEGUN)])
    *early, last = [vote(rank) for rank in order for _ in range(2)]
    assert told(state, early) == [(0, CheckpointVotes(1, 4, (b"0", b"1", b"2")))]
    assert told(state, [last, *early]) == [], "a second copy changes nothing"


def test_votes_on_a_step_that_is_over_are_old():
    state = begun()
    told(state, [(0, BEGUN), vote(1), (0, ENDED)])
    assert told(state, [vote(0), vote(1), vote(2)]) == []
    later = [vote(rank, 8) for rank in (2, 0, 1)]
    assert told(state, later) == [(0, CheckpointVotes(1, 8, (b"0", b"1", b"2")))]


def test_a_last_save_outlives_the_data():
    state = begun()
    told(state, [(rank, DataEnded(1, 4)) for rank in range(3)])
    assert told(state, [(0, BEGUN)])
    assert told(state, [vote(rank) for rank in range(3)])
    assert told(state, [(0, ENDED)])


@pytest.mark.parametrize("message", [BEGUN, ENDED])
def test_another_rank_than_the_first_begins_and_ends_nothing(message):
    state = begun()
    assert {type(one) for _, one in told(state, [(2, message)])} == {Aborted}
    assert "which rank 0 alone does" in state.failure.told


def test_a_failure_between_votes_ends_them():
    state = begun()
    told(state, [(0, BEGUN), vote(0), vote(1), (2, RankFailed(2, "a kernel", "", "", ""))])
    assert told(state, [vote(2), (0, ENDED)]) == []


@pytest.mark.parametrize(
    ("said", "who", "blamed"),
    [
        ([(0, BEGUN), vote(0), vote(1)], 0, 2),
        ([(0, BEGUN), vote(1), vote(2)], 2, 0),
        ([], 1, 0),
        ([(0, BEGUN), vote(0), vote(1), vote(2)], 1, 0),
    ],
)
def test_who_is_waited_for_too_long_is_named(said, who, blamed):
    state = begun()
    told(state, said)
    asked = CheckpointTimedOut(1, 4, 600, False)
    assert told(state, [(who, asked)] * 2) == [(who, asked)] * 2, "the coordinator is awake"
    assert state.failure is None
    assert told(state, [(who, CheckpointTimedOut(1, 4, 600, True))])
    assert state.failure.rank == blamed
    assert "did not do its part of the checkpoint of step 4 within 600 s" in state.failure.text


def test_who_is_told_meanwhile_has_waited_for_nobody():
    state = begun()
    told(state, [(0, BEGUN), *[vote(rank) for rank in range(3)]])
    assert told(state, [(0, CheckpointTimedOut(1, 4, 600, True))]) == []
    told(state, [(0, ENDED)])
    assert told(state, [(1, CheckpointTimedOut(1, 4, 600, True))]) == []
    assert state.failure is None


@pytest.mark.parametrize("seed", range(20))
def test_two_saves_come_to_the_same_in_any_order_that_ranks_keep(seed):
    """Each rank's messages keep their order; those of different ranks come in any."""
    random, state = Random(seed), begun()
    queues = {
        rank: [m for step in (4, 8) for m in [CheckpointVote(1, step, b"%d" % step)] * 2]
        for rank in range(3)
    }
    votes = []
    while any(queues.values()):
        rank = random.choice([rank for rank in queues if queues[rank]])
        # Nobody votes on the second step before the first one has ended.
        if queues[rank][0].step == 8 and len(votes) == 0:
            continue
        votes += told(state, [(rank, queues[rank].pop(0))])
    assert votes == [(0, CheckpointVotes(1, step, (b"%d" % step,) * 3)) for step in (4, 8)]
