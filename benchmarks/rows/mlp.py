"""An MLP 784-1024-1024-10 with relu under Adam, batch 128, and an inference of one sample."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np

from rows.row import BOTH, NUM_BATCHES, Arrays, Optimizer, Row, normal

WIDTHS = (784, 1024, 1024, 10)


def weights() -> Arrays:
    rng = np.random.default_rng(1)
    arrays: Arrays = {}
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(WIDTHS)):
        arrays[f"layers.{i}.weight"] = normal(rng, fan_out, fan_in, std=fan_in**-0.5)
        arrays[f"layers.{i}.bias"] = normal(rng, fan_out, std=0.01)
    return arrays


def batches(batch: int) -> list[Arrays]:
    rng = np.random.default_rng(2)
    return [
        {
            "x": normal(rng, batch, WIDTHS[0], std=1.0),
            "y": rng.integers(0, WIDTHS[-1], batch, np.int32),
        }
        for _ in range(NUM_BATCHES)
    ]


def _row(name: str, batch: int, optimizer: Optimizer) -> Row:
    sizes, data = {"layers": len(WIDTHS) - 1}, (weights, partial(batches, batch))
    return Row(name, "mlp", sizes, optimizer, batch, "samples", *data, BOTH)


ROWS = (_row("mlp", 128, Optimizer("adamw", 1e-3)),)
INFERENCE = (_row("mlp-inference", 1, Optimizer("none")),)
