"""Kernels that move elements, in C: copy, reshape, pad and concat.

Each is a list of strided copies (`copy.c`); the views that numpy's kernels make say from where to
where. A fill is a copy of one element, repeated.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from actors.kernels.common import cost
from actors.kernels.common.host_memory import (
    COPIES,
    CopiesOf,
    Copy,
    address,
    can_copy,
    written_over,
)
from actors.kernels.common.kernel import (
    Attrs,
    BytePass,
    HostPlan,
    Kernel,
    KernelPlan,
    Operand,
    Operands,
    Workspace,
    native_work,
)
from actors.kernels.common.strides import MAX_OUTER, Axis, columns_of, walk_arrays
from actors.kernels.library import launch, runtime
from actors.kernels.library.launch import NativeLaunch, Word, argument_block, native_launch
from actors.machine.protocol import Array, Arrays, Launch

_MAX_RANK = MAX_OUTER + 2
_TILE = 64


def _plan_copies(
    op: str, copies: CopiesOf, attrs: Attrs, inputs: Operands, outputs: Operands
) -> HostPlan | None:
    """Plan an op that only moves elements, as copies in C.

    It takes operands of up to 8 axes.
    """
    if not (runtime.is_enabled() and all([_is_movable(x) for x in (*inputs, *outputs)])):
        return None
    if not can_copy(op, inputs, outputs):
        return None
    moved_bytes = float(sum([x.type.size_bytes for x in outputs]))
    work = native_work((BytePass.SIMPLE, moved_bytes))

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        return moving_launch(copies(inputs, outputs, attrs), (*inputs, *outputs))

    needs = cost.needs(inputs, outputs, work, in_place=written_over(op))
    return KernelPlan(needs, bind)


def _is_movable(operand: Operand) -> bool:
    return len(operand.shape) <= _MAX_RANK and operand.dtype.itemsize in (1, 2, 4, 8)


def moving_launch(phases: Sequence[Sequence[Copy]], operands: Arrays = ()) -> NativeLaunch:
    """Return the launch that makes all copies of a phase, in any order, then those of the next.

    One copy alone, of what begins where the `operands` do, can be moved with them.
    """
    header: list[Word] = []
    words_at: list[dict[int, int]] = []
    keep: list[object] = [phases]
    for copies in phases:
        parts = [_part(target, source) for target, source in copies if target.size]
        if parts:
            words = [word for part in parts for word in part.words]
            blocks = sum([part.num_blocks for part in parts])
            size = sum([2 * target.size * target.itemsize for target, _ in copies])
            block = argument_block(words)
            keep.append(block)
            base = ctypes.addressof(block)
            # Words 0 and 1 of a part are addresses of target and source, 8 bytes each.
            words_at += [{block[1]: base + 8, block[0]: base}] * len(parts)
            header += [len(parts), base, blocks, launch.units_per_chunk(blocks, size)]
    first = [runtime.num_threads(), len(header) // 4]
    move = native_launch(runtime.address_in("copy.c", "af_move"), [*first, *header], tuple(keep))
    places = [words_at[0].get(address(x), 0) for x in operands] if len(words_at) == 1 else []
    if places and all(places) and len(words_at[0]) == 2:  # not of a copy onto itself
        move.places = tuple(places)
    return move


@dataclass(frozen=True, slots=True)
class _MovedPart:
    """A strided copy as copy.c has it."""

    words: tuple[Word, ...]
    num_blocks: int


def _part(target: Array, source: Array) -> _MovedPart:
    item = target.itemsize
    one = Axis(1, (0, 0))
    axes = [one, one, *walk_arrays(target, source, in_order=False)]
    columns = axes.pop()
    is_transposed = columns.steps != (item, item)
    # The axis along which the source is dense; with the target's it makes square tiles.
    row = next((i for i, axis in enumerate(axes) if axis.steps[1] == item), len(axes) - 1)
    rows = axes.pop(row)
    outer = [axis for axis in axes if axis.extent > 1]
    if is_transposed and rows.steps[1] == item:
        block = (_TILE, _TILE)
    else:
        width = max(1, min(columns.extent, launch.RUN_BYTES // item))
        block = (max(1, launch.RUN_BYTES // (width * item)), width)
    across = [-(-axis.extent // size) for axis, size in zip((rows, columns), block, strict=True)]
    num_blocks = math.prod([axis.extent for axis in outer]) * math.prod(across)
    words = (
        address(target),
        address(source),
        *columns_of(outer, 2),
        *(rows.extent, *rows.steps),
        *(columns.extent, *columns.steps),
        *(*block, num_blocks, item),
    )
    return _MovedPart(words, num_blocks)


MOVEMENT_KERNELS = tuple(
    [Kernel(f"c.{op}", op, partial(_plan_copies, op, copies)) for op, copies in COPIES.items()]
)
