"""GPT-2 of 124 M parameters at three batches: what a GPU is asked to train.

The vocabulary is padded to a multiple of 128, and the table of words is the head too. Rows of a GPU
alone: a step of 64 texts is 56 TFLOP.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from rows.gpt import batches, block_weights
from rows.row import Arrays, Optimizer, Row, normal

SIZES = {"layers": 12, "width": 768, "heads": 12, "seq": 1024, "vocab": 50_304}
BATCHES = (1, 8, 64)


def weights(sizes: dict[str, int]) -> Arrays:
    rng = np.random.default_rng(1)
    width = sizes["width"]
    arrays = {"emb.weight": normal(rng, sizes["vocab"], width)}
    arrays["pos.weight"] = normal(rng, sizes["seq"], width)
    for i in range(sizes["layers"]):
        arrays |= block_weights(rng, f"blocks.{i}.", width)
    arrays["norm.weight"] = np.ones(width, np.float32)
    arrays["norm.bias"] = np.zeros(width, np.float32)
    return arrays


def gpt2_row(name: str, sizes: dict[str, int]) -> Row:
    """Return a row of this model at some sizes, in bfloat16."""
    items = sizes["batch"] * sizes["seq"]
    data = partial(weights, sizes), partial(batches, sizes)
    return Row(
        name, "gpt2", sizes, Optimizer("adamw", 3e-4, 0.1), items, "tokens", *data, ("bf16",)
    )


ROWS = tuple([gpt2_row(f"gpt2-b{batch}", SIZES | {"batch": batch}) for batch in BATCHES])
