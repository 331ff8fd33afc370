"""The argument block of a generated function: which word says what.

A header, then four words per operand of the launch (inputs, then outputs), two per row buffer and
two per column sum. Sizes, strides and addresses are here and not in the text, so that one function
serves every shape.
"""

from __future__ import annotations

from compiler.fusion.program import FusedProgram

ROWS = 0
COLUMNS = 1
CHUNK_ROWS = 2
NUM_CHUNKS = 3
"""Pieces of the rows; a chunk of a column sum has a partial of its own."""
MAX_WORKERS = 4
CHUNK_COLUMNS = 5
NUM_COLUMN_CHUNKS = 6
"""Pieces of the columns; 0 where rows are cut."""
STATUS = 7
"""0, or 1 + the row of an index that `check_index` refused; written by the function."""
PARTIALS = 8
"""Address of the partial reductions of pieces of a row: 8 bytes per piece and reduction."""

SKIP = 9
"""Address of an int64, or 0: where it is not 0, the launch does nothing."""

FIRST_ROW, NUM_TEAMS, TEAM_THREADS = CHUNK_ROWS, NUM_CHUNKS, MAX_WORKERS
"""Of a CUDA device: teams take rows from the first on; each has a partial of every column sum."""

_HEADER = 10

POINTER, STRIDE, EVERY, COUNT = 0, 1, 2, 3
"""Words of an operand. The stride is from row to row, in elements."""

_OPERAND = 4
_PAIR = 2


def operand(position: int, word: int = POINTER) -> int:
    """Return the place of a word of an operand; outputs come behind the inputs."""
    return _HEADER + _OPERAND * position + word


def buffer(program: FusedProgram, index: int) -> int:
    """Return the place of a row buffer's address; its elements per thread follow."""
    return operand(len(program.inputs) + len(program.outputs)) + _PAIR * index


def column_sum(program: FusedProgram, num_buffers: int, index: int) -> int:
    """Return the place of a column sum's first partial; the elements per partial follow."""
    return buffer(program, num_buffers + index)


def stretches(program: FusedProgram, num_sums: int) -> int:
    """Return the place of the address of what teams add up in single precision, or 0."""
    return column_sum(program, 0, num_sums)


def way(program: FusedProgram, num_sums: int) -> int:
    """Return the place of the word that says which columns a thread has; the last of CUDA."""
    return stretches(program, num_sums) + 1
