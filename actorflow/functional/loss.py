"""Losses of regression and of distances, of classes and of probabilities.

They are computed for each element, or row, and brought together by `reduction`: "mean" and "sum"
make a scalar, "none" leaves them. "tokens" is the mean with the weight of its batch, the number of
losses that count: several batches of a step, or of an evaluation, then have the mean over all of
their losses, where that of means counts a short batch as much as a long one (`weighted_mean`).
"""

from __future__ import annotations

import math

import numpy as np

from actorflow.functional.elementwise import clamp, exp, log, maximum, sqrt, square, where
from actorflow.functional.indexing import broadcast_shapes
from actorflow.functional.reduce import norm
from actorflow.tensor.literals import checked_number, checked_size, with_numpy_names
from actorflow.tensor.op_math import in_float32
from actorflow.tensor.tensor import Operand, Tensor, apply, apply_many, as_tensor, checked_axis
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError
from compiler.contract.types import DType
from compiler.ops.families import activation, arithmetic, loss, weights

__all__ = [
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cdist",
    "cosine_embedding_loss",
    "cosine_similarity",
    "cross_entropy",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "nll_loss",
    "pairwise_distance",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "weighted_mean",
]


REDUCTIONS = ("mean", "sum", "none", "tokens")


def reduced(losses: Tensor, reduction: str, known: tuple[str, ...] = REDUCTIONS) -> Tensor:
    """Return losses brought together. Raises CompileError for an unknown reduction."""
    if reduction not in known:
        raise CompileError(
            f"{find_source()}: reduction must be one of {', '.join(known)}, got {reduction!r}"
        )
    if reduction == "batchmean":
        return losses.sum() * (1.0 / max(losses.shape[0], 1) if losses.ndim else 1.0)
    if reduction == "tokens":
        count = math.prod(losses.shape)
        return mean_by_weight(losses.sum(), as_tensor(np.array(count, losses.dtype.value)), count)
    return {"mean": losses.mean, "sum": losses.sum, "none": lambda: losses}[reduction]()


def mean_by_weight(total: Tensor, weight: Tensor, count: int) -> Tensor:
    """Return total / weight as the mean of a batch that has this weight, of `count` where all do.

    No gradient flows to the weight.
    """
    return apply(weights.WEIGHTED_MEAN, total, weight.detach(), count=max(count, 1))


@in_float32
def weighted_mean(input: Tensor, weight: Operand) -> Tensor:
    """Return sum(input * weight) / sum(weight), a scalar; 0 where all weights are 0.

    It has the weight of its batch, sum(weight), and so has what is computed from it: of several
    batches, of a step with `accumulate` or of an evaluation, gradients and outputs are the means by
    these weights, and thus over all elements of all batches.

        af.weighted_mean(af.mse_loss(y, batch.y, reduction="none"), batch.weights)

    Args:
        input: floats. What has the weight 0 counts for nothing, be it NaN.
        weight: not negative; broadcasts to the shape of `input`. No gradient flows to it.

    Raises CompileError with the user's line.
    """
    x = as_tensor(input)
    w = as_tensor(weight).to(x.dtype)
    if broadcast_shapes([x.shape, w.shape], "the weight of weighted_mean") != x.shape:
        raise CompileError(
            f"{find_source()}: weighted_mean expects a weight that broadcasts to {x.type}, got"
            f" {w.type}"
        )
    w = w.broadcast_to(x.shape).detach()
    total = (where(w == 0.0, 0.0, x) * w).sum()
    return mean_by_weight(total, w.sum(), math.prod(x.shape))


@in_float32
def mse_loss(input: Operand, target: Operand, reduction: str = "mean") -> Tensor:
    """Return squared differences."""
    return reduced(square(_difference(input, target)), reduction)


@in_float32
def l1_loss(input: Operand, target: Operand, reduction: str = "mean") -> Tensor:
    """Return absolute differences."""
    return reduced(_absolute(_difference(input, target)), reduction)


@in_float32
def smooth_l1_loss(
    input: Operand, target: Operand, reduction: str = "mean", beta: float = 1.0
) -> Tensor:
    """Return d^2 / (2 beta) for absolute differences d below `beta`, else d - beta / 2."""
    beta = _not_negative(beta, "the beta of smooth_l1_loss")
    d = _absolute(_difference(input, target))
    # The branch below would divide by 0.
    if beta == 0.0:
        return reduced(d, reduction)
    return reduced(where(d < beta, square(d) * (0.5 / beta), d - 0.5 * beta), reduction)


