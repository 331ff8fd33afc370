"""Wide & Deep (Cheng et al., 2016): looked-up rows and 13 dense features, batch 1024.

The deep half is an MLP with relu over the looked-up rows and the dense features, the wide half a
linear layer of the dense features; their logits are added. `wide-deep` has 26 tables of 100,000
rows of 16 and an MLP 429-256-128-2; `wide-deep-large` has one table of all 2,600,000 rows, of which
each sample reads 26, and the paper's MLP 1024-512-256. Gradient descent, so that an engine may
touch nothing but the rows that were read. Ids are skewed as those of click logs are: some rows are
read fifty times in a batch, most never, and the losses show how gradients add up.
"""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np

from rows.row import BOTH, Arrays, Optimizer, Row, normal

TABLES, CLASSES = 26, 2
NUM_BATCHES, SKEW = 16, 4
SIZES = {"tables": TABLES, "rows": 100_000, "dim": 16, "dense": 13, "batch": 1024}
LARGE = SIZES | {"tables": 1, "rows": TABLES * 100_000}


def tables(sizes: dict[str, int], prefix: str) -> tuple[np.random.Generator, Arrays]:
    """Return the tables, and the generator for what follows them."""
    rng, shape = np.random.default_rng(1), (sizes["rows"], sizes["dim"])
    names = [f"{prefix}{i}.weight" for i in range(sizes["tables"])]
    return rng, {name: normal(rng, *shape, std=0.1) for name in names}


def mlp(rng: np.random.Generator, widths: tuple[int, ...], prefix: str, step: int = 1) -> Arrays:
    """Return the layers of an MLP; `step` is 2 where a relu stands between their numbers."""
    arrays: Arrays = {}
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
        arrays[f"{prefix}{step * i}.weight"] = normal(rng, fan_out, fan_in, std=fan_in**-0.5)
        arrays[f"{prefix}{step * i}.bias"] = normal(rng, fan_out, std=0.01)
    return arrays


def weights(sizes: dict[str, int], hidden: tuple[int, ...]) -> Arrays:
    rng, arrays = tables(sizes, "tables.")
    arrays |= mlp(rng, (TABLES * sizes["dim"] + sizes["dense"], *hidden, CLASSES), "layers.")
    arrays["wide.weight"] = normal(rng, CLASSES, sizes["dense"], std=0.1)
    arrays["wide.bias"] = normal(rng, CLASSES, std=0.01)
    return arrays


def clicks(sizes: dict[str, int], columns: int = TABLES) -> list[Arrays]:
    """Return batches of ids [batch, columns], dense features and whether there was a click."""
    rng, batch = np.random.default_rng(2), sizes["batch"]
    return [
        {
            "ids": (sizes["rows"] * rng.random((batch, columns)) ** SKEW).astype(np.int32),
            "dense": normal(rng, batch, sizes["dense"], std=1.0),
            "y": rng.integers(0, CLASSES, batch, np.int32),
        }
        for _ in range(NUM_BATCHES)
    ]


def wide_deep_row(name: str, sizes: dict[str, int], hidden: tuple[int, ...]) -> Row:
    """Return a row of this model at some sizes, with hidden layers of some widths."""
    data = partial(weights, sizes, hidden), partial(clicks, sizes)
    sizes = sizes | {"layers": len(hidden) + 1}
    return Row(
        name, "wide_deep", sizes, Optimizer("sgd", 1e-1), sizes["batch"], "samples", *data, BOTH
    )


ROWS = (
    wide_deep_row("wide-deep", SIZES, (256, 128)),
    wide_deep_row("wide-deep-large", LARGE, (1024, 512, 256)),
)
