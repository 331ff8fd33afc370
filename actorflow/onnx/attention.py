"""Operators of ONNX for sequences: attention, rotary positions, and the update rules of training.

Attention is computed in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

import actorflow.functional as af
from actorflow.onnx.program import Operand, StepCall, taking
from actorflow.tensor.tensor import Tensor, as_tensor

# ruff: noqa: N803  # ONNX's names of operands


@dataclass(frozen=True)
class _How:
    """The attributes of Attention."""

    is_causal: int = 0
    q_num_heads: int = 0
    kv_num_heads: int = 0
    scale: float | None = None
    softcap: float = 0.0
    softmax_precision: int = 1
    qk_matmul_output_mode: int = 0
    left_window_size: int = -1
    right_window_size: int = -1


def _heads_first(x: Tensor, heads: int) -> Tensor:
    if x.ndim == 4:
        return x
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).permute(0, 2, 1, 3)


def _positions(rows: int, offset: Any) -> Any:
    """Return where queries stand among the keys: [rows, 1], or [batch, 1, rows, 1]."""
    at = np.arange(rows, dtype=np.int64).reshape(rows, 1)
    return offset.reshape(-1, 1, 1, 1) + at if isinstance(offset, Tensor) else at + offset


def _both(a: Any, b: Any) -> Any:
    return b if a is None else af.logical_and(a, b)


def _seen(how: _How, rows: int, columns: int, offset: Any, lengths: Tensor | None) -> Any:
    """Return which keys a query sees by place: bools that broadcast to [batch, heads, T, S]."""
    seen: Any = None
    at, keys = _positions(rows, offset), np.arange(columns, dtype=np.int64).reshape(1, columns)
    if how.is_causal:
        seen = _both(seen, as_tensor(keys) <= at)
    if how.left_window_size >= 0:
        seen = _both(seen, as_tensor(keys) >= at - how.left_window_size)
    if how.right_window_size >= 0:
        seen = _both(seen, as_tensor(keys) <= at + how.right_window_size)
    if lengths is not None:
        seen = _both(seen, as_tensor(keys) < lengths.reshape(-1, 1, 1, 1))
    return seen


def _bias(mask: Tensor | None, seen: Any, keys: tuple[int, str], step: StepCall) -> Tensor | None:
    """Return what is added to the scores of so many keys, in a dtype; None for nothing."""
    added, (columns, dtype) = None, keys
    if mask is not None:
        if mask.shape[-1] < columns:
            ends = [0, columns - mask.shape[-1]]
            is_bool = mask.dtype.value == "bool"
            mask = af.pad(mask, ends, "constant", False if is_bool else -math.inf)
        elif mask.shape[-1] > columns:
            step.refuse(f"has a mask {mask.type} for {columns} keys")
        if mask.dtype.value == "bool":
            seen = _both(seen, mask)
        else:
            added = mask.to(dtype)
    if seen is None:
        return added
    allowed = af.where(seen, np.zeros((), dtype), np.full((), -np.inf, dtype))
    return allowed if added is None else added + allowed


@taking(*[field.name for field in fields(_How)])
def _attention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    attn_mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad_kv_seqlen: Tensor | None = None,
    *,
    step: StepCall,
    **attributes: Any,
) -> Any:
    how = _How(**attributes)
    dtype = "float64" if how.softmax_precision == 11 or Q.dtype.value == "float64" else "float32"
    if (past_key is None) != (past_value is None):
        step.refuse("needs both past_key and past_value, or none")
    if past_key is not None and nonpad_kv_seqlen is not None:
        step.refuse("has past keys and nonpad_kv_seqlen, which exclude each other")
    if Q.ndim == 3 and not (how.q_num_heads and how.kv_num_heads):
        step.refuse("has inputs of three axes, which need q_num_heads and kv_num_heads")
    q = _heads_first(Q, how.q_num_heads)
    k, v = [_heads_first(x, how.kv_num_heads) for x in (K, V)]
    past = 0 if past_key is None else past_key.shape[2]
    if past_key is not None and past_value is not None:
        k, v = af.concat([past_key, k], 2), af.concat([past_value, v], 2)
    present = k, v
    rows, columns, heads = q.shape[2], k.shape[2], q.shape[1]
    lengths = None if nonpad_kv_seqlen is None else nonpad_kv_seqlen.to("int64")
    offset: Any = past if lengths is None else lengths - rows
    seen = _seen(how, rows, columns, offset, lengths)
    bias = _bias(attn_mask, seen, (columns, dtype), step)
    scale = 1.0 / math.sqrt(q.shape[-1]) if how.scale is None else how.scale
    q, k, v = [x if x.dtype.value == dtype else x.to(dtype) for x in (q, k, v)]
    shared = heads != k.shape[1]
    if not how.softcap and not step.wants(3):
        y = af.scaled_dot_product_attention(q, k, v, bias, scale=scale, enable_gqa=shared)
        shown = None
    else:
        k, v = [af.repeat_interleave(x, heads // x.shape[1], 1) if shared else x for x in (k, v)]
        y, shown = _scored(q, k, v, bias, scale, how)
    if Q.ndim == 3:
        y = y.permute(0, 2, 1, 3).reshape(Q.shape[0], rows, -1)
    outputs = [y, *present, shown]
    return tuple([x if x is None else x.to(Q.dtype) for x in outputs][: len(step.step.outputs)])


def _scored(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, how: _How
) -> tuple[Tensor, Tensor]:
    """Return the result and the scores of some stage, which are kept whole."""
    scores = (q * scale) @ k.swapaxes(-1, -2)
    stages = [scores]
    if how.softcap:
        scores = af.tanh(scores / how.softcap) * how.softcap
    stages.append(scores)
    if bias is not None:
        scores = scores + bias
    stages.append(scores)
    parts = af.softmax(scores, -1)
    if bias is not None:  # a query that sees no key
        parts = af.where(af.amax(bias, -1, keepdim=True) == -math.inf, 0.0, parts)
    stages.append(parts)
    shown = stages[how.qk_matmul_output_mode]
    return parts @ v, shown if shown.shape == parts.shape else shown.broadcast_to(*parts.shape)


def _rotary(
    X: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    position_ids: Operand | None = None,
    *,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    step: StepCall,
) -> Tensor:
    if X.ndim == 3 and not num_heads:
        step.refuse("has an input of three axes, which needs num_heads")
    x = _heads_first(X, num_heads)
    turned = rotary_embedding_dim or x.shape[-1]
    cos, sin = cos_cache, sin_cache
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    cos, sin = [af.unsqueeze(c, 1) for c in (cos, sin)]
    part, rest = x[..., :turned], x[..., turned:]
    if interleaved:
        pairs = part.reshape(*part.shape[:-1], turned // 2, 2)
        a, b = pairs[..., 0], pairs[..., 1]
    else:
        a, b = part[..., : turned // 2], part[..., turned // 2 :]
    real, imaginary = cos * a - sin * b, sin * a + cos * b
    if interleaved:
        new = af.stack([real, imaginary], -1).reshape(part.shape)
    else:
        new = af.concat([real, imaginary], -1)
    y = af.concat([new, rest], -1)
    return y if X.ndim == 4 else y.permute(0, 2, 1, 3).reshape(X.shape)


# The rules of ai.onnx.preview.training: R, T, then n tensors of each kind.

Rule = Callable[..., tuple[Tensor, ...]]


def _for_each(rule: Rule, kinds: int, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return what a rule makes of each of n groups, all results of a kind together."""
    count = len(given) // kinds
    groups = [rule(*given[i::count]) for i in range(count)]
    return tuple([group[kind] for kind in range(len(groups[0])) for group in groups])


