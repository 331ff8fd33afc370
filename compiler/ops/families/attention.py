"""Scaled dot-product attention as one op, so that no score outlives the row it belongs to.

softmax(scale q kT) v (Vaswani et al., 2017) keeps two matrices of queries by keys when it is
composed of products and a softmax. Here the forward op keeps the log of the sum of the exponentials
of each query's scores, and the gradient computes the probabilities anew from it (Dao, Fu, Ermon,
Rudra & Re, FlashAttention, 2022, section 3.1 and appendix B).

That logarithm is two numbers, the nearest float and the rest (Dekker, 1971): of scores of 1e8 a
float32 alone knows it to 4, and exp(score - lse) would be noise. The difference is exact where the
scores of the gradient are those of the forward op to the bit, for which kernels see.

The gradient of a score is p (dp - delta), where delta, the sum of p dp over the row, is found as
that of dy y. These round apart, and of a weight that rounds to 1 no more than that is left: the
gradient of its score is 0, as it is of a softmax whose delta is the sum of p dp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from compiler.contract.attrs import Attrs
from compiler.contract.errors import CompileError
from compiler.contract.types import HALVES, DType, TensorType, ValueId, numpy_dtype
from compiler.graph.columns import Grads, SbpSignature, by_axes, last_labels, sbp_signatures
from compiler.graph.graph import GraphBuilder, Node, gradient
from compiler.graph.registry import (
    Array,
    Cost,
    OpTypeError,
    Types,
    cost,
    define,
    expect_equal_dtypes,
    expect_float,
    expect_inputs,
    expect_type,
    infer_type,
    reference,
)
from compiler.ops.families.arithmetic import ADD, DIV, EXP, MAXIMUM, MUL, SUB
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import MAX, SUM, sum_to, total
from compiler.ops.primitives.shape import cast_to, reshape_to, swap_last_axes
from compiler.ops.primitives.sources import (
    DROPOUT,
    constant,
    keep_threshold,
    numbers_of_part,
    scalar,
)

ATTENTION = define("attention")
"""q [..., T, D], k [..., S, D], v [..., S, E] -> y [..., T, E], lse [..., T], tail [..., T].

y = softmax(scale q kT) v; lse + tail is the log of the sum of exponentials of a row of scores, kept
for the gradient, in float32 where y has 16 bits: lse is its nearest float, tail what that lacks.
Floats; equal leading axes, S >= 1. Attrs: scale (> 0), causal.

Causal: key j counts for query i only when j <= i + max(S - T, 0): NaN in a key or value that a
query does not see changes nothing of that query, nor of its gradient. Not so the other way round:
NaN in a query can reach the gradients of all keys and values of its head, as in torch: there a
weight of 0 meets it in a product.

After v may come a mask, and after that a seed [] and a step [] (int64):

- mask [..., T, S], each axis whole or of extent 1, is added to scaled scores. A query that sees
  nothing, -inf throughout, gets zeros, and gives none a gradient. Not together with causal. What it
  hides has a weight of 0 that meets keys and values in products, as in torch: 0 * NaN is NaN. A
  kernel may leave out keys that are hidden from all queries.
- with seed and step and the attrs p and key, weights are dropped as `dropout` would drop a tensor
  [..., T, S]: its bits are those of the whole tensor, however kernels cut it. With the attr
  numbered there comes another input, first [...] (int64): where q is a part of a larger tensor, the
  number that the first score of each matrix has there.
"""

ATTENTION_GRAD = define("attention_grad")
"""dy, q, k, v, y, lse, tail, and what came after v -> dq, dk, dv. Attrs are those of attention.

