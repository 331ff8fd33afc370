"""What a rank's end of the wire sends."""

from actorflow.distributed.member import shortened
from actorflow.distributed.messages import DataEnded, StepReached


def test_of_steps_of_one_run_the_last_is_sent_and_of_several_runs_one_of_each():
    said = [
        StepReached(1, 2),
        StepReached(1, 3),
        StepReached(2, 9),
        StepReached(1, 4),
        StepReached(1, 5),
    ]
    assert shortened(said) == [StepReached(1, 3), StepReached(2, 9), StepReached(1, 5)]
    assert shortened([StepReached(1, 2), DataEnded(1, 2), StepReached(2, 1)]) == [
        StepReached(1, 2), DataEnded(1, 2), StepReached(2, 1),
    ]  # fmt: skip
    assert shortened([]) == []
