"""Products with a group behind them, in every library: against a product and a group in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from error_texts import raises
from kernel_calls import Declined, bind_to, garbage, needs_of, run_typed, spoiled, typed
from library_products import skip_without, takes
from wide_regions import product_then

from actors.kernels.library import runtime
from actors.kernels.native.emit import emit
from actors.kernels.native.fused import FUSED_PRODUCT_KERNELS
from actors.kernels.reference.bfloat16 import upcast
from actors.kernels.reference.region import REGION_KERNELS
from compiler.contract.errors import InternalError
from compiler.contract.program import Kind
from compiler.contract.types import DType, from_bits, numpy_dtype, to_bits

FULL, ROW, COLUMN, SCALAR = Kind.FULL, Kind.ROW, Kind.COLUMN, Kind.SCALAR
F32, F64, BF16, I64 = DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16, DType.INT64
NATIVE = {kernel.name: kernel for kernel in FUSED_PRODUCT_KERNELS}
SHAPES = ((1, 1, 1), (5, 3, 7), (33, 40, 17), (600, 48, 200), (1500, 64, 96))
"""Rows, columns and inner extent; the last two are cut into several chunks."""

FEW = ((1, 300, 60), (8, 48, 400), (3, 2053, 70), (2, 1000, 300), (5, 1030, 170))
"""Of few rows: one chunk or several of columns, and a last one that fills no vector."""


def shapes_of(kernel):
    """Return the shapes that a kernel takes: factors are packed for several chunks only."""
    if "columns" in kernel.name:
        return FEW
    return SHAPES[3:] if "packed" in kernel.name else SHAPES


def bias_gelu(groups, dtype=F32):
    """What follows a linear layer: nothing is reduced, and the product is read in one phase."""
    b = groups.Builder()
    x, bias = b.input(FULL, dtype), b.input(COLUMN, dtype)
    h = b.op("add", x, bias)
    return b.program(h, b.op("mul", h, b.op("tanh", h)))


def normed(groups, dtype=F32):
    """Residual, layer norm, statistics: the product is read before its place is stored."""
    b = groups.Builder()
    x, residual, gamma = b.input(FULL, dtype), b.input(FULL, dtype), b.input(COLUMN, dtype)
    h = b.op("add", x, residual)
    mean = b.op("mul", b.reduce("row_sum", h), b.constant(1 / 48, dtype))
    centred = b.op("sub", h, mean)
    squares = b.reduce("row_sum", b.op("mul", centred, centred))
    rstd = b.op("rsqrt", b.op("add", squares, b.constant(0.1, dtype)))
    return b.program(h, b.op("mul", b.op("mul", centred, rstd), gamma), mean, rstd)


def gradient(groups, dtype=F32):
    """A product that is multiplied and summed over rows, with an output of every kind."""
    b = groups.Builder()
    dy, x = b.input(FULL, dtype), b.input(FULL, dtype)
    row, scalar = b.input(ROW, dtype), b.input(SCALAR, dtype)
    dx = b.op("mul", b.op("mul", dy, row), b.op("tanh", x))
    total = b.reduce("column_sum", dx)
    return b.program(dx, total, b.reduce("row_max", dx), b.op("neg", scalar))


def scaled(groups, dtype=F32):
    """An output of one number, and no sum."""
    b = groups.Builder()
    x, scalar = b.input(FULL, dtype), b.input(SCALAR, dtype)
    twice = b.op("add", scalar, scalar)
    return b.program(b.op("mul", x, twice), twice)


def softmax(groups, dtype=F32):
    """A product that is read again behind a reduction."""
    b = groups.Builder()
    x = b.input(FULL, dtype)
    shifted = b.op("exp", b.op("sub", x, b.reduce("row_max", x)))
    return b.program(b.op("div", shifted, b.reduce("row_sum", shifted)))


def without_a_place(groups, dtype=F32):
    """No output of the product's extents: it goes to the workspace."""
    b = groups.Builder()
    x = b.input(FULL, dtype)
    return b.program(b.reduce("row_sum", b.op("mul", x, x)), b.reduce("column_sum", x))


def read_after_every_store(groups, dtype=F32):
    """The one output of the product's extents is stored before the product was read last."""
    b = groups.Builder()
    x, y = b.input(FULL, dtype), b.input(FULL, dtype)
    stored = b.op("tanh", y)
    total = b.reduce("row_sum", b.op("mul", stored, x))
    late = b.op("mul", b.op("sub", x, total), stored)
    return b.program(stored, b.reduce("row_max", late), b.reduce("column_sum", late))


