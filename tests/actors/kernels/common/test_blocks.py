import numpy as np
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.kernels.common.strides import cut, merge_leading


@st.composite
def views(draw):
    rank = draw(st.integers(0, 4))
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=rank, max_size=rank)))
    order = draw(st.permutations(range(rank)))
    steps = [draw(st.integers(1, 2)) for _ in range(rank)]
    base = np.zeros([shape[axis] * steps[axis] for axis in order], np.int64)
    view = base.transpose(np.argsort(order)) if rank else base
    return view[tuple(slice(None, None, step) for step in steps)] if rank else view


@settings(max_examples=tiers.examples(200), deadline=None)
@given(view=views(), limit=st.integers(1, 20))
def test_blocks_cover_every_element_once_and_respect_the_limit(view, limit):
    for (block,) in cut((view,), view.ndim, limit):
        assert block.size <= limit
        block += 1
    np.testing.assert_array_equal(view, 1)


@settings(max_examples=tiers.examples(100), deadline=None)
@given(view=views(), limit=st.integers(1, 20), kept=st.integers(0, 2))
def test_blocks_keep_the_last_axes_whole_and_follow_row_major_order(view, limit, kept):
    kept = min(kept, view.ndim)
    view[...] = np.arange(view.size).reshape(view.shape)
    lead = view.ndim - kept
    seen = []
    for (block,) in cut((view,), lead, limit):
        assert block.shape[block.ndim - kept :] == view.shape[lead:]
        seen += block.ravel().tolist()
    assert seen == list(range(view.size))


def test_dense_axes_merge_and_axes_repeated_in_one_operand_do_not():
    x = np.zeros((3, 4, 5))
    assert merge_leading((x, x), 3)[0] == (60,)
    row, column = [np.broadcast_to(np.zeros(n), x.shape) for n in (5, (3, 4, 1))]
    assert merge_leading((x, row), 3)[0] == (12, 5)
    assert merge_leading((x, column), 3)[0] == (12, 5)
    assert merge_leading((x, x.transpose(0, 2, 1).copy().transpose(0, 2, 1)), 3)[0] == (3, 4, 5)


def test_axes_of_extent_one_vanish_but_the_last():
    assert merge_leading((np.zeros((1, 3, 1)),), 3)[0] == (3,)
    assert merge_leading((np.zeros((1, 1)),), 2)[0] == (1,)
    assert merge_leading((np.zeros(()),), 0)[0] == ()
