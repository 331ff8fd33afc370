"""Rows of a table by integer id, the table's gradient, and the update of rows (`embedding.cuh`).

A bad id addresses nothing: it is reported, and its row is zeros. The gradient does not scatter with
atomics, which would add in an order of their own; ids are sorted and their runs added up.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from actors.kernels.common.kernel import (
    Attrs,
    KernelNeeds,
    KernelPlan,
    Operand,
    Operands,
    Piece,
    axes_of,
    fused_program,
    integer,
    is_dense,
    size_bytes,
)
from actors.kernels.common.strides import MAX_OUTER, collapse_axes
from actors.kernels.cuda.calls import (
    DeviceCalls,
    FillBytes,
    KernelText,
    LaunchCalls,
    RunKernel,
    StatusWord,
    Word,
    file_text,
)
from actors.kernels.cuda.emit import DIALECT
from actors.kernels.cuda.kernel import (
    CudaPlan,
    DeviceView,
    Gpu,
    PlacedViews,
    Scratch,
    are_ids,
    carve,
    ids_words,
    on_device,
    places_words,
    status_of,
)
from actors.kernels.cuda.movement import plan_copies
from actors.kernels.cuda.programs import scheduled_for_device
from actors.kernels.program import values as words
from actors.kernels.program.stages import block, scalar_values, scalars_function, skip_line, structs
from actors.kernels.program.values import (
    Values,
    conversions,
    storage_of,
    store,
)
from compiler.contract.attrs import NO_ATTRS
from compiler.contract.program import GRADIENT, FusedProgram, is_by_elements
from compiler.contract.types import DType, TensorType, numpy_dtype

# Keys of 32 bits sorted on the device, with where they were: stable, and without atomics.

KEY = np.dtype(np.uint32)
TILE, ONLY_TILE = 1024, 2048
DIGITS = 256
"""As in sort.cuh: keys of a block, of the only one, and its threads."""

_TILES_PER_SEGMENT = 8
_MAX_SEGMENTS = 4


def sort_pieces(num: int) -> tuple[Piece, ...]:
    """Return scratch: keys twice, where they were twice, digits by tile, and their first places."""
    column = Piece((num,), KEY)
    return (*[column] * 4, Piece((_num_tiles(num), DIGITS), KEY), Piece((DIGITS,), KEY))


def sort_calls(pieces: tuple[int, ...], num: int, largest: int) -> tuple[DeviceCalls, int, int]:
    """Return the calls that sort keys up to `largest`, and where keys and their places then lie.

    The keys are in the first of the `pieces`, in their order; all are overwritten. A place is the
    number of a key as it came, a uint32. There is at least one key.
    """
    keys, spare, places, other, counts, bases = pieces
    text, num_tiles = _sort_text(), _num_tiles(num)
    num_shifts = _num_shifts(largest)
    # One block sorts all digits in shared memory, in a single call.
    if num <= ONLY_TILE:
        arguments = (keys, 0, spare, places, counts, bases, num, num_tiles, 0, num_shifts)
        return (RunKernel(text, text.kernels[3], 1, DIGITS, arguments),), spare, places
    segments = min(_MAX_SEGMENTS, -(-num_tiles // _TILES_PER_SEGMENT))
    calls: list[RunKernel] = []
    # 0: keys are where they came, so their places are their own numbers.
    places_in = 0
    for step in range(num_shifts):
        arrays = (keys, places_in, spare, places, counts, bases)
        arguments = (*arrays, num, num_tiles, 8 * step, num_shifts)
        calls += [
            RunKernel(text, text.kernels[0], num_tiles, DIGITS, arguments),
            RunKernel(text, text.kernels[1], 1, segments * DIGITS, arguments),
            RunKernel(text, text.kernels[2], num_tiles, DIGITS, arguments),
        ]
        # Each pass reads one buffer and writes the other.
        keys, spare = spare, keys
        places_in, places, other = places, other, places
    return tuple(calls), keys, places_in


def _num_shifts(largest: int) -> int:
    """Return the passes: one per digit that can differ, so small tables need one or two of four."""
    return max(1, -(-largest.bit_length() // 8))


def _num_tiles(num: int) -> int:
    return -(-num // TILE)


@functools.cache
def _sort_text() -> KernelText:
    names = ("NAME_count", "NAME_scan", "NAME_scatter", "NAME_tile")
    return KernelText.of("sort", file_text("sort.cuh"), names, "a stable sort of keys")


# Sums of the rows of dy with equal ids: the gradient of a table and the update of its rows share
# them, and so have the same bits. A sum is made in float64 and rounded once.

_CHUNKS, _ENOUGH_CHUNKS = (16, 32, 64), 512
"""Sorted entries that one block adds up: fewer, as long as there are not so many blocks."""

_WIDTH = 4
"""Neighbouring columns of a thread, where they lie evenly."""

_AT_ONCE, _WAITS = 8, 3
"""Rows that are loaded before the first is added (row_sums.cuh); about how many loads of a kernel
wait for one another."""

BLOCK = 256
_MAX_THREADS = 256
_WARP = 32
_KEYS_STATUS = 17
"""The word of NAME_keys_arguments in embedding.cuh that holds the status cell."""


@dataclass(frozen=True, slots=True)
class RowSums:
    """Sums of `num` rows of `columns` elements by ids below `rows`; `axes` as in `bad_index`."""

    num: int
    rows: int
    columns: int
    axes: tuple[int, ...] = ()

    @property
    def chunk(self) -> int:
        """How many sorted entries a block adds up."""
        # Of a run the sums of all chunks are added up one after the other.
        of_run = math.isqrt(self.num // max(1, self.rows))
        most = max(1, self.num // _ENOUGH_CHUNKS, of_run)
        return max([size for size in _CHUNKS if size <= most], default=_CHUNKS[0])

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Scratch: that of the sort, and the sums of pieces of runs."""
        partials = Piece((self._num_chunks, 2, self.columns), np.dtype(np.float64))
        return (*sort_pieces(self.num), partials)

    def duration_ns(self, gpu: Gpu, itemsize: int) -> float:
        """Return an estimate: rows are read once, and so are sums of pieces; the sort is extra."""
        digits = _num_shifts(self.rows)
        # Keys and two of sums; a pass of the sort is three kernels, or a part of one.
        num_kernels = 4 if self.num <= ONLY_TILE else 3 + 3 * digits
        num_waits = 2 * self.chunk // _AT_ONCE + _WAITS * num_kernels
        moved_bytes = 2 * self.num * self.columns * itemsize + 2 * self.pieces[-1].size_bytes
        sort_ns = digits * gpu.bytes_ns(32 * self.num)
        waits_ns = num_kernels * gpu.call_ns + num_waits * gpu.latency_ns
        return waits_ns + sort_ns + gpu.bytes_ns(moved_bytes)

    def calls(
        self, pieces: tuple[int, ...], dy: DeviceView, ids: DeviceView, out: int, picks: int
    ) -> DeviceCalls:
        """Return the calls. A bad id is reported, and its row is added to none.

        Without `picks` the sum of id i is put into row i of `out` [rows, columns]; rows of other
        ids are left alone. With the address of `picks` [num] int64, entry e of that is an id or -1,
        each id once, and its sum is row e of `out` [num, columns].
        """
        if not self.num:
            return ()
        check = self._keys(pieces[0], ids)
        if not self.columns:
            return (check,)
        sort, keys, places = sort_calls(pieces[:-1], self.num, self.rows)
        width = self._width(dy, out)
        threads, parts = block_of(self.columns // width)
        arguments: list[Word] = [
            *(keys, places, dy.address),
            *places_words(dy.shape[:-1], dy.strides_bytes[:-1]),
            *(dy.strides_bytes[-1], out, picks, pieces[-1]),
            *(self.num, self.rows, self.columns, parts, int(picks != 0), self.chunk),
        ]
        text, blocks = _row_sums_text(dy.dtype, width), self._num_chunks * parts
        sums = [RunKernel(text, name, blocks, threads, tuple(arguments)) for name in text.kernels]
        return (check, *sort, *sums[: 1 if self._num_chunks == 1 else 2])

    def _keys(self, keys: int, ids: DeviceView) -> RunKernel:
        text = text_of_ids()
        arguments = (*ids_words(ids), keys, 0, self.rows)
        status: StatusWord = status_of(_KEYS_STATUS, "id", ids.type, self.rows, self.axes)
        blocks = -(-self.num // BLOCK)
        return RunKernel(text, text.kernels[1], blocks, BLOCK, arguments, status=status)

    @property
    def _num_chunks(self) -> int:
        return -(-self.num // self.chunk)

    def _width(self, dy: DeviceView, out: int) -> int:
        """Return how many columns a thread has: the sums are the same, whatever it is."""
        itemsize = dy.dtype.itemsize
        size = min(_UNITS[0], _WIDTH * itemsize)
        *steps, step = dy.strides_bytes
        is_even = not any([place % size for place in (dy.address, out, *steps)])
        return _WIDTH if is_even and step == itemsize and not self.columns % _WIDTH else 1


def sums_of(dy: Operand, ids: Operand, rows: int, axes: tuple[int, ...] = ()) -> RowSums | None:
    """Return the sums of a call; None for what kernels do not take."""
    walked = collapse_axes(dy.shape[:-1], (dy.strides_bytes[:-1],), in_order=True)
    # Keys are 32 bits, and one more than the last row stands for a bad id.
    is_taken = dy.type.dtype.is_float and len(walked) <= MAX_OUTER and rows < (1 << 32) - 1
    if not (is_taken and are_ids(ids)):
        return None
    return RowSums(math.prod(ids.shape), rows, dy.shape[-1], axes)


def block_of(columns: int) -> tuple[int, int]:
    """Return the threads of a block with one for each column, and how many blocks have all."""
    parts = max(1, -(-columns // _MAX_THREADS))
    return max(1, -(-columns // (parts * _WARP))) * _WARP, parts


@functools.cache
def text_of_ids() -> KernelText:
    """Return the text of what is done by ids alone: rows picked, and keys made."""
    names = ("NAME_gather", "NAME_keys", "NAME_last", "NAME_put")
    text = file_text("embedding.cuh")
    return KernelText.of("embedding", text, names, "rows by id", has_exchanges=False)


@functools.cache
def _row_sums_text(dtype: DType, width: int) -> KernelText:
    defined = {"ROW": storage_of(dtype), **conversions(dtype, "double"), "WIDTH": width}
    text = file_text("row_sums.cuh", defined)
    about = f"sums of rows of {dtype} by id"
    return KernelText.of("sums", text, ("NAME_chunks", "NAME_joins"), about, has_exchanges=False)


_UNITS = (16, 8, 4, 2)
_MAX_TEAM_BITS = 5
_GATHER_STATUS, _LAST_STATUS = 18, 17
"""The words of NAME_gather_arguments and NAME_last_arguments that hold the status cell."""


def plan_embedding(gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands) -> CudaPlan | None:
    """Plan `embedding`(weight [V, D], ids) -> ids.shape + (D,).

    It takes tables of any type, laid out anyhow, and integer ids; no scratch.
    """
    (_, ids), (out,) = inputs, outputs
    axes = collapse_axes(out.shape[:-1], (out.strides_bytes[:-1],), in_order=True)
    if not are_ids(ids) or len(axes) > MAX_OUTER:
        return None
    moved_bytes = 2.0 * out.type.size_bytes + ids.type.size_bytes
    duration_ns = gpu.call_ns + gpu.bytes_ns(moved_bytes)
    return KernelPlan(KernelNeeds(duration_ns=duration_ns), partial(_gather, axes_of(attrs)))


def _gather(
    axes: tuple[int, ...], inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch
) -> LaunchCalls:
    """Return one call, in which a team of threads copies a row; `axes` as in `bad_index`."""
    weight, ids, out = on_device((*inputs, *outputs))
    num = ids.type.num_elements
    if not num:
        return ()
    rows, columns = weight.shape
    unit, steps = _units(weight, out)
    units = columns * weight.dtype.itemsize // unit
    # A team of 2 ** team_bits threads, a warp at most, copies a row.
    team_bits = min(_MAX_TEAM_BITS, max(units - 1, 0).bit_length())
    arguments = (
        *ids_words(ids),
        *(weight.address, out.address, 0),
        *(rows, weight.strides_bytes[0], steps[0]),
        *places_words(out.shape[:-1], out.strides_bytes[:-1]),
        *(steps[1], units, unit, team_bits),
    )
    text, status = text_of_ids(), status_of(_GATHER_STATUS, "id", ids.type, rows, axes)
    blocks = -(-(num << team_bits) // BLOCK)
    return (RunKernel(text, text.kernels[0], blocks, BLOCK, arguments, status=status),)


def _units(weight: DeviceView, out: DeviceView) -> tuple[int, tuple[int, int]]:
    """Return the bytes that a thread copies at once, and its steps in table and output."""
    item, columns = weight.dtype.itemsize, weight.shape[1]
    steps = weight.strides_bytes[1], out.strides_bytes[-1]
    if columns > 1 and steps != (item, item):
        return item, steps
    # All that decides where a row begins and ends; a unit must divide each of these.
    lie = (weight.address, out.address, columns * item, *weight.strides_bytes[:1])
    lie += out.strides_bytes[:-1]
    # The widest access that every row of table and output begins and ends at a multiple of.
    unit = next((unit for unit in _UNITS if not any([at % unit for at in lie])), 1)
    return unit, (unit, unit)


def plan_gradient(gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands) -> CudaPlan | None:
    """Plan `embedding_grad`(dy, ids) -> [rows, D]: row r is the sum of dy where ids is r.

    It takes floats and a dense output; scratch is sorted ids, and sums of pieces of runs.
    """
    (dy, ids), (out,) = inputs, outputs
    sums = sums_of(dy, ids, integer(attrs, "rows"), axes_of(attrs))
    if sums is None or not out.is_dense:
        return None
    fill = gpu.call_ns + gpu.bytes_ns(out.type.size_bytes)
    duration_ns = fill + sums.duration_ns(gpu, dy.type.dtype.itemsize)

    def bind(inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> LaunchCalls:
        dy, ids, out = on_device((*inputs, *outputs))
        calls = sums.calls(carve(workspace, sums.pieces), dy, ids, out.address, 0)
        size = out.type.size_bytes
        return (FillBytes(out.address, 0, size), *calls) if size else calls

    return KernelPlan(KernelNeeds(size_bytes(sums.pieces), duration_ns=duration_ns), bind)


def plan_last_place(gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands) -> CudaPlan | None:
    """Plan `last_place`(ids) -> [rows] int32: the last place of each id, or -1; attrs rows.

    It takes integer ids and a dense output; no scratch.
    """
    (ids,), (out,) = inputs, outputs
    if not (are_ids(ids) and out.is_dense):
        return None
    moved_bytes = float(out.type.size_bytes + ids.type.size_bytes)
    rows, num, axes = out.type.num_elements, ids.type.num_elements, axes_of(attrs)

    def bind(inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> LaunchCalls:
        ids, out = on_device((*inputs, *outputs))
        # All bits 1 are -1 of an int32.
        fills = (FillBytes(out.address, 0xFF, out.type.size_bytes),) if rows else ()
        if not num:
            return fills
        text, status = text_of_ids(), status_of(_LAST_STATUS, "id", ids.type, rows, axes)
        words, blocks = (*ids_words(ids), out.address, 0, rows), -(-num // BLOCK)
        return (*fills, RunKernel(text, text.kernels[2], blocks, BLOCK, words, status=status))

    duration_ns = 2 * gpu.call_ns + gpu.bytes_ns(moved_bytes)
    return KernelPlan(KernelNeeds(duration_ns=duration_ns), bind)


def plan_put_rows(gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands) -> CudaPlan | None:
    """Plan `put_rows`(x, ids, rows) -> x with rows at ids; attrs depth.

    It takes an x that lies anyhow and a dense output, which may lie over a dense x; scratch is the
    last place of each id.
    """
    (x, ids, rows), (out,) = inputs, outputs
    axes = collapse_axes(rows.shape, (rows.strides_bytes,), in_order=True)
    if not (are_ids(ids) and out.is_dense and len(axes) < MAX_OUTER):
        return None
    count, num = math.prod(x.shape[: integer(attrs, "depth")]), ids.type.num_elements
    pieces = (Piece((count,), np.dtype(np.int32)),)
    last = Operand(TensorType(DType.INT32, (count,)), 0, (4,))
    places = plan_last_place(gpu, attrs, (ids,), (last,))
    whole = plan_copies("copy", gpu, NO_ATTRS, (x,), (out,))
    if places is None or whole is None:
        return None

    def bind(inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> LaunchCalls:
        x, ids, rows, out = on_device((*inputs, *outputs))
        (at,) = carve(workspace, pieces)
        copies = whole.bind((x,), (out,), None) if x.address != out.address else ()
        if not rows.type.num_elements:
            return copies
        scratch = DeviceView(at, last.type, last.strides_bytes)
        unit, shape, steps = _row_units(rows, out, len(ids.shape))
        num_units = math.prod(shape) // num
        text, blocks = text_of_ids(), -(-num * num_units // BLOCK)
        arguments = (
            *(*ids_words(ids), at, rows.address, out.address, count, num_units, unit),
            *places_words(shape, steps),
        )
        put = RunKernel(text, text.kernels[3], blocks, BLOCK, arguments)
        return (*places.bind(inputs[1:2], (scratch,), None), *copies, put)

    moved_bytes = 2.0 * rows.type.size_bytes
    duration_ns = places.needs.duration_ns + gpu.call_ns + gpu.bytes_ns(moved_bytes)
    if x.is_dense:
        return KernelPlan(KernelNeeds(size_bytes(pieces), ((0, 0),), duration_ns), bind)
    # Nothing can lie over it, so that all of it is copied.
    duration_ns += whole.needs.duration_ns
    return KernelPlan(KernelNeeds(size_bytes(pieces), duration_ns=duration_ns), bind)


def _row_units(
    rows: DeviceView, out: DeviceView, rank: int
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return the bytes that a thread copies, and how such units of rows lie: extents and steps."""
    item, tail = rows.dtype.itemsize, rows.strides_bytes[rank:]
    if not is_dense(rows.shape[rank:], tail, item):
        return item, rows.shape, rows.strides_bytes
    size, lead = math.prod(rows.shape[rank:]) * item, rows.strides_bytes[:rank]
    lie = (rows.address, out.address, size, *lead)
    unit = next((unit for unit in _UNITS if not any([at % unit for at in lie])), 1)
    return unit, (*rows.shape[:rank], size // unit), (*lead, unit)


# "cuda.embedding_update": the rows of dy are added up by id (`RowSums`); then the program of the
# dense update runs on the rows that were picked, with the sum of each in place of the gradient. So
# the bits are those of the gradient of the table and the dense update. Scratch is a sum per id: how
# many differ, nobody knows.

_PICKS, _NUM_PARTS = words.PARTIALS, words.NUM_COLUMN_CHUNKS
"""Words of the header that say something else here: the row of each entry or -1, and in how many
blocks the columns of a row are."""


def plan_update(gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands) -> CudaPlan | None:
    """Plan an update of the rows of a table: table [V, D], dy, ids, and what else it reads.

    Attrs are those of the fused kernel of the update. The outputs lie over the inputs: rows that no
    id names are not touched. One more input `skip` [] int64 leaves all as it is where it is not 0.

    It takes programs of elements and numbers, on dense tables.
    """
    table, dy, ids, *rest = inputs
    sums, program = sums_of(dy, ids, table.shape[0]), fused_program(attrs, "program")
    is_dense = all([x.is_dense for x in (table, *rest, *outputs)])
    if sums is None or not is_dense or not is_by_elements(program):
        return None
    moved_bytes = (1.0 + 2 * len(outputs)) * dy.type.size_bytes
    own_ns = gpu.call_ns + gpu.bytes_ns(moved_bytes)
    needs = KernelNeeds(
        size_bytes(_pieces(sums, table.type)),
        tuple(enumerate((0, *range(3, 2 + len(outputs))))),  # the states come after dy and ids
        sums.duration_ns(gpu, dy.dtype.itemsize) + own_ns,
    )

    def bind(inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> LaunchCalls:
        table, dy, ids, *rest = on_device(inputs)
        gradient, picks, *pieces = carve(workspace, _pieces(sums, table.type))
        calls = sums.calls(tuple(pieces), dy, ids, gradient, picks)
        if not table.type.num_elements or not sums.num:
            return calls
        text = _update_text(program)
        num_inputs = len(program.inputs)
        operands = [view.address for view in (table, *rest)]
        skip = operands[num_inputs - 1] if len(operands) >= num_inputs else 0
        # The program reads the gradient there; in this op dy and ids stand in its place.
        operands.insert(GRADIENT, gradient)
        operands[num_inputs:] = [view.address for view in on_device(outputs)]
        threads, parts = block_of(sums.columns)
        block = [0] * words.operand(len(operands))
        block[words.COLUMNS], block[_NUM_PARTS] = sums.columns, parts
        block[_PICKS], block[words.SKIP] = picks, skip
        for position, address in enumerate(operands):
            block[words.operand(position)] = address
        call = RunKernel(text, text.kernels[0], sums.num * parts, threads, tuple(block))
        return (*calls, call)

    return KernelPlan(needs, bind)


def _pieces(sums: RowSums, table: TensorType) -> tuple[Piece, ...]:
    """Return a sum per id, the row that each belongs to, and the scratch of the sums."""
    gradient = Piece((sums.num, sums.columns), numpy_dtype(table.dtype))
    return (gradient, Piece((sums.num,), np.dtype(np.int64)), *sums.pieces)


@functools.lru_cache(maxsize=256)
def _update_text(program: FusedProgram) -> KernelText:
    """Return the kernel of a program: a thread for each element of each entry."""
    num_words = words.operand(len(program.inputs) + len(program.outputs))
    values = Values(program, scheduled_for_device(program).schedule)
    lines = [
        f"typedef struct {{ af_word w[{num_words}]; }} NAME_arguments;",
        *structs(values),
        *scalars_function(values, DIALECT),
        *block("AF_KERNEL NAME(AF_ARGUMENTS(NAME) arguments)", _body(values)),
    ]
    about = "an update of picked rows"
    return KernelText.of("rows", "\n".join(lines) + "\n", ("NAME",), about)


def _body(values: Values) -> list[str]:
    program = values.program
    count, parts = len(program.inputs), f"a[{_NUM_PARTS}].i"
    text = [
        "AF_SHARED(NAME_scalars, s, 1);",
        "const af_word *a = arguments.w;",
        skip_line(),
        f"const int64_t columns = a[{words.COLUMNS}].i;",
        f"const int64_t e = (int64_t)((uint32_t)AF_BLOCK / (uint32_t){parts});",
        f"const int64_t j = (AF_BLOCK - e * {parts}) * AF_NUM_THREADS + AF_THREAD;",
        f"const int64_t r = ((const int64_t *)a[{_PICKS}].p)[e];",
        "if (r < 0) return;",
        "if (AF_THREAD == 0) NAME_get_scalars(a, s); /* for all: powers in double are dear */",
        "AF_BARRIER();",
        "if (j >= columns) return;",
    ]
    scalars = scalar_values(values)
    text += [values.constant_line(v, f"s->v{v}") for v in scalars]
    for v in [v for v in range(count) if v not in scalars]:
        row = "e" if v == GRADIENT else "r"
        text.append(values.constant_line(v, values.element(v, f"{row} * columns + j")))
    computed = [v for v in range(count, program.num_values) if v not in scalars]
    defined = [v for v in computed if values.constant(v) is None]
    text += [values.constant_line(v, values.define(v)) for v in defined]
    for position, v in enumerate(program.outputs):
        value = store(values.dtype(v), values.name(v))
        text.append(f"{values.output(position)}[r * columns + j] = {value};")
    return text
