"""Clicks that are made up: who is shown what, and whether they click."""

import numpy as np

SKEW, TASTES = 3, 4


def clicks(num, rows, *, dense=13, seed=0):
    """Make clicks up: {"dense": [num, dense], "ids": [num, tables], "y": 0 or 1}, and their odds.

    Ids are skewed as those of click logs are. Each id has a taste; the odds of a click are a sum of
    what the dense features weigh, and of how well the tastes of each pair of ids agree. They are
    returned as logits: no model can rank clicks better than they do.
    """
    rng = np.random.default_rng(seed)
    tables = len(rows)
    tastes = [rng.normal(0.0, 1.0, (n, TASTES)) for n in rows]
    weights = rng.normal(0.0, 0.5 / dense**0.5, dense)
    bonds = np.triu(rng.normal(0.0, 2.0 / tables, (tables, tables)), 1)

    features = rng.standard_normal((num, dense))
    ids = np.stack([(n * rng.random(num) ** SKEW).astype(np.int32) for n in rows], axis=1)
    shown = np.stack([taste[ids[:, i]] for i, taste in enumerate(tastes)], axis=1)
    logits = (
        -0.5 + features @ weights + np.einsum("nik,njk,ij->n", shown, shown, bonds, optimize=True)
    )
    y = rng.random(num) < 1.0 / (1.0 + np.exp(-logits))
    arrays = {"dense": features.astype(np.float32), "ids": ids, "y": y.astype(np.float32)}
    return arrays, logits


def rank(scores, y):
    """Return the chance that a click scores higher than no click: the area under ROC's curve."""
    places = np.empty(len(scores))
    places[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    hits = y.sum()
    return (places[y == 1].sum() - hits * (hits + 1) / 2) / (hits * (len(y) - hits))
