import numpy as np
import pytest

from actors.kernels.cuda.calls import RunKernel
from actors.kernels.cuda.embedding import CHUNK, CudaEmbedding, CudaEmbeddingGrad
from actors.kernels.cuda.kernel import gpu_named
from actors.kernels.reference.embedding import EMBEDDING_KERNELS
from compiler.contract.types import DType, TensorType

GPU = gpu_named("h200")
GATHER, GRAD = CudaEmbedding(GPU), CudaEmbeddingGrad(GPU)
HOST = {kernel.op: kernel for kernel in EMBEDDING_KERNELS}
IDS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def some_ids(rng, high, shape, dtype="int64", kind="dense"):
    """Ids with many repeats, laid out as asked for."""
    ids = rng.integers(0, high, shape)
    if kind == "strided":
        wide = np.full((*shape, 3), 77, dtype)
        wide[..., 1] = ids
        return wide[..., 1]
    if kind == "transposed" and len(shape) == 2:
        return ids.T.astype(dtype).copy().T
    return ids.astype(dtype)


def sums_of(dy, ids, rows):
    """The float64 sums by a loop of numpy's."""
    total = np.zeros((rows, dy.shape[-1]))
    np.add.at(total, ids.astype(np.int64).reshape(-1), dy.reshape(-1, dy.shape[-1]))
    return total


def grad_of(emulated_run, dy, ids, rows, **more):
    type_ = TensorType(DType(dy.dtype.name), (rows, dy.shape[-1]))
    return emulated_run(GRAD, {"rows": rows}, (dy, ids), (type_,), **more).outputs[0]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("columns", [0, 1, 5, 8, 32, 300])
@pytest.mark.parametrize("kind", ["dense", "windowed", "permuted"])
def test_rows_are_gathered_for_ids_of_any_type_and_shape(
    kind, columns, dtype, emulated_run, harness
):
    rng = np.random.default_rng(1)
    weight = harness.strided(rng, (90, columns), dtype, kind)
    for index, shape in enumerate(((), (40,), (30, 2), (0, 3))):
        for layout in ("dense", "strided", "transposed"):
            ids = some_ids(rng, 90, shape, IDS[(index + columns) % len(IDS)], layout)
            out = TensorType(DType(dtype), (*shape, columns))
            for offset in (0, 8):
                found = emulated_run(
                    GATHER,
                    {},
                    (weight, ids),
                    (out,),
                    dtypes=(None, DType(ids.dtype.name)),
                    offset_bytes=offset,
                )
                np.testing.assert_array_equal(found.outputs[0], weight[ids])
                assert found.error is None


@pytest.mark.parametrize("label", IDS)
def test_ids_of_every_integer_type_are_read(label, emulated_run):
    weight = np.arange(120, dtype=np.float32)[:, None].copy()
    ids = np.array([0, 119, 3, 3], label)
    out = TensorType(DType.FLOAT32, (4, 1))
    dtypes = None, DType(label)
    (y,) = emulated_run(GATHER, {}, (weight, ids), (out,), dtypes=dtypes).outputs
    np.testing.assert_array_equal(y[:, 0], [0, 119, 3, 3])


def test_rows_go_into_an_output_with_gaps(emulated_run):
    weight = np.arange(40, dtype=np.float32).reshape(10, 4).copy()
    ids = np.array([[3, 9], [0, 3], [1, 1]])
    out = TensorType(DType.FLOAT32, (3, 2, 4))
    for strides in ((96, 32, 4), (8, 96, 24)):
        found = emulated_run(GATHER, {}, (weight, ids), (out,), output_strides=(strides,))
        np.testing.assert_array_equal(found.outputs[0], weight[ids])


def test_aligned_rows_are_copied_16_bytes_at_a_time_and_odd_ones_by_less(emulated_run):
    out = TensorType(DType.FLOAT32, (3, 8))
    weight, ids = np.zeros((5, 8), np.float32), np.zeros(3, np.int32)
    for offset, unit in ((0, 16), (8, 8), (4, 4)):
        found = emulated_run(GATHER, {}, (weight, ids), (out,), offset_bytes=offset)
        (call,) = found.calls
        assert call.words[-2] == unit


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("columns", [1, 5, 33, 300])
@pytest.mark.parametrize("rows", [1, 3, 700])
def test_the_gradient_is_the_sum_of_the_rows_of_each_id(
    rows, columns, dtype, emulated_run, harness
):
    rng = np.random.default_rng(2)
    for kind in ("dense", "windowed", "permuted"):
        for shape in ((), (60,), (5, 21), (0,)):
            dy = harness.strided(rng, (*shape, columns), dtype, kind)
            ids = some_ids(rng, rows, shape, "int32", "transposed")
            want = sums_of(dy, ids, rows)
            got = grad_of(emulated_run, dy, ids, rows)
            limit = 1e-6 if dtype == "float32" else 1e-13
            np.testing.assert_allclose(got, want, rtol=limit, atol=limit)


def test_float16_is_added_up_in_float64_and_rounded_once(emulated_run):
    rng = np.random.default_rng(5)
    dy, ids = rng.standard_normal((200, 9)).astype(np.float16), rng.integers(0, 4, 200)
    want = sums_of(dy.astype(np.float64), ids, 4).astype(np.float16)
    np.testing.assert_array_equal(grad_of(emulated_run, dy, ids, 4), want)


