"""A matrix product as libraries take it, and its cut into chunks.

`gemm_of` brings a call of `matmul` into one form: rows, columns and the inner extent, a batch, and
the strides of three matrices whose output has adjacent columns. An output that lies transposed is
computed as (b^T a^T)^T; a batch with one matrix b joins the rows. A layout that no library reads
has no such form, and numpy's kernel takes the call.

`chunks_of` cuts by shape alone, never by the number of threads and never along k: every element of
the output is one sum made by one call, so that results do not depend on who runs which chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from actors.kernels.common.kernel import Operand, is_dense
from actors.machine.protocol import Array
from compiler.contract.types import DType

CHUNK_FLOPS = 4_000_000
"""A chunk of float32 has no less: some 40 us on one core. Narrower types are multiplied faster."""

ENOUGH_CHUNKS, MAX_CHUNKS = 16, 64
"""Beyond enough, a chunk has `LARGE_FLOPS`, some 2 ms; and there are never more than the second."""

LARGE_FLOPS = 200_000_000

MIN_ROWS = 64
"""Rows of a chunk under `ThreadCut.ROWS`, at least: with 32 a library is some 10 % slower."""

BLOCK_ROWS = 256
"""The same under `ThreadCut.BLOCKS`."""

TILE_ROWS, TILE_COLUMNS = 128, 128
"""Rows and columns of a tile, at least: with 64 columns a library is some 10 % slower."""

COLUMN_BYTES = 512 << 10
"""Bytes of b that a chunk under `ThreadCut.COLUMNS` reads, about: some 50 us on one core."""

ROW_STEP = 16
"""Chunks of rows begin at multiples of it."""

_COLUMN_STEP = 64
_FULL_ITEMSIZE = 4


class ThreadCut(Enum):
    """How a matrix is cut into chunks.

    Rows leave the libraries the dense matrices that they like best, and an epilogue its whole rows;
    blocks are many of them, which a library can go over in the order that its caches like; halves
    are two chunks of them, for matrices with few rows; tiles make enough chunks of a matrix
    with few rows, and an epilogue then waits for all of them, as it does for columns of all rows,
    which share the bytes of b where reading them takes the time. Which is faster depends on the
    shape.
    """

    ROWS = "rows"
    BLOCKS = "blocks"
    HALVES = "halves"
    TILES = "tiles"
    COLUMNS = "columns"

    @property
    def has_whole_rows(self) -> bool:
        """Whether a chunk has all columns of its rows."""
        return self not in (ThreadCut.TILES, ThreadCut.COLUMNS)


@dataclass(frozen=True, slots=True)
class MatrixView:
    """A tensor's element type, extents and strides in elements."""

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_dense(self) -> bool:
        """Whether the elements are those of a row-major copy."""
        return is_dense(self.shape, self.strides, 1)


@dataclass(frozen=True, slots=True)
class Side:
    """The strides of one matrix of a product, in elements: of a row, a column, and the batch."""

    row: int
    column: int
    batch: tuple[int, ...] = ()

    @property
    def transposed(self) -> Side:
        """Rows and columns exchanged."""
        return replace(self, row=self.column, column=self.row)

    def lies(self, rows: int, columns: int) -> str:
        """Return how a matrix lies, in a word; a window has elements of others between its own."""
        is_across = self.column != 1
        is_dense = self.column == rows if is_across else self.row == columns
        return f"{'dense' if is_dense else 'window'}{' across' if is_across else ''}"


@dataclass(frozen=True, slots=True)
class Gemm:
    """out[m, n] = a[m, k] b[k, n] for each place of a batch.

    a and b have adjacent rows or adjacent columns, `out` has adjacent columns. `is_swapped`: a is
    the second operand of the call and b the first. `adds`: the product is added to what `out` has.
    """

    dtype: DType
    out_dtype: DType
    m: int
    n: int
    k: int
    batch: tuple[int, ...]
    a: Side
    b: Side
    out: Side
    is_swapped: bool
    adds: bool = False

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * math.prod(self.batch) * self.m * self.n * self.k

    @property
    def key(self) -> str:
        """What decides how fast a library is: types, extents, and how the matrices lie."""
        lies = [
            side.lies(*extents)
            for side, extents in (
                (self.a, (self.m, self.k)),
                (self.b, (self.k, self.n)),
                (self.out, (self.m, self.n)),
            )
        ]
        batch = math.prod(self.batch)
        types = f"{self.dtype}>{self.out_dtype}{'+' if self.adds else ''}"
        return f"{types} {batch}x{self.m}x{self.n}x{self.k} {' '.join(lies)}"


