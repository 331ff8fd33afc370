"""Loops and choices of a plan against torch's own loops: values and gradients."""

import numpy as np
from oracle import Case, floats

import actorflow as af

LENGTHS = (0, 1, 2, 5)


def sets(*shapes, first=0, low=-1.0, high=1.0):
    """Return 20 argument sets: shapes with "t" for the number of steps and "b" for rows."""
    return [
        floats(
            *[tuple([{"t": steps, "b": rows}.get(n, n) for n in shape]) for shape in shapes],
            low=low,
            high=high,
            key=(steps, rows, key),
        )
        for steps in LENGTHS[first:]
        for rows in (1, 3, 0)[: 3 if not first else 2]
        for key in range(2 if not first else 4)
    ]


def products(x):
    return af.scan(lambda c, row: (c * row, c * row), x[0] * 0.0 + 1.0, x)[1]


def loop(torch, step, carry, xs, reverse=False):
    """Return what a scan computes, by a loop; ys stand where xs do."""
    ys = [None] * len(xs)
    for t in range(len(xs))[:: -1 if reverse else 1]:
        carry, ys[t] = step(carry, xs[t])
    return carry, torch.stack(ys) if ys and ys[0] is not None else None


def rnn(x, h, w, u, **options):
    def cell(h, row):
        h = af.tanh(row @ w + h @ u)
        return h, h * 2.0

    return af.scan(cell, h, x, **options)


def torch_rnn(t, x, h, w, u, reverse=False):
    def cell(h, row):
        h = t.tanh(row @ w + h @ u)
        return h, h * 2.0

    last, ys = loop(t, cell, h, x, reverse)
    return last, x.new_zeros((0, *h.shape)) if ys is None else ys


RNN = sets(("t", "b", 3), ("b", 4), (3, 4), (4, 4))


def lstm(x, h, c, w, u):
    def cell(carry, row):
        h, c = carry["h"], carry["c"]
        i, f, g, o = af.chunk(row @ w + h @ u, 4, 1)
        c = af.sigmoid(f) * c + af.sigmoid(i) * af.tanh(g)
        h = af.sigmoid(o) * af.tanh(c)
        return {"h": h, "c": c}, h

    carry, hs = af.scan(cell, {"h": h, "c": c}, x)
    return carry["h"], carry["c"], hs


def torch_lstm(t, x, h, c, w, u):
    def cell(carry, row):
        h, c = carry
        i, f, g, o = t.chunk(row @ w + h @ u, 4, 1)
        c = t.sigmoid(f) * c + t.sigmoid(i) * t.tanh(g)
        h = t.sigmoid(o) * t.tanh(c)
        return (h, c), h

    (h, c), hs = loop(t, cell, (h, c), x)
    return h, c, x.new_zeros((0, *h.shape)) if hs is None else hs


def nested(x, w):
    """Return a scan in a scan: a power of w at each step, times the row."""

    def outer(total, row):
        inner, _ = af.scan(lambda v, _: (af.tanh(v * w), None), row, None, length=3)
        return total + inner, inner

    return af.scan(outer, x[0] * 0.0, x)


def torch_nested(t, x, w):
    def outer(total, row):
        inner = row
        for _ in range(3):
            inner = t.tanh(inner * w)
        return total + inner, inner

    return loop(t, outer, x[0] * 0.0, x)


def slope_of_slope(x, w):
    """Return a gradient that is differentiated again."""
    last, _ = af.scan(lambda v, row: (af.sin(v * w + row), None), x[0], x)
    (slope,) = af.grad(last.sum(), [w])
    return slope


def torch_slope_of_slope(t, x, w):
    v = x[0]
    for row in x:
        v = t.sin(v * w + row)
    return t.autograd.grad(v.sum(), w, create_graph=True)[0]


def swapped(x, a, b):
    """Return carries that change places, one that stays, and a result that is a carry."""
    (a, b, kept), ys = af.scan(lambda c, row: ((c[1], c[0] + row, c[2]), c[0]), (a, b, a), x)
    return a, b, kept, ys


def torch_swapped(t, x, a, b):
    kept = a
    (a, b), ys = loop(t, lambda c, row: ((c[1], c[0] + row), c[0]), (a, b), x)
    return a, b, kept, x.new_zeros((0, *a.shape)) if ys is None else ys


def chosen(x, w):
    """Return one of two functions of x and w, by the sum of x; x itself is read by one alone."""
    return af.cond(
        x.sum() > 0.0,
        lambda v: (af.tanh(v * w), (v * v).sum()),
        lambda v: (af.exp(w) * 3.0, x.sum() * 2.0),
        x,
    )


