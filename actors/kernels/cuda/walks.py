"""How the threads of a GPU go through the space of a program: from its extents and the GPU alone.

Three ways: a team of threads per row, as long as the row needs; all threads together, where the
elements are one row; a block per piece of the columns, where rows are few and long and are reduced.
Sums over rows without reductions of rows go by teams for pieces of the columns too.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from actors.kernels.codegen.phases import Schedule, schedule
from actors.kernels.codegen.programs import Made
from actors.kernels.codegen.spaces import joined_rows, row_strides
from actors.kernels.cuda.emit import PIECE_THREADS
from actors.kernels.cuda.gpu import Gpu
from actors.kernels.cuda.loops import MAX_THREADS, STRETCH, batch_of, is_random
from actors.kernels.cuda.views import DeviceViews
from actors.kernels.native.gemm import MatrixView
from compiler.fusion.check import check_program
from compiler.fusion.program import FusedProgram

_NEVER = 1 << 30
"""What a phase needs again is computed again: bytes are dearer here than instructions, and a row
would need a buffer for every team."""

_THREADS = 256
_WARP = 32
_LONG_ROW, _LONGEST_ROW = 4096, 16_384
"""From here on a row has a block, and then a large one: the next phase reads it again, so there
must not be more rows under way than caches hold (264 of 50,304 bfloat16 are half of an H200's)."""

_MIN_CUT_COLUMNS = 16_384
"""Few rows (a stretch of them) that are longer are cut into pieces of their columns."""

_PIECE_STEP = 64
_SUM_COLUMNS = 2048
"""Columns of a piece of a row of which there are only sums over rows."""

_SUM_BYTES = 16 << 20
_MIN_TEAMS = 16
"""Teams with sums over rows have at most so many bytes of them together, and are at least some."""


@dataclass(frozen=True, slots=True)
class TeamWalk:
    """How a launch goes through rows first_row .. last_row of its space.

    `team` threads have a row, or `piece_columns` of it where there are several pieces. `is_cut`:
    rows are few, and every block has a piece of all of them. `strides` are elements from row to
    row, of the inputs and then the outputs. `is_whole`: these are all rows. `has_runs`: a thread
    has neighbouring columns, wherever operands lie (`loops`).
    """

    first_row: int
    last_row: int
    columns: int
    strides: tuple[int, ...]
    team: int
    num_threads: int
    num_blocks: int
    piece_columns: int
    num_pieces: int
    is_cut: bool
    is_whole: bool
    has_runs: bool

    @property
    def num_rows(self) -> int:
        """Rows that are walked."""
        return self.last_row - self.first_row

    @property
    def teams_in_block(self) -> int:
        """Teams whose threads are of one block."""
        return max(1, self.num_threads // self.team)

    @property
    def num_teams(self) -> int:
        """Teams of a piece; each has a partial of every sum over rows."""
        if self.is_cut:
            return 1
        return self.num_blocks * self.num_threads // self.team // self.num_pieces


@functools.lru_cache(maxsize=4096)
def made_for_device(program: FusedProgram) -> Made:
    """Return a program with its schedule on a GPU, which keeps no row. Raises ProgramError."""
    check_program(program)  # text and scratch are made of it, and a launch may come from a file
    return Made(program, schedule(program, _NEVER))


def matrix_views(views: DeviceViews) -> tuple[MatrixView, ...] | None:
    """Return views with strides in elements; None where an element lies between two places."""
    if any([step % view.dtype.itemsize for view in views for step in view.strides_bytes]):
        return None
    return tuple(
        [
            MatrixView(
                x.dtype, x.shape, tuple([step // x.dtype.itemsize for step in x.strides_bytes])
            )
            for x in views
        ]
    )


def walk_of(
    gpu: Gpu,
    program: FusedProgram,
    rows: int,
    columns: int,
    operands: tuple[MatrixView, ...],
    chunk: tuple[int, int] | None = None,
) -> TeamWalk | None:
    """Return the walk of a program [rows, columns] on operands (inputs, then outputs).

    `chunk`: rows from the first to the last, exclusive; all where it is None. None where the rows
    of an operand are not evenly spaced.
    """
    layouts = tuple([(view.shape, view.strides) for view in operands])
    if chunk is None:
        found = joined_rows(program, rows, columns, layouts)
        if found is None:
            return None
        rows, columns, strides = found
        return _walk(gpu, program, ((0, rows), rows), columns, strides)
    steps = row_strides(program, columns, layouts)
    if steps is None:
        return None
    return _walk(gpu, program, (chunk, rows), columns, tuple(steps))


def _walk(
    gpu: Gpu,
    program: FusedProgram,
    some_of: tuple[tuple[int, int], int],
    columns: int,
    strides: tuple[int, ...],
) -> TeamWalk:
    """Return the walk of rows from the first to the last of so many."""
    span, all_rows = some_of
    plan, rows = made_for_device(program).schedule, span[1] - span[0]
    reduces = any([phase.reductions for phase in plan.phases])
    is_joined, batch = reduces or bool(plan.column_sums), batch_of(program)
    has_runs = is_random(program) or all_rows == 1 or columns % batch == 0
    fitting = gpu.num_sms * gpu.threads_per_sm

    def walk(
        team: int, threads: int, blocks: int, *, pieces: int = 1, cut: bool = False
    ) -> TeamWalk:
        step = _PIECE_STEP * max(1, pieces)
        own = -(-columns // step) * _PIECE_STEP if pieces > 1 else columns
        pieces = -(-columns // own) if pieces > 1 else pieces
        sizes = (team, threads, pieces if cut else blocks, own, pieces)
        marks = (cut, span == (0, all_rows), has_runs)
        return TeamWalk(*span, columns, strides, *sizes, *marks)

    if is_joined and 0 < rows <= STRETCH and columns >= _MIN_CUT_COLUMNS:
        pieces = min(2 * gpu.num_sms, -(-columns // (PIECE_THREADS * batch)))
        return walk(PIECE_THREADS, PIECE_THREADS, pieces, pieces=pieces, cut=True)
    if rows == 1 and not is_joined:
        blocks = -(-columns // (_THREADS * batch))
        blocks = max(1, min(blocks, fitting // _THREADS))
        return walk(blocks * _THREADS, _THREADS, blocks)
    pieces = -(-columns // _SUM_COLUMNS) if is_joined and not reduces else 1
    pieces = max(1, min(pieces, fitting // MAX_THREADS))
    own = -(-columns // pieces)
    team = _team(plan, rows * pieces, own, batch, fitting, has_runs=has_runs)
    threads = team if (reduces and team > _WARP) or team > _THREADS else _THREADS
    if not is_joined:
        threads = min(threads, _THREADS)
    teams = rows
    if plan.column_sums:
        size = len(plan.column_sums) * columns * 8
        teams = min(rows, max(_MIN_TEAMS, min(_SUM_BYTES // max(1, size), 8 * gpu.num_sms)))
    # A block has no more teams than there are rows: each has a place for its sums, used or not.
    threads = min(threads, max(_WARP, team, _power_of_2(teams * pieces * team)))
    blocks = min(-(-teams * pieces * team // threads), max(pieces, fitting // threads))
    return walk(team, threads, blocks, pieces=pieces)


def _team(
    plan: Schedule, rows: int, columns: int, batch: int, fitting: int, *, has_runs: bool
) -> int:
    """Return the threads of a row: a power of two.

    More than a row has work for wait; neighbours in a warp read neighbours; and while the GPU has
    threads left, a row gets more of them.
    """
    reduces = any([phase.reductions for phase in plan.phases])
    useful = _power_of_2(-(-columns // batch))
    if not has_runs:
        useful = max(useful, min(_WARP, _power_of_2(columns)))
    least = _WARP
    if plan.column_sums or columns >= _LONG_ROW:
        least = MAX_THREADS if reduces and columns >= _LONGEST_ROW else _THREADS
    most = MAX_THREADS if reduces or plan.column_sums else fitting
    team = min(useful, least)
    while team < min(useful, most) and rows * team < fitting:
        team *= 2
    return team


def _power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
