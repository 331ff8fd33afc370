"""How products on a GPU are called; their numbers in every layout: `test_conformance`."""

from dataclasses import replace

import numpy as np
import pytest
from emulated_run import loaded, stored
from kernel_calls import bind_to
from kernel_problems import LAYOUTS, heads
from kernel_targets import lying_as
from op_table import normal

from actors.device.cuda.cublaslt import LIBRARY, CublasLt
from actors.kernels.common.kernel import Operand
from actors.kernels.cuda import matmul
from actors.kernels.cuda.calls import FillBytes, RunProduct
from actors.kernels.cuda.catalogue import kernels_on
from actors.kernels.cuda.kernel import DeviceView, gpu_named
from actors.kernels.cuda.nvrtc import find_library
from compiler.contract.types import DType, TensorType, contiguous_strides

GPU = gpu_named("h200")
KERNEL = kernels_on(GPU)["cuda.matmul"]
F32, F64, F16, BF16 = DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16


TYPES = {
    "float32": (F32, F32, 1e-5),
    "float64": (F64, F64, 1e-13),
    "float16": (F16, F16, 2e-3),
    "bfloat16": (BF16, BF16, 1e-2),
    "bfloat16 to float32": (BF16, F32, 1e-5),
}


def compared(emulated_run, a, b, types="float32", **options):
    """Compute a @ b and compare with float64; return what was done."""
    dtype, out, tolerance = TYPES[types]
    a, b = [lying_as(x, stored(x, dtype.value)) for x in (a, b)]
    want = np.matmul(loaded(a), loaded(b))
    scale = np.matmul(np.abs(loaded(a)), np.abs(loaded(b)))
    made = TensorType(out, want.shape)
    run = emulated_run(KERNEL, {}, (a, b), (made,), dtypes=[dtype, dtype], **options)
    got = loaded(run.outputs[0])
    assert got.shape == want.shape
    assert np.all(np.abs(got - want) <= tolerance * scale)
    return run


@pytest.mark.parametrize("offset", [2, 6, 64])
def test_operands_at_odd_places_say_how_they_lie(emulated_run, offset):
    run = compared(emulated_run, *LAYOUTS["dense"], "bfloat16", offset_bytes=offset)
    (call,) = run.calls
    lie = {call.product.a.alignment, call.product.b.alignment, call.product.d.alignment}
    assert lie == {offset & -offset}


@pytest.mark.parametrize("strides", [None, (40, 8)])
def test_a_sum_of_nothing_is_zero(emulated_run, strides):
    run = emulated_run(
        KERNEL, {}, (np.ones((5, 0), np.float32), np.ones((0, 3), np.float32)),
        (TensorType(F32, (5, 3)),), output_strides=[strides],
    )  # fmt: skip
    np.testing.assert_array_equal(run.outputs[0], np.zeros((5, 3)))
    assert not any([isinstance(call, RunProduct) for call in run.calls])
    assert (strides is None) == any([isinstance(call, FillBytes) for call in run.calls])


def products_of(run):
    return [call.product for call in run.calls if isinstance(call, RunProduct)]


def test_one_matrix_for_a_batch_is_one_product_of_all_rows(emulated_run):
    (product,) = products_of(compared(emulated_run, *LAYOUTS["one b"]))
    assert (product.batch, product.d.columns) == (1, 4 * 2 * 5)


def test_heads_are_read_where_they_are_packed(emulated_run):
    run = compared(emulated_run, heads(2, 8, 9, 4), heads(2, 8, 9, 4, 1).swapaxes(-1, -2))
    assert len(run.calls) == 2  # the longer axis of the batch is the library's
    assert {product.batch for product in products_of(run)} == {9}


def test_a_batch_that_lies_evenly_is_one_call(emulated_run):
    run = compared(emulated_run, normal(2, 3, 4, 5, 7), normal(2, 3, 4, 7, 3, seed=1))
    assert [product.batch for product in products_of(run)] == [24]


def test_what_would_be_many_calls_is_copied_instead(emulated_run):
    a = normal(6, 5, 4, 3, 7).transpose(0, 2, 1, 3, 4)
    b = normal(4, 5, 6, 7, 2, seed=1).transpose(2, 0, 1, 3, 4)
    run = compared(emulated_run, a, b)
    assert len(products_of(run)) < 6


def test_a_batch_longer_than_one_call_takes_is_several(emulated_run, monkeypatch):
    monkeypatch.setattr(matmul, "_MOST_PLACES", 3)
    run = compared(emulated_run, normal(7, 2, 3), normal(7, 3, 2, seed=1))
    assert [product.batch for product in products_of(run)] == [3, 3, 1]


