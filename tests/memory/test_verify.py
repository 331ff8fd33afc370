import numpy as np
import pytest
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st

from memory.verify import OverlapError, check_no_overlap

placements = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(0, 8), st.integers(0, 6)),
    max_size=12,
)


def share_a_byte_and_a_step(a, b):
    steps = set(range(a[1], a[1] + a[2])) & set(range(b[1], b[1] + b[2]))
    addresses = set(range(a[0], a[0] + a[3])) & set(range(b[0], b[0] + b[3]))
    return bool(steps and addresses)


def check(rows, arena_bytes=46, **options):
    check_no_overlap(
        [r[0] for r in rows],
        [r[1] for r in rows],
        [r[1] + r[2] for r in rows],
        [r[3] for r in rows],
        arena_bytes,
        **options,
    )


@given(placements)
def test_it_raises_exactly_where_comparing_all_pairs_finds_an_overlap(rows):
    pairs = {
        (i, j)
        for j in range(len(rows))
        for i in range(j)
        if share_a_byte_and_a_step(rows[i], rows[j])
    }
    if pairs:
        with pytest.raises(OverlapError) as caught:
            check(rows)
        assert tuple(sorted(caught.value.buffers)) in pairs
    else:
        check(rows)


def test_the_message_names_both_buffers_their_steps_and_their_bytes():
    with raises(OverlapError) as caught:
        check_no_overlap([0, 64], [0, 2], [3, 5], [65, 64], 128)
    assert caught.value.buffers == (0, 1)


def test_buffers_that_only_touch_in_time_or_address_are_fine():
    check_no_overlap([0, 0, 8], [0, 3, 3], [3, 6, 6], [8, 8, 8], 16)


def test_arrays_are_welcome():
    column = np.array([0, 8])
    check_no_overlap(column, np.array([0, 0]), np.array([1, 1]), np.array([8, 8]), 16)


@pytest.mark.parametrize(("offset", "size"), [(-8, 8), (60, 8)])
def test_a_buffer_outside_the_arena_is_refused(offset, size):
    with raises(OverlapError):
        check_no_overlap([offset], [0], [1], [size], 64)


def test_an_offset_off_the_grid_is_refused():
    with raises(OverlapError) as caught:
        check_no_overlap([0, 96], [0, 0], [1, 1], [32, 32], 128, alignment=64)
    assert caught.value.buffers == (1,)


@pytest.mark.parametrize(("upper", "size"), [(1, -1), (-1, 8)])
def test_a_buffer_that_is_no_rectangle_is_refused(upper, size):
    with raises(OverlapError):
        check_no_overlap([0], [0], [upper], [size], 64)


def test_columns_of_different_lengths_are_refused():
    with raises(ValueError):
        check_no_overlap([0], [0], [1], [1, 2], 64)


def test_a_buffer_that_is_never_live_needs_no_room_in_the_arena():
    check_no_overlap([0, 0], [0, 0], [0, 1], [5, 3], 3)
    with raises(OverlapError):
        check_no_overlap([0, 0], [0, 0], [1, 1], [5, 0], 3)
