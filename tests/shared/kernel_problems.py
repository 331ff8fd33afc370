"""Calls of ops that have kernels of their own, each with its formula in numpy's float64.

The table of ops has small operands, of which gradients are differences; these are as large and as
odd as it takes for blocks, chunks, tails and teams of threads. An op is a function of the type
under test and of the target, which may ask for more of what is special about it.
"""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np
from attention_formulas import attention, attention_grad
from kernel_calls import fused, strided
from kernel_targets import Problem
from op_table import (
    distinct,
    last_places,
    normal,
    order,
    padded,
    recurred,
    scattered,
    with_rows,
)
from window_formulas import (
    conv,
    conv_input_grad,
    conv_weight_grad,
    max_pool,
    max_pool_grad,
    max_pool_pick,
)

# -- reductions ----------------------------------------------------------------------------------

_AXES = [
    *[
        (shape, axes)
        for shape in ((3, 4, 5), (6,), ())
        for count in range(len(shape) + 1)
        for axes in itertools.combinations(range(len(shape)), count)
    ],
    ((3, 517), (0,)), ((3, 517), (1,)), ((300, 7), (0,)), ((40, 3, 7), (1,)), ((40, 3, 7), (0, 2)),
    ((2, 5, 1, 600), (0, 1)), ((2, 5, 3, 4), (1, 3)), ((2, 5, 3, 4), (0, 1, 2, 3)),
]  # fmt: skip
_EMPTY = [((0, 3), (0,)), ((3, 0), (0,)), ((3, 0), (1,))]


def _reduction(op, x, axes, keepdims):
    if x.dtype.kind == "f":
        function = getattr(np, op)
    else:  # wraps around
        function = {"sum": partial(np.add.reduce, dtype=x.dtype), "max": np.max}[op]
    call = partial(function, axis=axes, keepdims=keepdims)

    def size(x):
        terms = np.sum(np.abs(x), axis=axes, keepdims=keepdims)
        return terms / (x.size / max(terms.size, 1)) if op == "mean" else terms

    return Problem(op, {"axes": axes, "keepdims": keepdims}, (x,), call, size)


def reductions(op, dtype, target):
    """Sums, means or maxima over any axes; NaN and infinities among what a maximum is of."""
    if "float" not in dtype:
        limits = np.iinfo(dtype)
        rng = np.random.default_rng(4)
        for shape, axes in _AXES + (_EMPTY if op == "sum" else []):
            x = rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
            yield _reduction(op, x, axes, False)
        return
    for shape, axes in _AXES + (_EMPTY if op == "sum" else []):
        for keepdims in (False, True):
            yield _reduction(op, 9 * normal(*shape), axes, keepdims)
    if op == "max":
        for place, axes in itertools.product(((0, 0), (3, 20), (6, 39)), ((0,), (1,), (0, 1))):
            x = normal(7, 40)
            x[place] = np.nan
            yield _reduction(op, x, axes, False)
            yield _reduction(op, np.full((7, 40), -np.inf), axes, False)


LONG = [
    ((20_000,), (0,)), ((30_000, 3), (0,)), ((2, 9_000, 3), (1,)), ((200, 3, 50), (0, 2)),
    ((170, 100), (0, 1)), ((100, 90, 9), (0, 1)), ((3, 12_345), (1,)),
]  # fmt: skip
"""Few results of many elements, which a GPU makes in two stages."""


def long_reductions(op, dtype, target):
    """Of random terms of one sign, and of equal ones, whose errors add up."""
    shapes = [*LONG]
    if target != "cuda":
        counts = (10_000, 200_000, 1_000_000)[: 3 if target == "c" else 2]
        forms = [
            ((-1,), (0,)), ((-1, 1), (0,)), ((1, -1), (1,)), ((2, -1, 3), (1,)), ((-1, 3), (0,)),
            ((-1, 3, 10), (0, 2)), ((-1, 10, 3), (0, 1)), ((700, -1), (0, 1)),
        ]  # fmt: skip
        for (form, axes), count in itertools.product(forms, counts):
            size = count // -math.prod(form)
            shapes.append((tuple([size if n < 0 else n for n in form]), axes))
    for shape, axes in shapes:
        for x in (np.full(shape, 0.1), np.random.default_rng(3).random(shape) + 0.5):
            yield _reduction(op, x, axes, False)


# -- rows by ids ---------------------------------------------------------------------------------