@in_float32
def huber_loss(
    input: Operand, target: Operand, reduction: str = "mean", delta: float = 1.0
) -> Tensor:
    """Return d^2 / 2 for absolute differences d up to `delta`, else delta (d - delta / 2)."""
    delta = _not_negative(delta, "the delta of huber_loss")
    d = _absolute(_difference(input, target))
    return reduced(where(d <= delta, square(d) * 0.5, (d - 0.5 * delta) * delta), reduction)


@in_float32
def poisson_nll_loss(
    input: Tensor,
    target: Tensor,
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    reduction: str = "mean",
) -> Tensor:
    """Return exp(x) - y x, or x - y log(x + eps) without `log_input`.

    `full` adds Stirling's approximation of log y! for targets above 1.
    """
    x, y = as_tensor(input), as_tensor(target)
    small = checked_number(eps, "the eps of poisson_nll_loss")
    losses = apply(arithmetic.EXP, x) - y * x if log_input else x - y * log(x + small)
    if full:
        large = maximum(y, 1.0)
        # `large` is at least 1, so that the branch that is not taken has no NaN to hand to its
        # gradient.
        stirling = large * log(large) - large + log(large * (2 * math.pi)) * 0.5
        losses = losses + where(y > 1.0, stirling, 0.0)
    return reduced(losses, reduction)


@in_float32
def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Operand,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Return (log v + (x - y)^2 / v) / 2 for the variance v, which is at least `eps`.

    `var` has the shape of the prediction, or an axis of 1 for the last, or lacks it. `full` adds
    the constant log(2 pi) / 2.
    """
    x, v = as_tensor(input), as_tensor(var)
    if v.ndim == x.ndim - 1 and v.shape == x.shape[:-1] and v.ndim:
        v = v.reshape(*v.shape, 1)
    v = _at_least(v, checked_number(eps, "the eps of gaussian_nll_loss"))
    distance = x - as_tensor(target)
    losses = (log(v) + distance / v * distance) * 0.5  # the square alone may overflow
    return reduced(losses + 0.5 * math.log(2 * math.pi) if full else losses, reduction)


@in_float32
def hinge_embedding_loss(
    input: Tensor, target: Tensor, margin: float = 1.0, reduction: str = "mean"
) -> Tensor:
    """Return x where the target is 1, and max(0, margin - x) where it is -1."""
    x, y = as_tensor(input), as_tensor(target)
    margin = checked_number(margin, "the margin of hinge_embedding_loss")
    far = where(y != 1, _positive(margin - x), 0.0)
    return reduced(far + where(y != -1, x, 0.0), reduction)


@in_float32
def margin_ranking_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """Return max(0, -y (x1 - x2) + margin): y is 1 where the first should rank higher, else -1."""
    margin = checked_number(margin, "the margin of margin_ranking_loss")
    ahead = as_tensor(target) * (as_tensor(input1) - as_tensor(input2))
    return reduced(_positive(margin - ahead), reduction)


@with_numpy_names
@in_float32
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Return the cosine of the angle between vectors along `dim`; norms are at least `eps`."""
    a, b = as_tensor(x1), as_tensor(x2)
    small = checked_number(eps, "the eps of cosine_similarity")
    shape = (a * b).shape
    wide = [a.broadcast_to(shape), b.broadcast_to(shape)]
    axis = checked_axis(wide[0], dim)
    parts = [x / _at_least(norm(x, dim=axis, keepdim=True), small) for x in wide]
    return (parts[0] * parts[1]).sum(axis)


@in_float32
def cosine_embedding_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """Return 1 - cos for pairs of target 1, and max(0, cos - margin) for pairs of target -1.

    Vectors lie along the last axis of [N, D], or are [D].
    """
    a, b, y = as_tensor(input1), as_tensor(input2), as_tensor(target)
    margin = checked_number(margin, "the margin of cosine_embedding_loss")
    # 1e-12 as in torch: a vector of zeros has cosine 0 and a finite gradient.
    lengths = (square(a).sum(-1) + 1e-12) * (square(b).sum(-1) + 1e-12)
    likeness = (a * b).sum(-1) / sqrt(lengths)
    near = where(y == 1, 1.0 - likeness, 0.0)
    return reduced(near + where(y == -1, _positive(likeness - margin), 0.0), reduction)


