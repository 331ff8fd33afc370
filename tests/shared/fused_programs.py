"""Fused programs for tests: a builder, an interpreter in float64, operands, and known programs."""

from __future__ import annotations

import math

import numpy as np

from compiler.contract.program import FusedProgram, Instruction, Kind, ProgramInput
from compiler.contract.types import DType, TensorType, from_bits, numpy_dtype, to_bits
from compiler.ops.primitives.sources import dropout_mask

ROW, COLUMN, SCALAR = Kind.ROW, Kind.COLUMN, Kind.SCALAR
F64, I64, I32, BOOL = DType.FLOAT64, DType.INT64, DType.INT32, DType.BOOL
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
    "not": np.invert, "select": np.where, "xor": np.bitwise_xor, "floordiv": np.floor_divide,
    "log1p": np.log1p, "expm1": np.expm1, "log2": np.log2, "log10": np.log10, "atan2": np.arctan2,
    "erfc": np.vectorize(math.erfc, otypes="d"),
}  # fmt: skip
_REDUCTIONS = {"row_sum": np.sum, "row_max": np.max, "row_min": np.min}


def interpret(program, rows, columns, arrays):
    """Return the outputs in float64 (floats) or their own type, as [rows or 1, columns or 1]."""
    values = []
    for entry, array in zip(program.inputs, arrays, strict=True):
        x = from_bits(array) if entry.dtype.value == "bfloat16" else array
        x = x.astype(np.float64) if entry.dtype.value.startswith(("float", "bf")) else x
        if entry.kind in (Kind.FULL, Kind.ROW):
            numbers = np.arange(rows) // entry.every
            x = x.reshape(x.shape[0] if x.ndim == 2 else -1, columns if entry.kind is FULL else 1)
            x = x[numbers % entry.count if entry.count else numbers]
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
        ids = np.arange(rows, dtype=np.int32)[:, None] // every
        return ids % count if count else ids
    if op == "check_index":
        return operands[0]
    if op == "philox":
        key, p = instruction.constants
        seed, step = (int(x[0, 0]) for x in operands[:2])
        ids = np.arange(rows * columns).reshape(rows, columns)
        for first in operands[2:]:
            ids = np.arange(columns) + first if len(first) > 1 else ids + first
        mask = dropout_mask(seed, step, key, p, int(ids.max(initial=0)) + 1)
        return mask[ids]
    if op in _REDUCTIONS:
        x = np.broadcast_to(operands[0], (rows, columns))
        return _REDUCTIONS[op](x, axis=1, keepdims=True).astype(wide)
    if op == "column_sum":
        return np.broadcast_to(operands[0], (rows, columns)).sum(0, keepdims=True).astype(wide)
    return np.asarray(_UFUNCS[op](*operands)).astype(np.bool_ if dtype is DType.BOOL else wide)


def shape_of(kind, rows, columns, own_rows=None):
    count = rows if own_rows is None else own_rows
    return {
        Kind.FULL: (count, columns), Kind.ROW: (count,), Kind.COLUMN: (columns,), Kind.SCALAR: ()
    }[kind]  # fmt: skip


def results_of(program, rows, columns):
    """Return the types of a program's outputs."""
    return [
        TensorType(program.dtype_of(v), shape_of(program.kind_of(v), rows, columns))
        for v in program.outputs
    ]


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
        is_half = dtype.itemsize == 2
        limit = tolerance + 0.01 * is_half if has_single or is_half else tolerance * 1e-8
        np.testing.assert_allclose(y, want, rtol=limit, atol=limit)


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


def layer_norm(columns, dtype=F32):
    b = Builder()
    x, gamma, beta = b.input(FULL, dtype), b.input(COLUMN, dtype), b.input(COLUMN, dtype)
    share = b.constant(1 / columns, dtype)
    mean = b.op("mul", b.reduce("row_sum", x), share)
    centred = b.op("sub", x, mean)
    squares = b.reduce("row_sum", b.op("mul", centred, centred))
    variance = b.op("mul", squares, share)
    rstd = b.op("rsqrt", b.op("add", variance, b.constant(1e-5, dtype)))
    y = b.op("add", b.op("mul", b.op("mul", centred, rstd), gamma), beta)
    return b.program(y, mean, rstd)


