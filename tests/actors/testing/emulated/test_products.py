"""Products as their records say, against float64 over matrices that are laid out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from error_texts import raises

from actors.device.cuda.driver import CudaError
from actors.kernels.cuda.calls import LtEpilogue, LtLayout, LtProduct
from actors.testing.emulated import library_calls
from compiler.contract.types import DType, numpy_dtype

TOLERANCE = {DType.FLOAT64: 1e-13, DType.FLOAT32: 1e-5, DType.FLOAT16: 2e-3, DType.BFLOAT16: 2e-2}


def bits_of(values, dtype):
    if dtype is DType.BFLOAT16:
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(numpy_dtype(dtype))


def floats_of(array, dtype):
    if dtype is DType.BFLOAT16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


class Matrix:
    """A batch of column-major matrices with holes between columns and matrices."""

    def __init__(self, rng, dtype, batch, rows, columns, hole=3):
        stride = rows + hole
        self.layout = LtLayout(dtype, rows, columns, stride, stride * columns + 5, 2)
        self.raw = bits_of(rng.standard_normal((batch, stride * columns + 5)), dtype)
        self.before = self.raw.copy()
        self.batch = batch

    @property
    def address(self):
        return self.raw.ctypes.data

    def places(self, raw):
        rows, columns, stride = self.layout.rows, self.layout.columns, self.layout.column_stride
        whole = raw[:, : columns * stride].reshape(self.batch, columns, stride)
        return whole[:, :, :rows].swapaxes(1, 2)

    @property
    def values(self):
        return floats_of(self.places(self.raw), self.layout.dtype)

    def holes(self, raw):
        kept = raw.copy()
        self.places(kept)[...] = 0
        return kept

    def check_holes(self):
        np.testing.assert_array_equal(self.holes(self.raw), self.holes(self.before))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_product_is_what_its_layouts_say(dtype, transposed, batch, beta):
    rng = np.random.default_rng(1)
    m, n, k = 5, 7, 11
    shapes = [(m, k), (k, n)]
    a, b = (
        Matrix(rng, dtype, batch, *(shape[::-1] if is_transposed else shape))
        for shape, is_transposed in zip(shapes, transposed, strict=True)
    )
    d = Matrix(rng, dtype, batch, m, n)
    left, right = (
        x.values.swapaxes(1, 2) if is_transposed else x.values
        for x, is_transposed in zip((a, b), transposed, strict=True)
    )
    expected = left @ right + beta * d.values
    compute = DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32
    record = LtProduct(a.layout, b.layout, d.layout, *transposed, batch, beta, compute)
    library_calls.run_product(record, a.address, b.address, d.address, d.address)
    np.testing.assert_allclose(d.values, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 9)
    for x in (a, b, d):
        x.check_holes()


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def slope(x, step=1e-6):
    return (gelu(x + step) - gelu(x - step)) / (2 * step)


def with_epilogue(epilogue, dtype, *, bias_size=5, bias_dtype=None):
    """Run a product of float32 or bf16 with an epilogue; returns (a b, d, bias, aux)."""
    rng = np.random.default_rng(2)
    a, b, d = (Matrix(rng, dtype, 1, *shape) for shape in ((5, 11), (11, 7), (5, 7)))
    bias = Matrix(rng, bias_dtype or dtype, 1, bias_size, 1, 0)
    aux = Matrix(rng, dtype, 1, 5, 7, 2)
    record = LtProduct(
        a.layout, b.layout, d.layout, False, False,
        epilogue=epilogue, bias=bias.address, aux=aux.address, aux_stride=aux.layout.column_stride,
        bias_dtype=bias_dtype,
    )  # fmt: skip
    given = [x.values for x in (bias, aux)]
    library_calls.run_product(record, a.address, b.address, d.address, d.address)
    for x in (d, bias, aux):
        x.check_holes()
    return a.values[0], b.values[0], d.values[0], bias, aux, given


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_epilogues_are_those_of_the_library(dtype):
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype] * 9}
    a, b, d, _, _, (bias, _) = with_epilogue(LtEpilogue.BIAS, dtype)
    np.testing.assert_allclose(d, a @ b + bias[0], **close)
    a, b, d, _, _, _ = with_epilogue(LtEpilogue.GELU, dtype)
    np.testing.assert_allclose(d, gelu(a @ b), **close)
    a, b, d, _, aux, (bias, _) = with_epilogue(LtEpilogue.GELU_AUX_BIAS, dtype)
    np.testing.assert_allclose(aux.values[0], a @ b + bias[0], **close)
    np.testing.assert_allclose(d, gelu(a @ b + bias[0]), **close)
    a, b, d, bias, _, (_, aux) = with_epilogue(LtEpilogue.DGELU_BGRAD, dtype)
    np.testing.assert_allclose(d, (a @ b) * slope(aux[0]), **close)
    np.testing.assert_allclose(bias.values[0, :, 0], d.sum(1), rtol=0.05, atol=0.05)
    a, b, d, _, _, (_, aux) = with_epilogue(LtEpilogue.DGELU, dtype)
    np.testing.assert_allclose(d, (a @ b) * slope(aux[0]), **close)
    a, b, d, _, aux, _ = with_epilogue(LtEpilogue.GELU_AUX, dtype)
    np.testing.assert_allclose(aux.values[0], a @ b, **close)
    np.testing.assert_allclose(d, gelu(a @ b), **close)
    a, b, d, bias, _, _ = with_epilogue(LtEpilogue.BGRAD_A, dtype)
    np.testing.assert_allclose(d, a @ b, **close)
    np.testing.assert_allclose(bias.values[0, :, 0], a.sum(1), **close)
    a, b, d, bias, _, _ = with_epilogue(LtEpilogue.BGRAD_B, dtype, bias_size=7)
    np.testing.assert_allclose(bias.values[0, :, 0], b.sum(0), **close)


def test_a_bias_may_have_a_type_of_its_own():
    a, b, _, bias, _, (_, aux) = with_epilogue(
        LtEpilogue.DGELU_BGRAD, DType.BFLOAT16, bias_dtype=DType.FLOAT32
    )
    wanted = ((a @ b) * slope(aux[0])).sum(1)
    np.testing.assert_allclose(bias.values[0, :, 0], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("aux", "stride"), [(8, 8), (16, 12), (16, 4)])
def test_an_aux_that_lies_as_the_library_does_not_take_it_is_refused(aux, stride):
    layout = LtLayout(DType.BFLOAT16, 8, 8, 8)
    record = LtProduct(
        layout, layout, layout, False, False,
        epilogue=LtEpilogue.GELU_AUX, aux=aux, aux_stride=stride,
    )  # fmt: skip
    with raises(CudaError):
        library_calls.described_product(record, 0)
    assert (
        library_calls.described_product(replace(record, aux=16, aux_stride=16), 0).aux_stride == 16
    )


def test_an_inner_extent_of_nothing_gives_zeros():
    rng = np.random.default_rng(3)
    a, b, d = (Matrix(rng, DType.FLOAT32, 1, *shape) for shape in ((5, 0), (0, 7), (5, 7)))
    record = LtProduct(a.layout, b.layout, d.layout, False, False)
    library_calls.run_product(record, a.address, b.address, d.address, d.address)
    np.testing.assert_array_equal(d.values, 0)


@pytest.mark.cuda
def test_what_is_computed_is_what_the_librarys_descriptors_say(monkeypatch):
    library = library_calls._cublaslt()
    if library is None:
        pytest.skip("the extra [cuda] is not installed")
    layout = LtLayout(DType.FLOAT32, 4, 4, 4)
    record = LtProduct(layout, layout, layout, False, True)
    assert library_calls.described_product(record, 0) == record
    describe = library.describe
    turned = lambda product, size: describe(replace(product, transpose_a=True), size)  # noqa: E731
    monkeypatch.setattr(library, "describe", turned)
    assert library_calls.described_product(record, 0) == replace(record, transpose_a=True)
