"""Follow a fused program in numpy, one instruction at a time: what it means, in any float width.

Arrays may be wider than the program says (float64 where it has float32): numbers and conversions
follow the widths that came. bfloat16 is in float32 arrays, rounded where it is an output. FULL
values are [rows, columns], ROW [rows, 1], COLUMN [1, columns], SCALAR [1, 1], so that numpy's
broadcasting is the program's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from compiler.bfloat16 import rounded
from compiler.errors import InternalError
from compiler.fusion.error_function import erf, erfc
from compiler.fusion.program import FusedProgram, Instruction, Kind, ProgramInput
from compiler.fusion.spaces import Space
from compiler.fusion.ufuncs import UFUNCS
from compiler.ops.indices import check_indices
from compiler.ops.random import dropout_mask, random_bits
from compiler.ops.reduce import total
from compiler.types import DType, numpy_dtype

Array = np.ndarray[Any, np.dtype[Any]]

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **UFUNCS,
    # Of integers numpy 1.26 makes floats, and every numpy's rint does.
    **{
        name: lambda x, of=UFUNCS[name]: of(x) if x.dtype.kind == "f" else x
        for name in ("floor", "ceil", "round")
    },
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "erf": erf,
    "erfc": erfc,
    "select": np.where,
    "row_sum": lambda x: total(x, 1, keepdims=True),
    "row_max": lambda x: x.max(axis=1, keepdims=True),
    "row_min": lambda x: x.min(axis=1, keepdims=True),
    "column_sum": lambda x: total(x, 0, keepdims=True),
}


def evaluate(program: FusedProgram, space: Space, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return the outputs of a program, each with all its elements in row-major order, 2-d."""
    widths: dict[DType, np.dtype[Any]] = {}
    for operand, array in zip(program.inputs, inputs, strict=True):
        if operand.dtype.is_float:
            widths[operand.dtype] = array.dtype
    values = [
        _spread(operand, np.asarray(array), space)
        for operand, array in zip(program.inputs, inputs, strict=True)
    ]
    with np.errstate(all="ignore"):
        for number, instruction in enumerate(program.instructions, len(program.inputs)):
            operands = [values[v] for v in instruction.operands]
            made = _execute(instruction, operands, space, widths)
            is_stored = instruction.dtype is DType.BFLOAT16 and number in program.outputs
            values.append(rounded(made) if is_stored else made)
    return tuple([_filled(values[v], program.kind_of(v), space) for v in program.outputs])


def _execute(
    instruction: Instruction,
    operands: list[Array],
    space: Space,
    widths: dict[DType, np.dtype[Any]],
) -> Array:
    op, constants = instruction.op, instruction.constants
    dtype = widths.get(instruction.dtype) or _width(instruction.dtype)
    if op == "constant":
        return np.full((1, 1), constants[0], dtype)
    if op == "row_index":
        every, count = [int(number) for number in constants]
        rows = np.arange(space.rows, dtype=dtype)[:, None] // every
        return rows % count if count else rows
    if op == "check_index":
        extent = int(constants[0])
        check_indices(operands[0].reshape(-1), extent, "label")
        return operands[0]
    if op == "cast":
        return operands[0].astype(dtype)
    if op == "column_index":
        return np.arange(space.columns, dtype=dtype)[None, :]
    if op == "philox":
        return _random(operands, constants, space, instruction.dtype)
    if op not in _FUNCTIONS:
        raise InternalError(f"a fused program knows no instruction {op!r}")
    return np.asarray(_FUNCTIONS[op](*operands))


def _width(dtype: DType) -> np.dtype[Any]:
    """Return the type of arrays for a dtype of which no operand came: bfloat16 is in float32."""
    return np.dtype(np.float32) if dtype is DType.BFLOAT16 else numpy_dtype(dtype)


def _random(
    operands: list[Array], constants: tuple[int | float, ...], space: Space, dtype: DType
) -> Array:
    seed, step = [int(v.reshape(())) for v in operands[:2]]
    key, p = constants
    firsts = operands[2].reshape(-1) if len(operands) > 2 else np.zeros(1, np.int64)
    count = space.rows * space.columns // firsts.size
    share = (p,) if dtype is DType.BOOL else ()
    draw: Callable[..., Array] = dropout_mask if share else random_bits
    made = [draw(seed, step, int(key), *share, count, int(first)) for first in firsts]
    return np.concatenate(made).reshape(space.rows, space.columns)


def _spread(operand: ProgramInput, array: Array, space: Space) -> Array:
    """Return an operand as [rows or 1, columns or 1], with its repeated rows picked."""
    count = operand.count or space.rows
    if operand.kind in (Kind.SCALAR, Kind.COLUMN):
        return array.reshape(1, -1)
    own = array.reshape(count, space.columns if operand.kind is Kind.FULL else 1)
    if count == space.rows:
        return own
    return own[np.arange(space.rows) // operand.every % count]


def _filled(value: Array, kind: Kind, space: Space) -> Array:
    rows = space.rows if kind in (Kind.FULL, Kind.ROW) else 1
    columns = space.columns if kind in (Kind.FULL, Kind.COLUMN) else 1
    return np.broadcast_to(value, (rows, columns)).copy()
