from random import Random

import numpy as np
import pytest
from problems import check_sequence, live_bytes_by_step, random_problem

from memory.recompute.schedule import RecomputeSchedule


def expected_live(schedule):
    """The most bytes of each slot by simulating the whole sequence."""
    sequence = schedule.sequence
    check_sequence(schedule.problem, sequence)
    starts = np.cumsum([0] + [len(group) + 1 for group in schedule.groups])[:-1]
    return np.maximum.reduceat(live_bytes_by_step(schedule.problem, sequence), starts).tolist()


@pytest.mark.parametrize("seed", range(150))
def test_the_bytes_after_any_edits_equal_a_simulation_from_scratch(seed):
    rng = Random(seed)
    problem = random_problem(rng, rng.randint(2, 8))
    schedule = RecomputeSchedule(problem)
    added = []
    for _ in range(rng.randint(1, 14)):
        if added and rng.random() < 0.4:
            schedule.remove(*added.pop(rng.randrange(len(added))))
        else:
            slot = rng.randrange(1, len(problem.ops))
            op = rng.randrange(min(slot, problem.num_forward))
            if op not in schedule.groups[slot]:
                schedule.add(op, slot)
                added.append((op, slot))
        if rng.random() < 0.5:
            schedule.settle()
            assert schedule.live.tolist() == expected_live(schedule)
    schedule.settle()
    assert schedule.live.tolist() == expected_live(schedule)
    assert schedule.duration == sum(problem.ops[i].duration for i in schedule.sequence)

    groups = schedule.snapshot()
    other = RecomputeSchedule(problem)
    other.restore(groups)
    assert (other.live.tolist(), other.sequence) == (schedule.live.tolist(), schedule.sequence)
    schedule.restore(())
    assert schedule.live.tolist() == RecomputeSchedule(problem).live.tolist()
    assert schedule.sequence == problem.store_all
