"""Regions on a GPU, run on the host: against float64, and what of them is scratch."""

from __future__ import annotations

import kernel_calls as harness
import numpy as np
import pytest
from fused_programs import Builder
from kernel_calls import bind_to
from wide_regions import (
    BF16,
    F32,
    F64,
    FULL,
    dtypes_of,
    expected,
    loss_operands,
    loss_region,
    product_then,
)

from actors.kernels.common.kernel import Operand, Piece, size_bytes
from actors.kernels.cuda import region as cuda_region
from actors.kernels.cuda.calls import RunProduct
from actors.kernels.cuda.catalogue import kernels_by_name
from actors.kernels.cuda.kernel import DeviceView
from compiler.contract.program import Kind
from compiler.contract.types import DType, TensorType, contiguous_strides, from_bits, to_bits

KERNEL = kernels_by_name("h200")["cuda.region"]
COLUMN, ROW = Kind.COLUMN, Kind.ROW


def run(emulated_run, region, dtypes, arrays, **options):
    return emulated_run(
        KERNEL, {"region": region}, tuple(arrays), region.outputs, dtypes=dtypes, **options
    )


def compare(region, wanted, dtype, arrays, got):
    tolerance = {F32: 2e-5, F64: 1e-12, BF16: 2e-2}[dtype]
    want = expected(dtype, arrays)
    for key, array in zip(wanted, got.outputs, strict=True):
        np.testing.assert_allclose(array, want[key], rtol=tolerance, atol=tolerance, err_msg=key)


def sums_of(got):
    """Products of a run that were added up over chunks, by whether the first of them was."""
    return [call.product.beta for call in got.calls if isinstance(call, RunProduct)]


def test_the_first_chunk_writes_sums_and_the_others_add_to_them(emulated_run):
    region, _ = loss_region(F32, 20, 17, 4, 8, ("losses", "dw"))
    arrays = loss_operands(F32, 20, 17, 4, False)
    got = run(emulated_run, region, dtypes_of(F32, 5), arrays, seeds=(0,))
    assert sums_of(got) == [0.0, 0.0, 0.0, 1.0, 0.0, 1.0]  # logits and dw, of three chunks


def followed(make):
    """A product and the program that reads it."""
    return product_then(make(), 9, 12, F32)


def bias_gelu():
    b = Builder()
    h = b.op("add", b.input(FULL, F32), b.input(COLUMN, F32))
    return b.program(h, b.op("mul", h, b.op("tanh", h)))


def normalised():
    """Rows minus their sum: the product is read again after it was reduced."""
    b = Builder()
    x, other = b.input(FULL, F32), b.input(FULL, F32)
    h = b.op("add", x, other)
    return b.program(b.op("sub", h, b.reduce("row_sum", h)), b.reduce("column_sum", h))


def low():
    """bfloat16 in, float32 between, bfloat16 out."""
    b = Builder()
    h = b.op("add", b.input(FULL, F32), b.input(COLUMN, F32))
    return b.program(b.cast(h, BF16))


def factors(m=9, n=12, k=5, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(np.float32) for s in ((m, k), (k, n))]


def needs_of(region, types):
    """What a region needs on dense operands."""
    given, made = [
        tuple([Operand(x, 0, contiguous_strides(x.shape, x.dtype.itemsize)) for x in own])
        for own in (types, region.outputs)
    ]
    return harness.needs_of(KERNEL, {"region": region}, given, made)


def loss_types(rows, columns, width):
    shapes = [(rows, width), (width, columns), (columns, width), (rows,), ()]
    return [TensorType(d, s) for d, s in zip(dtypes_of(F32, 5), shapes, strict=True)]


def test_a_product_lies_where_an_output_of_its_program_will_be(emulated_run):
    region = followed(bias_gelu)
    arrays = [*factors(), np.linspace(-1, 1, 12).astype(np.float32)]
    got = run(emulated_run, region, [F32] * 3, arrays)
    h = arrays[0].astype(np.float64) @ arrays[1] + arrays[2]
    np.testing.assert_allclose(got.outputs[0], h, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.outputs[1], h * np.tanh(h), rtol=1e-5, atol=1e-5)
    assert got.needs.workspace_bytes == 0


def test_a_product_that_is_read_again_after_a_sum_lies_where_an_output_will_be(emulated_run):
    region = followed(normalised)
    other = np.random.default_rng(3).standard_normal((9, 12)).astype(np.float32)
    arrays = [*factors(), other]
    h = arrays[0].astype(np.float64) @ arrays[1] + other
    want = (h - h.sum(1, keepdims=True), h.sum(0))
    assert needs_of(region, [TensorType(F32, x.shape) for x in arrays]).in_place == ()
    got = run(emulated_run, region, [F32] * 3, arrays)
    for array, expected_ in zip(got.outputs, want, strict=True):
        np.testing.assert_allclose(array, expected_, rtol=1e-5, atol=2e-5)
    # Nothing but the one partial row of the sum over rows.
    assert got.needs.workspace_bytes == size_bytes((Piece((12,), np.dtype(np.float64)),))