It has no gradient itself.
"""

T = TypeVar("T")


@infer_type.of(ATTENTION)
def _attention_type(inputs: Types, attrs: Attrs) -> Types:
    more = _expect_more(inputs, 3)
    q, k, v = expect_inputs(inputs[: len(inputs) - len(more)], "q", "k", "v")
    _expect_attention(q, k, v, attrs)
    _expect_extras(q, k, more, attrs)
    batch, rows = q.shape[:-2], q.shape[-2]
    return (
        TensorType(q.dtype, (*batch, rows, v.shape[-1])),
        *[TensorType(_statistics_dtype(q.dtype), (*batch, rows))] * 2,
    )


@infer_type.of(ATTENTION_GRAD)
def _attention_grad_type(inputs: Types, attrs: Attrs) -> Types:
    more = _expect_more(inputs, 7)
    names = ("dy", "q", "k", "v", "y", "lse", "tail")
    dy, q, k, v, y, *statistics = expect_inputs(inputs[: len(inputs) - len(more)], *names)
    _expect_attention(q, k, v, attrs)
    _expect_extras(q, k, more, attrs)
    expect_type(y, "y", TensorType(q.dtype, (*q.shape[:-1], v.shape[-1])))
    expect_type(dy, "dy", y)
    for name, type_ in zip(names[5:], statistics, strict=True):
        expect_type(type_, name, TensorType(_statistics_dtype(q.dtype), q.shape[:-1]))
    return q, k, v


def _expect_more(inputs: Types, count: int) -> Types:
    """Return what comes after the first `count` inputs: a mask, or seed and step, or all three."""
    return inputs[count:] if len(inputs) <= count + 4 else ()


def _expect_extras(q: TensorType, k: TensorType, more: Types, attrs: Attrs) -> None:
    mask, dropout = extras_of(more, attrs)
    full_shape = (*q.shape[:-1], k.shape[-2])
    if mask is not None:
        expect_equal_dtypes((q, mask))
        if mask.rank != q.rank or any(
            [n not in (1, m) for n, m in zip(mask.shape, full_shape, strict=True)]
        ):
            raise OpTypeError(
                f"needs a mask of shape {list(full_shape)}, where any extent may be 1, got"
                f" {list(mask.shape)}"
            )
        if attrs.bool_("causal"):
            raise OpTypeError("takes no mask when causal; say both in the mask")
    if dropout:
        shapes = ((), (), q.shape[:-2])[: len(dropout)]
        for name, type_, shape in zip(("seed", "step", "first"), dropout, shapes, strict=False):
            expect_type(type_, name, TensorType(DType.INT64, shape))
        if not 0 < attrs.float_("p") < 1:
            raise OpTypeError(f"needs 0 < p < 1, got {attrs.float_('p')}")
        attrs.int_("key")


def extras_of(more: Sequence[T], attrs: Attrs) -> tuple[T | None, Sequence[T]]:
    """Return the mask, and seed, step and first or nothing, of what comes after other inputs."""
    count = (len(more) - ("numbered" in attrs)) % 2
    return more[0] if count else None, more[count:]


def _statistics_dtype(dtype: DType) -> DType:
    return DType.FLOAT32 if dtype in HALVES else dtype


def _expect_attention(q: TensorType, k: TensorType, v: TensorType, attrs: Attrs) -> None:
    expect_float((q,), "q")
    expect_equal_dtypes((q, k, v))
    for name, type_ in (("q", q), ("k", k), ("v", v)):
        if type_.rank < 2:
            raise OpTypeError(
                f"needs matrices, but {name} has rank {type_.rank};"
                " reshape a vector of n elements to [1, n]"
            )
    if not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        raise OpTypeError(
            f"needs equal leading axes, got {list(q.shape[:-2])} of q, {list(k.shape[:-2])} of k"
            f" and {list(v.shape[:-2])} of v; stretch them with broadcast_to"
        )
    if q.shape[-1] != k.shape[-1]:
        raise OpTypeError(f"needs q and k of equal width, got {q.shape[-1]} and {k.shape[-1]}")
    if k.shape[-2] != v.shape[-2]:
        raise OpTypeError(
            f"needs one row of v for each of the {k.shape[-2]} rows of k, got {v.shape[-2]}"
        )
    if k.shape[-2] == 0:
        raise OpTypeError("needs at least one key to attend to, got a k of no rows")
    if not attrs.float_("scale") > 0:
        raise OpTypeError(f"needs a scale above 0, got {attrs.float_('scale')}")


@reference.of(ATTENTION)
def _attention_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    q, k, v, *more = inputs
    mask, dropout = extras_of(more, attrs)
    scores = _scores(q, k, mask, attrs)
    largest = scores.max(axis=-1, keepdims=True)
    if mask is not None:
        largest = np.maximum(largest, np.finfo(largest.dtype).min)  # -inf - -inf would be NaN
    e = np.exp(scores - largest)
    sums = total(e, -1, keepdims=True)
    if mask is not None:
        sums = np.where(sums == 0, sums.dtype.type(1), sums)
    p = e / sums * _kept(scores, dropout, attrs)
    log_sums = np.log(sums)
    lse = largest + log_sums
    tail = (largest - lse) + log_sums
    return _weighted(p, v, attrs), lse[..., 0], tail[..., 0]


@reference.of(ATTENTION_GRAD)
def _attention_grad_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    dy, q, k, v, y, lse, tail, *more = inputs
    mask, dropout = extras_of(more, attrs)
    p = np.exp(_scores(q, k, mask, attrs) - lse[..., None] - tail[..., None])
    factor = _kept(p, dropout, attrs)
    # sum(dy * y) of a row is sum(dp * p) of it, and needs no scores.
    delta = total(dy * y, -1, keepdims=True)
    slope = np.matmul(dy, v.swapaxes(-1, -2)) * factor - delta
    ds = attrs.float_("scale") * np.where(p == 1, 0, p) * slope
    if attrs.bool_("causal"):
        ds = np.where(_allowed(ds), ds, 0)
    return (
        _weighted(ds, k, attrs),
        np.matmul(ds.swapaxes(-1, -2), q),
        np.matmul((p * factor).swapaxes(-1, -2), dy),
    )


def _kept(scores: Array, drawn: Sequence[Array], attrs: Attrs) -> Array:
    """Return what dropout multiplies weights with: 0 or 1 / (1 - p), or 1 where there is none."""
    if not drawn:
        return np.ones((), scores.dtype)
    p, size = attrs.float_("p"), math.prod(scores.shape[-2:])
    bits = numbers_of_part(drawn, attrs.int_("key"), (math.prod(scores.shape[:-2]), size))
    is_kept = (bits >= keep_threshold(p)).reshape(scores.shape)
    return np.where(is_kept, 1 / (1 - p), 0.0).astype(scores.dtype)


def _weighted(p: Array, v: Array, attrs: Attrs) -> Array:
    """Return p times v, where what the mask hides counts for nothing, be it NaN (0 * NaN is NaN).

    torch's own attention is no example: there NaN in a hidden value reaches every query.
    """
    is_finite = np.isfinite(v)
    if not attrs.bool_("causal") or is_finite.all():
        return np.asarray(np.matmul(p, v))
    terms = p[..., None] * v[..., None, :, :]
    return total(np.where(_allowed(p)[..., None], terms, 0), -2)


def _allowed(scores: Array) -> Array:
    """Return which keys each query sees when causal."""
    rows, columns = scores.shape[-2:]
    return np.tri(rows, columns, max(columns - rows, 0), dtype=bool)


def _scores(q: Array, k: Array, mask: Array | None, attrs: Attrs) -> Array:
    """Return the scaled scores with the mask, -inf where a causal one hides them."""
    scores: Array = np.matmul(q, k.swapaxes(-1, -2)) * attrs.float_("scale")
    if mask is not None:
        scores = scores + mask
    if not attrs.bool_("causal"):
        return scores
    hidden: Array = scores.dtype.type(-np.inf)
    return np.where(_allowed(scores), scores, hidden)


@cost.of(ATTENTION)
def _attention_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    """Two products; scale, maximum, difference, exponential (8) and sum per visible score."""
    q, _, v, *_ = inputs
    flops = visible_scores(inputs[:3], attrs) * (2.0 * q.shape[-1] + 2.0 * v.shape[-1] + 12.0)
    return Cost(flops, float(sum(t.size_bytes for t in (*inputs, *outputs))))


@cost.of(ATTENTION_GRAD)
def _attention_grad_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    """Three products as wide as q, two as wide as v; 12 more operations per visible score."""
    _, q, k, v, *_ = inputs
    flops = visible_scores((q, k, v), attrs) * (6.0 * q.shape[-1] + 4.0 * v.shape[-1] + 12.0)
    return Cost(flops, float(sum(t.size_bytes for t in (*inputs, *outputs))))


def visible_scores(inputs: Types, attrs: Attrs) -> int:
    """Return how many scores of attention over q, k, v the mask leaves."""
    q, k, _ = inputs
    batch, rows, columns = math.prod(q.shape[:-2]), q.shape[-2], k.shape[-2]
    both = min(rows, columns)
    hidden = both * (both - 1) // 2 if attrs.bool_("causal") else 0
    return batch * (rows * columns - hidden)


@gradient.of(ATTENTION)
def _attention_gradient(b: GraphBuilder, node: Node, grads: Grads) -> Grads:
    dy, *of_statistics = grads
    if any([x is not None for x in of_statistics]):
        raise CompileError(
            f"{node.source}: attention has no gradient for lse; compute it with a product, max,"
            " exp, sum and log where it is needed in the loss"
        )
    if dy is None:
        return (None,) * len(node.inputs)
    q, k, v, *more = node.inputs
    gradients = b.emit(ATTENTION_GRAD, (dy, q, k, v, *node.outputs, *more), node.attrs)
    mask, dropout = extras_of(more, node.attrs)
    of_mask = () if mask is None else (_mask_gradient(b, node, mask, dy),)
    return (*gradients, *of_mask, *[None] * len(dropout))


def _mask_gradient(b: GraphBuilder, node: Node, mask: ValueId, dy: ValueId) -> ValueId:
    """Emit the gradient of the mask, a whole matrix of scores: pruned where nobody trains one.

    Its scores are those of a product of its own, which may differ from the kernels' in their last
    places: so their softmax is computed anew, not from lse.
    """
    q, k, v, _, *dropout = node.inputs
    mask_type = b.type_of(mask)
    dtype = _statistics_dtype(mask_type.dtype)  # scores of 16-bit operands need not fit their type
    q, k, v, mask, dy = [cast_to(b, x, dtype) for x in (q, k, v, mask, dy)]
    scale = scalar(b, node.attrs.float_("scale"), dtype)
    scores = b.emit_one(
        ADD, b.emit_one(MUL, b.emit_one(MATMUL, q, swap_last_axes(b, k)), scale), mask
    )
    row = (b.type_of(scores).rank - 1,)
    lowest = scalar(b, float(np.finfo(numpy_dtype(dtype)).min), dtype)
    # A query that sees nothing has the lowest number for a maximum, and 1 for a sum of zeros.
    largest = b.emit_one(MAXIMUM, b.emit_one(MAX, scores, axes=row, keepdims=True), lowest)
    exponentials = b.emit_one(EXP, b.emit_one(SUB, scores, largest))
    sums = b.emit_one(SUM, exponentials, axes=row, keepdims=True)
    weights = b.emit_one(DIV, exponentials, b.emit_one(MAXIMUM, sums, scalar(b, 1.0, dtype)))
    dp = b.emit_one(MATMUL, dy, swap_last_axes(b, v))
    if dropout:
        attrs = {name: node.attrs[name] for name in ("p", "key")}
        (dp,) = b.emit(DROPOUT, (dp, *dropout[:2], *_firsts_of_rows(b, dp, dropout[2:])), attrs)
    delta = b.emit_one(SUM, b.emit_one(MUL, weights, dp), axes=row, keepdims=True)
    slopes = b.emit_one(MUL, weights, b.emit_one(SUB, dp, delta))
    return cast_to(b, sum_to(b, slopes, mask_type.shape), mask_type.dtype)


def _firsts_of_rows(b: GraphBuilder, scores: ValueId, firsts: Sequence[ValueId]) -> list[ValueId]:
    """Emit the numbers of the first score of each row, from those of each matrix."""
    *_, rows, columns = b.type_of(scores).shape
    along = constant(b, np.arange(rows, dtype=np.int64) * columns)
    shapes = [(*b.type_of(first).shape, 1) for first in firsts]
    return [
        b.emit_one(ADD, reshape_to(b, f, s), along) for f, s in zip(firsts, shapes, strict=True)
    ]


@sbp_signatures.of(ATTENTION, ATTENTION_GRAD)
def _signatures(inputs: Types, outputs: Types, attrs: Attrs, parts: int) -> list[SbpSignature]:
    """Split leading axes; what is dropped follows (`compiler.sbp.positions`)."""
    if "numbered" in attrs:
        return []  # a part already
    leading = outputs[0].shape[:-2]
    names = list(map(str, range(len(leading))))
    labels = [
        [*last_labels(names, x.shape[: len(leading)], leading), *[""] * (x.rank - len(leading))]
        for x in inputs
    ]
    return by_axes(labels, [[*names, *[""] * (y.rank - len(leading))] for y in outputs])
