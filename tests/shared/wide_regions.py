"""Regions to try kernels on: the loss over a vocabulary with its gradients, and a hidden layer."""

from __future__ import annotations

import numpy as np
from fused_programs import Builder

from compiler.contract.program import Kind
from compiler.contract.region import TiledLoop, TileStep, TileStepKind, TileValue
from compiler.contract.types import DType, TensorType, from_bits, numpy_dtype, to_bits

FULL, ROW, COLUMN, SCALAR = Kind.FULL, Kind.ROW, Kind.COLUMN, Kind.SCALAR
F32, F64, BF16, I64 = DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16, DType.INT64
PRODUCT, SUM_OF_PRODUCTS = TileStepKind.PRODUCT, TileStepKind.SUM_OF_PRODUCTS
COLUMN_SUM, PROGRAM = TileStepKind.COLUMN_SUM, TileStepKind.PROGRAM
ALL = ("losses", "dx", "dw", "dwt", "db")
"""Results: dwt is the gradient of the weight transposed, as some layers have it."""

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


def loss_program(dtype, made, has_bias, columns):
    """Losses of rows of logits, and with `made` their gradient times a number."""
    b = Builder()
    x, labels, scale = b.input(FULL, F32 if dtype is BF16 else dtype), b.input(ROW, I64), None
    wide_dtype = b.inputs[x].dtype
    bias = b.input(COLUMN, wide_dtype) if has_bias else None
    scale = b.input(SCALAR, wide_dtype)
    z = b.op("add", x, bias) if has_bias else x
    largest = b.reduce("row_max", z)
    total = b.reduce("row_sum", b.op("exp", b.op("sub", z, largest)))
    lse = b.op("add", largest, b.op("log", total))
    label = b.op("check_index", labels, dtype=I64, kind=ROW, constants=(columns,))
    index = b.op("column_index", dtype=DType.INT32, kind=COLUMN)
    hit = b.op("eq", index, b.cast(label, DType.INT32))
    zero, one = b.constant(0.0, wide_dtype), b.constant(1.0, wide_dtype)
    losses = b.op("sub", lse, b.reduce("row_sum", b.op("select", hit, z, zero)))
    if made is None:
        return b.program(losses)
    share = b.op("sub", b.op("exp", b.op("sub", z, lse)), b.op("select", hit, one, zero))
    return b.program(losses, b.cast(b.op("mul", share, scale), made))


def loss_region(dtype, rows, columns, width, chunk_rows, wanted, has_bias=False):
    """Inputs: x, weight as [width, columns], the same as [columns, width], labels, scale, bias."""
    wide_dtype = F32 if dtype is BF16 else dtype
    has_gradient = wanted != ("losses",)
    tiles = [TileValue(wide_dtype, FULL)] + [TileValue(dtype, FULL)] * has_gradient
    num_inputs = 5 + has_bias
    wide, dwide = num_inputs, num_inputs + 1
    shapes = {
        "losses": (rows,), "dx": (rows, width), "dw": (columns, width), "dwt": (width, columns),
        "db": (columns,),
    }  # fmt: skip
    is_plain = dtype is not BF16
    wanted = tuple([name for name in wanted if name != "db" or is_plain])
    place = {name: num_inputs + len(tiles) + i for i, name in enumerate(wanted)}
    program = loss_program(dtype, dtype if has_gradient else None, has_bias, columns)
    reads = (wide, 3, *((5,) if has_bias else ()), 4)
    steps = [TileStep(PRODUCT, (0, 1), (wide,))]
    makes = (place["losses"],) + ((dwide,) if has_gradient else ())
    steps.append(TileStep(PROGRAM, reads, makes, program))
    for name, kind, operands in (
        ("dx", PRODUCT, (dwide, 2)), ("dw", SUM_OF_PRODUCTS, (dwide, 0)),
        ("dwt", SUM_OF_PRODUCTS, (0, dwide)), ("db", COLUMN_SUM, (dwide,)),
    ):  # fmt: skip
        if name in place:
            steps.append(TileStep(kind, operands, (place[name],)))
    outputs = tuple([TensorType(wide_dtype, shapes[name]) for name in wanted])
    region = TiledLoop(rows, columns, chunk_rows, num_inputs, tuple(tiles), outputs, tuple(steps))
    return region, wanted