@dataclass(frozen=True, slots=True)
class ProductCall:
    """One product of a chunk: its rows and columns, and where its matrices begin, in elements."""

    row: int
    rows: int
    columns: int
    a: int
    b: int
    out: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Calls that one thread makes in order; of a product without a batch, `rows` from `row`."""

    calls: tuple[ProductCall, ...]
    row: int
    rows: int


def view_of(operand: Operand) -> MatrixView | None:
    """Return the view of an operand of a plan; None where a stride is no multiple of an element."""
    return _view(operand.type.dtype, operand.shape, operand.strides_bytes)


def view_of_array(array: Array) -> MatrixView | None:
    """Return the view of a bound array; uint16 holds bfloat16."""
    name = np.dtype(array.dtype).name
    dtype = DType.BFLOAT16 if name == "uint16" else DType(name)
    return _view(dtype, array.shape, array.strides)


def views_of(operands: Sequence[Operand | Array]) -> tuple[MatrixView, ...] | None:
    """Return the views of all operands of a call; None where one has none."""
    views = [view_of(x) if isinstance(x, Operand) else view_of_array(x) for x in operands]
    present = tuple([view for view in views if view is not None])
    return present if len(present) == len(views) else None


def _view(dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...]) -> MatrixView | None:
    item = dtype.itemsize
    if any([step % item for step in strides]):
        return None
    return MatrixView(dtype, shape, tuple([step // item for step in strides]))


def gemm_of(a: MatrixView, b: MatrixView, out: MatrixView) -> Gemm | None:
    """Return the form of out = a @ b; None for an empty product or a layout without one."""
    if a.dtype is not b.dtype or 0 in (*a.shape, *b.shape, *out.shape):
        return None
    batch, m, n, k = out.shape[:-2], out.shape[-2], out.shape[-1], a.shape[-1]
    sides = [_side(view, len(batch)) for view in (a, b, out)]
    out_side = _plain(sides[2], m, n)
    # Libraries want out by rows: out^T = b^T a^T has it so where out lies by columns.
    is_swapped = out_side.column != 1
    if is_swapped:
        sides = [sides[1].transposed, sides[0].transposed, sides[2].transposed]
        m, n = n, m
        out_side = _plain(sides[2], m, n)
    gemm = Gemm(
        a.dtype, out.dtype, m, n, k, batch,
        _plain(sides[0], m, k), _plain(sides[1], k, n), out_side, is_swapped,
    )  # fmt: skip
    gemm = _joined(_without_ones(gemm))
    return gemm if _is_readable(gemm) else None


def _side(view: MatrixView, rank: int) -> Side:
    """Return the strides of a tensor whose leading axes are broadcast to `rank` axes."""
    batch = [0 if n == 1 else s for n, s in zip(view.shape[:-2], view.strides[:-2], strict=True)]
    return Side(view.strides[-2], view.strides[-1], (0,) * (rank - len(batch)) + tuple(batch))


def _plain(side: Side, rows: int, columns: int) -> Side:
    """Give axes of extent 1 strides that suit the other axis: their own mean nothing."""
    if columns == 1:
        side = replace(side, column=1)
    if rows == 1:
        side = replace(side, row=columns if side.column == 1 else 1)
    return side


def _without_ones(gemm: Gemm) -> Gemm:
    axes = [axis for axis, extent in enumerate(gemm.batch) if extent != 1]
    return _with_batch(gemm, axes, gemm)


def _with_batch(gemm: Gemm, axes: Sequence[int], source: Gemm) -> Gemm:
    """Return a product with some of the batch axes of another one."""
    sides = {
        name: replace(side, batch=tuple([other.batch[axis] for axis in axes]))
        for name, side, other in (
            ("a", gemm.a, source.a),
            ("b", gemm.b, source.b),
            ("out", gemm.out, source.out),
        )
    }
    batch = tuple([source.batch[axis] for axis in axes])
    return replace(gemm, batch=batch, a=sides["a"], b=sides["b"], out=sides["out"])


def _joined(gemm: Gemm) -> Gemm:
    """Join inner batch axes with the rows while b is the same along them and strides allow."""
    while gemm.batch and gemm.b.batch[-1] == 0 and gemm.a.column == 1:
        extent, a, out = gemm.batch[-1], gemm.a, gemm.out
        if gemm.m == 1:
            if a.batch[-1] < gemm.k:  # rows that overlap, as of a repeated one, are no matrix
                return gemm
            a, out = replace(a, row=a.batch[-1]), replace(out, row=out.batch[-1])
        # The next matrix must begin where a further row would: then both are one taller matrix.
        if (a.batch[-1], out.batch[-1]) != (a.row * gemm.m, out.row * gemm.m):
            return gemm
        joined = replace(gemm, m=gemm.m * extent, a=a, out=out)
        gemm = _with_batch(joined, range(len(gemm.batch) - 1), gemm)
    return gemm


def _is_readable(gemm: Gemm) -> bool:
    m, n, k = gemm.m, gemm.n, gemm.k
    return (
        (_is_matrix(gemm.a, m, k) or _is_matrix(gemm.a.transposed, k, m))
        and (_is_matrix(gemm.b, k, n) or _is_matrix(gemm.b.transposed, n, k))
        and _is_matrix(gemm.out, m, n)
    )


def _is_matrix(side: Side, rows: int, columns: int) -> bool:
    # Rows that overlap, as of a sliding window, are no matrix to a library.
    return side.column == 1 and (rows == 1 or side.row >= columns)


def chunks_of(gemm: Gemm, cut: ThreadCut) -> tuple[Chunk, ...]:
    """Return the chunks of a product: pieces of a matrix, or runs of a batch."""
    num_chunks, places = _num_wanted(gemm, cut), _places(gemm)
    if len(places) >= num_chunks:
        per_chunk = -(-len(places) // num_chunks)
        calls = [_call(gemm, place, 0, 0, gemm.m, gemm.n) for place in places]
        runs = [tuple(calls[i : i + per_chunk]) for i in range(0, len(calls), per_chunk)]
        return tuple([Chunk(run, 0, gemm.m) for run in runs])
    rows, columns = _piece(gemm, -(-num_chunks // len(places)), cut)
    pieces = [
        _call(gemm, place, row, column, min(rows, gemm.m - row), min(columns, gemm.n - column))
        for place in places
        for row in range(0, gemm.m, rows)
        for column in range(0, gemm.n, columns)
    ]
    return tuple([Chunk((call,), call.row, call.rows) for call in pieces])


def _num_wanted(gemm: Gemm, cut: ThreadCut) -> int:
    if cut is ThreadCut.COLUMNS:
        return max(1, min(gemm.n * gemm.k * gemm.dtype.itemsize // COLUMN_BYTES, MAX_CHUNKS))
    # Types half as wide are multiplied about twice as fast, so a chunk of them has more.
    flops = gemm.flops * gemm.dtype.itemsize // _FULL_ITEMSIZE
    few = min(flops // CHUNK_FLOPS, ENOUGH_CHUNKS)
    return max(1, few, min(flops // LARGE_FLOPS, MAX_CHUNKS))


def _piece(gemm: Gemm, wanted: int, cut: ThreadCut) -> tuple[int, int]:
    """Return rows and columns of a piece, so that a matrix has about `wanted`."""
    if cut is ThreadCut.COLUMNS:
        return gemm.m, _up_to(-(-gemm.n // wanted), TILE_COLUMNS)
    if cut.has_whole_rows:
        least = BLOCK_ROWS if cut is ThreadCut.BLOCKS else MIN_ROWS
        by_rows = min(wanted, -(-gemm.m // least), 2 if cut is ThreadCut.HALVES else wanted)
        return _up_to(-(-gemm.m // by_rows), ROW_STEP), gemm.n
    by_rows = min(wanted, -(-gemm.m // TILE_ROWS))
    by_columns = max(1, min(-(-wanted // by_rows), gemm.n // TILE_COLUMNS))
    rows = _up_to(-(-gemm.m // by_rows), ROW_STEP)
    return rows, _up_to(-(-gemm.n // by_columns), _COLUMN_STEP)


def _up_to(extent: int, step: int) -> int:
    return -(-extent // step) * step


def _places(gemm: Gemm) -> list[tuple[int, int, int]]:
    """Return where a, b and out begin at every place of the batch."""
    # [axis][place]: the indices of every place, which the steps turn into offsets by one product.
    index = np.indices(gemm.batch).reshape(len(gemm.batch), math.prod(gemm.batch))
    sides = (gemm.a, gemm.b, gemm.out)
    steps = np.array([side.batch for side in sides], np.int64).reshape(3, len(gemm.batch))
    return [(a, b, out) for a, b, out in (steps @ index).T.tolist()]


def _call(
    gemm: Gemm, place: tuple[int, int, int], row: int, column: int, rows: int, columns: int
) -> ProductCall:
    return ProductCall(
        row,
        rows,
        columns,
        place[0] + row * gemm.a.row,
        place[1] + column * gemm.b.column,
        place[2] + row * gemm.out.row + column,
    )
