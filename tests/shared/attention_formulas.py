"""Attention and its gradient from whole matrices, in float64."""

from __future__ import annotations

import numpy as np
from random_formulas import dropout, dropout_of_part


def _scores(q, k, mask, scale, causal):
    """Return scaled scores; causal queries see the keys up to their own, the last one all."""
    scores = scale * (q @ k.swapaxes(-1, -2))
    scores = scores if mask is None else scores + mask
    rows, columns = scores.shape[-2:]
    seen = np.tri(rows, columns, max(columns - rows, 0), dtype=bool)
    return np.where(seen | (not causal), scores, -np.inf)


def _extras(more, shape, p, key, numbered):
    """Return the mask, and what weights of a shape are multiplied with."""
    is_masked = (len(more) - numbered) % 2
    mask, drawn = more[0] if is_masked else None, more[is_masked:]
    if not drawn:
        return mask, 1.0
    ones = np.ones((*shape[:-2], shape[-2] * shape[-1]))
    draw = dropout_of_part if numbered else dropout
    return mask, draw(ones, *drawn, p=p, key=key).reshape(shape)


def attention(q, k, v, *more, scale, causal, p=0.0, key=0, numbered=False):
    """Return outputs, and the logarithms of the sums of exponentials and what those lack: nothing.

    The logarithm is -inf where none is seen.
    """
    shape = (*q.shape[:-1], k.shape[-2])
    mask, kept = _extras(more, shape, p, key, numbered)
    scores = _scores(q, k, mask, scale, causal)
    most = scores.max(-1, keepdims=True, initial=-1e300)
    e = np.exp(scores - most)
    total = e.sum(-1, keepdims=True)
    weights = e / np.where(total == 0, 1, total)
    logs = (np.log(total) + most)[..., 0]
    return (kept * weights) @ v, logs, np.zeros_like(logs)


def attention_grad(dy, q, k, v, y, lse, tail, *more, scale, causal, p=0.0, key=0, numbered=False):
    """Return dq, dk and dv, as if y, lse and tail were the results."""
    mask, kept = _extras(more, (*q.shape[:-1], k.shape[-2]), p, key, numbered)
    weights = np.exp(_scores(q, k, mask, scale, causal) - (lse + tail)[..., None])
    pulled = kept * (dy @ v.swapaxes(-1, -2)) - (dy * y).sum(-1, keepdims=True)
    ds = scale * weights * pulled
    return ds @ k, ds.swapaxes(-1, -2) @ q, (kept * weights).swapaxes(-1, -2) @ dy
