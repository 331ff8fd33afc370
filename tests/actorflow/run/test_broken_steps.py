"""The note of the step that ended a run, in the directory of the run."""

import pytest

from actorflow.run.broken_steps import NonFiniteLoss, NonFiniteMonitor, ended_at

AGAIN = "as in an earlier run in this directory"


def ended(broken):
    with pytest.raises(NonFiniteLoss) as caught:
        broken.see(5, {"loss": float("inf")})
    return str(caught.value)


def test_the_note_that_another_rank_of_this_run_writes_is_of_no_run_before(tmp_path):
    def broken():
        return NonFiniteMonitor("raise", {"loss": "a.py:1"}, print, directory=tmp_path)

    first, other = broken(), broken()
    assert AGAIN not in ended(first)
    assert AGAIN not in ended(other)
    assert AGAIN in ended(broken())


def test_a_rank_notes_the_step_whichever_rank_it_is(tmp_path):
    # The first rank that raises ends the others, which may not have come to the step.
    run_first, ended_first = (
        NonFiniteMonitor("raise", {"loss": ""}, print, directory=tmp_path) for _ in range(2)
    )
    run_first.see(4, {"loss": 1.0})
    ended(ended_first)
    assert [path.name for path in tmp_path.iterdir()] == ["non_finite.json"]
    assert ended_at(tmp_path) == 5
