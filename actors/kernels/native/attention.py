"""Attention and its gradient in C: see attention.c for the algorithm.

Operands may lie in any way with contiguous rows, so heads cut out of a projection are read and
written where they are. Measured (Zen 4, 2 threads, 48 causal heads of 256 x 64, float32): 3.1 ms
forward and 6.3 backward, where numpy's kernels take 7.4 and 16; bfloat16 takes two thirds of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from actors.kernels.common import cost
from actors.kernels.common.attention_blocks import BlockExtents, extents_of, work_of
from actors.kernels.common.host_memory import address
from actors.kernels.common.kernel import (
    Attrs,
    HostPlan,
    Kernel,
    KernelPlan,
    Operand,
    Operands,
    Workspace,
    equal_operands,
    integer,
    number,
)
from actors.kernels.library import runtime
from actors.kernels.library.launch import Word, native_launch, single
from actors.machine.protocol import Array, Arrays, Launch
from compiler.contract.types import DType

LONGEST_ROW = 256
"""Longer rows would make scratch of megabytes."""

_FILE = "attention.c"
_KEYS, _STRIP = 256, 24
"""Keys of a block, queries of a strip: of 128 to 512 and 24 to 96, within 4 % of the fastest."""

_GAP = 16
"""As in attention.c."""

_VECTOR = 16

_BLOCK = 256
"""Queries of a forward chunk; down to a quarter where there would be fewer than MIN_CHUNKS."""

MIN_CHUNKS = 16

_CHUNK_FLOPS = 4e6
"""What makes a chunk, 20 us and more, before chunks are made equal."""


def _plan_attention(attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan `attention`: attrs scale, causal; with dropout p, key.

    It takes float32 and bfloat16 in contiguous rows of up to 256; scratch is per thread.
    """
    e = extents_of(attrs, inputs)
    if not takes(e, (*inputs[: 3 + e.is_masked], outputs[0]), outputs[1:]):
        return None

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        operands = (*inputs[:3], *outputs)
        return launch(e, attrs, operands, inputs[3:], workspace, is_forward=True)

    scratch_bytes = runtime.num_threads() * forward_bytes(e)
    work = replace(work_of(e, 2), is_native=True)
    return KernelPlan(cost.needs(inputs, outputs, work, scratch_bytes), bind)