IDS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def _ids(high, shape, dtype="int32", seed=1):
    return np.random.default_rng([seed, *shape]).integers(0, high, shape).astype(dtype)


def gathers(op, dtype, target):
    """Rows of a table, by ids of every type and shape."""
    for number, (columns, shape) in enumerate(
        itertools.product((0, 1, 5, 8, 16, 32, 300), ((), (40,), (30, 20), (0, 3), (3, 2, 5)))
    ):
        table, ids = normal(90, columns), _ids(90, shape, IDS[number % len(IDS)])
        if columns or target != "c":
            yield Problem(op, {}, (table, ids), lambda table, ids: table[ids.astype(int)])
    for label in IDS:
        rows = {"int8": 120, "uint8": 200, "int16": 32_000}.get(label, 40_000)
        ids = np.array([0, rows - 1, 3, 3], label)
        yield Problem(op, {}, (normal(rows, 1), ids), lambda table, ids: table[ids.astype(int)])


_MANY = [  # rows of a table, columns, shape of the ids
    *itertools.product((1, 3, 700), (1, 5, 33, 130, 301), ((), (60,), (5, 21), (0,))),
    *itertools.product((61,), (40,), ((63,), (64,), (65,), (320,), (1200,))),
]  # fmt: skip


def _some_ids(rows, shape, seed):
    """Ids of which some, half or all are one."""
    ids = _ids(rows, shape, seed=seed)
    rng = np.random.default_rng(seed)
    ids[rng.random(shape) < (0.0, 0.5, 1.0)[seed % 3]] = min(rows - 1, 17)
    return ids


def sums_of_rows(op, dtype, target):
    """The gradient of a table: sums of the rows of equal ids."""
    for number, (rows, columns, shape) in enumerate(_MANY):
        ids = _some_ids(rows, shape, number)
        formula = partial(scattered, rows=rows)
        size = _of_terms(rows, dtype)
        yield Problem(op, {"rows": rows}, (normal(*shape, columns), ids), formula, size)

    if target != "cuda" or dtype == "float32":
        many, ids = np.full((70_000, 2), 0.1), np.ones(70_000, np.int32)
        formula = partial(scattered, rows=2)
        yield Problem(op, {"rows": 2}, (many, ids), formula, _of_terms(2, dtype))


def _of_terms(rows, dtype):
    """Return what a sum may be off by in units of its own, with a little of its terms.

    All types are added up in double, whose roundings only double itself shows: n of 1e-16.
    """
    share = 1e-2 if dtype == "float64" else 1e-8
    return lambda dy, ids: abs(scattered(dy, ids, rows)) + share * scattered(abs(dy), ids, rows)


def updates_of_rows(op, dtype, target):
    """Plain descent on the rows that occur."""
    decay = {"weight_decay": 0.0}
    for number, (rows, columns, shape) in enumerate(_MANY):
        if 0 in shape and target == "cuda" and rows == 1:
            continue
        ids, lr = _some_ids(rows, shape, number), np.array(0.25)
        inputs = normal(rows, columns, seed=2), normal(*shape, columns), ids, lr

        def stepped(table, dy, ids, lr):
            return table - lr * scattered(dy, ids, len(table))

        def size(table, dy, ids, lr):
            return abs(table) + lr * scattered(abs(dy), ids, len(table))

        names = [dtype, dtype, "int32", dtype]
        launched = fused("embedding_sgd_update", decay, inputs, names)[:2]
        yield Problem(
            "embedding_sgd_update", decay, inputs, stepped, size, writes=((0, 0),),
            launched=launched,
        )  # fmt: skip


def puts_of_rows(op, dtype, target):
    """Rows at ids of every type and shape, some of them equal, over leading axes."""
    for number, (columns, shape) in enumerate(
        itertools.product((1, 5, 8, 16, 33, 300), ((), (40,), (30, 20), (0, 3), (3, 2, 5)))
    ):
        x, ids = normal(9, 10, columns), _ids(90, shape, IDS[number % len(IDS)])
        inputs = x, ids, normal(*shape, columns, seed=1)
        yield Problem(op, {"depth": 2}, inputs, partial(with_rows, depth=2))
        inputs = x, ids % ids.dtype.type(9), normal(*shape, 10, columns, seed=1)
        yield Problem(op, {"depth": 1}, inputs, partial(with_rows, depth=1))


