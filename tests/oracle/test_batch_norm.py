"""Batch normalisation, in training and outside of it, as function and as layers."""

import numpy as np
from oracle import Case, floats

import actorflow as af

SHAPES = [
    *((3, 1), (4, 3), (5, 4), (33, 2), (16, 65), (3, 1, 1), (6, 3, 1), (1, 3, 6), (4, 2, 7)),
    *((2, 3, 17), (1, 1, 40), (5, 3, 1, 1), (1, 2, 4, 1), (2, 3, 4, 5), (8, 5, 3, 3)),
    *((1, 16, 8, 8), (3, 2, 1, 7), (2, 2, 2, 2, 2), (1, 3, 1, 2, 5), (4, 1, 3, 1, 1)),
    (2, 33, 2, 1, 3),
]  # fmt: skip
AFFINE = [floats(s, (s[1],), (s[1],), key=i) for i, s in enumerate(SHAPES)]
PLAIN = [floats(s, key=i) for i, s in enumerate(SHAPES)]
EMPTY = [floats(s, (s[1],), (s[1],), key=s) for s in ((0, 3), (0, 2, 4), (2, 3, 0))]


def running(channels):
    return np.linspace(-1.0, 2.0, channels), np.linspace(0.5, 3.0, channels)


def ours_outside(x, *affine, **options):
    mean, var = [array.astype(x.dtype.value) for array in running(x.shape[1])]

    return af.batch_norm(x, mean, var, *affine, **options)


def torchs_outside(t, x, *affine, **options):
    mean, var = [t.as_tensor(array, dtype=x.dtype) for array in running(x.shape[1])]
    return t.nn.functional.batch_norm(x, mean, var, *affine, **options)


CASES = [
    Case(
        "batch_norm in training",
        lambda x, w, b: af.batch_norm(x, None, None, w, b, training=True),
        lambda t, x, w, b: t.nn.functional.batch_norm(x, None, None, w, b, training=True),
        AFFINE,
    ),
    Case(
        "batch_norm in training, not affine",
        lambda x: af.batch_norm(x, training=True, eps=1e-2),
        lambda t, x: t.nn.functional.batch_norm(x, None, None, training=True, eps=1e-2),
        PLAIN,
    ),
    Case("batch_norm", ours_outside, torchs_outside, AFFINE + EMPTY),
    Case(
        "batch_norm, not affine",
        lambda x: ours_outside(x, eps=0.1),
        lambda t, x: torchs_outside(t, x, eps=0.1),
        PLAIN,
    ),
    Case(
        "batch_norm of values far from 0",
        lambda x: af.batch_norm(x + 100.0, training=True),
        lambda t, x: t.nn.functional.batch_norm(x + 100.0, None, None, training=True),
        PLAIN,
        tolerance=1e-3,
        has_gradient=False,
    ),
]


def test_values_and_gradients_are_torchs(case, dtype, agrees):
    agrees(case, dtype)
