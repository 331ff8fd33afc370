"""A fused program on a GPU: which walk, which grid, which scratch, and the calls of it.

All of that follows from the program, its extents and the description of the GPU. `program_calls`
serves every kernel that runs a program, on all rows of its operands or on some.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from actors.kernels.common.gemm import MatrixView
from actors.kernels.common.kernel import Piece, is_dense
from actors.kernels.cuda.calls import DeviceCalls, KernelText, RunKernel, StatusWord, Word
from actors.kernels.cuda.emit import (
    FINISH_THREADS,
    PIECE_THREADS,
    SumPlace,
    emit,
    finish_adders,
    has_dear_scalars,
)
from actors.kernels.cuda.kernel import DeviceView, DeviceViews, Gpu, carve
from actors.kernels.cuda.loops import (
    MAX_THREADS,
    NARROW,
    RUNS,
    STRETCH,
    WIDE,
    WIDEST,
    access_bytes,
    batch_of,
    is_paired,
    is_random,
    sum_dtype,
    summing_threads,
)
from actors.kernels.cuda.strips import STRIP_THREADS, rows_at_once
from actors.kernels.program import values as words
from actors.kernels.program.phases import Schedule, schedule, weight
from actors.kernels.program.spaces import ScheduledProgram, joined_rows, row_strides
from actors.machine.protocol import Array
from compiler.contract.errors import InternalError, bad_index
from compiler.contract.program import FusedProgram, Instruction, Kind, ProgramInput, check_program
from compiler.contract.region import TiledLoop
from compiler.contract.spaces import row_stride
from compiler.contract.types import DType

# A walk follows from the extents of a space and the GPU alone. Three ways: a team of threads per
# row, as long as the row needs; all threads together, where the elements are one row; a block per
# piece of the columns, where rows are few and long and are reduced. Sums over rows without
# reductions of rows go by teams for pieces of the columns too.

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
_STRIPS_PER_SM = 2
"""Blocks of strips for each multiprocessor: as many as its registers allow, 128 for a thread."""

_SUM_BYTES, _MIN_BLOCKS = 64 << 20, 16
"""Partial rows of all blocks have at most so many bytes together, but for some blocks at least."""

_NEAR_RATE = 2.5
"""How many times as fast as the cache of all multiprocessors their own ones are: LayerNorm of
65,536 x 768 on an H100."""

DEAR_WAITS = 3
"""About how many waits for memory powers in double take of the one thread that computes them."""

_BLOCK_OVERHEAD = 1024
"""Bytes of shared memory that CUDA takes for each block."""


@dataclass(frozen=True, slots=True)
class GridMapping:
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
    sums: SumPlace
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
        """Teams of a piece."""
        return self.num_blocks * self.num_threads // self.team // self.num_pieces

    @property
    def num_partials(self) -> int:
        """Partial rows of every sum over rows: each block leaves one, of its piece."""
        if self.sums is SumPlace.NONE:
            return 0
        return 1 if self.is_cut else self.num_blocks // self.num_pieces


@functools.lru_cache(maxsize=4096)
def scheduled_for_device(program: FusedProgram) -> ScheduledProgram:
    """Return a program with its schedule on a GPU, which keeps no row. Raises ProgramError."""
    check_program(program)  # text and scratch are made of it, and a launch may come from a file
    return ScheduledProgram(program, schedule(program, _NEVER))


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
) -> GridMapping | None:
    """Return the walk of a program [rows, columns] on operands (inputs, then outputs).

    `chunk`: rows from the first to the last, exclusive; all where it is None. None where the rows
    of an operand are not evenly spaced.
    """
    layouts = tuple([(view.shape, view.strides) for view in operands])
    if chunk is None:
        layout = joined_rows(program, rows, columns, layouts)
        if layout is None:
            return None
        rows, columns, strides = layout
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
) -> GridMapping:
    """Return the walk of rows from the first to the last of so many."""
    span, all_rows = some_of
    plan, rows = scheduled_for_device(program).schedule, span[1] - span[0]
    reduces, batch = any([phase.reductions for phase in plan.phases]), batch_of(program)
    has_sums = bool(plan.column_sums)
    has_runs = is_random(program) or all_rows == 1 or columns % batch == 0
    gpu_threads = gpu.num_sms * gpu.threads_per_sm

    def walk(
        team: int,
        threads: int,
        blocks: int,
        pieces: tuple[int, int] = (columns, 1),
        sums: SumPlace = SumPlace.NONE,
        *,
        cut: bool = False,
    ) -> GridMapping:
        marks = (cut, span == (0, all_rows), has_runs)
        return GridMapping(*span, columns, strides, team, threads, blocks, *pieces, sums, *marks)

    # A stretch of rows, so that sums over rows stay in single precision throughout.
    if (reduces or has_sums) and 0 < rows <= STRETCH and columns >= _MIN_CUT_COLUMNS:
        pieces = min(2 * gpu.num_sms, -(-columns // (PIECE_THREADS * batch)))
        piece = -(-columns // (_PIECE_STEP * pieces)) * _PIECE_STEP
        pieces, sums = -(-columns // piece), SumPlace.SCRATCH if has_sums else SumPlace.NONE
        return walk(PIECE_THREADS, PIECE_THREADS, pieces, (piece, pieces), sums, cut=True)
    # Nothing is exchanged: all threads of the grid are one team.
    if rows == 1 and not (reduces or has_sums):
        blocks = -(-columns // (_THREADS * batch))
        blocks = max(1, min(blocks, gpu_threads // _THREADS))
        return walk(blocks * _THREADS, _THREADS, blocks)
    if has_sums and not reduces:
        team = min(_WARP, _power_of_2(-(-columns // batch)))
        pieces = max(1, -(-columns // (team * batch)))
        most = max(1, _STRIPS_PER_SM * gpu.num_sms // pieces)
        teams = STRIP_THREADS // team
        # Each team has some rows at a time, so that fewer have work than there are rows.
        blocks = min(most, -(-rows // (teams * rows_at_once(program, batch))))
        blocks = max(1, blocks) * pieces
        return walk(team, STRIP_THREADS, blocks, (team * batch, pieces), SumPlace.REGISTERS)
    if has_sums:
        return walk(*_summing(gpu, program, rows, columns))
    at_once = 2 * batch if reduces and is_paired(program) else batch
    team = _team(plan, rows, columns, at_once, gpu_threads, has_runs=has_runs)
    # A team that meets at barriers of the block must be the whole block.
    threads = team if (reduces and team > _WARP) or team > _THREADS else _THREADS
    if not reduces:
        threads = min(threads, _THREADS)
    # A block has no more teams than there are rows.
    threads = min(threads, max(_WARP, team, _power_of_2(rows * team)))
    blocks = min(-(-rows * team // threads), max(1, gpu_threads // threads))
    return walk(team, threads, blocks)


def _summing(
    gpu: Gpu, program: FusedProgram, rows: int, columns: int
) -> tuple[int, int, int, tuple[int, int], SumPlace]:
    """Return the walk of a program that reduces rows and adds up columns.

    That is the threads of a team and of a block, blocks, pieces, and the place of sums.
    """
    plan, sum_bytes = scheduled_for_device(program).schedule, columns * _sum_bytes(program)
    # A team has as many threads as so many of a multiprocessor need, that shared memory holds the
    # sums of all: fewer would leave memory idle, and larger teams wait longer at the end of a row.
    memory = gpu.shared_bytes // MAX_THREADS
    team = min(_WARP, _power_of_2(-(-columns // batch_of(program))))
    least = max(sum_bytes // memory, columns * _WARP // _LONG_ROW)
    if least > _WARP:
        # It meets at barriers of the block, so it is the block; smaller ones leave more sums.
        team = min(MAX_THREADS, max(_THREADS // 2, _power_of_2(least)))
    threads = team if team > _WARP else max(_WARP, min(_THREADS, _power_of_2(rows * team)))
    size = threads // team * sum_bytes
    sums = SumPlace.SHARED if size + _BLOCK_OVERHEAD <= gpu.shared_bytes else SumPlace.SCRATCH
    fit = MAX_THREADS // threads
    if sums is SumPlace.SHARED:
        fit = min(summing_threads(program) // threads, gpu.shared_bytes // (size + _BLOCK_OVERHEAD))
        # What is not shared memory is cache: more blocks than usual only if it holds their rows.
        row_bytes = threads // team * columns * _bytes_again(program, plan)
        near = gpu.shared_bytes // (size + _BLOCK_OVERHEAD + row_bytes)
        fit = min(fit, max(near, MAX_THREADS // threads))
    bytes_each = columns * 8 * len(plan.column_sums)
    bytes_each += size if sums is SumPlace.SCRATCH else 0
    most = max(_MIN_BLOCKS, min(max(1, fit) * gpu.num_sms, _SUM_BYTES // max(1, bytes_each)))
    blocks = min(-(-rows * team // threads), most)
    return team, threads, max(1, blocks), (columns, 1), sums


def _sum_bytes(program: FusedProgram) -> int:
    """Return the bytes of a team's sums over rows for each column."""
    sums = scheduled_for_device(program).schedule.column_sums
    return sum([sum_dtype(program.dtype_of(v)).itemsize for v in sums])


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
    if columns >= _LONG_ROW:
        least = MAX_THREADS if reduces and columns >= _LONGEST_ROW else _THREADS
    most = MAX_THREADS if reduces else fitting
    team = min(useful, least)
    while team < min(useful, most) and rows * team < fitting:
        team *= 2
    return team


