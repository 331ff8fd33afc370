"""Normalisation of rows: by mean and variance (Ba, Kiros & Hinton, Layer Normalization, 2016).

Or by the root of the mean square alone (Zhang & Sennrich, 2019).
"""

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


def _standardised(x: Expression, *, eps: float) -> tuple[Expression, Expression]:
    difference = x - x.mean()
    rstd = ((difference * difference).mean() + eps).rsqrt()
    return difference * rstd, rstd


def _standardised_gradient(dy: Expression, y: Expression, rstd: Expression) -> Expression:
    """Read the output, so that x may be gone."""
    return rstd * (dy - dy.mean() - y * (dy * y).mean())


STANDARDISED = fused_op(
    "standardised",
    "x[*, D] -> y[*, D], rstd[*]",
    _standardised,
    gradient=_standardised_gradient,
    check=_check,
)
"""y = (x - mean) * rstd: layer_norm without scale and shift, which others have per channel."""


def _rms_norm(x: Expression, gamma: Expression, *, eps: float) -> tuple[Expression, Expression]:
    rstd = ((x * x).mean() + eps).rsqrt()
    return x * rstd * gamma, rstd


def _rms_norm_gradient(
    dy: Expression, x: Expression, gamma: Expression, rstd: Expression
) -> tuple[Expression, Expression]:
    normal, inner = x * rstd, dy * gamma
    return rstd * (inner - normal * (inner * normal).mean()), dy * normal


RMS_NORM = fused_op(
    "rms_norm",
    "x[*, D], gamma[D] -> y[*, D], rstd[*]",
    _rms_norm,
    gradient=_rms_norm_gradient,
    check=_check,
)
"""y = x * rstd * gamma with rstd = 1 / sqrt(mean of x^2 + eps)."""
