"""Losses."""

from __future__ import annotations

import math

from actorflow.functional.elementwise import square
from actorflow.tensor import Tensor, apply, apply_many, as_tensor
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.ops import binary, loss
from compiler.types import DType

__all__ = ["cross_entropy", "mse_loss"]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of integer labels, a scalar.

    On top of a linear layer, large logits are computed a chunk of rows at a time and never exist as
    a whole, unless the job reads them too: for an accuracy, say, or as an output.

    Args:
        logits: [..., C].
        labels: integers of shape [...]; one outside 0..C-1 fails the step with an IndexError.
    """
    logits, labels = as_tensor(logits), as_tensor(labels, DType.INT64)
    if logits.ndim < 1 or logits.shape[:-1] != labels.shape:
        raise CompileError(
            f"{find_source()}: cross_entropy expects labels of shape {list(logits.shape[:-1])} for"
            f" logits {logits.type}, got {labels.type}"
        )
    rows = math.prod(labels.shape)
    flat = logits.reshape(rows, logits.shape[-1])
    if labels.dtype is DType.UINT64:
        labels = labels.to(DType.INT64)  # no fused kernel computes with these
    return apply_many(loss.CROSS_ENTROPY_ROWS, flat, labels.reshape(rows))[0].mean()


def mse_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Return the mean of squared differences, a scalar."""
    return square(apply(binary.SUB, prediction, target)).mean()
