"""Rows of a table, the table's gradient, and the update of rows that were picked (`embedding.c`).

A bad id ends the launch before anything but the output is written, with the error of the numpy
kernels.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass

import numpy as np

from actors.kernels.common import cost, kernel
from actors.kernels.common.host_memory import address
from actors.kernels.common.kernel import (
    ALIGNMENT_BYTES,
    INDEX,
    Attrs,
    BytePass,
    HostPlan,
    Kernel,
    KernelPlan,
    Operand,
    Operands,
    Piece,
    Workspace,
    axes_of,
    checked,
    integer,
    is_dense,
    native_work,
)
from actors.kernels.common.strides import MAX_OUTER, collapse_axes, columns_of
from actors.kernels.library import launch, runtime
from actors.kernels.library.launch import Explain, Word, native_launch
from actors.kernels.native.emit import function_of
from actors.kernels.native.fused import argument_words
from actors.kernels.program import values as words
from actors.kernels.program.numbers import numbers_of
from actors.kernels.program.phases import Chunks
from actors.kernels.program.spaces import LoopSpace, ScheduledProgram, scheduled_program
from actors.machine.protocol import Array, Arrays, Launch
from compiler.contract.program import GRADIENT, Kind
from compiler.contract.types import DType, TensorType

FLOATS = (DType.FLOAT32, DType.FLOAT64)
_INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
"""The types of ids, in the order of embedding.c."""

PLACE = np.dtype(np.int32)
_MAX_IDS = 1 << 29
_PART_COLUMNS = 64
_MAX_ROW_PARTS = 64
ROW_BYTES = 1024
"""What an access to a row anywhere in memory takes, as bytes of a stream: some 25 ns."""


def _plan_embedding(attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan `embedding`(weight [V, D], ids) -> ids.shape + (D,).

    It takes a table with dense rows, and an output with dense rows that lie evenly.
    """
    (weight, ids), (out,) = inputs, outputs
    if not (runtime.is_enabled() and has_dense_rows(weight) and is_id(ids)):
        return None
    step = row_step(out.shape, out.strides_bytes)
    if not has_dense_rows(out) or step is None:
        return None
    size, num_ids = out.type.size_bytes, ids.type.num_elements
    num_rows, row_bytes = weight.shape[0], weight.shape[1] * weight.dtype.itemsize
    per_chunk = launch.units_per_chunk(num_ids, 2 * size + num_ids * ROW_BYTES)

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        arguments: list[Word] = [
            *(address(inputs[0]), address(outputs[0])),
            *ids_words(inputs[1]),
            *(num_rows, weight.strides_bytes[0], row_bytes, step),
            *(per_chunk, runtime.num_threads()),
            0,  # whether an id was bad
        ]
        entry = runtime.address_in("embedding.c", "af_embedding")
        explain = explain_ids(inputs[1], num_rows, axes_of(attrs))
        return native_launch(entry, arguments, (inputs, outputs), explain)

    work = native_work((BytePass.GATHER, float(size)), rows=num_ids, unswept=(0,))
    return KernelPlan(cost.needs(inputs, outputs, work), bind)


