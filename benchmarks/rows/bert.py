"""BERT-base (Devlin et al., 2018) on masked words: 110 M parameters, texts of 128 words.

Norms stand after the sums, words have segments, and the words to be found, a seventh of all, are
picked out before the head, which is the table of words. GELU in its tanh form and no dropout, so
that engines compute the same to the last step. A host takes 8 texts at a time, a GPU 64.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from rows.gpt import block_weights
from rows.row import BOTH, NUM_BATCHES, Arrays, Optimizer, Row, normal

SIZES = {"layers": 12, "width": 768, "heads": 12, "seq": 128, "batch": 64, "vocab": 30_592}
ON_HOST = SIZES | {"batch": 8}
SHARE = 7


def weights(sizes: dict[str, int]) -> Arrays:
    rng = np.random.default_rng(1)
    width = sizes["width"]
    arrays = {"emb.weight": normal(rng, sizes["vocab"], width)}
    arrays["pos.weight"] = normal(rng, sizes["seq"], width)
    arrays["segment.weight"] = normal(rng, 2, width)
    for norm in ("first", "last"):
        arrays[f"{norm}.weight"] = np.ones(width, np.float32)
        arrays[f"{norm}.bias"] = np.zeros(width, np.float32)
    for i in range(sizes["layers"]):
        arrays |= block_weights(rng, f"blocks.{i}.", width)
    arrays["dense.weight"] = normal(rng, width, width)
    arrays["dense.bias"] = normal(rng, width)
    arrays["bias"] = np.zeros(sizes["vocab"], np.float32)
    return arrays


def batches(sizes: dict[str, int]) -> list[Arrays]:
    """Return texts with words masked: x [batch, seq], their segments, places in it, words there."""
    rng = np.random.default_rng(2)
    batch, seq, vocab = sizes["batch"], sizes["seq"], sizes["vocab"]
    examples = []
    for _ in range(NUM_BATCHES):
        words = (np.cumsum(rng.integers(0, 5, (batch, seq)), axis=1) % vocab).astype(np.int32)
        picks = rng.permuted(np.tile(np.arange(seq), (batch, 1)), axis=1)[:, : seq // SHARE]
        places = (picks + seq * np.arange(batch)[:, None]).reshape(-1).astype(np.int32)
        labels = words.reshape(-1)[places]
        x = words.copy()
        x.reshape(-1)[places] = vocab - 1
        segments = np.zeros((batch, seq), np.int32)
        segments[:, seq // 2 :] = 1
        examples.append({"x": x, "segments": segments, "places": places, "y": labels})
    return examples


def bert_row(name: str, sizes: dict[str, int], precisions: tuple[str, ...] = ("bf16",)) -> Row:
    """Return a row of this model at some sizes."""
    items = sizes["batch"]
    data = partial(weights, sizes), partial(batches, sizes)
    return Row(
        name, "bert", sizes, Optimizer("adamw", 1e-4, 0.01), items, "texts", *data, precisions
    )


HOST_ROWS = (bert_row("bert", ON_HOST, BOTH),)
GPU_ROWS = (bert_row("bert-base", SIZES),)
