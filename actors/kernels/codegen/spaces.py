"""Where a program's operands lie in its space: their rows, and the step from one to the next."""

from __future__ import annotations

import math
from dataclasses import dataclass

from actors.kernels.codegen.chunks import Chunks, cut
from actors.kernels.codegen.phases import Schedule, last_reads, store_phases
from actors.kernels.kernel import Operands
from compiler.fusion.program import ROW_REDUCTIONS, FusedProgram, Kind

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Extents and strides in elements of an operand."""


@dataclass(frozen=True, slots=True)
class LoopSpace:
    """The space a launch walks: that of the program, or the same elements as one row."""

    rows: int
    columns: int
    strides: tuple[int, ...]
    """Elements from row to row, of the inputs and then the outputs."""
    chunks: Chunks


def space_of(
    program: FusedProgram, plan: Schedule, rows: int, columns: int, layouts: tuple[Layout, ...]
) -> LoopSpace | None:
    """Return how operands (inputs, then outputs) lie; None where one's rows are not evenly spaced.

    Where nothing depends on rows and columns, and all is dense, the space is walked as one row.
    """
    kinds = [program.kind_of(v) for v in (*range(len(program.inputs)), *program.outputs)]
    found = row_strides(program, columns, layouts)
    if found is None:
        return None
    if (
        rows != 1
        and _is_flat(program, rows)
        and all([s == columns for s, kind in zip(found, kinds, strict=True) if kind is Kind.FULL])
    ):
        rows, columns = 1, rows * columns
        found = [columns if kind is Kind.FULL else 0 for kind in kinds]
    chunks = cut(program, rows, columns, bool(plan.column_sums))
    return LoopSpace(rows, columns, tuple(found), chunks)


def row_strides(
    program: FusedProgram, columns: int, layouts: tuple[Layout, ...]
) -> list[int] | None:
    """Return the step from row to row of every operand; None where one's rows are uneven."""
    kinds = [program.kind_of(v) for v in (*range(len(program.inputs)), *program.outputs)]
    strides = [
        _row_stride(kind, columns, *layout) for kind, layout in zip(kinds, layouts, strict=True)
    ]
    found = [stride for stride in strides if stride is not None]
    return found if len(found) == len(strides) else None


def _is_flat(program: FusedProgram, rows: int) -> bool:
    kinds = [program.kind_of(v) for v in range(program.num_values)]
    return (
        all([kind in (Kind.FULL, Kind.SCALAR) for kind in kinds])
        and all([i.op not in ROW_REDUCTIONS for i in program.instructions])
        and all([is_plain(program, v, rows) for v in range(len(program.inputs))])
    )


def is_plain(program: FusedProgram, value: int, rows: int) -> bool:
    """Return whether row r of an input is that of the space."""
    entry = program.inputs[value]
    return entry.every == 1 and entry.count in (0, rows)


def in_place_pairs(
    program: FusedProgram, plan: Schedule, rows: int, inputs: Operands, outputs: Operands
) -> tuple[tuple[int, int], ...]:
    """Return pairs (output, input) where the input is read no later than the output is stored."""
    reads, stores = last_reads(plan, program), store_phases(plan)
    return tuple(
        [
            (out, index)
            for out, y in enumerate(outputs)
            for index, x in enumerate(inputs)
            if out in stores
            and index in reads
            and reads[index] <= stores[out]
            and is_plain(program, index, rows)
            and (x.type.dtype, x.type.num_elements) == (y.type.dtype, y.type.num_elements)
            and x.is_dense
            and y.is_dense
        ]
    )


def _row_stride(
    kind: Kind, columns: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> int | None:
    if 0 in shape:
        return columns
    axes = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    width = {Kind.FULL: columns, Kind.COLUMN: columns}.get(kind, 1)
    inner = 1
    while axes and inner < width:
        extent, step = axes.pop()
        if step != inner:
            return None
        inner *= extent
    if inner != width:
        return _dense_stride(kind, width, shape, strides)
    if not axes:
        return width if kind is Kind.FULL else 1
    stride = axes[-1][1]
    for (extent, step), (_, outer) in zip(
        reversed(axes), [*reversed(axes[:-1]), (1, None)], strict=True
    ):
        if outer is not None and outer != extent * step:
            return None
    return stride


def _dense_stride(
    kind: Kind, width: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> int | None:
    """Return the stride where the columns end inside an axis: all must be dense."""
    inner = 1
    for extent, step in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and step != inner:
            return None
        inner *= extent
    return width if kind is Kind.FULL and math.prod(shape) % width == 0 else None