def torch_chosen(t, x, w):
    if x.sum() > 0.0:
        return t.tanh(x * w), (x * x).sum()
    return t.exp(w) * 3.0 + x * 0.0, x.sum() * 2.0


def chosen_within(x, w):
    """Return a scan whose steps choose."""

    def step(total, row):
        bigger = af.cond(row.sum() > total.sum(), lambda: row * w, lambda: af.sin(total))
        return total + bigger, bigger

    return af.scan(step, x[0], x)


def torch_chosen_within(t, x, w):
    def step(total, row):
        bigger = row * w if row.sum() > total.sum() else t.sin(total)
        return total + bigger, bigger

    return loop(t, step, x[0], x)


def scanned_within(x, w):
    """Return a scan or its reverse, by the sum of x."""

    def cumulated(**options):
        return af.scan(lambda c, row: (af.tanh(c * row), c + w), x[0], x, **options)

    return af.cond(x.sum() > 0.0, cumulated, lambda: cumulated(reverse=True))


def torch_scanned_within(t, x, w):
    return loop(t, lambda c, row: (t.tanh(c * row), c + w), x[0], x, not x.sum() > 0.0)


def chosen_twice(x, w):
    """Return one of three functions; what is not chosen would be NaN."""
    return af.cond(
        x.sum() > 0.0,
        lambda: af.log(x.sum()) * w,
        lambda: af.cond(
            w.sum() > 0.0, lambda: af.sqrt(w.sum()) * x, lambda: af.log(-w.sum()) + x * w
        ),
    )


def torch_chosen_twice(t, x, w):
    if x.sum() > 0.0:
        return t.log(x.sum()) * w
    if w.sum() > 0.0:
        return t.sqrt(w.sum()) * x
    return t.log(-w.sum()) + x * w


def halved(x, **options):
    """Return x halved until its largest element is below a tenth, and how often that was."""
    return af.while_loop(
        lambda v: af.amax(af.maximum(v[0], -v[0])) > 0.1,
        lambda v: (v[0] * 0.5, v[1] + 1),
        (x, np.int64(0)),
        **options,
    )


def torch_halved(t, x, most=100):
    count = 0
    while x.abs().amax() > 0.1 and count < most:
        x, count = x * 0.5, count + 1
    return x, t.tensor(count)


VECTORS = [floats((n,), key=i) for i in range(7) for n in (1, 2, 5)]
VECTORS_TWICE = [floats((n,), (n,), low=-1, high=1, key=i) for i in range(7) for n in (1, 2, 5)]

CASES = [
    Case(
        "cumulative product",
        products,
        lambda t, x: t.cumprod(x, 0),
        sets(("t", "b", 3), first=1),
    ),
    Case("rnn", rnn, torch_rnn, RNN),
    Case(
        "rnn in reverse",
        lambda *given: rnn(*given, reverse=True),
        lambda t, *given: torch_rnn(t, *given, reverse=True),
        RNN,
    ),
    Case("rnn recomputed", lambda *given: rnn(*given, recompute=True), torch_rnn, RNN),
    Case("lstm", lstm, torch_lstm, sets(("t", "b", 3), ("b", 2), ("b", 2), (3, 8), (2, 8))),
    Case("nested", nested, torch_nested, sets(("t", "b", 2), ("b", 2), first=1)),
    Case("slope of slope", slope_of_slope, torch_slope_of_slope, sets(("t", "b"), ("b",), first=1)),
    Case("swapped", swapped, torch_swapped, sets(("t", "b"), ("b",), ("b",))),
    Case(
        "map",
        lambda x, w: af.map(lambda row: af.exp(row) * w, x),
        lambda t, x, w: t.exp(x) * w,
        sets(("t", "b", 3), ("b", 1)),
    ),
    Case("cond", chosen, torch_chosen, VECTORS_TWICE),
    Case("cond in scan", chosen_within, torch_chosen_within, sets(("t", "b"), ("b",), first=1)),
    Case("scan in cond", scanned_within, torch_scanned_within, sets(("t", "b"), ("b",), first=1)),
    Case("cond in cond", chosen_twice, torch_chosen_twice, VECTORS_TWICE),
    Case("while_loop", halved, torch_halved, VECTORS, has_gradient=False, no_gpu="no max_steps"),
    Case("while_loop to the end", lambda x: halved(x, max_steps=9), torch_halved, VECTORS),
    Case(
        "while_loop cut short",
        lambda x: halved(x, max_steps=3),
        lambda t, x: torch_halved(t, x, most=3),
        VECTORS,
    ),
]

assert all([len(case.sets) >= 20 for case in CASES]), [len(case.sets) for case in CASES]


def test_values_and_gradients_are_torchs(case, dtype, agrees):
    agrees(case, dtype)
