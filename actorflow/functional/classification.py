"""Losses of classes and of probabilities."""

from __future__ import annotations

import math

import numpy as np

from actorflow.functional.elementwise import exp, log, where
from actorflow.functional.loss import REDUCTIONS, reduced
from actorflow.literals import checked_number, checked_size
from actorflow.tensor import Operand, Tensor, apply, apply_many, as_tensor
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.ops import loss
from compiler.types import DType

__all__ = [
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cross_entropy",
    "kl_div",
    "nll_loss",
    "soft_margin_loss",
]


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Operand | None = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the negative log-likelihood of classes, as torch: the classes are axis 1.

    On top of a linear layer, large logits [N, C] are computed a chunk of rows at a time and never
    exist as a whole, unless the job reads them too: for an accuracy, say, or as an output.

    Args:
        input: logits [C], [N, C] or [N, C, d1, ...]. Those of sequences [B, T, C] are
            `logits.flatten(0, 1)` with labels `y.flatten()`.
        target: labels, integers of that shape without C; one outside 0..C-1 fails the step with an
            IndexError. Or probabilities, floats of the shape of the logits.
        weight: of each class [C], no gradient flows to it; the mean is over the weights of labels.
        ignore_index: a label that counts for nothing; the mean is over the others. Unlike torch's
            -100 there is none unless it is given: then a label of -100 fails the step.
        reduction: "mean", "sum", or "none": one loss per label.
        label_smoothing: the share of a label, from 0 to 1, that is spread over all classes.

    Raises CompileError for shapes that do not fit.
    """
    logits, target = as_tensor(input), as_tensor(target, DType.INT64)
    smoothing = checked_number(label_smoothing, "label_smoothing of cross_entropy")
    if not 0.0 <= smoothing <= 1.0:
        raise CompileError(f"{find_source()}: label_smoothing must be in [0, 1], got {smoothing}")
    if target.dtype.is_float:
        return _of_probabilities(logits, target, weight, ignore_index, reduction, smoothing)
    rows, labels = _rows_of("cross_entropy", logits, target)
    if weight is None and ignore_index is None and smoothing == 0.0:
        losses = apply_many(loss.CROSS_ENTROPY_ROWS, rows, labels)[0]
        return _shaped(reduced(losses, reduction), target)
    labels, is_valid = _valid(labels, ignore_index)
    shares: Tensor | None = None
    if weight is None and smoothing == 0.0:
        losses = apply_many(loss.CROSS_ENTROPY_ROWS, rows, labels)[0]
    else:
        own = _class_weights("cross_entropy", rows, weight)
        losses, shares, _ = apply_many(
            loss.WEIGHTED_CROSS_ENTROPY_ROWS, rows, labels, own, smoothing=smoothing
        )
    return _weighed(losses, shares, is_valid, reduction, target)


def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Operand | None = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return the negative log-likelihood of labels from log-probabilities; see `cross_entropy`."""
    x, target = as_tensor(input), as_tensor(target, DType.INT64)
    rows, labels = _rows_of("nll_loss", x, target)
    labels, is_valid = _valid(labels, ignore_index)
    own = _class_weights("nll_loss", rows, weight)
    losses, shares = apply_many(loss.NLL_ROWS, rows, labels, own)
    return _weighed(losses, shares, is_valid, reduction, target)


def binary_cross_entropy(
    input: Tensor, target: Tensor, weight: Operand | None = None, reduction: str = "mean"
) -> Tensor:
    """Return -(y log x + (1 - y) log(1 - x)) for probabilities x; logarithms are at least -100."""
    losses = apply(loss.BCE, as_tensor(input), target)
    return reduced(losses if weight is None else losses * weight, reduction)


def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Operand,
    weight: Operand | None = None,
    reduction: str = "mean",
    pos_weight: Operand | None = None,
) -> Tensor:
    """Return `binary_cross_entropy` of sigmoid(x), which neither overflows nor loses digits.

    `pos_weight` multiplies the part of the target, and broadcasts: one number per class, say.
    """
    share = 1.0 if pos_weight is None else pos_weight
    losses = apply(loss.BCE_WITH_LOGITS, as_tensor(input), target, share)
    return reduced(losses if weight is None else losses * weight, reduction)


