"""Scaled dot-product attention as one op, so that no score outlives the row it belongs to.

softmax(scale q kT) v (Vaswani et al., 2017) keeps two matrices of queries by keys when it is
composed of products and a softmax. Here the forward op keeps one number per query, the log of the
sum of the exponentials of its scores, and the gradient computes the probabilities anew from it
(Dao, Fu, Ermon, Rudra & Re, FlashAttention, 2022, section 3.1 and appendix B).
"""

from __future__ import annotations

import math

import numpy as np

from compiler.attrs import Attrs
from compiler.errors import CompileError
from compiler.graph import GraphBuilder, Node
from compiler.ops.reduce import total
from compiler.ops.rule import Grads
from compiler.ops.signature import (
    Array,
    Types,
    expect_equal_dtypes,
    expect_float,
    expect_inputs,
    expect_type,
)
from compiler.registry import Cost, OpTypeError, cost, define, infer_type, reference
from compiler.rules import gradient
from compiler.types import HALVES, DType, TensorType

ATTENTION = define("attention")
"""q [..., T, D], k [..., S, D], v [..., S, E] -> y [..., T, E], lse [..., T].

y = softmax(scale q kT) v; lse is the log of the sum of exponentials of a row of scores, kept for
the gradient, in float32 where y has 16 bits. Floats; equal leading axes, S >= 1. Attrs: scale (>
0), causal.

Causal: S >= T, and key j counts for query i only when j <= i + (S - T): NaN in a key or value that
a query does not see changes nothing of that query, nor of its gradient. Not so the other way round:
NaN in a query can reach the gradients of all keys and values of its head, as in torch: there a
weight of 0 meets it in a product.
"""

ATTENTION_GRAD = define("attention_grad")
"""dy, q, k, v, y, lse -> dq, dk, dv. Attrs: scale, causal. It has no gradient itself."""


@infer_type.of(ATTENTION)
def _attention_type(inputs: Types, attrs: Attrs) -> Types:
    q, k, v = expect_inputs(inputs, "q", "k", "v")
    _expect_attention(q, k, v, attrs)
    batch, rows = q.shape[:-2], q.shape[-2]
    return (
        TensorType(q.dtype, (*batch, rows, v.shape[-1])),
        TensorType(_statistics_dtype(q.dtype), (*batch, rows)),
    )


@infer_type.of(ATTENTION_GRAD)
def _attention_grad_type(inputs: Types, attrs: Attrs) -> Types:
    dy, q, k, v, y, lse = expect_inputs(inputs, "dy", "q", "k", "v", "y", "lse")
    _expect_attention(q, k, v, attrs)
    expect_type(y, "y", TensorType(q.dtype, (*q.shape[:-1], v.shape[-1])))
    expect_type(dy, "dy", y)
    expect_type(lse, "lse", TensorType(_statistics_dtype(q.dtype), q.shape[:-1]))
    return q, k, v


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
    if attrs.bool_("causal") and k.shape[-2] < q.shape[-2]:
        raise OpTypeError(
            "needs at least as many keys as queries when causal, or the first queries have nothing"
            f" to attend to; got {q.shape[-2]} queries and {k.shape[-2]} keys"
        )
    if not attrs.float_("scale") > 0:
        raise OpTypeError(f"needs a scale above 0, got {attrs.float_('scale')}")


@reference.of(ATTENTION)
def _attention_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    q, k, v = inputs
    scores = _scores(q, k, attrs)
    largest = scores.max(axis=-1, keepdims=True)
    e = np.exp(scores - largest)
    sums = total(e, -1, keepdims=True)
    return _weighted(e / sums, v, attrs), (largest + np.log(sums))[..., 0]


@reference.of(ATTENTION_GRAD)
def _attention_grad_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    dy, q, k, v, y, lse = inputs
    p = np.exp(_scores(q, k, attrs) - lse[..., None])
    # sum(dy * y) of a row is sum(dp * p) of it, and needs no scores.
    delta = total(dy * y, -1, keepdims=True)
    ds = attrs.float_("scale") * p * (np.matmul(dy, v.swapaxes(-1, -2)) - delta)
    if attrs.bool_("causal"):
        ds = np.where(_allowed(ds), ds, 0)
    return (
        _weighted(ds, k, attrs),
        np.matmul(ds.swapaxes(-1, -2), q),
        np.matmul(p.swapaxes(-1, -2), dy),
    )


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
    return np.tri(rows, columns, columns - rows, dtype=bool)


def _scores(q: Array, k: Array, attrs: Attrs) -> Array:
    """Return the scaled scores, -inf where the mask hides them."""
    scores: Array = np.matmul(q, k.swapaxes(-1, -2)) * attrs.float_("scale")
    if not attrs.bool_("causal"):
        return scores
    hidden: Array = scores.dtype.type(-np.inf)
    return np.where(_allowed(scores), scores, hidden)


@cost.of(ATTENTION)
def _attention_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    """Two products; scale, maximum, difference, exponential (8) and sum per visible score."""
    q, _, v = inputs
    flops = visible_scores(inputs, attrs) * (2.0 * q.shape[-1] + 2.0 * v.shape[-1] + 12.0)
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
    hidden = rows * (rows - 1) // 2 if attrs.bool_("causal") else 0
    return batch * (rows * columns - hidden)


@gradient.of(ATTENTION)
def _attention_gradient(b: GraphBuilder, node: Node, grads: Grads) -> Grads:
    dy, dlse = grads
    if dlse is not None:
        raise CompileError(
            f"{node.source}: attention has no gradient for lse; compute it with a product, max,"
            " exp, sum and log where it is needed in the loss"
        )
    if dy is None:
        return None, None, None
    return b.emit(ATTENTION_GRAD, (dy, *node.inputs, *node.outputs), node.attrs)