def random_program(groups, seed):
    rng = np.random.default_rng(seed)
    b = groups.Builder()
    values = [b.input(kind) for kind in (FULL, FULL, ROW, COLUMN, SCALAR)]
    for _ in range(rng.integers(3, 12)):
        x, y = (int(v) for v in rng.choice(values, 2))
        choice = rng.random()
        if choice < 0.25:
            full = [v for v in (x, y) if b.kind(v) is FULL]
            name = ("row_sum", "row_max", "row_min")[rng.integers(3)]
            values.append(b.reduce(name, (full or [0])[0]))
        else:
            values.append(b.op(("add", "sub", "mul", "max", "min")[rng.integers(5)], x, y))
        values[-1] = b.op("tanh", values[-1])
    values.append(b.op("add", 0, values[-1]))  # the product is read in any case
    outputs = [int(v) for v in rng.choice(values[5:], 3)]
    return b.program(*outputs, values[-1], b.reduce("column_sum", values[-1]))


RANDOM_SEEDS = range(6)
IN_DOUBLES = (normed, gradient)
MAKERS = (
    bias_gelu, normed, gradient, scaled, softmax, without_a_place, read_after_every_store
)  # fmt: skip


def operands(groups, program, shape, seed=0):
    """Return a, b, and what the program reads besides their product."""
    rows, columns, inner = shape
    rng = np.random.default_rng(seed)
    dtype = program.inputs[0].dtype
    values = [rng.standard_normal(s) / np.sqrt(inner) for s in ((rows, inner), (inner, columns))]
    if dtype is BF16:
        factors = [to_bits(x) for x in values]
    else:
        factors = [x.astype(dtype.value) for x in values]
    return [*factors, *groups.operands(program, rows, columns, seed)[1:]]


def numbers(array):
    return from_bits(array) if array.dtype == np.uint16 else array


def expected(groups, program, shape, arrays):
    """Return the outputs by a product and an interpreter in float64."""
    a, b = (numbers(x).astype(np.float64) for x in arrays[:2])
    wide = replace(program.inputs[0], dtype=F64)
    of_wide = replace(program, inputs=(wide, *program.inputs[1:]))
    return groups.interpret(of_wide, *shape[:2], [a @ b, *arrays[2:]])


def call_of(groups, program, shape):
    """Return the attributes, the types of the operands' elements, and those of the results."""
    attrs = {"region": product_then(program, *shape[:2], program.inputs[0].dtype)}
    dtype = program.inputs[0].dtype
    dtypes = (dtype, dtype, *[entry.dtype for entry in program.inputs[1:]])
    return attrs, dtypes, groups.results_of(program, *shape[:2])


def run(groups, kernel, program, shape, arrays, **options):
    attrs, dtypes, results = call_of(groups, program, shape)
    return run_typed(kernel, attrs, dtypes, arrays, results, **options)


def asked(groups, kernel, program, shape):
    """Return whether a kernel is chosen for dense operands, and what it needs, if it takes them."""
    attrs, dtypes, results = call_of(groups, program, shape)
    made = [spoiled(t.shape, numpy_dtype(t.dtype)) for t in results]
    given = typed(dtypes, operands(groups, program, shape))
    call = attrs, given, typed([t.dtype for t in results], made)
    return kernel.is_chosen(*call), needs_of(kernel, *call)


def check(groups, kernel, program, shape, tolerance=1e-4):
    arrays = operands(groups, program, shape)
    got, _ = run(groups, kernel, program, shape, arrays)
    groups.compare(program, got, expected(groups, program, shape, arrays), tolerance)


def prepare(programs):
    runtime.prepare([emit(program) for program in programs])


def library_of(kernel):
    """Return the name of the library of a kernel."""
    return kernel.name.removesuffix(".fused_product")


@pytest.fixture(scope="session")
def built(native_toolchain, groups):
    """Build every known program in one start of the compiler."""
    runtime.enable(native_toolchain, 2)
    programs = [make(groups, dtype) for make in MAKERS for dtype in (F32, BF16)]
    programs += [make(groups, F64) for make in IN_DOUBLES]
    prepare([*programs, *[random_program(groups, seed) for seed in RANDOM_SEEDS]])
    runtime.disable()


@pytest.fixture(params=[*sorted(NATIVE), "numpy.region"])
def kernel(request):
    """Every library; numpy's needs no compiler."""
    if request.param == "numpy.region":
        return REGION_KERNELS[0]
    request.getfixturevalue("built")
    request.getfixturevalue("native")
    found = NATIVE[request.param]
    skip_without(library_of(found), F32)
    return found


