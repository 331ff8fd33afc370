import numpy as np
import pytest

from actors.kernels.cuda.embedding import CudaEmbeddingGrad, CudaEmbeddingUpdate
from actors.kernels.cuda.kernel import gpu_named
from actors.kernels.reference.fused import NUMPY_FUSED_KERNELS
from compiler.contract.types import DType, TensorType

GPU = gpu_named("h200")
GRAD, UPDATE = CudaEmbeddingGrad(GPU), CudaEmbeddingUpdate(GPU)
(FUSED,) = [kernel for kernel in NUMPY_FUSED_KERNELS if kernel.op == "fused"]
NO_DECAY = {"weight_decay": 0.0}


@pytest.fixture
def update(emulated_run, harness):
    """Return a function that updates picked rows of a table on the emulated device."""

    def run(inputs, **more):
        attrs = harness.fused("embedding_sgd_update", NO_DECAY, inputs)[1]
        table = TensorType(DType(inputs[0].dtype.name), inputs[0].shape)
        return emulated_run(UPDATE, attrs, inputs, (table,), in_place=((0, 0),), **more)

    return run


@pytest.fixture
def dense(emulated_run, native_call, harness):
    """Return a function that sums on the emulated device and updates the whole table by numpy."""

    def run(param, dy, ids, lr):
        out = TensorType(DType(param.dtype.name), param.shape)
        (sums,) = emulated_run(GRAD, {"rows": len(param)}, (dy, ids), (out,)).outputs
        given = (param, sums, lr)
        attrs = harness.fused("sgd_update", NO_DECAY, given)[1]
        return native_call.call(FUSED, attrs, given, (np.zeros_like(param),))[0]

    return run


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("columns", [1, 5, 33, 600])
@pytest.mark.parametrize("rows", [4, 500])
def test_the_rows_of_a_batch_have_the_bits_of_gradient_and_update(
    rows, columns, dtype, update, dense, harness
):
    rng = np.random.default_rng(3)
    for shape in ((), (60,), (5, 21), (0,)):
        param = rng.standard_normal((rows, columns)).astype(dtype)
        dy = harness.strided(rng, (*shape, columns), dtype, "windowed")
        ids = rng.integers(0, rows, shape).astype(np.int32)
        inputs = (param, dy, ids, np.array(0.1, dtype))
        np.testing.assert_array_equal(update(inputs).outputs[0], dense(*inputs))


@pytest.mark.parametrize("hot", [0.5, 1.0])
def test_an_id_of_many_chunks_is_updated_once(hot, update, dense):
    rng = np.random.default_rng(4)
    ids = rng.integers(0, 900, 1100)
    ids[rng.random(1100) < hot] = 17
    param = rng.standard_normal((901, 3)).astype(np.float32)
    dy = rng.standard_normal((1100, 3)).astype(np.float32)
    inputs = (param, dy, ids, np.array(0.1, np.float32))
    np.testing.assert_array_equal(update(inputs).outputs[0], dense(*inputs))


def test_a_step_that_is_skipped_leaves_the_table_as_it_was(update):
    table, dy = np.ones((5, 2), np.float32), np.ones((3, 2), np.float32)
    given = (table, dy, np.array([0, 4, 0]), np.array(1, np.float32))
    for skip, first in ((0, -1), (1, 1)):
        found = update((*given, np.array(skip)))
        np.testing.assert_array_equal(found.outputs[0][0], first)


@pytest.mark.parametrize(("bad", "label"), [(5, "int64"), (-1, "int8"), (2**63 + 1, "uint64")])
def test_a_bad_id_is_told_and_updates_no_row(bad, label, update):
    ids = np.zeros((2, 3), label)
    ids[1, 2] = bad
    table, dy = np.ones((5, 2)), np.ones((2, 3, 2))
    found = update((table, dy, ids, np.array(1.0)))
    assert str(found.error) == f"id {bad} at position (1, 2) is outside 0..4"
    np.testing.assert_array_equal(found.outputs[0][:, 0], [-4, 1, 1, 1, 1])


def test_a_table_of_half_precision_is_updated(update, harness):
    table, dy = np.ones((5, 2), np.float16), np.full((3, 2), 0.25, np.float16)
    given = (table, dy, np.array([4, 0, 4]), np.array(0.5, np.float16))
    np.testing.assert_array_equal(update(given).outputs[0][:, 0], [0.875, 1, 1, 1, 0.75])


def test_a_table_that_is_not_dense_is_not_taken(harness):
    table, dy, ids = np.zeros((4, 6)).T, np.zeros((3, 4)), np.zeros(3, int)
    inputs = (table, dy, ids, np.array(1.0))
    attrs = harness.fused("embedding_sgd_update", NO_DECAY, inputs)[1]
    operands = tuple(map(harness.operand, inputs))
    assert UPDATE.query(attrs, operands, operands[:1]) is None
