"""200 chained ops on 32 x 32, so that what an op costs beside its arithmetic is all there is.

50 layers h = tanh(h @ w + b) * g, every second with relu instead of tanh: a product, a sum, an
activation and a scaling each, forward and backward, and plain gradient descent.
"""

from __future__ import annotations

import numpy as np

from rows.row import NUM_BATCHES, Arrays, Optimizer, Row, normal

WIDTH, LAYERS = 32, 50


def weights() -> Arrays:
    rng = np.random.default_rng(1)
    arrays: Arrays = {}
    for i in range(LAYERS):
        arrays[f"layers.{i}.w"] = normal(rng, WIDTH, WIDTH, std=1.2 / WIDTH**0.5)
        arrays[f"layers.{i}.b"] = normal(rng, WIDTH, std=0.1)
        arrays[f"layers.{i}.g"] = 1 + normal(rng, WIDTH, std=0.1)
    return arrays


def batches() -> list[Arrays]:
    rng = np.random.default_rng(2)
    shapes = {"x": (WIDTH, WIDTH), "y": (WIDTH, WIDTH)}
    return [{n: normal(rng, *s, std=1.0) for n, s in shapes.items()} for _ in range(NUM_BATCHES)]


ROWS = (
    Row(
        "tiny",
        "tiny",
        {"layers": LAYERS, "width": WIDTH},
        Optimizer("sgd", 1e-3),
        WIDTH,
        "samples",
        weights,
        batches,
    ),
)
