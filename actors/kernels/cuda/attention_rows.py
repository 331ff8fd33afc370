"""The kernels of attention between its products (`attention.cuh`), for the heads of a chunk."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from actors.kernels.common.strides import MAX_OUTER, Axis, collapse_axes
from actors.kernels.cuda.calls import DeviceCalls, KernelText, RunKernel, Word, file_text
from actors.kernels.cuda.kernel import DeviceView, Gpu
from actors.kernels.program.values import conversions, storage_of, type_of
from actors.machine.protocol import Array
from compiler.contract.types import DType

_KERNELS = ("finite", "probabilities", "restored", "slopes", "rounded", "kept")
"""The last one only where weights are dropped."""

_THREADS = 256
_WARP = 32
_SHORT_ROWS = 4
"""Rows of a block where a warp has one."""

_HELD = 32
"""As in attention.cuh."""

_TILE_ROWS = 64
"""Rows of keys or values that a block copies."""

_RESTORED_ROWS = 64
_WAVES = 8


@dataclass(frozen=True, slots=True)
class Seen:
    """What a chunk is: its rows, how many keys the first of them sees, and what dropout keeps."""

    rows: range
    count: int
    kept: DeviceView | None = None


def real_of(dtype: DType) -> DType:
    """Return the type that scores of a type have."""
    return DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32


def have_heads(operands: Sequence[Array]) -> bool:
    """Whether the kernels can walk over the heads of operands; the first has matrices."""
    shape = operands[0].shape[:-2]
    return len(_heads_of(shape, operands)) <= MAX_OUTER


def _heads_of(shape: tuple[int, ...], operands: Sequence[Array]) -> tuple[Axis, ...]:
    return collapse_axes(shape, [x.strides[: len(shape)] for x in operands], in_order=True)


@dataclass(frozen=True, slots=True)
class DropoutPlaces:
    """Where one call of attention draws: its weights are `num_rows` x `num_columns` per head.

    `firsts` is the address of the numbers of each head's first weight, or 0.
    """

    seed: int
    step: int
    key: int
    p: float
    num_rows: int
    num_columns: int
    firsts: int = 0

    @property
    def factor(self) -> float:
        """What a weight that is kept is multiplied with."""
        return 1.0 / (1.0 - self.p)


class AttentionRows:
    """Calls for a group of heads.

    Args:
        operands: All tensors of the group, with the axes `batch` first.
        mask: [*batch, rows, columns] of all rows, where there is one.
        dropout: Where weights are dropped; then each chunk has `kept` drawn first.
    """

    def __init__(
        self,
        gpu: Gpu,
        dtype: DType,
        operands: Sequence[Array],
        batch: tuple[int, ...],
        mask: Array | None = None,
        dropout: DropoutPlaces | None = None,
    ) -> None:
        self._mask, self._dropout = mask, dropout
        operands = operands if mask is None else (*operands, mask)
        self.count = math.prod(batch)
        self._gpu = gpu
        self._dtype = dtype
        self._batch = batch
        self._axes = _heads_of(batch, operands)
        self._extents = [axis.extent for axis in self._axes]
        self._strides = [x.strides[: len(batch)] for x in operands]

    def num_tiles(self, num_rows: int) -> int:
        """Return in how many tiles the rows of a head are copied."""
        return max(1, -(-num_rows // _TILE_ROWS))

    def finite(self, x: Array, copy: DeviceView, flags: DeviceView) -> DeviceCalls:
        """Copy rows densely, with 0 for what is not finite; flags say which tiles have any."""
        *_, rows, width = x.shape
        words = (*self._heads(), *self._tensor(x), copy.address, flags.address, rows, width)
        return self._run("finite", self.count * self.num_tiles(rows), (*words, _TILE_ROWS))

    def kept(self, made: DeviceView, first_head: int, first_row: int) -> DeviceCalls:
        """Draw a byte for each score of a chunk, 1 where its weight is kept."""
        d = self._dropout
        if d is None:
            return ()
        *_, rows, columns = made.shape
        # A thread draws eight at a time: one counter of the generator.
        count = self.count * rows * -(-columns // 8)
        random_words = (made.address, d.seed, d.step, d.firsts, d.key, math.ceil(d.p * 2**24))
        places = (first_head, first_row, d.num_rows, d.num_columns, rows, columns, count)
        blocks = min(-(-count // _THREADS), self._gpu.num_sms * _WAVES)
        return self._run("kept", blocks, (*random_words, *places))

    def probabilities(
        self,
        scores: DeviceView,
        made: DeviceView,
        statistics: tuple[Array, Array],
        seen: Seen,
        scale: float,
    ) -> DeviceCalls:
        """Make probabilities of scores, and lse and tail."""
        *_, rows, columns = scores.shape
        of_rows = [word for x in statistics for word in self._tensor(x[..., None])]
        words = (*self._heads(), *of_rows, scores.address, made.address)
        words = (*words, rows, columns, seen.count)
        return self._run_rows("probabilities", words, (rows, columns), scale, seen)

    def restored(
        self, v: Array, y: Array, p: DeviceView, flags: DeviceView, seen: int
    ) -> DeviceCalls:
        """Add to y what `finite` left out of values, where it is seen."""
        *_, rows, columns = p.shape
        words = (
            *(*self._heads(), *self._tensor(v), *self._tensor(y), p.address, flags.address),
            *(flags.shape[-1], rows, columns, seen, y.shape[-1], _RESTORED_ROWS),
        )
        return self._run("restored", self.count * -(-rows // _RESTORED_ROWS), words)

    def slopes(
        self,
        blocks: tuple[DeviceView, DeviceView, DeviceView, DeviceView],
        rows_of: tuple[Array, Array, Array, Array],
        seen: Seen,
        scale: float,
    ) -> DeviceCalls:
        """Make probabilities and gradients of scores.

        `blocks`: scores, dy vT, and where those go; `rows_of`: dy, y, lse and tail.
        """
        dy, y, *statistics = rows_of
        of_rows = [dy, y, *[x[..., None] for x in statistics]]
        *_, rows, columns = blocks[0].shape
        words = (
            *(*self._heads(), *[word for x in of_rows for word in self._tensor(x)]),
            *[block.address for block in blocks],
            *(rows, columns, seen.count, y.shape[-1]),
        )
        return self._run_rows("slopes", words, (rows, columns), scale, seen)

    def rounded(self, sums: DeviceView, out: DeviceView) -> DeviceCalls:
        """Bring dense sums to their type."""
        count = out.type.num_elements
        blocks = min(-(-count // _THREADS), self._gpu.num_sms * _WAVES)
        return self._run("rounded", blocks, (sums.address, out.address, count))

    def _heads(self) -> list[Word]:
        return [len(self._extents), *_padded(self._extents)]

    def _tensor(self, x: Array) -> list[Word]:
        """Return a tensor [heads, rows, columns] as the kernels have it."""
        batch_strides = x.strides[: len(self._batch)]
        steps = collapse_axes(self._batch, [*self._strides, batch_strides], in_order=True)
        return [
            int(x.ctypes.data),
            *x.strides[-2:],
            *_padded([axis.steps[-1] for axis in steps]),
        ]

    def _run_rows(
        self,
        kernel: str,
        words: Sequence[Word],
        shape: tuple[int, int],
        scale: float,
        seen: Seen,
    ) -> DeviceCalls:
        """Give each row of scores a warp, or the threads of a block where it is long."""
        rows, columns = shape
        places = self.count * rows
        # A power of two of threads, each of which holds up to _HELD scores in registers.
        team = min(_THREADS, max(_WARP, 1 << (max(columns - 1, 0) // _HELD).bit_length()))
        threads = _SHORT_ROWS * _WARP if team == _WARP else team
        num_blocks = -(-places // (threads // team))
        more: list[Word] = []
        if self._mask is not None:
            more += self._tensor(self._mask[..., seen.rows.start : seen.rows.stop, :columns])
        if self._dropout is not None and seen.kept is not None:
            more += [seen.kept.address, self._dropout.factor]
        return self._run(kernel, num_blocks, (*words, places, team, scale, *more), threads)

    def _run(
        self, kernel: str, num_blocks: int, words: Sequence[Word], num_threads: int = _THREADS
    ) -> DeviceCalls:
        text = attention_text(self._dtype, self._mask is not None, self._dropout is not None)
        name = text.kernels[_KERNELS.index(kernel)]
        return (RunKernel(text, name, num_blocks, num_threads, tuple(words)),) if num_blocks else ()


def _padded(column: list[int]) -> list[int]:
    return [*column, *[0] * (MAX_OUTER - len(column))]


@functools.cache
def attention_text(dtype: DType, is_masked: bool, is_dropped: bool) -> KernelText:
    """Return the kernels for a type of elements."""
    real = type_of(dtype)
    defined = {
        "T": storage_of(dtype),
        **conversions(dtype, real),
        "REAL": real,
        "EXP(x)": "exp(x)" if real == "double" else "af_expf(x)",
        "LOWEST": "(-1.7976931348623157e308)" if real == "double" else "(-3.402823466e38f)",
        "MASKED": int(is_masked),
        "DROPPED": int(is_dropped),
    }
    kernels = tuple([f"NAME_{kernel}" for kernel in _KERNELS[: 5 + is_dropped]])
    about = f"rows of attention in {dtype.value}"
    return KernelText.of("af_attention", file_text("attention.cuh", defined), kernels, about)
