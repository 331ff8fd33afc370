"""A fused program on a GPU: which walk, which grid, which scratch, and the calls of it.

All of that follows from the program, its extents and the description of the GPU. `program_calls`
serves every kernel that runs a program, on all rows of its operands or on some.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from actors.kernels.codegen import arguments as words
from actors.kernels.codegen.phases import Schedule, weight
from actors.kernels.cuda.calls import DeviceCalls, KernelText, RunKernel, StatusWord, Word
from actors.kernels.cuda.emit import PIECE_THREADS, SHARED_SUMS, emit
from actors.kernels.cuda.finish import FINISH_COLUMNS, FINISH_THREADS
from actors.kernels.cuda.gpu import Gpu, narrowness
from actors.kernels.cuda.loops import NARROW, RUNS, WIDE, batch_of, is_random, is_single
from actors.kernels.cuda.runs import WIDEST, access_bytes
from actors.kernels.cuda.views import DeviceView, DeviceViews, carve
from actors.kernels.cuda.walks import TeamWalk, made_for_device
from actors.kernels.native.gemm import MatrixView
from actors.kernels.scratch import Piece
from compiler.errors import InternalError, bad_index
from compiler.fusion.program import FusedProgram, Kind
from compiler.types import DType


@functools.lru_cache(maxsize=4096)
def text_of(program: FusedProgram, *, is_cut: bool) -> KernelText:
    """Return the kernels of a program. Raises ProgramError where it makes no sense."""
    return emit(program, made_for_device(program).schedule, is_cut=is_cut)


def program_pieces(program: FusedProgram, walk: TeamWalk) -> tuple[Piece, ...]:
    """Return the scratch: partial reductions, sums over rows by team, and stretches of these."""
    plan = made_for_device(program).schedule
    num_reductions = sum([len(phase.reductions) for phase in plan.phases])
    partials = walk.num_pieces * walk.num_rows * num_reductions if walk.is_cut else 0
    single = [v for v in plan.column_sums if is_single(program.dtype_of(v))]
    is_shared = not walk.is_cut and _fits(walk, len(single))
    each = walk.columns if walk.is_cut else walk.piece_columns
    num_teams = walk.num_blocks * walk.teams_in_block
    stretches = 0 if is_shared else (1 if walk.is_cut else num_teams) * len(single) * each
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
    return walk.teams_in_block * num_sums * walk.piece_columns <= SHARED_SUMS


def way_of(
    program: FusedProgram, walk: TeamWalk, addresses: tuple[int, ...], scratch: tuple[int, ...] = ()
) -> int:
    """Return which way a launch goes, on operands (inputs, then outputs) at these addresses.

    Whatever they are, a launch of one walk has the same bits: see `loops`.
    """
    reduces = any([phase.reductions for phase in made_for_device(program).schedule.phases])
    if walk.has_runs or not reduces:
        is_even = not any([address % WIDEST for address in scratch])
        if is_even and _lies_evenly(program, walk, addresses):
            return WIDE
    return RUNS if walk.has_runs and (reduces or is_random(program)) else NARROW


def _lies_evenly(program: FusedProgram, walk: TeamWalk, addresses: tuple[int, ...]) -> bool:
    """Whether every batch that a thread has of every operand begins where it can be moved at once.

    Rows of sums are in scratch, one after the other.
    """
    plan, batch = made_for_device(program).schedule, batch_of(program)
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


def program_ns(gpu: Gpu, program: FusedProgram, walk: TeamWalk, moved_bytes: int) -> float:
    """Return about how long a launch takes that moves so many bytes of operands.

    What a phase reads again comes from a cache; sums over rows go there and back once.
    """
    plan, elements = made_for_device(program).schedule, float(walk.num_rows * walk.columns)
    sums = 2 * 8 * walk.num_teams * walk.columns * len(plan.column_sums)
    longer = _narrowness(program, walk)
    again_ns = elements * _bytes_again(program, plan) / gpu.l2_bytes_per_ns * longer
    bytes_ns = gpu.bytes_ns(moved_bytes + sums) * longer
    work_ns = max(bytes_ns, elements * weight(program) / gpu.flops_per_ns)
    num_kernels = len(text_of(program, is_cut=walk.is_cut).kernels)
    return num_kernels * gpu.call_ns + again_ns + work_ns


def _narrowness(program: FusedProgram, walk: TeamWalk) -> float:
    """Return how much longer operands take than at 16 bytes at once, if they begin evenly."""
    values = (*range(len(program.inputs)), *program.outputs)
    is_wide = way_of(program, walk, (0,) * len(values)) == WIDE
    full = [v for v in values if program.kind_of(v) is Kind.FULL]
    sizes = [program.dtype_of(v).itemsize for v in full]
    batch = batch_of(program) if is_wide else 1
    times = [size * narrowness(access_bytes(size, batch)) for size in sizes]
    return sum(times) / sum(sizes) if sizes else 1.0


def _bytes_again(program: FusedProgram, plan: Schedule) -> int:
    """Return the bytes per element that phases read of what was read or stored before."""
    read = [v for phase in plan.phases for v in phase.loads if program.kind_of(v) is Kind.FULL]
    again = [v for number, v in enumerate(read) if v in read[:number]]
    again += [v for phase in plan.phases for v, _ in phase.read_back]
    return sum([program.dtype_of(v).itemsize for v in again])


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
            own = status if name.endswith(("_rows", "_columns0")) else None
            calls.append(RunKernel(text, name, blocks, threads, tuple(block), status=own))
    return tuple(calls)


def _grid(program: FusedProgram, walk: TeamWalk, name: str) -> tuple[int, int]:
    if name.endswith("_finish"):
        kinds = [program.kind_of(v) for v in program.outputs]
        if Kind.COLUMN not in kinds:
            return 1, 32
        has_sums = bool(made_for_device(program).schedule.column_sums)
        blocks = -(-walk.columns // (FINISH_COLUMNS if has_sums else FINISH_THREADS))
        return max(blocks, 1), FINISH_THREADS
    if name.endswith("_last"):
        return 1, PIECE_THREADS
    return walk.num_blocks, walk.num_threads


def _block(program: FusedProgram, walk: TeamWalk, rows: int, views: DeviceViews) -> list[Word]:
    plan = made_for_device(program).schedule
    block: list[Word] = [0] * (words.way(program, len(plan.column_sums)) + 1)
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
            return bad_index("label", value, (place,), extent)
    return InternalError(f"{value} at position {place} was reported, and is no bad label")


def moved_bytes(views: tuple[MatrixView, ...]) -> int:
    """Return the bytes of all operands."""
    return sum([math.prod(view.shape) * view.dtype.itemsize for view in views])