def many_axes(op, dtype, target):
    """Tensors of more axes than a kernel walks where none of them joins another."""
    shape, ids = (2,) * 9, _ids(6, (2,) * 8)
    if op in ("sum", "mean", "max"):
        yield from [_reduction(op, normal(*shape, 2), axes, False) for axes in ((9,), (*range(9),))]
    elif op == "embedding_sgd_update":
        lr, decay = np.array(0.25), {"weight_decay": 0.0}
        inputs = normal(6, 3), normal(*ids.shape, 3), ids, lr
        launched = fused("embedding_sgd_update", decay, inputs, [dtype, dtype, "int32", dtype])[:2]
        yield Problem(
            "embedding_sgd_update", decay, inputs,
            lambda table, dy, ids, lr: table - lr * scattered(dy, ids, 6),
            lambda table, dy, ids, lr: abs(table) + lr * scattered(abs(dy), ids, 6),
            writes=((0, 0),), launched=launched,
        )  # fmt: skip
    else:
        attrs, inputs, formula = {
            "argsort": ({"descending": False}, (distinct(*shape),), order),
            "recurrence": ({"reverse": False}, (normal(*shape), normal(*shape, seed=1)), recurred),
            "embedding": ({}, (normal(6, 3), ids), lambda table, ids: table[ids]),
            "embedding_grad": ({"rows": 6}, (normal(*ids.shape, 3), ids), scattered),
            "last_place": ({"rows": 6}, (ids,), last_places),
            "put_rows": ({"depth": 9}, (normal(*shape), ids, normal(*ids.shape)), with_rows),
        }[op]
        yield Problem(op, attrs, inputs, partial(formula, **attrs))


# -- attention -----------------------------------------------------------------------------------

_HEADS = [
    # leading axes, queries, keys, width of keys, width of values
    ((2, 3), 7, 7, 4, 4), ((), 5, 9, 3, 2), ((4,), 1, 6, 2, 3), ((1, 2), 13, 13, 5, 1),
    ((3,), 1, 1, 1, 1), ((2,), 4, 11, 1, 5), ((0, 2), 3, 3, 2, 2), ((2,), 0, 3, 2, 2),
    ((2,), 40, 21, 4, 4), ((1,), 65, 21, 4, 4), ((2,), 33, 1, 4, 4), ((2,), 70, 75, 33, 40),
]  # fmt: skip
_OF_NOTHING = [((2,), 3, 3, 0, 2), ((2,), 3, 5, 2, 0)]
"""Widths that C leaves to numpy."""
_OF_CUDNN_HEADS = [
    ((2, 3), 17, 17, 8, 8), ((), 5, 9, 16, 8), ((4,), 1, 6, 8, 24), ((1, 2), 33, 40, 24, 16),
    ((2, 1, 3), 7, 7, 8, 8), ((1,), 70, 70, 64, 64),
]  # fmt: skip


def _more_heads(dtype, target):
    if target == "c":
        return [((2,), 30, 50, 16, 48), ((2, 2), 70, 70, 33, 64), ((2,), 300, 530, 24, 40)]
    return _OF_NOTHING + _OF_CUDNN_HEADS * (target == "cuda" and "16" in dtype)


MASKS = {
    "none": None,
    "whole": (1, 1, 1, 1),
    "of queries and keys": (0, 0, 1, 1),
    "of keys": (1, 0, 0, 1),
    "of queries": (0, 1, 1, 0),
}
"""Which axes of the scores a mask has."""

_LONG_ROWS = [((1,), 3, n, 2, 2) for n in (31, 33, 1024, 1025, 2100, 4100, 8192, 8193)]
"""A warp for each, a block of 64 to 256 threads, and rows that no block holds at once."""


def operands(case, seed=0):
    """Return q, k, v and dy."""
    batch, rows, columns, width, out = case
    ends = (rows, width), (columns, width), (columns, out), (rows, out)
    return [normal(*batch, *end, seed=seed + n) for n, end in enumerate(ends)]


def attended(op, case, attrs, more=()):
    """Return the problem of attention, or of its gradient."""
    q, k, v, dy = operands(case)
    forward, backward = (partial(f, **attrs) for f in (attention, attention_grad))
    if op == "attention":
        return Problem(op, attrs, (q, k, v, *more), forward)
    with np.errstate(all="ignore"):
        y, lse, tail = forward(q, k, v, *more)
    inputs = dy, q, k, v, y, np.maximum(lse, -3e38), tail, *more
    return Problem(op, attrs, inputs, backward, single=(5, 6))


