"""Generated functions against an interpreter in float64, on random programs and on known ones."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
from error_texts import raises
from fused_programs import (
    Builder,
    cross_entropy,
    dropout,
    gelu_grad_and_bias,
    known,
    layer_norm,
    layer_norm_grad,
    repeated,
    softmax,
)
from kernel_calls import GUARD, bind_to, garbage, low_operand, operand

from actors.kernels.common.kernel import KernelPlan
from actors.kernels.library import runtime
from actors.kernels.library.launch import NativeLaunch
from actors.kernels.native import emit as emitting
from actors.kernels.native.emit import emit, is_taken
from actors.kernels.native.fused import FUSED_KERNELS, functions_of_program
from actors.kernels.native.loops import num_rows_at_once
from actors.kernels.program import values as words
from compiler.contract.codec import DecodeError, from_row, to_msgpack, to_row
from compiler.contract.errors import InternalError
from compiler.contract.program import FusedProgram, Instruction, Kind, ProgramError, ProgramInput
from compiler.contract.types import DType

FULL, ROW, COLUMN, SCALAR = Kind.FULL, Kind.ROW, Kind.COLUMN, Kind.SCALAR
F32, F64, BF16 = DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16
I64, I32, BOOL = DType.INT64, DType.INT32, DType.BOOL
FLOATS = (F32, F64)
(KERNEL,) = FUSED_KERNELS
EXTENTS = ((1, 1), (1, 37), (5, 1), (3, 16), (7, 33), (64, 100), (0, 5), (4, 0))


@pytest.mark.parametrize(("rows", "columns"), [e for e in EXTENTS if 0 not in e])
def test_known_groups_match_the_interpreter(kernel, groups, rows, columns):
    programs = known(rows, columns)
    groups.prepare(kernel, programs.values())
    for program in programs.values():
        groups.check(kernel, program, rows, columns)


@pytest.mark.parametrize(("rows", "columns"), [e for e in EXTENTS if 0 in e])
def test_spaces_without_elements_sum_to_zero(kernel, groups, rows, columns):
    groups.check(kernel, layer_norm_grad(1), rows, columns)
    groups.check(kernel, gelu_grad_and_bias(), rows, columns)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("shape", [(2, 30_000), (1, 100_003), (900, 300)])
@pytest.mark.parametrize("name", ["layer norm", "its gradient", "softmax", "dropout"])
def test_large_spaces_are_cut_and_match(kernel, groups, shape, name):
    program = known(*shape)[name]
    groups.prepare(kernel, known(*shape).values())
    groups.check(kernel, program, *shape, tolerance=2e-4, launches=1)


@pytest.mark.parametrize("shape", [(2, 30_000), (900, 300), (1500, 40)])
def test_one_thread_gives_the_bits_of_two(native, groups, shape):
    for program in known(*shape).values():
        arrays = groups.operands(program, *shape)
        two, needs = groups.run(KERNEL, program, *shape, arrays, launches=1)
        with runtime.at_most_threads(1):
            one, fewer = groups.run(KERNEL, program, *shape, arrays, launches=1)
        assert fewer.workspace_bytes <= needs.workspace_bytes
        for a, b in zip(one, two, strict=True):
            np.testing.assert_array_equal(a, b)


def biased(dtype, *, has_sums=False):
    """What a bias and ReLU make, with a random mask, in elements of a type; and sums over rows."""
    b = Builder()
    x, bias, scale = b.input(FULL, dtype), b.input(COLUMN, dtype), b.input(COLUMN)
    step, seed = b.input(SCALAR, I64), b.input(SCALAR, I64)
    wide = b.op("mul", b.op("add", b.cast(x, F32), b.cast(bias, F32)), scale)
    kept = b.op("philox", seed, step, dtype=BOOL, kind=FULL, constants=(7, 0.5))
    y = b.op("select", kept, b.op("max", wide, b.constant(0.0)), b.constant(0.25))
    sums = [b.reduce("column_sum", y)] if has_sums else []
    return b.program(b.cast(y, dtype), *sums)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "joined"),
    [(4096, 6, 128), (1994, 6, 2), (997, 6, 1), (13, 127, 1), (39, 100, 3), (60, 1, 60)],
)
def test_narrow_rows_are_walked_together(native, groups, dtype, rows, columns, joined):
    program = biased(dtype)
    arrays = groups.operands(program, rows, columns)
    groups.check(KERNEL, program, rows, columns)
    attrs = {"program": program, "rows": rows, "columns": columns}
    outputs = [np.zeros((rows, columns), np.uint16 if dtype is BF16 else np.float32)]
    plan = KERNEL.plan(attrs, *[tuple([low_operand(a) for a in x]) for x in (arrays, outputs)])
    space, behind = garbage(plan.needs.workspace_bytes)
    launch = plan.bind(tuple(arrays), tuple(outputs), space)
    block = (ctypes.c_int64 * words.operand(0)).from_address(launch.arguments)
    assert (block[words.ROWS], block[words.COLUMNS]) == (rows // joined, columns * joined)
    # What is repeated is read anew by each launch.
    arrays[1][...], arrays[2][...] = arrays[1][::-1].copy(), 0.5
    launch()
    groups.compare(program, outputs, groups.interpret(program, rows, columns, arrays), 3e-5)
    assert (behind == GUARD).all()


def test_sums_over_narrow_rows_have_the_bits_of_rows_that_lie_apart(native, groups):
    program, rows, columns = biased(F32, has_sums=True), 1024, 6
    arrays = groups.operands(program, rows, columns)
    apart = np.zeros((rows, 2 * columns), np.float32)[:, :columns]
    apart[...] = arrays[0]
    dense, _ = groups.run(KERNEL, program, rows, columns, arrays)
    wide, _ = groups.run(KERNEL, program, rows, columns, [apart, *arrays[1:]])
    for a, b in zip(dense, wide, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("level", ["-O0", "-O3"])
def test_bits_are_those_of_any_level(native, native_toolchain, groups, tmp_path, level):
    programs, file = known(900, 300).values(), tmp_path / "all.c"
    includes = [f'#include "{name}.h"' for name in ("runtime", "sums", "af_math")]
    file.write_text("\n".join([*includes, *[emit(program).text for program in programs]]))
    chain = replace(native_toolchain, flags=(*native_toolchain.flags, level))
    library = chain.library(runtime.text_of(file))
    core = native_toolchain.library(runtime.text_of(Path(emitting.__file__).with_name("runtime.c")))
    core.af_parallel_address.restype = ctypes.c_void_p
    library.af_bind_runtime(ctypes.c_void_p(core.af_parallel_address()))

    def plan(attrs, *operands):
        plan, (own,) = KERNEL.plan(attrs, *operands), functions_of_program(attrs)
        address = ctypes.cast(getattr(library, own.name), ctypes.c_void_p).value
        bind = lambda *x: NativeLaunch(address, (own := plan.bind(*x)).arguments, (own,))  # noqa: E731
        return KernelPlan(plan.needs, bind)

    for program in programs:
        arrays = groups.operands(program, 900, 300)
        kernels = (KERNEL, SimpleNamespace(plan=plan))
        usual, other = [groups.run(kernel, program, 900, 300, arrays)[0] for kernel in kernels]
        assert [x.tobytes() for x in usual] == [x.tobytes() for x in other]


def test_a_launch_takes_the_threads_its_workspace_has_room_for(native, groups, monkeypatch):
    program, shape = softmax(), (900, 300)
    arrays = groups.operands(program, *shape)
    with runtime.at_most_threads(1):
        one, _ = groups.run(KERNEL, program, *shape, arrays)

    class BoundElsewhere:
        def plan(self, *call):
            with runtime.at_most_threads(1):
                plan = KERNEL.plan(*call)

            def bind(*places):
                monkeypatch.setattr(runtime, "num_threads", lambda: 64)
                return plan.bind(*places)

            return KernelPlan(plan.needs, bind)

    many, _ = groups.run(BoundElsewhere(), program, *shape, arrays)
    np.testing.assert_array_equal(one[0], many[0])


@pytest.mark.parametrize("shape", [(7, 33), (900, 300), (2, 30_000)])
def test_outputs_may_lie_over_the_inputs_that_are_offered(kernel, groups, shape):
    shape, offered = groups.fitting(kernel, shape), 0
    for program in known(*shape).values():
        arrays = groups.operands(program, *shape)
        apart, needs = groups.run(kernel, program, *shape, arrays)
        for pair in needs.in_place:
            offered += 1
            together, _ = groups.run(kernel, program, *shape, arrays, in_place=(pair,))
            for a, b in zip(apart, together, strict=True):
                np.testing.assert_array_equal(a, b)
    assert offered >= 10


def test_an_input_read_after_the_store_is_not_offered(kernel, groups):
    b = groups.Builder()
    x, y = b.input(), b.input()
    stored = b.op("add", x, y)
    total = b.reduce("row_sum", stored)
    program = b.program(stored, b.op("mul", y, total), b.op("add", stored, total))
    arrays = groups.operands(program, 6, 20)
    _, needs = groups.check(kernel, program, 6, 20)
    # x is read in the first phase only, where `stored` is stored; y is read in the second too.
    assert (0, 0) in needs.in_place
    assert (0, 1) not in needs.in_place
    assert {(1, 1), (2, 1), (1, 0), (2, 0)} <= set(needs.in_place)
    assert len(arrays) == 2


def test_an_input_whose_rows_are_read_in_another_order_is_not_offered(kernel, groups):
    b = groups.Builder()
    program = b.program(b.op("neg", b.input(every=2, count=6)))
    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    (y,), needs = groups.run(kernel, program, 6, 4, [x])
    np.testing.assert_array_equal(y, -x[[0, 0, 1, 1, 2, 2]])
    assert needs.in_place == ()


def test_strided_rows_are_read_and_written_in_place(kernel, groups):
    program = layer_norm(24)
    rng = np.random.default_rng(3)
    wide = rng.standard_normal((4, 5, 72)).astype(np.float32)
    x = wide[..., 24:48]
    gamma, beta = rng.standard_normal((2, 24)).astype(np.float32)
    out = np.zeros((4, 5, 48), np.float32)
    outputs = [out[..., :24], np.zeros((4, 5), np.float32), np.zeros((20,), np.float32)]
    groups.run(kernel, program, 20, 24, [x, gamma, beta], outputs=outputs)
    expected = groups.interpret(program, 20, 24, [np.ascontiguousarray(x), gamma, beta])
    np.testing.assert_allclose(outputs[0].reshape(20, 24), expected[0], rtol=1e-5, atol=1e-5)
    assert not out[..., 24:].any()


@pytest.mark.parametrize("axes", [(1, 0, 2), (0, 2, 1)])
def test_rows_that_are_not_evenly_spaced_are_declined(kernel, groups, axes):
    program = softmax()
    shape = (4, 6, 6)
    x = np.zeros(shape, np.float32).transpose(axes)
    attrs = {"program": program, "rows": 24, "columns": 6}
    result = operand(np.zeros(shape, np.float32))
    assert kernel.plan(attrs, (operand(x),), (result,)) is None


def test_a_bad_index_fails_the_launch_and_is_named(kernel, groups):
    program = cross_entropy(5)
    x, labels = np.zeros((4, 5), np.float32), np.array([0, 4, 5, 1])
    with raises(IndexError):
        groups.run(kernel, program, 4, 5, [x, labels])
    labels[2] = -1
    with raises(IndexError):
        groups.run(kernel, program, 4, 5, [x, labels])


def test_rows_given_by_a_caller_make_the_launch(native, groups):
    program, rows, columns = layer_norm_grad(300), 900, 300
    arrays = groups.operands(program, rows, columns)
    expected, needs = groups.run(KERNEL, program, rows, columns, arrays)
    attrs = {"program": program, "rows": rows, "columns": columns}
    outputs = tuple(np.zeros_like(x) for x in expected)
    space = garbage(needs.workspace_bytes)[0]
    launch = bind_to(KERNEL, attrs, tuple(arrays), outputs, space)
    name = emit(program).name
    library = next(x for x in runtime._state.libraries if hasattr(x, name))
    addresses = {
        tail: ctypes.cast(getattr(library, name + tail), ctypes.c_void_p).value
        for tail in ("_rows", "_finish")
    }
    block = (ctypes.c_int64 * words.operand(0)).from_address(launch.arguments)
    step, each = block[words.CHUNK_ROWS], num_rows_at_once(program) * 3
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] + [ctypes.c_int64] * 2 + [ctypes.c_int32])
    some_rows = call(addresses["_rows"])
    for chunk in reversed(range(block[words.NUM_CHUNKS])):
        end = min((chunk + 1) * step, rows)
        for begin in range(chunk * step, end, each):
            some_rows(launch.arguments, begin, min(begin + each, end), 0)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(addresses["_finish"])(launch.arguments)
    for a, b in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_every_number_of_float16_is_stored_as_it_was_loaded(kernel, groups):
    b = groups.Builder()
    program = b.program(b.op("neg", b.op("neg", b.input(FULL, DType.FLOAT16))))
    numbers = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(256, 256)
    ((made,), _) = groups.run(kernel, program, 256, 256, [numbers])
    np.testing.assert_array_equal(made, numbers)
    is_number = ~np.isnan(numbers)
    np.testing.assert_array_equal(np.signbit(made[is_number]), np.signbit(numbers[is_number]))


def test_rounding_to_float16_is_that_of_numpy(kernel, groups):
    b = groups.Builder()
    program = b.program(b.cast(b.input(), DType.FLOAT16))
    steps = [np.arange(0, 1 << 32, 104_729, dtype=np.uint32)]
    for edge in (0x33000000, 0x38800000, 0x477FF000, 0x7F800000):
        steps.append(np.arange(edge - 9, edge + 9, dtype=np.uint32))
    numbers = np.concatenate(steps).view(np.float32)[None]
    with np.errstate(all="ignore"):
        expected = numbers.astype(np.float16)
        ((made,), _) = groups.run(kernel, program, *numbers.shape, [numbers])
    np.testing.assert_array_equal(made, expected)


def test_more_random_bits_than_the_stack_holds_are_declined(groups):
    for count in (6, 7):
        b = groups.Builder()
        seed, step = b.input(SCALAR, I64), b.input(SCALAR, I64)
        kept = [
            b.op("philox", seed, step, dtype=BOOL, kind=FULL, constants=(key, 0.5))
            for key in range(count)
        ]
        assert is_taken(b.program(*kept)) == (count == 6)


def test_a_program_the_compiler_refused_is_declined(native, groups, monkeypatch):
    program = softmax()
    x = operand(np.zeros((3, 4), np.float32))
    attrs = {"program": program, "rows": 3, "columns": 4}
    assert KERNEL.plan(attrs, (x,), (x,)) is not None
    monkeypatch.setattr(runtime, "is_broken", lambda f: f.name == emit(program).name)
    assert KERNEL.plan(attrs, (x,), (x,)) is None


def test_without_a_compiler_every_program_is_declined(groups):
    runtime.disable()
    x = operand(np.zeros((3, 4), np.float32))
    attrs = {"program": softmax(), "rows": 3, "columns": 4}
    assert KERNEL.plan(attrs, (x,), (x,)) is None


def test_programs_that_differ_in_the_sign_of_a_zero_are_two(native, groups):
    signs = []
    for zero in (0.0, -0.0):
        b = groups.Builder()
        x = b.input()
        program = b.program(b.op("mul", x, b.constant(zero)))
        (y,), _ = groups.run(KERNEL, program, 1, 4, [np.ones((1, 4), np.float32)])
        signs.append(bool(np.signbit(y).all()))
    assert signs == [False, True]


def test_a_function_is_described_by_the_members_of_its_group(native, groups):
    attrs = {"program": softmax(), "rows": 2, "columns": 3}
    (function,) = functions_of_program(attrs | {"members": ("softmax", "mul")})
    assert function.about.startswith("softmax, mul: program of 5 instructions (row_max, sub, exp")


HOSTILE = (
    "*/ __attribute__((constructor)) static void run(void) { __builtin_trap(); } /*",
    "\\\n#error a backslash",
    "??/\n#error a trigraph",
    '"; #include "/dev/zero"',
    "\x00\u202e",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_no_word_of_a_plan_reaches_the_compiler(native, groups, name):
    program = softmax()
    attrs = {"program": program, "rows": 2, "columns": 3}
    (plain,) = functions_of_program(attrs | {"members": ("softmax",)})
    (hostile,) = functions_of_program(attrs | {"members": (name,)})
    assert name in hostile.about
    assert runtime._text_with([hostile]) == runtime._text_with([plain])


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((1, 0, 0), "exp(0); __builtin_trap(); //"),
        ((1, 0, 2), "float32) __builtin_trap("),
        ((1, 0, 1), ("0",)),
        ((1, 0, 1), (7,)),
        ((1, 0, 4), ("1",)),
        ((0, 0, 2), "1"),
        ((2,), ("5",)),
    ],
)
def test_a_program_with_anything_but_its_own_words_and_numbers_is_refused(groups, place, value):
    def put(row, place):
        at, *rest = place
        return (*row[:at], put(row[at], rest) if rest else value, *row[at + 1 :])

    row = msgpack.unpackb(to_msgpack(to_row(softmax())), use_list=False)

    def text_of(hostile):
        program = from_row(FusedProgram, hostile)
        return functions_of_program({"program": program, "rows": 2, "columns": 3})

    with pytest.raises((ProgramError, DecodeError)):
        text_of(put(row, place))


def test_anything_but_a_program_in_the_place_of_one_is_refused():
    with raises(InternalError):
        functions_of_program({"program": 5, "rows": 2, "columns": 3})


def sized(rows, columns, key):
    """Return programs whose numbers follow from their extents."""
    return (
        layer_norm(columns),
        layer_norm(columns, F64),
        layer_norm_grad(columns),
        cross_entropy(columns),
        dropout(key=key),
        repeated(2, rows + 1),
    )


def test_one_text_serves_every_shape(native, groups):
    rng, names = np.random.default_rng(0), set()
    for key in range(8):
        rows, columns = [int(n) for n in rng.integers(2, 300, 2)]
        programs = sized(rows, columns, key)
        names.add(tuple([emit(program).name for program in programs]))
        for program in programs:
            groups.check(KERNEL, program, rows, columns, tolerance=1e-4)
    assert len(names) == 1


def test_numbers_as_words_give_the_bits_of_numbers_in_the_text(native, groups):
    rows, columns = 40, 300
    for program in sized(rows, columns, 2**63 + 9):
        arrays = groups.operands(program, rows, columns)
        expected, needs = groups.run(KERNEL, program, rows, columns, arrays)
        attrs = {"program": program, "rows": rows, "columns": columns}
        outputs = tuple([np.zeros_like(x) for x in expected])
        space = garbage(needs.workspace_bytes)[0]
        launch = bind_to(KERNEL, attrs, tuple(arrays), outputs, space)
        in_text = emit(program, numbers=())
        assert in_text.name != emit(program).name
        NativeLaunch(native.address_of(in_text), launch.arguments, (launch,))()
        for a, b in zip(outputs, expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_another_op_is_another_text():
    other = FusedProgram((ProgramInput(F32, FULL),), (Instruction("exp", (0,), F32, FULL),), (1,))
    assert emit(other).name != emit(softmax()).name
    assert "exp" in emit(other).about


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", ["equal", "random"])
@pytest.mark.parametrize(("rows", "columns"), [(100_001, 3), (100_001, 1), (3, 100_001)])
def test_long_sums_lose_less_than_a_millionth(rows, columns, kind, kernel, groups):
    b = groups.Builder()
    x = b.input()
    double = b.op("mul", x, b.constant(2.0))
    outputs = [b.reduce(f"{way}_sum", v) for v in (x, double) for way in ("row", "column")]
    program = b.program(*outputs)
    values = np.full((rows, columns), 0.1, np.float32)
    if kind == "random":
        values = np.random.default_rng(1).random((rows, columns), np.float32) + np.float32(0.5)
    got, _ = groups.run(kernel, program, rows, columns, [values], launches=1)
    wide = values.astype(np.float64)
    for y, want in zip(got, [w * wide.sum(a) for w in (1, 2) for a in (1, 0)], strict=True):
        np.testing.assert_allclose(y, want, rtol=1e-6)
