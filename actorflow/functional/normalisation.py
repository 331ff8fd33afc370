"""Normalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from actorflow.functional.elementwise import maximum, sqrt, square
from actorflow.functional.names import with_numpy_names
from actorflow.literals import checked_number, checked_size
from actorflow.tensor import Operand, Tensor, apply, apply_many, as_tensor, integers
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.ops import norm, slicing

__all__ = [
    "group_norm",
    "layer_norm",
    "local_response_norm",
    "normalize",
    "rms_norm",
]

Axes = int | Sequence[int]


def layer_norm(
    x: Tensor,
    normalized_shape: Axes,
    weight: Operand | None = None,
    bias: Operand | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise the last axes to mean 0 and variance 1, then scale and shift (Ba et al., 2016).

    Args:
        x: [..., *normalized_shape].
        normalized_shape: the extents of the axes that are normalised together.
        weight: of that shape, or None.
        bias: as the weight.
        eps: is added to the variance.
    """
    x, small = as_tensor(x), checked_number(eps, "the eps of layer_norm")
    rows, columns = _rows_of("layer_norm", x, normalized_shape, weight, bias)
    if weight is not None and bias is not None:
        affine = [as_tensor(own).reshape(columns) for own in (weight, bias)]
        return apply_many(norm.LAYER_NORM, rows, *affine, eps=small)[0].reshape(x.shape)
    y = apply_many(norm.STANDARDISED, rows, eps=small)[0].reshape(x.shape)
    return _scaled_and_shifted(y, weight, bias)


def rms_norm(
    x: Tensor,
    normalized_shape: Axes,
    weight: Operand | None = None,
    eps: float | None = None,
) -> Tensor:
    """Divide by the root of the mean square of the last axes, then scale (Zhang & Sennrich, 2019).

    `eps` is added to the mean square; by default it is the dtype's machine epsilon, as in torch.
    """
    x = as_tensor(x)
    if not x.dtype.is_float:
        raise CompileError(f"{find_source()}: rms_norm needs floats, got {x.type}")
    small = np.finfo(x.dtype.value).eps if eps is None else eps
    rows, columns = _rows_of("rms_norm", x, normalized_shape, weight)
    own = np.ones(columns, x.dtype.value) if weight is None else as_tensor(weight).reshape(columns)
    made = apply_many(norm.RMS_NORM, rows, own, eps=checked_number(small, "the eps of rms_norm"))
    return made[0].reshape(x.shape)


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Operand | None = None,
    bias: Operand | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise groups of channels of each sample; scale and shift channels (Wu & He, 2018).

    Args:
        x: [N, C, ...] with C divisible by `num_groups`.
        num_groups: how many groups the channels are parted into.
        weight: [C], or None.
        bias: as the weight.
        eps: is added to the variance.
    """
    x, groups = as_tensor(x), checked_size(num_groups, "num_groups")
    if x.ndim < 2 or groups < 1 or x.shape[1] % groups:
        raise CompileError(
            f"{find_source()}: group_norm expects [N, C, ...] with C divisible by num_groups, got"
            f" {x.type} and {groups} groups"
        )
    batch, channels = x.shape[:2]
    size = math.prod(x.shape[1:]) // groups
    small = checked_number(eps, "the eps of group_norm")
    y = apply_many(norm.STANDARDISED, x.reshape(batch, groups, size), eps=small)[0]
    if weight is None and bias is None:
        return y.reshape(x.shape)
    # One axis behind the channels: so scale and shift lie along rows, one number for each.
    y = y.reshape(batch, channels, math.prod(x.shape[2:]))
    own = [None if p is None else _channels(p, channels) for p in (weight, bias)]
    return _scaled_and_shifted(y, *own).reshape(x.shape)


def local_response_norm(
    x: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Tensor:
    """Divide by (k + alpha mean of x^2 over `size` channels around)^beta (Krizhevsky et al., 2012).

    x is [N, C, ...]; channels outside count as 0.
    """
    x, extent = as_tensor(x), checked_size(size, "the size of local_response_norm")
    if x.ndim < 3 or extent < 1:
        raise CompileError(
            f"{find_source()}: local_response_norm expects [N, C, ...] and a size of 1 or more,"
            f" got {x.type} and {extent}"
        )
    beyond = (0,) * (x.ndim - 2)
    low, high = (0, extent // 2, *beyond), (0, (extent - 1) // 2, *beyond)
    squares = apply(slicing.PAD, square(x), low=low, high=high, steps=(1,) * x.ndim)
    total = squares[:, : x.shape[1]]
    for first in range(1, extent):
        total = total + squares[:, first : first + x.shape[1]]
    scale = checked_number(alpha, "alpha") / extent
    return x / (total * scale + checked_number(k, "k")) ** checked_number(beta, "beta")


@with_numpy_names
def normalize(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """Divide by the p-norm along `dim`, which is at least `eps`; p is 1 or 2."""
    x, p = as_tensor(x), checked_number(p, "p of normalize")
    if p not in (1, 2):
        raise CompileError(f"{find_source()}: normalize knows the norms of p = 1 and 2, got {p!r}")
    size = (
        sqrt(square(x).sum(dim, keepdim=True)) if p == 2 else maximum(x, -x).sum(dim, keepdim=True)
    )
    return x / maximum(size, checked_number(eps, "the eps of normalize"))


def _rows_of(
    what: str, x: Tensor, normalized_shape: Any, *own: Operand | None
) -> tuple[Tensor, int]:
    """Return x as rows of what is normalised together, and how wide they are."""
    if isinstance(normalized_shape, Tensor):
        raise CompileError(
            f"{find_source()}: {what} expects the shape that is normalised before weight and bias,"
            f" as torch: {what}(x, x.shape[-1:], weight, ...)"
        )
    shape = integers(normalized_shape, what="an extent of normalized_shape")
    if not shape or x.shape[-len(shape) :] != shape:
        raise CompileError(
            f"{find_source()}: {what} expects x [..., {', '.join(map(str, shape))}], got {x.type}"
        )
    for tensor in own:
        if tensor is not None and as_tensor(tensor).shape != shape:
            raise CompileError(
                f"{find_source()}: {what} expects weight and bias of shape {list(shape)}, got"
                f" {as_tensor(tensor).type}"
            )
    columns = math.prod(shape)
    return x.reshape(*x.shape[: x.ndim - len(shape)], columns), columns


def _channels(own: Operand, channels: int) -> Tensor:
    tensor = as_tensor(own)
    if tensor.shape != (channels,):
        raise CompileError(
            f"{find_source()}: expected weight and bias for {channels} channels, got {tensor.type}"
        )
    return tensor.reshape(channels, 1)


def _scaled_and_shifted(y: Tensor, weight: Operand | None, bias: Operand | None) -> Tensor:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias
