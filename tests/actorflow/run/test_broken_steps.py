"""The note of the step that ended a run, in the directory of the run."""

import pytest

from actorflow.run.broken_steps import NonFiniteLoss, NonFiniteMonitor

AGAIN = "as in an earlier run in this directory"


def ended(broken):
    with pytest.raises(NonFiniteLoss) as caught:
        broken.see(5, {"loss": float("inf")})
    return str(caught.value)


def test_the_note_that_another_rank_of_this_run_writes_is_of_no_run_before(tmp_path):
    def broken(**options):
        return NonFiniteMonitor("raise", {"loss": "a.py:1"}, print, directory=tmp_path, **options)

    first, other = broken(), broken(is_writer=False)
    assert AGAIN not in ended(first)
    assert AGAIN not in ended(other)
    assert AGAIN in ended(broken())
    assert AGAIN in ended(broken(is_writer=False))


def test_a_rank_that_is_no_writer_leaves_no_note(tmp_path):
    ended(NonFiniteMonitor("raise", {"loss": ""}, print, directory=tmp_path, is_writer=False))
    assert list(tmp_path.iterdir()) == []
