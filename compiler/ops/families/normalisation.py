"""Normalisation: of rows by mean and variance or by mean square, of channels by batch; softmax.

Layer norm: Ba, Kiros & Hinton, Layer Normalization, 2016. RMS norm: Zhang & Sennrich, 2019. Batch
norm: Ioffe & Szegedy, Batch Normalization, 2015. Softmax is computed after subtracting the row's
maximum, so that nothing overflows (Goodfellow, Bengio & Courville, Deep Learning, 2016, section
4.1).
"""

from __future__ import annotations

import math

from compiler.contract.attrs import Attrs
from compiler.contract.types import ValueId
from compiler.graph.columns import Grads, gradient_of
from compiler.graph.graph import GraphBuilder, Node
from compiler.graph.registry import OpTypeError, Types
from compiler.ops.families.arithmetic import MUL, SUB, scaled
from compiler.ops.language.define import fused_op
from compiler.ops.language.expressions import Expression
from compiler.ops.primitives.reduce import sum_to

Three = tuple[Expression, Expression, Expression]

# The mean of numbers around 1e5 is rounded to 0.004 in float32, which would be missing in every
# difference to it, and squared in the variance. Differences to the rounded mean are exact, so what
# it lacks is their mean, and the variance that of their squares less its square: the corrected
# two-pass algorithm (Chan, Golub & LeVeque, Algorithms for Computing the Sample Variance, 1983).


def _centred(x: Expression) -> Three:
    """Return the rounded mean of a row, what it lacks, and the biased variance."""
    mean = x.mean()
    difference = x - mean
    rest = difference.mean()
    squares, square = (difference * difference).mean(), rest * rest
    variance = (squares == math.inf).where(math.inf, squares - square)  # inf - inf would be NaN
    return mean, rest, (square > squares).where(0.0, variance)  # numbers equal but for rounding


def _layer_norm(
    x: Expression, gamma: Expression, beta: Expression, *, eps: float
) -> tuple[Expression, ...]:
    mean, rest, variance = _centred(x)
    rstd = (variance + eps).rsqrt()
    return (x - mean - rest) * rstd * gamma + beta, mean, rest, rstd


def _norm_gradient(
    dy: Expression,
    x: Expression,
    gamma: Expression,
    mean: Expression,
    rest: Expression,
    rstd: Expression,
) -> Three:
    """Two sums that do not wait for one another, where the derived formula has them in turn."""
    normal = (x - mean - rest) * rstd
    inner = dy * gamma
    centred = inner - inner.mean() - normal * (inner * normal).mean()
    return rstd * centred, dy * normal, dy


def _check_norm(inputs: Types, attrs: Attrs) -> None:
    if not attrs.float_("eps") >= 0:
        raise OpTypeError(f"needs an eps of 0 or more, got {attrs.float_('eps')}")


LAYER_NORM = fused_op(
    "layer_norm",
    "x[*, D], gamma[D], beta[D] -> y[*, D], mean[*], rest[*], rstd[*]",
    _layer_norm,
    gradient=_norm_gradient,
    check=_check_norm,
)
"""y = (x - mean) * rstd * gamma + beta with rstd = 1 / sqrt(var + eps) and the biased variance.

The mean is the sum of the outputs `mean` and `rest`, which is what the first lacks by rounding.
"""


def _standardised(x: Expression, *, eps: float) -> tuple[Expression, Expression]:
    mean, rest, variance = _centred(x)
    rstd = (variance + eps).rsqrt()
    return (x - mean - rest) * rstd, rstd


def _standardised_gradient(dy: Expression, y: Expression, rstd: Expression) -> Expression:
    """Read the output, so that x may be gone."""
    return rstd * (dy - dy.mean() - y * (dy * y).mean())


STANDARDISED = fused_op(
    "standardised",
    "x[*, D] -> y[*, D], rstd[*]",
    _standardised,
    gradient=_standardised_gradient,
    check=_check_norm,
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
    check=_check_norm,
)
"""y = x * rstd * gamma with rstd = 1 / sqrt(mean of x^2 + eps)."""


# Normalisation by statistics of the tensor itself.

BATCH_NORM = fused_op(
    "batch_norm",
    "x, mean, rstd, weight, bias -> y",
    lambda x, mean, rstd, weight, bias: (x - mean) * rstd * weight + bias,
    has_rule=True,
)
"""y = (x - mean) * rstd * weight + bias, where mean and rstd are those of x, over the axes of
extent 1 that they have.

Its gradient is that of all three: x gets what flows back through its statistics as well, and these
get nothing.
"""


BATCH_NORM_GRAD = fused_op(
    "batch_norm_grad",
    "dy, x, mean, slope, shift, scale -> dx",
    lambda dy, x, mean, slope, shift, scale: (dy - ((x - mean) * slope + shift)) * scale,
)
"""dx = (dy - ((x - mean) slope + shift)) scale: what flows back to x past all sums of batch_norm.

It is one op so that it is computed in float32 whole, also where dy and x are of 16 bits: the
difference of x to its mean has few digits left there.
"""


@gradient_of(BATCH_NORM)
def _batch_norm(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    """Two sums of one walk, where the derived formula has two walks more over x."""
    x, mean, rstd, weight, bias = node.inputs
    mean_type = b.type_of(mean)
    share = mean_type.num_elements / max(1, b.type_of(x).num_elements)
    difference = b.emit_one(SUB, x, mean)  # rather than normal: cheap enough to be made twice
    sum_dy = sum_to(b, dy, mean_type.shape)
    sum_product = b.emit_one(MUL, sum_to(b, b.emit_one(MUL, dy, difference), mean_type.shape), rstd)
    slope = b.emit_one(MUL, scaled(b, sum_product, share), rstd)
    shift, scale = scaled(b, sum_dy, share), b.emit_one(MUL, rstd, weight)
    dx = b.emit_one(BATCH_NORM_GRAD, dy, x, mean, slope, shift, scale)
    pairs = ((sum_product, weight), (sum_dy, bias))
    narrow = [sum_to(b, value, b.type_of(like).shape) for value, like in pairs]
    return (dx, None, None, *narrow)


# Softmax over the last axis, scaled and optionally causal, as attention wants it.


def _softmax(x: Expression, *, scale: float, causal: bool) -> Expression:
    z = x * scale
    if causal:
        rows, columns = x.shape[-2:]
        last_seen = x.row_index(1, rows) + (columns - rows)
        z = (x.column_index() <= last_seen).where(z, -math.inf)
    e = (z - z.max()).exp()
    return e / e.sum()


def _softmax_gradient(dy: Expression, y: Expression, *, scale: float) -> Expression:
    return y * scale * (dy - (dy * y).sum())


def _check_softmax(inputs: Types, attrs: Attrs) -> None:
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

SOFTMAX = fused_op(
    "softmax", "x[*, S] -> y[*, S]", _softmax, gradient=_softmax_gradient, check=_check_softmax
)
"""softmax(scale * x), with a scale above 0.

Causal: x is [..., T, S] with S >= T, and column j of row i counts only when j <= i + (S - T).
"""
