"""Metrics of classes, of ranked scores and of numbers, as functions inside a job.

    return {"loss": loss, "f1": af.metrics.f1(logits, y), "auroc": af.metrics.auroc(score, is_spam)}

Each computes a few counts or sums of its rows, in int64 or float64, which a plan returns in place
of a value; of the whole set, on any number of ranks, the value follows from them (`rules.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypedDict, Unpack

import numpy as np

from actorflow.functional.arranging import arange
from actorflow.functional.elementwise import isnan, square, where
from actorflow.functional.loss import cross_entropy
from actorflow.functional.shape import stack
from actorflow.metrics.rules import AVERAGES, IGNORED
from actorflow.metrics.totals import Metric
from actorflow.tensor.literals import checked_size
from actorflow.tensor.op_math import widened
from actorflow.tensor.tensor import Operand, Tensor, apply, as_tensor
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError
from compiler.contract.types import DType
from compiler.ops.primitives.matmul import KEEPS_PRECISION, MATMUL


class LabelOptions(TypedDict, total=False):
    """Of metrics of labels: how many classes there are, and what counts.

    `num_classes` is for predicted classes, which do not tell. A label `ignore_index` counts for
    nothing. `mask` has a bool or number for each label or row, 0 for what counts for nothing, such
    as the `weights` of a batch.
    """

    num_classes: int | None
    ignore_index: int | None
    mask: Operand | None


def accuracy(
    preds: Tensor, target: Tensor, *, top_k: int = 1, **options: Unpack[LabelOptions]
) -> Metric:
    """Return the share of rows whose label is predicted, or is among the `top_k` best classes.

    A label that is no class is an error of the run, and a NaN in a row that counts makes the metric
    NaN: of this one and of all below that take labels.

    Args:
        preds: logits [N, C] or [N, C, ...] as of `af.cross_entropy`; or predicted classes, integers
            or bools of the labels' shape; or floats of that shape, logits of class 1 of two. Of
            probabilities give p > 0.5.
        target: labels [N] or [N, ...], integers from 0 to C - 1, or bools.
        top_k: how many of the best classes count. Of equal logits the first ones are better.
        **options: see `LabelOptions`.

    Raises CompileError with the user's line.
    """
    rows = _rows("accuracy", preds, target, **options)
    is_right, k = rows.predicted == rows.labels, checked_size(top_k, "top_k of accuracy")
    if not 1 <= k <= rows.num_classes or (k > 1 and rows.logits is None):
        raise CompileError(
            f"{find_source()}: top_k of accuracy must be from 1 to the number of classes"
            f" ({rows.num_classes}), and above 1 it needs logits [N, C]; got {top_k} for"
            f" {preds.type}"
        )
    if rows.logits is not None and k > 1:
        labels = rows.labels.unsqueeze(1)
        own, is_before = rows.logits.gather(1, labels), arange(rows.num_classes) < labels
        is_better = (rows.logits > own) | ((rows.logits == own) & is_before)
        is_right = is_better.sum(1) < k
    return _metric("accuracy", rows, (is_right & rows.counts).sum(), rows.counts.sum())


def precision(
    preds: Tensor, target: Tensor, *, average: str | None = None, **options: Unpack[LabelOptions]
) -> Metric:
    """Return the share of rows of a class among those predicted as it; 0 where there are none.

    Args:
        preds: as of `accuracy`.
        target: labels, as of `accuracy`.
        average: "binary": that of class 1 of two, the default where there are two without logits
            [N, C]. "macro", the default else: the mean over the classes that labels or predictions
            have. "weighted": the mean by the labels of each class. "micro": over all rows at once.
            "none": an array [C].
        **options: see `LabelOptions`.

    Raises CompileError with the user's line.
    """
    return _of_classes("precision", _rows("precision", preds, target, **options), average)


def recall(
    preds: Tensor, target: Tensor, *, average: str | None = None, **options: Unpack[LabelOptions]
) -> Metric:
    """Return the share of rows predicted as a class among those of it; see `precision`."""
    return _of_classes("recall", _rows("recall", preds, target, **options), average)


def f1(
    preds: Tensor, target: Tensor, *, average: str | None = None, **options: Unpack[LabelOptions]
) -> Metric:
    """Return the harmonic mean of precision and recall of a class; see `precision`."""
    return _of_classes("f1", _rows("f1", preds, target, **options), average)


def confusion_matrix(preds: Tensor, target: Tensor, **options: Unpack[LabelOptions]) -> Metric:
    """Return how many rows of each label (first axis) are predicted as each class: int64 [C, C].

    Arguments are those of `accuracy`. Raises CompileError with the user's line.
    """
    rows = _rows("confusion_matrix", preds, target, **options)
    is_label, is_predicted = [x.to(DType.FLOAT64) for x in _by_class(rows)]
    # A product is parallel, and a sum over ranks; float64 counts up to 2^53 in any precision.
    counts = apply(MATMUL, is_label.T, is_predicted, **{KEEPS_PRECISION: True})
    return _metric("confusion_matrix", rows, counts.to(DType.INT64))


def auroc(
    preds: Tensor, target: Tensor, ignore_index: int | None = None, mask: Operand | None = None
) -> Metric:
    """Return the area under the ROC curve: how often a positive scores higher than a negative.

    Of scores, logits or probabilities of any shape, and labels 0 and 1 of that shape. Exact, by
    sorting all scores, of which equal ones count half. The host keeps 5 bytes of each row of the
    set until then (9 of float64 scores). NaN where one class is missing. `ignore_index` and `mask`
    are those of `LabelOptions`. Raises CompileError with the user's line.
    """
    return _of_ranks("auroc", preds, target, ignore_index, mask)


def average_precision(
    preds: Tensor, target: Tensor, ignore_index: int | None = None, mask: Operand | None = None
) -> Metric:
    """Return the precision at every threshold, averaged by the recall that is gained there.

    The area under the curve of precision and recall as steps, without interpolation; 0 without
    positives. Arguments, exactness and memory are those of `auroc`.
    """
    return _of_ranks("average_precision", preds, target, ignore_index, mask)


def perplexity(
    preds: Tensor, target: Tensor, ignore_index: int | None = -100, mask: Operand | None = None
) -> Metric:
    """Return e to the mean cross-entropy of logits [..., C] over the labels [...] that count.

    `ignore_index` and `mask` are those of `LabelOptions`. Raises CompileError with the user's line.
    """
    _check_shapes("perplexity", preds, target, preds.shape[:-1], "logits [..., C] and labels [...]")
    counts = _counts("perplexity", target, ignore_index, mask)
    logits = widened(preds).reshape(math.prod(target.shape), preds.shape[-1])
    labels, is_wrong = _classes(target, counts, logits.shape[1])
    losses = where(counts, cross_entropy(logits, labels, reduction="none"), 0.0)
    faults = stack([is_wrong.sum(), isnan(losses).sum()])
    total = losses.to(DType.FLOAT64).sum()
    return Metric("perplexity", (faults, total, counts.sum()), find_source())


def mean_squared_error(preds: Tensor, target: Tensor, mask: Operand | None = None) -> Metric:
    """Return the mean of squared differences of predictions and targets of one shape.

    `mask` has a bool or number for each target or row, 0 for what does not count. Raises
    CompileError with the user's line.
    """
    x, y, counts = _numbers("mean_squared_error", preds, target, mask)
    return Metric("error", (square(x - y).sum(), counts.sum()), find_source())


def mean_absolute_error(preds: Tensor, target: Tensor, mask: Operand | None = None) -> Metric:
    """Return the mean of absolute differences; see `mean_squared_error`."""
    x, y, counts = _numbers("mean_absolute_error", preds, target, mask)
    return Metric("error", (abs(x - y).sum(), counts.sum()), find_source())


def r2_score(preds: Tensor, target: Tensor, mask: Operand | None = None) -> Metric:
    """Return the coefficient of determination R², over all elements: 1 is perfect, 0 the mean.

    NaN for one element. Of targets that are all equal 1 where all are met, else 0. Arguments are
    those of `mean_squared_error`.
    """
    x, y, counts = _numbers("r2_score", preds, target, mask)
    count = counts.sum()
    mean = y.sum() / where(count == 0, 1, count).to(DType.FLOAT64)
    within = where(counts, square(y - mean), 0.0).sum()
    return Metric("r2", (count, mean, within, square(x - y).sum()), find_source())


@dataclass(frozen=True, slots=True)
class _LabeledRows:
    """Rows [N]: predicted classes, labels, and which count; `faults` are those of `rules`.

    Labels and predictions are classes everywhere: 0 where a row does not count. `logits` are
    [N, C], where there are some.
    """

    predicted: Tensor
    labels: Tensor
    counts: Tensor
    faults: Tensor
    num_classes: int
    logits: Tensor | None


def _rows(
    what: str,
    preds: Tensor,
    target: Tensor,
    *,
    num_classes: int | None = None,
    ignore_index: int | None = None,
    mask: Operand | None = None,
) -> _LabeledRows:
    is_float, has_classes = preds.dtype.is_float, preds.ndim == target.ndim + 1
    expected = (*preds.shape[:1], *preds.shape[2:]) if has_classes and is_float else preds.shape
    wants = "logits [N, C, ...] and labels [N, ...], or scores or predicted classes of their shape"
    _check_shapes(what, preds, target, expected, wants)
    classes = None if num_classes is None else checked_size(num_classes, f"num_classes of {what}")
    found = preds.shape[1] if has_classes else 2 if is_float or classes is None else classes
    if classes not in (None, found):
        raise CompileError(
            f"{find_source()}: {what} has num_classes={classes}, and {preds.type} is of {found}"
            " classes; give logits [N, C, ...] of that many, or predicted classes"
        )
    counts = _counts(what, target, ignore_index, mask)
    labels, is_wrong = _classes(target, counts, found)
    logits, is_nan = None, counts & ~counts
    if has_classes:
        last = preds.permute(0, *range(2, preds.ndim), 1) if preds.ndim > 2 else preds
        logits = last.reshape(math.prod(target.shape), found)
        predicted, is_nan = logits.argmax(1), isnan(logits).any(1)
    elif is_float:
        flat = preds.reshape(math.prod(target.shape))
        predicted, is_nan = (flat > 0.0).to(DType.INT64), isnan(flat)
    else:
        predicted, is_other = _classes(preds, counts, found)
        is_wrong = is_wrong | is_other
    faults = stack([is_wrong.sum(), (counts & is_nan).sum()])
    return _LabeledRows(predicted, labels, counts, faults, found, logits)


def _check_shapes(
    what: str, preds: Tensor, target: Tensor, expected: tuple[int, ...], wants: str
) -> None:
    if expected != target.shape:
        raise CompileError(
            f"{find_source()}: {what} expects {wants}, got {preds.type} and {target.type}"
        )


def _counts(what: str, target: Tensor, ignore_index: int | None, mask: Operand | None) -> Tensor:
    """Return which labels count, [N]."""
    if target.dtype.is_float:
        raise CompileError(
            f"{find_source()}: {what} expects labels that are integers or bools, got {target.type}"
        )
    counts = _masked(what, target, mask)
    if ignore_index is None:
        return counts
    flat = target.reshape(math.prod(target.shape))
    return counts & (flat != checked_size(ignore_index, f"ignore_index of {what}"))


def _masked(what: str, target: Tensor, mask: Operand | None) -> Tensor:
    """Return what a mask has of targets, [N]: all without one."""
    mask = as_tensor(np.ones((1,) * target.ndim, bool) if mask is None else mask)
    if mask.shape != target.shape[: mask.ndim] and math.prod(mask.shape) != 1:
        raise CompileError(
            f"{find_source()}: {what} expects a mask of the shape of its target"
            f" {list(target.shape)}, or of the first axes of it, got {mask.type}"
        )
    wide = mask.reshape(*mask.shape, *[1] * (target.ndim - mask.ndim))
    return (wide != 0).broadcast_to(target.shape).reshape(math.prod(target.shape))


def _classes(labels: Tensor, counts: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return labels [N], 0 where there is no class that counts; and which count and are none."""
    flat = labels.reshape(math.prod(labels.shape)).to(DType.INT64)
    is_class = (flat >= 0) & (flat < num_classes)
    return where(counts & is_class, flat, 0), counts & ~is_class


