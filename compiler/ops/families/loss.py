"""Losses that have a better formula, or gradient, than a composition of ops.

Cross entropy of integer labels from logits is log-sum-exp minus the label's logit, row by row. Its
mean, which training wants, is a function of two ops (`actorflow.functional.cross_entropy`): so a
fused kernel, or a region over chunks of rows, takes the rows together with what made them.

Every logit is taken relative to the largest of its row, forward and backward. Of logits with a
common part of 1e6 the log-sum-exp itself is rounded to 0.06 in float32, and a difference to it is
noise; so two statistics of a row are kept: its maximum, and the logarithm of the sum of
exponentials of differences to it, which is at most the logarithm of the number of classes.
"""

from __future__ import annotations

from compiler.contract.attrs import Attrs
from compiler.contract.types import DType
from compiler.graph.registry import OpTypeError, Types
from compiler.ops.families.activation import sigmoid
from compiler.ops.language.define import fused_op
from compiler.ops.language.expressions import Expression

Three = tuple[Expression, Expression, Expression]

_BCE_FLOOR = -100.0
"""Logarithms of probabilities are no less, as in torch: a certain error costs no infinity."""


def _statistics(logits: Expression) -> tuple[Expression, Expression]:
    """Return a row's maximum, and the logarithm of the sum of e^(logit - maximum)."""
    largest = logits.max()
    return largest, (logits - largest).exp().sum().log()


def _losses(logits: Expression, labels: Expression) -> Three:
    largest, log_sum = _statistics(logits)
    is_label = _is_label(logits, labels.within(logits.shape[-1]))
    return log_sum - (is_label.where(logits, 0).sum() - largest), largest, log_sum


def _gradient(
    dlosses: Expression,
    logits: Expression,
    labels: Expression,
    largest: Expression,
    log_sum: Expression,
) -> Expression:
    """Trust the labels: the losses, which were computed before, have checked them."""
    probability = (logits - largest - log_sum).exp()
    return _is_label(logits, labels).where(probability - 1, probability) * dlosses


def _is_label(logits: Expression, labels: Expression) -> Expression:
    return logits.column_index() == labels.to(DType.INT32)


def _check(inputs: Types, attrs: Attrs) -> None:
    if 0 in inputs[0].shape:
        shape = list(inputs[0].shape)
        raise OpTypeError(f"needs at least one row and one class, got logits of shape {shape}")


CROSS_ENTROPY_ROWS = fused_op(
    "cross_entropy_rows",
    "logits[*, C], labels[*]: int -> losses[*], largest[*], log_sum[*]",
    _losses,
    gradient=_gradient,
    check=_check,
)
"""log_sum - (logit of the label - largest), and these two statistics of a row.

`largest` is the maximum of the logits, `log_sum` log(sum(e^(logits - largest))). A label outside
0..C-1 raises IndexError at run time.
"""


def _weighted(
    logits: Expression, labels: Expression, weight: Expression, *, smoothing: float
) -> tuple[Expression, ...]:
    """Weigh by the label's class; smoothing moves a share of the label evenly to all classes."""
    largest, log_sum = _statistics(logits)
    is_label = _is_label(logits, labels.within(logits.shape[-1]))
    share = is_label.where(weight, 0).sum()
    losses = log_sum - (is_label.where(logits, 0).sum() - largest)
    losses = losses * share * (1 - smoothing)
    if smoothing:  # else -inf, which masks a class, would be multiplied by 0
        losses = losses + ((log_sum - (logits - largest)) * weight).mean() * smoothing
    return losses, share, largest, log_sum


def _weighted_gradient(
    dlosses: Expression,
    logits: Expression,
    labels: Expression,
    weight: Expression,
    share: Expression,
    largest: Expression,
    log_sum: Expression,
    *,
    smoothing: float,
) -> tuple[Expression, Expression]:
    is_label = _is_label(logits, labels)
    unlikely = log_sum - (logits - largest)
    target, total = is_label.where(share * (1 - smoothing), 0), share * (1 - smoothing)
    dweight = is_label.where(unlikely * (1 - smoothing), 0)
    if smoothing:
        even = smoothing / logits.shape[-1]
        target = target + weight * even
        total, dweight = target.sum(), dweight + unlikely * even
    return dlosses * ((-unlikely).exp() * total - target), dlosses * dweight


