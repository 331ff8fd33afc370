"""Import this module to register every op that ships with the compiler.

A third party's op needs no entry here: its own file registers it when it is imported.
"""

from __future__ import annotations

from compiler.ops import (
    activation,
    attention,
    binary,
    chunked,
    comm,
    copies,
    core_gradients,
    elementwise,
    embedding,
    fused,
    fused_product,
    loss,
    matmul,
    non_finite,
    norm,
    precision,
    random,
    reduce,
    shape,
    slicing,
    softmax,
    sources,
    sparse_update,
    split,
    update,
)

__all__ = [
    "activation",
    "attention",
    "binary",
    "chunked",
    "comm",
    "copies",
    "core_gradients",
    "elementwise",
    "embedding",
    "fused",
    "fused_product",
    "loss",
    "matmul",
    "non_finite",
    "norm",
    "precision",
    "random",
    "reduce",
    "shape",
    "slicing",
    "softmax",
    "sources",
    "sparse_update",
    "split",
    "update",
]
