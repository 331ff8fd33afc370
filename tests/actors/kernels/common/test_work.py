import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.kernels.common.kernel import BytePass, MatrixProduct, over_blocks, over_operands
from actors.kernels.common.strides import BLOCK_BYTES


@st.composite
def operands(draw):
    """Arrays of one shape, output last: dense, transposed, broadcast or with a step."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    arrays = []
    for _ in range(draw(st.integers(1, 2))):
        form = draw(st.sampled_from(["dense", "reversed", "repeated"]))
        if form == "dense":
            arrays.append(np.zeros(shape, np.float32))
        elif form == "reversed":
            arrays.append(np.zeros(shape[::-1], np.float32).T)
        else:
            axis = draw(st.integers(0, len(shape) - 1))
            thin = (*shape[:axis], 1, *shape[axis + 1 :])
            arrays.append(np.broadcast_to(np.zeros(thin, np.float32), shape))
    return [*arrays, np.zeros(shape, np.float32)]


@given(operands())
def test_loops_are_those_that_numpys_own_iterator_makes(arrays):
    shape = arrays[-1].shape
    strides = [np.broadcast_to(x, shape).strides for x in arrays]
    work = over_operands(shape, strides, [4] * len(arrays))
    flags = [["readonly"]] * (len(arrays) - 1) + [["readwrite"]]
    chunks = sum(1 for _ in np.nditer(arrays, ["external_loop"], flags, order="C"))
    assert work.loops + 1 == chunks


def test_steps_of_more_than_an_element_are_told_from_dense_ones():
    dense, transposed = (256, 4), (4, 256)
    sizes = (4, 4)
    assert over_operands((64, 64), (dense, dense), sizes).passes == ((BytePass.SIMPLE, 16384.0),)
    assert over_operands((64, 64), (transposed, dense), sizes).passes == (
        (BytePass.STRIDED, 16384.0),
    )
    three = over_operands((64, 64), (dense, dense, dense), (4, 4, 4))
    assert three.passes == ((BytePass.PLAIN, 16384.0),)


def test_a_vector_repeated_over_rows_costs_a_loop_per_row():
    work = over_operands((100, 8), ((32, 4), (0, 4), (32, 4)), (4, 4, 4))
    assert (work.calls, work.loops) == (1.0, 99.0)


def test_an_empty_call_moves_nothing():
    assert over_operands((0, 8), ((32, 4), (32, 4)), (4, 4)).passes == ()


@given(st.integers(1, 10), st.integers(0, 5), st.integers(0, 5))
def test_calls_grow_with_the_blocks_and_bytes_with_the_passes(num_blocks, plain, small):
    elements = num_blocks * BLOCK_BYTES // 4
    work = over_blocks(elements, 4, {BytePass.PLAIN: plain, BytePass.EXP: 1}, small_calls=small)
    assert work.calls == num_blocks * (plain + 1 + small)
    assert dict(work.passes) == {BytePass.PLAIN: plain * elements * 4, BytePass.EXP: elements * 4}


def test_a_product_counts_multiplications_and_additions():
    assert MatrixProduct(3, 4, 5, 6).flops == 2 * 3 * 4 * 5 * 6