def attentions(op, dtype, target):
    """Causal and not, in heads of every extent."""
    for case, causal in itertools.product((*_HEADS, *_more_heads(dtype, target)), (False, True)):
        yield attended(op, case, {"scale": 0.7, "causal": causal})
    for case in _LONG_ROWS if (target, dtype) == ("cuda", "float32") else ():
        yield attended(op, case, {"scale": 0.7, "causal": True})


def masked_attentions(op, dtype, target):
    """With masks that hide some keys or all, dropped by heads and by numbers of their own."""
    rows = 21 if target == "c" else 9
    for (name, axes), dropped in itertools.product(MASKS.items(), ("", "dropped", "numbered")):
        for case in [((2, 3), rows, 40, 8, 16)] + [((2, 3), 40, 21, 8, 8)] * (name == "none"):
            attrs, more = {"scale": 0.4, "causal": name == "none"}, ()
            if axes:
                shape = tuple(np.where(axes, (2, 3, rows, 40), 1).tolist())
                rng = np.random.default_rng(3)
                mask = np.where(rng.random(shape) < 0.3, -np.inf, rng.standard_normal(shape))
                if shape[-2] > 1:
                    mask[..., 1, :] = -np.inf
                more = (mask,)
            if dropped:
                more, attrs = (*more, np.array(7), np.array(9)), {**attrs, "p": 0.3, "key": 2}
            if dropped == "numbered":
                more = (*more, np.array([[5, 720, 77], [4000, 0, 13]]))
                attrs = {**attrs, "numbered": True}
            yield attended(op, case, attrs, more)


# -- products ------------------------------------------------------------------------------------


def _window(rows, columns, *, width=None, seed=0):
    """Some columns of a wider matrix."""
    return normal(rows, width or columns + 3, seed=seed)[:, 1 : columns + 1]


def heads(b, t, h, d, place=0):
    """One of the parts of a packed tensor [b, t, 3, h, d], by heads: [b, h, t, d]."""
    return normal(b, t, 3, h, d)[:, :, place].transpose(0, 2, 1, 3)


def _repeated(array, *shape):
    return np.broadcast_to(array, shape)


def _b(*shape):
    return normal(*shape, seed=1)


LAYOUTS = {
    "dense": (normal(5, 7), _b(7, 3)),
    "one number": (normal(1, 1), _b(1, 1)),
    "a row": (normal(1, 9), _b(9, 6)),
    "a column": (normal(6, 9), _b(9, 1)),
    "an outer product": (normal(6, 1), _b(1, 5)),
    "nothing inside": (normal(5, 0), _b(0, 3)),
    "no rows": (normal(0, 5), _b(5, 3)),
    "a across": (normal(7, 5).T, _b(7, 3)),
    "b across": (normal(5, 7), _b(3, 7).T),
    "both across": (normal(7, 5).T, _b(3, 7).T),
    "squares across": (normal(6, 6).T, _b(6, 6).T),
    "windows": (_window(5, 7), _window(7, 3, seed=1)),
    "windows across": (_window(7, 5).T, _window(3, 7, seed=1).T),
    "a batch": (normal(4, 5, 7), _b(4, 7, 3)),
    "a long batch": (normal(7, 2, 3), _b(7, 3, 2)),
    "one b": (normal(4, 2, 5, 7), _b(7, 3)),
    "one a": (normal(5, 7), _b(4, 7, 3)),
    "a batch of each": (normal(4, 1, 5, 7), _b(3, 7, 2)),
    "ones in a batch": (normal(1, 4, 5, 7), _b(2, 1, 7, 3)),
    "heads": (heads(2, 5, 3, 4), heads(2, 5, 3, 4, 1).swapaxes(-1, -2)),
    "more heads": (heads(2, 20, 4, 8), heads(2, 20, 4, 8, 1).swapaxes(-1, -2)),
    "turned batches": (
        normal(6, 5, 4, 3, 7).transpose(0, 2, 1, 3, 4), _b(4, 5, 6, 7, 2).transpose(2, 0, 1, 3, 4)
    ),
    "rows of a batch": (normal(4, 6, 7)[:, 1:4], _b(7, 3)),
    "every second column": (normal(5, 14)[:, ::2], _b(7, 3)),
    "every second of both": (normal(5, 14)[:, ::2], _b(14, 6)[::2, ::2]),
    "a repeated row": (_repeated(normal(1, 7), 5, 7), _b(7, 3)),
    "a repeated matrix": (_repeated(normal(1, 5, 7), 4, 5, 7), _b(4, 7, 3)),
    "repeats of every second": (_repeated(normal(5, 14)[None, :, ::2], 4, 5, 7), _b(4, 7, 3)),
    "repeats of both": (_repeated(normal(1, 1, 7), 4, 1, 7), _repeated(_b(1, 7, 3), 4, 7, 3)),
    "a number everywhere": (_repeated(normal(1, 1), 5, 7), _b(7, 3)),
    "its own transpose": (normal(7, 5), normal(7, 5).T),
}  # fmt: skip


