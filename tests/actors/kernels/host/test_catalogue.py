import threading
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
from error_texts import raises

from actors.kernels.common import kernel
from actors.kernels.common.host_memory import quiet_floating_point
from actors.kernels.common.kernel import KernelNeeds, Operand, Piece
from actors.kernels.host import catalogue
from compiler.contract.errors import InternalError
from compiler.contract.types import DType, TensorType, contiguous_strides

OP_TABLE = (
    "argsort attention attention_grad carry cholesky concat cond conv conv_input_grad "
    "conv_weight_grad copy copy_block det eigh embedding embedding_grad embedding_update fft fused "
    "last_place matmul max max_pool max_pool_grad max_pool_pick mean pad put_rows qr recurrence "
    "region reshape scan slogdet solve sum svd while"
)


def operand(shape, dtype=DType.FLOAT32, strides=None):
    dense = contiguous_strides(shape, dtype.itemsize)
    return Operand(TensorType(dtype, shape), 0, strides or dense)


@dataclass(frozen=True)
class Doubling:
    """A kernel from elsewhere that takes vectors only."""

    name: str = "elsewhere.copy"
    op: str = "copy"

    def query(self, attrs, inputs, outputs):
        return KernelNeeds() if len(inputs[0].shape) == 1 else None

    def bind(self, attrs, inputs, outputs, workspace):
        return lambda: None


@pytest.fixture
def doubling():
    kernel = Doubling()
    catalogue.register(kernel)
    yield kernel
    catalogue.unregister(kernel.name)


def test_every_op_of_the_table_has_a_kernel_and_nothing_else_has():
    assert sorted(OP_TABLE.split()) == sorted({kernel.op for kernel in catalogue.HOST_KERNELS})


def test_names_are_unique_and_lead_back_to_the_kernel():
    binders = catalogue.kernels_by_name()
    assert len({kernel.name for kernel in catalogue.HOST_KERNELS}) == len(catalogue.HOST_KERNELS)
    assert all(binders[kernel.name] is kernel for kernel in catalogue.HOST_KERNELS)


def test_a_registered_kernel_is_preferred_where_it_takes_the_call(doubling):
    vector, matrix = operand((3,)), operand((3, 2))
    assert catalogue.kernels_for("copy")[0].name == doubling.name
    assert catalogue.select_kernel("copy", {}, (vector,), (vector,))[0] == "elsewhere.copy"
    assert catalogue.select_kernel("copy", {}, (matrix,), (matrix,))[0] == "numpy.copy"
    assert "copy:elsewhere.copy" in catalogue.fingerprint()


def test_a_name_that_is_taken_is_refused_with_its_holder(doubling):
    with raises(ValueError):
        catalogue.register(Doubling())
    with raises(ValueError):
        catalogue.register(Doubling(name="numpy.copy"))


def test_taking_back_an_unknown_kernel_is_a_lookup_error():
    with raises(LookupError):
        catalogue.unregister("numpy.copy")


def test_an_unknown_op_and_a_refused_call_are_told_apart():
    x = operand((2, 3))
    with raises(LookupError):
        catalogue.select_kernel("wavelet", {}, (x,), (x,))
    i = operand((0,), DType.INT64)
    with raises(LookupError):
        catalogue.select_kernel(
            "max", {"axes": (0,), "keepdims": False}, (i,), (operand((), DType.INT64),)
        )


def test_refusals_show_strides_that_are_not_dense():
    dy, ids = operand((3, 2)), operand((3,), DType.INT64)
    out = operand((4, 2), strides=(4, 16))
    with raises(LookupError):
        catalogue.select_kernel("embedding_grad", {"rows": 4}, (dy, ids), (out,))


def test_needs_are_the_same_at_every_query_and_grow_with_the_call():
    small, large = operand((4, 4)), operand((512, 512))
    attrs = {"axes": (1,), "keepdims": False}
    needs = [
        catalogue.select_kernel("sum", attrs, (x,), (operand(x.shape[:1]),))[1]
        for x in (small, large, large)
    ]
    assert needs[1] == needs[2]
    assert 0 < needs[0].duration_ns < needs[1].duration_ns
    assert needs[0].workspace_bytes < needs[1].workspace_bytes < large.type.size_bytes


def test_the_fingerprint_names_numpy_and_its_blas():
    assert f"numpy-{np.__version__}" in catalogue.fingerprint()
    assert "blas" in catalogue.fingerprint()


def test_missing_and_wrong_attributes_are_our_own_bug_by_name():
    x = operand((2, 2))
    with raises(InternalError):
        catalogue.select_kernel("concat", {}, (x,), (x,))
    with raises(InternalError):
        catalogue.select_kernel("concat", {"axis": "last"}, (x,), (x,))


def test_scratch_pieces_do_not_overlap_and_are_aligned():
    pieces = (
        Piece((3,), np.dtype(np.float32)),
        Piece((), np.dtype(np.int64)),
        Piece((0, 2), np.dtype(bool)),
    )
    raw = np.zeros(kernel.size_bytes(pieces) + 64, np.uint8)
    start = -raw.ctypes.data % 64
    arrays = kernel.carve(raw[start:], pieces)
    assert kernel.size_bytes(pieces) == 128
    assert [a.ctypes.data - raw[start:].ctypes.data for a in arrays[:2]] == [0, 64]
    assert [a.shape for a in arrays] == [(3,), (), (0, 2)]


def test_too_little_scratch_is_our_own_bug_with_both_sizes():
    piece = Piece((3,), np.dtype(np.float32))
    with raises(InternalError):
        kernel.carve(None, (piece,))


def test_a_quiet_thread_does_not_warn_and_others_still_do():
    caught = []

    def overflow(is_quiet):
        if is_quiet:
            quiet_floating_point()
        try:
            np.exp(np.array([1000.0]))
        except RuntimeWarning as warning:
            caught.append((is_quiet, str(warning)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for is_quiet in (True, False):
            thread = threading.Thread(target=overflow, args=(is_quiet,))
            thread.start()
            thread.join()
    assert caught == [(False, "overflow encountered in exp")]
