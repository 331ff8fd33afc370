"""Every op with operands, attributes and a formula: the one table that `test_table` runs.

A row says what an op computes, in numpy's float64 and in words of this file alone. All else is
asked of each row: types, the reference, the gradient (by differences of the formula), the kernels
of numpy and of C in float32 and bfloat16, over strided operands, in place. A new op is a new row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from attention_formulas import attention
from loss_formulas import bce_of_logits, losses, picked_losses, soft_losses, weighted_losses
from norm_formulas import batch_norm, batch_norm_grad, layer_norm, rms_norm, statistics
from random_formulas import dropout, dropout_of_part, random_numbers
from update_formulas import (
    RESCALE,
    adagrad,
    adam,
    adamw,
    amsgrad,
    damped,
    decayed,
    decayed_step,
    lamb_step,
    lion,
    muon_step,
    rescaled,
    rmsprop,
    with_momentum,
)
from window_formulas import (
    conv,
    conv_input_grad,
    conv_weight_grad,
    max_pool,
    max_pool_grad,
    max_pool_pick,
)


class Row(NamedTuple):
    """`formula` takes the inputs and returns an array, or one per output; None says nothing of it.

    Inputs of float64 become the type under test, all others stay. Flags: "moves" where no number is
    computed, so that results are equal to the bit in every type; "constant" where no gradient
    flows, though the formula has a slope; "rounds" where its steps are larger than differences;
    "fused" where the op becomes a fused kernel though it is not the first row of its op.
    """

    op: str
    inputs: tuple[np.ndarray, ...]
    attrs: dict[str, Any]
    formula: Callable[..., Any]
    flags: frozenset[str]

    def outputs(self, inputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray | None, ...]:
        """Return what the formula says of these inputs, one entry per output."""
        with np.errstate(all="ignore"):
            results = self.formula(*inputs)
        return results if isinstance(results, tuple) else (results,)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Return numbers around 0, the same for the same shape and seed."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def positive(*shape: int, seed: int = 0) -> np.ndarray:
    """Return numbers from 0.5 to 2."""
    return np.random.default_rng([seed, *shape]).uniform(0.5, 2.0, shape)


def distinct(*shape: int) -> np.ndarray:
    """Return numbers of which no two are near each other, in no order."""
    count = math.prod(shape)
    return np.array(np.random.default_rng(count).permutation(count).reshape(shape) / 4 - 2)


def counts(*shape: int, below: int = 9, dtype: str = "int64") -> np.ndarray:
    """Return integers from 0, of which some come twice."""
    return np.random.default_rng([1, *shape]).integers(0, below, shape).astype(dtype)


def ranges_of(x):
    zeros = np.zeros(x.shape[:-1])
    return x.min(-1), x.max(-1), zeros, zeros, np.linalg.norm(x, axis=-1)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x, scale, causal):
    z = x * scale
    if causal:
        rows, columns = x.shape[-2:]
        z = np.where(np.tri(rows, columns, columns - rows, dtype=bool), z, -np.inf)
    e = np.exp(z - z.max(-1, keepdims=True, initial=-np.inf))
    return e / e.sum(-1, keepdims=True)


def stretched(x, shape):
    return np.broadcast_to(x, shape)


def sliced(x, starts, stops, steps):
    return x[tuple(map(slice, starts, stops, steps))]


def padded(x, low, high, steps):
    spans = [(n - 1) * s + 1 if n else 0 for n, s in zip(x.shape, steps, strict=True)]
    shape = [a + n + b for a, n, b in zip(low, spans, high, strict=True)]
    out = np.zeros(shape, x.dtype)
    out[tuple(slice(a, a + n, s) for a, n, s in zip(low, spans, steps, strict=True))] = x
    return out


def scattered(dy, ids, rows):
    out = np.zeros((rows, dy.shape[-1]))
    np.add.at(out, ids.astype(int), dy)
    return out


def order(x, descending):
    ranks = np.unique(x, return_inverse=True)[1].reshape(x.shape)
    return np.argsort(-ranks if descending else ranks, -1, kind="stable")


def recurred(a, b, reverse):
    out, total = np.zeros(b.shape, b.dtype), 0
    for i in range(b.shape[-1])[:: -1 if reverse else 1]:
        total = a[..., i] * total + b[..., i]
        out[..., i] = total
    return out


def last_places(ids, rows):
    flat = [int(i) for i in ids.reshape(-1)]
    return np.array(
        [max([n for n, i in enumerate(flat) if i == r], default=-1) for r in range(rows)]
    )


def with_rows(x, ids, rows, depth):
    out = x.copy()
    for place, row in zip(ids.reshape(-1), rows.reshape(ids.size, *x.shape[depth:]), strict=True):
        out[np.unravel_index(int(place), x.shape[:depth])] = row
    return out


def accumulated(total, x, step, every):
    return np.where(step % every == 0, 0, total) + x


def handed_on(batch, variable, held, every):
    return variable if batch % every == 0 else held


def row(op, formula, *inputs, flags="", **attrs):
    """Return a row; the formula gets the attributes that are called like parameters of it."""
    code = getattr(formula, "__code__", None)
    names = getattr(formula, "names", code.co_varnames if code else ())
    keywords = {k: v for k, v in attrs.items() if k in names}
    return Row(op, inputs, attrs, lambda *a: formula(*a, **keywords), frozenset(flags.split()))


X, ROWS, CUBE = normal(2, 3, 5), normal(6, 5), normal(2, 3, 4)
LABELS, IDS = np.array([2, 0, 1, 2]), np.array([[1, 0, 1], [3, 1, 3]])
ONE = np.array(3, np.int64)
HUGE = np.array([[1e3, 0.0], [-1e3, -1e3]])
SOFT, CAUSAL = {"scale": 0.7, "causal": False}, {"scale": 0.7, "causal": True}
LR = np.array(0.1)
ADAM = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3}

UNARY = {
    "neg": np.negative, "abs": np.abs, "square": np.square, "exp": np.exp, "sin": np.sin,
    "cos": np.cos, "tanh": np.tanh, "sigmoid": sigmoid, "relu": lambda x: np.where(x > 0, x, 0),
    "gelu": gelu, "silu": lambda x: x * sigmoid(x),
}  # fmt: skip
OF_POSITIVE = {
    "log": np.log, "sqrt": np.sqrt, "rsqrt": lambda x: x**-0.5, "reciprocal": lambda x: 1 / x,
}  # fmt: skip
BINARY = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "maximum": np.maximum, "minimum": np.minimum,
}  # fmt: skip
COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
MOVES = "moves"
WAYS = {"strides": (2, 1), "low": (1, 0), "high": (1, 2), "dilation": (1, 2), "groups": 2}
LINE = {"strides": (1,), "low": (1,), "high": (1,), "dilation": (1,), "groups": 1}
POOL = {"kernel": (3, 2), "strides": (2, 2), "low": (1, 0), "high": (1, 1), "dilation": (1, 1)}
BEST = max_pool(distinct(2, 2, 5, 6), **POOL)[1]


def reductions():
    """Yield sums, means and maxima over axes that are rows, columns, all, some and none."""
    for shape, axes, keepdims in (
        ((6, 5), (1,), False), ((6, 5), (0,), False), ((2, 3, 4), (0, 2), False),
        ((2, 3, 4), (1,), True), ((2, 3, 4), (0, 1), True), ((3, 4), (0, 1), False),
        ((7,), (0,), False), ((2, 3), (), False), ((), (), True), ((2, 300), (1,), False),
        ((300, 2), (0,), True),
    ):  # fmt: skip
        for name in ("sum", "mean", "max"):
            reduce = getattr(np, name)
            x = distinct(*shape) if name == "max" else normal(*shape)
            yield row(
                name, lambda x, axes, keepdims, reduce=reduce: reduce(x, axes, keepdims=keepdims),
                x, axes=axes, keepdims=keepdims,
            )  # fmt: skip


def updates():
    """Yield the optimizers' writes: of several shapes, with and without decay."""
    for shape, decay in (((5, 7), 0.1), ((), 0.0), ((0, 2), 0.1), ((70, 150), 0.0)):
        p, g, m = (normal(*shape, seed=s) for s in range(3))
        v = positive(*shape)
        yield row("sgd_update", decayed, p, g, LR, weight_decay=decay)
        for nesterov in (False, True):
            yield row(
                "momentum_update", with_momentum, p, g, m, LR,
                momentum=0.9, nesterov=nesterov, weight_decay=decay,
            )  # fmt: skip
        yield row("adamw_update", adamw, p, g, m, v, LR, ONE, weight_decay=decay, **ADAM)
    for shape, decay in (((5, 7), 0.1), ((), 0.0)):
        yield from adaptive_updates(*[normal(*shape, seed=s) for s in range(3)], decay)