WEIGHTED_CROSS_ENTROPY_ROWS = fused_op(
    "weighted_cross_entropy_rows",
    "logits[*, C], labels[*]: int, weight[C] -> losses[*], share[*], largest[*], log_sum[*]",
    _weighted,
    gradient=_weighted_gradient,
    check=_check,
)
"""The same with a weight per class; share is that of the label. Attrs: smoothing, from 0 to 1."""


def _soft(logits: Expression, target: Expression) -> Three:
    largest, log_sum = _statistics(logits)
    return (target * (log_sum - (logits - largest))).sum(), largest, log_sum


def _soft_gradient(
    dlosses: Expression,
    logits: Expression,
    target: Expression,
    largest: Expression,
    log_sum: Expression,
) -> tuple[Expression, Expression]:
    unlikely = log_sum - (logits - largest)
    return dlosses * ((-unlikely).exp() * target.sum() - target), dlosses * unlikely


SOFT_CROSS_ENTROPY_ROWS = fused_op(
    "soft_cross_entropy_rows",
    "logits[*, C], target[*, C] -> losses[*], largest[*], log_sum[*]",
    _soft,
    gradient=_soft_gradient,
    check=_check,
)
"""The sum over classes of target * (log_sum - (logit - largest)), and the two statistics."""


def _picked(x: Expression, labels: Expression, weight: Expression) -> tuple[Expression, Expression]:
    is_label = _is_label(x, labels.within(x.shape[-1]))
    return is_label.where(-x * weight, 0).sum(), is_label.where(weight, 0).sum()


NLL_ROWS = fused_op(
    "nll_rows",
    "x[*, C], labels[*]: int, weight[C] -> losses[*], share[*]",
    _picked,
    check=_check,
)
"""Minus the label's x times its weight, and that weight."""


def _bce_with_logits(x: Expression, y: Expression, weight: Expression) -> Expression:
    """Add what is not negative: of x + log(1 + e^-x) nothing is left where x is below -20."""
    tail = (-abs(x)).exp().log1p()
    return (1 - y) * (x.maximum(0) + tail) + weight * y * (tail - x.minimum(0))


def _bce_with_logits_gradient(
    dloss: Expression, x: Expression, y: Expression, weight: Expression
) -> Three:
    """The derived one has none at 0, where the absolute value has a kink.

    The two parts of the loss that y mixes have the tail in common, all that they are for a tiny x:
    their difference is taken without it.
    """
    tail = (-abs(x)).exp().log1p()
    dx = (1 - y) * sigmoid(x) - weight * y * sigmoid(-x)
    dy = (weight - 1) * tail - weight * x.minimum(0) - x.maximum(0)
    return dloss * dx, dloss * dy, dloss * y * (tail - x.minimum(0))


BCE_WITH_LOGITS = fused_op(
    "bce_with_logits",
    "x, y, weight -> loss",
    _bce_with_logits,
    gradient=_bce_with_logits_gradient,
)
"""-(weight y log s + (1 - y) log(1 - s)) for s = sigmoid(x)."""


def _bce(x: Expression, y: Expression) -> Expression:
    return -(y * x.log().maximum(_BCE_FLOOR) + (1 - y) * (-x).log1p().maximum(_BCE_FLOOR))


def _bce_gradient(dloss: Expression, x: Expression, y: Expression) -> tuple[Expression, Expression]:
    slope = (x - y) / ((1 - x) * x).maximum(1e-12)
    return dloss * slope, dloss * ((-x).log1p() - x.log())


BCE = fused_op("bce", "x, y -> loss", _bce, gradient=_bce_gradient)
"""-(y log x + (1 - y) log(1 - x)) for probabilities x; torch's gradient where x is 0 or 1."""
