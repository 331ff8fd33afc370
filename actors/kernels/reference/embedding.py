"""Rows of a table by integer id, the gradient of the table, and the update of rows.

The gradient adds rows of dy in the order of the ids, so it is the same at every run. `np.add.at`
on rows goes element by element through a general loop (2,048 rows of 128 float32: 2.5 ms); on
flat operands it has a fast one (0.39 ms), and it adds a pair of floats at once when they are seen
as one complex number. A product with a one-hot matrix (0.43 ms for 128 rows of table) grows with
the table and loses from there on.

A small table is added up in float64. A large one would need scratch of twice its size, so its rows
are added up in their own type: what n equal ids lose then is about n / 10 roundings.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from actors.kernels.common import cost, kernel
from actors.kernels.common.host_memory import address
from actors.kernels.common.kernel import (
    INDEX,
    Attrs,
    BytePass,
    HostPlan,
    Kernel,
    KernelNeeds,
    KernelPlan,
    Operand,
    Operands,
    Piece,
    Work,
    Workspace,
    as_index,
    axes_of,
    checked,
    fill_range,
    in_sequence,
    index_pieces,
    integer,
    over_blocks,
)
from actors.kernels.common.strides import cut, rows_per_block
from actors.kernels.reference.fused import NUMPY_FUSED_KERNELS
from actors.kernels.reference.reduce import WIDE
from actors.machine.protocol import Array, Arrays, Launch
from compiler.contract.program import GRADIENT
from compiler.contract.types import DType, contiguous_strides

WIDE_TABLE_BYTES = 4 << 20
"""The largest table in float64: scratch that no model of a size to be run by numpy notices."""

_PAIRS: dict[str, np.dtype[np.generic]] = {
    "float32": np.dtype(np.complex64),
    "float64": np.dtype(np.complex128),
}


def _plan_embedding(attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan `embedding`(weight [V, D], ids) -> ids.shape + (D,).

    It takes integer ids; a table that is not dense is copied to scratch.

    numpy gathers into dense arrays only, so other outputs are made in scratch.
    """
    (weight, ids), (out,) = inputs, outputs
    if not ids.type.dtype.is_integer:
        return None
    # Ids and extremes, then a dense table and a dense output where there is none.
    pieces = (
        *index_pieces(ids.type.num_elements),
        Piece((0, 0) if weight.is_dense else weight.shape, weight.dtype),
        Piece((0,) if out.is_dense else out.shape, out.dtype),
    )
    are_dense = weight.is_dense, out.is_dense

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        (weight, ids), (out,) = inputs, outputs
        dense, extremes, table, dense_out = kernel.carve(workspace, pieces)
        calls = [checked("id", ids, weight.shape[0], dense, extremes, axes_of(attrs))]
        if out.size == 0:
            return calls[0]
        if not are_dense[0]:
            calls.append(partial(np.copyto, table, weight))
            weight = table
        rows = (out if are_dense[1] else dense_out).reshape(ids.size, weight.shape[1])
        # Indices are checked already; with mode "raise" numpy would copy the output.
        calls.append(partial(weight.take, dense, axis=0, out=rows, mode="clip"))
        if not are_dense[1]:
            calls.append(partial(np.copyto, out, dense_out))
        return in_sequence(calls)

    copies = sum([x.type.size_bytes for x in (weight, out) if not x.is_dense])
    passes = ((BytePass.GATHER, out.type.size_bytes), (BytePass.STRIDED, copies))
    work = Work(calls=4, passes=passes, unswept=(0,))
    return KernelPlan(cost.needs(inputs, outputs, work, kernel.size_bytes(pieces)), bind)


