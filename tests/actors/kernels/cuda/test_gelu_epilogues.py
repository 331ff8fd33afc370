"""GELU and its gradient go along with a product, in the form in which the compiler states them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from wide_regions import product_then

from actors.kernels.cuda import epilogues
from actors.kernels.cuda.calls import LtEpilogue, RunKernel
from actors.kernels.cuda.catalogue import kernels_by_name
from actors.kernels.cuda.epilogues import GeluGradient, gelu_gradient, gelu_operand, match_epilogues
from compiler.contract.attrs import Attrs
from compiler.contract.program import Kind, ProgramInput
from compiler.contract.types import DType, TensorType, from_bits, to_bits
from compiler.graph.program_builder import ProgramBuilder, expand
from compiler.ops.families.activation import GELU, SILU
from compiler.ops.language.definition import definition
from compiler.ops.language.vjp import vjp_of

KERNEL = kernels_by_name("h200")["cuda.region"]
FULL, COLUMN = Kind.FULL, Kind.COLUMN
F32, BF16 = DType.FLOAT32, DType.BFLOAT16
ROWS, COLUMNS, INNER = 9, 16, 5
WIDE = (ROWS, COLUMNS)


class Stated(ProgramBuilder):
    """Programs of the compiler's own ops on matrices."""

    def __init__(self, dtype):
        super().__init__(*WIDE)
        self.dtype = dtype

    def given(self, kind=FULL):
        return self.input(ProgramInput(self.dtype, kind))

    def apply(self, op, *values):
        types = tuple([TensorType(self.dtype, WIDE)] * len(values))
        return expand.get(op)(self, self.attrs(op), types, values)[0]

    @staticmethod
    def attrs(op):
        return Attrs({})

    def gradient(self, op, dy, x):
        return self.apply(vjp_of(definition.get(op)).op, dy, x)

    def sum_over_rows(self, value, dtype=F32):
        return self.reduce("column_sum", self.cast(value, dtype))


def forward(dtype, *, keeps, has_bias=True, has_residual=False, op=GELU):
    p = Stated(dtype)
    y = p.given()
    kinds = [COLUMN] * has_bias + [FULL] * has_residual
    terms = [p.given(kind) for kind in kinds]
    h = y
    for term in terms:
        h = p.op("add", h, term)
    g = p.apply(op, h)
    return p.whole((h, g) if keeps else (g,))


def backward(dtype, *, makes_gelu=True, op=GELU, sums=F32):
    """(product, h) -> gelu(h), the gradient of h, and its sums over rows."""
    p = Stated(dtype)
    y, h = p.given(), p.given()
    dh = p.gradient(op, y, h)
    made = [p.apply(GELU, h)] if makes_gelu else []
    total = [] if sums is None else [p.sum_over_rows(dh, sums)]
    return p.whole((*made, dh, *total))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_gelu_is_found_as_the_compiler_states_it(dtype):
    program = forward(dtype, keeps=True)
    h, g = program.outputs
    assert gelu_operand(program, g) == h
    assert gelu_operand(program, h) is None
    program = backward(dtype, sums=None)
    g, dh = program.outputs
    assert gelu_gradient(program, dh) == GeluGradient(0, 1)
    assert (gelu_operand(program, g), gelu_gradient(program, g)) == (1, None)


def test_another_function_is_not_taken_for_it():
    program = forward(F32, keeps=True, op=SILU)
    assert gelu_operand(program, program.outputs[1]) is None
    program = backward(F32, op=SILU, makes_gelu=False)
    assert gelu_gradient(program, program.outputs[0]) is None
    assert match_epilogues(program, 0, ROWS) == ()


@pytest.mark.parametrize("number", range(5))
def test_another_constant_is_not_taken_for_it(number):
    program = forward(F32, keeps=False)
    places = [n for n, i in enumerate(program.instructions) if i.op == "constant"]
    steps = list(program.instructions)
    (value,) = steps[places[number]].constants
    steps[places[number]] = replace(steps[places[number]], constants=(value * 1.001,))
    changed = replace(program, instructions=tuple(steps))
    assert gelu_operand(program, program.outputs[0]) is not None
    assert gelu_operand(changed, changed.outputs[0]) is None


