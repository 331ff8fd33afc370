"""Elements by tensors of integers: taken, put and added."""

import numpy as np
from oracle import Case, floats, seeded

import actorflow as af

SHAPES = ((5,), (1,), (3, 4), (4, 1), (1, 7), (2, 3, 4), (2, 1, 5), (3, 5, 2), (6, 20), (2, 3, 18))


def ids(shape, extent, *, key=0, low=None):
    """Return indices of which some repeat, some count from the end."""
    low = -extent if low is None else low
    return seeded("ids", shape, extent, key).integers(low, extent, shape)


def once(shape, extent, axis):
    """Return indices along an axis that differ from one another: torch's choice among equal ones
    is its own."""
    wide = (*shape[:axis], extent, *shape[axis + 1 :])
    order = np.argsort(seeded("once", wide).uniform(size=wide), axis)
    return np.take(order, np.arange(shape[axis]), axis)


def axes():
    for number, shape in enumerate(SHAPES):
        for axis in range(min(len(shape), 2)):
            yield number, shape, axis


def along(axis, shape, count):
    return (*shape[:axis], count, *shape[axis + 1 :])


GATHERED = [
    [
        (floats(s, key=(n, a, 1))[0], ids(along(a, s, count), s[a], low=0))
        for n, s, _ in axes()
        if len(s) > a
        for count in (3, 0, 1)
    ][:22]
    for a in (0, 1)
]
SELECTED = [
    [
        (floats(s, key=(n, a, 2))[0], ids((count,), s[a], low=0))
        for n, s, _ in axes()
        if len(s) > a
        for count in (4, 0, 13)
    ][:22]
    for a in (0, 1)
]
MATRICES = [(3, 4), (1, 5), (7, 1), (6, 20), (2, 33)]


def whole(shape, dtype, count):
    """Return integers of all sizes, and `count` + 1 rows of them more."""
    limits, rng = np.iinfo(dtype), seeded("whole", shape, dtype, count)
    shapes = shape, (1 + count, *shape[1:])
    return tuple([rng.integers(limits.min, limits.max, s, dtype, endpoint=True) for s in shapes])


def two_ids(*shapes, own=(3, 4, 5)):
    return [
        (floats(own, key=n)[0], *[ids(s, own[axis], key=n) for axis, s in enumerate(shapes)])
        for n in range(20)
    ]


def put_sets(axis):
    return [
        (
            *floats(s, along(axis, s, count), key=(n, axis, 5)),
            once(along(axis, s, count), s[axis], axis),
        )
        for n, s, _ in axes()
        if len(s) > axis
        for count in {0, 1, s[axis]}
    ]


def copied_sets(axis):
    return [
        (
            *floats(s, along(axis, s, count), key=(n, axis, 6)),
            once((count,), s[axis], 0),
        )
        for n, s, _ in axes()
        if len(s) > axis
        for count in {0, 1, s[axis]}
    ]


def filled(x):
    count = (x > 0).sum()
    return [
        x.masked_fill(x > 0.5, -2.0),
        x.masked_fill(x > 1, count),
        (x > 0).masked_fill(x < 0, count),
    ]