def adaptive_updates(p, g, m, decay):
    """Yield the updates that follow the size of gradients, of one shape."""
    wd, v = {"weight_decay": decay}, positive(*p.shape)
    yield row("adam_update", adam, p, g, m, v, LR, ONE, **wd, **ADAM)
    for decoupled in (False, True):
        most = positive(*p.shape, seed=1)
        yield row(
            "amsgrad_update", amsgrad, p, g, m, v, most, LR, ONE,
            decoupled=decoupled, **wd, **ADAM,
        )  # fmt: skip
    yield row(
        "adagrad_update", adagrad, p, g, v, LR, ONE, lr_decay=0.1, eps=1e-3, maximize=True, **wd
    )
    yield row("lion_update", lion, p, g, m, LR, beta1=0.9, beta2=0.7, **wd)
    yield row("damped_momentum_update", damped, p, g, m, LR, ONE, momentum=0.9, dampening=0.4, **wd)
    yield row("lamb_step", lamb_step, p, g, m, v, LR, ONE, **wd, **ADAM)
    yield row("decayed_step", decayed_step, p, g, LR, **wd)
    yield row("approach", lambda old, new, share: (1 - share) * old + share * new, p, g, LR)
    yield row("muon_step", muon_step, p, g, m, v, LR, momentum=0.9, scale=1.5, **wd)
    for centered in (False, True):
        for momentum in (0.0, 0.9):
            name = "centered_" * centered + "rmsprop" + "_momentum" * bool(momentum) + "_update"
            states = [v + 9.0, *[m] * centered, *[g] * bool(momentum)]
            formula = partial(
                rmsprop, eps=1e-3, alpha=0.8, momentum=momentum, centered=centered, **wd
            )
            attrs = {"alpha": 0.8, "eps": 1e-3, "momentum": momentum, **wd}
            yield Row(name, (p, g, *states, LR), attrs, formula, frozenset())


