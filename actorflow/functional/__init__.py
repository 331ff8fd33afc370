"""Functions on tensors. Names, arguments and semantics are torch's, else numpy's.

- `elementwise`: arithmetic and comparison of each element; `activation`: nonlinearities.
- `shape`: cutting, joining and moving elements.
- `linear`, `attention`, `norm`: what layers compute; `loss`: what is minimised.
- `random`: numbers that follow from the seed and the step; `counters`: what the engine counts.
"""

from actorflow.functional.activation import gelu, relu, sigmoid, silu, softmax, tanh
from actorflow.functional.attention import attention
from actorflow.functional.elementwise import (
    cos,
    exp,
    log,
    maximum,
    minimum,
    sin,
    sqrt,
    square,
    where,
)
from actorflow.functional.linear import embedding, linear
from actorflow.functional.loss import cross_entropy, mse_loss
from actorflow.functional.norm import layer_norm
from actorflow.functional.random import dropout
from actorflow.functional.reduce import amax, argmax, max, mean, sum
from actorflow.functional.shape import cat, chunk, concat, split

__all__ = [
    "amax",
    "argmax",
    "attention",
    "cat",
    "chunk",
    "concat",
    "cos",
    "cross_entropy",
    "dropout",
    "embedding",
    "exp",
    "gelu",
    "layer_norm",
    "linear",
    "log",
    "max",
    "maximum",
    "mean",
    "minimum",
    "mse_loss",
    "relu",
    "sigmoid",
    "silu",
    "sin",
    "softmax",
    "split",
    "sqrt",
    "square",
    "sum",
    "tanh",
    "where",
]
