import numpy as np
import pytest

from actors.kernels.library import launch
from actors.kernels.native.embedding import EMBEDDING_UPDATE_KERNELS, NATIVE_EMBEDDING_KERNELS
from actors.kernels.native.fused import FUSED_KERNELS
from actors.kernels.reference.embedding import EMBEDDING_KERNELS, EMBEDDING_UPDATE
from actors.kernels.reference.fused import NUMPY_FUSED_KERNELS

OF_ROWS = (*NATIVE_EMBEDDING_KERNELS, *EMBEDDING_UPDATE_KERNELS)
NATIVE = {k.op: k for k in (*OF_ROWS, *FUSED_KERNELS)}
NUMPY = {k.op: k for k in (*EMBEDDING_KERNELS, EMBEDDING_UPDATE, *NUMPY_FUSED_KERNELS)}
NO_DECAY = {"weight_decay": 0.0}
IDS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def some_ids(rng, high, shape, dtype="int64", kind="dense"):
    """Ids with many repeats, laid out as asked for."""
    ids = rng.integers(0, high, shape)
    if kind == "strided":
        wide = np.zeros((*shape, 3), dtype)
        wide[..., 1] = ids
        return wide[..., 1]
    if kind == "transposed" and len(shape) == 2:
        return ids.T.astype(dtype).copy().T
    return ids.astype(dtype)


@pytest.fixture
def descent(harness):
    """Return a function from the inputs of plain descent to its attributes in a plan."""
    return lambda inputs, op="embedding_sgd_update": harness.fused(op, NO_DECAY, inputs)[1]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("columns", [1, 5, 8, 16, 32])
def test_embedding_gathers_rows_for_ids_of_any_type_and_shape(
    columns, dtype, native, harness, native_call, pieces
):
    rng = np.random.default_rng(1)
    for kind in ("dense", "windowed"):
        weight = harness.strided(rng, (90, columns), dtype, kind)
        for index, shape in enumerate(((), (40,), (30, 20), (0, 3))):
            for layout in ("dense", "strided", "transposed"):
                ids = some_ids(rng, 90, shape, IDS[(index + columns) % len(IDS)], layout)
                out = np.zeros((*shape, columns), dtype)
                (y,) = native_call.call(NATIVE["embedding"], {}, (weight, ids), (out,))
                np.testing.assert_array_equal(y, weight[ids])


@pytest.mark.parametrize("label", IDS)
def test_ids_of_every_integer_type_are_read(label, native, native_call):
    weight = np.arange(120, dtype=np.float32)[:, None].copy()
    ids = np.array([0, 119, 3, 3], label)
    (y,) = native_call.call(NATIVE["embedding"], {}, (weight, ids), (np.zeros((4, 1), "f4"),))
    np.testing.assert_array_equal(y[:, 0], [0, 119, 3, 3])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("columns", [1, 5, 130, 300])
@pytest.mark.parametrize("rows", [3, 700])
def test_embedding_grad_adds_rows_in_the_order_of_the_ids(
    rows, columns, dtype, native, harness, native_call, pieces
):
    rng = np.random.default_rng(2)
    for kind in ("dense", "windowed", "permuted"):
        for shape in ((), (60,), (5, 21), (0,)):
            dy = harness.strided(rng, (*shape, columns), dtype, kind)
            ids = some_ids(rng, rows, shape, "int32", "transposed")
            out = np.full((rows, columns), np.nan, dtype)
            attrs = {"rows": rows}
            (got,) = native_call.call(NATIVE["embedding_grad"], attrs, (dy, ids), (out,))
            want = np.zeros((rows, columns), np.float64)
            for index in np.ndindex(shape):
                want[ids[index]] += dy[index]
            np.testing.assert_array_equal(got, want.astype(dtype))


