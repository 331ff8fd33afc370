"""Attention with masks, shared heads and rotary positions."""

import numpy as np
from oracle import Case, floats, seeded

import actorflow as af

SIZES = [
    (b, h, t, s, d)
    for b in (1, 2)
    for h in (1, 4)
    for t, s in ((1, 1), (4, 5), (5, 4), (2, 6), (7, 7))
    for d in (4,)
]


def heads(shared=1, least=1):
    """Return queries, keys and values, of which `shared` heads have one of keys and values."""
    return [
        floats((b, h * shared, t, d), (b, h, s, d), (b, h, s, d + 1), key=(b, h, t, s))
        for b, h, t, s, d in [(b, h, t, max(s, least), d) for b, h, t, s, d in SIZES]
    ]


def masked(is_bool, shared=1):
    """Return them with a mask, of which one row hides all, and no other all keys but one.

    The slope of a score that is alone is 0, and in float32 the difference of two equal numbers.
    """
    made = []
    for arrays in heads(shared, least=2):
        rows, columns = arrays[0].shape[-2], arrays[1].shape[-2]
        seen = seeded("mask", rows, columns).random((rows, columns)) < 0.6
        seen[:, :2] = True
        if rows > 2:
            seen[1] = False
        added = np.where(seen, seeded("added", rows).random((rows, columns)), -np.inf)
        made.append((*arrays, seen if is_bool else added))
    return made


def padded():
    """Return queries, keys and values with a mask of keys, [b, 1, 1, s]."""
    made = []
    for arrays in heads(least=3):
        b, s = arrays[0].shape[0], arrays[1].shape[-2]
        lengths = np.arange(2, 2 + b)[:, None, None, None]
        made.append((*arrays, np.arange(s) < np.minimum(lengths, s)))
    return made


def sdpa(name, sets, **kwargs):
    return Case(
        name,
        lambda *args: af.scaled_dot_product_attention(*args, **kwargs),
        lambda t, *args: t.nn.functional.scaled_dot_product_attention(*args, **kwargs),
        sets,
    )


def turned(t, x, first=0):
    """Return rotary positions of half-split columns, in torch."""
    n, d = x.shape[-2:]
    angle = (first + t.arange(n, dtype=x.dtype))[:, None] * 10000.0 ** (
        -2.0 * t.arange(d // 2, dtype=x.dtype) / d
    )
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return t.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def turned_in_pairs(t, x):
    d = x.shape[-1]
    order = [*range(0, d, 2), *range(1, d, 2)]
    back = [order.index(i) for i in range(d)]
    return turned(t, x[..., order])[..., back]


TURNED = [
    floats((*b, n, d), key=(b, n, d))
    for b in ((), (2,), (2, 3))
    for n in (1, 5, 9)
    for d in (2, 4, 10)
]

CASES = [
    sdpa("attention", heads(), scale=0.3),
    sdpa("attention of the first keys", heads(), is_causal=True),
    sdpa("attention of shared heads", heads(2), enable_gqa=True, is_causal=True),
    sdpa("attention of a bool mask", masked(is_bool=True)),
    sdpa("attention of a bool mask and shared heads", masked(True, shared=3), enable_gqa=True),
    sdpa("attention of an added mask that is trained", masked(is_bool=False)),
    sdpa("attention of keys that are padding", padded()),
    Case(
        "attention of an added mask",
        lambda q, k, v, m: af.scaled_dot_product_attention(q, k, v, m.detach()),
        lambda t, q, k, v, m: t.nn.functional.scaled_dot_product_attention(q, k, v, m.detach()),
        masked(is_bool=False),
    ),
    Case("rotary", af.rotary, turned, TURNED),
    Case(
        "rotary of later positions",
        lambda x: af.rotary(x, np.arange(x.shape[-2]) + 7),
        lambda t, x: turned(t, x, 7),
        TURNED,
    ),
    Case(
        "rotary of pairs",
        lambda x: af.rotary(x, np.arange(x.shape[-2]), interleaved=True),
        turned_in_pairs,
        TURNED,
    ),
]


def test_values_and_gradients_are_torchs(case, dtype, agrees):
    agrees(case, dtype)
