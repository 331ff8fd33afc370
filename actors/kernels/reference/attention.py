"""Attention, block by block: a score lives as long as its block (see `attention_blocks`).

Exponentials are first taken without subtracting the row's maximum: so sums and products of the
chunks add up as they are, where an online softmax
(Milakov & Gimelshein, 2018; Dao et al., 2022) scales what it has whenever the maximum grows. A
strip with a sum outside of safe bounds, or with NaN, goes over its chunks twice more: once for the
maxima, once with the maxima subtracted. Where a causal strip then still has numbers that are not
finite, it goes over them again and multiplies each query by the values that it sees: a hidden value
has a weight of 0, but 0 * NaN is NaN.

Keys are packed transposed, and scaled on the way: OpenBLAS reads a small transposed right operand
at two thirds of the speed (64 x 64 x 256: 71 against 97 GFLOP/s on one core).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from actors.kernels.common import cost, kernel
from actors.kernels.common.attention_blocks import (
    BlockExtents,
    are_row_floats,
    as_slice,
    block_work,
    collect,
    extents_of,
    fill_mask,
    heads_per_group,
    hide,
)
from actors.kernels.common.kernel import (
    Attrs,
    HostPlan,
    Kernel,
    KernelPlan,
    Operands,
    Piece,
    Workspace,
    in_sequence,
    integer,
    number,
)
from actors.kernels.common.strides import cut
from actors.kernels.reference.fused import rewound_generator
from actors.kernels.reference.reduce import WIDE, row_sums
from actors.machine.protocol import Array, Arrays, Launch

# What a call of attention may have besides q, k and v: a mask that is added, and dropout.
#
# Blocks are bound once for all groups of heads (see `attention_blocks`): so what these read is
# looked up when they run. `begin` says whose blocks run next.


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
        factors = kernel.window(self._kept, blocks[0].shape)
        draw = partial(self._draw, factors.reshape(-1, *factors.shape[-2:]), rows, columns)
        return [draw, *[partial(np.multiply, x, factors, out=x) for x in blocks]]

    def _draw(self, kept: Array, rows: range, columns: range) -> None:
        """Write 0 or 1 / (1 - p) for each weight of a block [heads, rows, columns]."""
        e, count = self.extents, len(columns)
        for head, block in enumerate(kept, self._first):
            for row, line in zip(rows, block, strict=True):
                first = int(self._firsts[0][head]) if e.is_numbered else head * e.rows * e.columns
                element = first + row * e.columns + columns.start
                # The generator can be set to multiples of 8 only: what comes before is drawn and
                # left out.
                num_skipped = element % 8
                self._rewind(element - num_skipped)
                numbers: Any = self._line[: num_skipped + count]
                self._generator.random(dtype=np.float32, out=numbers)
                np.greater_equal(numbers[num_skipped:], self._least, out=line, casting="unsafe")
        # 0 or 1 becomes 0 or 1 / (1 - p) in one pass.
        np.multiply(kept, self._factor, out=kept)


SAFE_SUMS = (2.0**-48, 2.0**48)
"""Sums of exponentials between these need no maxima, unless values above 1e24 make inf of them."""


def _plan_attention(attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan `attention`: attrs scale, causal; with dropout p, key.

    It takes float32 and float64; scratch is a block, and the operands of a group of heads.
    """
    e, q = extents_of(attrs, inputs), inputs[0]
    if not are_row_floats((*inputs[: 3 + e.is_masked], *outputs)):
        return None
    group, pieces = _layout(e, q.dtype)

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        q = inputs[0]
        *fields, factors, line = kernel.carve(workspace, pieces)
        s, extras = _Scratch(*fields), AttentionExtras(e, attrs, inputs[3:], factors, line)
        calls: list[Launch] = [partial(s.ones.fill, 1), *fill_mask(s.mask, s.ramp)]
        scale = np.array(number(attrs, "scale"), q.dtype)
        blocks: dict[tuple[int, ...], Launch] = {}
        operands = (*inputs[:3], *outputs, *extras.masks(q.shape))
        for heads in cut(operands, q.ndim - 2, group):
            calls += [extras.begin(heads[0].shape, heads[6:])]
            calls += _group(extras, s, heads[:6], scale, blocks)
        return in_sequence(calls)

    work = block_work(e, group, 2, q.dtype.itemsize)
    return KernelPlan(cost.needs(inputs, outputs, work, kernel.size_bytes(pieces)), bind)


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Scratch of a launch: mask and ones, then vectors that are cut to the heads and block.

    A strip of `panel` holds queries until they are done with, and then the strip's outputs.
    """

    mask: Array
    ramp: Array
    ones: Array
    extremes: Array
    keys: Array
    panel: Array
    values: Array
    scores: Array
    sums: Array
    largest: Array
    products: Array
    part: Array
    wide_sums: Array
    wide_part: Array


def _layout(e: BlockExtents, dtype: np.dtype[np.generic]) -> tuple[int, tuple[Piece, ...]]:
    """Return the number of heads in a group, and the fields of `_Scratch`."""
    strip, chunk = e.blocks
    r, c = min(strip, e.rows), min(chunk, e.columns)
    per_head = (
        e.width * e.columns,
        e.rows * max(e.width, e.out),
        e.columns * e.out,
        r * c,
        e.rows,
        e.rows,
        r * e.out,
        r * max(e.out, 1) if c < e.columns else 0,
    )
    group = heads_per_group(e, sum(per_head) * dtype.itemsize)
    once = ((r, r), (max(2 * r - 1, 0),), (c,), (2,)) if e.causal else ((0, 0), (0,), (c,), (2,))
    shapes = (*once, *[(group * count,) for count in per_head])
    wide = Piece((group * r if c < e.columns else 0,), WIDE)
    pieces = [Piece(shape, dtype) for shape in shapes]
    return group, (*pieces, wide, wide, *extra_pieces(e, r, c, group, dtype))


def _group(
    extras: AttentionExtras,
    s: _Scratch,
    heads: Arrays,
    scale: Array,
    blocks: dict[tuple[int, ...], Launch],
) -> list[Launch]:
    """Return the launches of a group of heads; `blocks` keeps those that groups share."""
    q, k, v, y, lse, tail = heads
    e = extras.extents
    keys = kernel.window(s.keys, (*k.shape[:-2], e.width, e.columns))
    panel = kernel.window(s.panel, (*q.shape[:-1], max(e.width, e.out)))
    queries, out = panel[..., : e.width], panel[..., : e.out]
    values = kernel.window(s.values, v.shape)
    sums, largest = kernel.window(s.sums, lse.shape), kernel.window(s.largest, lse.shape)
    if lse.shape not in blocks:
        blocks[lse.shape] = _blocks(extras, s, (queries, keys, values), (out, sums, largest))
    return [
        partial(np.multiply, k.swapaxes(-1, -2), scale, out=keys),
        partial(np.copyto, queries, q),
        partial(np.copyto, values, v),
        blocks[lse.shape],
        partial(np.copyto, y, out),
        partial(np.log, sums, out=sums),
        partial(np.add, sums, largest, out=lse),
        # What the sum lacks, exact where the first part is the larger: as it is where that counts.
        partial(np.subtract, largest, lse, out=tail),
        partial(np.add, tail, sums, out=tail),
    ]


def _blocks(extras: AttentionExtras, s: _Scratch, operands: Arrays, results: Arrays) -> Launch:
    """Return the launch over strips of queries: outputs, sums of exponentials, and the maxima.

    The maxima are 0 where none were needed.
    """
    q, keys, v = operands
    e = extras.extents
    y, sums, largest = results
    calls: list[Launch] = [partial(largest.fill, 0)]
    for rows, chunks in e.strips():
        i = as_slice(rows)
        products = kernel.window(s.products, y[..., i, :].shape)
        totals = products, sums[..., i], largest[..., i]
        calls += [
            _strip(extras, s, (q[..., i, :], keys, v), rows, chunks, totals),
            partial(np.divide, products, sums[..., i, None], out=y[..., i, :]),
        ]
    return in_sequence(calls)


def _strip(
    extras: AttentionExtras,
    s: _Scratch,
    operands: Arrays,
    rows: range,
    chunks: tuple[range, ...],
    totals: Arrays,
) -> Launch:
    """Return the launch of a strip of queries over its chunks of keys."""
    q, keys, v = operands
    e = extras.extents
    products, sums, largest = totals
    plain: list[Launch] = []
    maxima: list[Launch] = []
    shifted: list[Launch] = []
    careful: list[Launch] = []
    is_cut = len(chunks) > 1
    # Sums of several chunks are added up in double, so that rounding does not grow with rows.
    wide = kernel.window(s.wide_sums, sums.shape) if is_cut else sums
    for columns in chunks:
        j, is_first = as_slice(columns), columns.start == 0
        t = kernel.window(s.scores, (*sums.shape, len(columns)))
        scores = score_calls(extras, (rows, columns), q, keys, s.mask, t)
        product = partial(np.matmul, t, v[..., j, :])
        by_rows = partial(_seen_product, e, rows, columns, t, v[..., j, :])
        exponentials: list[Launch] = [
            partial(np.exp, t, out=t),
            row_sums(t, s.ones[: len(columns)], sums),
        ]
        if is_cut:
            into = wide if is_first else kernel.window(s.wide_part, sums.shape)
            exponentials.append(partial(np.copyto, into, sums))
            if not is_first:
                exponentials.append(partial(np.add, wide, into, out=wide))
        dropped = extras.dropped(rows, columns, t)
        added: list[Launch] = [
            *exponentials,
            *dropped,
            *collect(product, products, s.part, is_first=is_first),
        ]
        maximum = partial(np.maximum.reduce, t, axis=-1)
        plain += [*scores, *added]
        maxima += [*scores, *collect(maximum, largest, s.part, np.maximum, is_first=is_first)]
        shift = partial(np.subtract, t, largest[..., None], out=t)
        shifted += [*scores, shift, *added]
        careful += [*scores, shift, *exponentials, *dropped]
        careful += collect(by_rows, products, s.part, is_first=is_first)
    maxima += extras.floored(largest, float(np.finfo(largest.dtype.name).min))
    lowest, highest = s.extremes[0:1].reshape(()), s.extremes[1:].reshape(())
    most = float(np.finfo(products.dtype.name).max)
    is_safe = partial(_is_between, sums, lowest, highest, *SAFE_SUMS)
    is_finite = is_safe
    if products.size:
        is_finite = partial(_is_between, products, lowest, highest, -most, most)
    narrow: list[Launch] = [partial(np.copyto, sums, wide, casting="unsafe")] if is_cut else []
    once = in_sequence((*plain, *narrow))
    again = in_sequence((*maxima, *shifted, *narrow, *extras.floored(sums, 1.0)))
    row_by_row = in_sequence((*careful, *narrow))

    def launch() -> None:
        # First without maxima, which saves a pass; where sums or products overflow, again with
        # them.
        once()
        if not (is_safe() and is_finite()):
            again()
            # Infinite values that a mask hides: 0 * inf is NaN, so each row multiplies what it sees
            # alone.
            if e.causal and not is_finite():
                row_by_row()

    return launch


def score_calls(
    extras: AttentionExtras,
    block: tuple[range, range],
    queries: Array,
    keys: Array,
    hidden: Array,
    scores: Array,
) -> list[Launch]:
    """Return the calls that write the scores of a block, from its queries and all scaled keys."""
    rows, columns = block
    return [
        partial(np.matmul, queries, keys[..., as_slice(columns)], out=scores),
        *hide(extras.extents, rows, columns, scores, hidden),
        *extras.masked(rows, columns, scores),
    ]


def _is_between(x: Array, lowest: Array, highest: Array, low: float, high: float) -> bool:
    """Return whether all numbers lie strictly between the bounds; False with NaN.

    `lowest` and `highest` are 0-d scratch.
    """
    np.minimum.reduce(x, axis=None, out=lowest)
    np.maximum.reduce(x, axis=None, out=highest)
    return low < float(lowest) and float(highest) < high


def _seen_product(
    e: BlockExtents, rows: range, columns: range, t: Array, v: Array, out: Array
) -> None:
    """Write the product of each query's weights with the values that it sees."""
    for i, row in enumerate(rows):
        num_seen = max(0, min(columns.stop, e.visible(row)) - columns.start)
        np.matmul(t[..., i : i + 1, :num_seen], v[..., :num_seen, :], out=out[..., i : i + 1, :])


ATTENTION_KERNELS = (Kernel("numpy.attention", "attention", _plan_attention),)
