from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from compiler.places import extents_of
from compiler.plan import View
from compiler.types import DType, RegisterId, TensorType, contiguous_strides


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