def layer_norm_grad(columns):
    b = Builder()
    dy, x, gamma, mean, rstd = b.input(), b.input(), b.input(COLUMN), b.input(ROW), b.input(ROW)
    share = b.constant(1 / columns)
    xhat = b.op("mul", b.op("sub", x, mean), rstd)
    g = b.op("mul", dy, gamma)
    first = b.op("mul", b.reduce("row_sum", g), share)
    second = b.op("mul", b.reduce("row_sum", b.op("mul", g, xhat)), share)
    dx = b.op("mul", rstd, b.op("sub", b.op("sub", g, first), b.op("mul", xhat, second)))
    dgamma = b.reduce("column_sum", b.op("mul", dy, xhat))
    return b.program(dx, dgamma, b.reduce("column_sum", dy))


def softmax(dtype=F32):
    b = Builder()
    x = b.input(FULL, dtype)
    shifted = b.op("exp", b.op("sub", x, b.reduce("row_max", x)))
    return b.program(b.op("div", shifted, b.reduce("row_sum", shifted)))


def cross_entropy(classes):
    b = Builder()
    x, labels = b.input(), b.input(ROW, I64)
    label = b.cast(b.op("check_index", labels, constants=(classes,)), I32)
    hit = b.op("eq", b.op("column_index", dtype=I32, kind=COLUMN), label)
    largest = b.reduce("row_max", x)
    total = b.reduce("row_sum", b.op("exp", b.op("sub", x, largest)))
    lse = b.op("add", b.op("log", total), largest)
    picked = b.reduce("row_sum", b.op("select", hit, x, b.constant(0.0)))
    one = b.op("select", hit, b.constant(1.0), b.constant(0.0))
    dx = b.op("sub", b.op("exp", b.op("sub", x, lse)), one)
    return b.program(b.op("sub", lse, picked), dx)


def dropout(p=0.3, key=11):
    b = Builder()
    x, bias, seed, step = b.input(), b.input(COLUMN), b.input(SCALAR, I64), b.input(SCALAR, I64)
    mask = b.op("philox", seed, step, dtype=BOOL, kind=FULL, constants=(key, p))
    factor = b.op("select", mask, b.constant(1 / (1 - p)), b.constant(0.0))
    return b.program(b.op("mul", b.op("add", x, bias), factor), mask)


def dropout_of_part(kind):
    """Return dropout whose elements are numbered from a square on: of a part, or of each row."""
    b = Builder()
    x, seed, step = b.input(), b.input(SCALAR, I64), b.input(SCALAR, I64)
    root = b.input(kind, I64)
    state = (seed, step, b.op("mul", root, root))
    mask = b.op("philox", *state, dtype=BOOL, kind=FULL, constants=(5, 0.4))
    y = b.op("select", mask, x, b.constant(0.0))
    return b.program(y, b.reduce("row_sum", y))


def flat_dropout():
    b = Builder()
    x, seed, step = b.input(), b.input(SCALAR, I64), b.input(SCALAR, I64)
    mask = b.op("philox", seed, step, dtype=BOOL, kind=FULL, constants=(3, 0.5))
    return b.program(b.op("select", mask, x, b.constant(0.0)))


def gelu_grad_and_bias():
    b = Builder()
    dy, x = b.input(), b.input()
    dx = b.op("mul", dy, b.op("sub", b.constant(1.0), b.op("tanh", x)))
    total = b.reduce("column_sum", dx)
    return b.program(dx, total, b.op("mul", total, b.constant(0.5)))


def adamw():
    b = Builder()
    p, g, m, v = (b.input() for _ in range(4))
    lr, step = b.input(SCALAR), b.input(SCALAR, I64)
    one = b.constant(1.0, F64)
    t = b.op("add", b.cast(step, F64), one)
    decay = b.op("sub", one, b.op("pow", b.constant(0.9, F64), t))
    rate = b.op("div", lr, b.cast(decay, F32))
    m2 = b.op("add", b.op("mul", m, b.constant(0.9)), b.op("mul", g, b.constant(0.1)))
    square = b.op("mul", b.op("mul", g, g), b.constant(0.001))
    v2 = b.op("add", b.op("mul", b.op("mul", v, v), b.constant(0.999)), square)
    moved = b.op("div", b.op("mul", rate, m2), b.op("add", b.op("sqrt", v2), b.constant(1e-3)))
    return b.program(b.op("sub", p, moved), m2, v2, rate)