SHARES = np.array([[0.1, 0.4, 0.5], [0.7, 0.25, 0.9]])

ROWS_OF_OPS = (
    *[row(op, formula, X) for op, formula in UNARY.items()],
    *[row(op, formula, normal()) for op, formula in UNARY.items()],
    *[row(op, formula, positive(2, 3, 5)) for op, formula in OF_POSITIVE.items()],
    *[row(op, formula, normal(0, 4)) for op, formula in (UNARY | OF_POSITIVE).items()],
    *[row(op, UNARY[op], counts(3, 4) - 4) for op in ("neg", "abs", "square", "relu")],
    *[row(op, f, ROWS, positive(6, 5)) for op, f in BINARY.items()],
    *[row(op, f, normal(2, 1, 3), positive(4, 1)) for op, f in BINARY.items()],
    *[row(op, f, normal(), positive(2, 3)) for op, f in BINARY.items()],
    *[row(op, f, normal(0, 3), positive(3)) for op, f in BINARY.items()],
    *[row(op, f, counts(3, 4), counts(4)) for op, f in BINARY.items() if op != "div"],
    row("add", np.add, normal(2, 3, 4, 5), normal(2, 1, 4, 1)),
    row("add", np.add, normal(4, 0), normal(4, 0)),
    row("add", np.add, *[np.arange(250, 256, dtype=np.uint8)] * 2, flags="fused"),
    row("sub", np.subtract, normal(2, 3, 4, 5), normal(2, 1, 4, 5), flags="fused"),
    row("pow", np.power, positive(4, 5), normal(5)),
    *[row(op, getattr(np, op), counts(3, 4), counts(4)) for op in COMPARISONS],
    *[row(op, getattr(np, op), distinct(6, 5), distinct(6, 5)[:, :1]) for op in COMPARISONS],
    row("where", np.where, CUBE > 0, CUBE, normal(3, 1)),
    row("where", np.where, np.array([[True], [False]]), counts(2, 3), counts(3)),
    row("where", np.where, normal(2, 3, 4, 5) > 0, normal(2, 1, 4, 1), normal(3, 1, 5)),
    row("cast", lambda x: x.astype("f4"), X, dtype="float32", flags="rounds"),
    row("cast", lambda x: x.astype("f2"), X, dtype="float16", flags="rounds"),
    row("cast", lambda x: x.astype(bool), np.round(X), dtype="bool"),
    row("cast", lambda x: x.astype("f8"), X, dtype="float64"),
    row("cast", lambda x: x.astype("i4"), 9 * X, dtype="int32"),
    row("cast", lambda x: x.astype(bool), counts(3, 4, below=2), dtype="bool"),
    row("cast", lambda x: x.astype("f8"), X > 0, dtype="float64"),
    *reductions(),
    row("sum", lambda x: x.sum(1), counts(4, 5) - 4, axes=(1,), keepdims=False),
    row("sum", lambda x: x.sum(1), np.zeros((3, 0)), axes=(1,), keepdims=False),
    row("sum", lambda x: x.sum((0, 1)), np.ones((2, 0)), axes=(0, 1), keepdims=False),
    row("sum", lambda x: x.sum(0), np.ones((0, 4)), axes=(0,), keepdims=False),
    *[
        row("sum", lambda x, axes: x.sum(axes, x.dtype), x, axes=axes, keepdims=False)
        for x, axes in (
            (np.full((3, 4), 2**31 - 1, np.int32), (1,)),
            (np.arange(12, dtype=np.int8).reshape(3, 4), (0,)),
        )
    ],
    row("max", lambda x: x.max(0), counts(4, 5), axes=(0,), keepdims=False),
    row(
        "max", lambda x: x.max(1), np.arange(12, dtype=np.uint64).reshape(3, 4) << np.uint64(60),
        axes=(1,), keepdims=False, flags="fused",
    ),
    row("argmax", lambda x: x.argmax(1), distinct(4, 5), axis=1, keepdims=False),
    row("argmax", lambda x: x.argmax(1), np.array([[1, np.nan, 9, np.nan], [-np.inf] * 4]),
        axis=1, keepdims=False),
    row("argmax", lambda x: x.argmax(0)[None], counts(6, 5, below=3), axis=0, keepdims=True),
    row("argmax", lambda x: x.argmax(1), normal(3, 1, 4), axis=1, keepdims=False),
    row("reshape", lambda x: x.reshape(4, 1, 6), CUBE, shape=(4, 1, 6), flags=MOVES),
    row("reshape", lambda x: x.reshape(()), normal(1), shape=(), flags=MOVES),
    row("transpose", lambda x, perm: x.transpose(perm), CUBE, perm=(2, 0, 1), flags=MOVES),
    row("transpose", lambda x, perm: x.transpose(perm), counts(2, 9, 3, 24), perm=(3, 1, 2, 0)),
    row("broadcast_to", stretched, normal(3, 1), shape=(2, 3, 4), flags=MOVES),
    *[
        row("broadcast_to", stretched, normal(*shape), shape=wide, flags=MOVES)
        for shape, wide in (
            ((), (2, 3)), ((5,), (40, 5)), ((5, 1), (5, 40)), ((2, 1, 3), (2, 6, 3)),
            ((1, 4), (0, 4)),
        )
    ],
    row("slice", sliced, normal(4, 6), starts=(1, 0), stops=(4, 5), steps=(2, 3), flags=MOVES),
    row("slice", sliced, normal(4), starts=(2,), stops=(2,), steps=(1,), flags=MOVES),
    row("slice", sliced, CUBE, starts=(0, 1, 1), stops=(2, 3, 4), steps=(1, 2, 2), flags=MOVES),
    row("slice", sliced, normal(9, 31), starts=(1, 2), stops=(8, 30), steps=(1, 1), flags=MOVES),
    row("pad", padded, normal(3, 2), low=(1, 0), high=(0, 2), steps=(2, 1), flags=MOVES),
    row("pad", padded, normal(0, 2), low=(1, 0), high=(1, 0), steps=(1, 1), flags=MOVES),
    row("pad", padded, CUBE, low=(0, 1, 2), high=(3, 0, 1), steps=(1, 2, 3), flags=MOVES),
    row("pad", padded, normal(9, 31), low=(1, 2), high=(0, 5), steps=(1, 1), flags=MOVES),
    row(
        "concat", lambda *parts: np.concatenate(parts, 1),
        normal(2, 3), normal(2, 0), normal(2, 1), axis=1, flags=MOVES,
    ),
    *[
        row("concat", lambda *parts, axis: np.concatenate(parts, axis), *parts, axis=axis)
        for axis in (0, 1, 2)
        for parts in [np.split(counts(4, 6, 12), 2, axis)]
    ],
    *[row(op, lambda x: x, X, flags=MOVES) for op in ("copy", "to_sbp")],
    row("copy_to", lambda x: x, X, to=0, bucket=0, flags=MOVES),
    *[
        row("copy", lambda x: x, counts(*shape, dtype=t))
        for t in ("int8", "float16", "int64")
        for shape in ((), (0, 2), (70, 133), (3, 21, 40), (9, 2, 3, 24), (16, 8), (7, 1, 5))
    ],
    *[
        row("cast", lambda x, dtype: x.astype(dtype), counts(3, 50, dtype=a), dtype=b)
        for a in ("int64", "int32", "uint8", "bool")
        for b in ("float32", "float64", "int64", "int32", "uint8", "bool")
    ],
    row("stop_gradient", lambda x: x, X, flags=MOVES + " constant"),
    row("copy_to", lambda x, _: x, X, normal(2, 3, 5, seed=1), to=-1, bucket=0, flags=MOVES),
    *[row("matmul", np.matmul, normal(*a), normal(*b, seed=1)) for a, b in (
        ((2, 3), (3, 4)), ((2, 1, 2, 3), (4, 3, 2)), ((2, 4, 2, 3), (3, 2)), ((2, 3), (4, 3, 2)),
        ((0, 3), (3, 2)), ((2, 0), (0, 3)), ((33, 17), (17, 40)),
    )],
    row("conv", conv, normal(2, 4, 5, 6), normal(6, 2, 3, 2), **WAYS),
    row("conv", conv, normal(3, 2, 7), normal(4, 2, 3), **LINE),
    row("conv_input_grad", conv_input_grad, normal(2, 6, 3, 6), normal(6, 2, 3, 2),
        spatial=(5, 6), **WAYS),
    row("conv_weight_grad", conv_weight_grad, normal(2, 4, 5, 6), normal(2, 6, 3, 6),
        kernel=(3, 2), **WAYS),
    row("max_pool", max_pool, distinct(2, 2, 5, 6), **POOL),
    row("max_pool_grad", max_pool_grad, normal(*BEST.shape), BEST, spatial=(5, 6), **POOL),
    row("max_pool_pick", max_pool_pick, normal(2, 2, 5, 6), BEST, **POOL),
    *[row("softmax", softmax, normal(*shape), **SOFT) for shape in ((2, 3, 5), (6,), (40, 5))],
    row("softmax", softmax, normal(4, 1), flags="fused", **SOFT),
    row("softmax", softmax, HUGE, flags="fused", **SOFT),
    *[row("softmax", softmax, normal(*shape), **CAUSAL) for shape in ((2, 3, 4), (6, 6), (1, 1))],
    row("attention", attention, normal(2, 3, 2), normal(2, 4, 2), normal(2, 4, 3), **SOFT),
    row("attention", attention, normal(3, 2), normal(4, 2), normal(4, 3), **CAUSAL),
    row("attention", attention, *[normal(2, 2, 9, 8, seed=s) for s in range(3)], **CAUSAL),
    row("attention", attention, *[normal(2, 9, 8, seed=s) for s in range(3)], normal(1, 9, 9),
        np.array(5), np.array(3), p=0.3, key=4, **SOFT),
    *[row("attention", attention, *[normal(2, 9, 8, seed=s) for s in range(3)], *masks,
          np.array(5), np.array(3), np.array([403, 90]), p=0.3, key=4, numbered=True, **SOFT)
      for masks in ((), (normal(1, 9, 9),))],
    row("layer_norm", layer_norm, CUBE + 2, normal(4), positive(4), eps=1e-3),
    row("layer_norm", layer_norm, normal(4), normal(4), positive(4), eps=1e-3),
    row("layer_norm", layer_norm, normal(4, 1), normal(1), positive(1), eps=1e-3, flags="fused"),
    row("layer_norm", layer_norm, normal(40, 7), normal(7), positive(7), eps=1e-5),
    row("standardised", lambda x, eps: layer_norm(x, 1, 0, eps)[::3], CUBE + 2, eps=1e-3),
    row("rms_norm", rms_norm, CUBE + 2, normal(4), eps=1e-3),
    *[
        row("cross_entropy_rows", losses, normal(4, 3), y)
        for y in (LABELS, LABELS.astype("uint8"), LABELS.astype("int32"))
    ],
    *[
        row("cross_entropy_rows", losses, normal(n, 1), np.zeros(n, np.int64), flags="fused")
        for n in (6, 1)
    ],
    row("cross_entropy_rows", losses, HUGE, np.array([1, 0]), flags="fused"),
    *[
        row(
            "weighted_cross_entropy_rows",
            weighted_losses, normal(4, 3), LABELS, positive(3), smoothing=smoothing,
        )
        for smoothing in (0.0, 0.2)
    ],
    row("soft_cross_entropy_rows", soft_losses, normal(4, 3), positive(4, 3)),
    row("nll_rows", picked_losses, normal(4, 3), LABELS, positive(3)),
    row("bce_with_logits", bce_of_logits, normal(4, 3), positive(4, 3), positive(3)),
    row("bce", lambda x, y: -(y * np.log(x) + (1 - y) * np.log(1 - x)), SHARES, positive(2, 3)),
    row("weighted_mean", lambda x, w: x / w, normal(2, 3), positive(2, 3), count=4),
    row("weighted_mean", lambda x, w: x / 1.0, normal(3), np.zeros(3), count=4),
    row("embedding", lambda w, ids: w[ids], normal(4, 2), IDS, flags=MOVES),
    row("embedding", lambda w, ids: w[ids], normal(4, 2), IDS.astype("int32")[:, 0], flags=MOVES),
    *[row("embedding_grad", scattered, normal(*IDS.shape, n), IDS, rows=4) for n in (1, 2, 130)],
    row("embedding", lambda w, ids: w[ids], counts(4, 3, dtype="int16"), IDS, flags=MOVES),
    row("embedding", lambda w, ids: w[ids], counts(4, 1) > 3, IDS, flags=MOVES),
    *[
        row("random_bits", random_numbers, np.array(5), np.array(3), shape=shape, key=9)
        for shape in ((), (7,), (3, 5), (2, 0), (130, 70))
    ],
    *[
        row("argsort", order, x, descending=descending)
        for x in (distinct(3, 7), np.round(normal(2, 3, 70)), counts(5, 40), normal(2, 0))
        for descending in (False, True)
    ],
    *[
        row("recurrence", recurred, *operands, reverse=reverse)
        for operands in (
            (normal(3, 5), normal(3, 5, seed=1)),
            (normal(2, 70, seed=2) / 2, normal(2, 70)),
            (counts(4, 3, below=3), counts(4, 3)),
            (normal(2, 0), normal(2, 0)),
        )
        for reverse in (False, True)
    ],
    row(
        "flat_index", lambda flat, i, extent, **_: flat * extent + i % extent,
        counts(3, 2), counts(3, 2, below=4) - 2, extent=2, number=0, count=1, rows=18),
    *[row("last_place", last_places, ids, rows=9)
      for ids in (counts(40), counts(0), counts(3, 700, dtype="int8"), counts(2, 2)[0])],
    *[row(op, with_rows, normal(5, 3, 4), ids, normal(*ids.shape, *(5, 3, 4)[depth:], seed=1),
          depth=depth, flags=MOVES)
      for op in ("put_rows", "assign_rows")
      for depth, ids in ((1, counts(3, below=2)), (2, np.array([[5, 0], [1, 5]])),
                         (3, counts(70, below=24)), (2, counts(0)), (1, np.array(1, "int8")))],
    row("checked_index", lambda ids: ids[..., 0], counts(3, 4, 1), extent=9, flags=MOVES),
    *[row("embedding_grad", scattered, normal(n, 5), counts(n), rows=9) for n in (0, 60)],
    row(
        "embedding_sgd_update",
        lambda w, dy, ids, lr, weight_decay: w - lr * scattered(dy, ids, len(w)),
        normal(4, 2), normal(2, 3, 2), IDS, LR, weight_decay=0.0,
    ),
    *[
        row("accumulate", accumulated, total, x, np.array(n), every=every)
        for x in (X, normal(), normal(0, 2), normal(70, 150))
        # What a cut step left in the sum does no harm.
        for total, n, every in ((np.full(x.shape, np.nan), 0, 3), (np.flip(x), 4, 3), (x, 5, 1))
    ],
    *[row("dropout", dropout, normal(*shape), ONE, np.array(7), p=0.4, key=2) for shape in (
        (3, 4, 6), (), (0, 3), (1, 500), (1, 1),
    )],
    *[
        row("dropout", dropout, normal(7, 9), np.array(seed), np.array(step), p=0.3, key=key)
        for seed, step, key in ((-5, 0, 2**40), (2**62, 10**9, 0))
    ],
    *[
        row("dropout", dropout_of_part, x, ONE, np.array(7), np.array(first), p=0.4, key=2)
        for x, first in (
            (normal(3, 5), 12), (normal(4), 8), (normal(), 3), (normal(1, 1), 5),
            (normal(2, 3, 7), [[9, 0, 31], [64, 7, 1]]), (normal(1, 6), [41]),
        )
    ],
    row("non_finite", lambda x: np.array(int(not np.isfinite(x).all())), X),
    row("non_finite", lambda x, before: np.array(1), X, np.array(1)),
    row("non_finite", lambda x: np.array(1), np.array([0.0, -np.inf, 1.0])),
    *[row("carry", lambda old, new: new, X, x, flags=MOVES) for x in (X + 1, X)],
    row("carry_sum", lambda old, more: old + more, X, np.flip(X)),
    row("square_sum", lambda x: np.sum(x * x), X),
    *[row("value_range", ranges_of, normal(*shape)) for shape in ((2, 3, 4), (40, 7), (1, 300))],
    row("square_sum", lambda x: x * x, np.array(-3.0)),
    *[
        row(op, lambda old, new: new, *pair)
        for op in ("assign", "hold")
        for pair in ((X, np.flip(X)), (ONE, np.array(7)), (normal(0, 2), normal(0, 2)))
    ],
    *[
        row("handed_on", handed_on, np.array(batch), X, np.flip(X), every=3)
        for batch in (0, 3, 4)
    ],
    *[
        row(
            "batch_norm", batch_norm, CUBE, *statistics(CUBE, (1, wide, 1)),
            normal(1, wide, 1), normal(1, wide, 1, seed=1),
        )
        for wide in (3, 1)
    ],
    *[
        row(
            "batch_norm_grad", batch_norm_grad, CUBE, np.flip(CUBE),
            *[normal(1, wide, 1, seed=seed) for seed in range(4)],
        )
        for wide in (3, 1)
    ],
    row("increment", lambda x: x + 1, ONE),
    *[row("count", lambda x, by: x + by, ONE, np.array(by)) for by in (0, 7)],
    *[
        row("rescale", rescaled, np.array(8.0), np.array(good), np.array(broken), **RESCALE)
        for good, broken in ((0, 0), (1, 0), (2, 0), (2, 1), (0, 1))
    ],
    *updates(),
)  # fmt: skip
