import numpy as np
import pytest
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st

from memory.liveness import lifetimes, live_bytes, lower_bound

intervals = st.lists(
    st.tuples(st.integers(-5, 20), st.integers(0, 12), st.integers(0, 9)), max_size=25
).map(lambda rows: [(start, start + length, size) for start, length, size in rows])


def columns(rows):
    return tuple(np.array([row[i] for row in rows], np.int64) for i in range(3))


def live_at(rows, step):
    return sum(size for lower, upper, size in rows if lower <= step < upper)


def test_a_buffer_lives_from_its_first_write_to_after_its_last_access():
    lower, upper = lifetimes(4, reads=[[], [0], [], [0]], writes=[[0], [1], [1], []], num_buffers=2)
    assert lower.tolist() == [0, 1]
    assert upper.tolist() == [4, 3]


def test_a_buffer_that_is_never_read_lives_for_the_one_step_that_writes_it():
    lower, upper = lifetimes(3, [[], [], []], [[], [0], []], 1)
    assert (lower.tolist(), upper.tolist()) == ([1], [2])


def test_an_untouched_buffer_has_an_empty_interval():
    lower, upper = lifetimes(3, [[], [], []], [[], [], []], 1)
    assert (lower.tolist(), upper.tolist()) == ([0], [0])


def test_live_in_and_live_out_reach_the_ends_of_the_horizon():
    lower, upper = lifetimes(3, [[], [0], []], [[1], [2], []], 4, live_in=[0, 3], live_out=[2, 3])
    assert lower.tolist() == [0, 0, 1, 0]
    assert upper.tolist() == [2, 1, 3, 3]


@pytest.mark.parametrize("reading_step", [0, 1])
def test_a_read_that_no_earlier_step_wrote_names_step_and_buffer(reading_step):
    reads = [[0] if step == reading_step else [] for step in range(3)]
    with raises(ValueError):
        lifetimes(3, reads, [[], [0], []], 1)


def test_live_out_of_a_buffer_that_nobody_writes_is_refused():
    with raises(ValueError):
        lifetimes(1, [[]], [[0]], 2, live_out=[1])


@pytest.mark.parametrize("buffer", [-1, 2])
def test_a_buffer_out_of_range_is_refused(buffer):
    with raises(ValueError):
        lifetimes(1, [[]], [[buffer]], 2)


def test_too_few_steps_are_refused():
    with raises(ValueError):
        lifetimes(2, [[]], [[], []], 0)


@given(st.data())
def test_lifetimes_equal_a_walk_over_the_steps(data):
    num_steps, num_buffers = data.draw(st.integers(0, 8)), 5
    buffers = st.integers(0, num_buffers - 1)
    live_in = data.draw(st.sets(buffers))
    writes = [data.draw(st.lists(buffers, max_size=3)) for _ in range(num_steps)]
    reads, seen = [], set(live_in)
    for step in range(num_steps):
        known = st.lists(st.sampled_from(sorted(seen)), max_size=3) if seen else st.just([])
        reads.append(data.draw(known))
        seen |= set(writes[step])
    live_out = data.draw(st.sets(st.sampled_from(sorted(seen)))) if seen else set()
    lower, upper = lifetimes(
        num_steps, reads, writes, num_buffers, live_in=live_in, live_out=live_out
    )
    for b in range(num_buffers):
        touches = [s for s in range(num_steps) if b in reads[s] or b in writes[s]]
        first = 0 if b in live_in or not touches else touches[0]
        last = num_steps if b in live_out else max((s + 1 for s in touches), default=0)
        assert (lower[b], upper[b]) == (first, last)


@given(intervals)
def test_the_profile_is_the_sum_of_live_sizes_at_every_step(rows):
    times, profile = live_bytes(*columns(rows))
    for step in range(-6, 35):
        at = int(np.searchsorted(times, step, side="right")) - 1
        assert (int(profile[at]) if at >= 0 else 0) == live_at(rows, step)


@given(intervals)
def test_the_lower_bound_is_the_first_largest_sum_over_the_steps(rows):
    sums = [(live_at(rows, step), step) for step in range(-6, 35)]
    bound = max(total for total, _ in sums)
    first = next(step for total, step in sums if total == bound)
    assert lower_bound(*columns(rows)) == ((bound, first) if bound else (0, 0))


def test_sizes_far_above_32_bits_are_summed_exactly():
    assert lower_bound([0, 0, 1], [2, 2, 3], [2**58, 2**59 + 1, 7]) == (2**58 + 2**59 + 8, 1)


@pytest.mark.parametrize(
    ("lower", "upper", "size"),
    [
        ([0], [1, 2], [1]),
        ([0, 5], [1, 4], [1, 1]),
        ([0], [1], [-8]),
        ([0.5], [1], [1]),
        ([0], [1], [2**70]),
        ([0, 0], [1, 1], [2**61, 1]),
    ],
)
def test_columns_that_are_not_intervals_are_refused(lower, upper, size):
    with raises(ValueError):
        lower_bound(lower, upper, size)
