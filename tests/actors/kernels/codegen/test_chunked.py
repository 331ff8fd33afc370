"""Regions against float64: the loss over a vocabulary with its gradients, and a wide hidden layer.

One table: element types, extents, chunks, and which results are wanted, for every kernel.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from kernel_calls import run_typed

from actors.kernels.codegen.chunked import ChunkedKernel
from actors.kernels.codegen.emit import emit
from actors.kernels.codegen.region_arrays import buffers_of
from actors.kernels.interpret.chunked import NumpyRegionKernel
from actors.kernels.interpret.upcast import WidenedKernel
from actors.kernels.native import runtime
from compiler.bfloat16 import from_bits, to_bits
from compiler.fusion.check import ProgramError
from compiler.fusion.program import Kind
from compiler.fusion.region import Held, Region, Step, StepKind, check_region
from compiler.types import DType, TensorType, numpy_dtype

FULL, ROW, COLUMN, SCALAR = Kind.FULL, Kind.ROW, Kind.COLUMN, Kind.SCALAR
F32, F64, BF16, I64 = DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16, DType.INT64
PRODUCT, SUM_OF_PRODUCTS = StepKind.PRODUCT, StepKind.SUM_OF_PRODUCTS
COLUMN_SUM, PROGRAM = StepKind.COLUMN_SUM, StepKind.PROGRAM
ALL = ("losses", "dx", "dw", "dwt", "db")
"""Results: dwt is the gradient of the weight transposed, as some layers have it."""


def loss_program(groups, dtype, made, has_bias, columns):
    """Losses of rows of logits, and with `made` their gradient times a number."""
    b = groups.Builder()
    x, labels, scale = b.input(FULL, F32 if dtype is BF16 else dtype), b.input(ROW, I64), None
    own = b.inputs[x].dtype
    bias = b.input(COLUMN, own) if has_bias else None
    scale = b.input(SCALAR, own)
    z = b.op("add", x, bias) if has_bias else x
    largest = b.reduce("row_max", z)
    total = b.reduce("row_sum", b.op("exp", b.op("sub", z, largest)))
    lse = b.op("add", largest, b.op("log", total))
    label = b.op("check_index", labels, dtype=I64, kind=ROW, constants=(columns,))
    index = b.op("column_index", dtype=DType.INT32, kind=COLUMN)
    hit = b.op("eq", index, b.cast(label, DType.INT32))
    zero, one = b.constant(0.0, own), b.constant(1.0, own)
    losses = b.op("sub", lse, b.reduce("row_sum", b.op("select", hit, z, zero)))
    if made is None:
        return b.program(losses)
    share = b.op("sub", b.op("exp", b.op("sub", z, lse)), b.op("select", hit, one, zero))
    return b.program(losses, b.cast(b.op("mul", share, scale), made))


def loss_region(groups, dtype, rows, columns, width, chunk_rows, wanted, has_bias=False):
    """Inputs: x, weight as [width, columns], the same as [columns, width], labels, scale, bias."""
    own = F32 if dtype is BF16 else dtype
    has_gradient = wanted != ("losses",)
    held = [Held(own, FULL)] + [Held(dtype, FULL)] * has_gradient
    num_inputs = 5 + has_bias
    wide, dwide = num_inputs, num_inputs + 1
    shapes = {
        "losses": (rows,), "dx": (rows, width), "dw": (columns, width), "dwt": (width, columns),
        "db": (columns,),
    }  # fmt: skip
    is_plain = dtype is not BF16
    wanted = tuple([name for name in wanted if name != "db" or is_plain])
    place = {name: num_inputs + len(held) + i for i, name in enumerate(wanted)}
    program = loss_program(groups, dtype, dtype if has_gradient else None, has_bias, columns)
    reads = (wide, 3, *((5,) if has_bias else ()), 4)
    steps = [Step(PRODUCT, (0, 1), (wide,))]
    made = (place["losses"],) + ((dwide,) if has_gradient else ())
    steps.append(Step(PROGRAM, reads, made, program))
    for name, kind, operands in (
        ("dx", PRODUCT, (dwide, 2)), ("dw", SUM_OF_PRODUCTS, (dwide, 0)),
        ("dwt", SUM_OF_PRODUCTS, (0, dwide)), ("db", COLUMN_SUM, (dwide,)),
    ):  # fmt: skip
        if name in place:
            steps.append(Step(kind, operands, (place[name],)))
    outputs = tuple([TensorType(own, shapes[name]) for name in wanted])
    region = Region(rows, columns, chunk_rows, num_inputs, tuple(held), outputs, tuple(steps))
    return region, wanted


def loss_operands(dtype, rows, columns, width, has_bias, seed=0):
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((rows, width)), rng.standard_normal((columns, width)) / 2
    labels = rng.integers(0, columns, rows)
    bias = [rng.standard_normal(columns)] if has_bias else []
    own = numpy_dtype(F32 if dtype is BF16 else dtype)
    if dtype is BF16:
        x, w = to_bits(x), to_bits(w)
    else:
        x, w = x.astype(own), w.astype(own)
    scale = np.asarray(0.25, own)
    return [x, w.T, w, labels, scale, *[v.astype(own) for v in bias]]


def expected(dtype, arrays):
    x, _, w = [from_bits(a) if dtype is BF16 else a for a in map(np.ascontiguousarray, arrays[:3])]
    x, w, labels, scale = x.astype(np.float64), w.astype(np.float64), arrays[3], float(arrays[4])
    z = x @ w.T + (arrays[5] if len(arrays) > 5 else 0)
    largest = z.max(1, keepdims=True)
    lse = largest[:, 0] + np.log(np.exp(z - largest).sum(1))
    own = np.arange(len(labels))
    d = np.exp(z - lse[:, None])
    d[own, labels] -= 1
    d *= scale
    return {
        "losses": lse - z[own, labels], "dx": d @ w, "dw": d.T @ x, "dwt": x.T @ d, "db": d.sum(0)
    }  # fmt: skip


def run(kernel, region, dtypes, arrays):
    return run_typed(kernel, {"region": region}, dtypes, arrays, region.outputs)


def kernels(dtype):
    numpys = NumpyRegionKernel()
    return {"c": ChunkedKernel(), "numpy": WidenedKernel(numpys) if dtype is BF16 else numpys}


def dtypes_of(dtype, count):
    own = F32 if dtype is BF16 else dtype
    return [dtype, dtype, dtype, I64, own, own][:count]


CASES = [
    # element type, rows, columns, width, rows of a chunk, wanted, bias
    (F32, 33, 50, 40, 8, ALL, True),
    (F32, 33, 50, 40, 33, ALL, False),
    (F32, 7, 300, 5, 1, ("losses", "dw"), False),
    (F32, 1, 23, 3, 1, ("losses", "dx"), True),
    (F32, 130, 1030, 64, 100, ("losses", "dx", "dwt", "db"), True),
    (F32, 20, 17, 1, 7, ("losses",), True),
    (F64, 33, 50, 40, 8, ALL, True),
    (F64, 9, 40, 4, 4, ("losses",), False),
    (BF16, 33, 50, 40, 8, ALL, True),
    (BF16, 64, 300, 32, 25, ("losses", "dx", "dw"), False),
]


@pytest.mark.parametrize("name", ["c", "numpy"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}x{c[2]}x{c[3]}-{c[4]}-{c[6]}")
def test_a_region_has_the_results_of_all_its_rows_at_once(groups, native, name, case):
    dtype, rows, columns, width, _, _, has_bias = case
    region, wanted = loss_region(groups, *case)
    arrays = loss_operands(dtype, rows, columns, width, has_bias)
    got, _ = run(kernels(dtype)[name], region, dtypes_of(dtype, len(arrays)), arrays)
    want = expected(dtype, arrays)
    own = {F32: 2e-5, F64: 1e-12, BF16: 2e-2}[dtype]
    for key, array in zip(wanted, got, strict=True):
        np.testing.assert_allclose(array, want[key], rtol=own, atol=own, err_msg=key)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_bits_do_not_depend_on_threads_nor_rows_on_the_chunk(groups, native, dtype):
    arrays = loss_operands(dtype, 90, 700, 24, False)
    given = dtypes_of(dtype, len(arrays))
    region, _ = loss_region(groups, dtype, 90, 700, 24, 32, ("losses", "dx", "dw"))
    first, _ = run(ChunkedKernel(), region, given, arrays)
    with runtime.as_one_thread():
        alone, _ = run(ChunkedKernel(), region, given, arrays)
    for a, b in zip(first, alone, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["c", "numpy"])
def test_a_bad_label_is_named_with_its_place_among_all_rows(groups, native, name):
    region, _ = loss_region(groups, F32, 20, 17, 4, 6, ("losses", "dx"))
    arrays = loss_operands(F32, 20, 17, 4, False)
    arrays[3][14] = 17
    with pytest.raises(IndexError, match=r"label 17 at position 14 is outside 0\.\.16"):
        run(kernels(F32)[name], region, dtypes_of(F32, 5), arrays)


def hidden_region(groups, rows, columns, width, chunk_rows):
    """A wide hidden layer with tanh between its products; x has rows that lie apart."""
    b = groups.Builder()
    program = b.program(b.op("tanh", b.input(FULL, F32)))
    steps = (
        Step(PRODUCT, (0, 1), (3,)), Step(PROGRAM, (3,), (4,), program), Step(PRODUCT, (4, 2), (5,))
    )  # fmt: skip
    held = (Held(F32, FULL), Held(F32, FULL))
    return Region(rows, columns, chunk_rows, 3, held, (TensorType(F32, (rows, width)),), steps)


@pytest.mark.parametrize("name", ["c", "numpy"])
def test_a_hidden_layer_is_a_region_as_well(groups, native, name):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((70, 30)).astype(np.float32)[::2, 3:21]
    first = rng.standard_normal((18, 200)).astype(np.float32) / 4
    second = rng.standard_normal((200, 18)).astype(np.float32)
    region = hidden_region(groups, 35, 200, 18, 16)
    (got,), _ = run(kernels(F32)[name], region, [F32] * 3, [x, first, second])
    wide = np.tanh(x.astype(np.float64) @ first)
    np.testing.assert_allclose(got, wide @ second, rtol=2e-5, atol=2e-5)


def test_scratch_is_one_chunk_and_the_gradient_lies_over_the_logits(groups, native):
    region, _ = loss_region(groups, F32, 512, 4096, 8, 32, ("losses", "dx", "dw"))
    assert len(buffers_of(region).dtypes) == 1
    arrays = loss_operands(F32, 512, 4096, 8, False)
    for kernel in kernels(F32).values():
        _, needs = run(kernel, region, dtypes_of(F32, 5), arrays)
        assert 32 * 4096 * 4 <= needs.workspace_bytes < 2 * 32 * 4096 * 4 + (5 << 20)


def test_a_kernel_tells_the_functions_that_it_will_need(groups, native):
    region, _ = loss_region(groups, F32, 20, 17, 4, 6, ("losses", "dx"))
    (function,) = ChunkedKernel().functions({"region": region}, (), ())
    assert function.name == emit(region.steps[1].program).name


def broken(groups):
    """Regions that say something wrong, with a word of what is said of them."""
    region, _ = loss_region(groups, F32, 20, 17, 4, 6, ("losses", "dx"))
    product, program, dx = region.steps
    b = groups.Builder()
    summed = b.program(b.reduce("column_sum", b.input(FULL, F32)))

    def with_steps(*steps):
        return replace(region, steps=steps)

    yield replace(region, chunk_rows=21), "chunks of 21 rows, of 20"
    yield replace(region, num_inputs=4), "a region of 4 operands, called with 5"
    yield replace(region, columns=18), "a result of 20 rows and 17 columns"
    yield with_steps(product, program), "is made by no step"
    yield with_steps(program, dx), "step 0 of the region, program: needs value 5 to read"
    yield with_steps(product, product, program, dx), "value 5 not to be made before"
    yield with_steps(replace(product, reads=(0, 2)), program, dx), "matrices that fit"
    yield with_steps(replace(product, reads=(3, 1)), program, dx), "value 3 to be a matrix"
    yield with_steps(product, replace(program, program=None), dx), "needs a program"
    yield with_steps(product, replace(program, reads=(5, 3, 3)), dx), "value 3 to be of float32"
    yield with_steps(product, replace(program, program=summed), dx), "instructions of single rows"
    yield with_steps(product, program, replace(dx, kind=COLUMN_SUM)), "another number of operands"


def test_a_region_that_contradicts_itself_is_refused_by_a_rule(groups):
    shapes = [(20, 4), (4, 17), (17, 4), (20,), ()]
    inputs = tuple([TensorType(d, s) for d, s in zip(dtypes_of(F32, 5), shapes, strict=True)])
    for region, words in broken(groups):
        with pytest.raises(ProgramError) as caught:
            check_region(region, inputs)
        assert words in str(caught.value)


def test_chunks_cover_all_rows_once():
    for rows, step in itertools.product((1, 5, 12), (1, 4, 5)):
        region = Region(rows, 2, min(step, rows), 0, (), (), ())
        covered = [row for first, last in region.chunks() for row in range(first, last)]
        assert covered == list(range(rows))
