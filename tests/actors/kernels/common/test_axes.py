import numpy as np
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.kernels.common.strides import Axis, collapse_axes, columns_of
from actors.kernels.library.launch import CHUNK_BYTES, MAX_CHUNKS, units_per_chunk


def offsets(axes, operand):
    """Offsets of an operand in the order of a walk."""
    found = np.zeros(1, np.int64)
    for axis in axes:
        steps = np.arange(axis.extent) * axis.steps[operand]
        found = (found[:, None] + steps).reshape(-1)
    return found.tolist()


@st.composite
def views(draw):
    """A shape and the strides of two operands, some axes permuted, stretched or skipped."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=5)))
    strides = []
    for _ in range(2):
        order = draw(st.permutations(range(len(shape))))
        steps, size = [0] * len(shape), 4
        for axis in order:
            is_stretched = draw(st.booleans()) and draw(st.booleans())
            steps[axis] = 0 if is_stretched else size
            size *= shape[axis] * draw(st.sampled_from([1, 1, 1, 2]))
        strides.append(tuple(steps))
    return shape, strides


@settings(max_examples=tiers.examples(200), deadline=None)
@given(case=views())
def test_a_walk_in_order_visits_every_operand_as_the_tensor_is_numbered(case):
    shape, strides = case
    plain = [Axis(n, tuple(s[i] for s in strides)) for i, n in enumerate(shape)]
    joined = collapse_axes(shape, strides, in_order=True)
    for operand in range(2):
        assert offsets(joined, operand) == offsets(plain, operand)


@settings(max_examples=tiers.examples(200), deadline=None)
@given(case=views())
def test_a_walk_in_any_order_pairs_the_same_offsets(case):
    shape, strides = case
    plain = [Axis(n, tuple(s[i] for s in strides)) for i, n in enumerate(shape)]
    joined = collapse_axes(shape, strides, in_order=False)
    pairs = [zip(offsets(axes, 0), offsets(axes, 1), strict=True) for axes in (plain, joined)]
    assert sorted(pairs[0]) == sorted(pairs[1])
    assert len(joined) <= sum(n > 1 for n in shape)


def test_a_dense_tensor_is_one_axis_and_a_transpose_two():
    assert collapse_axes((2, 3, 4), [(48, 16, 4), (48, 16, 4)], in_order=True) == (
        Axis(24, (4, 4)),
    )
    axes = collapse_axes((3, 4), [(16, 4), (4, 12)], in_order=False)
    assert axes == (Axis(3, (16, 4)), Axis(4, (4, 12)))
    assert collapse_axes((1, 1), [(8, 8)], in_order=True) == ()


def test_axes_become_columns_of_words():
    axes = (Axis(3, (16, 4)), Axis(4, (4, 12)))
    assert columns_of(axes, 2, 3) == [2, 3, 4, 0, 16, 4, 0, 4, 12, 0]
    assert columns_of((), 1, 2) == [0, 0, 0, 0, 0]


@given(st.integers(0, 10**6), st.integers(0, 10**10))
def test_chunks_are_no_smaller_than_a_chunk_and_not_too_many(num_units, num_bytes):
    each = units_per_chunk(num_units, num_bytes)
    num_chunks = -(-num_units // each)
    assert num_chunks <= MAX_CHUNKS
    assert num_chunks * CHUNK_BYTES <= max(num_bytes, CHUNK_BYTES)
