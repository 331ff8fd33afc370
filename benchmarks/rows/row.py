"""A row of the comparison: everything but the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Arrays = dict[str, np.ndarray]
NUM_BATCHES = 4
"""Batches that are made; the steps go round them, so that a loss shows what was learned of one."""


BOTH = ("fp32", "bf16")
"""Precisions of a row that is mostly products."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """How parameters change.

    `kind` is "sgd", "adamw" (torch's rule; Adam where `decay` is 0) or "none" for inference.
    """

    kind: str
    rate: float = 0.0
    decay: float = 0.0

    @property
    def num_states(self) -> int:
        """Arrays of state per parameter."""
        return 2 if self.kind == "adamw" else 0


@dataclass(frozen=True, slots=True)
class Row:
    """A model at its sizes.

    `family` names the function of each engine that builds it, `sizes` are its numbers. Weights of
    linear layers are [out, in], under the names of the engine's own modules. `items` are the items
    of one step, `item` their name. `weights` and `batches` give the same arrays in every process.
    """

    name: str
    family: str
    sizes: Mapping[str, int]
    optimizer: Optimizer
    items: int
    item: str
    weights: Callable[[], Arrays]
    batches: Callable[[], list[Arrays]]
    precisions: tuple[str, ...] = ("fp32",)

    @property
    def is_training(self) -> bool:
        return self.optimizer.kind != "none"


def normal(rng: np.random.Generator, *shape: int, std: float = 0.02) -> np.ndarray:
    """Return normal float32 values, which begin where a line of the cache does.

    So do weights that an engine allocates itself; those that numpy does begin 16 bytes after one.
    """
    size = 4 * math.prod(shape)
    block = np.empty(size + 64, np.uint8)
    begin = -block.ctypes.data % 64
    values = block[begin : begin + size].view(np.float32).reshape(shape)
    np.multiply(rng.standard_normal(shape, np.float32), np.float32(std), out=values)
    return values


def pictures(batch: int, channels: int, size: int, classes: int) -> list[Arrays]:
    """Return batches of noise [batch, channels, size, size] with labels."""
    rng = np.random.default_rng(2)
    return [
        {
            "x": normal(rng, batch, channels, size, size, std=1.0),
            "y": rng.integers(0, classes, batch, np.int32),
        }
        for _ in range(NUM_BATCHES)
    ]


def is_buffer(name: str) -> bool:
    """Whether an array is state that no optimizer changes, by its name."""
    return name.endswith((".running_mean", ".running_var", ".num_batches_tracked"))


def is_linear(name: str, array: np.ndarray) -> bool:
    """Whether an array is a weight [out, in] of a linear or LSTM layer, by its name and shape."""
    return array.ndim == 2 and ".weight" in name and not is_table(name)


def is_table(name: str) -> bool:
    """Whether an array is an embedding, of which a step reads a few rows, by its name."""
    return name.startswith(("emb.", "pos.", "segment.")) or is_sparse(name)


def is_sparse(name: str) -> bool:
    """Whether an array is a table whose rows alone are changed, those that a step reads."""
    return name.startswith(("tables.", "emb_l."))
