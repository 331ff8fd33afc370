"""Where a program's operands lie in its space: their rows, and the step from one to the next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from actors.kernels.codegen.chunks import Chunks, cut
from actors.kernels.codegen.phases import Schedule, last_reads, store_phases
from actors.kernels.native.gemm import MatrixView
from compiler.fusion.program import ROW_REDUCTIONS, FusedProgram, Kind
from compiler.fusion.spaces import row_stride

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
    found = joined_rows(program, rows, columns, layouts)
    if found is None:
        return None
    rows, columns, strides = found
    return LoopSpace(rows, columns, strides, cut(program, rows, columns, bool(plan.column_sums)))


def joined_rows(
    program: FusedProgram, rows: int, columns: int, layouts: tuple[Layout, ...]
) -> tuple[int, int, tuple[int, ...]] | None:
    """Return rows, columns and strides of a walk, of one row where that gives the same elements.

    None where the rows of an operand are not evenly spaced.
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
    return rows, columns, tuple(found)


def row_strides(
    program: FusedProgram, columns: int, layouts: tuple[Layout, ...]
) -> list[int] | None:
    """Return the step from row to row of every operand; None where one's rows are uneven."""
    kinds = [program.kind_of(v) for v in (*range(len(program.inputs)), *program.outputs)]
    strides = [
        row_stride(kind, columns, *layout) for kind, layout in zip(kinds, layouts, strict=True)
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
    program: FusedProgram, plan: Schedule, rows: int, operands: Sequence[MatrixView]
) -> tuple[tuple[int, int], ...]:
    """Return pairs (output, input) where the input is read no later than the output is stored."""
    reads, stores = last_reads(plan, program), store_phases(plan)
    inputs, outputs = operands[: len(program.inputs)], operands[len(program.inputs) :]
    return tuple(
        [
            (out, index)
            for out, y in enumerate(outputs)
            for index, x in enumerate(inputs)
            if out in stores
            and index in reads
            and reads[index] <= stores[out]
            and is_plain(program, index, rows)
            and (x.dtype, math.prod(x.shape)) == (y.dtype, math.prod(y.shape))
            and x.is_dense
            and y.is_dense
        ]
    )