def _plan_gradient(attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan `embedding_grad`(dy, ids) -> [rows, D]: row r is the sum of dy where ids is r.

    It takes float32 and float64 with dense rows and a dense output; scratch holds the ids.
    """
    (dy, ids), (out,) = inputs, outputs
    if not (runtime.is_enabled() and are_rows(dy) and out.is_dense and is_id(ids)):
        return None
    passes = (
        (BytePass.GATHER, float(dy.type.size_bytes)),
        (BytePass.SIMPLE, float(out.type.size_bytes)),
    )
    rows, columns, num_ids = integer(attrs, "rows"), dy.shape[-1], ids.type.num_elements
    cut = _cut(rows, columns, num_ids, dy.dtype.itemsize)
    pieces = _scatter_pieces(num_ids, rows)

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        scratch = kernel.carve(workspace, pieces)
        arguments: list[Word] = [
            *(address(inputs[0]), address(outputs[0])),
            *ids_words(inputs[1]),
            *rows_words(inputs[0]),
            *(rows, columns, int(dy.dtype.itemsize == 8)),
            *(cut.shift, cut.row_parts, cut.width, cut.column_parts, runtime.num_threads()),
            *[address(piece) for piece in scratch],
        ]
        entry = runtime.address_in("embedding.c", "af_embedding_grad")
        keep, explain = (inputs, outputs, scratch), explain_ids(inputs[1], rows, axes_of(attrs))
        return native_launch(entry, arguments, keep, explain)

    work = native_work(*passes, rows=num_ids)
    return KernelPlan(cost.needs(inputs, outputs, work, kernel.size_bytes(pieces)), bind)


def _plan_last_place(attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan `last_place`(ids) -> [rows] int32: the last place of each id, or -1; attrs rows.

    It takes ids that lie anyhow, and a dense output.
    """
    (ids,), (out,) = inputs, outputs
    if not (runtime.is_enabled() and is_id(ids) and out.is_dense):
        return None
    size = float(ids.type.num_elements * out.dtype.itemsize)
    passes = ((BytePass.SCATTER, size), (BytePass.SIMPLE, float(out.type.size_bytes)))

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        rows = outputs[0].size
        arguments: list[Word] = [address(outputs[0]), *ids_words(inputs[0]), rows]
        explain = explain_ids(inputs[0], rows, axes_of(attrs))
        entry = runtime.address_in("embedding.c", "af_last_place")
        return native_launch(entry, arguments, (inputs, outputs), explain)

    return KernelPlan(cost.needs(inputs, outputs, native_work(*passes)), bind)


def _plan_put_rows(attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan `put_rows`(x, ids, rows) -> x with rows at ids; attrs depth.

    It takes a dense x and a dense output, which may lie over x, and rows whose elements are
    neighbours.
    """
    (x, ids, rows), (out,) = inputs, outputs
    depth, rank = integer(attrs, "depth"), len(ids.shape)
    axes = collapse_axes(rows.shape[:rank], (rows.strides_bytes[:rank],), in_order=True)
    row_type = TensorType(rows.type.dtype, rows.shape[rank:])
    is_row = is_dense(row_type.shape, rows.strides_bytes[rank:], rows.dtype.itemsize)
    is_row |= 0 in rows.shape
    if not (runtime.is_enabled() and x.is_dense and out.is_dense and is_id(ids)):
        return None
    if not is_row or len(axes) > MAX_OUTER:
        return None
    count, size = math.prod(x.shape[:depth]), rows.type.size_bytes

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        x, ids, rows = inputs
        arguments: list[Word] = [
            *(address(x), address(outputs[0])),
            *ids_words(ids),
            address(rows),
            *columns_of(axes, 1),
            *(count, row_type.size_bytes, x.nbytes, launch.CHUNK_BYTES, runtime.num_threads()),
        ]
        entry = runtime.address_in("embedding.c", "af_put_rows")
        explain = explain_ids(ids, count, axes_of(attrs))
        return native_launch(entry, arguments, (inputs, outputs), explain)

    work = native_work(
        (BytePass.SCATTER, float(size)), rows=ids.type.num_elements, unswept=(0, len(inputs))
    )
    return KernelPlan(cost.needs(inputs, outputs, work, in_place=((0, 0),)), bind)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Parts of a table: of 2 ** `shift` rows, or of `width` columns."""

    shift: int
    row_parts: int
    width: int
    column_parts: int


def _cut(rows: int, columns: int, num_ids: int, item: int) -> _Cut:
    """Cut a table that the caches hold by columns, and a larger one by rows."""
    table, added_bytes = rows * columns * item, num_ids * columns * item
    # Parts of 2 ** shift rows, so that the part of an id is a shift of it.
    shift = max(rows - 1, 0).bit_length()
    if table < launch.CACHED_BYTES:
        worth = max(1, (table + 3 * added_bytes) // launch.CHUNK_BYTES)
        width = -(-columns // max(1, min(columns // _PART_COLUMNS, worth)))
        return _Cut(shift, 1, max(width, 1), -(-columns // max(width, 1)))
    num_parts = min(table // launch.CHUNK_BYTES, _MAX_ROW_PARTS)
    shift = max(shift - max(num_parts, 1).bit_length() + 1, 0)
    return _Cut(shift, -(-rows // (1 << shift)), max(columns, 1), 1)


def is_id(ids: Operand) -> bool:
    """Whether ids are integers whose places C can walk."""
    axes = collapse_axes(ids.shape, (ids.strides_bytes,), in_order=True)
    is_walked = len(axes) <= MAX_OUTER and ids.type.num_elements < _MAX_IDS
    return ids.type.dtype.is_integer and is_walked


def has_dense_rows(table: Operand) -> bool:
    """Whether the last axis is dense."""
    is_short = table.shape[-1] <= 1 or 0 in table.shape
    return is_short or table.strides_bytes[-1] == table.dtype.itemsize


def row_step(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """Return the bytes from one row to the next, or None where rows do not lie evenly."""
    axes = collapse_axes(shape[:-1], (strides[:-1],), in_order=True)
    if len(axes) > 1:
        return None
    return axes[0].steps[0] if axes else 0


def are_rows(dy: Operand) -> bool:
    """Whether dy is dense rows of floats whose places C can walk."""
    axes = collapse_axes(dy.shape[:-1], (dy.strides_bytes[:-1],), in_order=True)
    return dy.type.dtype in FLOATS and len(axes) <= MAX_OUTER and has_dense_rows(dy)


def ids_words(ids: Array) -> list[Word]:
    """Return ids as embedding.c has them."""
    axes = collapse_axes(ids.shape, (ids.strides,), in_order=True)
    return [address(ids), _INTEGERS.index(ids.dtype.name), ids.size, *columns_of(axes, 1)]


def rows_words(dy: Array) -> list[int]:
    """Return the places of the rows of a tensor as embedding.c has them."""
    return columns_of(collapse_axes(dy.shape[:-1], (dy.strides[:-1],), in_order=True), 1)


def _scatter_pieces(num_ids: int, rows: int) -> tuple[Piece, ...]:
    """Return the ids, the next place of each id, and the first of each row."""
    return (Piece((num_ids,), INDEX), Piece((num_ids,), PLACE), Piece((rows,), PLACE))


def explain_ids(ids: Array, num_rows: int, axes: tuple[int, ...] = ()) -> Explain:
    """Return what tells of a bad id: it raises the IndexError of the numpy kernels."""

    def explain(status: int) -> str:
        checked("id", ids, num_rows, np.empty(ids.size, INDEX), np.empty(2, INDEX), axes)()
        return "an id was no row of the table"  # and the ids are others by now

    return explain


NATIVE_EMBEDDING_KERNELS = (
    Kernel("c.embedding", "embedding", _plan_embedding),
    Kernel("c.embedding_grad", "embedding_grad", _plan_gradient),
    Kernel("c.last_place", "last_place", _plan_last_place),
    Kernel("c.put_rows", "put_rows", _plan_put_rows),
)


# "c.embedding_update": C finds equal ids and adds up their rows of dy (`embedding.c`); for each row
# of the table that occurs it calls the function generated of the dense update, with the sum in
# place of the gradient. So the bits are those of the dense rule. Scratch is chains of ids, and a
# row of sums per thread.

_MOST_WORDS = 128
"""As MOST_WORDS in embedding.c."""


def _plan_update(attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan an update of the rows of a table: table [V, D], dy, ids, and what else it reads.

    Attrs are those of the fused kernel of the update. The outputs lie over the inputs: rows that no
    id names are not touched.

    It takes float32 and float64, dense but for the rows of dy, and programs of one loop.
    """
    (table, dy, ids, *rest), function = inputs, function_of(attrs)
    if not runtime.is_enabled() or function is None or runtime.is_broken(function):
        return None
    operands = (table, *rest, *outputs)
    if not (all([x.is_dense for x in operands]) and are_rows(dy) and is_id(ids)):
        return None
    scheduled = scheduled_program(attrs)
    num_words = words.numbers_begin(scheduled.program, scheduled.schedule)
    is_small = num_words + len(numbers_of(scheduled.program)) <= _MOST_WORDS
    if not (_is_by_elements(scheduled) and is_small and table.type.dtype in FLOATS):
        return None
    num_ids, (rows, columns) = ids.type.num_elements, table.shape
    pieces = functools.partial(_pieces, num_ids, columns, table.dtype)
    moved_bytes = (2 + 2 * len(outputs)) * dy.type.size_bytes + num_ids * ROW_BYTES
    per_chunk = launch.units_per_chunk(num_ids, moved_bytes)

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        table, dy, ids, *rest = inputs
        workers = kernel.workers_for(pieces, workspace, runtime.num_threads())
        sums, *chains = kernel.carve(workspace, pieces(workers))
        arrays = (table, sums[:1], *rest, *outputs)
        space = _space(scheduled, rows, columns)
        block, scratch = argument_words(scheduled, space, rows, arrays, None)
        arguments: list[Word] = [
            *(address(dy), address(table)),
            *ids_words(ids),
            *rows_words(dy),
            *(rows, columns, int(dy.itemsize == 8)),
            *(per_chunk, max(1, -(-num_ids // per_chunk)), workers),
            *[address(piece) for piece in chains],
            *(_num_slots(num_ids), 0),
            *(runtime.address_of(function, "_rows"), ctypes.addressof(block), len(block)),
            *(words.operand(GRADIENT), address(sums), sums.shape[1] * sums.itemsize),
        ]
        entry = runtime.address_in("embedding.c", "af_embedding_update")
        keep = (inputs, outputs, sums, *chains, block, scratch)
        return native_launch(entry, arguments, keep, explain_ids(ids, rows))

    work = native_work(
        (BytePass.GATHER, (1.0 + 2 * len(outputs)) * dy.type.size_bytes),
        rows=num_ids,
        unswept=(0, *range(len(inputs), len(inputs) + len(outputs))),
    )
    over = (0, *range(3, 2 + len(outputs)))  # the table, and its states after dy and ids
    size = kernel.size_bytes(pieces(runtime.num_threads()))
    return KernelPlan(cost.needs(inputs, outputs, work, size, tuple(enumerate(over))), bind)


def _is_by_elements(made: ScheduledProgram) -> bool:
    """Whether a program is one loop over the elements of a row, without scratch."""
    program = made.program
    kinds = {program.kind_of(v) for v in range(program.num_values)}
    return kinds <= {Kind.FULL, Kind.SCALAR}


def _space(made: ScheduledProgram, rows: int, columns: int) -> LoopSpace:
    """Return the space of the table; the gradient of every row is the one row of sums."""
    program = made.program
    kinds = [program.kind_of(v) for v in (*range(len(program.inputs)), *program.outputs)]
    strides = [columns if kind is Kind.FULL else 0 for kind in kinds]
    # Row 0 of the sums for every row: C writes the row's sum there before it calls the update.
    strides[GRADIENT] = 0
    return LoopSpace(rows, columns, tuple(strides), Chunks(max(rows, 1), 1, columns, 0))


def _pieces(
    num_ids: int, columns: int, dtype: np.dtype[np.generic], num_workers: int
) -> tuple[Piece, ...]:
    """Return the sums, the ids, the table of hashes, and three columns of places."""
    width = -(-columns // ALIGNMENT_BYTES) * ALIGNMENT_BYTES  # no cache line has two writers
    column, slots = Piece((num_ids,), PLACE), Piece((_num_slots(num_ids),), PLACE)
    return (Piece((num_workers, width), dtype), Piece((num_ids,), INDEX), slots, *[column] * 3)


def _num_slots(num_ids: int) -> int:
    """Return a power of two, at least twice the ids, so that searches are short and end."""
    return 1 << (2 * max(num_ids, 1) - 1).bit_length()


EMBEDDING_UPDATE_KERNELS = (Kernel("c.embedding_update", "embedding_update", _plan_update),)