@in_float32
def pairwise_distance(
    x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    """Return the p-norm of x1 - x2 + eps along the last axis."""
    power = checked_number(p, "the p of pairwise_distance")
    small = checked_number(eps, "the eps of pairwise_distance")
    if not power > 0:
        raise CompileError(f"{find_source()}: p of pairwise_distance must be above 0, got {power}")
    return norm(as_tensor(x1) - as_tensor(x2) + small, power, -1, keepdim=keepdim)


@in_float32
def cdist(x1: Tensor, x2: Tensor, p: float = 2.0) -> Tensor:
    """Return the p-norms of the differences of all rows of x1 and all rows of x2.

    x1 [..., P, M], x2 [..., R, M] -> [..., P, R]; batches broadcast. No gradient flows where a
    distance is 0. Differences are taken before powers, so that near rows keep their digits.
    """
    x1, x2 = as_tensor(x1), as_tensor(x2)
    if min(x1.ndim, x2.ndim) < 2 or x1.shape[-1] != x2.shape[-1]:
        raise CompileError(
            f"{find_source()}: cdist needs [..., P, M] and [..., R, M], got {x1.type} and {x2.type}"
        )
    power = checked_number(p, "the p of cdist")
    if power < 0:
        raise CompileError(f"{find_source()}: p of cdist must be 0 or more, got {power}")
    return norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), power, -1)


@in_float32
def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """Return max(0, d(anchor, positive) - d(anchor, negative) + margin), d the p-norm.

    With `swap` the negative is as far as it is from the nearer of anchor and positive.
    """
    margin = checked_number(margin, "the margin of triplet_margin_loss")
    near = pairwise_distance(anchor, positive, p, eps)
    far = pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = apply(arithmetic.MINIMUM, far, pairwise_distance(positive, negative, p, eps))
    return reduced(_positive(near - far + margin), reduction)


def _difference(a: Operand, b: Operand) -> Tensor:
    return apply(arithmetic.SUB, a, b)


def _absolute(x: Tensor) -> Tensor:
    return apply(arithmetic.ABS, x)


def _positive(x: Tensor) -> Tensor:
    """Return max(x, 0), whose gradient at 0 is 1, as that of torch's losses."""
    return clamp(x, 0.0)


def _at_least(x: Tensor, bound: float) -> Tensor:
    """Return max(x, bound); the bound takes no gradient away, as in torch."""
    # The value of a maximum with the gradient of the identity.
    return x + maximum(bound - x, 0.0).detach()


def _not_negative(number: float, what: str) -> float:
    value = checked_number(number, what)
    if not value >= 0.0:
        raise CompileError(f"{find_source()}: {what} must be 0 or more, got {value}")
    return value


@in_float32
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
        reduction: "mean", "sum", "none": one loss per label, or "tokens": the mean, by which a
            batch counts as much as its labels do (`weighted_mean`).
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
        class_weights = _class_weights("cross_entropy", rows, weight)
        losses, shares, *_ = apply_many(
            loss.WEIGHTED_CROSS_ENTROPY_ROWS, rows, labels, class_weights, smoothing=smoothing
        )
    return _weighed(losses, shares, is_valid, reduction, target)


@in_float32
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
    class_weights = _class_weights("nll_loss", rows, weight)
    losses, shares = apply_many(loss.NLL_ROWS, rows, labels, class_weights)
    return _weighed(losses, shares, is_valid, reduction, target)


@in_float32
def binary_cross_entropy(
    input: Tensor, target: Tensor, weight: Operand | None = None, reduction: str = "mean"
) -> Tensor:
    """Return -(y log x + (1 - y) log(1 - x)) for probabilities x; logarithms are at least -100."""
    losses = apply(loss.BCE, as_tensor(input), target)
    return reduced(losses if weight is None else losses * weight, reduction)


@in_float32
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


@in_float32
def soft_margin_loss(input: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Return log(1 + exp(-y x)) for targets of 1 and -1."""
    return reduced(-apply(activation.LOG_SIGMOID, as_tensor(input) * target), reduction)


@in_float32
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
        # 0 log 0 is 0: log(1) stands in, whose gradient is finite.
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
    # 0 is a class for certain; the loss of such a row is dropped afterwards.
    return where(is_valid, labels, 0), is_valid


def _class_weights(what: str, rows: Tensor, weight: Operand | None) -> Tensor:
    classes = rows.shape[-1]
    if weight is None:
        return as_tensor(np.ones(classes, rows.dtype.value))
    weights = as_tensor(weight)
    if weights.shape != (classes,):
        raise CompileError(
            f"{find_source()}: {what} expects a weight for each of {classes} classes, got"
            f" {weights.type}"
        )
    return weights.detach()


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
    if reduction == "tokens" and shares is not None:
        return mean_by_weight(losses.sum(), shares.sum(), losses.shape[0])
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
