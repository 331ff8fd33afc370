"""The gradient of attention, block by block, with the probabilities computed anew.

The probabilities are exp(scale q kT - lse - tail); the gradient of the scores is the probabilities
times scale (dy vT - delta), with delta = sum(dy * y) per row (Dao, Fu, Ermon, Rudra & Re,
FlashAttention, 2022, appendix B). The second difference is made by the product itself: dy gets one
more column, delta, and vT one more row, -scale. The first is not: scores are what the forward pass
computed, to the bit, and lose nothing when lse is taken off; as terms of one product with a mask
between, they would.

Blocks are those of the forward pass. The gradient of a strip of queries is summed over its chunks
of keys; those of keys and values are summed over the strips.
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
)
from actors.kernels.common.kernel import (
    Attrs,
    HostPlan,
    Kernel,
    KernelPlan,
    Operands,
    Piece,
    Workspace,
    equal_operands,
    in_sequence,
    number,
)
from actors.kernels.common.strides import cut
from actors.kernels.reference.attention import AttentionExtras, extra_pieces, score_calls
from actors.machine.protocol import Array, Arrays, Launch


def _plan_gradient(attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan `attention_grad`: attrs scale, causal; with dropout p, key.

    It takes float32 and float64; scratch is two blocks, and all operands of a group of heads.

    dq may lie over y and dv over v, which are packed, or done with, before they are written.
    """
    e, q = extents_of(attrs, inputs, 1), inputs[1]
    if not are_row_floats((*inputs[: 7 + e.is_masked], *outputs)):
        return None
    group, pieces = _layout(e, q.dtype)
    pairs = (
        *[pair for pair in equal_operands(0, outputs, inputs) if pair[1] == _Y],
        *[pair for pair in equal_operands(2, outputs, inputs) if pair[1] == _V],
    )

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        if e.rows == 0:
            return in_sequence([partial(out.fill, 0) for out in outputs])
        q, scale = inputs[1], number(attrs, "scale")
        *fields, factors, line = kernel.carve(workspace, pieces)
        s, extras = _GradScratch(*fields), AttentionExtras(e, attrs, inputs[7:], factors, line)
        calls: list[Launch] = [
            *fill_mask(s.mask, s.ramp),
            *fill_mask(s.bits, s.bits_ramp, -1, 0),
        ]
        blocks: dict[tuple[int, ...], Launch] = {}
        operands = (*inputs[:7], *outputs, *extras.masks(q.shape))
        for heads in cut(operands, q.ndim - 2, group):
            calls += [extras.begin(heads[0].shape, heads[10:])]
            calls += _group(extras, s, heads[:7], heads[7:10], scale, blocks)
        return in_sequence(calls)

    work = block_work(e, group, 5, q.dtype.itemsize)
    needs = cost.needs(inputs, outputs, work, kernel.size_bytes(pieces), pairs)
    return KernelPlan(needs, bind)


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
    statistics: Array
    dense_keys: Array
    probabilities: Array
    scores: Array
    part: Array
    dq: Array
    dk: Array
    dv: Array
    is_all: Array


