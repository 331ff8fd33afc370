"""The form of a product and its chunks, walked in Python against np.matmul."""

import numpy as np
import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.kernels.common.gemm import MatrixView, ThreadCut, chunks_of, gemm_of, view_of_array
from compiler.contract.types import DType


def strided(shape, kind, dtype=np.float64):
    """Return small integers, exact in every sum, in a layout."""
    rng = np.random.default_rng(sum(shape))
    if kind == "transposed":
        array = np.empty((*shape[:-2], shape[-1], shape[-2]), dtype).swapaxes(-1, -2)
    elif kind == "windowed":
        array = np.empty((*shape[:-1], shape[-1] + 3), dtype)[..., 1 : 1 + shape[-1]]
    elif kind == "heads" and len(shape) >= 3:
        array = np.empty((shape[-2], *shape[:-2], shape[-1]), dtype)
        array = np.moveaxis(array, 0, -2)
    else:
        array = np.empty(shape, dtype)
    array[...] = rng.integers(-4, 5, shape)
    return array


def flat(array):
    """Return the elements of an array's memory, from its first element on."""
    spans = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    return np.lib.stride_tricks.as_strided(
        array, (1 + sum(spans) // array.itemsize,), (array.itemsize,)
    )


def piece(elements, begin, rows, columns, side):
    item = elements.itemsize
    return np.lib.stride_tricks.as_strided(
        elements[begin:], (rows, columns), (side.row * item, side.column * item)
    )


def walk(gemm, cut, a, b, out):
    """Compute a product call by call, and count how often each element of `out` is written."""
    first, second = (b, a) if gemm.is_swapped else (a, b)
    fa, fb, fo = flat(first), flat(second), flat(out)
    count = np.zeros(fo.shape, int)
    for chunk in chunks_of(gemm, cut):
        for call in chunk.calls:
            x = piece(fa, call.a, call.rows, gemm.k, gemm.a)
            y = piece(fb, call.b, gemm.k, call.columns, gemm.b)
            piece(fo, call.out, call.rows, call.columns, gemm.out)[...] = x @ y
            piece(count, call.out, call.rows, call.columns, gemm.out)[...] += 1
    return count


KINDS = ("dense", "transposed", "windowed", "heads")


@settings(max_examples=tiers.examples(80), deadline=None)
@given(
    batch=st.sampled_from([((), ()), ((3,), ()), ((2, 3), (1, 3)), ((2, 1), (2, 4)), ((2, 3), ())]),
    extents=st.tuples(*[st.sampled_from([1, 2, 5, 40, 130])] * 3),
    kinds=st.tuples(*[st.sampled_from(KINDS)] * 3),
    cut=st.sampled_from(ThreadCut),
    least=st.sampled_from([20_000, 4_000_000]),
)
def test_the_calls_of_all_chunks_make_the_product_and_write_each_element_once(
    batch, extents, kinds, cut, least
):
    m, k, n = extents
    a, b = strided((*batch[0], m, k), kinds[0]), strided((*batch[1], k, n), kinds[1])
    expected = a @ b
    out = strided(expected.shape, kinds[2])
    gemm = gemm_of(*map(view_of_array, (a, b, out)))
    assert gemm is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.kernels.common.gemm.CHUNK_FLOPS", least)
        count = walk(gemm, cut, a, b, out)
    np.testing.assert_array_equal(out, expected)
    assert count.sum() == expected.size
    assert count.max() == 1


def test_a_batch_with_one_matrix_b_joins_the_rows():
    a, b, out = strided((4, 5, 6), "dense"), strided((6, 7), "dense"), np.empty((4, 5, 7))
    gemm = gemm_of(*map(view_of_array, (a, b, out)))
    assert (gemm.m, gemm.batch) == (20, ())


def test_rows_that_are_repeated_stay_a_batch():
    a, b = np.broadcast_to(np.empty((1, 1, 5)), (4, 1, 5)), np.empty((5, 3))
    found = gemm_of(*[view_of_array(x) for x in (a, b, np.empty((4, 1, 3)))])
    assert (found.batch, found.m) == ((4,), 1)


def test_an_output_that_lies_transposed_swaps_the_operands():
    gemm = gemm_of(
        *[MatrixView(DType.FLOAT32, (4, 6), (6, 1)), MatrixView(DType.FLOAT32, (6, 8), (8, 1))],
        MatrixView(DType.FLOAT32, (4, 8), (1, 4)),
    )
    assert gemm.is_swapped
    assert (gemm.m, gemm.n, gemm.a.column, gemm.b.column) == (8, 4, 8, 6)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((4, 6), (12, 2)),  # every second column
        ((4, 6), (0, 1)),  # one row for all
        ((4, 6), (1, 0)),  # one column for all
        ((4, 6), (3, 1)),  # rows that overlap
        ((4, 6), (-6, 1)),  # upside down
    ],
)
def test_a_layout_that_no_library_reads_has_no_form(shape, strides):
    b, out = MatrixView(DType.FLOAT32, (6, 8), (8, 1)), MatrixView(DType.FLOAT32, (4, 8), (8, 1))
    assert gemm_of(MatrixView(DType.FLOAT32, shape, strides), b, out) is None


@pytest.mark.parametrize("extents", [(0, 2, 3), (2, 0, 3), (2, 3, 0)])
def test_an_empty_product_has_no_form(extents):
    m, k, n = extents
    a, b, out = np.empty((m, k)), np.empty((k, n)), np.empty((m, n))
    assert gemm_of(*map(view_of_array, (a, b, out))) is None


def test_whole_rows_stay_in_one_chunk_and_tiles_do_not():
    view = MatrixView(DType.FLOAT32, (512, 512), (512, 1))
    gemm = gemm_of(view, view, view)
    rows, tiles = chunks_of(gemm, ThreadCut.ROWS), chunks_of(gemm, ThreadCut.TILES)
    assert {call.columns for chunk in rows for call in chunk.calls} == {512}
    assert len(tiles) > len(rows) >= 4
    assert [chunk.row for chunk in rows] == sorted({chunk.row for chunk in rows})


def test_a_small_product_is_one_chunk():
    view = MatrixView(DType.FLOAT32, (64, 64), (64, 1))
    assert len(chunks_of(gemm_of(view, view, view), ThreadCut.TILES)) == 1


def test_the_key_tells_layouts_apart_that_libraries_do_not_treat_alike():
    dense = MatrixView(DType.FLOAT32, (8, 8), (8, 1))
    others = [
        MatrixView(DType.FLOAT32, (8, 8), (1, 8)),
        MatrixView(DType.FLOAT32, (8, 8), (24, 1)),
        MatrixView(DType.FLOAT32, (8, 8), (1, 24)),
    ]
    keys = [gemm_of(a, b, dense).key for a in (dense, *others) for b in (dense, *others)]
    assert len(set(keys)) == 16
    assert keys[0] == "float32>float32 1x8x8x8 dense dense dense"