@pytest.fixture(params=sorted(NATIVE))
def compiled(request, built, native):
    """Every library, and not numpy."""
    found = NATIVE[request.param]
    skip_without(library_of(found), F32)
    return found


@pytest.mark.parametrize("make", MAKERS)
def test_known_programs_match_a_product_and_an_interpreter(kernel, groups, make):
    for shape in shapes_of(kernel):
        check(groups, kernel, make(groups), shape)


def test_random_programs_match_a_product_and_an_interpreter(kernel, groups):
    for seed in RANDOM_SEEDS:
        for shape in shapes_of(kernel)[-3:-1]:
            check(groups, kernel, random_program(groups, seed), shape)


@pytest.mark.parametrize("make", IN_DOUBLES)
def test_doubles_are_computed_in_doubles(built, native, groups, make):
    program, shape = make(groups, F64), (600, 48, 200)
    arrays = operands(groups, program, shape)
    got, _ = run(groups, NATIVE["openblas.rows.fused_product"], program, shape, arrays)
    reference = expected(groups, program, shape, arrays)
    for y, want in zip(got, reference, strict=True):
        np.testing.assert_allclose(y, want.reshape(y.shape), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["onednn.packed.fused_product", "onednn.rows.fused_product"])
@pytest.mark.parametrize("make", MAKERS)
def test_bfloat16_products_are_taken_and_rounded(built, native, groups, make, name):
    skip_without(library_of(NATIVE[name]), BF16)
    # A column sum has 600 rounded numbers: an eighth of the last place each, in root mean square.
    check(groups, NATIVE[name], make(groups, BF16), (600, 48, 200), tolerance=0.06)


def test_without_a_compiler_bfloat16_is_widened_for_numpy(groups):
    (kernel,) = upcast(REGION_KERNELS)
    assert kernel.name == "numpy.region.upcast"
    check(groups, kernel, normed(groups, BF16), (33, 40, 17), tolerance=0.02)


def test_a_bfloat16_product_may_leave_its_float32_sums_unrounded(native, groups):
    skip_without("onednn.rows", BF16)
    kernel, program, shape = NATIVE["onednn.rows.fused_product"], bias_gelu(groups), (70, 48, 64)
    arrays = operands(groups, program, shape)
    attrs, dtypes, results = call_of(groups, program, shape)
    arrays[:2] = [to_bits(x) for x in arrays[:2]]
    outputs, _ = run_typed(kernel, attrs, (BF16, BF16, *dtypes[2:]), arrays, results)
    groups.compare(program, outputs, expected(groups, program, shape, arrays), 1e-5)


@pytest.mark.parametrize("make", MAKERS)
def test_one_thread_gives_the_bits_of_two(compiled, groups, make):
    program, shape = make(groups), shapes_of(compiled)[-1]
    arrays = operands(groups, program, shape)
    two, needs = run(groups, compiled, program, shape, arrays)
    with runtime.at_most_threads(1):
        one, fewer = run(groups, compiled, program, shape, arrays)
    assert fewer.workspace_bytes <= needs.workspace_bytes
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("make", [softmax, normed, gradient, without_a_place])
@pytest.mark.parametrize("threads", [(1, 64), (2, 1), (2, 64)])
def test_a_launch_takes_the_threads_its_workspace_has_room_for(
    compiled, groups, make, threads, monkeypatch
):
    program, shape = make(groups), shapes_of(compiled)[-1]
    arrays = operands(groups, program, shape)
    reference, _ = run(groups, compiled, program, shape, arrays)
    planned, bound = threads
    monkeypatch.setattr(runtime, "num_threads", lambda: planned)
    between = lambda: monkeypatch.setattr(runtime, "num_threads", lambda: bound)  # noqa: E731
    got, _ = run(groups, compiled, program, shape, arrays, between=between)
    for a, b in zip(got, reference, strict=True):
        np.testing.assert_array_equal(a, b)


def test_too_small_a_workspace_is_refused(compiled, groups):
    program, shape = without_a_place(groups), shapes_of(compiled)[-1]
    arrays = operands(groups, program, shape)
    attrs, _, results = call_of(groups, program, shape)
    outputs = [spoiled(t.shape, numpy_dtype(t.dtype)) for t in results]
    # How many bytes a library works in is told by the machine.
    with pytest.raises(InternalError, match=r"needs \d+ bytes of workspace and got 64"):
        bind_to(compiled, attrs, tuple(arrays), tuple(outputs), np.zeros(64, np.uint8))


