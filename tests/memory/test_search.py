from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.packing import BufferSets, live_per_section, make_instance
from memory.packing_search import BranchingRule, Outcome, PackingRules, search

small = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=8
).map(lambda rows: [(start, start + length, size) for start, length, size in rows])


def has_packing(rows, capacity):
    """Whether a packing exists, by trying every offset of every buffer in turn."""
    rows = sorted(rows, key=lambda r: -r[2])
    offsets = []

    def place(i):
        if i == len(rows):
            return True
        lower, upper, size = rows[i]
        near = [
            (offsets[j], offsets[j] + rows[j][2])
            for j in range(i)
            if rows[j][0] < upper and lower < rows[j][1]
        ]
        for x in range(capacity - size + 1):
            if all(x + size <= first or last <= x for first, last in near):
                offsets.append(x)
                if place(i + 1):
                    return True
                offsets.pop()
        return False

    return place(0)


def run(rows, capacity, style, max_nodes=100_000, seed=0):
    """Search in a random preorder; return the result and the offsets by buffer."""
    lower, upper, size = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    instance = make_instance(lower, upper, size)
    order = np.random.default_rng(seed).permutation(size.size)
    terrain = PackingRules(BufferSets.build(instance, order), int(np.gcd.reduce(size)), style)
    result = search(terrain, (capacity - live_per_section(instance)).tolist(), max_nodes)
    offsets = np.zeros(size.size, np.int64)
    if result.offsets:
        offsets[order] = result.offsets
    return result, offsets.tolist()


def is_packing(rows, offsets, capacity):
    for i, (lower, upper, size) in enumerate(rows):
        if offsets[i] < 0 or offsets[i] + size > capacity:
            return False
        for j in range(i):
            meets = lower < rows[j][1] and rows[j][0] < upper
            if meets and offsets[i] < offsets[j] + rows[j][2] and offsets[j] < offsets[i] + size:
                return False
    return True


def perfect_packing(num_buffers, rng):
    """Cut a rectangle of time and bytes into buffers, some as pinwheels of five: they fill it."""
    length, height = num_buffers // 2, 1 << 12
    parts = [(0, length, 0, height)]
    for _ in range(50 * num_buffers):
        if len(parts) >= num_buffers:
            break
        i = rng.choices(range(len(parts)), [(b - a) * (d - c) for a, b, c, d in parts])[0]
        a, b, c, d = parts[i]
        if rng.random() < 0.35 and b - a >= 3 and d - c >= 3:
            x1, x2 = sorted(rng.sample(range(a + 1, b), 2))
            y1, y2 = sorted(rng.sample(range(c + 1, d), 2))
            parts[i : i + 1] = [
                (a, x2, c, y1), (x2, b, c, y2), (x1, b, y2, d), (a, x1, y1, d), (x1, x2, y1, y2),
            ]  # fmt: skip
        elif b - a > 1 and (rng.random() < 0.5 or d - c < 2):
            x = rng.randrange(a + 1, b)
            parts[i : i + 1] = [(a, x, c, d), (x, b, c, d)]
        elif d - c > 1:
            y = rng.randrange(c + 1, d)
            parts[i : i + 1] = [(a, b, c, y), (a, b, y, d)]
    rng.shuffle(parts)
    return [(a, b, d - c) for a, b, c, d in parts], height


def tight_instance(num_sections, capacity, rng):
    """Fill every section to the capacity, as random buffers that need not fit without waste."""
    room = [capacity] * num_sections
    rows = []
    while any(room):
        first = rng.choice([s for s in range(num_sections) if room[s]])
        size = rng.randint(1, room[first])
        last = first + 1
        while last < num_sections and room[last] >= size and rng.random() < 0.7:
            last += 1
        for s in range(first, last):
            room[s] -= size
        rows.append((first, last, size))
    return rows


