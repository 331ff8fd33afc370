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

from actors.kernels.common import cost, kernel
from actors.kernels.common.attention_blocks import (
    BlockExtents,
    are_row_floats,
    as_slice,
    block_work,
    clear,
    collect,
    extents_of,
    fill_mask,
    heads_per_group,
    hide,
)
from actors.kernels.common.kernel import (
    Attrs,
    KernelNeeds,
    Operands,
    Piece,
    Workspace,
    equal_operands,
    in_sequence,
    number,
)
from actors.kernels.common.strides import cut
from actors.kernels.reference.attention import AttentionExtras, extra_pieces
from actors.machine.protocol import Array, Arrays, Launch


@dataclass(frozen=True, slots=True)
class AttentionGradKernel:
    """`attention_grad`: attrs scale, causal; with dropout p, key."""

    name: str = "numpy.attention_grad"
    op: str = "attention_grad"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take float32 and float64; scratch is two blocks, and all operands of a group of heads.

        dq may lie over y and dv over v, which are packed, or done with, before they are written.
        """
        e, q = extents_of(attrs, inputs, 1), inputs[1]
        if not are_row_floats((*inputs[: 6 + e.is_masked], *outputs)):
            return None
        group, pieces = _layout(e, q.dtype)
        pairs = (
            *[pair for pair in equal_operands(0, outputs, inputs) if pair[1] == _Y],
            *[pair for pair in equal_operands(2, outputs, inputs) if pair[1] == _V],
        )
        work = block_work(e, group, 5, q.dtype.itemsize)
        return cost.needs(inputs, outputs, work, kernel.size_bytes(pieces), pairs)

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the launch over groups of heads and strips of keys."""
        e, q = extents_of(attrs, inputs, 1), inputs[1]
        if e.rows == 0:
            return in_sequence([partial(out.fill, 0) for out in outputs])
        group, pieces = _layout(e, q.dtype)
        *fields, factors, line = kernel.carve(workspace, pieces)
        s, extras = _GradScratch(*fields), AttentionExtras(e, attrs, inputs[6:], factors, line)
        calls: list[Launch] = [
            *fill_mask(s.mask, s.ramp),
            *fill_mask(s.bits, s.bits_ramp, -1, 0),
        ]
        scale = number(attrs, "scale")
        blocks: dict[tuple[int, ...], Launch] = {}
        operands = (*inputs[:6], *outputs, *extras.masks(q.shape))
        for heads in cut(operands, q.ndim - 2, group):
            calls += [extras.begin(heads[0].shape, heads[9:])]
            calls += _group(extras, s, heads[:6], heads[6:9], scale, blocks)
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


def _layout(e: BlockExtents, dtype: np.dtype[np.generic]) -> tuple[int, tuple[Piece, ...]]:
    """Return the number of heads in a group, and the fields of `_GradScratch`."""
    strip, chunk = e.blocks_of(e.columns)
    c, r = min(strip, e.columns), min(chunk, e.rows)
    of_queries = r * e.width if c < e.columns else 0
    of_keys = c * max(e.width, e.out) if r < e.rows else 0
    per_head = (
        e.rows * (e.width + 1),
        (e.width + 1) * e.columns,
        (e.out + 1) * e.columns,
        e.rows * (e.out + 1),
        e.columns * e.width,
        r * c,
        r * c,
        max(of_queries, of_keys),
        e.rows * e.width,
        e.columns * e.width,
        e.columns * e.out,
    )
    group = heads_per_group(e, sum(per_head) * dtype.itemsize)
    mask_shapes = ((c, c), (2 * c - 1,)) if e.causal else ((0, 0), (0,))
    integers = np.dtype(f"int{8 * dtype.itemsize}")
    pieces = (
        *[Piece(shape, kind) for kind in (dtype, integers) for shape in mask_shapes],
        *[Piece((group * count,), dtype) for count in per_head],
        *extra_pieces(e, r, c, group, dtype),
    )
    return group, pieces