def _power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


@functools.lru_cache(maxsize=4096)
def text_of(program: FusedProgram, sums: SumPlace, *, is_cut: bool) -> KernelText:
    """Return the kernels of a program. Raises ProgramError where it makes no sense."""
    return emit(program, scheduled_for_device(program).schedule, sums, is_cut=is_cut)


def program_pieces(program: FusedProgram, walk: GridMapping) -> tuple[Piece, ...]:
    """Return the scratch: partial reductions, partial sums over rows, and stretches of these."""
    plan = scheduled_for_device(program).schedule
    num_reductions = sum([len(phase.reductions) for phase in plan.phases])
    partials = walk.num_pieces * walk.num_rows * num_reductions if walk.is_cut else 0
    teams = 1 if walk.is_cut else walk.num_blocks * walk.teams_in_block
    is_there = walk.sums is SumPlace.SCRATCH
    stretches = teams * walk.columns * _sum_bytes(program) if is_there else 0
    return (
        Piece((partials,), np.dtype(np.float64)),
        *[
            Piece((walk.num_partials, walk.columns), np.dtype(np.float64))  # or int64
            for _ in plan.column_sums
        ],
        Piece((stretches,), np.dtype(np.uint8)),
    )


def way_of(
    program: FusedProgram,
    walk: GridMapping,
    addresses: tuple[int, ...],
    scratch: tuple[int, ...] = (),
) -> int:
    """Return which way a launch goes, on operands (inputs, then outputs) at these addresses.

    Whatever they are, a launch of one walk has the same bits: see `loops`.
    """
    reduces = any([phase.reductions for phase in scheduled_for_device(program).schedule.phases])
    if walk.has_runs or not reduces:
        is_even = not any([address % WIDEST for address in scratch])
        if is_even and _lies_evenly(program, walk, addresses):
            return WIDE
    return RUNS if walk.has_runs and (reduces or is_random(program)) else NARROW


def _lies_evenly(program: FusedProgram, walk: GridMapping, addresses: tuple[int, ...]) -> bool:
    """Whether every batch that a thread has of every operand begins where it can be moved at once.

    Rows of sums are in scratch, one after the other.
    """
    plan, batch = scheduled_for_device(program).schedule, batch_of(program)
    inputs = {v for phase in plan.phases for v in phase.loads}
    outputs = {position for phase in plan.phases for position in phase.stores}
    places = [*inputs, *[len(program.inputs) + position for position in outputs]]
    values = (*range(len(program.inputs)), *program.outputs)
    for place in places:
        itemsize = program.dtype_of(values[place]).itemsize
        needed = access_bytes(itemsize, batch)
        is_full = program.kind_of(values[place]) is Kind.FULL and walk.last_row > 1
        step = walk.strides[place] * itemsize if is_full else 0
        if needed > itemsize and (addresses[place] % needed or step % needed):
            return False
    single = DType.FLOAT32.itemsize
    return not plan.column_sums or walk.columns * single % access_bytes(single, batch) == 0


def program_ns(gpu: Gpu, program: FusedProgram, walk: GridMapping, moved_bytes: int) -> float:
    """Return about how long a launch takes that moves so many bytes of operands.

    What a phase reads again comes from a cache, that of the multiprocessor where it holds the rows
    of all its teams; sums over rows go there and back once.
    """
    plan, elements = scheduled_for_device(program).schedule, float(walk.num_rows * walk.columns)
    sums = 2 * 8 * walk.num_partials * walk.columns * len(plan.column_sums)
    longer = _narrowness(gpu, program, walk)
    row_bytes = walk.columns * _bytes_again(program, plan)
    threads = min(gpu.threads_per_sm, -(-walk.num_blocks // gpu.num_sms) * walk.num_threads)
    is_near = row_bytes * threads <= gpu.shared_bytes * walk.team
    cache_rate = gpu.l2_bytes_per_ns * (_NEAR_RATE if is_near else 1.0)
    again_ns = walk.num_rows * row_bytes / cache_rate * longer
    bytes_ns = gpu.bytes_ns(moved_bytes + sums) * longer
    # What is longer hides the other but for a part of it: GELU and its slope on an H100.
    flops_ns = elements * weight(program) / gpu.flops_per_ns
    work_ns = math.cbrt(bytes_ns**3 + flops_ns**3)
    num_kernels = len(text_of(program, walk.sums, is_cut=walk.is_cut).kernels)
    # Each phase waits for memory, and for the other threads where it reduces; so do last sums.
    num_waits = len(plan.phases) + sum([bool(phase.reductions) for phase in plan.phases])
    num_waits += DEAR_WAITS * has_dear_scalars(program, plan)
    # Where rows are reduced, too, a block clears its sums and adds them up, between barriers.
    num_waits += 2 * bool(plan.column_sums) * (2 if walk.sums is SumPlace.SHARED else 1)
    return num_kernels * gpu.call_ns + num_waits * gpu.latency_ns + again_ns + work_ns


def _narrowness(gpu: Gpu, program: FusedProgram, walk: GridMapping) -> float:
    """Return how much longer than by a copy operands take, if they begin evenly."""
    values = (*range(len(program.inputs)), *program.outputs)
    is_wide = way_of(program, walk, (0,) * len(values)) == WIDE
    full = [v for v in values if program.kind_of(v) is Kind.FULL]
    sizes = [program.dtype_of(v).itemsize for v in full]
    batch = batch_of(program) if is_wide else 1
    times = [size * gpu.narrowness(access_bytes(size, batch)) for size in sizes]
    return sum(times) / sum(sizes) if sizes else 1.0


def _bytes_again(program: FusedProgram, plan: Schedule) -> int:
    """Return the bytes per element that phases read of what was read or stored before."""
    loads = [v for phase in plan.phases for v in phase.loads if program.kind_of(v) is Kind.FULL]
    repeats = [v for number, v in enumerate(loads) if v in loads[:number]]
    repeats += [v for phase in plan.phases for v, _ in phase.read_back]
    return sum([program.dtype_of(v).itemsize for v in repeats])


def program_calls(
    program: FusedProgram,
    walk: GridMapping,
    rows: int,
    views: DeviceViews,
    workspace: DeviceView | None,
    skip: DeviceView | None = None,
) -> DeviceCalls:
    """Return the calls of a program [rows, columns] on views (inputs, then outputs) as walked.

    A view of which only a chunk of rows is there has the address and the shape that it would have
    if all rows were. On a chunk no COLUMN or SCALAR output is made: raises InternalError for one.
    """
    text = text_of(program, walk.sums, is_cut=walk.is_cut)
    block = _block(program, walk, rows, views)
    pieces = carve(workspace, program_pieces(program, walk))
    _fill_scratch(block, program, walk, pieces)
    block[-1] = way_of(program, walk, tuple([view.address for view in views]), pieces)
    block[words.SKIP] = 0 if skip is None else skip.address
    kinds = {program.kind_of(v) for v in program.outputs}
    if not walk.is_whole and kinds & {Kind.COLUMN, Kind.SCALAR}:
        raise InternalError("a program on some rows makes an output that depends on all rows")
    status = _status(program)
    calls = []
    for name in text.kernels:
        blocks, threads = _grid(program, walk, name)
        if blocks:
            # Only the kernel that reads labels first reports, once per bad one.
            kernel_status = status if name.endswith(("_rows", "_columns0")) else None
            is_summing = walk.sums is SumPlace.SHARED and name.endswith("_rows")
            shared = walk.teams_in_block * walk.columns * _sum_bytes(program) if is_summing else 0
            calls.append(
                RunKernel(text, name, blocks, threads, tuple(block), shared, kernel_status)
            )
    return tuple(calls)


def _grid(program: FusedProgram, walk: GridMapping, name: str) -> tuple[int, int]:
    if name.endswith("_finish"):
        kinds = [program.kind_of(v) for v in program.outputs]
        if Kind.COLUMN not in kinds:
            return 1, 32
        has_sums = bool(scheduled_for_device(program).schedule.column_sums)
        adders = finish_adders(walk.num_partials) if has_sums else 1
        blocks = -(-walk.columns // (FINISH_THREADS // adders))
        return max(blocks, 1), FINISH_THREADS
    if name.endswith("_last"):
        return 1, PIECE_THREADS
    return walk.num_blocks, walk.num_threads


def _block(program: FusedProgram, walk: GridMapping, rows: int, views: DeviceViews) -> list[Word]:
    plan = scheduled_for_device(program).schedule
    block: list[Word] = [0] * (words.way(program, len(plan.column_sums)) + 1)
    block[words.FIRST_ROW], block[words.ROWS] = walk.first_row, walk.last_row
    block[words.COLUMNS], block[words.TEAM_THREADS] = walk.columns, walk.team
    block[words.NUM_TEAMS] = walk.num_partials or walk.num_teams
    block[words.CHUNK_COLUMNS] = walk.piece_columns
    block[words.NUM_COLUMN_CHUNKS] = walk.num_pieces
    operands = words.operand_words(program, [x.address for x in views], walk.strides, rows)
    block[words.operand(0) : words.operand(len(views))] = operands
    return block


def _fill_scratch(
    block: list[Word], program: FusedProgram, walk: GridMapping, addresses: tuple[int, ...]
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
                # The cell holds a signed word.
                value %= 2**64
            return bad_index("label", value, (place,), extent)
    return InternalError(f"{value} at position {place} was reported, and is no bad label")


def moved_bytes(views: tuple[MatrixView, ...]) -> int:
    """Return the bytes of all operands."""
    return sum([math.prod(view.shape) * view.dtype.itemsize for view in views])


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """A program on some rows of its operands (inputs, then outputs), which are given with all."""

    gpu: Gpu
    program: FusedProgram
    extents: tuple[int, int]
    views: DeviceViews
    chunk: tuple[int, int]

    @property
    def walk(self) -> GridMapping:
        """How the rows are walked. Raises InternalError for operands of uneven rows."""
        rows, columns = self.extents
        matrices = matrix_views(self.views)
        chunk = None if self.chunk == (0, rows) else self.chunk
        mapping = None
        if matrices is not None:
            mapping = walk_of(self.gpu, self.program, rows, columns, matrices, chunk)
        if mapping is None:
            raise InternalError(f"a program of a region has operands of uneven rows: {self.views}")
        return mapping

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Scratch."""
        return program_pieces(self.program, self.walk)

    def duration_ns(self) -> float:
        """Return an estimate."""
        share = (self.chunk[1] - self.chunk[0]) / max(1, self.extents[0])
        moved = moved_bytes(matrix_views(self.views) or ())
        return program_ns(self.gpu, self.program, self.walk, int(moved * share))

    def calls(self, workspace: DeviceView | None) -> DeviceCalls:
        """Return the kernels."""
        return program_calls(self.program, self.walk, self.extents[0], self.views, workspace)


def column_sum_step(gpu: Gpu, x: DeviceView, out: DeviceView) -> ProgramStep:
    """Return the sum over the rows of a matrix."""
    rows, columns = x.shape
    return ProgramStep(gpu, _sum_of(x.dtype), (rows, columns), (x, out), (0, rows))


@functools.cache
def _sum_of(dtype: DType) -> FusedProgram:
    entry = ProgramInput(dtype, Kind.FULL)
    return FusedProgram((entry,), (Instruction("column_sum", (0,), dtype, Kind.COLUMN),), (1,))


def uneven_operands(region: TiledLoop, given: Mapping[int, Array]) -> tuple[int, ...]:
    """Return inputs and outputs whose rows a program cannot walk, or which no matrix shows."""
    uneven: dict[int, None] = {}
    for value, array in given.items():
        is_even = array.ndim == 2 or is_dense(array.shape, array.strides, array.itemsize)
        if value >= region.first_output and not is_even:
            uneven[value] = None
    for step in region.steps:
        if step.program is None:
            continue
        places = (*range(len(step.reads)), *step.program.outputs)
        for value, place in zip((*step.reads, *step.makes), places, strict=True):
            kind = step.program.kind_of(place)
            if value in given and not _is_even(given[value], kind, region.columns):
                uneven[value] = None
    return tuple(uneven)


def _is_even(array: Array, kind: Kind, columns: int) -> bool:
    strides = tuple([step // array.itemsize for step in array.strides])
    return row_stride(kind, columns, array.shape, strides) is not None
