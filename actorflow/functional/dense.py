"""What layers with a weight compute: products, and rows of a table."""

from __future__ import annotations

import math

from actorflow.tensor import Tensor, apply, as_tensor
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.ops import embedding as embedding_ops
from compiler.types import DType

__all__ = ["embedding", "linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias.

    Args:
        x: [..., in]; all leading axes become the rows of one matrix product.
        weight: [out, in].
        bias: [out], or None.
    """
    x, weight = as_tensor(x), as_tensor(weight)
    if weight.ndim != 2:
        raise CompileError(f"{find_source()}: linear expects a weight [out, in], got {weight.type}")
    if x.ndim < 1 or x.shape[-1] != weight.shape[-1]:
        raise CompileError(
            f"{find_source()}: linear expects [..., {weight.shape[-1]}] for a weight"
            f" {weight.type}, got {x.type}"
        )
    leading = x.shape[:-1]
    rows = x.reshape(math.prod(leading), x.shape[-1])
    y = rows @ weight.T
    if bias is not None:
        y = y + bias
    return y.reshape(*leading, weight.shape[0])


def embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """Return the rows of `weight` [V, D] at integer `ids`: ids.shape + [D].

    An id outside 0..V-1 fails the step with an IndexError that names it.
    """
    return apply(embedding_ops.EMBEDDING, weight, as_tensor(ids, DType.INT64))
