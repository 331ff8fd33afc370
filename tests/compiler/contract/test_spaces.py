import math

import numpy as np
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.contract.program import Kind
from compiler.contract.spaces import (
    COLUMN,
    FULL,
    ROW,
    SCALAR,
    Access,
    Space,
    access_of,
    canonical,
    through_broadcast,
)


def picked(access, rows, columns):
    """Return the flat index of the element that belongs to each row and column."""
    r, c = np.indices((rows, columns))
    own = r // access.every % (access.count or rows)
    return {
        Kind.FULL: own * columns + c,
        Kind.ROW: own,
        Kind.COLUMN: c,
        Kind.SCALAR: np.zeros_like(r),
    }[access.kind]


def numbered(shape):
    return np.arange(math.prod(shape)).reshape(shape)


@st.composite
def stretched(draw):
    """A shape, one that it stretches to, and how many of its last axes are the columns."""
    wide = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)))
    narrow = tuple(n if draw(st.booleans()) else 1 for n in wide)
    leading = next((i for i, n in enumerate(narrow) if n != 1), len(narrow))
    narrow = narrow[draw(st.integers(0, leading)) :]
    return narrow, wide, draw(st.integers(1, len(wide)))


@settings(max_examples=tiers.examples(500))
@given(case=stretched(), divisor=st.sampled_from([1, 2, 3, 4]))
def test_an_access_picks_the_elements_that_numpy_repeats(case, divisor):
    """Also where the columns begin inside of an axis."""
    narrow, wide, num_trailing = case
    columns = math.prod(wide[len(wide) - num_trailing :])
    columns = columns // divisor if columns % divisor == 0 else columns
    rows = math.prod(wide) // columns
    access = access_of(narrow, wide, columns)
    if access is None:
        return
    expected = np.broadcast_to(numbered(narrow), wide).reshape(rows, columns)
    np.testing.assert_array_equal(picked(access, rows, columns), expected)


@settings(max_examples=tiers.examples(300))
@given(case=stretched())
def test_what_is_read_through_a_broadcast_is_what_the_broadcast_shows(case):
    before, after, num_trailing = case
    columns = math.prod(after[len(after) - num_trailing :])
    rows = math.prod(after) // columns
    for access in (FULL, ROW, COLUMN, SCALAR):
        size = {FULL: rows * columns, ROW: rows, COLUMN: columns, SCALAR: 1}[access]
        if size != math.prod(after):
            continue
        behind = through_broadcast(access, before, after, columns)
        if behind is not None:
            shown = np.broadcast_to(numbered(before), after).ravel()
            expected = shown[picked(access, rows, columns)]
            np.testing.assert_array_equal(picked(behind, rows, columns), expected)


def test_common_operands_are_seen_as_what_they_are():
    wide = (8, 256, 384)
    assert access_of(wide, wide, 384) == FULL
    assert access_of((384,), wide, 384) == COLUMN
    assert access_of((8, 256, 1), wide, 384) == ROW
    assert access_of((), wide, 384) == SCALAR
    assert access_of((256, 384), wide, 384) == Access(Kind.FULL, 1, 256)
    assert access_of((8, 1, 384), wide, 384) == Access(Kind.FULL, 256, 8)
    assert access_of((8, 1, 1), wide, 384) == Access(Kind.ROW, 256, 8)


def test_what_is_no_block_of_rows_or_cuts_the_columns_is_refused():
    assert access_of((8, 1, 4, 1), (8, 6, 4, 5), 5) is None
    assert access_of((1, 5), (4, 5), 10) is None
    assert access_of((4, 1, 5), (2, 4, 3, 5), 15) is None


def test_of_one_row_full_is_column_and_of_one_column_it_is_row():
    assert canonical(Kind.FULL, Space(1, 5)) is canonical(Kind.COLUMN, Space(1, 5))
    assert canonical(Kind.ROW, Space(1, 5)) is canonical(Kind.SCALAR, Space(1, 5))
    assert canonical(Kind.FULL, Space(5, 1)) is canonical(Kind.ROW, Space(5, 1))
    assert len({canonical(kind, Space(2, 2)) for kind in Kind}) == len(Kind)


def test_a_gain_per_channel_is_read_by_groups_of_channels():
    assert access_of((32,), (64, 32), 8) == Access(Kind.FULL, 1, 4)
    assert access_of((64, 1), (64, 32), 8) == Access(Kind.ROW, 4, 64)
    assert access_of((64, 32), (64, 32), 8) == FULL
    assert access_of((32,), (64, 32), 12) is None
