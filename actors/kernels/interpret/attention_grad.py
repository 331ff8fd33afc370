"""The gradient of attention, block by block, with the probabilities computed anew.

The probabilities are exp(scale q kT - lse); the gradient of the scores is the probabilities times
scale (dy vT - delta), with delta = sum(dy * y) per row (Dao, Fu, Ermon, Rudra & Re,
FlashAttention, 2022, appendix B). Both differences are made by the products themselves: q and dy
get one more column, -lse and delta, and kT and vT one more row, 1 and -scale. That saves two passes
over the scores, and the maxima: lse is finite where they are.

Keys are cut in strips, so that the gradients of a strip's keys and values are complete, or summed
over few chunks; the gradient of the queries is summed over the strips.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.attributes import number
from actors.kernels.interpret.attention_blocks import (
    BlockExtents,
    as_slice,
    clear,
    collect,
    extents_of,
    fill_mask,
    heads_per_group,
    hide,
    is_readable,
    shares_calls,
    takes,
)
from actors.kernels.interpret.blocks import cut
from actors.kernels.kernel import (
    Attrs,
    KernelNeeds,
    Operand,
    Operands,
    Workspace,
    equal_operands,
    in_sequence,
)
from actors.kernels.scratch import Piece
from actors.kernels.work import CALLS_PER_PRODUCT, BytePass, MatrixProduct, Work, item_weight
from actors.protocol import Array, Arrays, Launch


@dataclass(frozen=True, slots=True)
class AttentionGradKernel:
    """`attention_grad`: attrs scale, causal."""

    name: str = "numpy.attention_grad"
    op: str = "attention_grad"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take float32 and float64; scratch is two blocks, and q, k, v, dy of a group of heads.

        Groups that share their calls have their outputs there as well.
        dq may lie over y and dv over v, which are packed, or done with, before they are written.
        """
        if not takes(inputs, outputs):
            return None
        _, q, k, v, *_ = inputs
        e = extents_of(attrs, q.shape, k.shape, v.shape)
        layout = _layout(e, k)
        pairs = (
            *[pair for pair in equal_operands(0, outputs, inputs) if pair[1] == _Y],
            *[pair for pair in equal_operands(2, outputs, inputs) if pair[1] == _V],
        )
        work = _work(e, layout, q.dtype.itemsize)
        return cost.needs(inputs, outputs, work, scratch.size_bytes(layout.pieces), pairs)

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the launch over groups of heads and strips of keys."""
        _, q, k, v, *_ = inputs
        e = extents_of(attrs, q.shape, k.shape, v.shape)
        if e.rows == 0:
            return in_sequence([partial(out.fill, 0) for out in outputs])
        layout = _layout(e, k)
        s = _GradScratch(*scratch.carve(workspace, layout.pieces))
        calls: list[Launch] = [
            *fill_mask(s.mask, s.ramp),
            *fill_mask(s.bits, s.bits_ramp, -1, 0),
        ]
        scale = number(attrs, "scale")
        blocks: dict[tuple[int, ...], Launch] = {}
        for heads in cut((*inputs, *outputs), q.ndim - 2, layout.group):
            calls += _group(e, s, heads[:6], heads[6:], scale, layout, blocks)
        return in_sequence(calls)


_V, _Y = 3, 4
"""Where v and y are among the inputs."""


@dataclass(frozen=True, slots=True)
class _GradScratch:
    """Scratch of a launch: the mask, then vectors that are cut to the heads and block."""

    mask: Array
    ramp: Array
    bits: Array
    bits_ramp: Array
    queries: Array
    keys: Array
    values: Array
    slopes: Array
    dense_keys: Array
    probabilities: Array
    scores: Array
    part: Array
    dq: Array
    dk: Array
    dv: Array


@dataclass(frozen=True, slots=True)
class _GradLayout:
    """The heads of a group, whether groups share their calls, what is packed; the scratch."""

    group: int
    shares: bool
    packs_k: bool
    pieces: tuple[Piece, ...]


def _layout(e: BlockExtents, k: Operand | Array) -> _GradLayout:
    """Choose how the groups are computed. Depends on shapes, strides and dtype only."""
    own = _sized(e, k.dtype, packs_k=e.causal or not is_readable(k), shares=False)
    num_blocks = sum([len(chunks) for _, chunks in e.strips_of_columns()])
    if not shares_calls(e, own.group, num_blocks):
        return own
    return _sized(e, k.dtype, packs_k=True, shares=True)


def _sized(
    e: BlockExtents, dtype: np.dtype[np.generic], *, packs_k: bool, shares: bool
) -> _GradLayout:
    """Return the layout with the number of heads in a group, and the fields of `_GradScratch`."""
    strip, chunk = e.blocks_of(e.columns)
    c, r = min(strip, e.columns), min(chunk, e.rows)
    of_queries = r * e.width if c < e.columns else 0
    of_keys = c * max(e.width, e.out) if r < e.rows else 0
    per_head = (
        e.rows * (e.width + 1),
        (e.width + 1) * e.columns,
        (e.out + 1) * e.columns,
        e.rows * (e.out + 1),
        e.columns * e.width * packs_k,
        r * c,
        r * c,
        max(of_queries, of_keys),
        e.rows * e.width * shares,
        e.columns * e.width * shares,
        e.columns * e.out * shares,
    )
    group = heads_per_group(e, sum(per_head) * dtype.itemsize)
    once = ((c, c), (2 * c - 1,)) if e.causal else ((0, 0), (0,))
    integers = np.dtype(f"int{8 * dtype.itemsize}")
    pieces = (
        *[Piece(shape, own) for own in (dtype, integers) for shape in once],
        *[Piece((group * count,), dtype) for count in per_head],
    )
    return _GradLayout(group, shares, packs_k, pieces)


def _group(
    e: BlockExtents,
    s: _GradScratch,
    inputs: Arrays,
    outputs: Arrays,
    scale: float,
    layout: _GradLayout,
    blocks: dict[tuple[int, ...], Launch],
) -> list[Launch]:
    """Return the launches of a group of heads; `blocks` keeps those that groups share."""
    dy, q, k, v, y, lse = inputs
    batch = lse.shape[:-1]
    queries = scratch.window(s.queries, (*batch, e.rows, e.width + 1))
    keys = scratch.window(s.keys, (*batch, e.width + 1, e.columns))
    values = scratch.window(s.values, (*batch, e.out + 1, e.columns))
    slopes = scratch.window(s.slopes, (*batch, e.rows, e.out + 1))
    delta = slopes[..., e.out :]
    factor = np.array(scale, q.dtype)
    calls: list[Launch] = [
        partial(np.copyto, queries[..., :-1], q),
        partial(np.negative, lse, out=queries[..., -1]),
        partial(np.multiply, k.swapaxes(-1, -2), factor, out=keys[..., :-1, :]),
        partial(keys[..., -1, :].fill, 1),
        partial(np.multiply, v.swapaxes(-1, -2), factor, out=values[..., :-1, :]),
        partial(values[..., -1, :].fill, -scale),
        partial(np.copyto, slopes[..., :-1], dy),
        partial(np.matmul, slopes[..., None, :-1], y[..., None], out=delta[..., None]),
    ]
    if layout.packs_k:
        dense = scratch.window(s.dense_keys, k.shape)
        calls.append(partial(np.copyto, dense, k))
        if e.causal:  # 0 * NaN is NaN; what sees such a key has NaN for a gradient of its score
            most = float(np.finfo(k.dtype.name).max)
            calls.append(partial(np.fmin, dense, np.array(most, k.dtype), out=dense))
            calls.append(partial(np.fmax, dense, np.array(-most, k.dtype), out=dense))
        k = dense
    made = outputs
    if layout.shares:
        own = zip((s.dq, s.dk, s.dv), outputs, strict=True)
        made = tuple([scratch.window(flat, out.shape) for flat, out in own])
    if not layout.shares or batch not in blocks:
        operands = queries, keys, values, slopes, k
        strips = e.strips_of_columns()
        blocks[batch] = in_sequence(
            [call for strip in strips for call in _strip(e, s, operands, *strip, made)]
        )
    calls.append(blocks[batch])
    if layout.shares:
        pairs = zip(outputs, made, strict=True)
        calls += [partial(np.copyto, out, result) for out, result in pairs]
    return calls


def _strip(
    e: BlockExtents,
    s: _GradScratch,
    operands: Arrays,
    columns: range,
    chunks: tuple[range, ...],
    outputs: Arrays,
) -> list[Launch]:
    """Return the launches of a strip of keys over the chunks of queries that see it."""
    queries, keys, values, slopes, k = operands
    dq, dk, dv = outputs
    j = as_slice(columns)
    calls: list[Launch] = []
    for rows in chunks:
        i, is_first = as_slice(rows), rows == chunks[0]
        shape = (*queries.shape[:-2], len(rows), len(columns))
        p, ds = scratch.window(s.probabilities, shape), scratch.window(s.scores, shape)
        products = (
            (partial(np.matmul, ds, k[..., j, :]), dq[..., i, :], columns.start == 0),
            (
                partial(np.matmul, ds.swapaxes(-1, -2), queries[..., i, :-1]),
                dk[..., j, :],
                is_first,
            ),
            (partial(np.matmul, p.swapaxes(-1, -2), slopes[..., i, :-1]), dv[..., j, :], is_first),
        )
        calls += [
            partial(np.matmul, queries[..., i, :], keys[..., j], out=p),
            *hide(e, rows, columns, p, s.mask),
            partial(np.exp, p, out=p),
            partial(np.matmul, slopes[..., i, :], values[..., j], out=ds),
            partial(np.multiply, ds, p, out=ds),
            *clear(e, rows, columns, ds, s.bits),
        ]
        for product, target, starts in products:
            calls += collect(product, target, s.part, is_first=starts)
    return calls


def _work(e: BlockExtents, layout: _GradLayout, itemsize: int) -> Work:
    """Return the work on blocks: five products, an exponential and a product of elements."""
    blocks = [
        (len(rows), len(columns)) for columns, chunks in e.strips_of_columns() for rows in chunks
    ]
    groups = -(-e.heads // layout.group)
    weight = item_weight(itemsize) * e.heads
    products = tuple(
        [
            MatrixProduct(weight, m, n, k)
            for r, c in blocks
            for m, n, k in (
                (r, c, e.width + 1),
                (r, c, e.out + 1),
                (r, e.width, c),
                (c, e.width, r),
                (c, e.out, r),
            )
        ]
    )
    size = float(e.heads * sum([r * c for r, c in blocks]) * itemsize)
    packed = float(e.heads * e.columns * (e.width + e.out) * itemsize)
    copied = e.heads * e.rows * (e.width + 2 * e.out) * itemsize
    if layout.packs_k:
        copied += e.heads * e.columns * e.width * itemsize
    if layout.shares:
        copied += e.heads * (e.rows * e.width + e.columns * (e.width + e.out)) * itemsize
    sums = float(e.heads * sum([r * e.width for r, _ in blocks]) * itemsize)
    passes = (
        (BytePass.EXP, size),
        (BytePass.PLAIN, size + sums),
        (BytePass.STRIDED, packed),
        (BytePass.SIMPLE, float(copied)),
    )
    calls = groups * (12 + len(blocks) * (4 + 5 * CALLS_PER_PRODUCT))
    return Work(float(calls), 3.0 * e.heads * e.rows, passes, products)


ATTENTION_GRAD_KERNELS = (AttentionGradKernel(),)
