"""Attention."""

from __future__ import annotations

import math

from actorflow.functional.activation import softmax
from actorflow.tensor import Tensor, as_tensor

__all__ = ["attention"]


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """Scaled dot-product attention (Vaswani et al., 2017): softmax(q kT / sqrt(d)) v.

    Args:
        q: [..., T, d].
        k: [..., S, d].
        v: [..., S, e].
        causal: row i attends to columns j <= i + (S - T) only.
    """
    q, k = as_tensor(q), as_tensor(k)
    scores = q @ k.swapaxes(-1, -2)
    return softmax(scores, scale=1.0 / math.sqrt(max(q.shape[-1], 1)), causal=causal) @ v