def operands(m, n, k, dtype=BF16):
    found = [
        Operand(TensorType(dtype, shape), 0, contiguous_strides(shape, dtype.itemsize))
        for shape in ((m, k), (k, n), (m, n))
    ]
    return found[:2], found[2:]


def test_the_library_has_a_workspace_but_for_tiny_products():
    assert KERNEL.plan({}, *operands(64, 64, 64)).needs.workspace_bytes == 0
    assert KERNEL.plan({}, *operands(512, 512, 4096)).needs.workspace_bytes == 32 << 20
    assert KERNEL.plan({}, *operands(1024, 768, 768)).needs.workspace_bytes == 32 << 20
    older = kernels_on(replace(GPU, capability=(8, 0)))["cuda.matmul"]
    assert older.plan({}, *operands(512, 512, 512)).needs.workspace_bytes == 4 << 20


@pytest.mark.parametrize(
    "extents", [(512, 128, 512), (128, 512, 512), (8, 8, 4096), (512, 512, 64)]
)
def test_a_small_product_has_a_workspace_for_all_parts_that_its_sums_can_have(extents):
    m, n, k = extents
    parts = max(1, k // 64) * 4 * m * n
    given = KERNEL.plan({}, *operands(*extents)).needs.workspace_bytes
    assert parts + (1 << 20) <= given < 32 << 20
    assert given % 256 == 0


def test_durations_follow_tiles_and_bytes():
    def took(*extents):
        return KERNEL.plan({}, *operands(*extents)).needs.duration_ns - GPU.call_ns

    large = 2 * 8192**3 / GPU.product_flops_per_ns["bfloat16"]
    assert large <= took(8192, 8192, 8192) <= 1.1 * large
    assert took(128 * 12, 128 * 11, 512) < 0.6 * took(128 * 12 + 1, 128 * 11, 512)  # a wave more
    # With a long inner extent the tiles of a last wave are shared by more SMs.
    assert took(128 * 12 + 1, 128 * 11, 4096) < 1.4 * took(128 * 12, 128 * 11, 4096)
    assert took(768, 3072, 65536) < 1.25 * (768 * 3072 / 8192**2) * (65536 / 8192) * large
    assert took(65536, 8, 8) >= 2 * 65536 * 16 / GPU.l2_bytes_per_ns


FAULTS = {
    "a is turned": lambda p: replace(p, transpose_b=not p.transpose_b),
    "b is turned": lambda p: replace(p, transpose_a=not p.transpose_a),
    "rows of a are too far apart": lambda p: replace(p, b=apart(p.b, 1)),
    "rows of b are too far apart": lambda p: replace(p, a=apart(p.a, 1)),
    "rows of the result are too near": lambda p: replace(p, d=apart(p.d, -1)),
    "what was there is added": lambda p: replace(p, beta=1.0),
    "a batch stands still": lambda p: replace(p, b=replace(p.b, batch_stride=0)),
    "the last of a batch is left out": lambda p: replace(p, batch=p.batch - 1),
}


def apart(layout, more):
    return replace(layout, column_stride=layout.column_stride + more)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_record_is_found(emulated_run, monkeypatch, name):
    right = matmul._record
    monkeypatch.setattr(matmul, "_record", lambda *given: FAULTS[name](right(*given)))
    with pytest.raises(AssertionError):
        compared(emulated_run, normal(4, 6, 6), normal(4, 6, 6, seed=1))


@pytest.fixture(scope="module")
def library():
    try:
        return CublasLt(find_library(LIBRARY))
    except OSError as error:
        pytest.skip(f"the extra [cuda] is not installed: {error}")


@pytest.mark.cuda
@pytest.mark.parametrize("types", TYPES)
def test_descriptors_of_the_library_say_what_the_records_say(library, types):
    dtype, out, _ = TYPES[types]
    for a, b in LAYOUTS.values():
        shape = np.matmul(a, b).shape
        given = [lying_as(x, stored(x, dtype.value)) for x in (a, b)]
        strides = [x.strides for x in given] + [contiguous_strides(shape, out.itemsize)]
        kinds = [(dtype, a.shape), (dtype, b.shape), (out, shape)]
        views = [
            DeviceView(4096 * n + 64, TensorType(*kind), own)
            for n, (kind, own) in enumerate(zip(kinds, strides, strict=True))
        ]
        for call in bind_to(KERNEL, {}, tuple(views[:2]), tuple(views[2:]), scratch_of(1 << 20)):
            if isinstance(call, RunProduct):
                said = library.read_back(library.describe(call.product, call.workspace_bytes))
                assert said == call.product


def scratch_of(size):
    return DeviceView(1 << 30, TensorType(DType.UINT8, (size,)), (1,))
