"""Cross entropy of integer labels from logits: log-sum-exp minus the label's logit, row by row.

Its mean, which training wants, is a function of two ops (`actorflow.functional.cross_entropy`): so
a fused kernel, or a region over chunks of rows, takes the rows together with what made them.
"""

from __future__ import annotations

from compiler.attrs import Attrs
from compiler.fusion.define import fused_op
from compiler.fusion.expressions import Expression
from compiler.ops.signature import Types
from compiler.registry import OpTypeError
from compiler.types import DType


def _losses(logits: Expression, labels: Expression) -> tuple[Expression, Expression]:
    """Subtract the row's maximum first, so that nothing overflows."""
    largest = logits.max()
    lse = largest + (logits - largest).exp().sum().log()
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
