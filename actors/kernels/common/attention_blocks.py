"""How attention is cut: strips against chunks of scores, for as many heads as scratch holds.

A block of scores is a strip of queries by a chunk of keys; it stays in cache between the calls that
go over it. Scratch grows with the lengths, never with their product, and a causal block that is
wholly hidden is no block. The gradient has the blocks of the forward pass: products of one shape
make of the same operands the same scores to the bit, without which the probabilities of large
scores would be noise.

A bound block is a dozen Python objects, which no plan accounts for: the gradient of 48 heads of
1,024 x 64 would keep 37 MB of them. So blocks are bound once, on scratch: a group of heads copies
its operands there, runs the calls that all groups share, and copies the results from there. Calls
of each group's own save these copies, and no time that a whole step shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from actors.kernels.common import kernel
from actors.kernels.common.kernel import (
    CALLS_PER_PRODUCT,
    Attrs,
    BytePass,
    MatrixProduct,
    Operands,
    Work,
    flag,
    item_weight,
)
from actors.machine.protocol import Array, Launch
from compiler.contract.types import DType

GROUP_BYTES = 5 << 19
"""Scratch of the heads that are computed at once.

With 1 MiB the gradient of 48 heads of 256 x 64 takes 18 % longer, with 4 MiB 8 % less: but a small
model would notice that scratch. Other shapes change by 3 %.
"""

STRIPS = (32, 128)
"""The shortest and the longest strip: more rows are fewer calls, fewer rows hide more blocks."""

CHUNKS = (64, 256)
"""The shortest chunk, and the longest where strips are not at their longest."""

LONG = 1024
"""Strips of longer axes are so many that their chunks are four strips long: views stay few."""

ONE_THREAD = 64 * 64 * 64
"""OpenBLAS computes products up to about this size on the calling thread.

