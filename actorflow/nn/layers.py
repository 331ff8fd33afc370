"""The layers every model is made of. Parameter names, shapes and initialisers follow torch's."""

from __future__ import annotations

import math

from actorflow import functional
from actorflow.nn.module import Module
from actorflow.nn.parameter import Parameter
from actorflow.tensor import Tensor


class Linear(Module):
    """y = x @ weight.T + bias, for x [..., in_features].

    `weight` [out, in] and `bias` [out] start uniform in +-1/sqrt(in).
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True) -> None:
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
        self.weight = Parameter((num_embeddings, dim), (("kind", "normal"), ("std", float(std))))

    def __call__(self, ids: Tensor) -> Tensor:
        """Return ids.shape + [dim]."""
        return functional.embedding(self.weight, ids)


class LayerNorm(Module):
    """Normalise the last axis; `weight` starts at 1, `bias` at 0, both [dim]."""

    def __init__(self, dim: int, *, eps: float = 1e-5) -> None:
        self.eps = eps
        self.weight = Parameter((dim,), (("kind", "ones"),))
        self.bias = Parameter((dim,), (("kind", "zeros"),))

    def __call__(self, x: Tensor) -> Tensor:
        """Return a tensor of the same type as x [..., dim]."""
        return functional.layer_norm(x, self.weight, self.bias, eps=self.eps)


class Dropout(Module):
    """Zero elements with probability p during training; see `functional.dropout`."""

    def __init__(self, p: float = 0.1) -> None:
        self.p = p

    def __call__(self, x: Tensor) -> Tensor:
        """Return a tensor of the same type as x."""
        return functional.dropout(x, self.p)
