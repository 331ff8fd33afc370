"""First values that models were published with, where they are not those of the layers."""

import math

from actorflow import nn


def normal(parameter, std):
    parameter.init = (("kind", "normal"), ("std", std))


def zeros(parameter):
    parameter.init = (("kind", "zeros"),)


def kaiming_fan_out(weight):
    """Normal with variance 2 / (results that an element is part of) (He et al., 2015)."""
    normal(weight, math.sqrt(2.0 / (weight.shape[0] * math.prod(weight.shape[2:]))))


def small_linear(fan_in, fan_out, *, bias=True):
    """Return a linear layer that starts as those of BERT and LLaMA do."""
    layer = nn.Linear(fan_in, fan_out, bias=bias)
    normal(layer.weight, 0.02)
    if bias:
        zeros(layer.bias)
    return layer
