"""Wide & Deep (Cheng et al., 2016): 26 tables of 100,000 x 16, 13 dense features, batch 1024.

The deep half is an MLP 429-256-128-2 with relu over the looked-up rows and the dense features, the
wide half a linear layer of the dense features; their logits are added. Gradient descent, so that
an engine may touch nothing but the rows that were read. Ids are skewed as those of click logs are:
some rows are read fifty times in a batch, most never, and the losses show how gradients add up.
"""

from __future__ import annotations

import itertools

import numpy as np

from rows.row import Arrays, Optimizer, Row, normal

TABLES, ROWS_EACH, DIM, DENSE, BATCH = 26, 100_000, 16, 13, 1024
WIDTHS = (TABLES * DIM + DENSE, 256, 128, 2)
NUM_BATCHES, SKEW = 16, 4
SIZES = {"tables": TABLES, "rows": ROWS_EACH, "dim": DIM, "dense": DENSE, "layers": 3}


def weights() -> Arrays:
    rng = np.random.default_rng(1)
    arrays = {f"tables.{i}.weight": normal(rng, ROWS_EACH, DIM, std=0.1) for i in range(TABLES)}
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(WIDTHS)):
        arrays[f"layers.{i}.weight"] = normal(rng, fan_out, fan_in, std=fan_in**-0.5)
        arrays[f"layers.{i}.bias"] = normal(rng, fan_out, std=0.01)
    arrays["wide.weight"] = normal(rng, WIDTHS[-1], DENSE, std=0.1)
    arrays["wide.bias"] = normal(rng, WIDTHS[-1], std=0.01)
    return arrays


def batches() -> list[Arrays]:
    rng = np.random.default_rng(2)
    return [
        {
            "ids": (ROWS_EACH * rng.random((BATCH, TABLES)) ** SKEW).astype(np.int32),
            "dense": normal(rng, BATCH, DENSE, std=1.0),
            "y": rng.integers(0, WIDTHS[-1], BATCH, np.int32),
        }
        for _ in range(NUM_BATCHES)
    ]


ROWS = (
    Row(
        "wide-deep",
        "wide_deep",
        SIZES,
        Optimizer("sgd", 1e-1),
        BATCH,
        "samples",
        weights,
        batches,
    ),
)
