"""How a space is cut into pieces for threads: from its extents and its program alone.

The pieces decide the order in which sums are added up, so they must not depend on the number of
threads. There are more pieces than threads, because a thread of a shared machine may come late, and
none is shorter than what a call of the pool costs many times over.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.kernels.codegen.phases import weight
from compiler.fusion.program import FusedProgram, Kind

PIECE_NS = 20_000
MAX_PIECES = 32
MAX_SUM_PIECES = 16
"""With column sums every piece has a partial row of its own."""

MAX_WIDE_ROWS = 8
MIN_WIDE_COLUMNS = 8_192
"""Spaces of few and long rows are cut along the columns."""

_NS_PER_BYTE = 0.03
_NS_PER_WEIGHT = 0.04
_COLUMN_STEP = 64
"""Pieces of a row begin at multiples of this: no cache line of an output has two writers."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """The pieces of a space; `num_columns` is 0 where rows are cut, and then `columns` is all."""

    rows: int
    num_rows: int
    columns: int
    num_columns: int

    @property
    def num_partials(self) -> int:
        """Partial rows of a column sum; at least one."""
        return 1 if self.num_columns else max(1, self.num_rows)


def duration_ns(program: FusedProgram, rows: int, columns: int) -> float:
    """Return about how long one thread takes."""
    values = (*range(len(program.inputs)), *program.outputs)
    size = sum([program.dtype_of(v).itemsize for v in values if program.kind_of(v) is Kind.FULL])
    return rows * columns * (size * _NS_PER_BYTE + weight(program) * _NS_PER_WEIGHT)


def cut(program: FusedProgram, rows: int, columns: int, has_column_sums: bool) -> Chunks:
    """Return the pieces of a space."""
    total_ns = duration_ns(program, rows, columns)
    if rows <= MAX_WIDE_ROWS and columns >= MIN_WIDE_COLUMNS and total_ns >= 2 * PIECE_NS:
        pieces = _count(total_ns / rows, MAX_PIECES)
        step = -(-columns // (pieces * _COLUMN_STEP)) * _COLUMN_STEP
        return Chunks(max(rows, 1), 1, step, -(-columns // step))
    pieces = _count(total_ns, MAX_SUM_PIECES if has_column_sums else MAX_PIECES)
    step = max(1, -(-rows // pieces))
    return Chunks(step, -(-rows // step), columns, 0)


def _count(total_ns: float, most: int) -> int:
    return max(1, min(most, int(total_ns / PIECE_NS)))
