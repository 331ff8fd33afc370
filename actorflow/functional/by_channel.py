"""Normalisation of each channel, the second axis, over all others."""

from __future__ import annotations

import math

from actorflow.functional.elementwise import square
from actorflow.functional.normalisation import group_norm
from actorflow.literals import checked_number
from actorflow.tensor import Operand, Tensor, apply, as_tensor
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.ops.batch_norm import BATCH_NORM
from compiler.ops.elementwise import RSQRT

__all__ = ["batch_norm", "instance_norm"]


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
    given = (running_mean, running_var, weight, bias)
    running_mean, running_var, weight, bias = [
        None if tensor is None else as_tensor(tensor, x.dtype) for tensor in given
    ]
    _check(x, running_mean, running_var, weight, bias)
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
        return ((flat - _along(running_mean, x)) * (rstd * scale) + shift).reshape(x.shape)
    count = x.shape[0] * flat.shape[2]
    if count < 2:
        raise CompileError(
            f"{find_source()}: batch_norm needs more than one value per channel in training, got"
            f" {x.type}"
        )
    mean, var = _statistics(flat)
    _update(running_mean, mean, momentum)
    _update(running_var, var * (count / (count - 1)), momentum)
    rstd = apply(RSQRT, _along(var, x) + small)
    return apply(BATCH_NORM, flat, _along(mean, x), rstd, scale, shift).reshape(x.shape)


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
    if running_mean is not None or running_var is not None:
        flat = x.reshape(*x.shape[:2], math.prod(x.shape[2:]))
        if flat.shape[2] < 2:
            raise CompileError(
                f"{find_source()}: instance_norm needs more than one value per channel to keep"
                f" statistics, got {x.type}"
            )
        _update(running_mean, flat.mean(2).mean(0), momentum)
        _update(running_var, flat.var(2).mean(0), momentum)
    return group_norm(x, x.shape[1], weight, bias, eps)


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance per channel of x [N, C, S].

    The variance is that of differences to the mean, in a second walk, so that nothing cancels.
    """
    mean = x.mean((0, 2))
    return mean, square(x - mean.reshape(1, x.shape[1], 1)).mean((0, 2))


def _update(running: Tensor | None, new: Tensor, momentum: float | Tensor) -> None:
    if running is None:
        return
    if not hasattr(running, "assign"):
        raise CompileError(
            f"{find_source()}: batch_norm with training=True updates its running statistics, which"
            f" must be nn.Buffers then, got {running!r}; leave them out to keep none"
        )
    share = checked_number(momentum, "momentum") if not isinstance(momentum, Tensor) else momentum
    running.assign(running * (1.0 - share) + new.detach() * share)


def _along(operand: Operand, x: Tensor) -> Tensor:
    """Return what there is of each channel as it is read beside x [N, C, S]."""
    tensor = as_tensor(operand, x.dtype)
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