def test_products_of_bfloat16_keep_their_sums_for_the_program(emulated_run):
    region = followed(low)
    a, b = [to_bits(x) for x in factors()]
    bias = np.linspace(-1, 1, 12).astype(np.float32)
    got = run(emulated_run, region, [BF16, BF16, F32], [a, b, bias])
    h = from_bits(a).astype(np.float64) @ from_bits(b) + bias
    np.testing.assert_allclose(from_bits(got.outputs[0]), h, rtol=2**-7, atol=1e-4)


def apart(array, by=2):
    """The same numbers, `by` elements apart in every row."""
    wide = np.zeros((*array.shape[:-1], array.shape[-1] * by), array.dtype)
    wide[..., ::by] = array
    return wide[..., ::by]


@pytest.mark.parametrize("which", range(3))
def test_operands_without_neighbours_are_copied_first(emulated_run, which):
    region = followed(normalised)
    other = np.random.default_rng(3).standard_normal((9, 12)).astype(np.float32)
    arrays = [*factors(), other]
    want = run(emulated_run, region, [F32] * 3, arrays).outputs
    arrays[which] = apart(arrays[which])
    got = run(emulated_run, region, [F32] * 3, arrays)
    for array, expected_ in zip(got.outputs, want, strict=True):
        np.testing.assert_array_equal(array, expected_)


@pytest.mark.parametrize("strides", [(4 * 15, 4), (8 * 12, 8)], ids=["window", "apart"])
def test_outputs_may_lie_apart(emulated_run, strides):
    region = followed(bias_gelu)
    arrays = [*factors(), np.linspace(-1, 1, 12).astype(np.float32)]
    want = run(emulated_run, region, [F32] * 3, arrays).outputs
    got = run(emulated_run, region, [F32] * 3, arrays, output_strides=[strides, strides])
    for array, expected_ in zip(got.outputs, want, strict=True):
        np.testing.assert_array_equal(array, expected_)


def test_sums_that_lie_apart_are_copied_last(emulated_run):
    region, wanted = loss_region(F32, 20, 17, 4, 8, ("losses", "dx", "dw", "db"), True)
    arrays = loss_operands(F32, 20, 17, 4, True)
    strides = [None, (4 * 9, 4), (4 * 8, 8), (12,)]
    got = run(emulated_run, region, dtypes_of(F32, 6), arrays, output_strides=strides, seeds=(0,))
    compare(region, wanted, F32, arrays, got)


def test_scratch_is_one_chunk_and_the_gradient_lies_over_the_logits():
    region, _ = loss_region(F32, 4096, 4096, 8, 512, ("losses", "dx", "dw"))
    needs = needs_of(region, loss_types(4096, 4096, 8))
    chunk = 512 * 4096 * 4
    assert chunk <= needs.workspace_bytes < 1.5 * chunk + (32 << 20)


def test_durations_grow_with_the_rows():
    def took(rows):
        region, _ = loss_region(F32, rows, 4096, 64, 512, ("losses", "dx", "dw"))
        return needs_of(region, loss_types(rows, 4096, 64)).duration_ns

    assert took(8192) == pytest.approx(2 * took(4096), rel=0.1)


def test_a_sum_that_forgets_its_earlier_chunks_is_found(emulated_run, monkeypatch):
    right = cuda_region.PlannedProduct.calls
    monkeypatch.setattr(
        cuda_region.PlannedProduct, "calls", lambda self, x, scratch, beta: right(self, x, scratch)
    )
    region, wanted = loss_region(F32, 20, 17, 4, 8, ("losses", "dw"))
    arrays = loss_operands(F32, 20, 17, 4, False)
    got = run(emulated_run, region, dtypes_of(F32, 5), arrays, seeds=(0,))
    with pytest.raises(AssertionError, match="dw"):
        compare(region, wanted, F32, arrays, got)


def test_a_program_that_reads_the_rows_of_another_chunk_is_found(emulated_run, monkeypatch):
    right = cuda_region._CudaSteps._whole
    monkeypatch.setattr(
        cuda_region._CudaSteps, "_whole", lambda self, v, first: right(self, v, first // 2)
    )
    region, wanted = loss_region(F32, 6, 17, 4, 2, ("losses", "dx"))
    arrays = loss_operands(F32, 6, 17, 4, False)
    with pytest.raises(AssertionError):
        compare(
            region, wanted, F32, arrays,
            run(emulated_run, region, dtypes_of(F32, 5), arrays, seeds=(0,)),
        )  # fmt: skip


def test_the_library_works_at_a_multiple_of_256():
    region, _ = loss_region(F32, 1000, 4097, 64, 250, ("losses", "dx", "dw"))
    places = iter(range(1 << 40, 1 << 50, 1 << 40))

    def view(type_):
        strides = contiguous_strides(type_.shape, type_.dtype.itemsize)
        return DeviceView(next(places), type_, strides)

    given = tuple([view(x) for x in loss_types(1000, 4097, 64)])
    size = needs_of(region, loss_types(1000, 4097, 64)).workspace_bytes
    made, space = tuple(map(view, region.outputs)), view(TensorType(DType.UINT8, (size,)))
    calls = bind_to(KERNEL, {"region": region}, given, made, space)
    places = [call.workspace for call in calls if isinstance(call, RunProduct)]
    assert len(places) == 12
    assert {place % 256 for place in places} == {0}
    assert all([space.address <= place < space.address + size for place in places])
