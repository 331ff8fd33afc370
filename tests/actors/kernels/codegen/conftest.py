"""Groups for tests: a builder, an interpreter in float64, and how a launch is run as in a plan."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from kernel_calls import run_typed

from actors.kernels.codegen.emit import emit
from actors.kernels.codegen.fused_kernel import FusedKernel
from actors.kernels.interpret.fused import NumpyFusedKernel
from actors.kernels.native import runtime
from compiler.bfloat16 import from_bits, to_bits
from compiler.fusion.program import FusedProgram, Instruction, Kind, ProgramInput
from compiler.ops.random import dropout_mask
from compiler.types import DType, TensorType, numpy_dtype

F32, FULL = DType.FLOAT32, Kind.FULL
ONES = {Kind.FULL: (1, 1), Kind.ROW: (1, 0), Kind.COLUMN: (0, 1), Kind.SCALAR: (0, 0)}
KINDS = {pair: kind for kind, pair in ONES.items()}


class Builder:
    """Builds a program; values are numbers."""

    def __init__(self):
        self.inputs = []
        self.instructions = []

    def input(self, kind=Kind.FULL, dtype=F32, every=1, count=0):
        assert not self.instructions
        self.inputs.append(ProgramInput(dtype, kind, every, count))
        return len(self.inputs) - 1

    def dtype(self, value):
        return self.program().dtype_of(value)

    def kind(self, value):
        return self.program().kind_of(value)

    def op(self, name, *operands, dtype=None, kind=None, constants=()):
        if kind is None:
            axes = [ONES[self.kind(v)] for v in operands]
            kind = KINDS[max(a for a, _ in axes), max(b for _, b in axes)]
        if dtype is None:
            dtype = self.dtype(operands[-1])
            dtype = DType.BOOL if name in ("lt", "le", "gt", "ge", "eq", "ne") else dtype
        self.instructions.append(Instruction(name, operands, dtype, kind, constants))
        return len(self.inputs) + len(self.instructions) - 1

    def constant(self, number, dtype=F32):
        return self.op("constant", dtype=dtype, kind=Kind.SCALAR, constants=(number,))

    def cast(self, value, dtype):
        return self.op("cast", value, dtype=dtype)

    def reduce(self, name, value):
        kind = Kind.COLUMN if name == "column_sum" else Kind.ROW
        return self.op(name, value, kind=kind)

    def program(self, *outputs):
        return FusedProgram(tuple(self.inputs), tuple(self.instructions), outputs)


_UFUNCS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum,
    "min": np.minimum, "pow": np.power, "mod": np.mod, "neg": np.negative, "abs": np.abs,
    "sign": np.sign, "reciprocal": lambda x: 1 / x, "exp": np.exp, "log": np.log, "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x), "tanh": np.tanh, "erf": np.vectorize(math.erf, otypes="d"),
    "sin": np.sin, "cos": np.cos, "floor": np.floor, "ceil": np.ceil, "round": np.rint,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal, "and": np.bitwise_and, "or": np.bitwise_or,
    "not": np.invert, "select": np.where,
}  # fmt: skip
_REDUCTIONS = {"row_sum": np.sum, "row_max": np.max, "row_min": np.min}


def interpret(program, rows, columns, arrays):
    """Return the outputs in float64 (floats) or their own type, as [rows or 1, columns or 1]."""
    values = []
    for entry, array in zip(program.inputs, arrays, strict=True):
        x = from_bits(array) if entry.dtype.value == "bfloat16" else array
        x = x.astype(np.float64) if entry.dtype.value.startswith(("float", "bf")) else x
        if entry.kind in (Kind.FULL, Kind.ROW):
            own = np.arange(rows) // entry.every
            x = x.reshape(x.shape[0] if x.ndim == 2 else -1, columns if entry.kind is FULL else 1)
            x = x[own % entry.count if entry.count else own]
        else:
            x = x.reshape(1, -1)
        values.append(x)
    for instruction in program.instructions:
        operands = [values[v] for v in instruction.operands]
        with np.errstate(all="ignore"):
            values.append(_step(instruction, operands, rows, columns))
    return [values[v] for v in program.outputs]


def _step(instruction, operands, rows, columns):
    op, dtype = instruction.op, instruction.dtype
    is_float = dtype.value.startswith(("float", "bf"))
    wide = np.float64 if is_float else dtype.value
    if op == "constant":
        number = instruction.constants[0]
        return np.array([[number]], np.float32 if dtype is F32 else wide).astype(wide)
    if op == "cast":
        source = operands[0]
        x = source.astype(np.float32) if dtype is F32 and source.dtype == np.float64 else source
        return x.astype(wide)
    if op == "column_index":
        return np.arange(columns, dtype=np.int32)[None]
    if op == "row_index":
        every, count = instruction.constants
        own = np.arange(rows, dtype=np.int32)[:, None] // every
        return own % count if count else own
    if op == "check_index":
        return operands[0]
    if op == "philox":
        key, p = instruction.constants
        seed, step = (int(x[0, 0]) for x in operands)
        return dropout_mask(seed, step, key, p, rows * columns).reshape(rows, columns)
    if op in _REDUCTIONS:
        x = np.broadcast_to(operands[0], (rows, columns))
        return _REDUCTIONS[op](x, axis=1, keepdims=True).astype(wide)
    if op == "column_sum":
        return np.broadcast_to(operands[0], (rows, columns)).sum(0, keepdims=True).astype(wide)
    return np.asarray(_UFUNCS[op](*operands)).astype(np.bool_ if dtype is DType.BOOL else wide)


def shape_of(kind, rows, columns, own_rows=None):
    own = rows if own_rows is None else own_rows
    return {
        Kind.FULL: (own, columns), Kind.ROW: (own,), Kind.COLUMN: (columns,), Kind.SCALAR: ()
    }[kind]  # fmt: skip


def results_of(program, rows, columns):
    """Return the types of a program's outputs."""
    return [
        TensorType(program.dtype_of(v), shape_of(program.kind_of(v), rows, columns))
        for v in program.outputs
    ]