def repeated(every, count):
    b = Builder()
    x, mask, scale = b.input(), b.input(every=every, count=count), b.input(ROW, F32, every, count)
    y = b.op("add", b.op("mul", x, scale), mask)
    place = b.op("row_index", dtype=I32, kind=ROW, constants=(every, count))
    return b.program(b.op("mul", y, b.cast(place, F32)), b.reduce("row_min", y))


def repeated_alone(count):
    b = Builder()
    x, table = b.input(), b.input(count=count)
    return b.program(b.op("add", x, table))


def lesser_kinds():
    """Outputs of every kind, some of which are inputs or constants."""
    b = Builder()
    x, row, column, scalar = b.input(), b.input(ROW), b.input(COLUMN), b.input(SCALAR)
    outer = b.op("mul", row, column)
    doubled = b.op("add", column, column)
    return b.program(
        b.op("add", outer, x), b.op("exp", row), doubled, b.op("neg", scalar), x, column,
        b.op("sub", b.reduce("column_sum", outer), doubled), b.reduce("row_sum", column),
    )  # fmt: skip


def random_program(rng, dtypes):
    """A program of random instructions; every dtype and kind may meet."""
    b = Builder()
    every, count = ((1, 0), (1, 0), (1, 3), (2, 2))[rng.integers(4)]
    for kind in (FULL, FULL, ROW, COLUMN, SCALAR):
        repeats = (every, count) if kind in (FULL, ROW) and rng.random() < 0.3 else (1, 0)
        b.input(kind, dtypes[rng.integers(len(dtypes))], *repeats)
    values = list(range(5))
    for _ in range(rng.integers(3, 14)):
        dtype = dtypes[rng.integers(len(dtypes))]
        picked = [int(v) for v in rng.choice(values, 2)]
        usable = [v if b.dtype(v) is dtype else b.cast(v, dtype) for v in picked]
        choice = rng.random()
        full = [v for v in usable if b.kind(v) is FULL]
        if choice < 0.15 and full:
            values.append(b.reduce(("row_sum", "row_max", "row_min")[rng.integers(3)], full[0]))
        elif choice < 0.3:
            values.append(b.op(("tanh", "neg", "abs")[rng.integers(3)], usable[0]))
        elif choice < 0.4:
            condition = b.op(("lt", "ge")[rng.integers(2)], *usable)
            values.append(b.op("select", condition, *usable))
        else:
            values.append(b.op(("add", "sub", "mul", "max", "min")[rng.integers(5)], *usable))
        values[-1] = b.op("tanh", values[-1])
    outputs = [int(v) for v in rng.choice(values[5:], 3)]
    sums = [b.reduce("column_sum", v) for v in outputs if b.kind(v) is FULL][:1]
    return b.program(*outputs, values[-1], *sums)


def known(rows, columns):
    """Programs by name. Their constants are those of one width: one text for all shapes."""
    width = 37
    return {
        "layer norm": layer_norm(width),
        "layer norm in doubles": layer_norm(width, F64),
        "its gradient": layer_norm_grad(width),
        "softmax": softmax(),
        "softmax in doubles": softmax(F64),
        "cross-entropy": cross_entropy(100_003),
        "dropout": dropout(),
        "flat dropout": flat_dropout(),
        "dropout of a part": dropout_of_part(SCALAR),
        "dropout by rows": dropout_of_part(ROW),
        "gelu gradient": gelu_grad_and_bias(),
        "adamw": adamw(),
        "repeated rows": repeated(1, max(1, (rows + 1) // 2)),
        "repeated blocks": repeated(2, max(1, (rows + 2) // 3)),
        "one repeated table": repeated_alone(max(1, (rows + 1) // 2)),
        "lesser kinds": lesser_kinds(),
    }