def _plan_gradient(attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan `embedding_grad`(dy, ids) -> [rows, D]: row r is the sum of dy where ids is r.

    It takes float32 and float64 with a dense output; scratch is blocks of flat indices.
    """
    (dy, ids), (out,) = inputs, outputs
    is_float = dy.type.dtype in (DType.FLOAT32, DType.FLOAT64)
    if not (is_float and ids.type.dtype.is_integer and out.is_dense):
        return None
    pieces = _grad_pieces(ids.type.num_elements, dy.shape[-1], dy.dtype, out.shape)
    passes = {BytePass.SCATTER: 1, BytePass.SIMPLE: 1 if dy.is_dense else 2, BytePass.PLAIN: 1}
    work = over_blocks(dy.type.num_elements, 2 * dy.dtype.itemsize, passes, small_calls=2)

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        (dy, ids), (out,) = inputs, outputs
        columns = dy.shape[-1]
        dense, extremes, starts, within, places, copy, wide = kernel.carve(workspace, pieces)
        check = checked("id", ids, integer(attrs, "rows"), dense, extremes, axes_of(attrs))
        table = wide if wide.size else out
        calls: list[Launch] = [check, partial(table.fill, 0)]
        if dy.size == 0:
            return in_sequence([check, partial(out.fill, 0)])
        # Two neighbours are one complex number, so that `add.at` makes half as many additions.
        pair = _PAIRS[table.dtype.name] if columns % 2 == 0 else table.dtype
        width = columns * table.itemsize // pair.itemsize
        total = table.reshape(-1).view(pair)
        calls += [
            partial(np.multiply, dense, np.array(width, INDEX), out=starts),
            *_fill_within(within, width),
        ]
        operands = (dy, starts.reshape(ids.shape))
        for rows, start in cut(operands, ids.ndim, _block_rows(columns, dy.itemsize)):
            shape = (*rows.shape[:-1], width)
            place = kernel.window(places, shape)
            source = rows
            if not rows.flags.c_contiguous or rows.dtype != table.dtype:
                source = kernel.window(copy, rows.shape)
                calls.append(partial(np.copyto, source, rows))
            calls += [
                partial(np.copyto, place, start[..., None]),
                partial(np.add, place, kernel.window(within, shape), out=place),
                partial(
                    np.add.at, total, as_index(place).reshape(-1), source.reshape(-1).view(pair)
                ),
            ]
        if wide.size:
            calls.append(partial(np.copyto, out, wide, casting="unsafe"))
        return in_sequence(calls)

    needs = cost.needs(inputs, outputs, work, kernel.size_bytes(pieces))
    return KernelPlan(needs, bind)


def _fill_within(within: Array, width: int) -> tuple[Launch, ...]:
    """Return the calls that fill rows with 0 .. width - 1."""
    rows = within[: within.size // width * width].reshape(-1, width)
    return (*fill_range(rows[0], 1), partial(np.copyto, rows[1:], rows[0]))


def _block_rows(columns: int, itemsize: int) -> int:
    """Return how many rows make a block: half of a usual one, for the indices are wide."""
    return max(1, rows_per_block(columns, itemsize) // 2)


def _grad_pieces(
    num_ids: int, columns: int, dtype: np.dtype[np.generic], table: tuple[int, ...]
) -> tuple[Piece, ...]:
    """Return ids, extremes, starts of rows, positions within rows, places, a block, the table."""
    elements = min(num_ids, _block_rows(columns, dtype.itemsize)) * columns
    is_small = math.prod(table) * WIDE.itemsize <= WIDE_TABLE_BYTES
    # Equal ids are added one after the other: in float64 their number costs no digits.
    is_wide = dtype != WIDE and is_small and num_ids > 0
    return (
        *index_pieces(num_ids),
        Piece((num_ids,), INDEX),
        Piece((elements,), INDEX),
        Piece((elements,), INDEX),
        Piece((elements,), WIDE if is_wide else dtype),
        Piece(table if is_wide else (0, 0), WIDE),
    )


def _plan_last_place(attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan `last_place`(ids) -> [rows] int32: the last place of each id, or -1; attrs rows.

    It takes integer ids and a dense output; scratch is ids and their places.
    """
    (ids,), (out,) = inputs, outputs
    if not (ids.type.dtype.is_integer and out.is_dense):
        return None
    size = ids.type.num_elements * out.dtype.itemsize
    work = Work(calls=7, passes=((BytePass.SCATTER, float(size)),))
    # Ids, extremes, and the numbers of the ids.
    num_ids = ids.type.num_elements
    pieces = (*index_pieces(num_ids), Piece((num_ids,), np.dtype(np.int32)))

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        (ids,), (out,) = inputs, outputs
        dense, extremes, places = kernel.carve(workspace, pieces)
        check = checked("id", ids, out.size, dense, extremes, axes_of(attrs))
        calls: list[Launch] = [check, partial(out.fill, -1)]
        if ids.size:
            calls += fill_range(places, 1)
            calls.append(partial(np.maximum.at, out, as_index(dense), places))
        return in_sequence(calls)

    return KernelPlan(cost.needs(inputs, outputs, work, kernel.size_bytes(pieces)), bind)


def _plan_put_rows(attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan `put_rows`(x, ids, rows) -> x with rows at ids; attrs depth.

    It takes integer ids and a dense output, which may lie over x; rows that are not dense are
    copied to scratch.
    """
    (x, ids, rows), (out,) = inputs, outputs
    if not (ids.type.dtype.is_integer and out.is_dense):
        return None
    count = math.prod(x.shape[: integer(attrs, "depth")])
    pieces = (
        *index_pieces(ids.type.num_elements),
        Piece((0,) if rows.is_dense else rows.shape, rows.dtype),
    )

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        (x, ids, source), (out,) = inputs, outputs
        dense, extremes, copy = kernel.carve(workspace, pieces)
        calls: list[Launch] = [checked("id", ids, count, dense, extremes, axes_of(attrs))]
        if address(x) != address(out):
            calls.append(partial(np.copyto, out, x))
        if not source.size:
            return in_sequence(calls)
        if not rows.is_dense:
            calls.append(partial(np.copyto, copy, source))
            source = copy
        # A row is one element of as many bytes: `put` moves it whole, the last of equal ids last.
        row = np.dtype((np.void, out.nbytes // count))
        table, flat = [y.reshape(n, -1).view(row) for y, n in ((out, count), (source, ids.size))]
        calls.append(partial(np.put, table, as_index(dense), flat, "clip"))
        return in_sequence(calls)

    size = float(rows.type.size_bytes)
    work = Work(calls=4, passes=((BytePass.SCATTER, size),), unswept=(0, len(inputs)))
    needs = cost.needs(inputs, outputs, work, kernel.size_bytes(pieces), ((0, 0),))
    return KernelPlan(needs, bind)


EMBEDDING_KERNELS = (
    Kernel("numpy.put_rows", "put_rows", _plan_put_rows),
    Kernel("numpy.embedding", "embedding", _plan_embedding),
    Kernel("numpy.embedding_grad", "embedding_grad", _plan_gradient),
    Kernel("numpy.last_place", "last_place", _plan_last_place),
)


# "numpy.embedding_update" makes the gradient of the whole table, because numpy cannot add equal ids
# up without a table or fresh arrays; what the op saves in traffic it saves in C.


def _plan_update(attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan what "c.embedding_update" does, by way of the gradient of all rows.

    It takes what both kernels take; scratch has the gradient.
    """
    table, dy, ids, *rest = inputs
    gradient = Operand(table.type, 0, contiguous_strides(table.shape, table.dtype.itemsize))
    first = _plan_gradient({"rows": table.shape[0]}, (dy, ids), (gradient,))
    second = NUMPY_FUSED_KERNELS[0].plan(attrs, (table, gradient, *rest), outputs)
    if first is None or second is None:
        return None
    sizes = [first.needs.workspace_bytes, second.needs.workspace_bytes]
    pieces = (
        Piece(table.shape, table.dtype),
        *[Piece((size,), np.dtype(np.uint8)) for size in sizes],
    )

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        table, dy, ids, *rest = inputs
        gradient, *spaces = kernel.carve(workspace, pieces)
        calls = (
            first.bind((dy, ids), (gradient,), spaces[0]),
            second.bind((table, gradient, *rest), outputs, spaces[1]),
        )
        return in_sequence(calls)

    over = second.needs.in_place
    needs = KernelNeeds(
        kernel.size_bytes(pieces),
        tuple([(out, i + (i > GRADIENT)) for out, i in over if i != GRADIENT]),
        first.needs.duration_ns + second.needs.duration_ns,
        (first.needs.work or Work()).then(second.needs.work or Work()),
    )
    return KernelPlan(needs, bind)


EMBEDDING_UPDATE = Kernel("numpy.embedding_update", "embedding_update", _plan_update)
