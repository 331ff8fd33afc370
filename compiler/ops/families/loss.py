"""Losses that have a better formula, or gradient, than a composition of ops.

Cross entropy of integer labels from logits is log-sum-exp minus the label's logit, row by row. Its
mean, which training wants, is a function of two ops (`actorflow.functional.cross_entropy`): so a
fused kernel, or a region over chunks of rows, takes the rows together with what made them.
"""

from __future__ import annotations

from compiler.contract.attrs import Attrs
from compiler.contract.types import DType
from compiler.graph.registry import OpTypeError, Types
from compiler.ops.language.define import fused_op
from compiler.ops.language.expressions import Expression

Three = tuple[Expression, Expression, Expression]

_BCE_FLOOR = -100.0
"""Logarithms of probabilities are no less, as in torch: a certain error costs no infinity."""


def _lse(logits: Expression) -> Expression:
    """Subtract the row's maximum first, so that nothing overflows."""
    largest = logits.max()
    return largest + (logits - largest).exp().sum().log()


def _losses(logits: Expression, labels: Expression) -> tuple[Expression, Expression]:
    lse = _lse(logits)
    is_label = _is_label(logits, labels.within(logits.shape[-1]))
    return lse - is_label.where(logits, 0).sum(), lse


def _gradient(
    dlosses: Expression, logits: Expression, labels: Expression, lse: Expression
) -> Expression:
    """Trust the labels: the losses, which were computed before, have checked them."""
    probability = (logits - lse).exp()
    return _is_label(logits, labels).where(probability - 1, probability) * dlosses


def _is_label(logits: Expression, labels: Expression) -> Expression:
    return logits.column_index() == labels.to(DType.INT32)


def _check(inputs: Types, attrs: Attrs) -> None:
    if 0 in inputs[0].shape:
        shape = list(inputs[0].shape)
        raise OpTypeError(f"needs at least one row and one class, got logits of shape {shape}")


CROSS_ENTROPY_ROWS = fused_op(
    "cross_entropy_rows",
    "logits[*, C], labels[*]: int -> losses[*], lse[*]",
    _losses,
    gradient=_gradient,
    check=_check,
)
"""lse - logit of the label, and lse, the log of the sum of exponentials of a row.

A label outside 0..C-1 raises IndexError at run time.
"""


def _weighted(
    logits: Expression, labels: Expression, weight: Expression, *, smoothing: float
) -> Three:
    """Weigh by the label's class; smoothing moves a share of the label evenly to all classes."""
    lse = _lse(logits)
    is_label = _is_label(logits, labels.within(logits.shape[-1]))
    share = is_label.where(weight, 0).sum()
    losses = (lse - is_label.where(logits, 0).sum()) * share * (1 - smoothing)
    if smoothing:  # else -inf, which masks a class, would be multiplied by 0
        losses = losses + ((lse - logits) * weight).mean() * smoothing
    return losses, share, lse


def _weighted_gradient(
    dlosses: Expression,
    logits: Expression,
    labels: Expression,
    weight: Expression,
    share: Expression,
    lse: Expression,
    *,
    smoothing: float,
) -> tuple[Expression, Expression]:
    is_label = _is_label(logits, labels)
    target, total = is_label.where(share * (1 - smoothing), 0), share * (1 - smoothing)
    dweight = is_label.where((lse - logits) * (1 - smoothing), 0)
    if smoothing:
        even = smoothing / logits.shape[-1]
        target = target + weight * even
        total, dweight = target.sum(), dweight + (lse - logits) * even
    return dlosses * ((logits - lse).exp() * total - target), dlosses * dweight


WEIGHTED_CROSS_ENTROPY_ROWS = fused_op(
    "weighted_cross_entropy_rows",
    "logits[*, C], labels[*]: int, weight[C] -> losses[*], share[*], lse[*]",
    _weighted,
    gradient=_weighted_gradient,
    check=_check,
)
"""The same with a weight per class; share is that of the label. Attrs: smoothing, from 0 to 1."""


def _soft(logits: Expression, target: Expression) -> tuple[Expression, Expression]:
    lse = _lse(logits)
    return (target * (lse - logits)).sum(), lse


def _soft_gradient(
    dlosses: Expression, logits: Expression, target: Expression, lse: Expression
) -> tuple[Expression, Expression]:
    probability = (logits - lse).exp()
    return dlosses * (probability * target.sum() - target), dlosses * (lse - logits)


SOFT_CROSS_ENTROPY_ROWS = fused_op(
    "soft_cross_entropy_rows",
    "logits[*, C], target[*, C] -> losses[*], lse[*]",
    _soft,
    gradient=_soft_gradient,
    check=_check,
)
"""The sum over classes of target * (lse - logit), and lse."""


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


def _softplus(x: Expression) -> Expression:
    return x.maximum(0) + (1 + (-abs(x)).exp()).log()


def _bce_with_logits(x: Expression, y: Expression, weight: Expression) -> Expression:
    return (1 - y) * x + (1 + (weight - 1) * y) * _softplus(-x)


def _bce_with_logits_gradient(
    dloss: Expression, x: Expression, y: Expression, weight: Expression
) -> Three:
    """The derived one has none at 0, where the absolute value has a kink."""
    share, rest = 1 + (weight - 1) * y, _softplus(-x)
    dx = (1 - y) - share / (1 + x.exp())
    return dloss * dx, dloss * ((weight - 1) * rest - x), dloss * y * rest


BCE_WITH_LOGITS = fused_op(
    "bce_with_logits",
    "x, y, weight -> loss",
    _bce_with_logits,
    gradient=_bce_with_logits_gradient,
)
"""-(weight y log s + (1 - y) log(1 - s)) for s = sigmoid(x)."""


def _bce(x: Expression, y: Expression) -> Expression:
    return -(y * x.log().maximum(_BCE_FLOOR) + (1 - y) * (1 - x).log().maximum(_BCE_FLOOR))


def _bce_gradient(dloss: Expression, x: Expression, y: Expression) -> tuple[Expression, Expression]:
    slope = (x - y) / ((1 - x) * x).maximum(1e-12)
    return dloss * slope, dloss * ((1 - x).log() - x.log())


BCE = fused_op("bce", "x, y -> loss", _bce, gradient=_bce_gradient)
"""-(y log x + (1 - y) log(1 - x)) for probabilities x; torch's gradient where x is 0 or 1."""
