"""Fused programs as generated kernels: one program, or the updates of many variables at once.

"cuda.joined_updates" exists because updates are many, and small beside what a launch costs. A block
has some elements of one variable: it looks up in the arguments whose, and goes on as the update of
that variable alone would, with the same text for the elements, and so the same bits.
"""

from __future__ import annotations

import functools

from actors.kernels.common.kernel import (
    Attrs,
    KernelNeeds,
    KernelPlan,
    Operands,
    fused_program,
    integer,
    integers,
    size_bytes,
)
from actors.kernels.cuda.calls import KernelText, LaunchCalls, RunKernel
from actors.kernels.cuda.emit import DIALECT, has_dear_scalars
from actors.kernels.cuda.kernel import (
    CudaPlan,
    DeviceView,
    Gpu,
    PlacedViews,
    Scratch,
    on_device,
)
from actors.kernels.cuda.loops import NARROW, WIDE, WIDEST, PhaseWriter
from actors.kernels.cuda.programs import (
    DEAR_WAITS,
    matrix_views,
    moved_bytes,
    program_calls,
    program_ns,
    program_pieces,
    scheduled_for_device,
    walk_of,
)
from actors.kernels.program import values as words
from actors.kernels.program.spaces import in_place_pairs
from actors.kernels.program.stages import block, scalars_function, skip_line, structs
from compiler.contract.program import FusedProgram, check_program, is_by_elements


