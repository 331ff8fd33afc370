"""Layers that start as those of BERT and LLaMA do."""

from actorflow import nn


def small_linear(fan_in, fan_out, *, bias=True):
    """Return a linear layer whose weight starts as N(0, 0.02), and its bias at 0."""
    layer = nn.Linear(fan_in, fan_out, bias=bias)
    nn.init.normal_(layer.weight, 0.0, 0.02)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer
