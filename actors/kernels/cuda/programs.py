"""A fused program on a GPU: which walk, which grid, which scratch, and the calls of it.

All of that follows from the program, its extents and the description of the GPU. `program_calls`
serves every kernel that runs a program, on all rows of its operands or on some.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np

from actors.kernels.codegen import arguments as words
from actors.kernels.codegen.phases import Schedule, schedule, weight
from actors.kernels.codegen.programs import Made
from actors.kernels.codegen.spaces import joined_rows, row_strides
from actors.kernels.cuda.calls import DeviceCalls, KernelText, RunKernel, StatusWord, Word
from actors.kernels.cuda.emit import PIECE_THREADS, SHARED_SUMS, emit, refused
from actors.kernels.cuda.finish import FINISH_COLUMNS, FINISH_THREADS
from actors.kernels.cuda.gpu import Gpu
from actors.kernels.cuda.loops import MAX_THREADS, STRETCH, batch_of, is_random, is_single
from actors.kernels.cuda.views import DeviceView, DeviceViews, carve
from actors.kernels.indices import out_of_range
from actors.kernels.native.gemm import MatrixView
from actors.kernels.scratch import Piece
from compiler.errors import InternalError
from compiler.fusion.check import check_program
from compiler.fusion.program import FusedProgram, Kind
from compiler.types import DType

_NEVER = 1 << 30
"""What a phase needs again is computed again: bytes are dearer here than instructions, and a row
would need a buffer for every team."""

_THREADS = 256
_WARP = 32
_LONG_ROW = 4096
"""From here on a row has a block: it is read again in the next phase, and few fit the cache."""

_MIN_CUT_COLUMNS = 16_384
"""Few rows (a stretch of them) that are longer are cut into pieces of their columns."""

_PIECE_STEP = 64
_SUM_BYTES = 16 << 20
_MIN_TEAMS = 16
"""Teams with sums over rows have at most so many bytes of them together, and are at least some."""


@dataclass(frozen=True, slots=True)
class TeamWalk:
    """How a launch goes through rows first_row .. last_row of its space.

    `team` threads have a row; of a cut one `num_pieces` blocks have `piece_columns` each.
    `strides` are elements from row to row, of the inputs and then the outputs. `is_whole`: these
    are all rows.
    """

    first_row: int
    last_row: int
    columns: int
    strides: tuple[int, ...]
    team: int
    num_threads: int
    num_blocks: int
    is_whole: bool
    piece_columns: int = 0
    num_pieces: int = 0

    @property
    def num_rows(self) -> int:
        """Rows that are walked."""
        return self.last_row - self.first_row

    @property
    def is_cut(self) -> bool:
        """Whether blocks have pieces of the columns."""
        return self.num_pieces > 0

    @property
    def num_teams(self) -> int:
        """Teams that each have a partial of every sum over rows."""
        return 1 if self.is_cut else self.num_blocks * self.num_threads // self.team


@functools.lru_cache(maxsize=4096)
def made_for_device(program: FusedProgram) -> Made:
    """Return a program with its schedule on a GPU, which keeps no row. Raises ProgramError."""
    check_program(program)  # text and scratch are made of it, and a launch may come from a file
    return Made(program, schedule(program, _NEVER))


@functools.lru_cache(maxsize=4096)
def text_of(program: FusedProgram, *, is_cut: bool) -> KernelText:
    """Return the kernels of a program. Raises ValueError where an instruction has no form."""
    return emit(program, made_for_device(program).schedule, is_cut=is_cut)


def is_taken(program: FusedProgram) -> bool:
    """Return whether there are kernels for every instruction of a program."""
    return not refused(program)


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
        return _walk(gpu, program, (0, rows), columns, strides, is_whole=True)
    steps = row_strides(program, columns, layouts)
    if steps is None:
        return None
    is_whole = chunk == (0, rows)
    return _walk(gpu, program, chunk, columns, tuple(steps), is_whole=is_whole)


def _walk(
    gpu: Gpu,
    program: FusedProgram,
    span: tuple[int, int],
    columns: int,
    strides: tuple[int, ...],
    *,
    is_whole: bool,
) -> TeamWalk:
    plan, rows = made_for_device(program).schedule, span[1] - span[0]
    reduces = any([phase.reductions for phase in plan.phases])
    is_joined = reduces or bool(plan.column_sums)
    batch = batch_of(program)
    if is_joined and 0 < rows <= STRETCH and columns >= _MIN_CUT_COLUMNS:
        pieces = min(2 * gpu.num_sms, -(-columns // (PIECE_THREADS * batch)))
        piece = -(-columns // (pieces * _PIECE_STEP)) * _PIECE_STEP
        pieces = -(-columns // piece)
        own = TeamWalk(*span, columns, strides, PIECE_THREADS, PIECE_THREADS, pieces, is_whole)
        return replace(own, piece_columns=piece, num_pieces=pieces)
    fitting = gpu.num_sms * gpu.threads_per_sm
    if rows == 1 and not is_joined:
        blocks = -(-columns // (_THREADS * batch))
        blocks = max(1, min(blocks, fitting // _THREADS))
        return TeamWalk(*span, columns, strides, blocks * _THREADS, _THREADS, blocks, is_whole)
    team = _team(plan, rows, columns, batch, fitting, random=is_random(program))
    threads = team if (reduces and team > _WARP) or team > _THREADS else _THREADS
    if not is_joined:
        threads = min(threads, _THREADS)
    blocks = min(-(-rows * team // threads), fitting // threads)
    if plan.column_sums:
        size = len(plan.column_sums) * columns * 8
        teams = max(_MIN_TEAMS, min(_SUM_BYTES // max(1, size), 8 * gpu.num_sms))
        blocks = min(blocks, max(1, teams * team // threads))
    return TeamWalk(*span, columns, strides, team, threads, blocks, is_whole)


def _team(
    plan: Schedule, rows: int, columns: int, batch: int, fitting: int, *, random: bool
) -> int:
    """Return the threads of a row: a power of two.

    More than a row has work for wait; neighbours in a warp read neighbours; and while the GPU has
    threads left, a row gets more of them.
    """
    reduces = any([phase.reductions for phase in plan.phases])
    useful = _power_of_2(-(-columns // batch))
    if not random:
        useful = max(useful, min(_WARP, _power_of_2(columns)))
    least = _WARP
    if plan.column_sums or columns >= _LONG_ROW:
        least = _THREADS
    most = MAX_THREADS if reduces or plan.column_sums else fitting
    team = min(useful, least)
    while team < min(useful, most) and rows * team < fitting:
        team *= 2
    return team


def _power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def program_pieces(program: FusedProgram, walk: TeamWalk) -> tuple[Piece, ...]:
    """Return the scratch: partial reductions, sums over rows by team, and stretches of these."""
    plan = made_for_device(program).schedule
    num_reductions = sum([len(phase.reductions) for phase in plan.phases])
    partials = walk.num_pieces * walk.num_rows * num_reductions
    single = [v for v in plan.column_sums if is_single(program.dtype_of(v))]
    is_shared = not walk.is_cut and _fits(walk, len(single))
    stretches = 0 if is_shared else walk.num_teams * len(single) * walk.columns
    return (
        Piece((partials,), np.dtype(np.float64)),
        *[
            Piece((walk.num_teams, walk.columns), np.dtype(np.float64))  # or int64
            for _ in plan.column_sums
        ],
        Piece((stretches,), np.dtype(np.float32)),
    )


def _fits(walk: TeamWalk, num_sums: int) -> bool:
    """Whether the sums of a block's teams fit into shared memory."""
    return walk.num_threads // walk.team * num_sums * walk.columns <= SHARED_SUMS


def program_ns(gpu: Gpu, program: FusedProgram, walk: TeamWalk, moved_bytes: int) -> float:
    """Return about how long a launch takes that moves so many bytes of operands."""
    text = text_of(program, is_cut=walk.is_cut)
    flops = float(walk.num_rows * walk.columns * weight(program))
    sums = (
        2 * 8 * walk.num_teams * walk.columns * len(made_for_device(program).schedule.column_sums)
    )
    work = max(gpu.bytes_ns(moved_bytes + sums), flops / gpu.flops_per_ns)
    return len(text.kernels) * gpu.call_ns + work


def program_calls(
    program: FusedProgram,
    walk: TeamWalk,
    rows: int,
    views: DeviceViews,
    workspace: DeviceView | None,
    skip: DeviceView | None = None,
) -> DeviceCalls:
    """Return the calls of a program [rows, columns] on views (inputs, then outputs) as walked.

    A view of which only a chunk of rows is there has the address and the shape that it would have
    if all rows were. On a chunk no COLUMN or SCALAR output is made: raises InternalError for one.
    """
    text, block = text_of(program, is_cut=walk.is_cut), _block(program, walk, rows, views)
    _fill_scratch(block, program, walk, carve(workspace, program_pieces(program, walk)))
    block[words.SKIP] = 0 if skip is None else skip.address
    kinds = {program.kind_of(v) for v in program.outputs}
    if not walk.is_whole and kinds & {Kind.COLUMN, Kind.SCALAR}:
        raise InternalError("a program on some rows makes an output that depends on all rows")
    status = _status(program)
    calls = []
    for name in text.kernels:
        blocks, threads = _grid(program, walk, name)
        if blocks:
            own = status if name.endswith(("_rows", "_columns0")) else None
            calls.append(RunKernel(text, name, blocks, threads, tuple(block), status=own))
    return tuple(calls)