def _group(
    extras: AttentionExtras,
    s: _GradScratch,
    inputs: Arrays,
    outputs: Arrays,
    scale: float,
    blocks: dict[tuple[int, ...], Launch],
) -> list[Launch]:
    """Return the launches of a group of heads; `blocks` keeps those that groups share."""
    dy, q, k, v, y, lse = inputs
    e = extras.extents
    batch = lse.shape[:-1]
    queries = kernel.window(s.queries, (*batch, e.rows, e.width + 1))
    keys = kernel.window(s.keys, (*batch, e.width + 1, e.columns))
    values = kernel.window(s.values, (*batch, e.out + 1, e.columns))
    slopes = kernel.window(s.slopes, (*batch, e.rows, e.out + 1))
    delta = slopes[..., e.out :]
    factor = np.array(scale, q.dtype)
    calls: list[Launch] = [
        partial(np.copyto, queries[..., :-1], q),
        # One column more, of -lse against ones: the product is scores - lse without another pass.
        partial(np.negative, lse, out=queries[..., -1]),
        partial(np.multiply, k.swapaxes(-1, -2), factor, out=keys[..., :-1, :]),
        partial(keys[..., -1, :].fill, 1),
        partial(np.multiply, v.swapaxes(-1, -2), factor, out=values[..., :-1, :]),
        # Likewise: the product is scale * (dy v^T - delta) without another pass.
        partial(values[..., -1, :].fill, -scale),
        partial(np.copyto, slopes[..., :-1], dy),
        # delta = rowsum(dy * y), which is rowsum(p * dp): no second walk over the scores.
        partial(np.matmul, slopes[..., None, :-1], y[..., None], out=delta[..., None]),
    ]
    if e.is_dropped:  # what is dropped of the product is not dropped of this: see `_strip`
        calls.append(partial(np.multiply, delta, np.array(-scale, q.dtype), out=delta))
    dense = kernel.window(s.dense_keys, k.shape)
    calls.append(partial(np.copyto, dense, k))
    if e.causal:  # 0 * NaN is NaN; what sees such a key has NaN for a gradient of its score
        largest = float(np.finfo(k.dtype.name).max)
        calls.append(partial(np.fmin, dense, np.array(largest, k.dtype), out=dense))
        calls.append(partial(np.fmax, dense, np.array(-largest, k.dtype), out=dense))
    spaces = zip((s.dq, s.dk, s.dv), outputs, strict=True)
    gradients = tuple([kernel.window(flat, out.shape) for flat, out in spaces])
    if batch not in blocks:
        operands = queries, keys, values, slopes, dense
        strips = e.strips_of_columns()
        blocks[batch] = in_sequence(
            [call for strip in strips for call in _strip(extras, s, operands, *strip, gradients)]
        )
    pairs = zip(outputs, gradients, strict=True)
    return [*calls, blocks[batch], *[partial(np.copyto, out, gradient) for out, gradient in pairs]]


def _strip(
    extras: AttentionExtras,
    s: _GradScratch,
    operands: Arrays,
    columns: range,
    chunks: tuple[range, ...],
    outputs: Arrays,
) -> list[Launch]:
    """Return the launches of a strip of keys over the chunks of queries that see it."""
    queries, keys, values, slopes, k = operands
    e = extras.extents
    dq, dk, dv = outputs
    j = as_slice(columns)
    calls: list[Launch] = []
    for rows in chunks:
        i, is_first = as_slice(rows), rows == chunks[0]
        shape = (*queries.shape[:-2], len(rows), len(columns))
        p, ds = kernel.window(s.probabilities, shape), kernel.window(s.scores, shape)
        products = (
            (partial(np.matmul, ds, k[..., j, :]), dq[..., i, :], columns.start == 0),
            (
                partial(np.matmul, ds.swapaxes(-1, -2), queries[..., i, :-1]),
                dk[..., j, :],
                is_first,
            ),
            (partial(np.matmul, p.swapaxes(-1, -2), slopes[..., i, :-1]), dv[..., j, :], is_first),
        )
        differences: list[Launch] = [partial(np.matmul, slopes[..., i, :], values[..., j], out=ds)]
        dropped = extras.dropped(rows, columns, ds, p)
        if e.is_dropped:
            differences = [
                partial(np.matmul, slopes[..., i, :-1], values[..., :-1, j], out=ds),
                *dropped[:-1],
                partial(np.add, ds, slopes[..., i, -1:], out=ds),
            ]
        calls += [
            partial(np.matmul, queries[..., i, :], keys[..., j], out=p),
            *hide(e, rows, columns, p, s.mask),
            *extras.masked(rows, columns, p),
            partial(np.exp, p, out=p),
            *differences,
            partial(np.multiply, ds, p, out=ds),
            *clear(e, rows, columns, ds, s.bits),
            *dropped[-1:],
        ]
        for product, target, starts in products:
            calls += collect(product, target, s.part, is_first=starts)
    return calls


ATTENTION_GRAD_KERNELS = (AttentionGradKernel(),)
