"""The functions that tensors have as methods, too: those that torch's have."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from actorflow import functional
from actorflow.functional import arranging, comparison, elementwise, products, reduce, rounding
from actorflow.tensor import Tensor, as_tensor, checked_axis

_NAMES = (
    *(name for name in elementwise.__all__ if name != "where"),
    *comparison.__all__,
    *rounding.__all__,
    *("log_softmax", "relu", "sigmoid", "softmax", "tanh"),
    *reduce.__all__,
    *(name for name in products.__all__ if name not in ("einsum", "tensordot")),
    *("chunk", "flatten", "split", "unflatten"),
    *("expand", "expand_as", "movedim", "moveaxis", "narrow", "reshape_as", "select", "squeeze"),
    *("swapdims", "unbind", "unsqueeze", "view", "view_as"),
    *("diag", "diagonal", "flip", "fliplr", "flipud", "repeat", "repeat_interleave", "roll"),
    *("rot90", "tile", "tril", "triu"),
    *("bernoulli", "multinomial"),
    *("argsort", "kthvalue", "median", "sort", "topk", "unique"),
    *("cummax", "cummin", "cumprod", "cumsum", "logcumsumexp"),
    *("gather", "index_add", "index_copy", "index_fill", "index_put", "index_select"),
    *("masked_fill", "put", "scatter", "scatter_add", "take", "take_along_dim"),
)


def _cast(dtype: str, x: Tensor) -> Tensor:
    return x.to(dtype)


_DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "bfloat16": "bfloat16",
    "int": "int32",
    "long": "int64",
    "short": "int16",
    "bool": "bool",
}

_PLAIN: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "contiguous": lambda x: x,
    "clone": lambda x: x,
    "dim": lambda x: x.ndim,
    "numel": lambda x: x.type.num_elements,
    "size": lambda x, dim=None: x.shape if dim is None else x.shape[checked_axis(x, dim)],
    "type_as": lambda x, other: x.to(as_tensor(other).dtype),
}
"""Methods that torch's tensors have, and that are no functions here: tensors never change."""

METHODS: dict[str, Callable[..., Any]] = {name: getattr(functional, name) for name in _NAMES}
METHODS["trace"] = arranging.trace  # not af.trace, which is a package
METHODS["unfold"] = arranging.unfold  # not af.unfold, which makes columns of images, as torch's
METHODS |= _PLAIN
METHODS |= {name: partial(_cast, dtype) for name, dtype in _DTYPES.items()}
