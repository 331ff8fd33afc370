"""The functions that tensors have as methods, too: those that torch's have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from actorflow import functional
from actorflow.functional import arranging

_NAMES = (
    *("cos", "exp", "log", "sin", "sqrt", "square"),
    *("maximum", "minimum"),
    *("relu", "sigmoid", "softmax", "tanh"),
    *("amax", "argmax", "max", "mean", "sum"),
    *("chunk", "flatten", "split", "unflatten"),
    *("expand", "expand_as", "movedim", "moveaxis", "narrow", "reshape_as", "select", "squeeze"),
    *("swapdims", "unbind", "unsqueeze", "view", "view_as"),
    *("diag", "diagonal", "flip", "fliplr", "flipud", "repeat", "repeat_interleave", "roll"),
    *("rot90", "tile", "tril", "triu", "unfold"),
    *("gather", "index_add", "index_copy", "index_fill", "index_put", "index_select"),
    *("masked_fill", "put", "scatter", "scatter_add", "take", "take_along_dim"),
)

METHODS: dict[str, Callable[..., Any]] = {name: getattr(functional, name) for name in _NAMES}
METHODS["trace"] = arranging.trace  # not af.trace, which is a package
