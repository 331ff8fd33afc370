from random import Random

import numpy as np
import pytest
from problems import random_problem

from memory.recompute.problem import Problem, ProblemOp, check_sequence
from memory.recompute.schedule import RecomputeSchedule
from memory.recompute.simulate import live_bytes_by_step


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
    assert schedule.groups_of(schedule.sequence) == groups
    other = RecomputeSchedule(problem)
    other.restore(groups)
    assert (other.live.tolist(), other.sequence) == (schedule.live.tolist(), schedule.sequence)
    schedule.restore(())
    assert schedule.live.tolist() == RecomputeSchedule(problem).live.tolist()
    assert schedule.sequence == problem.store_all


def test_a_sequence_of_another_form_has_no_groups():
    problem = Problem((ProblemOp((), (0,)), ProblemOp((0,), (1,)), ProblemOp((1,), ())), (1, 1), 2)
    schedule = RecomputeSchedule(problem)
    assert schedule.groups_of((0, 1, 0, 1, 2)) == ((2, (0, 1)),)
    assert schedule.groups_of((0, 1, 1, 1, 2)) is None
    assert schedule.groups_of((1, 0, 2)) is None
    assert schedule.groups_of((0, 1, 2, 1)) is None