def test_bfloat16_is_added_up_in_float64_and_rounded_once(emulated_run):
    rng = np.random.default_rng(6)
    wide = rng.standard_normal((200, 9)).astype(np.float32)
    dy = (wide.view(np.uint32) >> 16).astype(np.uint16)
    ids = rng.integers(0, 4, 200)
    want = sums_of((dy.astype(np.uint32) << 16).view(np.float32), ids, 4)
    out = TensorType(DType.BFLOAT16, (4, 9))
    (got,) = emulated_run(GRAD, {"rows": 4}, (dy, ids), (out,)).outputs
    np.testing.assert_allclose((got.astype(np.uint32) << 16).view(np.float32), want, rtol=2.0**-8)


@pytest.mark.parametrize("num", [CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 1200])
@pytest.mark.parametrize("hot", [0.0, 0.5, 1.0])
def test_runs_that_go_over_chunks_are_joined(num, hot, emulated_run):
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 60, num)
    ids[rng.random(num) < hot] = 17
    dy = rng.standard_normal((num, 40)).astype(np.float32)
    got = grad_of(emulated_run, dy, ids, 61)
    np.testing.assert_allclose(got, sums_of(dy, ids, 61), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(got[60], 0)


def test_a_sum_of_many_rows_of_one_id_is_rounded_once(emulated_run):
    dy, ids = np.full((70_000, 2), 0.1, np.float32), np.ones(70_000, np.int32)
    got = grad_of(emulated_run, dy, ids, 2, seeds=(0,))
    np.testing.assert_array_equal(got[1], dy.astype(np.float64).sum(0).astype(np.float32))


def test_the_sums_have_the_bits_of_the_hosts_where_no_run_is_cut(emulated_run, native_call):
    rng = np.random.default_rng(4)
    dy, ids = rng.standard_normal((60, 7)).astype(np.float32), rng.integers(0, 9, 60)
    want = np.zeros((9, 7), np.float32)
    host = HOST["embedding_grad"]
    (want,) = native_call.call(host, {"rows": 9}, (dy, ids), (want,))
    np.testing.assert_array_equal(grad_of(emulated_run, dy, ids, 9), want)


@pytest.mark.parametrize(("bad", "label"), [(5, "int64"), (-1, "int8"), (2**63 + 1, "uint64")])
@pytest.mark.parametrize("op", ["embedding", "embedding_grad"])
def test_a_bad_id_is_told_in_the_words_of_the_host(op, bad, label, emulated_run, native_call):
    ids = np.zeros((2, 3), label)
    ids[0, 2] = ids[1, 2] = bad
    ids[1, 0] = 4
    table, dy = np.ones((5, 2), np.float32), np.ones((2, 3, 2), np.float32)
    given = (table, ids) if op == "embedding" else (dy, ids)
    wanted = TensorType(DType.FLOAT32, dy.shape if op == "embedding" else table.shape)
    kernel = GATHER if op == "embedding" else GRAD
    found = emulated_run(kernel, {"rows": 5}, given, (wanted,))
    with pytest.raises(IndexError) as said:
        native_call.call(HOST[op], {"rows": 5}, given, (np.zeros(wanted.shape, np.float32),))
    assert isinstance(found.error, IndexError)
    assert str(found.error) == str(said.value)
    if op == "embedding":
        np.testing.assert_array_equal(found.outputs[0][..., 0], [[1, 1, 0], [1, 1, 0]])
    else:
        np.testing.assert_array_equal(found.outputs[0][:, 0], [3, 0, 0, 0, 1])


def test_any_id_is_bad_for_a_table_without_rows(emulated_run):
    ids, table = np.array(0), np.zeros((0, 3), np.float32)
    found = emulated_run(GATHER, {}, (table, ids), (TensorType(DType.FLOAT32, (3,)),))
    assert str(found.error) == "id 0 at position () is outside an empty range"
    dy = np.zeros(3, np.float32)
    found = emulated_run(GRAD, {"rows": 0}, (dy, ids), (TensorType(DType.FLOAT32, (0, 3)),))
    assert str(found.error) == "id 0 at position () is outside an empty range"


def test_a_bad_id_is_told_where_a_row_has_no_columns(emulated_run):
    ids, dy = np.array([0, 7]), np.zeros((2, 0), np.float32)
    found = emulated_run(GRAD, {"rows": 3}, (dy, ids), (TensorType(DType.FLOAT32, (3, 0)),))
    assert str(found.error) == "id 7 at position 1 is outside 0..2"


def test_ids_that_are_no_integers_are_not_taken(harness):
    weight, out = np.zeros((4, 6)), np.zeros((3, 6))
    operands = tuple(map(harness.operand, (weight, np.zeros(3), out)))
    assert GATHER.query({}, operands[:2], operands[2:]) is None
    assert GRAD.query({"rows": 4}, (operands[2], operands[1]), operands[:1]) is None


def test_a_million_ids_need_a_sixteenth_of_their_rows_and_sixteen_bytes_each_in_scratch(harness):
    rows = TensorType(DType.FLOAT32, (1 << 20, 768))
    dy = harness.operand(np.broadcast_to(np.zeros(768, np.float32), rows.shape))
    ids = harness.operand(np.zeros(1 << 20, np.int32))
    out = harness.operand(np.zeros((8, 768), np.float32))
    needs = GRAD.query({"rows": 8}, (dy, ids), (out,))
    most = rows.size_bytes // 16 + (17 << 20) + 4096
    assert rows.size_bytes // 16 < needs.workspace_bytes <= most


def test_no_call_asks_for_more_threads_than_a_block_may_have(emulated_run):
    dy, ids = np.zeros((3, 2000), np.float32), np.zeros(3, np.int32)
    out = TensorType(DType.FLOAT32, (4, 2000))
    found = emulated_run(GRAD, {"rows": 4}, (dy, ids), (out,), seeds=(0,))
    for call in found.calls:
        if isinstance(call, RunKernel):
            assert call.num_threads % 32 == 0
            assert call.num_threads <= 1024
