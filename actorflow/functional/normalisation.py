"""Normalisation to mean 0 and variance 1, to a root mean square, or to a norm.

`layer_norm`, `rms_norm` and `group_norm` take statistics of each sample; `batch_norm` and
`instance_norm` those of each channel, the second axis, perhaps kept from step to step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from actorflow.functional.elementwise import maximum, square, where
from actorflow.functional.reduce import norm
from actorflow.tensor.literals import (
    checked_number,
    checked_size,
    result_type,
    with_numpy_names,
)
from actorflow.tensor.op_math import in_float32, rounded, widened
from actorflow.tensor.tensor import Operand, Tensor, apply, apply_many, as_tensor, integers
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError
from compiler.contract.types import DType
from compiler.ops.families import normalisation
from compiler.ops.families.arithmetic import RSQRT
from compiler.ops.families.normalisation import BATCH_NORM
from compiler.ops.primitives import slicing

__all__ = [
    "batch_norm",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "local_response_norm",
    "normalize",
    "rms_norm",
]


Axes = int | Sequence[int]


@in_float32
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
        # LAYER_NORM takes both; where one is missing, the other is an op of its own.
        affine = [as_tensor(parameter).reshape(columns) for parameter in (weight, bias)]
        return apply_many(normalisation.LAYER_NORM, rows, *affine, eps=small)[0].reshape(x.shape)
    y = apply_many(normalisation.STANDARDISED, rows, eps=small)[0].reshape(x.shape)
    return _scaled_and_shifted(y, weight, bias)


@in_float32
def rms_norm(
    x: Tensor,
    normalized_shape: Axes,
    weight: Operand | None = None,
    eps: float | None = None,
) -> Tensor:
    """Divide by the root of the mean square of the last axes, then scale (Zhang & Sennrich, 2019).

    `eps` is added to the mean square; by default it is the machine epsilon of the dtype in which
    the norm is computed, as in torch: float32 for floats of 16 bits.
    """
    x = as_tensor(x)
    if not x.dtype.is_float:
        raise CompileError(f"{find_source()}: rms_norm needs floats, got {x.type}")
    small = np.finfo(x.dtype.value).eps if eps is None else eps
    rows, columns = _rows_of("rms_norm", x, normalized_shape, weight)
    gain = np.ones(columns, x.dtype.value) if weight is None else as_tensor(weight).reshape(columns)
    outputs = apply_many(
        normalisation.RMS_NORM, rows, gain, eps=checked_number(small, "the eps of rms_norm")
    )
    return outputs[0].reshape(x.shape)


@in_float32
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
    y = apply_many(normalisation.STANDARDISED, x.reshape(batch, groups, size), eps=small)[0]
    if weight is None and bias is None:
        return y.reshape(x.shape)
    # One axis behind the channels: so scale and shift lie along rows, one number for each.
    y = y.reshape(batch, channels, math.prod(x.shape[2:]))
    affine = [None if p is None else _channels(p, channels) for p in (weight, bias)]
    return _scaled_and_shifted(y, *affine).reshape(x.shape)


@in_float32
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
    # torch's window: for an even size one channel more before than after.
    low, high = (0, extent // 2, *beyond), (0, (extent - 1) // 2, *beyond)
    squares = apply(slicing.PAD, square(x), low=low, high=high, steps=(1,) * x.ndim)
    total = squares[:, : x.shape[1]]
    for first in range(1, extent):
        total = total + squares[:, first : first + x.shape[1]]
    scale = checked_number(alpha, "alpha") / extent
    return x / (total * scale + checked_number(k, "k")) ** checked_number(beta, "beta")


@with_numpy_names
@in_float32
def normalize(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """Divide by the p-norm along `dim`, which is at least `eps`. No gradient flows to one of 0."""
    size = norm(x, checked_number(p, "p of normalize"), dim, keepdim=True)
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


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise each channel of x [N, C, ...], then scale and shift (Ioffe & Szegedy, 2015).

    With `training` by the statistics of the batch; the running ones, where there are some, are
    `nn.Buffer`s [C] and are assigned `(1 - momentum) * running + momentum * new`, the variance of
    the batch without bias. Else by the running statistics. Raises CompileError for types that do
    not fit, and for training on a single value per channel.
    """
    small = checked_number(eps, "the eps of batch_norm")
    operands = (running_mean, running_var, weight, bias)
    running_mean, running_var, weight, bias = [
        None if tensor is None else as_tensor(tensor, x.dtype) for tensor in operands
    ]
    _check(x, running_mean, running_var, weight, bias)
    dtype = _dtype_of(x, running_mean, running_var, weight, bias)
    x = widened(x)
    channels = x.shape[1]
    flat = x.reshape(x.shape[0], channels, math.prod(x.shape[2:]))
    scale = _along(1.0 if weight is None else weight, x)
    shift = _along(0.0 if bias is None else bias, x)
    if not training:
        if running_mean is None or running_var is None:
            raise CompileError(
                f"{find_source()}: batch_norm outside of training reads running_mean and"
                " running_var; give both, or training=True"
            )
        rstd = apply(RSQRT, _along(running_var, x) + small)
        y = (flat - _along(running_mean, x)) * (rstd * scale) + shift
        return rounded(y.reshape(x.shape), dtype)
    count = x.shape[0] * flat.shape[2]
    if count < 2:
        raise CompileError(
            f"{find_source()}: batch_norm needs more than one value per channel in training, got"
            f" {x.type}"
        )
    # Shifted by the mean first: the moments of what is left do not cancel where the mean is large.
    # `rest` is what rounding left of the mean.
    mean = flat.mean((0, 2)).detach()
    flat = flat - _along(mean, x)
    rest, var = _moments(flat, (0, 2))
    _update(running_mean, mean + rest, momentum)
    # The running variance is the unbiased one, the batch is normalised by the biased, as in torch.
    _update(running_var, var * (count / (count - 1)), momentum)
    rstd = apply(RSQRT, _along(var, x) + small)
    y = apply(BATCH_NORM, flat, _along(rest, x), rstd, scale, shift)
    return rounded(y.reshape(x.shape), dtype)