def plan_program(gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands) -> CudaPlan | None:
    """Plan `fused`: attrs program, rows, columns; operands in the order of the program.

    An update, whose outputs lie over inputs, may have one more input `skip` [] int64, and is left
    out where that is not 0.

    It takes every program, on evenly spaced rows of dense columns.
    """
    program = fused_program(attrs, "program")
    rows, columns, count = integer(attrs, "rows"), integer(attrs, "columns"), len(inputs)
    views = [DeviceView(0, x.type, x.strides_bytes) for x in (*inputs, *outputs)]
    matrices = matrix_views((*views[: len(program.inputs)], *views[count:]))
    walk = None if matrices is None else walk_of(gpu, program, rows, columns, matrices)
    if matrices is None or walk is None:
        return None

    def bind(inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> LaunchCalls:
        views = on_device((*inputs, *outputs))
        operands = (*views[: len(program.inputs)], *views[count:])
        skip = next(iter(views[len(program.inputs) : count]), None)
        return program_calls(program, walk, rows, operands, workspace, skip)

    schedule = scheduled_for_device(program).schedule
    needs = KernelNeeds(
        size_bytes(program_pieces(program, walk)),
        in_place_pairs(program, schedule, rows, matrices),
        program_ns(gpu, program, walk, moved_bytes(matrices)),
    )
    return KernelPlan(needs, bind)


# All of joined updates is in the argument block: addresses need no table in the memory of the
# device, which somebody would have to fill before the first step.

_WORDS = 512
"""What every driver takes by value: 4,096 bytes."""

_SKIP, _COUNT, _PIECE, _WAY, _NUMBERS = 0, 1, 2, 3, 4
"""Words: where it says whether to do nothing; how many members; elements of a block; how these are
moved (`loops`); numbers."""

_MOST_NUMBERS = 16
_MEMBERS = _NUMBERS + _MOST_NUMBERS
"""From here on each member has its first block, its elements and its addresses."""

_FIRST, _SIZE, _ADDRESSES = 0, 1, 2

_THREADS = 256
_LEAST_PIECE = 2048
"""Elements of a block are a multiple: of what its threads take at a time."""


def most_joined(num_full: int) -> int:
    """Return how many updates with so many operands of full size fit into an argument block."""
    return (_WORDS - _MEMBERS) // (_ADDRESSES + num_full)


def plan_joined(gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands) -> CudaPlan | None:
    """Plan updates of one program, each over variables of its own.

    See `compiler.ops.language.program_ops`.

    It takes dense tensors, as many as the arguments have room for.
    """
    program, count = fused_program(attrs, "program"), integer(attrs, "count")
    check_program(program)
    full, numbers = _operands(program)
    is_taken = is_by_elements(program) and len(numbers) <= _MOST_NUMBERS
    if not is_taken or count > most_joined(len(full)) or not all([x.is_dense for x in inputs]):
        return None
    moved_bytes = sum([x.type.size_bytes for x in (*inputs, *outputs)])
    pairs = tuple([(k, k) for k in range(len(outputs))])
    is_dear = has_dear_scalars(program, scheduled_for_device(program).schedule)
    waits_ns = (1 + DEAR_WAITS * is_dear) * gpu.latency_ns
    duration_ns = gpu.call_ns + waits_ns + gpu.bytes_ns(moved_bytes)
    needs = KernelNeeds(0, pairs, duration_ns)
    over = integers(attrs, "over")

    def bind(inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> LaunchCalls:
        views = on_device(inputs)
        others = [i for i in full if i not in over]
        num_written, num_shared = count * len(over), count * len(full)
        block = [0] * _WORDS
        block[_COUNT] = count
        for k, view in enumerate(views[num_shared : num_shared + len(numbers)]):
            block[_NUMBERS + k] = view.address
        # One view or none: the sum is its address, or 0.
        block[_SKIP] = sum([view.address for view in views[num_shared + len(numbers) :]])
        sizes = [views[member * len(over)].type.num_elements for member in range(count)]
        block[_PIECE] = piece = _piece(gpu, sum(sizes))
        num_blocks = 0
        for member, size in enumerate(sizes):
            place = _MEMBERS + member * (_ADDRESSES + len(full))
            view_of = dict(zip(over, views[member * len(over) :], strict=False))
            view_of |= dict(zip(others, views[num_written + member * len(others) :], strict=False))
            block[place + _FIRST], block[place + _SIZE] = num_blocks, size
            for k, i in enumerate(full):
                block[place + _ADDRESSES + k] = view_of[i].address
            num_blocks += -(-size // piece)
        if not num_blocks:
            return ()
        # All members or none: the way is one word for the whole launch.
        is_odd = any([view.address % WIDEST for view in views[:num_shared]])
        block[_WAY] = NARROW if is_odd else WIDE
        text = joined_text(program, over)
        return (RunKernel(text, text.kernels[0], num_blocks, _THREADS, tuple(block)),)

    return KernelPlan(needs, bind)


def _operands(program: FusedProgram) -> tuple[list[int], list[int]]:
    """Return the operands of full size, and those that are numbers."""
    every = range(len(program.inputs))
    return [i for i in every if program.is_full(i)], [i for i in every if not program.is_full(i)]


def _piece(gpu: Gpu, elements: int) -> int:
    """Return how many elements a block has: so that all threads of the GPU have some, twice over.

    Each block computes the numbers that all elements share; fewer blocks do so less often.
    """
    blocks = 2 * gpu.num_sms * gpu.threads_per_sm // _THREADS
    return _LEAST_PIECE * max(1, -(-elements // (blocks * _LEAST_PIECE)))


@functools.lru_cache(maxsize=256)
def joined_text(program: FusedProgram, over: tuple[int, ...]) -> KernelText:
    """Return the kernel of a program whose outputs lie over operands."""
    plan = scheduled_for_device(program).schedule
    writer = PhaseWriter(program, plan)
    lines = [
        f"typedef struct {{ af_word w[{_WORDS}]; }} NAME_arguments;",
        *structs(writer.values),
        "typedef struct { char none; } NAME_sums;",
        *scalars_function(writer.values, DIALECT),
        *[line for index in range(len(plan.phases)) for line in writer.lines(index)],
        *block(
            f"AF_KERNEL_UP_TO({_THREADS}) NAME(AF_ARGUMENTS(NAME) arguments)",
            _body(program, over, len(plan.phases)),
        ),
    ]
    about = f"many updates by a program of {len(program.instructions)} instructions"
    return KernelText.of("updates", "\n".join(lines) + "\n", ("NAME",), about)


def _body(program: FusedProgram, over: tuple[int, ...], num_phases: int) -> list[str]:
    full, numbers = _operands(program)
    size = _ADDRESSES + len(full)
    halving = [
        "const int32_t middle = (low + high) / 2;",
        f"const _Bool is_after = w[{_MEMBERS} + {size} * middle + {_FIRST}].i > AF_BLOCK;",
        "if (is_after) high = middle;",
        "else low = middle;",
    ]
    text = [
        "AF_SHARED(NAME_scalars, s, 1);",
        "const af_word *w = arguments.w;",
        skip_line("w", _SKIP),
        "/* The last member that begins at this block or before: one without elements has none. */",
        f"int32_t low = 0, high = (int32_t)w[{_COUNT}].i;",
        *block("while (high - low > 1)", halving),
        f"const af_word *own = w + {_MEMBERS} + {size} * low;",
        f"af_word a[{words.way(program, 0) + 1}];",
        f"a[{words.way(program, 0)}].i = w[{_WAY}].i;",
    ]
    place = {i: f"own[{_ADDRESSES + k}]" for k, i in enumerate(full)}
    place |= {i: f"w[{_NUMBERS + k}]" for k, i in enumerate(numbers)}
    for position, i in enumerate((*range(len(program.inputs)), *over)):
        text.append(f"a[{words.operand(position)}].p = {place[i]}.p;")
        text.append(f"a[{words.operand(position, words.STRIDE)}].i = 0;")
    return [
        *text,
        "if (AF_THREAD == 0) NAME_get_scalars(a, s);",
        "AF_BARRIER();",
        f"const int64_t j0 = (AF_BLOCK - own[{_FIRST}].i) * w[{_PIECE}].i;",
        f"const int64_t j1 = af_min(j0 + w[{_PIECE}].i, own[{_SIZE}].i);",
        "NAME_row row[1];",
        "NAME_sums sums;",
        *[
            f"NAME_phase{index}(a, s, row, 0, j0, j1, AF_THREAD, AF_NUM_THREADS, 0, &sums);"
            for index in range(num_phases)
        ],
    ]
