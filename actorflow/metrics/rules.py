"""The rules of the metrics: formulas over counts and sums of all rows, on the host, in float64.

Rules of classes and ranks get two counts first, of labels that are no class and of rows with NaN
among their scores. A label that is no class is an error. A NaN makes the metric NaN, as it makes a
loss. Where a metric is not defined it is what scikit-learn gives; the functions say what.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from actorflow.data import DataError
from actorflow.metrics.totals import RULES, NothingCounts, Rule

Array = np.ndarray[Any, Any]

AVERAGES = ("binary", "macro", "micro", "weighted", "none")

POSITIVE, NEGATIVE, IGNORED = 1, 0, -1
"""Codes of rows that are ranked by their scores."""


def ratio(total: Array, count: Array) -> float:
    """Return a sum over the number of its rows: an accuracy, a mean error."""
    if not count:
        raise NothingCounts
    return float(total / count)


def perplexity(total: Array, count: Array) -> float:
    """Return e to the mean of negative log-likelihoods; infinity where that is too much."""
    with np.errstate(over="ignore"):
        return float(np.exp(ratio(total, count)))


def confusion_matrix(counts: Array) -> Array:
    """Return the counts [classes, classes], which are sums already."""
    if not counts.any():
        raise NothingCounts(counts)
    return counts


def of_classes(kind: str, average: str, hits: Array, predicted: Array, actual: Array) -> Any:
    """Return precision, recall or F1 of counts by class [classes]."""
    if not actual.sum():
        raise NothingCounts(np.full(len(hits), math.nan) if average == "none" else math.nan)
    if average == "micro":
        hits, predicted, actual = [x.sum(keepdims=True) for x in (hits, predicted, actual)]
    rows = {"precision": predicted, "recall": actual, "f1": (predicted + actual) / 2}[kind]
    by_class = np.divide(hits, rows, out=np.zeros(len(hits)), where=rows > 0)
    if average == "none":
        return by_class
    if average == "weighted":
        return (by_class * actual).sum() / actual.sum()
    return by_class[1] if average == "binary" else by_class[predicted + actual > 0].mean()


def _ranked(scores: Sequence[Array], codes: Sequence[Array]) -> tuple[Array, Array]:
    """Return the sorted scores of positives, and of negatives."""
    x, y = np.concatenate(scores), np.concatenate(codes)
    if not (y != IGNORED).any():
        raise NothingCounts
    return np.sort(x[y == POSITIVE]), np.sort(x[y == NEGATIVE])


def auroc(scores: Sequence[Array], codes: Sequence[Array]) -> float:
    """Return the share of pairs of a positive and a negative in which the first scores higher.

    Equal scores count half (Mann & Whitney, 1947). Exact: twice the number of pairs is an integer.
    """
    positives, negatives = _ranked(scores, codes)
    below, up_to = [np.searchsorted(negatives, positives, side) for side in ("left", "right")]
    pairs = 2 * len(positives) * len(negatives)
    return int(below.sum() + up_to.sum()) / pairs if pairs else math.nan


def average_precision(scores: Sequence[Array], codes: Sequence[Array]) -> float:
    """Return the sum of precisions at all thresholds, each times the recall that is gained there.

    A threshold is a score of a positive; equal scores pass together.
    """
    positives, negatives = _ranked(scores, codes)
    thresholds, gained = np.unique(positives, return_counts=True)
    hits, misses = [len(x) - np.searchsorted(x, thresholds) for x in (positives, negatives)]
    return math.fsum(hits / (hits + misses) * gained) / max(len(positives), 1)


def r2(*parts: Sequence[Array]) -> float:
    """Return 1 - squared errors / squared distances of the targets from their mean.

    The parts are, of each batch, the number of targets, their mean, the squares of their distances
    from it, and squared errors: so no digits are lost to large numbers (Chan, Golub & LeVeque,
    1979).
    """
    n, mean, within, errors = [np.asarray(part, np.float64) for part in parts]
    if not n.sum():
        raise NothingCounts
    if n.sum() < 2:
        return math.nan
    between = n * (mean - (n * mean).sum() / n.sum()) ** 2
    total, left = within.sum() + between.sum(), errors.sum()
    # Of equal targets no more than what the rounding of their means makes.
    if total <= n.sum() * (n.max() * np.finfo(np.float64).eps * np.abs(mean).max()) ** 2:
        total = 0.0
    return float(1.0 - left / total if total else not left)


def _checked(
    formula: Callable[..., Any], *, keeps_batches: bool = False, is_array: bool = False
) -> Rule:
    """Return a rule that gets the counts of faults before its parts."""

    def finish(faults: Any, *parts: Any) -> Any:
        num_wrong, num_nan = np.sum(faults, axis=0) if keeps_batches else faults
        if num_wrong:
            raise DataError(
                f"{num_wrong} labels or predictions are no class: below 0, or not below the number"
                " of classes. Correct them, or leave these rows out by ignore_index= or mask="
            )
        return formula(*parts) * (math.nan if num_nan else 1)

    return Rule(finish, keeps_batches, is_array)


RULES.update(
    accuracy=_checked(ratio),
    perplexity=_checked(perplexity),
    confusion_matrix=_checked(confusion_matrix, is_array=True),
    auroc=_checked(auroc, keeps_batches=True),
    average_precision=_checked(average_precision, keeps_batches=True),
    error=Rule(ratio),
    r2=Rule(r2, keeps_batches=True),
)
for _kind in ("precision", "recall", "f1"):
    for _average in AVERAGES:
        _formula = partial(of_classes, _kind, _average)
        RULES[f"{_kind} {_average}"] = _checked(_formula, is_array=_average == "none")