def run(kernel, program, rows, columns, arrays, **options):
    """Run a kernel of a program, see `run_typed`; returns (outputs, needs)."""
    attrs = {"program": program, "rows": rows, "columns": columns}
    dtypes = [entry.dtype for entry in program.inputs]
    return run_typed(kernel, attrs, dtypes, arrays, results_of(program, rows, columns), **options)


def compare(program, got, expected, tolerance):
    """Check outputs against the interpreter's; `tolerance` is that of float32."""
    has_single = F32 in [program.dtype_of(v) for v in range(program.num_values)]
    for value, y, reference in zip(program.outputs, got, expected, strict=True):
        dtype = program.dtype_of(value)
        y = from_bits(y) if dtype.value == "bfloat16" else y
        want = reference.reshape(y.shape) if reference.size == y.size else reference
        want = np.broadcast_to(want, y.shape)
        if not dtype.value.startswith(("float", "bf")):
            np.testing.assert_array_equal(y, want)
            continue
        np.testing.assert_array_equal(np.isnan(y), np.isnan(want))
        own = tolerance + 0.01 * (dtype.value == "bfloat16")
        own = own if has_single or dtype.value == "bfloat16" else tolerance * 1e-8
        np.testing.assert_allclose(y, want, rtol=own, atol=own)


def operands(program, rows, columns, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    arrays = []
    for entry in program.inputs:
        shape = shape_of(entry.kind, rows, columns, entry.count or None)
        dtype = numpy_dtype(entry.dtype)
        if entry.dtype.is_integer:
            arrays.append(np.asarray(rng.integers(0, max(columns, 1), shape), dtype))
        elif entry.dtype is DType.BOOL:
            arrays.append(np.asarray(rng.random(shape) < 0.5))
        elif entry.dtype.value == "bfloat16":
            arrays.append(to_bits(rng.standard_normal(shape) * scale))
        else:
            arrays.append(np.asarray(rng.standard_normal(shape) * scale, dtype))
    return arrays


def check(kernel, program, rows, columns, tolerance=3e-5, **options):
    arrays = operands(program, rows, columns)
    got, needs = run(kernel, program, rows, columns, arrays, **options)
    compare(program, got, interpret(program, rows, columns, arrays), tolerance)
    return got, needs


def prepare(kernel, programs):
    """Build all in one start of the compiler."""
    if isinstance(kernel, FusedKernel):
        runtime.prepare([emit(program) for program in programs])


@pytest.fixture(params=["c.fused", "numpy.fused"])
def kernel(request):
    """Both kernels of groups; numpy's needs no compiler."""
    if request.param == "numpy.fused":
        return NumpyFusedKernel()
    request.getfixturevalue("native")
    return FusedKernel()


@pytest.fixture(scope="session")
def groups():
    """The functions above, for tests (importlib mode has no sibling imports)."""
    return SimpleNamespace(
        Builder=Builder, interpret=interpret, run=run, compare=compare, results_of=results_of,
        operands=operands, check=check, prepare=prepare,
    )  # fmt: skip
