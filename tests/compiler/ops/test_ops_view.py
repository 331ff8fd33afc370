"""The view column against numpy: the same addresses, and None only where numpy copies."""

import numpy as np
import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import compiler.pipeline.standard_ops  # noqa: F401  # registers the ops
from compiler.contract.attrs import Attrs
from compiler.contract.types import DType, TensorType
from compiler.graph.registry import Layout, find_op, infer_type, view

ITEM = 4


@st.composite
def strided(draw):
    """Return storage of distinct numbers and an array that views it in some odd way."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    storage = np.arange(int(np.prod(shape)), dtype=np.int32)
    x = storage.reshape(shape)
    for step in draw(
        st.lists(st.sampled_from(("transpose", "slice", "broadcast", "one")), max_size=3)
    ):
        if step == "transpose":
            x = x.transpose(draw(st.permutations(range(x.ndim))))
        elif step == "slice":
            starts = [draw(st.integers(0, n)) for n in x.shape]
            x = x[(..., *(slice(i, None, draw(st.integers(1, 2))) for i in starts))]
        elif step == "broadcast":
            x = np.broadcast_to(x, (draw(st.integers(1, 3)), *x.shape))
        else:
            x = np.expand_dims(x, draw(st.integers(0, x.ndim)))
    return storage, x


def layout_of(storage, x):
    offset = x.__array_interface__["data"][0] - storage.__array_interface__["data"][0]
    return Layout(offset, tuple(x.strides))


def viewed(name, storage, x, **attrs):
    """Return the op's view of `x` as an array over the storage, or None."""
    attrs = Attrs(attrs)
    before = TensorType(DType.INT32, x.shape)
    (after,) = infer_type.get(find_op(name))((before,), attrs)
    placed = view.get(find_op(name))(before, layout_of(storage, x), after, attrs)
    if placed is None:
        return None
    assert len(placed.strides_bytes) == after.rank
    assert placed.offset_bytes % ITEM == 0
    assert 0 <= placed.offset_bytes <= storage.nbytes
    start = storage[placed.offset_bytes // ITEM :]
    return np.lib.stride_tricks.as_strided(start, after.shape, placed.strides_bytes)


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def reshaped(draw):
    storage, x = draw(strided())
    rest, shape = x.size, []
    while rest > 1:
        shape.append(draw(st.sampled_from(divisors(rest))))
        rest //= shape[-1]
    shape = [*shape, 0] if rest == 0 else shape
    return storage, x, tuple(draw(st.permutations(shape + [1] * draw(st.integers(0, 2)))))


@settings(max_examples=tiers.examples(300), deadline=None)
@given(reshaped())
def test_reshape_is_a_view_exactly_where_numpy_makes_one(case):
    storage, x, shape = case
    expected = x.reshape(shape)
    got = viewed("reshape", storage, x, shape=shape)
    if x.size:
        assert (got is not None) == np.may_share_memory(expected, storage)
    if got is not None:
        np.testing.assert_array_equal(got, expected)


@settings(max_examples=tiers.examples(200), deadline=None)
@given(strided(), st.data())
def test_transpose_slice_and_broadcast_address_the_elements_numpy_addresses(case, data):
    storage, x = case
    perm = tuple(data.draw(st.permutations(range(x.ndim))))
    np.testing.assert_array_equal(viewed("transpose", storage, x, perm=perm), x.transpose(perm))
    starts = tuple(data.draw(st.integers(0, n)) for n in x.shape)
    stops = tuple(data.draw(st.integers(i, n)) for i, n in zip(starts, x.shape, strict=True))
    steps = tuple(data.draw(st.integers(1, 3)) for _ in x.shape)
    part = x[tuple(slice(*r) for r in zip(starts, stops, steps, strict=True))]
    got = viewed("slice", storage, x, starts=starts, stops=stops, steps=steps)
    np.testing.assert_array_equal(got, part)
    drawn = hnp.mutually_broadcastable_shapes(num_shapes=1, base_shape=x.shape, min_side=0)
    wide = data.draw(drawn).result_shape
    got = viewed("broadcast_to", storage, x, shape=wide)
    np.testing.assert_array_equal(got, np.broadcast_to(x, wide))
    np.testing.assert_array_equal(viewed("stop_gradient", storage, x), x)


@pytest.mark.parametrize(
    ("perm", "shape", "is_view"),
    [
        ((0, 2, 1, 3), (2, 5, 12), False),  # merging attention heads
        ((0, 1, 2, 3), (6, 20), True),
        ((0, 2, 1, 3), (2, 5, 3, 2, 2), True),  # only the last axis is cut
        ((3, 2, 1, 0), (4, 5, 3, 2, 1), True),
    ],
)
def test_merging_transposed_axes_needs_a_copy_and_cutting_them_does_not(perm, shape, is_view):
    storage = np.arange(120, dtype=np.int32)
    x = storage.reshape(2, 3, 5, 4).transpose(perm)
    assert (viewed("reshape", storage, x, shape=shape) is not None) == is_view
