from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.contract.sbp import (
    BROADCAST,
    PARTIAL,
    PARTIAL_MAX,
    Split,
    format_sbp,
    local_shape,
    local_slices,
    shard_range,
)


@given(extent=st.integers(0, 100), parts=st.integers(1, 9))
def test_parts_are_neighbours_of_which_the_first_have_a_row_more(extent, parts):
    cut = [shard_range(extent, parts, index) for index in range(parts)]
    assert [row for part in cut for row in part] == list(range(extent))
    sizes = [len(part) for part in cut]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] in (0, 1)


@pytest.mark.parametrize("words", [(Split(0), Split(0)), (Split(1), Split(0)), (Split(0), PARTIAL)])
def test_parts_of_parts_cover_a_tensor_as_often_as_ranks_have_them(words):
    mesh, seen = (2, 3), np.zeros((7, 5), int)
    for at in product(*map(range, mesh)):
        slices = local_slices(seen.shape, words, mesh, at)
        assert seen[slices].shape == local_shape(seen.shape, words, mesh, at)
        seen[slices] += 1
    copies = 3 if PARTIAL in words else 1
    assert (seen == copies).all()


def test_layouts_are_told_by_their_words():
    assert format_sbp((Split(1), BROADCAST, PARTIAL, PARTIAL_MAX)) == "S(1), B, P, P(max)"