def _metric(rule: str, rows: _LabeledRows, *parts: Tensor) -> Metric:
    return Metric(rule, (rows.faults, *parts), find_source())


def _by_class(rows: _LabeledRows) -> list[Tensor]:
    """Return by row and class, [N, C], whether it is the label, and whether it is predicted."""
    classes, counts = arange(rows.num_classes), rows.counts.unsqueeze(1)
    return [(x.unsqueeze(1) == classes) & counts for x in (rows.labels, rows.predicted)]


def _of_classes(kind: str, rows: _LabeledRows, average: str | None) -> Metric:
    average = average or ("binary" if rows.logits is None and rows.num_classes == 2 else "macro")
    if average not in AVERAGES or (average == "binary" and rows.num_classes != 2):
        raise CompileError(
            f"{find_source()}: average of {kind} must be one of {', '.join(AVERAGES)}, and"
            f" 'binary' is for 2 classes; got {average!r} for {rows.num_classes}"
        )
    is_label, is_predicted = _by_class(rows)
    counts = [x.sum(0) for x in (is_label & is_predicted, is_predicted, is_label)]
    return _metric(f"{kind} {average}", rows, *counts)


def _of_ranks(
    what: str, preds: Tensor, target: Tensor, ignore_index: int | None, mask: Operand | None
) -> Metric:
    _check_shapes(what, preds, target, preds.shape, "scores and labels of one shape")
    counts = _counts(what, target, ignore_index, mask)
    labels, is_wrong = _classes(target, counts, 2)
    scores = widened(preds if preds.dtype.is_float else preds.to(DType.FLOAT64))
    scores = scores.reshape(math.prod(target.shape))
    faults = stack([is_wrong.sum(), (counts & isnan(scores)).sum()])
    codes = where(counts, labels, IGNORED).to(DType.INT8)
    return Metric(what, (faults, scores, codes), find_source())


def _numbers(
    what: str, preds: Tensor, target: Tensor, mask: Operand | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return predictions and targets [N] in float64, 0 where they do not count, and which do."""
    _check_shapes(what, preds, target, preds.shape, "predictions and targets of one shape")
    counts = _masked(what, target, mask)
    x, y = [a.reshape(math.prod(a.shape)).to(DType.FLOAT64) for a in (preds, target)]
    return where(counts, x, 0.0), where(counts, y, 0.0), counts
