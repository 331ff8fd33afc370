"""Layers that cut, join and look up, and functions that they are made of."""

from oracle import SHAPES, Case, floats

import actorflow as af

FULL = [floats((2, n, 3), key=n) for n in range(1, 21)]

CASES = [
    Case("flatten", af.flatten, lambda t, x: t.flatten(x), [floats(s, key=s) for s in SHAPES]),
    Case("flatten axes", lambda x: x.flatten(0, 1), lambda t, x: x.flatten(0, 1), FULL),
    Case(
        "unflatten",
        lambda x: x.unflatten(-1, (3, -1, 1)),
        lambda t, x: x.unflatten(-1, (3, -1, 1)),
        FULL,
    ),
]


def test_values_and_gradients_are_torchs(case, dtype, agrees):
    agrees(case, dtype)