def scattered_in(rng, shape):
    """Numbers whose axes lie in some order, apart, in a larger array; some repeat."""
    order, apart = rng.permutation(len(shape)), rng.choice([1, 1, 1, 2, 3], len(shape))
    extents = [shape[axis] * apart[axis] + rng.choice([0, 0, 2]) for axis in order]
    whole = rng.normal(0, 1, extents).transpose(np.argsort(order))
    array = whole[tuple([slice(0, n * s, s) for n, s in zip(shape, apart, strict=True)])]
    kept = rng.random(len(shape)) > 0.12
    strides = [s if k else 0 for s, k in zip(array.strides, kept, strict=True)]
    return np.lib.stride_tricks.as_strided(array, shape, strides)


def _stretched(rng, batch):
    """Leading axes of an operand that numpy's rule stretches to a batch."""
    own = tuple([n if rng.random() < 0.7 else 1 for n in batch])
    return own[rng.integers(0, len(own) + 1) :] if rng.random() < 0.3 else own


def _product(a, b, **attrs):
    return Problem("matmul", attrs, (a, b), np.matmul, lambda a, b: np.abs(a) @ np.abs(b))


_CUT = [
    ((), 1, 1, 1), ((), 1, 70, 33), ((), 70, 1, 33), ((), 5, 3, 1), ((), 3, 17, 129),
    ((), 64, 64, 64), ((), 33, 65, 31), ((), 130, 257, 96), ((), 600, 77, 64), ((3,), 17, 16, 8),
    ((2, 2), 9, 40, 21),
]  # fmt: skip
"""Leading axes of a, then rows, columns and inner extent: with many chunks of C."""


def products(op, dtype, target):
    """Products in every layout, and of what lies in any way."""
    yield from itertools.starmap(_product, LAYOUTS.values())
    yield from [_product(*LAYOUTS["dense"])] * 4  # to outputs of four layouts
    for seed in range(300 if (target, dtype) == ("cuda", "float32") else 20):
        rng = np.random.default_rng(seed)
        (m, n, k), batch = rng.integers(1, 7, 3), rng.integers(1, 5, rng.integers(0, 4))
        a = scattered_in(rng, (*_stretched(rng, batch), m, k))
        yield _product(a, scattered_in(rng, (*_stretched(rng, batch), k, n)))


def cut_products(op, dtype, target):
    """Products of many chunks, whose factors lie dense, across and in windows."""
    kinds = ("dense", "dense"), ("dense", "transposed"), ("transposed", "windowed"), (
        "windowed", "transposed"
    )  # fmt: skip
    for (batch, m, n, k), (first, second) in itertools.product(_CUT, kinds):
        a, b = normal(*batch, m, k), normal(k, n, seed=1)
        yield _product(
            strided(None, a.shape, "f8", first, a), strided(None, b.shape, "f8", second, b)
        )


def wide_products(op, dtype, target):
    """Products of bfloat16 whose sums stay float32."""
    for problem in (*products(op, dtype, target), *cut_products(op, dtype, target)):
        yield problem._replace(attrs={"out_dtype": "float32"})


# -- convolution and pooling ---------------------------------------------------------------------

_KINDS = ("dense", "dense", "transposed", "sliced", "windowed", "permuted", "last")
_FORMULAS = {
    "conv": conv,
    "conv_input_grad": conv_input_grad,
    "conv_weight_grad": conv_weight_grad,
    "max_pool": max_pool,
    "max_pool_grad": max_pool_grad,
    "max_pool_pick": max_pool_pick,
}


