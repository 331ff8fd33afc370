"""The layers every model is made of. Parameter names, shapes and initialisers follow torch's."""

from __future__ import annotations

import math

from actorflow import functional
from actorflow.functional.random import checked_probability
from actorflow.literals import checked_number, checked_size
from actorflow.nn.module import Module
from actorflow.nn.parameter import Parameter
from actorflow.tensor import Tensor
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError


class Linear(Module):
    """y = x @ weight.T + bias, for x [..., in_features].

    `weight` [out, in] and `bias` [out] start uniform in +-1/sqrt(in).
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True) -> None:
        in_features = checked_extent("Linear", "in_features", in_features)
        out_features = checked_extent("Linear", "out_features", out_features)
        bound = 1.0 / math.sqrt(in_features)
        init = (("kind", "uniform"), ("bound", bound))
        self.weight = Parameter((out_features, in_features), init)
        self.bias = Parameter((out_features,), init) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """Return [..., out_features]."""
        return functional.linear(x, self.weight, self.bias)


class Embedding(Module):
    """Rows of `weight` [num_embeddings, dim] by integer id.

    The weight starts normal with standard deviation `std`.
    """

    def __init__(self, num_embeddings: int, dim: int, *, std: float = 1.0) -> None:
        num_embeddings = checked_extent("Embedding", "num_embeddings", num_embeddings)
        dim = checked_extent("Embedding", "dim", dim)
        std = checked_number(std, "std of Embedding")
        if not std >= 0.0:
            raise CompileError(f"{find_source()}: std of Embedding must be 0 or more, got {std}")
        self.weight = Parameter((num_embeddings, dim), (("kind", "normal"), ("std", std)))

    def __call__(self, ids: Tensor) -> Tensor:
        """Return ids.shape + [dim]."""
        return functional.embedding(self.weight, ids)


class Dropout(Module):
    """Zero elements with probability p during training; see `functional.dropout`."""

    def __init__(self, p: float = 0.1) -> None:
        self.p = checked_probability(p)

    def __call__(self, x: Tensor) -> Tensor:
        """Return a tensor of the same type as x."""
        return functional.dropout(x, self.p)


def checked_extent(layer: str, name: str, extent: int) -> int:
    """Return an extent of a layer's parameters. Raises CompileError with the user's line."""
    size = checked_size(extent, f"{name} of {layer}")
    if size < 1:
        raise CompileError(f"{find_source()}: {name} of {layer} must be 1 or more, got {size}")
    return size
