"""LeNet-5 as in torch's tutorials, on 64 pictures of 28 x 28, under Adam."""

from __future__ import annotations

import numpy as np

from rows.row import BOTH, Arrays, Optimizer, Row, normal, pictures

BATCH, CLASSES = 64, 10
SHAPES = {
    "conv1": (6, 1, 5, 5),
    "conv2": (16, 6, 5, 5),
    "fc1": (120, 400),
    "fc2": (84, 120),
    "fc3": (CLASSES, 84),
}


def weights() -> Arrays:
    rng = np.random.default_rng(1)
    arrays: Arrays = {}
    for name, shape in SHAPES.items():
        arrays[f"{name}.weight"] = normal(rng, *shape, std=float(np.prod(shape[1:])) ** -0.5)
        arrays[f"{name}.bias"] = normal(rng, shape[0], std=0.01)
    return arrays


def batches() -> list[Arrays]:
    return pictures(BATCH, 1, 28, CLASSES)


ROWS = (
    Row("lenet", "lenet", {}, Optimizer("adamw", 1e-3), BATCH, "pictures", weights, batches, BOTH),
)
