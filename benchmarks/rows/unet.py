"""U-Net (Ronneberger et al., 2015) as published, 31 M parameters, on 2 pictures of 128 x 128.

Convolutions are padded and normalised, so that the answer has the size of the picture. A label of
each pixel, of 2 classes.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np

from rows.resnet import SMALL_STEPS, convolution
from rows.row import BOTH, Arrays, Row, normal, pictures

SIZES = {"channels": 3, "width": 64, "depth": 4, "classes": 2, "batch": 2, "extent": 128}


def weights(sizes: dict[str, int]) -> Arrays:
    rng = np.random.default_rng(1)
    arrays: Arrays = {}

    def doubled(name: str, channels: int, results: int) -> None:
        arrays.update(convolution(rng, f"{name}.0", f"{name}.1", (results, channels, 3)))
        arrays.update(convolution(rng, f"{name}.3", f"{name}.4", (results, results, 3)))

    widths = [sizes["width"] << level for level in range(sizes["depth"] + 1)]
    doubled("inc", sizes["channels"], widths[0])
    for level, (channels, results) in enumerate(pairwise(widths)):
        doubled(f"down.{level}", channels, results)
    for level, (channels, results) in enumerate(pairwise(widths[::-1])):
        weight = normal(rng, channels, results, 2, 2, std=channels**-0.5)
        arrays[f"up.{level}.weight"] = weight
        arrays[f"up.{level}.bias"] = np.zeros(results, np.float32)
        doubled(f"join.{level}", channels, results)
    arrays["outc.weight"] = normal(rng, sizes["classes"], widths[0], 1, 1, std=widths[0] ** -0.5)
    arrays["outc.bias"] = np.zeros(sizes["classes"], np.float32)
    return arrays


def batches(sizes: dict[str, int]) -> list[Arrays]:
    shape = sizes["batch"], sizes["extent"], sizes["extent"]
    rng = np.random.default_rng(3)
    plain = pictures(shape[0], sizes["channels"], shape[1], sizes["classes"])
    return [b | {"y": rng.integers(0, sizes["classes"], shape, np.int32)} for b in plain]


def unet_row(name: str, sizes: dict[str, int]) -> Row:
    """Return a row of this model at some sizes."""
    data = partial(weights, sizes), partial(batches, sizes)
    return Row(name, "unet", sizes, SMALL_STEPS, sizes["batch"], "pictures", *data, BOTH)


ROWS = (unet_row("unet", SIZES),)