CASES = [
    *[
        Case(
            f"gather {a}",
            lambda x, i, a=a: af.gather(x, a, i),
            lambda t, x, i, a=a: t.gather(x, a, i),
            GATHERED[a],
        )
        for a in (0, 1)
    ],
    *[
        Case(
            f"index_select {a}",
            lambda x, i, a=a: x.index_select(a, i),
            lambda t, x, i, a=a: x.index_select(a, i),
            SELECTED[a],
        )
        for a in (0, 1)
    ],
    Case(
        "take",
        af.take,
        lambda t, x, i: t.take(x, i),
        [
            (floats(s, key=n)[0], ids((2, 3), int(np.prod(s)), key=n))
            for n, s in enumerate(SHAPES * 2)
        ],
    ),
    Case(
        "take_along_dim",
        lambda x, i: af.take_along_dim(x, i, 1),
        lambda t, x, i: t.take_along_dim(x, i, 1),
        [
            (floats(s, key=n)[0], ids((rows, 5), s[1], low=0))
            for n, s in enumerate(MATRICES * 2)
            for rows in (1, s[0])
        ],
    ),
    Case(
        "take_along_dim of flat",
        af.take_along_dim,
        lambda t, x, i: t.take_along_dim(x, i),
        [
            (floats(s, key=n)[0], ids((3, 5), int(np.prod(s)), low=0))
            for n, s in enumerate(MATRICES * 4)
        ],
    ),
    Case("x[i]", lambda x, i: x[i], lambda t, x, i: x[i], two_ids((2, 3))),
    Case("x[i] of rows", lambda x, i: x[i], lambda t, x, i: x[i], two_ids((7,), own=(9, 40))),
    Case(
        "x[:, i]",
        lambda x, i: x[:, i],
        lambda t, x, i: x[:, i],
        [(floats((3, 4, 5), key=n)[0], ids((n % 4,), 4)) for n in range(20)],
    ),
    Case(
        "x[..., i]",
        lambda x, i: x[..., i],
        lambda t, x, i: x[..., i],
        [(floats((3, 4, 50), key=n)[0], ids((1 + n, 2), 50)) for n in range(20)],
    ),
    Case("x[i, j]", lambda x, i, j: x[i, j], lambda t, x, i, j: x[i, j], two_ids((2, 1), (3,))),
    Case(
        "x[i, :, j]",
        lambda x, i, j: x[i, :, j],
        lambda t, x, i, j: x[i, :, j],
        two_ids((6,), (1,), own=(3, 3, 3)),
    ),
    Case(
        "x[1:, i, j]",
        lambda x, i, j: x[1:, i, j],
        lambda t, x, i, j: x[1:, i, j],
        two_ids((6,), (1,), own=(3, 3, 3)),
    ),
    Case(
        "x[None, ::2, 0, i]",
        lambda x, i: x[None, ::2, 0, i],
        lambda t, x, i: x[None, ::2, 0, i],
        two_ids((6,), own=(5, 5, 5)),
    ),
    Case(
        "x[i, ..., None]",
        lambda x, i: x[i, ..., None],
        lambda t, x, i: x[i, ..., None],
        two_ids((), own=(5, 5, 5)),
    ),
    Case(
        "x[constant]",
        lambda x: x[:, [0, -1, 2, 0]],
        lambda t, x: x[:, [0, -1, 2, 0]],
        [floats((2, 3, 1 + n), key=n) for n in range(20)],
    ),
    Case(
        "x[::-1]",
        lambda x: x[::-1, 1:, ::-2],
        lambda t, x: x[:, 1:].flip(0, 2)[..., ::2],
        [floats((1 + n % 3, 3, 2 * n + 1), key=n) for n in range(20)],
    ),
    Case(
        "scatter 1",
        lambda x, src, i: x.scatter(1, i, src),
        lambda t, x, src, i: x.scatter(1, i, src),
        put_sets(1),
    ),
    Case(
        "scatter a number",
        lambda x, _, i: x.scatter(0, i, 2.5),
        lambda t, x, _, i: x.scatter(0, i, 2.5),
        put_sets(0),
    ),
    Case(
        "scatter_add 1",
        lambda x, i: x.scatter_add(1, i, x * 2.0),
        lambda t, x, i: x.scatter_add(1, i, x * 2.0),
        [(floats(s, key=n)[0], ids(s, s[1], low=0, key=n)) for n, s in enumerate(MATRICES * 4)],
    ),
    *[
        Case(
            f"index_add of {dtype}",
            lambda x, y, i: x.index_add(0, i, y),
            lambda t, x, y, i: x.index_add(0, i, y),
            [(*whole(s, dtype, n), ids((1 + n,), s[0], low=0)) for n, s in enumerate(MATRICES * 4)],
        )
        for dtype in ("int64", "int8", "uint8", "int32")
    ],
    Case(
        "scatter_add of integers",
        lambda x, i: x.scatter_add(1, i, x),
        lambda t, x, i: x.scatter_add(1, i, x),
        [(whole(s, "int64", n)[0], ids(s, s[1], low=0, key=n)) for n, s in enumerate(MATRICES * 4)],
    ),
    *[
        Case(
            f"index_add {a}",
            lambda x, y, i, a=a: x.index_add(a, i, y, alpha=0.5),
            lambda t, x, y, i, a=a: x.index_add(a, i, y, alpha=0.5),
            [
                (*floats(s, along(a, s, 1 + n), key=n), ids((1 + n,), s[a], low=0))
                for n, s in enumerate(MATRICES * 4)
            ],
        )
        for a in (0, 1)
    ],
    Case(
        "index_copy 1",
        lambda x, y, i: x.index_copy(1, i, y),
        lambda t, x, y, i: x.index_copy(1, i, y),
        copied_sets(1),
    ),
    Case(
        "index_fill",
        lambda x, _, i: x.index_fill(1, i, -1.5),
        lambda t, x, _, i: x.index_fill(1, i, -1.5),
        copied_sets(1),
    ),
    Case(
        "put",
        lambda x, y, i: x.put(i, y),
        lambda t, x, y, i: x.put(i, y),
        [
            (*floats(s, (s[1],), key=n), once((s[1],), s[0] * s[1], 0))
            for n, s in enumerate(MATRICES * 4)
        ],
    ),
    Case(
        "index_put",
        lambda x, y, i, j: x.index_put((i, j), y),
        lambda t, x, y, i, j: x.index_put((i, j), y),
        [
            (*floats((4, 5, 3), (3,), key=n), once((4,), 4, 0), ids((4,), 5, key=n))
            for n in range(20)
        ],
    ),
    Case(
        "index_put and add",
        lambda x, y, i, j: x.index_put((i, j), y, accumulate=True),
        lambda t, x, y, i, j: x.index_put((i, j), y, accumulate=True),
        [
            (*floats((4, 5), (6,), key=n), ids((6,), 4, key=n), ids((6,), 5, key=n))
            for n in range(20)
        ],
    ),
    Case(
        "masked_fill",
        lambda x: filled(x),
        lambda t, x: filled(x),
        [floats(s, key=n) for n, s in enumerate(SHAPES * 2)],
    ),
]


def test_values_and_gradients_are_torchs(case, dtype, agrees):
    agrees(case, dtype)
