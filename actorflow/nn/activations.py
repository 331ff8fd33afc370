"""Activations as modules: functions of `functional.activation` that keep their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from actorflow import functional
from actorflow.literals import checked_number, checked_size
from actorflow.nn.module import Module
from actorflow.nn.parameter import Parameter
from actorflow.tensor import Tensor


class Activation(Module):
    """A function of a tensor. Its other arguments are the attributes, and have its names."""

    function: ClassVar[Callable[..., Tensor]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Keep what the function takes after its tensor. Raises TypeError for anything else."""
        given = inspect.signature(type(self).function).bind(None, *args, **kwargs).arguments
        for name in [*given][1:]:
            setattr(self, name, given[name])

    def __call__(self, x: Tensor) -> Tensor:
        """Return the function of x."""
        return type(self).function(x, **vars(self))


class CELU(Activation):
    """See `functional.celu`."""

    function = staticmethod(functional.celu)


class ELU(Activation):
    """See `functional.elu`."""

    function = staticmethod(functional.elu)


class GELU(Activation):
    """See `functional.gelu`."""

    function = staticmethod(functional.gelu)


class GLU(Activation):
    """See `functional.glu`."""

    function = staticmethod(functional.glu)


class Hardshrink(Activation):
    """See `functional.hardshrink`."""

    function = staticmethod(functional.hardshrink)


class Hardsigmoid(Activation):
    """See `functional.hardsigmoid`."""

    function = staticmethod(functional.hardsigmoid)


class Hardswish(Activation):
    """See `functional.hardswish`."""

    function = staticmethod(functional.hardswish)


class Hardtanh(Activation):
    """See `functional.hardtanh`."""

    function = staticmethod(functional.hardtanh)


class LeakyReLU(Activation):
    """See `functional.leaky_relu`."""

    function = staticmethod(functional.leaky_relu)


class LogSigmoid(Activation):
    """See `functional.logsigmoid`."""

    function = staticmethod(functional.logsigmoid)


class LogSoftmax(Activation):
    """See `functional.log_softmax`."""

    function = staticmethod(functional.log_softmax)


class Mish(Activation):
    """See `functional.mish`."""

    function = staticmethod(functional.mish)


class ReLU(Activation):
    """See `functional.relu`."""

    function = staticmethod(functional.relu)


class ReLU6(Activation):
    """See `functional.relu6`."""

    function = staticmethod(functional.relu6)


class SELU(Activation):
    """See `functional.selu`."""

    function = staticmethod(functional.selu)


class SiLU(Activation):
    """See `functional.silu`."""

    function = staticmethod(functional.silu)


class Sigmoid(Activation):
    """See `functional.sigmoid`."""

    function = staticmethod(functional.sigmoid)


class Softmax(Activation):
    """See `functional.softmax`."""

    function = staticmethod(functional.softmax)


class Softmin(Activation):
    """See `functional.softmin`."""

    function = staticmethod(functional.softmin)


class Softplus(Activation):
    """See `functional.softplus`."""

    function = staticmethod(functional.softplus)


class Softshrink(Activation):
    """See `functional.softshrink`."""

    function = staticmethod(functional.softshrink)


class Softsign(Activation):
    """See `functional.softsign`."""

    function = staticmethod(functional.softsign)


class Tanh(Activation):
    """See `functional.tanh`."""

    function = staticmethod(functional.tanh)


class Tanhshrink(Activation):
    """See `functional.tanhshrink`."""

    function = staticmethod(functional.tanhshrink)


class Threshold(Activation):
    """See `functional.threshold`."""

    function = staticmethod(functional.threshold)


class PReLU(Module):
    """x, times `weight` [num_parameters] below 0; one number, or one per channel of axis 1."""

    def __init__(self, num_parameters: int = 1, *, init: float = 0.25) -> None:
        count = checked_size(num_parameters, "num_parameters of PReLU")
        start = checked_number(init, "init of PReLU")
        self.weight = Parameter((count,), (("kind", "constant"), ("value", start)))

    def __call__(self, x: Tensor) -> Tensor:
        """Return a tensor of the same type as x."""
        return functional.prelu(x, self.weight)
