"""The functions that tensors have as methods, too: those that torch's have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from actorflow import functional

_NAMES = (
    *("cos", "exp", "log", "sin", "sqrt", "square"),
    *("maximum", "minimum"),
    *("relu", "sigmoid", "softmax", "tanh"),
    *("amax", "argmax", "max", "mean", "sum"),
    *("chunk", "flatten", "split", "unflatten"),
)

METHODS: dict[str, Callable[..., Any]] = {name: getattr(functional, name) for name in _NAMES}
