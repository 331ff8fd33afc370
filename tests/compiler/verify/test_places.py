from dataclasses import replace
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from compiler.contract.plan_tables import View
from compiler.contract.types import DType, RegisterId, TensorType, contiguous_strides
from compiler.verify.places import extents_of, form_of


@st.composite
def views(draw):
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    dense = contiguous_strides(shape, 4)
    strides = tuple(
        draw(st.sampled_from([s, 2 * s, 0, -s])) if draw(st.booleans()) else s for s in dense
    )
    offset = 4 * draw(st.integers(0, 5))
    return View(RegisterId(0), offset, TensorType(DType.FLOAT32, shape), strides)


def touched(view):
    """Bytes of the elements, row by row."""
    found = []
    for at in product(*[range(n) for n in view.type.shape]):
        start = view.offset_bytes + sum(i * s for i, s in zip(at, view.strides_bytes, strict=True))
        found += range(start, start + 4)
    return found


@given(st.lists(views(), min_size=1, max_size=6))
def test_an_extent_is_the_smallest_range_with_all_elements(some):
    for view, extent in zip(some, extents_of(some), strict=True):
        start, end, is_dense = extent[:3]
        found = touched(view)
        if not found:
            assert start == end
            continue
        assert (start, end) == (min(found), max(found) + 1)
        assert is_dense == (found == list(range(view.offset_bytes, end)))


@st.composite
def columns(draw):
    """Views on columns and rows of one table of 6 x 6, turned or cut in halves now and then."""
    top, left = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    height, width = draw(st.integers(1, 6 - top)), draw(st.integers(1, 6 - left))
    shape, strides = (height, width), (24, 4)
    if width % 2 == 0 and draw(st.booleans()):
        shape, strides = (height, 2, width // 2), (24, 2 * width, 4)
    if draw(st.booleans()):
        shape, strides = shape[::-1], strides[::-1]
    type_ = TensorType(DType.FLOAT32, shape)
    return View(RegisterId(0), 24 * top + 4 * left, type_, strides)


@given(columns(), columns())
def test_columns_are_apart_or_hold_one_another_as_their_bytes_do(one, two):
    first, second = extents_of((one, two))
    bytes_of_one, bytes_of_two = set(touched(one)), set(touched(two))
    assert first.is_exact
    assert first.size_bytes == len(bytes_of_one)
    # To say of two that they touch is always safe; of columns of one table it is known.
    if first.is_apart(second):
        assert not bytes_of_one & bytes_of_two
    elif one.type.num_elements > 1 < two.type.num_elements:
        rows_alike = first.period == second.period == 24
        assert not rows_alike or bytes_of_one & bytes_of_two
    if first.holds(second):
        assert bytes_of_two <= bytes_of_one


@given(columns(), columns())
def test_views_of_one_form_show_the_same_elements_in_the_same_order(one, two):
    at_one_place = replace(two, offset_bytes=one.offset_bytes)
    if form_of(one) == form_of(two):
        assert touched(one)[::4] == touched(at_one_place)[::4]
