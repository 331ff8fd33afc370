"""Sums of the rows of dy with equal ids: the ids are sorted, and their runs added up in order.

What the gradient of a table and the update of its rows have in common; so both have the same bits.
A sum is made in float64 and rounded once.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from actors.kernels.axes import MAX_OUTER, walk
from actors.kernels.cuda.calls import DeviceCalls, KernelText, RunKernel, StatusWord, Word
from actors.kernels.cuda.gpu import Gpu
from actors.kernels.cuda.indices import are_ids, ids_words, places_words, status_of
from actors.kernels.cuda.sort import sort_calls, sort_pieces
from actors.kernels.cuda.views import DeviceView
from actors.kernels.kernel import Operand
from actors.kernels.scratch import Piece
from compiler.types import DType

CHUNK = 64
"""As in row_sums.cuh."""

BLOCK = 256
_MAX_THREADS = 256
_WARP = 32
_KEYS_STATUS = 17
"""The word of NAME_keys_arguments in embedding.cuh that holds the status cell."""

_ROWS = {
    DType.FLOAT32: ("float", "(double)(x)", "(float)(x)"),
    DType.FLOAT64: ("double", "(x)", "(x)"),
    DType.BFLOAT16: ("uint16_t", "(double)af_from_bf16(x)", "af_to_bf16((float)(x))"),
    DType.FLOAT16: ("uint16_t", "(double)af_from_f16(x)", "af_to_f16((float)(x))"),
}
"""By type of dy: the type of an element, a double of one, one of a double."""


@dataclass(frozen=True, slots=True)
class RowSums:
    """Sums of `num` rows of `columns` elements by ids below `rows`; `axes` as in `bad_index`."""

    num: int
    rows: int
    columns: int
    axes: tuple[int, ...] = ()

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Scratch: that of the sort, and the sums of pieces of runs."""
        partials = Piece((self._num_chunks, 2, self.columns), np.dtype(np.float64))
        return (*sort_pieces(self.num), partials)

    def duration_ns(self, gpu: Gpu, itemsize: int) -> float:
        """Return an estimate: rows are read once, and so are sums of pieces; the sort is extra."""
        digits = -(-self.rows.bit_length() // 8)
        moved = self.num * self.columns * itemsize + 2 * self.pieces[-1].size_bytes
        return 9 * gpu.call_ns + gpu.bytes_ns(moved) + digits * gpu.bytes_ns(32 * self.num)

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
        threads, parts = block_of(self.columns)
        words: list[Word] = [
            *(keys, places, dy.address),
            *places_words(dy.shape[:-1], dy.strides_bytes[:-1]),
            *(dy.strides_bytes[-1], out, picks, pieces[-1]),
            *(self.num, self.rows, self.columns, parts, int(picks != 0)),
        ]
        text, blocks = _text(dy.dtype), self._num_chunks * parts
        sums = [RunKernel(text, name, blocks, threads, tuple(words)) for name in text.kernels]
        return (check, *sort, *sums[: 1 if self._num_chunks == 1 else 2])

    def _keys(self, keys: int, ids: DeviceView) -> RunKernel:
        text = text_of_ids()
        words = (*ids_words(ids), keys, 0, self.rows)
        status: StatusWord = status_of(_KEYS_STATUS, "id", ids.type, self.rows, self.axes)
        blocks = -(-self.num // BLOCK)
        return RunKernel(text, text.kernels[1], blocks, BLOCK, words, status=status)

    @property
    def _num_chunks(self) -> int:
        return -(-self.num // CHUNK)


def sums_of(dy: Operand, ids: Operand, rows: int, axes: tuple[int, ...] = ()) -> RowSums | None:
    """Return the sums of a call; None for what kernels do not take."""
    walked = walk(dy.shape[:-1], (dy.strides_bytes[:-1],), in_order=True)
    is_taken = dy.type.dtype in _ROWS and len(walked) <= MAX_OUTER and rows < (1 << 32) - 1
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
    text = (Path(__file__).parent / "embedding.cuh").read_text(encoding="utf-8")
    names = ("NAME_gather", "NAME_keys", "NAME_last")
    return KernelText.of("embedding", text, names, "rows by id", has_exchanges=False)


@functools.cache
def _text(dtype: DType) -> KernelText:
    row, wide, narrow = _ROWS[dtype]
    head = f"#define NAME_ROW {row}\n#define NAME_FROM(x) {wide}\n#define NAME_TO(x) {narrow}\n"
    text = head + (Path(__file__).parent / "row_sums.cuh").read_text(encoding="utf-8")
    about = f"sums of rows of {dtype} by id"
    return KernelText.of("sums", text, ("NAME_chunks", "NAME_joins"), about, has_exchanges=False)