@pytest.mark.parametrize("style", BranchingRule)
@given(small, st.integers(0, 3), st.integers(0, 5))
def test_a_search_finds_a_packing_exactly_where_one_exists(style, rows, extra, seed):
    steps = range(12)
    bound = max(sum(z for lo, up, z in rows if lo <= t < up) for t in steps)
    capacity = bound + extra
    result, offsets = run(rows, capacity, style, seed=seed)
    assert (result.outcome is Outcome.PACKED) == has_packing(rows, capacity)
    if result.outcome is Outcome.PACKED:
        assert is_packing(rows, offsets, capacity)


INFEASIBLE = (6234, 10114, 21375, 22471, 22786, 27339, 37758, 39895, 41449, 48250, 50281, 50976)
"""Seeds of tight instances without a packing: rare, about one in 3,000."""


@pytest.mark.parametrize("style", BranchingRule)
@pytest.mark.parametrize("seeds", [INFEASIBLE, range(60)], ids=["infeasible", "random"])
def test_a_search_is_right_about_tight_instances(style, seeds):
    outcomes = []
    for seed in seeds:
        rng = Random(seed)
        num_sections, capacity = rng.randint(5, 8), rng.randint(5, 9)
        rows = tight_instance(num_sections, capacity, rng)
        if len(rows) <= 15:
            result, offsets = run(rows, capacity, style, seed=seed)
            outcomes.append(result.outcome)
            assert (result.outcome is Outcome.PACKED) == has_packing(rows, capacity)
            assert result.outcome is not Outcome.PACKED or is_packing(rows, offsets, capacity)
    wanted = Outcome.EXHAUSTED if seeds is INFEASIBLE else Outcome.PACKED
    assert len(outcomes) > 10
    assert outcomes.count(wanted) == len(outcomes)


@pytest.mark.parametrize("style", BranchingRule)
def test_below_the_live_bytes_there_is_nothing_to_search(style):
    result, _ = run([(0, 2, 3), (1, 3, 3)], 5, style)
    assert (result.outcome, result.nodes) == (Outcome.EXHAUSTED, 0)


@pytest.mark.parametrize("style", BranchingRule)
def test_a_search_that_runs_out_of_nodes_says_so(style):
    rows, height = perfect_packing(30, Random(3))
    result, _ = run(rows, height, style, max_nodes=5)
    assert (result.outcome, result.nodes, result.offsets) == (Outcome.OUT_OF_NODES, 5, ())


@pytest.mark.parametrize("style", BranchingRule)
def test_buffers_of_one_shape_are_not_tried_in_each_order(style):
    """Of an instance without a packing, every buffer is cut into four: 24 orders each, untried."""
    rng = Random(10114)
    num_sections, capacity = rng.randint(5, 8), rng.randint(5, 9)
    rows = tight_instance(num_sections, capacity, rng)
    quarters = [row for row in rows for _ in range(2)]
    once, _ = run(rows, capacity, style)
    twice, _ = run(quarters, 2 * capacity, style)
    assert once.outcome is Outcome.EXHAUSTED
    assert twice.outcome is not Outcome.OUT_OF_NODES
    assert twice.nodes < 3000


def test_a_perfect_packing_of_sixty_buffers_is_found_by_corners():
    rows, height = perfect_packing(60, Random(5))
    lower, upper, size = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    assert (live_per_section(make_instance(lower, upper, size)) == height).all()
    found = [
        run(rows, height, BranchingRule.CORNERS, max_nodes=4000, seed=seed)[0].outcome
        is Outcome.PACKED
        for seed in range(12)
    ]
    assert any(found)


def test_a_descent_of_many_buffers_needs_no_recursion():
    result, offsets = run([(0, 1, 1)] * 3000, 3000, BranchingRule.LEFT_TO_RIGHT)
    assert (result.outcome, result.nodes) == (Outcome.PACKED, 3000)
    assert sorted(offsets) == list(range(3000))
