"""Activations as modules: functions of `functional.activation` that keep their arguments."""

from __future__ import annotations

from actorflow import functional
from actorflow.literals import checked_number, checked_size
from actorflow.nn.function_layer import FunctionLayer
from actorflow.nn.module import Module
from actorflow.nn.parameter import Parameter
from actorflow.tensor import Tensor


class CELU(FunctionLayer, function=functional.celu):
    """See `functional.celu`."""


class ELU(FunctionLayer, function=functional.elu):
    """See `functional.elu`."""


class GELU(FunctionLayer, function=functional.gelu):
    """See `functional.gelu`."""


class GLU(FunctionLayer, function=functional.glu):
    """See `functional.glu`."""


class Hardshrink(FunctionLayer, function=functional.hardshrink):
    """See `functional.hardshrink`."""


class Hardsigmoid(FunctionLayer, function=functional.hardsigmoid):
    """See `functional.hardsigmoid`."""


class Hardswish(FunctionLayer, function=functional.hardswish):
    """See `functional.hardswish`."""


class Hardtanh(FunctionLayer, function=functional.hardtanh):
    """See `functional.hardtanh`."""


class LeakyReLU(FunctionLayer, function=functional.leaky_relu):
    """See `functional.leaky_relu`."""


class LogSigmoid(FunctionLayer, function=functional.logsigmoid):
    """See `functional.logsigmoid`."""


class LogSoftmax(FunctionLayer, function=functional.log_softmax):
    """See `functional.log_softmax`."""


class Mish(FunctionLayer, function=functional.mish):
    """See `functional.mish`."""


class ReLU(FunctionLayer, function=functional.relu):
    """See `functional.relu`."""


class ReLU6(FunctionLayer, function=functional.relu6):
    """See `functional.relu6`."""


class SELU(FunctionLayer, function=functional.selu):
    """See `functional.selu`."""


class SiLU(FunctionLayer, function=functional.silu):
    """See `functional.silu`."""


class Sigmoid(FunctionLayer, function=functional.sigmoid):
    """See `functional.sigmoid`."""


class Softmax(FunctionLayer, function=functional.softmax):
    """See `functional.softmax`."""


class Softmin(FunctionLayer, function=functional.softmin):
    """See `functional.softmin`."""


class Softplus(FunctionLayer, function=functional.softplus):
    """See `functional.softplus`."""


class Softshrink(FunctionLayer, function=functional.softshrink):
    """See `functional.softshrink`."""


class Softsign(FunctionLayer, function=functional.softsign):
    """See `functional.softsign`."""


class Tanh(FunctionLayer, function=functional.tanh):
    """See `functional.tanh`."""


class Tanhshrink(FunctionLayer, function=functional.tanhshrink):
    """See `functional.tanhshrink`."""


class Threshold(FunctionLayer, function=functional.threshold):
    """See `functional.threshold`."""


class PReLU(Module):
    """x, times `weight` [num_parameters] below 0; one number, or one per channel of axis 1."""

    def __init__(self, num_parameters: int = 1, *, init: float = 0.25) -> None:
        count = checked_size(num_parameters, "num_parameters of PReLU")
        start = checked_number(init, "init of PReLU")
        self.weight = Parameter((count,), (("kind", "constant"), ("value", start)))

    def __call__(self, x: Tensor) -> Tensor:
        """Return a tensor of the same type as x."""
        return functional.prelu(x, self.weight)
