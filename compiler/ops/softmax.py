"""Softmax over the last axis, scaled and optionally causal, as attention wants it.

Computed after subtracting the row's maximum, so that nothing overflows (Goodfellow, Bengio &
Courville, Deep Learning, 2016, section 4.1).
"""

from __future__ import annotations

import math

from compiler.attrs import Attrs
from compiler.fusion.define import fused_op
from compiler.fusion.expressions import Expression
from compiler.ops.signature import Types
from compiler.registry import OpTypeError


def _softmax(x: Expression, *, scale: float, causal: bool) -> Expression:
    z = x * scale
    if causal:
        rows, columns = x.shape[-2:]
        last_seen = x.row_index(1, rows) + (columns - rows)
        z = (x.column_index() <= last_seen).where(z, -math.inf)
    e = (z - z.max()).exp()
    return e / e.sum()


def _gradient(dy: Expression, y: Expression, *, scale: float) -> Expression:
    return y * scale * (dy - (dy * y).sum())


def _check(inputs: Types, attrs: Attrs) -> None:
    shape = inputs[0].shape
    if not attrs.float_("scale") > 0:
        raise OpTypeError(f"needs a scale above 0, got {attrs.float_('scale')}")
    if attrs.bool_("causal") and len(shape) < 2:
        raise OpTypeError(f"needs x of rank 2 or more where it is causal, got {inputs[0]}")
    if attrs.bool_("causal") and shape[-1] < shape[-2]:
        raise OpTypeError(
            "needs at least as many columns as rows when causal, or the first rows have nothing to"
            f" attend to; got {shape[-2]} rows and {shape[-1]} columns"
        )


def _log_softmax(x: Expression) -> Expression:
    z = x - x.max()
    return z - z.exp().sum().log()


LOG_SOFTMAX = fused_op(
    "log_softmax",
    "x[*, S] -> y[*, S]",
    _log_softmax,
    gradient=lambda dy, y: dy - y.exp() * dy.sum(),
)

SOFTMAX = fused_op("softmax", "x[*, S] -> y[*, S]", _softmax, gradient=_gradient, check=_check)
"""softmax(scale * x), with a scale above 0.

Causal: x is [..., T, S] with S >= T, and column j of row i counts only when j <= i + (S - T).
"""
