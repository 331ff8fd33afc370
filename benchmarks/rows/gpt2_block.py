"""One block of GPT-2 small, forward and backward, with the gradient of its input too.

The input x is a parameter beside the block's own, so that every engine has to make its gradient;
the loss is the mean squared difference to a target, and all are changed by gradient descent.
"""

from __future__ import annotations

import numpy as np

from rows.gpt import block_weights
from rows.row import NUM_BATCHES, Arrays, Optimizer, Row, normal

SIZES = {"batch": 4, "seq": 256, "width": 768, "heads": 12}
SHAPE = SIZES["batch"], SIZES["seq"], SIZES["width"]


def weights() -> Arrays:
    rng = np.random.default_rng(1)
    return {"x": normal(rng, *SHAPE, std=1.0)} | block_weights(rng, "block.", SIZES["width"])


def batches() -> list[Arrays]:
    rng = np.random.default_rng(2)
    return [{"y": normal(rng, *SHAPE, std=1.0)} for _ in range(NUM_BATCHES)]


ROWS = (
    Row(
        "gpt2-block",
        "gpt2_block",
        SIZES,
        Optimizer("sgd", 10.0),
        SIZES["batch"] * SIZES["seq"],
        "tokens",
        weights,
        batches,
    ),
)
