"""What a call of attention may have besides q, k and v: a mask that is added, and dropout.

Blocks are bound once for all groups of heads (see `attention_blocks`): so what these read is looked
up when they run. `begin` says whose blocks run next.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from actors.kernels import scratch
from actors.kernels.attributes import integer, number
from actors.kernels.interpret.attention_blocks import BlockExtents, as_slice
from actors.kernels.interpret.random import rewound_generator
from actors.kernels.kernel import Attrs
from actors.kernels.scratch import Piece
from actors.protocol import Array, Arrays, Launch


def extra_pieces(
    e: BlockExtents, rows: int, columns: int, group: int, dtype: np.dtype[np.generic]
) -> tuple[Piece, Piece]:
    """Return scratch for a block of weights that are kept, and for the numbers of a row."""
    count = int(e.is_dropped)
    line = Piece((count * (columns + 8),), np.dtype(np.float32))
    return Piece((count * group * rows * columns,), dtype), line


class AttentionExtras:
    """The extras of one launch; `more` are the inputs that have them, the rest is scratch."""

    def __init__(
        self, e: BlockExtents, attrs: Attrs, more: Arrays, kept: Array, line: Array
    ) -> None:
        self.extents, self._kept, self._line = e, kept, line
        self._mask = more[0] if e.is_masked else None
        self._now: Arrays = ()
        self._first = self._next = 0
        if e.is_dropped:
            p = number(attrs, "p")
            self._least = np.array(math.ceil(p * 2**24) / 2**24, np.float32)
            self._factor = np.array(1 / (1 - p), kept.dtype)
            seed, step, *firsts = more[e.is_masked :]
            self._firsts = [first.reshape(-1) for first in firsts]
            self._rewind, self._generator = rewound_generator(seed, step, integer(attrs, "key"))

    def masks(self, shape: tuple[int, ...]) -> Arrays:
        """Return the mask in the shape of all scores, where there is one; `shape` is that of q."""
        if self._mask is None:
            return ()
        return (np.broadcast_to(self._mask, (*shape[:-1], self.extents.columns)),)

    def begin(self, shape: tuple[int, ...], masks: Arrays) -> Launch:
        """Return the call that comes before the blocks of the next heads; q of them has `shape`."""
        first = self._next
        self._next += math.prod(shape[:-2])

        def launch() -> None:
            self._now, self._first = masks, first

        return launch

    def masked(self, rows: range, columns: range, scores: Array) -> list[Launch]:
        """Return the call that adds the mask to a block."""
        if self._mask is None:
            return []
        i, j = as_slice(rows), as_slice(columns)

        def launch() -> None:
            np.add(scores, self._now[0][..., i, j], out=scores)

        return [launch]

    def floored(self, x: Array, least: float) -> list[Launch]:
        """Return the call that bounds what a row that sees nothing has: no maximum, and no sum."""
        if self._mask is None:
            return []
        return [partial(np.maximum, x, np.array(least, x.dtype), out=x)]

    def dropped(self, rows: range, columns: range, *blocks: Array) -> list[Launch]:
        """Return the calls that draw for a block, and one per array that drops its weights."""
        if not self.extents.is_dropped:
            return []
        kept = scratch.window(self._kept, blocks[0].shape)
        draw = partial(self._draw, kept.reshape(-1, *kept.shape[-2:]), rows, columns)
        return [draw, *[partial(np.multiply, x, kept, out=x) for x in blocks]]

    def _draw(self, kept: Array, rows: range, columns: range) -> None:
        """Write 0 or 1 / (1 - p) for each weight of a block [heads, rows, columns]."""
        e, count = self.extents, len(columns)
        for head, block in enumerate(kept, self._first):
            for row, line in zip(rows, block, strict=True):
                first = int(self._firsts[0][head]) if e.is_numbered else head * e.rows * e.columns
                element = first + row * e.columns + columns.start
                skipped = element % 8
                self._rewind(element - skipped)
                drawn: Any = self._line[: skipped + count]
                self._generator.random(dtype=np.float32, out=drawn)
                np.greater_equal(drawn[skipped:], self._least, out=line, casting="unsafe")
        np.multiply(kept, self._factor, out=kept)