@pytest.mark.parametrize("place", [0, -1])
def test_outputs_may_lie_over_the_inputs_that_are_offered(kernel, groups, place):
    offered, shape = 0, shapes_of(kernel)[-3:][place]
    for make in MAKERS:
        program = make(groups)
        arrays = operands(groups, program, shape)
        apart, needs = run(groups, kernel, program, shape, arrays)
        for pair in needs.in_place:
            offered += 1
            together, _ = run(groups, kernel, program, shape, arrays, in_place=(pair,))
            for a, b in zip(apart, together, strict=True):
                np.testing.assert_array_equal(a, b)
    assert offered


def test_factors_and_the_place_of_the_product_are_not_offered(native, groups):
    for kernel in FUSED_PRODUCT_KERNELS:
        for make in MAKERS:
            _, needs = asked(groups, kernel, make(groups), (48, 48, 48))
            if needs is not None:
                assert all(index > 1 for _, index in needs.in_place)


def test_a_product_has_scratch_of_its_own_only_without_a_place(native, groups):
    shape, product_bytes = (8000, 48, 20), 8000 * 48 * 4
    for kernel, make in product((NATIVE["openblas.rows.fused_product"], REGION_KERNELS[0]), MAKERS):
        made = make(groups)
        arrays = operands(groups, made, shape)
        size = run(groups, kernel, made, shape, arrays)[1].workspace_bytes
        is_apart = make in (without_a_place, read_after_every_store)
        assert (size >= product_bytes) == is_apart, (kernel.name, make.__name__)


def test_a_bad_index_fails_the_launch_and_is_named(kernel, groups):
    b = groups.Builder()
    x, labels = b.input(), b.input(ROW, I64)
    shape = shapes_of(kernel)[-2]
    label = b.cast(b.op("check_index", labels, constants=shape[1:2]), DType.INT32)
    hit = b.op("eq", b.op("column_index", dtype=DType.INT32, kind=COLUMN), label)
    program = b.program(b.reduce("row_sum", b.op("select", hit, x, b.constant(0.0))))
    arrays = operands(groups, program, shape)
    run(groups, kernel, program, shape, arrays)
    for bad in (shape[1], -1):
        arrays[2][min(20, shape[0] - 1)] = bad
        with raises(IndexError):
            run(groups, kernel, program, shape, arrays)


def test_a_status_of_the_library_is_told_as_its_own(native, groups):
    kernel, program, shape = NATIVE["onednn.rows.fused_product"], softmax(groups), (5, 3, 7)
    arrays = operands(groups, program, shape)
    _, needs = asked(groups, kernel, program, shape)
    if needs is None:
        pytest.skip("there is no oneDNN on this machine")
    attrs, _, results = call_of(groups, program, shape)
    outputs = [spoiled(t.shape, numpy_dtype(t.dtype)) for t in results]
    space = garbage(needs.workspace_bytes)[0]
    launch = bind_to(kernel, attrs, tuple(arrays), tuple(outputs), space)
    assert "oneDNN answers with not implemented" in str(launch.error(3))


@pytest.mark.parametrize("place", [0, -1])
def test_factors_may_lie_transposed_or_in_windows(kernel, groups, place):
    program, shape = bias_gelu(groups), shapes_of(kernel)[-3:-1][place]
    a, b, bias = operands(groups, program, shape)
    reference, _ = run(groups, kernel, program, shape, [a, b, bias])
    wide = np.zeros((a.shape[0], a.shape[1] + 5), a.dtype)
    wide[:, 2 : 2 + a.shape[1]] = a
    layouts = (
        (np.ascontiguousarray(a.T).T, b),
        (a, np.ascontiguousarray(b.T).T),
        (wide[:, 2 : 2 + a.shape[1]], b),
    )
    for factors in layouts:
        try:
            outputs, _ = run(groups, kernel, program, shape, [*factors, bias])
        except Declined:
            continue
        for got, want in zip(outputs, reference, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_some_kernel_takes_every_product_of_single_or_half_precision(native, groups):
    for dtype in (F32, BF16) if takes("onednn.rows", BF16) else (F32,):
        for shape in SHAPES:
            call = normed(groups, dtype), shape
            takers = [k.name for k in FUSED_PRODUCT_KERNELS if all(asked(groups, k, *call))]
            assert len(takers) == 1, (dtype, shape, takers)


def test_without_a_compiler_every_product_is_declined(groups):
    runtime.disable()
    program, shape = softmax(groups), (5, 3, 7)
    assert all(asked(groups, k, program, shape)[1] is None for k in FUSED_PRODUCT_KERNELS)
