from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packings import has_packing, is_packing, tight_instance

from benchmarks.memory_instances import cut_rectangle
from memory.packing import BufferSets, live_per_section, make_instance
from memory.packing_search import Outcome, PackingRules, search

small = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=8
).map(lambda rows: [(start, start + length, size) for start, length, size in rows])


def run(rows, capacity, under_best, max_nodes=100_000, seed=0):
    """Search in a random preorder; return the result and the offsets by buffer."""
    lower, upper, size = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    instance = make_instance(lower, upper, size)
    order = np.random.default_rng(seed).permutation(size.size)
    terrain = PackingRules(BufferSets.build(instance, order), int(np.gcd.reduce(size)), under_best)
    result = search(terrain, (capacity - live_per_section(instance)).tolist(), max_nodes)
    offsets = np.zeros(size.size, np.int64)
    if result.offsets:
        offsets[order] = result.offsets
    return result, offsets.tolist()


@pytest.mark.parametrize("under_best", [False, True])
@given(small, st.integers(0, 3), st.integers(0, 5))
def test_a_search_finds_a_packing_exactly_where_one_exists(under_best, rows, extra, seed):
    steps = range(12)
    bound = max(sum(z for lo, up, z in rows if lo <= t < up) for t in steps)
    capacity = bound + extra
    result, offsets = run(rows, capacity, under_best, seed=seed)
    assert (result.outcome is Outcome.PACKED) == has_packing(rows, capacity)
    if result.outcome is Outcome.PACKED:
        assert is_packing(rows, offsets, capacity)


INFEASIBLE = (6234, 10114, 21375, 22471, 22786, 27339, 37758, 39895, 41449, 48250, 50281, 50976)
"""Seeds of tight instances without a packing: rare, about one in 3,000."""


@pytest.mark.parametrize("under_best", [False, True])
@pytest.mark.parametrize("seeds", [INFEASIBLE, range(60)], ids=["infeasible", "random"])
def test_a_search_is_right_about_tight_instances(under_best, seeds):
    outcomes = []
    for seed in seeds:
        rng = Random(seed)
        num_sections, capacity = rng.randint(5, 8), rng.randint(5, 9)
        rows = tight_instance(num_sections, capacity, rng)
        if len(rows) <= 15:
            result, offsets = run(rows, capacity, under_best, seed=seed)
            outcomes.append(result.outcome)
            assert (result.outcome is Outcome.PACKED) == has_packing(rows, capacity)
            assert result.outcome is not Outcome.PACKED or is_packing(rows, offsets, capacity)
    wanted = Outcome.EXHAUSTED if seeds is INFEASIBLE else Outcome.PACKED
    assert len(outcomes) > 10
    assert outcomes.count(wanted) == len(outcomes)


@pytest.mark.parametrize("under_best", [False, True])
def test_below_the_live_bytes_there_is_nothing_to_search(under_best):
    result, _ = run([(0, 2, 3), (1, 3, 3)], 5, under_best)
    assert (result.outcome, result.nodes) == (Outcome.EXHAUSTED, 0)


@pytest.mark.parametrize("under_best", [False, True])
def test_a_search_that_runs_out_of_nodes_says_so(under_best):
    rows, height = cut_rectangle(30, Random(3))
    result, _ = run(rows, height, under_best, max_nodes=5)
    assert (result.outcome, result.nodes, result.offsets) == (Outcome.OUT_OF_NODES, 5, ())


@pytest.mark.parametrize("under_best", [False, True])
def test_buffers_of_one_shape_are_not_tried_in_each_order(under_best):
    """Of an instance without a packing, every buffer is cut into four: 24 orders each, untried."""
    rng = Random(10114)
    num_sections, capacity = rng.randint(5, 8), rng.randint(5, 9)
    rows = tight_instance(num_sections, capacity, rng)
    quarters = [row for row in rows for _ in range(2)]
    once, _ = run(rows, capacity, under_best)
    twice, _ = run(quarters, 2 * capacity, under_best)
    assert once.outcome is Outcome.EXHAUSTED
    assert twice.outcome is not Outcome.OUT_OF_NODES
    assert twice.nodes < 3000


def test_a_perfect_packing_of_sixty_buffers_is_found_by_corners():
    rows, height = cut_rectangle(60, Random(5))
    lower, upper, size = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    assert (live_per_section(make_instance(lower, upper, size)) == height).all()
    found = [
        run(rows, height, False, max_nodes=4000, seed=seed)[0].outcome is Outcome.PACKED
        for seed in range(12)
    ]
    assert any(found)


def test_a_descent_of_many_buffers_needs_no_recursion():
    result, offsets = run([(0, 1, 1)] * 3000, 3000, True)
    assert (result.outcome, result.nodes) == (Outcome.PACKED, 3000)
    assert sorted(offsets) == list(range(3000))