def _adam(
    R: Tensor,
    T: Tensor,
    *inputs: Tensor,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
    norm_coefficient_post: float = 0.0,
) -> tuple[Tensor, ...]:
    time = T.to(R.dtype)
    corrected = R * af.sqrt(1.0 - beta**time) / (1.0 - alpha**time)
    rate = af.where(T > 0, corrected, R)

    def rule(x: Tensor, g: Tensor, v: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        g = x * norm_coefficient + g
        v, h = v * alpha + g * (1.0 - alpha), h * beta + g * g * (1.0 - beta)
        new = x - rate * (v / (af.sqrt(h) + epsilon))
        return new * (1.0 - norm_coefficient_post), v, h

    return _for_each(rule, 4, inputs)


def _adagrad(
    R: Tensor,
    T: Tensor,
    *inputs: Tensor,
    decay_factor: float = 0.0,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
) -> tuple[Tensor, ...]:
    rate = R / (1.0 + T.to(R.dtype) * decay_factor)

    def rule(x: Tensor, g: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        g = x * norm_coefficient + g
        h = h + g * g
        return x - rate * g / (af.sqrt(h) + epsilon), h

    return _for_each(rule, 3, inputs)


def _momentum(
    R: Tensor,
    T: Tensor,
    *inputs: Tensor,
    alpha: float,
    beta: float,
    mode: str,
    norm_coefficient: float,
    step: StepCall,
) -> tuple[Tensor, ...]:
    if mode not in ("standard", "nesterov"):
        step.refuse(f"knows the modes standard and nesterov, got {mode!r}")
    factor = af.where(T > 0, beta, 1.0).to(R.dtype)

    def rule(x: Tensor, g: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        g = x * norm_coefficient + g
        v = v * alpha + factor * g
        return x - R * (g + v * alpha if mode == "nesterov" else v), v

    return _for_each(rule, 3, inputs)


ATTENTION: dict[str, Callable[..., Any]] = {"Attention": _attention, "RotaryEmbedding": _rotary}
TRAINING: dict[str, Callable[..., Any]] = {
    "Adagrad": _adagrad,
    "Adam": _adam,
    "Momentum": _momentum,
}
