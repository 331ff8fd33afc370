import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memory.packing import make_instance, pack_by_sweeps
from memory.packing_search import _luby, improve

buffers = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=7
)


def instance_of(rows):
    lower, length, size = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return make_instance(lower, lower + length, size)


def least_peak(instance):
    """The smallest peak, by pushing down every order of the buffers: one of them is best."""
    columns = instance.lower.tolist(), instance.upper.tolist(), instance.size.tolist()
    lower, upper, size = columns
    best = [sum(size)]

    def place(placed, peak):
        if peak >= best[0]:
            return
        if len(placed) == len(size):
            best[0] = peak
            return
        for i in range(len(size)):
            if i not in placed:
                near = [j for j in placed if lower[i] < upper[j] and lower[j] < upper[i]]
                at = max([placed[j] + size[j] for j in near], default=0)
                place({**placed, i: at}, max(peak, at + size[i]))

    place({}, 0)
    return best[0]


@given(buffers)
def test_with_enough_nodes_the_peak_is_least_and_proved(rows):
    instance = instance_of(rows)
    improved = improve(instance, pack_by_sweeps(instance, 0), 0, 10_000)
    assert improved.packing.peak == improved.bound == least_peak(instance)


@given(buffers, st.integers(1, 30))
def test_a_proved_bound_never_lies_above_the_least_peak(rows, max_nodes):
    instance = instance_of(rows)
    improved = improve(instance, pack_by_sweeps(instance, 0), 0, max_nodes)
    assert improved.nodes <= max_nodes
    assert improved.bound <= least_peak(instance) <= improved.packing.peak


@given(buffers)
def test_a_target_that_is_met_costs_no_node(rows):
    instance = instance_of(rows)
    best = pack_by_sweeps(instance, 0)
    improved = improve(instance, best, best.peak, 1000)
    assert (improved.packing, improved.nodes) == (best, 0)


def test_the_lengths_of_runs_follow_luby():
    assert [_luby(i) for i in range(1, 16)] == [1, 1, 2, 1, 1, 2, 4, 1, 1, 2, 1, 1, 2, 4, 8]