def numbers(*shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def slope(x, step=1e-6):
    return (gelu(x + step) - gelu(x - step)) / (2 * step)


def run(emulated_run, program, dtype, **options):
    """Return the calls, the outputs as float64, and the operands likewise."""
    shapes = [(ROWS, INNER), (INNER, COLUMNS)]
    shapes += [{FULL: WIDE, COLUMN: (COLUMNS,)}[entry.kind] for entry in program.inputs[1:]]
    arrays = [numbers(*shape, seed=n) for n, shape in enumerate(shapes)]
    stored = [to_bits(x) if dtype is BF16 else x for x in arrays]
    region = product_then(program, *WIDE, dtype)
    got = emulated_run(
        KERNEL, {"region": region}, tuple(stored), region.outputs,
        dtypes=[dtype] * len(stored), **options,
    )  # fmt: skip
    wide = [
        (from_bits(x) if type_.dtype is BF16 else x).astype(np.float64)
        for x, type_ in zip(got.outputs, region.outputs, strict=True)
    ]
    given = [(from_bits(x) if dtype is BF16 else x).astype(np.float64) for x in stored]
    return got.calls, wide, given


TOLERANCE = {F32: 2e-5, BF16: 2**-5}


def expect(dtype, got, wanted):
    for found, want in zip(got, wanted, strict=True):
        np.testing.assert_allclose(found, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


FORWARD = {
    "gelu": ({"keeps": False, "has_bias": False}, LtEpilogue.GELU),
    "bias": ({"keeps": False}, LtEpilogue.GELU_BIAS),
    "kept": ({"keeps": True}, LtEpilogue.GELU_AUX_BIAS),
    "residual": (
        {"keeps": True, "has_bias": False, "has_residual": True}, LtEpilogue.GELU_AUX,
    ),
    "all": ({"keeps": True, "has_residual": True}, LtEpilogue.GELU_AUX_BIAS),
}  # fmt: skip


def check_forward(emulated_run, name, dtype, **options):
    program = forward(dtype, **FORWARD[name][0])
    calls, got, (a, b, *terms) = run(emulated_run, program, dtype, **options)
    h = a @ b + sum(terms)
    expect(dtype, got, (h, gelu(h)) if len(got) == 2 else (gelu(h),))
    return calls


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", FORWARD)
def test_gelu_of_a_product_is_one_call_that_keeps_what_it_is_of(emulated_run, name, dtype):
    (call,) = check_forward(emulated_run, name, dtype)
    assert call.product.epilogue is FORWARD[name][1]
    if len(forward(dtype, **FORWARD[name][0]).outputs) == 2:
        first, kernel = check_forward(emulated_run, name, dtype, way=1)
        assert first.product.epilogue in (LtEpilogue.BIAS, LtEpilogue.NONE)
        assert (first.product.beta, first.product.bias) != (0.0, 0)
        assert isinstance(kernel, RunKernel)
    product, kernel = check_forward(emulated_run, name, dtype, way=-1)
    assert (product.product.epilogue, product.product.beta) == (LtEpilogue.NONE, 0.0)
    assert isinstance(kernel, RunKernel)


def check_backward(emulated_run, dtype, way, **options):
    calls, got, (a, b, h) = run(emulated_run, backward(dtype), dtype, way=way, **options)
    dh = (a @ b) * slope(h)
    expect(dtype, got[:2], (gelu(h), dh))
    np.testing.assert_allclose(got[2], dh.sum(0), rtol=TOLERANCE[dtype], atol=0.1)
    return calls


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_gradient_of_gelu_is_made_with_the_product_and_the_rest_after_it(emulated_run, dtype):
    for way, epilogue in enumerate((LtEpilogue.DGELU_BGRAD, LtEpilogue.DGELU)):
        product, *kernels = check_backward(emulated_run, dtype, way)
        assert (product.product.epilogue, product.product.bias_type) == (
            epilogue,
            F32 if epilogue is LtEpilogue.DGELU_BGRAD else dtype,
        )
        assert kernels
    product, *_ = check_backward(emulated_run, dtype, 2)
    assert product.product.epilogue is LtEpilogue.NONE


def test_nothing_is_left_where_only_the_gradient_and_its_sums_are_made():
    assert [
        (f.epilogue, f.rest is None)
        for f in match_epilogues(backward(F32, makes_gelu=False), 0, ROWS)
    ] == [(LtEpilogue.DGELU_BGRAD, True), (LtEpilogue.DGELU, False)]
    (finish,) = match_epilogues(backward(F32, makes_gelu=False, sums=None), 0, ROWS)
    assert (finish.epilogue, finish.rest) == (LtEpilogue.DGELU, None)


def test_what_needs_the_product_itself_too_is_made_by_the_program():
    p = Stated(F32)
    y, h = p.given(), p.given()
    assert match_epilogues(p.whole((p.gradient(GELU, y, h), p.op("neg", y))), 0, ROWS) == ()


def test_what_the_library_writes_lies_over_nothing_that_it_reads_but_c():
    kept, plain = match_epilogues(forward(F32, keeps=True, has_residual=True), 0, ROWS)
    every = ((0, 0), (0, 2), (1, 0), (1, 1), (1, 2))  # of product, bias, residual -> h, g
    assert kept.in_place(every, 3) == ((0, 0), (1, 0), (1, 1), (1, 2))
    assert plain.in_place(every, 3) == every
    every = ((0, 0), (0, 1), (1, 0), (1, 1))  # of product, h -> g, dh, sums
    for finish in match_epilogues(backward(F32), 0, ROWS):
        assert finish.in_place(every, 2) == ((0, 0), (0, 1), (1, 0))


@pytest.mark.parametrize("way", [0, 1, 2])
def test_gelu_may_lie_where_what_it_is_of_was(emulated_run, way):
    _, got, (a, b, h) = run(emulated_run, backward(F32), F32, way=way, in_place=[(0, 2)])
    expect(F32, got[:2], (gelu(h), (a @ b) * slope(h)))


@pytest.mark.parametrize("offset_bytes", [4, 8, 16])
def test_an_aux_at_an_odd_address_is_no_aux(emulated_run, offset_bytes):
    first, *rest = check_backward(emulated_run, F32, 0, offset_bytes=offset_bytes)
    assert (first.product.epilogue is LtEpilogue.NONE) == bool(offset_bytes % 16)
    assert rest


KEPT = partial(check_forward, name="kept")
BACKWARD = partial(check_backward, way=0)
FAULTS = {
    "another stride of aux": (KEPT, {"aux_stride": COLUMNS + 8}),
    "no bias": (KEPT, {"epilogue": LtEpilogue.GELU_AUX}),
    "nothing kept": (KEPT, {"epilogue": LtEpilogue.GELU_BIAS}),
    "no gelu": (KEPT, {"epilogue": LtEpilogue.BIAS}),
    "another stride of the aux that is read": (BACKWARD, {"aux_stride": COLUMNS - 8}),
    "no slope": (BACKWARD, {"epilogue": LtEpilogue.NONE}),
    "no sums": (BACKWARD, {"epilogue": LtEpilogue.DGELU}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(emulated_run, monkeypatch, name):
    check, wrong_fields = FAULTS[name]
    right = epilogues.EpilogueProduct._product

    def wrong(*args):
        call = right(*args)
        return replace(call, product=replace(call.product, **wrong_fields))

    monkeypatch.setattr(epilogues.EpilogueProduct, "_product", wrong)
    with pytest.raises(AssertionError):
        check(emulated_run, dtype=F32, seeds=(0,))
