"""A language model of two LSTM layers of 512 over 64 steps, with a vocabulary of 10,000.

In fp32 alone, in which the check of a GPU has timed it from the start.
"""

from __future__ import annotations

import numpy as np

from rows.row import NUM_BATCHES, Arrays, Optimizer, Row, normal

SIZES = {"layers": 2, "width": 512, "seq": 64, "batch": 20, "vocab": 10_000}


def weights() -> Arrays:
    rng = np.random.default_rng(1)
    width, vocab = SIZES["width"], SIZES["vocab"]
    bound = width**-0.5
    arrays = {"emb.weight": normal(rng, vocab, width, std=0.1)}
    for i in range(SIZES["layers"]):
        for name, shape in (("weight", (4 * width, width)), ("bias", (4 * width,))):
            for side in ("ih", "hh"):
                values = rng.uniform(-bound, bound, shape).astype(np.float32)
                arrays[f"lstm.{name}_{side}_l{i}"] = values
    arrays["head.weight"] = normal(rng, vocab, width)
    arrays["head.bias"] = normal(rng, vocab)
    return arrays


def batches() -> list[Arrays]:
    """Return texts [seq, batch] with some structure, so that the loss falls."""
    rng = np.random.default_rng(2)
    texts = []
    for _ in range(NUM_BATCHES):
        steps = rng.integers(0, 5, (SIZES["seq"] + 1, SIZES["batch"]))
        text = (np.cumsum(steps, axis=0) % SIZES["vocab"]).astype(np.int32)
        texts.append({"x": text[:-1].copy(), "y": text[1:].copy()})
    return texts


ROWS = (
    Row(
        "lstm",
        "lstm",
        SIZES,
        Optimizer("adamw", 1e-3, 0.0),
        SIZES["batch"] * SIZES["seq"],
        "tokens",
        weights,
        batches,
    ),
)