def loss_operands(dtype, rows, columns, width, has_bias, seed=0):
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((rows, width)), rng.standard_normal((columns, width)) / 2
    labels = rng.integers(0, columns, rows)
    bias = [rng.standard_normal(columns)] if has_bias else []
    np_dtype = numpy_dtype(F32 if dtype is BF16 else dtype)
    if dtype is BF16:
        x, w = to_bits(x), to_bits(w)
    else:
        x, w = x.astype(np_dtype), w.astype(np_dtype)
    scale = np.asarray(0.25, np_dtype)
    return [x, w.T, w, labels, scale, *[v.astype(np_dtype) for v in bias]]


def expected(dtype, arrays):
    x, _, w = [from_bits(a) if dtype is BF16 else a for a in map(np.ascontiguousarray, arrays[:3])]
    x, w, labels, scale = x.astype(np.float64), w.astype(np.float64), arrays[3], float(arrays[4])
    z = x @ w.T + (arrays[5] if len(arrays) > 5 else 0)
    largest = z.max(1, keepdims=True)
    lse = largest[:, 0] + np.log(np.exp(z - largest).sum(1))
    rows = np.arange(len(labels))
    d = np.exp(z - lse[:, None])
    d[rows, labels] -= 1
    d *= scale
    return {
        "losses": lse - z[rows, labels], "dx": d @ w, "dw": d.T @ x, "dwt": x.T @ d, "db": d.sum(0)
    }  # fmt: skip


def dtypes_of(dtype, count):
    wide_dtype = F32 if dtype is BF16 else dtype
    return [dtype, dtype, dtype, I64, wide_dtype, wide_dtype][:count]


def hidden_region(rows, columns, width, chunk_rows):
    """A wide hidden layer with tanh between its products; x has rows that lie apart."""
    b = Builder()
    program = b.program(b.op("tanh", b.input(FULL, F32)))
    steps = (
        TileStep(PRODUCT, (0, 1), (3,)), TileStep(PROGRAM, (3,), (4,), program),
        TileStep(PRODUCT, (4, 2), (5,))
    )  # fmt: skip
    tiles = (TileValue(F32, FULL), TileValue(F32, FULL))
    return TiledLoop(rows, columns, chunk_rows, 3, tiles, (TensorType(F32, (rows, width)),), steps)


def activated_region(rows, columns, width):
    """A product of the tanh of x, whose rows may be several axes."""
    b = Builder()
    program = b.program(b.op("tanh", b.input(FULL, F32)))
    steps = (TileStep(PROGRAM, (0,), (2,), program), TileStep(PRODUCT, (2, 1), (3,)))
    outputs = (TensorType(F32, (rows, width)),)
    return TiledLoop(rows, columns, 0, 2, (TileValue(F32, FULL),), outputs, steps)


def product_then(program, rows, columns, held, shape=None):
    """Return the region of a product and the program that reads it first; `held`: its type.

    Operands are both factors and then what else the program reads; `shape` is that of results with
    both extents, if not those.
    """
    num_inputs = 1 + len(program.inputs)
    shapes = {FULL: shape or (rows, columns), ROW: (rows,), COLUMN: (columns,), SCALAR: ()}
    outputs = tuple(
        [TensorType(program.dtype_of(v), shapes[program.kind_of(v)]) for v in program.outputs]
    )
    makes = tuple(range(num_inputs + 1, num_inputs + 1 + len(outputs)))
    steps = (
        TileStep(PRODUCT, (0, 1), (num_inputs,)),
        TileStep(PROGRAM, (num_inputs, *range(2, num_inputs)), makes, program),
    )
    return TiledLoop(rows, columns, 0, num_inputs, (TileValue(held, FULL),), outputs, steps)
