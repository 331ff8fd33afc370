"""Fused programs as kernels of a GPU, run on the host, against an interpreter in float64."""

from __future__ import annotations

import numpy as np
import pytest
from fused_programs import Builder, compare, cross_entropy, interpret, known, operands, results_of

from actors.kernels.cuda.fused import CudaFused
from actors.kernels.cuda.gpu import gpu_named
from compiler.fusion.program import Kind
from compiler.types import DType

GPU = gpu_named("h200")
KERNEL = CudaFused(GPU)
F32, I64 = DType.FLOAT32, DType.INT64
SHAPES = ((1, 1), (3, 31), (5, 1), (1, 32), (64, 33), (3, 257), (40, 100), (0, 5), (4, 0))


def run(emulated_run, program, rows, columns, arrays, **more):
    attrs = {"program": program, "rows": rows, "columns": columns}
    dtypes = [entry.dtype for entry in program.inputs] + [I64] * (len(arrays) > len(program.inputs))
    results = results_of(program, rows, columns)
    return emulated_run(KERNEL, attrs, tuple(arrays), tuple(results), dtypes=dtypes, **more)


def check(emulated_run, program, rows, columns, tolerance=3e-5, **more):
    arrays = operands(program, rows, columns)
    found = run(emulated_run, program, rows, columns, arrays, **more)
    compare(program, found.outputs, interpret(program, rows, columns, arrays), tolerance)
    return found


@pytest.mark.parametrize(("rows", "columns"), [shape for shape in SHAPES if 0 not in shape])
def test_known_programs_match_the_interpreter(emulated_run, rows, columns):
    for program in known(rows, columns).values():
        check(emulated_run, program, rows, columns)


@pytest.mark.parametrize(("rows", "columns"), [shape for shape in SHAPES if 0 in shape])
def test_spaces_without_elements_sum_to_zero(emulated_run, rows, columns):
    programs = known(rows, columns)
    for name in ("its gradient", "gelu gradient", "adamw"):
        check(emulated_run, programs[name], rows, columns)


def test_a_bad_index_is_reported_in_the_words_of_the_host(emulated_run):
    x, labels = np.zeros((4, 5), np.float32), np.array([0, 4, 5, 1])
    program = cross_entropy(5)
    found = run(emulated_run, program, 4, 5, [x, labels])
    assert str(found.error) == "label 5 at position 2 is outside 0..4"
    labels[:] = 0, -1, 7, 1
    found = run(emulated_run, program, 4, 5, [x, labels])
    assert str(found.error) == "label -1 at position 1 is outside 0..4"
    assert isinstance(found.error, IndexError)
    labels[:] = 1
    assert run(emulated_run, program, 4, 5, [x, labels]).error is None


def test_an_update_is_left_out_where_it_is_told_to_skip(emulated_run):
    b = Builder()
    p, g = b.input(), b.input()
    program = b.program(b.op("sub", p, g))
    arrays = operands(program, 6, 50)
    made = {}
    for skip in (0, 1):
        given = [*[x.copy() for x in arrays], np.array(skip)]
        made[skip] = run(emulated_run, program, 6, 50, given, in_place=((0, 0),)).outputs[0]
    np.testing.assert_array_equal(made[0], arrays[0] - arrays[1])
    np.testing.assert_array_equal(made[1], arrays[0])


@pytest.mark.parametrize("shape", [(7, 33), (40, 300)])
def test_outputs_may_lie_over_the_inputs_that_are_offered(emulated_run, shape):
    offered = 0
    for program in known(*shape).values():
        arrays = operands(program, *shape)
        apart = run(emulated_run, program, *shape, arrays, seeds=(0,))
        for pair in apart.needs.in_place:
            offered += 1
            together = run(emulated_run, program, *shape, arrays, in_place=(pair,))
            for a, b in zip(apart.outputs, together.outputs, strict=True):
                np.testing.assert_array_equal(a, b)
    assert offered >= 10


def test_an_input_whose_rows_are_read_in_another_order_is_not_offered(emulated_run):
    b = Builder()
    program = b.program(b.op("neg", b.input(every=2, count=6)))
    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    found = run(emulated_run, program, 6, 4, [x])
    np.testing.assert_array_equal(found.outputs[0], -x[[0, 0, 1, 1, 2, 2]])
    assert found.needs.in_place == ()


def test_halves_of_both_kinds_are_computed_in_single_precision_and_rounded_once(emulated_run):
    rng = np.random.default_rng(5)
    for dtype in (DType.FLOAT16, DType.BFLOAT16):
        b = Builder()
        x, scale = b.input(Kind.FULL, dtype), b.input(Kind.COLUMN, dtype)
        program = b.program(b.op("mul", b.op("add", x, x), scale))
        bits = rng.integers(0, 1 << 16, (9, 70)).astype(np.uint16)
        row = rng.integers(0, 1 << 16, 70).astype(np.uint16)
        given = (
            [bits, row] if dtype is DType.BFLOAT16 else [v.view(np.float16) for v in (bits, row)]
        )
        wide = [_widened(v, dtype) for v in given]
        with np.errstate(all="ignore"):
            expected = (wide[0] + wide[0]) * wide[1]
            expected = expected.astype(np.float16) if dtype is DType.FLOAT16 else expected
        made = _widened(run(emulated_run, program, 9, 70, given).outputs[0], dtype)
        tolerance = 0 if dtype is DType.FLOAT16 else 2**-8
        np.testing.assert_allclose(made, expected.astype(np.float32), tolerance, 1e-40)


def _widened(x, dtype):
    if dtype is DType.BFLOAT16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)
