"""What a rank's end of the wire sends."""

from actorflow.distributed.member import shortened
from actorflow.distributed.messages import EndsAfter, Reached


def test_of_steps_of_one_run_the_last_is_sent_and_of_several_runs_one_of_each():
    said = [Reached(1, 2), Reached(1, 3), Reached(2, 9), Reached(1, 4), Reached(1, 5)]
    assert shortened(said) == [Reached(1, 3), Reached(2, 9), Reached(1, 5)]
    assert shortened([Reached(1, 2), EndsAfter(1, 2), Reached(2, 1)]) == [
        Reached(1, 2), EndsAfter(1, 2), Reached(2, 1),
    ]  # fmt: skip
    assert shortened([]) == []