@pytest.mark.parametrize("kernels", [NUMPY, NATIVE], ids=["numpy", "native"])
@pytest.mark.parametrize("op", ["embedding_grad", "embedding_update"])
def test_the_sum_of_many_rows_of_one_id_loses_less_than_a_millionth(
    op, kernels, native, native_call, descent
):
    dy, ids = np.full((200_000, 3), 0.1, np.float32), np.ones(200_000, np.int64)
    given, attrs, sign = (dy, ids), {"rows": 2}, 1
    if op == "embedding_update":
        given = (np.zeros((2, 3), np.float32), dy, ids, np.array(1, np.float32))
        attrs, sign = descent(given), -1
    out = np.zeros((2, 3), np.float32)
    (got,) = native_call.call(kernels[op], attrs, given, (out,), launches=1)
    np.testing.assert_allclose(sign * got[1], dy.astype(np.float64).sum(0), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("columns", [1, 5, 16, 600])
@pytest.mark.parametrize("num_rows", [4, 500])
def test_descent_on_rows_has_the_bits_of_gradient_and_update(
    num_rows, columns, dtype, native, harness, native_call, descent, pieces
):
    rng = np.random.default_rng(3)
    for shape in ((), (60,), (5, 21), (0,)):
        param = rng.standard_normal((num_rows, columns)).astype(dtype)
        dy = harness.strided(rng, (*shape, columns), dtype, "windowed")
        ids = some_ids(rng, num_rows, shape, "int32", "strided")
        lr = np.array(0.1, dtype)
        inputs = (param, dy, ids, lr)
        for kernels in (NATIVE, NUMPY):
            attrs, table = {"rows": num_rows}, np.zeros_like(param)
            (table,) = native_call.call(kernels["embedding_grad"], attrs, (dy, ids), (table,))
            dense = (param, table, lr)
            attrs = descent(dense, "sgd_update")
            (want,) = native_call.call(kernels["fused"], attrs, dense, (np.zeros_like(param),))
            sparse, attrs = kernels["embedding_update"], descent(inputs)
            (over,) = native_call.in_place(sparse, attrs, inputs, ((0, 0),))
            np.testing.assert_array_equal(over, want)


@pytest.mark.parametrize("kernels", [NUMPY, NATIVE], ids=["numpy", "native"])
@pytest.mark.parametrize(("bad", "label"), [(5, "int64"), (-1, "int64"), (2**63 + 1, "uint64")])
def test_an_id_out_of_range_is_named_with_its_position(
    bad, label, kernels, native, native_call, descent
):
    ids = np.zeros((2, 3), label)
    ids[1, 2] = bad
    table, dy, lr = np.zeros((5, 2)), np.zeros((2, 3, 2)), np.array(1.0)
    text = rf"^id {bad} at position \(1, 2\) is outside 0\.\.4$"
    calls = {
        "embedding": ((table, ids), dy),
        "embedding_grad": ((dy, ids), table),
        "embedding_update": ((table, dy, ids, lr), table),
    }
    attrs = {**descent((table, dy, ids, lr)), "rows": 5}
    for op, (inputs, out) in calls.items():
        with pytest.raises(IndexError, match=text):
            native_call.call(kernels[op], attrs, inputs, (out,))


def test_a_bad_id_leaves_the_table_as_it_was_and_the_next_batch_runs(native, native_call, descent):
    table, dy, lr = np.ones((5, 2)), np.ones((3, 2)), np.array(1.0)
    ids = np.array([0, 9, 1])
    inputs = (table, dy, ids, lr)
    kernel, attrs = NATIVE["embedding_update"], descent(inputs)
    launch, _, _ = native_call.bind(kernel, attrs, inputs, (table,))
    with pytest.raises(IndexError):
        launch()
    np.testing.assert_array_equal(table, 1)
    ids[1] = 0
    launch()
    np.testing.assert_array_equal(table[:, 0], [-1, 0, 1, 1, 1])


def test_rows_that_are_not_dense_are_left_to_numpy(native, native_call):
    weight, ids, out = np.zeros((4, 6)).T, np.zeros(3, int), np.zeros((3, 4))
    operands = tuple(map(native_call.operand, (weight, ids, out)))
    assert NATIVE["embedding"].query({}, operands[:2], operands[2:]) is None


def test_sums_have_the_same_bits_with_one_thread_and_with_two(
    with_threads, native_call, descent, monkeypatch
):
    monkeypatch.setattr(launch, "CHUNK_BYTES", 4 << 10)
    rng = np.random.default_rng(5)
    for rows, columns in ((50, 512), (40_000, 16)):
        dy = rng.standard_normal((3000, columns), dtype=np.float32)
        ids, param = some_ids(rng, rows, (3000,)), np.ones((rows, columns), np.float32)
        update = (param, dy, ids, np.array(0.1, np.float32))

        def both(dy=dy, ids=ids, param=param, update=update, rows=rows):
            attrs = {"rows": rows}
            yield native_call.call(NATIVE["embedding_grad"], attrs, (dy, ids), (param,))[0]
            attrs = descent(update)
            yield native_call.call(NATIVE["embedding_update"], attrs, update, (param,))[0]

        alone = with_threads(1, lambda both=both: list(both()))
        pair = with_threads(2, lambda both=both: list(both()))
        for one, other in zip(alone, pair, strict=True):
            np.testing.assert_array_equal(one, other)
