from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packings import has_packing, is_packing, tight_instance

from benchmarks.memory_instances import cut_rectangle
from memory.dissection import dissect
from memory.offsets import plan_offsets
from memory.packing import WorkBudget, make_instance


def dissected(rows, limit=20_000):
    lower, upper, size = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    offsets = dissect(make_instance(lower, upper, size), WorkBudget(limit))
    return None if offsets is None else offsets.tolist()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_buffers", [20, 60, 100, 200])
def test_perfect_packings_are_found(num_buffers, seed):
    rows, height = cut_rectangle(num_buffers, Random(seed))
    assert is_packing(rows, dissected(rows), height)


@pytest.mark.parametrize("seed", [0, 3, 16, 20])
def test_perfect_packings_of_400_buffers_are_planned_at_their_bound(seed):
    rows, height = cut_rectangle(400, Random(seed))
    plan = plan_offsets(*zip(*rows, strict=True), alignment=1)
    assert (plan.algorithm, plan.peak_bytes) == ("dissection", height)
    assert is_packing(rows, plan.offsets, height)


@given(st.integers(0, 100_000))
def test_what_is_found_is_a_packing_and_nothing_is_found_where_there_is_none(seed):
    rng = Random(seed)
    capacity = rng.randint(5, 9)
    rows = tight_instance(rng.randint(2, 8), capacity, rng)
    offsets = dissected(rows, 2000)
    if offsets is not None:
        assert is_packing(rows, offsets, capacity)
    elif len(rows) <= 12:
        # None proves nothing, but small instances with a packing have one that is found.
        assert not has_packing(rows, capacity)


def test_equal_instances_are_dissected_alike():
    rows, _ = cut_rectangle(200, Random(2))
    assert dissected(rows) == dissected(rows)


def test_an_instance_with_free_bytes_is_left_alone():
    assert dissected([(0, 1, 3), (0, 2, 1), (1, 2, 1)]) is None


def test_without_work_nothing_is_found():
    rows, _ = cut_rectangle(60, Random(0))
    assert dissected(rows, 0) is None


def test_more_buffers_live_at_once_than_a_tree_may_hold_are_left_alone():
    assert dissected([(s, s + 1, 1) for s in range(2) for _ in range(301)]) is None
