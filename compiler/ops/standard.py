"""Import this module to register every op that ships with the compiler.

A third party's op needs no entry here: its own file registers it when it is imported.
"""

from __future__ import annotations

from compiler.ops import (
    activation,
    attention,
    binary,
    comm,
    core_gradients,
    elementwise,
    embedding,
    linear_loss,
    loss,
    matmul,
    norm,
    random,
    reduce,
    shape,
    slicing,
    softmax,
    sources,
    split,
    update,
)

__all__ = [
    "activation",
    "attention",
    "binary",
    "comm",
    "core_gradients",
    "elementwise",
    "embedding",
    "linear_loss",
    "loss",
    "matmul",
    "norm",
    "random",
    "reduce",
    "shape",
    "slicing",
    "softmax",
    "sources",
    "split",
    "update",
]