def _moments(x: Tensor, dim: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance over `dim` of differences x to nearly the mean.

    Where that is rounded their own mean is not 0: the variance is the mean of squares less its
    square (Chan, Golub & LeVeque, 1983), and 0 where the numbers are equal but for rounding.
    Where the mean of squares overflows, the variance is infinite.
    """
    rest, squares = x.mean(dim), square(x).mean(dim)
    less = square(rest)
    variance = where(squares == math.inf, math.inf, squares - less)  # inf - inf would be NaN
    return rest, where(less > squares, 0.0, variance)


def instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise each channel of each sample of x [N, C, ...]; scale and shift channels.

    With `use_input_stats` by its own statistics; the running ones, where there are some, are
    `nn.Buffer`s [C] that follow their means over the samples, as those of `batch_norm` do. Else by
    the running statistics.
    """
    x = as_tensor(x)
    if x.ndim < 3 or not x.dtype.is_float:
        raise CompileError(
            f"{find_source()}: instance_norm expects floats [N, C, ...], got {x.type}"
        )
    if not use_input_stats:
        return batch_norm(x, running_mean, running_var, weight, bias, eps=eps)
    dtype = _dtype_of(x, weight, bias)
    x = widened(x)
    if running_mean is not None or running_var is not None:
        flat = x.reshape(*x.shape[:2], math.prod(x.shape[2:]))
        if flat.shape[2] < 2:
            raise CompileError(
                f"{find_source()}: instance_norm needs more than one value per channel to keep"
                f" statistics, got {x.type}"
            )
        _update(running_mean, flat.mean(2).mean(0), momentum)
        _update(running_var, flat.var(2).mean(0), momentum)
    return rounded(group_norm(x, x.shape[1], weight, bias, eps), dtype)


def _dtype_of(*given: Tensor | None) -> DType:
    """Return the dtype of a norm of floats, which it computes in float32 where that has 16 bits.

    Running statistics are buffers, which `in_float32` would make tensors that nothing assigns to.
    """
    return result_type([tensor for tensor in given if tensor is not None])


def _update(running: Tensor | None, new: Tensor, momentum: float | Tensor) -> None:
    if running is None:
        return
    if not hasattr(running, "assign"):
        raise CompileError(
            f"{find_source()}: batch_norm with training=True updates its running statistics, which"
            f" must be nn.Buffers then, got {running!r}; leave them out to keep none"
        )
    share = checked_number(momentum, "momentum") if not isinstance(momentum, Tensor) else momentum
    average = widened(running) * (1.0 - share) + new.detach() * share
    running.assign(average.to(running.dtype))


def _along(operand: Operand, x: Tensor) -> Tensor:
    """Return what there is of each channel as it is read beside x [N, C, S]."""
    tensor = widened(as_tensor(operand, x.dtype))
    return tensor.reshape(1, x.shape[1], 1) if tensor.ndim else tensor


def _check(x: Tensor, *of_channels: Tensor | None) -> None:
    if x.ndim < 2 or not x.dtype.is_float:
        raise CompileError(f"{find_source()}: batch_norm needs floats [N, C, ...], got {x.type}")
    for tensor in of_channels:
        if tensor is not None and tensor.shape != (x.shape[1],):
            raise CompileError(
                f"{find_source()}: batch_norm of {x.type} needs one number for each of its"
                f" {x.shape[1]} channels, got {tensor.type}"
            )