def _grid(program: FusedProgram, walk: TeamWalk, name: str) -> tuple[int, int]:
    if name.endswith("_finish"):
        kinds = [program.kind_of(v) for v in program.outputs]
        if Kind.COLUMN not in kinds:
            return 1, _WARP
        has_sums = bool(made_for_device(program).schedule.column_sums)
        blocks = -(-walk.columns // (FINISH_COLUMNS if has_sums else FINISH_THREADS))
        return max(blocks, 1), FINISH_THREADS
    if name.endswith("_last"):
        return 1, PIECE_THREADS
    return walk.num_blocks, walk.num_threads


def _block(program: FusedProgram, walk: TeamWalk, rows: int, views: DeviceViews) -> list[Word]:
    plan = made_for_device(program).schedule
    block: list[Word] = [0] * (words.stretches(program, len(plan.column_sums)) + 1)
    block[words.FIRST_ROW], block[words.ROWS] = walk.first_row, walk.last_row
    block[words.COLUMNS], block[words.TEAM_THREADS] = walk.columns, walk.team
    block[words.NUM_TEAMS] = walk.num_teams
    block[words.CHUNK_COLUMNS] = walk.piece_columns
    block[words.NUM_COLUMN_CHUNKS] = walk.num_pieces
    for position, view in enumerate(views):
        block[words.operand(position)] = view.address
        block[words.operand(position, words.STRIDE)] = walk.strides[position]
        entry = program.inputs[position] if position < len(program.inputs) else None
        block[words.operand(position, words.EVERY)] = entry.every if entry else 1
        block[words.operand(position, words.COUNT)] = (entry.count if entry else 0) or rows
    return block


def _fill_scratch(
    block: list[Word], program: FusedProgram, walk: TeamWalk, addresses: tuple[int, ...]
) -> None:
    partials, *totals, stretches = addresses
    block[words.PARTIALS] = partials
    for index, address in enumerate(totals):
        place = words.column_sum(program, 0, index)
        block[place : place + 2] = [address, walk.columns]
    block[words.stretches(program, len(totals))] = stretches


@functools.lru_cache(maxsize=4096)
def _status(program: FusedProgram) -> StatusWord | None:
    """Return where a bad index is reported, and the error that the host raises for it."""
    checks = [i for i in program.instructions if i.op == "check_index"]
    if not checks:
        return None
    return StatusWord(words.STATUS, functools.partial(_explain, program))


def _explain(program: FusedProgram, place: int, value: int) -> Exception:
    for instruction in program.instructions:
        extent = int(instruction.constants[0]) if instruction.op == "check_index" else 0
        if instruction.op == "check_index" and not 0 <= value < extent:
            if program.dtype_of(instruction.operands[0]) is DType.UINT64:
                value %= 2**64
            return out_of_range("label", value, (place,), extent)
    return InternalError(f"{value} at position {place} was reported, and is no bad label")


def moved_bytes(views: tuple[MatrixView, ...]) -> int:
    """Return the bytes of all operands."""
    return sum([math.prod(view.shape) * view.dtype.itemsize for view in views])