Above it each call waits for the other threads, which on a busy machine takes longer than the block:
beside other programs on two cores, 12 heads of 1,024 x 64 took 13 ms forward with blocks of 64 x 64
and 50 ms with 64 x 256; alone on one thread, 13 ms with either.
"""


ROW_FLOATS = (DType.FLOAT32, DType.FLOAT64)


class Shaped(Protocol):
    """An operand or array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extents."""


@dataclass(frozen=True, slots=True)
class BlockExtents:
    """Extents of a call: `heads` of [rows, width] against [columns, width] and [columns, out].

    `is_masked`: a mask comes after the other inputs. `is_dropped`: seed and step come next;
    `is_numbered`: and last the number of the first score of each head.
    """

    heads: int
    rows: int
    columns: int
    width: int
    out: int
    causal: bool
    is_masked: bool = False
    is_dropped: bool = False
    is_numbered: bool = False

    @property
    def offset(self) -> int:
        """Row i sees the columns up to i + offset when causal."""
        return max(self.columns - self.rows, 0)

    def visible(self, row: int) -> int:
        """Return how many columns a row sees."""
        return min(row + self.offset + 1, self.columns) if self.causal else self.columns

    @property
    def num_hidden(self) -> int:
        """How many scores of a head a causal mask hides."""
        both = min(self.rows, self.columns)
        return both * (both - 1) // 2 if self.causal else 0

    @property
    def blocks(self) -> tuple[int, int]:
        """The extents of strips of rows and of chunks of columns, which may exceed those there."""
        return block_extents(self.rows, max(self.width, self.out))

    @property
    def is_one_strip(self) -> bool:
        """Whether one strip has all rows."""
        return self.blocks[0] >= self.rows

    def strips(self) -> Iterator[tuple[range, tuple[range, ...]]]:
        """Yield strips of rows, each with the chunks of columns that it sees."""
        strip, chunk = self.blocks
        for rows in _cut(range(self.rows), strip):
            yield rows, _cut(range(self.visible(rows.stop - 1)), chunk)


def extents_of(attrs: Attrs, inputs: Sequence[Shaped], first: int = 0) -> BlockExtents:
    """Return the extents of a call from its inputs, of which q, k and v begin at `first`."""
    q, k, v = [x.shape for x in inputs[first : first + 3]]
    is_numbered = bool(attrs.get("numbered", False))
    # 0: none, 1: mask, 2: seed and step, 3: all. A gradient has dy, y, lse and tail, too.
    num_extras = len(inputs) - (7 if first else 3) - is_numbered
    return BlockExtents(
        *(math.prod(q[:-2]), q[-2], k[-2], q[-1], v[-1], flag(attrs, "causal")),
        is_masked=num_extras % 2 == 1,
        is_dropped=num_extras > 1,
        is_numbered=is_numbered,
    )


def block_extents(length: int, width: int) -> tuple[int, int]:
    """Return the extents of strips and chunks when an axis of this length is cut into strips.

    A strip is a sixteenth of it, within bounds: a causal mask then hides nearly half of the blocks,
    and the bound views of a head stay few. `width` is that of the rows multiplied.
    """
    strip = min(max(length // 16, STRIPS[0]), STRIPS[1])
    if length > LONG:
        return strip, 4 * strip
    return strip, min(max(ONE_THREAD // (strip * max(width, 1)), CHUNKS[0]), CHUNKS[1])


def heads_per_group(e: BlockExtents, head_bytes: int) -> int:
    """Return how many heads are computed at once when each takes these bytes of scratch."""
    return max(1, min(e.heads, GROUP_BYTES // max(head_bytes, 1)))


def work_of(e: BlockExtents, num_products: int, itemsize: int = 4) -> Work:
    """Return the work of products over the visible scores, with an exponential for each."""
    visible = max(e.rows * e.columns - e.num_hidden, 1)
    keys = -(-visible // max(e.rows, 1))
    count = e.heads * num_products * item_weight(itemsize)
    products = (MatrixProduct(count, max(e.rows, 1), keys, (e.width + e.out) // 2),)
    size = float(itemsize * e.heads * visible)
    return Work(1.0, 0.0, ((BytePass.SCORE, size),), products)


def block_work(e: BlockExtents, group: int, num_products: int, itemsize: int) -> Work:
    """Return the same of numpy, whose calls go block by block, with the copies of operands."""
    work, num_blocks = work_of(e, num_products, itemsize), 0
    for _, chunks in e.strips():
        num_blocks += len(chunks)
    copied = e.heads * (e.rows + e.columns) * (e.width + e.out) * itemsize
    (_, size), *_ = work.passes
    return replace(
        work,
        calls=float(-(-e.heads // group) * num_blocks * (3 + num_products) * CALLS_PER_PRODUCT),
        loops=2.0 * e.heads * e.rows,
        passes=((BytePass.EXP, size), (BytePass.PLAIN, size), (BytePass.STRIDED, float(copied))),
    )


def are_row_floats(operands: Operands) -> bool:
    """Return whether all operands have one type that BLAS sums."""
    dtype = operands[0].type.dtype
    return dtype in ROW_FLOATS and all(operand.type.dtype is dtype for operand in operands)


def as_slice(positions: range) -> slice:
    """Return consecutive positions as a slice."""
    return slice(positions.start, positions.stop)


def fill_mask(
    mask: Array, ramp: Array, seen: float = np.inf, hidden: float = -np.inf
) -> tuple[Launch, ...]:
    """Return the calls that write the mask: `seen` up to the diagonal, `hidden` to the right of it.

    Element (i, j) depends on j - i only: the mask is a window on a vector.
    """
    n, item = len(mask), mask.itemsize
    if n == 0:
        return ()
    # Element (i, j) is ramp[n - 1 - i + j]: one step back per row.
    window = np.lib.stride_tricks.as_strided(ramp[n - 1 :], (n, n), (-item, item))
    return (
        partial(ramp[:n].fill, seen),
        partial(ramp[n:].fill, hidden),
        partial(np.copyto, mask, window),
    )


def hide(
    e: BlockExtents, rows: range, columns: range, scores: Array, mask: Array
) -> tuple[Launch, ...]:
    """Return the call that hides what a block must not see; fmin with -inf hides even a NaN.

    Rows below the corner see all of the block, and columns left of it are seen by all rows.
    """
    corner = _corner(e, rows, columns, scores, mask)
    return () if corner is None else (partial(np.fmin, *corner, out=corner[0]),)


def clear(
    e: BlockExtents, rows: range, columns: range, scores: Array, bits: Array
) -> tuple[Launch, ...]:
    """Return the call that makes 0, and not a product with it, of what a block must not see.

    `bits` is a mask of integers as wide as the scores, of -1 and 0.
    """
    corner = _corner(e, rows, columns, scores.view(bits.dtype), bits)
    return () if corner is None else (partial(np.bitwise_and, *corner, out=corner[0]),)


def _corner(
    e: BlockExtents, rows: range, columns: range, scores: Array, mask: Array
) -> tuple[Array, Array] | None:
    """Return the part of a block that the diagonal crosses, and the part of the mask for it."""
    # Rows from here on see every column of the block.
    bottom = min(rows.stop, columns.stop - 1 - e.offset)
    # Columns up to here are seen by every row of the block.
    left = max(columns.start, rows.start + e.offset)
    if not e.causal or bottom <= rows.start:
        return None
    corner = scores[..., : bottom - rows.start, left - columns.start :]
    start = left - e.offset - rows.start
    return corner, mask[: bottom - rows.start, start : start + columns.stop - left]


def collect(
    compute: Callable[..., Any],
    target: Array,
    part: Array,
    combine: np.ufunc = np.add,
    *,
    is_first: bool,
) -> tuple[Launch, ...]:
    """Return the calls that write a result to `target` first, and combine further ones with it.

    `part` is a vector of scratch for a further result.
    """
    if is_first:
        return (partial(compute, out=target),)
    piece = kernel.window(part, target.shape)
    return partial(compute, out=piece), partial(combine, target, piece, out=target)


def _cut(whole: range, extent: int) -> tuple[range, ...]:
    return tuple([whole[i : i + extent] for i in range(0, len(whole), extent)])