def _layout(e: BlockExtents, dtype: np.dtype[np.generic]) -> tuple[int, tuple[Piece, ...]]:
    """Return the number of heads in a group, and the fields of `_GradScratch`."""
    strip, chunk = e.blocks
    r, c = min(strip, e.rows), min(chunk, e.columns)
    of_queries = r * e.width if c < e.columns else 0
    of_keys = c * max(e.width, e.out) if r < e.rows else 0
    per_head = (
        e.rows * e.width,
        e.width * e.columns,
        (e.out + 1) * e.columns,
        e.rows * (e.out + 1),
        2 * e.rows,
        e.columns * e.width,
        r * c,
        r * c,
        max(of_queries, of_keys),
        e.rows * e.width,
        e.columns * e.width,
        e.columns * e.out,
    )
    group = heads_per_group(e, sum(per_head) * dtype.itemsize)
    mask_shapes = ((r, r), (2 * r - 1,)) if e.causal else ((0, 0), (0,))
    integers = np.dtype(f"int{8 * dtype.itemsize}")
    pieces = (
        *[Piece(shape, kind) for kind in (dtype, integers) for shape in mask_shapes],
        *[Piece((group * count,), dtype) for count in per_head],
        Piece((group * r * c,), np.dtype(np.bool_)),
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
    dy, q, k, v, y, lse, tail = inputs
    e = extras.extents
    batch = lse.shape[:-1]
    queries = kernel.window(s.queries, q.shape)
    keys = kernel.window(s.keys, (*batch, e.width, e.columns))
    values = kernel.window(s.values, (*batch, e.out + 1, e.columns))
    slopes = kernel.window(s.slopes, (*batch, e.rows, e.out + 1))
    delta = slopes[..., e.out :]
    statistics = kernel.window(s.statistics, (2, *lse.shape))
    factor = np.array(scale, q.dtype)
    calls: list[Launch] = [
        partial(np.copyto, queries, q),
        partial(np.copyto, statistics[0], lse),
        partial(np.copyto, statistics[1], tail),
        partial(np.multiply, k.swapaxes(-1, -2), factor, out=keys),
        partial(np.multiply, v.swapaxes(-1, -2), factor, out=values[..., :-1, :]),
        # One row more, against a column of delta: the product is scale * (dy v^T - delta), without
        # another pass.
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
        operands = queries, keys, values, slopes, statistics, dense
        _, dk, dv = gradients
        cleared: list[Launch] = [] if e.is_one_strip else [partial(x.fill, 0) for x in (dk, dv)]
        strips = [_strip(extras, s, operands, *strip, gradients) for strip in e.strips()]
        blocks[batch] = in_sequence([*cleared, *[call for strip in strips for call in strip]])
    pairs = zip(outputs, gradients, strict=True)
    return [*calls, blocks[batch], *[partial(np.copyto, out, gradient) for out, gradient in pairs]]


def _strip(
    extras: AttentionExtras,
    s: _GradScratch,
    operands: Arrays,
    rows: range,
    chunks: tuple[range, ...],
    outputs: Arrays,
) -> list[Launch]:
    """Return the launches of a strip of queries over the chunks of keys that it sees."""
    queries, keys, values, slopes, (lse, tail), k = operands
    e = extras.extents
    dq, dk, dv = outputs
    i, one = as_slice(rows), np.ones((), queries.dtype)
    calls: list[Launch] = []
    for columns in chunks:
        j = as_slice(columns)
        shape = (*queries.shape[:-2], len(rows), len(columns))
        p, ds = kernel.window(s.probabilities, shape), kernel.window(s.scores, shape)
        is_all = kernel.window(s.is_all, shape)
        products = (
            (partial(np.matmul, ds, k[..., j, :]), dq[..., i, :], columns.start == 0),
            (
                partial(np.matmul, ds.swapaxes(-1, -2), queries[..., i, :]),
                dk[..., j, :],
                e.is_one_strip,
            ),
            (
                partial(np.matmul, p.swapaxes(-1, -2), slopes[..., i, :-1]),
                dv[..., j, :],
                e.is_one_strip,
            ),
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
            *score_calls(extras, (rows, columns), queries[..., i, :], keys, s.mask, p),
            partial(np.subtract, p, lse[..., i, None], out=p),
            partial(np.subtract, p, tail[..., i, None], out=p),
            partial(np.exp, p, out=p),
            *differences,
            partial(np.multiply, ds, p, out=ds),
            # Of a weight of 1 the gradient is 0 (see the op), or NaN where it is no number.
            partial(np.equal, p, one, out=is_all),
            partial(np.subtract, ds, ds, out=ds, where=is_all),
            *clear(e, rows, columns, ds, s.bits),
            *dropped[-1:],
        ]
        for product, target, starts in products:
            calls += collect(product, target, s.part, is_first=starts)
    return calls


ATTENTION_GRAD_KERNELS = (Kernel("numpy.attention_grad", "attention_grad", _plan_gradient),)