def _plan_gradient(attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan `attention_grad`: attrs scale, causal; with dropout p, key.

    It takes what the forward kernel takes.

    dq, written when a head is done with, may lie over dy, q or y; dk and dv, written when a
    block of keys is, over k or v.
    """
    e = extents_of(attrs, inputs, 1)
    masks = inputs[7 : 7 + e.is_masked]
    if not takes(e, (*inputs[:5], *outputs, *masks), inputs[5:7]):
        return None
    pairs = [
        (output, operand)
        for output, readable in ((0, (4, 1, 0)), (1, (2, 3)), (2, (3, 2)))
        for operand in readable
        if (output, operand) in equal_operands(output, outputs, inputs)
    ]

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        operands = (*inputs[:7], *outputs)
        return launch(e, attrs, operands, inputs[7:], workspace, is_forward=False)

    scratch_bytes = runtime.num_threads() * backward_bytes(e)
    work = replace(work_of(e, 5), is_native=True)
    return KernelPlan(cost.needs(inputs, outputs, work, scratch_bytes, tuple(pairs)), bind)


def takes(e: BlockExtents, operands: Sequence[Operand], statistics: Sequence[Operand]) -> bool:
    """Return whether the C kernels take operands with rows, and those of a number per query."""
    return (
        runtime.is_enabled()
        and all([x.type.dtype is DType.FLOAT32 for x in statistics])
        and operands[0].type.dtype in (DType.FLOAT32, DType.BFLOAT16)
        and all([x.type.dtype is operands[0].type.dtype for x in operands])
        and 0 < e.width <= LONGEST_ROW
        and 0 < e.out <= LONGEST_ROW
        and all([_has_rows(x) for x in operands])
    )


def _has_rows(x: Operand) -> bool:
    """Return whether the elements of a row are neighbours."""
    return x.strides_bytes[-1] == x.dtype.itemsize or x.shape[-1] == 1 or 0 in x.shape


def launch(
    e: BlockExtents,
    attrs: Attrs,
    operands: Sequence[Array],
    more: Sequence[Array],
    workspace: Workspace,
    *,
    is_forward: bool,
) -> Launch:
    """Return the launch on operands in the order of the C function.

    `more`: the mask, and seed, step and first numbers, where there are any.
    """
    scratch_bytes = forward_bytes(e) if is_forward else backward_bytes(e)
    available = 0 if workspace is None else workspace.size // scratch_bytes
    block, group = _chunks(e, is_forward=is_forward)
    words: list[Word] = [e.rows, e.columns, e.width, e.out, e.causal]
    words += [operands[0].itemsize == 2, single(number(attrs, "scale")), e.heads]
    words += [_keys(e), _STRIP, block, group]
    words += [available, scratch_bytes, address(workspace)]
    tables: list[Array] = []
    batch = operands[0].ndim - 2
    masks = more[: e.is_masked]
    step = masks[0].itemsize if masks and masks[0].shape[-1] > 1 else 0
    words += [e.is_masked, step, *_dropout(e, attrs, more[len(masks) :])]
    shape = (*operands[-1].shape[:batch], e.rows, e.columns)
    for operand in (*operands, *[np.broadcast_to(mask, shape) for mask in masks]):
        table = _offsets(operand, batch)
        tables.append(table)
        words += [address(operand), operand.strides[batch], address(table)]
    symbol = "af_attention" if is_forward else "af_attention_grad"
    keep = (*operands, *more, *tables, workspace)
    return native_launch(runtime.address_in(_FILE, symbol), words, keep)


def _dropout(e: BlockExtents, attrs: Attrs, drawn: Sequence[Array]) -> list[Word]:
    """Return what the C function wants for dropout, or zeros."""
    if not e.is_dropped:
        return [0, single(0), 0, 0, 0, 0]
    p, key = number(attrs, "p"), integer(attrs, "key")
    # ctypes takes keys of 64 bits with a sign.
    key = (key + (1 << 63)) % (1 << 64) - (1 << 63)
    state = [*map(address, drawn), *[0] * (not e.is_numbered)]
    # Compared with the upper 24 bits of a random word, as many as a float32 holds exactly.
    return [math.ceil(p * 2**24), single(1 / (1 - p)), key, *state]


def _offsets(operand: Array, batch: int) -> Array:
    """Return where the rows of each head begin, in bytes from the first."""
    offsets = np.zeros((), np.int64)
    for extent, step in zip(operand.shape[:batch], operand.strides[:batch], strict=True):
        # One axis more per batch axis: any strides, also of 0, give the heads in row-major order.
        offsets = offsets[..., None] + np.arange(extent, dtype=np.int64) * step
    return np.ascontiguousarray(offsets).reshape(-1)


def _chunks(e: BlockExtents, *, is_forward: bool) -> tuple[int, int]:
    """Return the queries of a block, and how many blocks (backward: heads) make a chunk.

    A power of two of equal chunks: of 30 blocks and 2, one thread would do nearly all.
    """
    block = _BLOCK
    while is_forward and block > _BLOCK // 4 and e.heads * -(-e.rows // block) < MIN_CHUNKS:
        block //= 2
    rows = min(block, e.rows) if is_forward else e.rows
    flops = rows * e.columns * (e.width + e.out) * (2.0 if is_forward else 5.0)
    most = max(1, int(_CHUNK_FLOPS / max(flops, 1.0)))
    parts = max(1, e.heads * (-(-e.rows // block) if is_forward else 1))
    # Rounded up to a power of two, and never more chunks than parts.
    num_chunks = min(parts, 1 << (-(-parts // most) - 1).bit_length())
    return block, -(-parts // num_chunks)


def forward_bytes(e: BlockExtents) -> int:
    """Return the scratch of one thread, piece by piece as `forward_block` takes it."""
    width, out, keys, wide = _padded(e.width), _padded(e.out), _keys(e), _keys(e) + _GAP
    block = _chunks(e, is_forward=True)[0]
    rows = max(keys, _STRIP) * width
    pieces = (e.width * wide, keys * out, rows, *[_STRIP * wide] * 2, block * out, block, 2 * block)
    return _bytes(pieces)


def backward_bytes(e: BlockExtents) -> int:
    """Return the scratch of one thread, piece by piece as `take_backward` does."""
    width, out, keys, wide = _padded(e.width), _padded(e.out), _keys(e), _keys(e) + _GAP
    blocks = (e.width * wide, e.out * wide, keys * width, keys * width, keys * out)
    strips = (*[_STRIP * wide] * 5, *[_STRIP * width] * 2, *[_STRIP * out] * 4)
    return _bytes((*blocks, e.rows * width, e.rows, *strips))


def _keys(e: BlockExtents) -> int:
    return min(_KEYS, _padded(e.columns))


def _padded(extent: int) -> int:
    return -(-extent // _VECTOR) * _VECTOR


def _bytes(pieces: Sequence[int]) -> int:
    return sum([-(-4 * count // 64) * 64 for count in pieces])


NATIVE_ATTENTION_KERNELS = (
    Kernel("c.attention", "attention", _plan_attention),
    Kernel("c.attention_grad", "attention_grad", _plan_gradient),
)
