"""Functions of the first hour: arithmetic, activations, reductions, products."""

import numpy as np
from oracle import PAIRS, Case, binary, floats, unary

import actorflow as af

AXES = [floats((3, 4, 5), key=i) for i in range(20)]

CASES = [
    Case("add", lambda a, b: a + b, lambda t, a, b: a + b, binary()),
    Case("sub", lambda a, b: a - b, lambda t, a, b: a - b, binary()),
    Case("mul", lambda a, b: a * b, lambda t, a, b: a * b, binary()),
    Case("div", lambda a, b: a / b, lambda t, a, b: a / b, binary(0.5, 3.0)),
    Case("pow", lambda a, b: a**b, lambda t, a, b: a**b, binary(0.5, 3.0)),
    Case("maximum", af.maximum, lambda t, a, b: t.maximum(a, b), binary()),
    Case("minimum", af.minimum, lambda t, a, b: t.minimum(a, b), binary()),
    Case(
        "where",
        lambda a, b: af.where(a > b, a, b * 2.0),
        lambda t, a, b: t.where(a > b, a, b * 2.0),
        binary(),
    ),
    *[
        Case(
            name,
            getattr(af, name),
            lambda t, x, name=name: getattr(t.nn.functional, name, getattr(t, name, None))(x),
            unary(),
        )
        for name in ("exp", "sin", "cos", "tanh", "sigmoid", "relu", "silu", "square")
    ],
    Case("log", af.log, lambda t, x: t.log(x), unary(0.1, 3.0)),
    Case("sqrt", af.sqrt, lambda t, x: t.sqrt(x), unary(0.1, 3.0)),
    Case("sum", af.sum, lambda t, x: t.sum(x), unary()),
    Case("sum over axes", lambda x: af.sum(x, (0, -1)), lambda t, x: t.sum(x, (0, -1)), AXES),
    Case(
        "mean keeping an axis",
        lambda x: x.mean(1, keepdim=True),
        lambda t, x: x.mean(1, keepdim=True),
        AXES,
    ),
    Case("amax", lambda x: x.amax(1), lambda t, x: x.amax(1), AXES),
    Case("max along an axis", lambda x: x.max(0), lambda t, x: x.max(0), AXES),
    Case("argmax", lambda x: x.argmax(2), lambda t, x: x.argmax(2), AXES),
    Case("softmax", lambda x: af.softmax(x, 1), lambda t, x: t.softmax(x, 1), AXES),
    Case(
        "matmul",
        lambda a, b: a @ b,
        lambda t, a, b: a @ b,
        [
            floats((m, k), (k, n), key=(m, k, n))
            for m in (1, 3, 16)
            for k in (1, 5)
            for n in (1, 7, 33, 0)
        ],
    ),
    Case(
        "layer_norm",
        lambda x, w, b: af.layer_norm(x, x.shape[-1:], w, b),
        lambda t, x, w, b: t.nn.functional.layer_norm(x, x.shape[-1:], w, b),
        [floats((rows, 2, n), (n,), (n,), key=(rows, n)) for rows in (1, 3) for n in range(5, 15)],
    ),
    Case(
        "cross_entropy",
        lambda x, y: af.cross_entropy(x, y),
        lambda t, x, y: t.nn.functional.cross_entropy(x, y),
        [
            (floats((rows, n), key=(rows, n))[0], np.arange(rows) % n)
            for rows in (1, 2, 5, 33)
            for n in (1, 2, 7, 40, 130)
        ],
    ),
]

assert len(PAIRS) >= 20


def test_values_and_gradients_are_torchs(case, dtype, agrees):
    agrees(case, dtype)
