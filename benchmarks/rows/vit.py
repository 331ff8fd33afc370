"""ViT-S/16 (Dosovitskiy et al., 2020) with timm's names: 22 M parameters, 8 pictures of 224 x 224.

Patches of 16 x 16 and the token of the class are 197 tokens. No dropout, AdamW.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from rows.row import BOTH, Arrays, Optimizer, Row, normal, pictures

SIZES = {
    "layers": 12, "width": 384, "heads": 6, "patch": 16, "extent": 224, "classes": 1000, "batch": 8,
}  # fmt: skip


def weights(sizes: dict[str, int]) -> Arrays:
    rng = np.random.default_rng(1)
    width, patch = sizes["width"], sizes["patch"]
    count = (sizes["extent"] // patch) ** 2
    arrays = {"cls_token": normal(rng, 1, 1, width), "pos_embed": normal(rng, 1, 1 + count, width)}

    def layer(name: str, fan_in: int, fan_out: int) -> None:
        arrays[f"{name}.weight"] = normal(rng, fan_out, fan_in)
        arrays[f"{name}.bias"] = np.zeros(fan_out, np.float32)

    def norm(name: str) -> None:
        arrays[f"{name}.weight"] = np.ones(width, np.float32)
        arrays[f"{name}.bias"] = np.zeros(width, np.float32)

    layer("patch_embed.proj", 3 * patch**2, width)
    kernels = arrays["patch_embed.proj.weight"]
    arrays["patch_embed.proj.weight"] = kernels.reshape(width, 3, patch, patch)
    for i in range(sizes["layers"]):
        norm(f"blocks.{i}.norm1")
        layer(f"blocks.{i}.attn.qkv", width, 3 * width)
        layer(f"blocks.{i}.attn.proj", width, width)
        norm(f"blocks.{i}.norm2")
        layer(f"blocks.{i}.mlp.fc1", width, 4 * width)
        layer(f"blocks.{i}.mlp.fc2", 4 * width, width)
    norm("norm")
    layer("head", width, sizes["classes"])
    return arrays


def vit_row(name: str, sizes: dict[str, int]) -> Row:
    """Return a row of this model at some sizes."""
    batches = partial(pictures, sizes["batch"], 3, sizes["extent"], sizes["classes"])
    data = partial(weights, sizes), batches
    adam = Optimizer("adamw", 1e-4, 0.05)
    return Row(name, "vit", sizes, adam, sizes["batch"], "pictures", *data, BOTH)


ROWS = (vit_row("vit-s", SIZES),)
