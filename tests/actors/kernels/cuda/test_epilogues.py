"""What a program adds to a product goes along with the product, and nothing else does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fused_programs import Builder
from wide_regions import product_then

from actors.kernels.common.kernel import Operand
from actors.kernels.cuda import epilogues
from actors.kernels.cuda.calls import LtEpilogue, RunKernel, RunProduct
from actors.kernels.cuda.catalogue import kernels_by_name
from actors.kernels.cuda.epilogues import AddedTerms, added_terms, match_epilogues
from compiler.contract.program import Kind
from compiler.contract.region import TiledLoop, TileStep, TileStepKind, TileValue
from compiler.contract.types import DType, TensorType, contiguous_strides, from_bits, to_bits

KERNEL = kernels_by_name("h200")["cuda.region"]
FULL, ROW, COLUMN = Kind.FULL, Kind.ROW, Kind.COLUMN
F32, F64, BF16 = DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16
ROWS, COLUMNS, INNER = 9, 12, 5


def biased(dtype=F32):
    b = Builder()
    return b.program(b.op("add", b.input(FULL, dtype), b.input(COLUMN, dtype)))


def residual(dtype=F32, kind=FULL):
    b = Builder()
    x, bias, r = b.input(FULL, dtype), b.input(COLUMN, dtype), b.input(kind, dtype)
    return b.program(b.op("add", r, b.op("add", x, bias)))


def only_residual(dtype=F32):
    b = Builder()
    return b.program(b.op("add", b.input(FULL, dtype), b.input(FULL, dtype)))


def two_biases():
    b = Builder()
    x, one, other = b.input(FULL, F32), b.input(COLUMN, F32), b.input(COLUMN, F32)
    return b.program(b.op("add", b.op("add", x, one), other))


def doubled():
    b = Builder()
    x, bias = b.input(FULL, F32), b.input(COLUMN, F32)
    return b.program(b.op("add", b.op("add", x, x), bias))


def two_results():
    b = Builder()
    h = b.op("add", b.input(FULL, F32), b.input(COLUMN, F32))
    return b.program(h, b.op("tanh", h))


def scaled():
    b = Builder()
    return b.program(b.op("mul", b.input(FULL, F32), b.input(COLUMN, F32)))


def lowered():
    b = Builder()
    return b.program(b.cast(b.op("add", b.input(FULL, F32), b.input(COLUMN, F32)), BF16))


def repeated():
    program = only_residual()
    return replace(program, inputs=(program.inputs[0], replace(program.inputs[1], count=3)))


TAKEN = {
    "bias": (biased(), AddedTerms(1, None)),
    "bias of bfloat16": (biased(BF16), AddedTerms(1, None)),
    "residual": (only_residual(), AddedTerms(None, 1)),
    "both": (residual(), AddedTerms(1, 2)),
}
REFUSED = {
    "float64": biased(F64),
    "a row": residual(kind=ROW),
    "two biases": two_biases(),
    "twice the product": doubled(),
    "two results": two_results(),
    "a factor": scaled(),
    "a result of another type": lowered(),
    "a residual that is repeated": repeated(),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_sum_with_a_row_and_a_matrix_is_found(name):
    program, terms = TAKEN[name]
    assert added_terms(program, program.outputs[0], 0, ROWS) == terms


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_else_is_taken_for_one(name):
    assert match_epilogues(REFUSED[name], 0, ROWS) == ()


def region_of(program, shape=(ROWS, COLUMNS)):
    return product_then(program, ROWS, COLUMNS, program.inputs[0].dtype, shape)


def numbers(*shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def given(program, dtype, shape=(ROWS, COLUMNS)):
    """Factors of a type, then what the program adds."""
    shapes = [(ROWS, INNER), (INNER, COLUMNS)]
    types = [dtype, dtype]
    for entry in program.inputs[1:]:
        shapes.append({FULL: shape, ROW: (ROWS,), COLUMN: (COLUMNS,)}[entry.kind])
        types.append(entry.dtype)
    arrays = [numbers(*s, seed=n) for n, s in enumerate(shapes)]
    stored = [
        to_bits(x) if t is BF16 else x.astype(t.value) for x, t in zip(arrays, types, strict=True)
    ]
    return stored, types


def computed(arrays, types):
    wide = [
        (from_bits(x) if t is BF16 else x).astype(np.float64)
        for x, t in zip(arrays, types, strict=True)
    ]
    total = wide[0] @ wide[1]
    for term in wide[2:]:
        total = total + term.reshape(-1, COLUMNS)
    return total


def run(emulated_run, program, dtype, shape=(ROWS, COLUMNS), **options):
    arrays, types = given(program, dtype, shape)
    region = region_of(program, shape)
    got = emulated_run(
        KERNEL, {"region": region}, tuple(arrays), region.outputs, dtypes=types, **options
    )
    out = got.outputs[0].reshape(-1, COLUMNS)
    wide = from_bits(out) if region.outputs[0].dtype is BF16 else out
    tolerance = 2**-7 if region.outputs[0].dtype is BF16 else 1e-5
    np.testing.assert_allclose(wide, computed(arrays, types), rtol=tolerance, atol=tolerance)
    return got


CASES = {
    "bias": (biased(), F32),
    "bias of bfloat16": (biased(BF16), BF16),
    "bias on float32 of bfloat16": (biased(), BF16),
    "residual": (only_residual(), F32),
    "both of bfloat16": (residual(BF16), BF16),
    "both on float32 of bfloat16": (residual(), BF16),
}


@pytest.mark.parametrize("name", CASES)
def test_a_product_and_what_is_added_is_one_call(emulated_run, name):
    program, dtype = CASES[name]
    (call,) = run(emulated_run, program, dtype).calls
    terms = added_terms(program, program.outputs[0], 0, ROWS)
    assert isinstance(call, RunProduct)
    assert (call.product.epilogue is LtEpilogue.BIAS) == (terms.bias is not None)
    assert (call.product.beta == 1.0, call.c != call.d) == (terms.residual is not None,) * 2


@pytest.mark.parametrize("name", CASES)
def test_product_and_kernel_one_after_the_other_give_the_same(emulated_run, name):
    program, dtype = CASES[name]
    calls = run(emulated_run, program, dtype, seeds=(0,), way=1).calls
    assert {type(call) for call in calls} == {RunProduct, RunKernel}


def test_tensors_of_more_axes_are_matrices_to_the_library(emulated_run):
    (call,) = run(emulated_run, residual(), F32, shape=(3, 3, COLUMNS)).calls
    assert (call.product.d.rows, call.product.d.columns) == (COLUMNS, ROWS)


def test_a_product_that_is_added_to_itself_is_made_first(emulated_run):
    steps = (
        TileStep(TileStepKind.PRODUCT, (0, 1), (2,)),
        TileStep(TileStepKind.PROGRAM, (2, 2), (3,), only_residual()),
    )
    outputs = (TensorType(F32, (ROWS, COLUMNS)),)
    region = TiledLoop(ROWS, COLUMNS, 0, 2, (TileValue(F32, FULL),), outputs, steps)
    a, b = numbers(ROWS, INNER, seed=0), numbers(INNER, COLUMNS, seed=1)
    got = emulated_run(KERNEL, {"region": region}, (a, b), outputs)
    np.testing.assert_allclose(got.outputs[0], 2 * (a @ b), rtol=1e-5, atol=1e-5)


def test_a_product_that_is_a_result_too_is_stored(emulated_run):
    steps = (
        TileStep(TileStepKind.PRODUCT, (0, 1), (3,)),
        TileStep(TileStepKind.PROGRAM, (3, 2), (4,), biased()),
    )
    outputs = (TensorType(F32, (ROWS, COLUMNS)),) * 2
    region = TiledLoop(ROWS, COLUMNS, 0, 3, (), outputs, steps)
    a, b = numbers(ROWS, INNER, seed=0), numbers(INNER, COLUMNS, seed=1)
    bias = numbers(COLUMNS, seed=2)
    got = emulated_run(KERNEL, {"region": region}, (a, b, bias), outputs)
    for array, want in zip(got.outputs, (a @ b, a @ b + bias), strict=True):
        np.testing.assert_allclose(array, want, rtol=1e-5, atol=1e-5)


def test_a_result_that_lies_apart_is_made_by_the_program(emulated_run):
    strides = [(COLUMNS * 8, 4)]
    got = run(emulated_run, biased(), F32, output_strides=strides)
    assert any([isinstance(call, RunKernel) for call in got.calls])


def test_the_record_says_how_the_residual_lies(emulated_run):
    (call,) = run(emulated_run, residual(), F32, offset_bytes=4).calls
    assert call.product.d.alignment == 4


def test_a_product_with_terms_is_planned_to_take_less_time():
    region = region_of(biased())
    larger = replace(region, rows=4096, columns=4096, outputs=(TensorType(F32, (4096, 4096)),))
    shapes = [(4096, 64), (64, 4096), (4096,)]
    took = []
    for program in (biased(), scaled()):
        steps = (region.steps[0], replace(region.steps[1], program=program))
        took.append(_duration(replace(larger, steps=steps), shapes))
    assert took[0] < 0.7 * took[1]


def _duration(region, shapes):
    def operand(shape):
        return Operand(TensorType(F32, shape), 0, contiguous_strides(shape, 4))

    given_ = tuple([operand(shape) for shape in shapes])
    made = (operand(region.outputs[0].shape),)
    return KERNEL.plan({"region": region}, given_, made).needs.duration_ns


FAULTS = {
    "the residual is left out": lambda call: replace(call, product=replace(call.product, beta=0.0)),
    "the bias is left out": lambda call: replace(
        call, product=replace(call.product, epilogue=LtEpilogue.NONE)
    ),
    "the result is added to itself": lambda call: replace(call, c=call.d),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(emulated_run, monkeypatch, name):
    right = epilogues.EpilogueProduct._product
    monkeypatch.setattr(
        epilogues.EpilogueProduct, "_product", lambda *given: FAULTS[name](right(*given))
    )
    with pytest.raises(AssertionError):
        run(emulated_run, residual(), F32, seeds=(0,))
