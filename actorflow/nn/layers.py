"""The layers every model is made of. Parameter names, shapes and initialisers follow torch's."""

from __future__ import annotations

import math

from actorflow import functional
from actorflow.functional.random import checked_probability
from actorflow.functional.tables import padding_row
from actorflow.layouts import LayerWords
from actorflow.literals import checked_number, checked_size
from actorflow.nn.function_layer import FunctionLayer
from actorflow.nn.module import Module
from actorflow.nn.parameter import Parameter, lay_out
from actorflow.tensor import Tensor
from actorflow.trace.tracer import InitSpec, find_source
from compiler.errors import CompileError
from compiler.types import MOST_ELEMENTS


class Linear(Module):
    """y = x @ weight.T + bias, for x [..., in_features].

    `weight` [out, in] and `bias` [out] start uniform in +-1/sqrt(in).

    `sbp` says how they lie on the ranks of a job's mesh. `{"model": af.split(0)}` cuts the weight
    by columns of the result, and the bias with it; `{"model": af.split(1)}` by columns of x, so
    that results are sums over ranks, and the bias is whole. Or each by name:
    `{"weight": {"model": af.split(0)}, "bias": {}}`; what is not named is the compiler's to choose.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        sbp: LayerWords | None = None,
    ) -> None:
        in_features = checked_extent("Linear", "in_features", in_features)
        out_features = checked_extent("Linear", "out_features", out_features)
        bound = 1.0 / math.sqrt(in_features)
        init = (("kind", "uniform"), ("bound", bound))
        self.weight = Parameter((out_features, in_features), init)
        self.bias = Parameter((out_features,), init) if bias else None
        lay_out("Linear", sbp, weight=self.weight, bias=self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [..., out_features]."""
        return functional.linear(x, self.weight, self.bias)


class Bilinear(Module):
    """y[o] = x1 @ weight[o] @ x2 + bias[o], for x1 [..., in1_features] and x2 [..., in2_features].

    `weight` [out, in1, in2] and `bias` [out] start uniform in +-1/sqrt(in1).
    """

    def __init__(
        self, in1_features: int, in2_features: int, out_features: int, *, bias: bool = True
    ) -> None:
        in1_features = checked_extent("Bilinear", "in1_features", in1_features)
        in2_features = checked_extent("Bilinear", "in2_features", in2_features)
        out_features = checked_extent("Bilinear", "out_features", out_features)
        init = (("kind", "uniform"), ("bound", 1.0 / math.sqrt(in1_features)))
        self.weight = Parameter((out_features, in1_features, in2_features), init)
        self.bias = Parameter((out_features,), init) if bias else None

    def __call__(self, input1: Tensor, input2: Tensor) -> Tensor:
        """Return [..., out_features]."""
        return functional.bilinear(input1, input2, self.weight, self.bias)


class Embedding(Module):
    """Rows of `weight` [num_embeddings, embedding_dim] by integer id.

    The weight starts normal with standard deviation `std`. The row `padding_idx` starts with zeros
    and gets no gradient. `sbp` says how it lies on the ranks of a job's mesh: by rows of the table,
    `{"model": af.split(0)}`, or by columns, `{"model": af.split(1)}`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        std: float = 1.0,
        sbp: LayerWords | None = None,
    ) -> None:
        self.weight, self.padding_idx = _table(
            type(self).__name__, num_embeddings, embedding_dim, padding_idx, std
        )
        lay_out("Embedding", sbp, weight=self.weight)

    def __call__(self, input: Tensor) -> Tensor:
        """Return input.shape + [embedding_dim]."""
        return functional.embedding(input, self.weight, self.padding_idx)


def _table(
    layer: str, rows: int, width: int, padding_idx: int | None, std: float
) -> tuple[Parameter, int | None]:
    """Return the weight of an embedding, and which row of it is padding."""
    rows = checked_extent(layer, "num_embeddings", rows)
    width = checked_extent(layer, "embedding_dim", width)
    std = checked_number(std, f"std of {layer}")
    if not std >= 0.0:
        raise CompileError(f"{find_source()}: std of {layer} must be 0 or more, got {std}")
    init: InitSpec = (("kind", "normal"), ("std", std))
    if padding_idx is not None:
        padding_idx = padding_row(padding_idx, rows)
        init = (*init, ("zero_row", padding_idx))
    return Parameter((rows, width), init), padding_idx


class EmbeddingBag(Module):
    """The sum, mean or largest of bags of rows of `weight`; see `functional.embedding_bag`."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mode: str = "mean",
        *,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        std: float = 1.0,
    ) -> None:
        self.weight, self.padding_idx = _table(
            "EmbeddingBag", num_embeddings, embedding_dim, padding_idx, std
        )
        self.mode, self.include_last_offset = mode, include_last_offset

    def __call__(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Return [bags, embedding_dim]."""
        return functional.embedding_bag(
            input,
            self.weight,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        )


class Dropout(FunctionLayer, function=functional.dropout):
    """Zero elements with probability p during training; see `functional.dropout`."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__(checked_probability(p))

    def __call__(self, x: Tensor) -> Tensor:
        """Return a tensor of the same type as x."""
        made: Tensor = super().__call__(x)
        return made


class Dropout1d(Dropout, function=functional.dropout1d):
    """Zero whole channels of x [N, C, L]; see `functional.dropout1d`."""


class Dropout2d(Dropout, function=functional.dropout2d):
    """Zero whole channels of x [N, C, H, W]; see `functional.dropout2d`."""


class Dropout3d(Dropout, function=functional.dropout3d):
    """Zero whole channels of x [N, C, D, H, W]; see `functional.dropout3d`."""


class AlphaDropout(Dropout, function=functional.alpha_dropout):
    """Dropout between SELUs; see `functional.alpha_dropout`."""


MOST_LAYERS = 10_000
"""Of one module that makes them itself."""


def checked_extent(layer: str, name: str, extent: int, most: int = MOST_ELEMENTS) -> int:
    """Return an extent of a layer's parameters. Raises CompileError with the user's line."""
    size = checked_size(extent, f"{name} of {layer}")
    if not 1 <= size <= most:
        bound = "or more" if size < 1 else f"to {most:,}"
        raise CompileError(f"{find_source()}: {name} of {layer} must be 1 {bound}, got {size}")
    return size
