from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memory.liveness import lower_bound
from memory.packing import components, live_per_section, make_instance, merge_times, whole_horizon

spans = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 12)).map(lambda r: (r[0], r[0] + r[1])),
    min_size=1,
    max_size=20,
)


@given(spans)
def test_merged_intervals_overlap_exactly_where_the_originals_do(rows):
    lower, upper = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    first, last = merge_times(lower, upper)
    for i in range(len(rows)):
        for j in range(i):
            before = lower[i] < upper[j] and lower[j] < upper[i]
            assert (first[i] < last[j] and first[j] < last[i]) == before


@given(spans)
def test_sections_are_dense_and_keep_the_lower_bound(rows):
    lower, upper = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    size = np.arange(1, len(rows) + 1)
    instance = make_instance(lower, upper, size)
    assert instance.bound == lower_bound(instance.lower, instance.upper, size)[0]
    assert set(instance.lower.tolist()) == set(range(instance.num_sections))
    assert (instance.upper > instance.lower).all()


def test_a_chain_of_touching_intervals_keeps_one_section_each():
    first, last = merge_times(np.array([0, 10, 20]), np.array([10, 20, 30]))
    assert (first.tolist(), last.tolist()) == ([0, 1, 2], [1, 2, 3])


def test_starts_in_a_row_share_a_section():
    first, last = merge_times(np.array([0, 1, 2, 5]), np.array([4, 4, 9, 9]))
    assert (first.tolist(), last.tolist()) == ([0, 0, 0, 1], [1, 1, 2, 2])


def test_only_buffers_over_the_whole_horizon_are_marked():
    mask = whole_horizon(np.array([0, 0, 1]), np.array([9, 8, 9]))
    assert mask.tolist() == [True, False, False]


@given(spans)
def test_buffers_of_different_components_never_overlap(rows):
    lower, upper = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    parts = components(lower, upper)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(rows)))
    for first, second in pairwise(parts):
        assert upper[first].max() <= lower[second].min()
    for part in parts:  # and none can be split: every later start lies within what came before
        order = part[np.argsort(lower[part], kind="stable")]
        assert all(lower[order[i]] < upper[order[:i]].max() for i in range(1, order.size))


@given(spans)
def test_live_bytes_per_section_are_sums_over_the_section(rows):
    lower, upper = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    instance = make_instance(lower, upper, np.arange(1, len(rows) + 1))
    for s, live in enumerate(live_per_section(instance).tolist()):
        over = (instance.lower <= s) & (instance.upper > s)
        assert live == instance.size[over].sum()
