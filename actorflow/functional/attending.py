"""Attention, and rotary positions."""

from __future__ import annotations

import math

import numpy as np

from actorflow.functional.activation import softmax
from actorflow.functional.elementwise import cos, sin, where
from actorflow.functional.random import dropped_by
from actorflow.functional.row_numbers import together as broadcast_extents
from actorflow.functional.shape import concat
from actorflow.literals import checked_number
from actorflow.tensor import Operand, Tensor, apply_many, as_tensor
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.ops.attention import ATTENTION
from compiler.types import DType

__all__ = ["attention", "rotary", "scaled_dot_product_attention"]


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """Scaled dot-product attention (Vaswani et al., 2017): softmax(q kT / sqrt(d)) v.

    Args:
        q: [..., T, d].
        k: [..., S, d].
        v: [..., S, e].
        causal: row i attends to columns j <= i + (S - T) only: the last query sees all keys, as it
            must where keys are kept of earlier steps. Where S is not T this is another mask than
            that of `scaled_dot_product_attention`, whose first query sees the first key alone.
    """
    q, k = as_tensor(q), as_tensor(k)
    scores = q @ k.swapaxes(-1, -2)
    return softmax(scores, scale=1.0 / math.sqrt(max(q.shape[-1], 1)), causal=causal) @ v


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Operand | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return softmax(scale q kT + mask) v, as torch's function of this name.

    Scores exist a few rows at a time, also with a mask, dropout and shared heads; whole [..., T, S]
    in the gradient of a mask that is trained.

    Args:
        query: [..., T, d], heads before the last two axes.
        key: [..., S, d].
        value: [..., S, e].
        attn_mask: broadcasts to [..., T, S]: bool, True where a query sees a key, or floats that
            are added. A query that sees nothing (-inf in floats) gives zeros.
        dropout_p: the probability with which a weight is dropped; in training alone, unlike torch.
        is_causal: row i attends to columns j <= i only; not together with a mask.
        scale: 1 / sqrt(d) by default.
        enable_gqa: several heads of queries share one of keys and values, in order.

    Raises CompileError for shapes that do not fit.
    """
    q, k, v = as_tensor(query), as_tensor(key), as_tensor(value)
    is_fitting = min(q.ndim, k.ndim, v.ndim) > 1 and q.dtype.is_float
    if not is_fitting or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise CompileError(
            f"{find_source()}: attention expects floats: queries [..., T, d], keys [..., S, d] and"
            f" values [..., S, e], got {q.type}, {k.type} and {v.type}"
        )
    if is_causal and attn_mask is not None:
        raise CompileError(
            f"{find_source()}: attention got is_causal and attn_mask; say both in the mask"
        )
    rows, columns = q.shape[-2], k.shape[-2]
    mask = None if attn_mask is None else _additive(as_tensor(attn_mask, DType.BOOL), q.dtype)
    together: tuple[Tensor, ...] = (q, k, v) if mask is None else (q, k, v, mask)
    if enable_gqa:
        together = _grouped(*together)
    q, k, v, *masks = _one_batch(*together)
    factor = 1.0 / math.sqrt(max(q.shape[-1], 1))
    if scale is not None:
        factor = checked_number(scale, "the scale of attention")
    if factor <= 0.0:
        q, factor = q * factor, 1.0
    if is_causal and rows < columns:  # no query sees the keys after the last one of its own
        k, v, columns = k[..., :rows, :], v[..., :rows, :], rows
    drawn, options = dropped_by(dropout_p)
    if columns and (masks or drawn or (is_causal and rows > columns)):
        options = {"scale": factor, "causal": is_causal, **options}
        y = apply_many(ATTENTION, q, k, v, *masks, *drawn, **options)[0]
    else:  # a pass makes the same op of it, and it can be differentiated twice
        y = softmax(q @ k.swapaxes(-1, -2), scale=factor, causal=is_causal) @ v
    return y.flatten(-4, -3) if enable_gqa else y


def _additive(mask: Tensor, dtype: DType) -> Tensor:
    """Return a mask that is added to scores; no gradient flows into one of bools."""
    if mask.dtype is DType.BOOL:
        return where(mask, 0.0, -math.inf).detach().to(dtype)
    if not mask.dtype.is_float:
        raise CompileError(
            f"{find_source()}: the mask of attention must be bool or floats, got {mask.type}"
        )
    return mask.to(dtype)


def _grouped(q: Tensor, k: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Return operands with an axis of heads of keys, and one of the queries that share each."""
    heads, own = q.shape[-3] if q.ndim > 2 else 1, k.shape[-3] if k.ndim > 2 else 0
    for x in (k, others[0]):
        if not own or heads % own or x.ndim < 3 or x.shape[-3] != own:
            raise CompileError(
                f"{find_source()}: grouped attention expects [..., heads, T, d] with the heads of"
                f" queries divisible by those of keys and values, got {q.type} and {x.type}"
            )
    made = []
    for x in (q, k, *others):
        count = x.shape[-3] if x.ndim > 2 else 1
        groups = (own, heads // own) if count == heads else (count, 1)
        made.append(x.reshape(*x.shape[:-3], *groups, *x.shape[-2:]))
    return tuple(made)


def _one_batch(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> tuple[Tensor, ...]:
    """Return operands with equal leading axes, seen and not copied, and a mask of their rank."""
    batch = broadcast_extents([x.shape[:-2] for x in (q, k, v)], "the leading axes of attention")
    whole = (*batch, q.shape[-2], k.shape[-2])
    for mask in masks:
        if broadcast_extents([mask.shape, whole], "the mask of attention") != whole:
            raise CompileError(
                f"{find_source()}: attention expects a mask that broadcasts to {list(whole)}, got"
                f" {mask.type}"
            )
    aligned = [x.reshape((1,) * (len(whole) - x.ndim) + x.shape) for x in masks]
    return *[x.broadcast_to(*batch, *x.shape[-2:]) for x in (q, k, v)], *aligned


def rotary(
    x: Tensor,
    positions: Operand | None = None,
    base: float = 10000.0,
    *,
    interleaved: bool = False,
) -> Tensor:
    """Turn pairs of columns by angles that grow with the position (Su et al., RoFormer, 2021).

    Args:
        x: [..., T, d] with an even d: queries or keys, heads before the last two axes.
        positions: integers that broadcast to [..., T]; 0 .. T-1 by default.
        base: pair i turns by position / base^(2 i / d).
        interleaved: pairs are columns (2 i, 2 i + 1), as in RoFormer and GPT-J; else columns
            (i, i + d / 2), as in GPT-NeoX and LLaMA's published weights for transformers.
    """
    x, number = as_tensor(x), checked_number(base, "the base of rotary")
    if x.ndim < 2 or x.shape[-1] % 2 or not number > 0:
        raise CompileError(
            f"{find_source()}: rotary expects [..., T, d] of an even d and a base above 0, got"
            f" {x.type} and {number}"
        )
    length, width = x.shape[-2:]
    speeds = number ** (np.arange(width // 2) * (-2.0 / max(width, 1)))
    dtype = x.dtype.value
    if positions is None:
        angles = np.arange(length)[:, None] * speeds
        c, s = as_tensor(np.cos(angles).astype(dtype)), as_tensor(np.sin(angles).astype(dtype))
    else:
        where_at = as_tensor(positions, DType.INT64).to(x.dtype)
        turned = where_at.reshape(*where_at.shape, 1) * speeds.astype(dtype)
        c, s = cos(turned), sin(turned)
    if not interleaved:
        a, b = x[..., : width // 2], x[..., width // 2 :]
        return concat([a * c - b * s, b * c + a * s], dim=-1)
    a, b = x[..., ::2], x[..., 1::2]
    parts = [t.reshape(*t.shape, 1) for t in (a * c - b * s, b * c + a * s)]
    return concat(parts, dim=-1).reshape(x.shape)
