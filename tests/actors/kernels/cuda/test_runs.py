"""Wide accesses: which launch makes them, that no bit depends on it, what a wrong one does."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from error_texts import raises
from fused_programs import (
    Builder,
    compare,
    cross_entropy,
    gelu_grad_and_bias,
    interpret,
    known,
    layer_norm,
    layer_norm_grad,
    operands,
    random_program,
    results_of,
)
from program_texts import texts_of

from actors.kernels.common.kernel import KernelPlan
from actors.kernels.cuda.catalogue import kernels_by_name
from actors.kernels.cuda.loops import NARROW, RUNS, WIDE, access_bytes
from actors.testing.emulated import kernels
from compiler.contract.program import Kind
from compiler.contract.types import DType

KERNEL = kernels_by_name("h200")["cuda.fused"]
F32, F64, BF16 = DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16


def launched(emulated_run, program, shape, arrays=None, kernel=KERNEL, **more):
    """Run a program; return outputs and the way that its kernels went."""
    attrs = {"program": program, "rows": shape[0], "columns": shape[1]}
    arrays = operands(program, *shape) if arrays is None else arrays
    options = {"dtypes": [entry.dtype for entry in program.inputs], **more}
    results = tuple(results_of(program, *shape))
    found = emulated_run(kernel, attrs, tuple(arrays), results, **options)
    (way,) = {call.words[-1] for call in found.calls}
    return found.outputs, way


def odd_offset(program):
    """Bytes that each element may lie at, and no run of several."""
    values = (*range(len(program.inputs)), *program.outputs)
    return max([program.dtype_of(v).itemsize for v in values])


def bits(outputs):
    return [x.tobytes() for x in outputs]


def programs():
    rng = np.random.default_rng(3)
    types = [(F32,), (F32, BF16), (F32, F64), (BF16,), (DType.FLOAT16, F32, F64)]
    found = {f"random {i}": random_program(rng, types[i % len(types)]) for i in range(15)}
    return found | {name: p for name, p in known(6, 40).items() if "repeated" not in name}


PROGRAMS = programs()


@pytest.fixture(scope="module", autouse=True)
def texts(native_toolchain):
    """Build most texts by one start of the compiler."""
    mixes = [mixed(*dtypes) for dtypes in MIXES]
    programs = (*PROGRAMS.values(), *mixes)
    texts = [text for program in programs for text in texts_of(program, is_cut=False)]
    kernels.load(texts, native_toolchain)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_makes_the_same_bits_wherever_its_operands_lie(emulated_run, name):
    program = PROGRAMS[name]
    for shape in ((6, 40), (6, 41)):
        outputs, way = launched(emulated_run, program, shape, seeds=(0,))
        others, other = launched(
            emulated_run, program, shape, offset_bytes=odd_offset(program), seeds=(1,)
        )
        assert bits(outputs) == bits(others)
        assert other != WIDE or way == WIDE


@pytest.mark.parametrize("shape", [(1, 1003), (3, 17_000), (300, 2056), (40, 8)])
def test_walks_of_every_kind_make_the_same_bits_by_both_accesses(emulated_run, shape):
    for program in (layer_norm(8), layer_norm_grad(8), gelu_grad_and_bias()):
        outputs, way = launched(emulated_run, program, shape, seeds=(0,))
        options = {"offset_bytes": 4, "seeds": (1,)}
        others, other = launched(emulated_run, program, shape, **options)
        assert way == WIDE or shape[1] % 8  # a row of sums is as long as a row
        assert other != WIDE
        assert bits(outputs) == bits(others)
        arrays = operands(program, *shape)
        compare(program, outputs, interpret(program, *shape, arrays), 1e-4)


def mixed(*dtypes):
    """A program on numbers of several types, with outputs of each of them."""
    b = Builder()
    inputs = [b.input(Kind.FULL, dtype) for dtype in dtypes]
    total = b.cast(inputs[0], F32)
    for x in inputs[1:]:
        total = b.op("add", total, b.cast(x, F32))
    half = b.op("mul", total, b.constant(0.5))
    return b.program(half, *[b.cast(half, dtype) for dtype in dtypes])


MIXES = (
    (BF16, F32),
    (DType.INT8, BF16),
    (DType.BOOL, DType.FLOAT16, F32),
    (F64, DType.INT8, DType.INT64),
    (F64, DType.INT16),
    (DType.UINT8,),
)


@pytest.mark.parametrize("dtypes", MIXES)
def test_tails_of_every_length_are_moved_one_by_one_of_every_type(emulated_run, dtypes):
    program = mixed(*dtypes)
    for columns in (*range(1, 18), 8 * 256 + 5):
        arrays = operands(program, 1, columns)
        outputs, way = launched(emulated_run, program, (1, columns), arrays, seeds=(0,))
        others, other = launched(
            emulated_run,
            program,
            (1, columns),
            arrays,
            offset_bytes=odd_offset(program),
            seeds=(0,),
        )
        assert way == WIDE
        assert bits(outputs) == bits(others)
        assert other == NARROW
        expected = interpret(program, 1, columns, arrays)
        np.testing.assert_allclose(outputs[0], expected[0].reshape(1, columns), 1e-6)


def inside(array, columns):
    """Return an array of rows that lie within longer rows."""
    wide = np.zeros((array.shape[0], columns), array.dtype)
    window = wide[:, : array.shape[1]]
    window[...] = array
    return window


def test_windows_whose_rows_begin_evenly_are_moved_at_once_and_others_one_by_one(emulated_run):
    b = Builder()
    x, bias = b.input(Kind.FULL, BF16), b.input(Kind.COLUMN, BF16)
    summed = b.program(b.op("add", x, bias))
    normed = layer_norm(8, F32)
    for program, even, odd in ((summed, 48, 44), (normed, 44, 42)):
        arrays = operands(program, 6, 40)
        expected, way = launched(emulated_run, program, (6, 40), arrays)
        assert way == WIDE
        for columns, its_way in ((even, WIDE), (odd, NARROW if program is summed else RUNS)):
            given = [inside(arrays[0], columns), *arrays[1:]]
            outputs, way = launched(emulated_run, program, (6, 40), given)
            assert way == its_way
            assert bits(outputs) == bits(expected)


def test_who_reduces_rows_has_the_columns_that_the_shape_says(emulated_run):
    for columns, ways in ((40, {WIDE, RUNS}), (42, {NARROW})):
        found = set()
        for offset_bytes in (0, 4):
            program, arrays = cross_entropy(40), [np.ones((5, columns), np.float32), np.arange(5)]
            shape = (5, columns)
            found.add(launched(emulated_run, program, shape, arrays, offset_bytes=offset_bytes)[1])
        assert found == ways


def test_an_access_is_of_16_bytes_or_of_what_a_run_has():
    found = [access_bytes(itemsize, batch) for itemsize in (1, 2, 4, 8) for batch in (1, 2, 4, 8)]
    assert found == [1, 1, 4, 8, 2, 4, 8, 16, 4, 8, 16, 16, 8, 16, 16, 16]


@dataclass(frozen=True)
class AlwaysWide:
    """A kernel that takes no notice of where its operands lie."""

    name: str = "cuda.wrong"

    def plan(self, *call):
        plan = KERNEL.plan(*call)

        def bind(*places):
            return tuple([replace(c, words=(*c.words[:-1], WIDE)) for c in plan.bind(*places)])

        return KernelPlan(plan.needs, bind)


@pytest.mark.parametrize("program", [layer_norm(8), mixed(BF16, F32)])
def test_a_wide_access_at_an_odd_address_is_refused_as_a_gpu_would(emulated_run, program):
    launched(emulated_run, program, (3, 40), kernel=AlwaysWide())
    with raises(kernels.EmulationError):
        launched(emulated_run, program, (3, 40), kernel=AlwaysWide(), offset_bytes=4)
