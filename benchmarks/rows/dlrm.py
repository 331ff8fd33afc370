"""DLRM (Naumov et al., 2019) as published for Criteo's clicks, but for tables of 100,000 rows each.

26 tables of 16 columns, an MLP 13-512-256-64-16 of the dense features, products of all pairs of the
27 features, and an MLP 367-512-256-1 to the logit of a click. Gradient descent, batch 2048; ids are
skewed as those of Wide & Deep are.
"""

from __future__ import annotations

from functools import partial

from rows.row import BOTH, Arrays, Optimizer, Row
from rows.wide_deep import TABLES, clicks, mlp, tables

SIZES = {"tables": TABLES, "rows": 100_000, "dim": 16, "dense": 13, "batch": 2048}
BOTTOM, TOP = (512, 256, 64), (512, 256)


def weights(sizes: dict[str, int]) -> Arrays:
    rng, arrays = tables(sizes, "emb_l.")
    dim, features = sizes["dim"], sizes["tables"] + 1
    arrays |= mlp(rng, (sizes["dense"], *BOTTOM, dim), "bot_l.", 2)
    return arrays | mlp(rng, (dim + features * (features - 1) // 2, *TOP, 1), "top_l.", 2)


def batches(sizes: dict[str, int]) -> list[Arrays]:
    return [b | {"y": b["y"].astype("float32")} for b in clicks(sizes, sizes["tables"])]


def dlrm_row(name: str, sizes: dict[str, int]) -> Row:
    """Return a row of this model at some sizes."""
    data = partial(weights, sizes), partial(batches, sizes)
    return Row(name, "dlrm", sizes, Optimizer("sgd", 1e-1), sizes["batch"], "samples", *data, BOTH)


ROWS = (dlrm_row("dlrm", SIZES),)
