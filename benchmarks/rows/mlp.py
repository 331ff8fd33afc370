"""An MLP 784-1024-1024-10 with relu under Adam, batch 128."""

from __future__ import annotations

import itertools

import numpy as np

from rows.row import NUM_BATCHES, Arrays, Optimizer, Row, normal

WIDTHS, BATCH = (784, 1024, 1024, 10), 128


def weights() -> Arrays:
    rng = np.random.default_rng(1)
    arrays: Arrays = {}
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(WIDTHS)):
        arrays[f"layers.{i}.weight"] = normal(rng, fan_out, fan_in, std=fan_in**-0.5)
        arrays[f"layers.{i}.bias"] = normal(rng, fan_out, std=0.01)
    return arrays


def batches() -> list[Arrays]:
    rng = np.random.default_rng(2)
    return [
        {
            "x": normal(rng, BATCH, WIDTHS[0], std=1.0),
            "y": rng.integers(0, WIDTHS[-1], BATCH, np.int32),
        }
        for _ in range(NUM_BATCHES)
    ]


ROWS = (
    Row(
        "mlp",
        "mlp",
        {"layers": len(WIDTHS) - 1},
        Optimizer("adamw", 1e-3),
        BATCH,
        "samples",
        weights,
        batches,
        ("fp32", "bf16"),
    ),
)
