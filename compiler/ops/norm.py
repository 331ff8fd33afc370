"""Layer normalisation over the last axis (Ba, Kiros & Hinton, Layer Normalization, 2016)."""

from __future__ import annotations

from compiler.attrs import Attrs
from compiler.fusion.define import fused_op
from compiler.fusion.expressions import Expression
from compiler.ops.signature import Types
from compiler.registry import OpTypeError

Three = tuple[Expression, Expression, Expression]


def _layer_norm(x: Expression, gamma: Expression, beta: Expression, *, eps: float) -> Three:
    """Take the variance of differences to the mean: a second walk in cache, no cancellation."""
    mean = x.mean()
    difference = x - mean
    rstd = ((difference * difference).mean() + eps).rsqrt()
    return difference * rstd * gamma + beta, mean, rstd


def _gradient(
    dy: Expression, x: Expression, gamma: Expression, mean: Expression, rstd: Expression
) -> Three:
    """Two sums that do not wait for one another, where the derived formula has them in turn."""
    normal = (x - mean) * rstd
    inner = dy * gamma
    rest = inner - inner.mean() - normal * (inner * normal).mean()
    return rstd * rest, dy * normal, dy


def _check(inputs: Types, attrs: Attrs) -> None:
    if not attrs.float_("eps") >= 0:
        raise OpTypeError(f"needs an eps of 0 or more, got {attrs.float_('eps')}")


LAYER_NORM = fused_op(
    "layer_norm",
    "x[*, D], gamma[D], beta[D] -> y[*, D], mean[*], rstd[*]",
    _layer_norm,
    gradient=_gradient,
    check=_check,
)
"""y = (x - mean) * rstd * gamma + beta with rstd = 1 / sqrt(var + eps) and the biased variance."""