def _random_windows(seed, count):
    """Yield attributes, x, weight and y of random convolutions; padding may cut off."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        rank, groups = rng.integers(1, 4), int(rng.choice([1, 1, 2, 3]))
        kernel, dilation = rng.integers(1, 4, rank), rng.integers(1, 4, rank)
        strides, low, high = rng.integers(1, 5, rank), *rng.integers(-1, 4, (2, rank))
        span = (kernel - 1) * dilation + 1
        spatial = np.maximum(1, span - low - high) + rng.integers(0, 5, rank)
        counts = (spatial + low + high - span) // strides + 1
        batch, channels, results = rng.integers(0, 4), rng.integers(1, 3), rng.choice([1, 2, 4])

        def made(*shape, rng=rng):
            return strided(rng, tuple(map(int, shape)), "f8", str(rng.choice(_KINDS)))

        names = ("kernel", "strides", "low", "high", "dilation", "spatial")
        values = (kernel, strides, low, high, dilation, spatial)
        attrs = {n: tuple(map(int, v)) for n, v in zip(names, values, strict=True)}
        x = made(batch, channels * groups, *spatial)
        weight = made(results * groups, channels, *kernel)
        yield attrs | {"groups": groups}, x, weight, made(batch, results * groups, *counts)


def _convolved(op, attrs, x, weight, y):
    ways = {name: attrs[name] for name in ("strides", "low", "high", "dilation", "groups")}
    more, inputs = {
        "conv": ({}, (x, weight)),
        "conv_input_grad": ({"spatial": attrs["spatial"]}, (y, weight)),
        "conv_weight_grad": ({"kernel": attrs["kernel"]}, (x, y)),
    }[op]
    formula = partial(_FORMULAS[op], **ways, **more)
    return Problem(op, ways | more, inputs, formula)


_IMAGES = [
    # images, channels, results, extent, stride, taps: what oneDNN takes, and cuts
    (1, 64, 96, 5, 1, 3), (3, 40, 128, 4, 2, 3), (9, 3, 32, 12, 1, 3), (5, 128, 64, 3, 1, 3),
    (2, 300, 256, 5, 1, 1), (3, 64, 260, 4, 2, 1), (2, 64, 256, 5, 2, 1), (1, 96, 256, 1, 1, 1),
]  # fmt: skip
_OF_CUDNN = [
    # x, weight, strides, dilation, padding
    ((2, 8, 7, 6), (4, 8, 3, 3), (1, 1), (1, 1), (1, 1)),
    ((2, 6, 9, 8), (4, 3, 3, 2), (2, 1), (1, 2), (0, 1)),
    ((3, 3, 11), (5, 3, 4), (3,), (2,), (2,)),
    ((1, 2, 4, 5, 4), (3, 2, 2, 3, 1), (1, 2, 1), (1, 1, 1), (1, 1, 0)),
    ((2, 4, 5, 5), (6, 4, 1, 1), (1, 1), (1, 1), (0, 0)),
]


def _images(target):
    """Yield attributes, x, weight and y of convolutions that a library takes."""
    if target == "cuda":
        cases = _OF_CUDNN
    else:
        cases = [
            ((n, c, e, e), (r, c, t, t), (s,) * 2, (1,) * 2, (t // 2,) * 2)
            for n, c, r, e, s, t in _IMAGES
        ]
    for (shape, taps, strides, dilation, low), kind in itertools.product(cases, ("dense", "last")):
        ends = zip(shape[2:], taps[2:], strides, dilation, low, strict=True)
        counts = [(n + 2 * p - (k - 1) * d - 1) // s + 1 for n, k, s, d, p in ends]
        attrs = {"strides": strides, "dilation": dilation, "low": low, "high": low}
        attrs |= {"groups": shape[1] // taps[1], "spatial": shape[2:], "kernel": taps[2:]}
        x, y = [
            strided(None, s, "f8", kind, normal(*s)) for s in (shape, (shape[0], taps[0], *counts))
        ]
        yield attrs, x, normal(*taps, seed=1), y


def convolutions(op, dtype, target):
    """Random windows, and images that a library takes."""
    count = {"numpy": 25, "c": 60, "cuda": 8}[target]
    for attrs, x, weight, y in _random_windows(len(dtype), count):
        if target == "c":  # three times the images, and a dense weight
            x, y, weight = *[np.concatenate([a] * 3) for a in (x, y)], np.array(weight, order="C")
        yield _convolved(op, attrs, x, weight, y)
    if target != "numpy":
        yield from [_convolved(op, *image) for image in _images(target)]
    if op == "conv_input_grad":  # windows reach far beyond y
        for groups in (1, 2):
            attrs = {"strides": (1, 2), "low": (0, 0), "high": (0, 1), "dilation": (1, 1)}
            attrs |= {"groups": groups, "spatial": (7, 11), "kernel": (5, 4)}
            y = strided(None, (9, 16, 3, 5), "f8", "last", normal(9, 16, 3, 5))
            yield _convolved(op, attrs, y, normal(16, 6 // groups, 5, 4), y)


def pools(op, dtype, target):
    """Random windows of rounded numbers, so that some are equal, with NaN; tiles; long rows."""
    count = 8 if target == "cuda" else 20
    for channels in (1, 6) if target == "cuda" else (1, 3, 6, 17, 70):
        for number, (attrs, x, _, _) in enumerate(_random_windows(3 + channels, count)):
            if number % 2:
                attrs |= {"strides": attrs["kernel"], "dilation": (1,) * len(attrs["kernel"])}
                attrs |= dict.fromkeys(("low", "high"), (0,) * len(attrs["kernel"]))
                attrs["spatial"] = tuple([3 * k for k in attrs["kernel"]])
            shape = (len(x), channels, *attrs["spatial"])
            yield _pooled(op, attrs, np.round(2 * normal(*shape)), str(_KINDS[number % 7]))
    rng = np.random.default_rng(0)
    x = rng.choice([-np.inf, np.nan, 1.0, -0.0], (2, 3, 5, 70 if target == "cuda" else 700))
    ways = {"strides": (2, 1), "low": (1, 2), "high": (4, 3), "dilation": (1, 2), "kernel": (3, 3)}
    yield _pooled(op, ways | {"spatial": x.shape[2:]}, x, "dense")


def _pooled(op, attrs, x, kind):
    pool = {n: attrs[n] for n in ("strides", "low", "high", "dilation", "kernel")}
    if x.size and op == "max_pool":
        x.flat[0] = np.nan
    taps = max_pool(x, **pool)[1]
    x, y = [strided(None, a.shape, "f8", kind, a) for a in (x, normal(*taps.shape))]
    more = {"spatial": attrs["spatial"]} if op == "max_pool_grad" else {}
    inputs = {"max_pool": (x,), "max_pool_grad": (y, taps), "max_pool_pick": (x, taps)}[op]
    return Problem(op, pool | more, inputs, partial(_FORMULAS[op], **pool, **more))


# -- movement ------------------------------------------------------------------------------------

_SHAPES = ((), (1,), (0, 3), (6,), (3, 5), (40, 33), (2, 64, 16), (2, 3, 4, 5), (17, 1, 20))
_MOVES = [
    ("reshape", {"shape": (10, 6)}, [(4, 3, 5)]),
    ("reshape", {"shape": ()}, [(1, 1)]),
    ("pad", {"low": (1, 0), "high": (2, 3), "steps": (1, 1)}, [(3, 4)]),
    ("pad", {"low": (0, 2), "high": (0, 0), "steps": (2, 3)}, [(3, 4)]),
    ("pad", {"low": (0,), "high": (4,), "steps": (1,)}, [(0,)]),
    ("concat", {"axis": 1}, [(3, 4, 2), (3, 0, 2), (3, 5, 2)]),
    ("concat", {"axis": 0}, [(20, 8), (1, 8)]),
    ("concat", {"axis": 2}, [(2, 3, 1), (2, 3, 4)]),
]


def moves(op, dtype, target):
    """Copies of elements of every width, from layout to layout."""
    formula = {
        "copy": lambda x: x,
        "reshape": lambda x, shape: x.reshape(shape),
        "pad": padded,
        "concat": lambda *parts, axis: np.concatenate(parts, axis),
    }[op]
    calls = [(op, {}, [shape]) for shape in _SHAPES] if op == "copy" else _MOVES
    for name, attrs, shapes in [call for call in calls for _ in range(3)]:  # to three layouts
        if name == op:
            rng = np.random.default_rng(len(shapes))
            values = [rng.integers(0, 100, shape) for shape in shapes]
            if "float" in dtype:
                inputs = [x.astype("f8") for x in values]
            else:
                inputs = [(x % 2 if dtype == "bool" else x).astype(dtype) for x in values]
            yield Problem(op, attrs, tuple(inputs), partial(formula, **attrs), "each")
