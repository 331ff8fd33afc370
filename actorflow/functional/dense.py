"""What layers with a weight compute: products."""

from __future__ import annotations

import math

from actorflow.functional.products import einsum
from actorflow.tensor import Tensor, as_tensor
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError

__all__ = ["bilinear", "linear"]


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


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x1 @ weight[o] @ x2 + bias[o] for each o: [..., out].

    Args:
        input1: [..., in1].
        input2: [..., in2], with the same leading axes.
        weight: [out, in1, in2].
        bias: [out], or None.
    """
    x, y, weight = as_tensor(input1), as_tensor(input2), as_tensor(weight)
    fits = weight.ndim == 3 and min(x.ndim, y.ndim) > 0 and x.shape[:-1] == y.shape[:-1]
    if not fits or (x.shape[-1], y.shape[-1]) != weight.shape[1:]:
        raise CompileError(
            f"{find_source()}: bilinear expects [..., in1] and [..., in2] for a weight"
            f" [out, in1, in2], got {x.type} and {y.type} for {weight.type}"
        )
    made = einsum("...i,oij,...j->...o", x, weight, y)
    return made if bias is None else made + bias