def soft_margin_loss(input: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Return log(1 + exp(-y x)) for targets of 1 and -1."""
    return binary_cross_entropy_with_logits(as_tensor(input) * target, 1.0, reduction=reduction)


def kl_div(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    log_target: bool = False,
) -> Tensor:
    """Return y (log y - x) for log-probabilities x and probabilities y, or log y, `log_target`.

    "mean" divides by the number of elements; "batchmean", which is the divergence, by the batch.
    """
    x, y = as_tensor(input), as_tensor(target)
    if log_target:
        losses = exp(y) * (y - x)
    else:
        losses = y * log(where(y == 0.0, 1.0, y)) - y * x
    return reduced(losses, reduction, (*REDUCTIONS, "batchmean"))


def _rows_of(what: str, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits [rows, C] and labels [rows], classes of higher ranks moved from axis 1."""
    axis = min(1, logits.ndim - 1)
    expected = (*logits.shape[:axis], *logits.shape[axis + 1 :])
    if logits.ndim < 1 or expected != target.shape:
        came = f"{what} expects labels of shape {list(expected)} for logits {logits.type}"
        mend = ""
        if logits.ndim > 2 and logits.shape[:-1] == target.shape:
            mend = (
                "; classes are axis 1, as in torch. Where they are the last axis, write"
                f" {what}(logits.flatten(0, {logits.ndim - 2}), y.flatten())"
            )
        raise CompileError(f"{find_source()}: {came}, got {target.type}{mend}")
    if target.dtype is DType.UINT64:
        target = target.to(DType.INT64)  # no fused kernel computes with these
    return _classes_last(logits), target.reshape(math.prod(target.shape))


def _classes_last(x: Tensor) -> Tensor:
    if x.ndim > 2:
        x = x.permute(0, *range(2, x.ndim), 1)
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _shaped(losses: Tensor, target: Tensor) -> Tensor:
    """Return one loss per label in the labels' shape, and a scalar as it is."""
    return losses.reshape(target.shape) if losses.ndim else losses


def _valid(labels: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor | None]:
    """Return labels in range for those that are ignored, and which are not."""
    if ignore_index is None:
        return labels, None
    is_valid = labels != checked_size(ignore_index, "ignore_index")
    return where(is_valid, labels, 0), is_valid


def _class_weights(what: str, rows: Tensor, weight: Operand | None) -> Tensor:
    classes = rows.shape[-1]
    if weight is None:
        return as_tensor(np.ones(classes, rows.dtype.value))
    own = as_tensor(weight)
    if own.shape != (classes,):
        raise CompileError(
            f"{find_source()}: {what} expects a weight for each of {classes} classes, got"
            f" {own.type}"
        )
    return own.detach()


def _weighed(
    losses: Tensor,
    shares: Tensor | None,
    is_valid: Tensor | None,
    reduction: str,
    target: Tensor,
) -> Tensor:
    """Return losses without what is ignored; their mean is over the shares of the others."""
    if is_valid is not None:
        losses = where(is_valid, losses, 0.0)
        shares = is_valid.to(losses.dtype) if shares is None else where(is_valid, shares, 0.0)
    if reduction != "mean":
        return _shaped(reduced(losses, reduction), target)
    return losses.sum() / (1.0 * losses.shape[0] if shares is None else shares.sum())


def _of_probabilities(
    logits: Tensor,
    target: Tensor,
    weight: Operand | None,
    ignore_index: int | None,
    reduction: str,
    smoothing: float,
) -> Tensor:
    if logits.shape != target.shape or not logits.ndim:
        raise CompileError(
            f"{find_source()}: cross_entropy expects probabilities of the shape of the logits"
            f" {logits.type}, or integer labels; got {target.type}"
        )
    if ignore_index is not None:
        raise CompileError(
            f"{find_source()}: cross_entropy ignores labels, and got probabilities"
            f" {target.type}; leave ignore_index out"
        )
    rows, y = _classes_last(logits), _classes_last(target)
    if smoothing:
        y = y * (1.0 - smoothing) + smoothing / rows.shape[-1]
    if weight is not None:
        y = y * _class_weights("cross_entropy", rows, weight)
    losses = apply_many(loss.SOFT_CROSS_ENTROPY_ROWS, rows, y)[0]
    if reduction == "none":
        axis = min(1, logits.ndim - 1)
        return losses.reshape(*logits.shape[:axis], *logits.shape[axis + 1 :])
    return reduced(losses, reduction)
