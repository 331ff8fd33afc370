from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.memory_instances import graph_like
from memory.offsets import plan_offsets
from memory.packing import WorkBudget, make_instance, pack_by_sweeps
from memory.repair import repair

buffers = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 20), st.integers(1, 300)), min_size=1, max_size=40
)


def instance_of(rows):
    lower, length, size = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return make_instance(lower, lower + length, size)


def overlaps(instance, offsets):
    """Whether any two buffers share a section and a byte, by comparing all pairs."""
    lower, upper, ends = instance.lower, instance.upper, offsets + instance.size
    for i in range(ends.size):
        meets = (lower < upper[i]) & (upper > lower[i]) & (offsets < ends[i]) & (ends > offsets[i])
        if meets.sum() > 1:
            return True
    return False


def pipeline(num_batches, num_ops, seed, warm_up=3):
    """A stage that runs one forward and one backward in turns: an output lives until its backward.

    The backward of an op has a gradient, which the next one reads, and some ops have scratch.
    """
    rng = Random(seed)
    ops = [(rng.choice((1, 2, 3)), rng.choice((0, 0, 20, 30))) for _ in range(num_ops)]
    forward = [b if b < warm_up else 2 * b - warm_up + 1 for b in range(num_batches)]
    backward = [warm_up + 2 * b - max(0, b - (num_batches - warm_up)) for b in range(num_batches)]
    rows = []
    for b in range(num_batches):
        for i, (size, scratch) in enumerate(ops):
            run, back = forward[b] * num_ops + i, (backward[b] + 1) * num_ops - 1 - i
            rows += [(run, back + 1 - run, size), (back, 2, size)]
            rows += [(run, 1, scratch), (back, 1, 2 * scratch)] if scratch else []
    return rows


@given(buffers, st.integers(0, 400_000))
def test_a_repaired_packing_shares_no_byte_and_is_never_worse(rows, limit):
    instance = instance_of(rows)
    swept = pack_by_sweeps(instance, 0)
    repaired = repair(instance, swept.offsets, swept, instance.bound, WorkBudget(limit))
    assert not overlaps(instance, repaired.offsets)
    assert repaired.offsets.min() >= 0
    assert repaired.peak == (repaired.offsets + instance.size).max() <= swept.peak


@given(buffers)
def test_equal_packings_are_repaired_alike(rows):
    instance = instance_of(rows)
    swept = pack_by_sweeps(instance, 0)
    budgets = (WorkBudget(100_000), WorkBudget(100_000))
    first, second = (repair(instance, swept.offsets, swept, 0, budget) for budget in budgets)
    assert first.offsets.tolist() == second.offsets.tolist()


@given(buffers)
def test_any_packing_can_be_repaired_below_one_that_is_better(rows):
    """Of buffers on top of each other, what is left is at most as high as a sweep's packing."""
    instance = instance_of(rows)
    tower = np.cumsum(instance.size) - instance.size
    swept = pack_by_sweeps(instance, 0)
    repaired = repair(instance, tower, swept, instance.bound, WorkBudget(300_000))
    assert repaired is swept or repaired.peak < swept.peak
    assert not overlaps(instance, repaired.offsets)


def test_a_packing_that_meets_the_target_is_returned_as_it_is():
    instance = instance_of(pipeline(4, 6, 0))
    swept = pack_by_sweeps(instance, 0)
    work = WorkBudget(1_000_000)
    assert repair(instance, swept.offsets, swept, swept.peak, work) is swept
    assert work.done == 0


def test_without_work_the_packing_is_returned_as_it_is():
    instance = instance_of(pipeline(4, 6, 0))
    swept = pack_by_sweeps(instance, 0)
    assert repair(instance, swept.offsets, swept, 0, WorkBudget(0)) is swept


def test_most_of_what_sweeps_leave_of_pipelines_is_repaired():
    left = {}
    for seed in range(8):
        instance = instance_of(pipeline(12, 12, seed))
        swept = pack_by_sweeps(instance, instance.bound)
        repaired = repair(instance, swept.offsets, swept, instance.bound, WorkBudget(10_000_000))
        assert not overlaps(instance, repaired.offsets)
        left[seed] = (swept.peak - instance.bound, repaired.peak - instance.bound)
    swept_gap, repaired_gap = (sum(gaps) for gaps in zip(*left.values(), strict=True))
    assert repaired_gap * 2 < swept_gap


def test_offsets_stay_multiples_of_what_all_sizes_are():
    rows = [(at, length, 64 * size) for at, length, size in pipeline(12, 12, 1)]
    instance = instance_of(rows)
    swept = pack_by_sweeps(instance, 0)
    repaired = repair(instance, swept.offsets, swept, instance.bound + 7, WorkBudget(10_000_000))
    assert repaired.algorithm == "repair"
    assert (repaired.offsets % 64 == 0).all()


@pytest.mark.parametrize("size", [800, 1500])
def test_pipelines_that_branch_and_bound_does_not_solve_are_repaired_down_to_the_bound(size):
    _, stage = graph_like((size,))
    plan = plan_offsets(stage.lower, stage.upper, stage.size, alignment=1)
    assert (plan.algorithm, plan.gap) == ("repair", 0.0)


def test_what_is_too_large_for_branch_and_bound_is_repaired():
    _, stage = graph_like((6500,))
    plan = plan_offsets(stage.lower, stage.upper, stage.size, alignment=1)
    without = plan_offsets(stage.lower, stage.upper, stage.size, alignment=1, max_work=0)
    assert (plan.algorithm, plan.nodes) == ("repair", 0)
    assert without.algorithm.startswith("first-fit")
    assert plan.peak_bytes < without.peak_bytes
