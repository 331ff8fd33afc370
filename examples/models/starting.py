"""Layers that start as those of BERT and LLaMA did, whatever starts they have here by default."""

from actorflow import nn

STD = 0.02


def linear(fan_in, fan_out, *, bias=True, std=STD):
    """Return a linear layer whose weight starts normal, and whose bias at 0."""
    made = nn.Linear(fan_in, fan_out, bias=bias)
    made.weight = nn.Parameter((fan_out, fan_in), (("kind", "normal"), ("std", std)))
    if bias:
        made.bias = nn.Parameter((fan_out,), (("kind", "zeros"),))
    return made
