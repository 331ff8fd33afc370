"""GPTs: the demo's, one of 10.8 M parameters, one of a large vocabulary, and an inference.

The second's inference takes one text at a time. With 50,257 words the logits of a step are 206 MB,
and so is their gradient; what an engine can do about that is a variant of its own.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from rows.row import BOTH, NUM_BATCHES, Arrays, Optimizer, Row, normal

CHAR = {"layers": 2, "width": 128, "heads": 4, "seq": 64, "batch": 32, "vocab": 128}
FULL = {"layers": 6, "width": 384, "heads": 6, "seq": 256, "batch": 8, "vocab": 65}
ONE = FULL | {"batch": 1}
VOCAB = FULL | {"layers": 4, "batch": 4, "vocab": 50_257}


def block_weights(rng: np.random.Generator, prefix: str, width: int) -> Arrays:
    """Return the weights of a pre-norm transformer block."""
    arrays: Arrays = {}
    for norm in ("norm1", "norm2"):
        arrays[f"{prefix}{norm}.weight"] = np.ones(width, np.float32)
        arrays[f"{prefix}{norm}.bias"] = np.zeros(width, np.float32)
    for layer, fan_out, fan_in in (
        ("attn.qkv", 3 * width, width),
        ("attn.proj", width, width),
        ("mlp.up", 4 * width, width),
        ("mlp.down", width, 4 * width),
    ):
        arrays[f"{prefix}{layer}.weight"] = normal(rng, fan_out, fan_in)
        arrays[f"{prefix}{layer}.bias"] = normal(rng, fan_out)
    return arrays


def weights(sizes: dict[str, int]) -> Arrays:
    rng = np.random.default_rng(1)
    width, vocab = sizes["width"], sizes["vocab"]
    arrays = {"emb.weight": normal(rng, vocab, width)}
    arrays["pos.weight"] = normal(rng, sizes["seq"], width)
    for i in range(sizes["layers"]):
        arrays |= block_weights(rng, f"blocks.{i}.", width)
    arrays["norm.weight"] = np.ones(width, np.float32)
    arrays["norm.bias"] = np.zeros(width, np.float32)
    arrays["head.weight"] = normal(rng, vocab, width)
    arrays["head.bias"] = normal(rng, vocab)
    return arrays


def batches(sizes: dict[str, int]) -> list[Arrays]:
    """Return texts with some structure, so that the loss falls."""
    rng = np.random.default_rng(2)
    shape = sizes["batch"], sizes["seq"] + 1
    texts = []
    for _ in range(NUM_BATCHES):
        text = (np.cumsum(rng.integers(0, 5, shape), axis=1) % sizes["vocab"]).astype(np.int32)
        texts.append({"x": text[:, :-1].copy(), "y": text[:, 1:].copy()})
    return texts


def _row(name: str, sizes: dict[str, int], optimizer: Optimizer) -> Row:
    items = sizes["batch"] * sizes["seq"]
    data = partial(weights, sizes), partial(batches, sizes)
    return Row(name, "gpt", sizes, optimizer, items, "tokens", *data, BOTH)


ROWS = (
    _row("char-gpt", CHAR, Optimizer("adamw", 1e-3, 0.01)),
    _row("gpt", FULL, Optimizer("adamw", 3e-4, 0.01)),
    _row("gpt-vocab", VOCAB, Optimizer("adamw", 3e-4, 0.01)),
    _row("inference", ONE, Optimizer("none")),
)
