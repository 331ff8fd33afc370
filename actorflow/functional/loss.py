"""Losses of regression and of distances; those of classes are in `classification`.

They are computed for each element, or row, and brought together by `reduction`: "mean" and "sum"
make a scalar, "none" leaves them.
"""

from __future__ import annotations

import math

from actorflow.functional.elementwise import log, maximum, sqrt, square, where
from actorflow.functional.names import with_numpy_names
from actorflow.literals import checked_number
from actorflow.tensor import Operand, Tensor, apply, as_tensor, checked_axis
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.ops import binary, elementwise

__all__ = [
    "cosine_embedding_loss",
    "cosine_similarity",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "pairwise_distance",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "triplet_margin_loss",
]

REDUCTIONS = ("mean", "sum", "none")


def reduced(losses: Tensor, reduction: str, known: tuple[str, ...] = REDUCTIONS) -> Tensor:
    """Return losses brought together. Raises CompileError for an unknown reduction."""
    if reduction not in known:
        raise CompileError(
            f"{find_source()}: reduction must be one of {', '.join(known)}, got {reduction!r}"
        )
    if reduction == "batchmean":
        return losses.sum() * (1.0 / max(losses.shape[0], 1) if losses.ndim else 1.0)
    return {"mean": losses.mean, "sum": losses.sum, "none": lambda: losses}[reduction]()


def mse_loss(input: Operand, target: Operand, reduction: str = "mean") -> Tensor:
    """Return squared differences."""
    return reduced(square(_difference(input, target)), reduction)


def l1_loss(input: Operand, target: Operand, reduction: str = "mean") -> Tensor:
    """Return absolute differences."""
    return reduced(_absolute(_difference(input, target)), reduction)


def smooth_l1_loss(
    input: Operand, target: Operand, reduction: str = "mean", beta: float = 1.0
) -> Tensor:
    """Return d^2 / (2 beta) for absolute differences d below `beta`, else d - beta / 2."""
    beta = _not_negative(beta, "the beta of smooth_l1_loss")
    d = _absolute(_difference(input, target))
    if beta == 0.0:
        return reduced(d, reduction)
    return reduced(where(d < beta, square(d) * (0.5 / beta), d - 0.5 * beta), reduction)


def huber_loss(
    input: Operand, target: Operand, reduction: str = "mean", delta: float = 1.0
) -> Tensor:
    """Return d^2 / 2 for absolute differences d up to `delta`, else delta (d - delta / 2)."""
    delta = _not_negative(delta, "the delta of huber_loss")
    d = _absolute(_difference(input, target))
    return reduced(where(d <= delta, square(d) * 0.5, (d - 0.5 * delta) * delta), reduction)


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
    losses = apply(elementwise.EXP, x) - y * x if log_input else x - y * log(x + small)
    if full:
        large = maximum(y, 1.0)
        stirling = large * log(large) - large + log(large * (2 * math.pi)) * 0.5
        losses = losses + where(y > 1.0, stirling, 0.0)
    return reduced(losses, reduction)


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
    small = checked_number(eps, "the eps of gaussian_nll_loss")
    v = _at_least(v, small)
    losses = (log(v) + square(x - as_tensor(target)) / v) * 0.5
    return reduced(losses + 0.5 * math.log(2 * math.pi) if full else losses, reduction)


def hinge_embedding_loss(
    input: Tensor, target: Tensor, margin: float = 1.0, reduction: str = "mean"
) -> Tensor:
    """Return x where the target is 1, and max(0, margin - x) where it is -1."""
    x, y = as_tensor(input), as_tensor(target)
    margin = checked_number(margin, "the margin of hinge_embedding_loss")
    far = where(y != 1, _positive(margin - x), 0.0)
    return reduced(far + where(y != -1, x, 0.0), reduction)


def margin_ranking_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """Return max(0, -y (x1 - x2) + margin): y is 1 where the first should rank higher, else -1."""
    margin = checked_number(margin, "the margin of margin_ranking_loss")
    ahead = as_tensor(target) * (as_tensor(input1) - as_tensor(input2))
    return reduced(_positive(margin - ahead), reduction)


@with_numpy_names
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Return the cosine of the angle between vectors along `dim`; norms are at least `eps`."""
    a, b = as_tensor(x1), as_tensor(x2)
    small = checked_number(eps, "the eps of cosine_similarity")
    shape = (a * b).shape
    wide = [a.broadcast_to(shape), b.broadcast_to(shape)]
    axis = checked_axis(wide[0], dim)
    parts = [x / _at_least(sqrt(square(x).sum(axis, keepdim=True)), small) for x in wide]
    return (parts[0] * parts[1]).sum(axis)


def cosine_embedding_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """Return 1 - cos for pairs of target 1, and max(0, cos - margin) for pairs of target -1.

    Vectors lie along the last axis of [N, D], or are [D].
    """
    a, b, y = as_tensor(input1), as_tensor(input2), as_tensor(target)
    margin = checked_number(margin, "the margin of cosine_embedding_loss")
    lengths = (square(a).sum(-1) + 1e-12) * (square(b).sum(-1) + 1e-12)
    likeness = (a * b).sum(-1) / sqrt(lengths)
    near = where(y == 1, 1.0 - likeness, 0.0)
    return reduced(near + where(y == -1, _positive(likeness - margin), 0.0), reduction)


def pairwise_distance(
    x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    """Return the p-norm of x1 - x2 + eps along the last axis."""
    power = checked_number(p, "the p of pairwise_distance")
    small = checked_number(eps, "the eps of pairwise_distance")
    if not power > 0:
        raise CompileError(f"{find_source()}: p of pairwise_distance must be above 0, got {power}")
    d = as_tensor(x1) - as_tensor(x2) + small
    if power == 2.0:
        return sqrt(square(d).sum(-1, keepdim=keepdim))
    size = _absolute(d)
    if power == math.inf:
        return size.amax(-1, keepdim=keepdim)
    total = (size if power == 1.0 else size**power).sum(-1, keepdim=keepdim)
    return total if power == 1.0 else total ** (1.0 / power)


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
        far = apply(binary.MINIMUM, far, pairwise_distance(positive, negative, p, eps))
    return reduced(_positive(near - far + margin), reduction)


def _difference(a: Operand, b: Operand) -> Tensor:
    return apply(binary.SUB, a, b)


def _absolute(x: Tensor) -> Tensor:
    return apply(elementwise.ABS, x)


def _positive(x: Tensor) -> Tensor:
    """Return max(x, 0) with torch's gradient at 0, which is 0 below and at the bound of a clamp."""
    return x.relu()


def _at_least(x: Tensor, bound: float) -> Tensor:
    """Return max(x, bound); the bound takes no gradient away, as in torch."""
    return x + (maximum(x, bound) - x).detach()


def _not_negative(number: float, what: str) -> float:
    found = checked_number(number, what)
    if not found >= 0.0:
        raise CompileError(f"{find_source()}: {what} must be 0 or more, got {found}")
    return found
