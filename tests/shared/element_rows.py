"""Rows of `op_table` for functions of each element: analysis, rounding, integers, activations."""

from __future__ import annotations

import math

import numpy as np
from op_table import ROWS, X, counts, normal, positive, row, softmax


def spread(dtype, count=9):
    """Return integers from the least to the greatest of a dtype, 0 and those next to it."""
    limits = np.iinfo(dtype)
    edges = [limits.min, limits.min + 1, -1, 0, 1, 2, 3, limits.max - 1, limits.max]
    return np.array([n % 2**limits.bits for n in edges[-count:]], np.uint64).astype(dtype)


def erf(x):
    return np.vectorize(math.erf, otypes=[float])(x)


def softplus(x, beta, threshold):
    return np.where(x * beta > threshold, x, np.log1p(np.exp(x * beta)) / beta)


def elu(x, alpha, scale, input_scale):
    return scale * np.where(x > 0, x, alpha * np.expm1(x * input_scale))


def hard_gate(x):
    return np.clip(x + 3, 0, 6) / 6


def log_softmax(x):
    return np.log(softmax(x, 1.0, False))


def floor_divide(a, b):
    return np.floor(a / b) if a.dtype.kind == "f" else a // np.where(b == 0, 1, b) * (b != 0)


def remainder(a, b):
    return np.mod(a, b) if a.dtype.kind == "f" else np.mod(a, np.where(b == 0, 1, b)) * (b != 0)


def fmod(a, b):
    return np.fmod(a, b) if a.dtype.kind == "f" else np.fmod(a, np.where(b == 0, 1, b)) * (b != 0)


UNARY = {
    "gelu_exact": lambda x: x * (1 + erf(x / 2**0.5)) / 2,
    "log_sigmoid": lambda x: -np.log1p(np.exp(-x)),
    "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
    "hardsigmoid": hard_gate, "hardswish": lambda x: x * hard_gate(x),
    "expm1": np.expm1, "exp2": np.exp2, "erf": erf, "erfc": lambda x: 1 - erf(x), "atan": np.arctan,
    "tan": np.tan, "sinh": np.sinh, "cosh": np.cosh, "asinh": np.arcsinh,
}  # fmt: skip
OF_POSITIVE = {"log1p": np.log1p, "log2": np.log2, "log10": np.log10}
OF_UNIT = {"asin": np.arcsin, "acos": np.arccos, "atanh": np.arctanh}
ROUNDINGS = {
    "sign": np.sign,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.round,
    "trunc": np.trunc,
}
OF_PAIRS = {"atan2": np.arctan2, "hypot": np.hypot, "logaddexp": np.logaddexp}
OF_INTEGERS = {
    "floor_divide": floor_divide,
    "remainder": remainder,
    "fmod": fmod,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
}
SHIFTS = {"shift_left": np.left_shift, "shift_right": np.right_shift}
INTEGERS = ("int8", "int64", "uint8", "uint64")  # fmt: skip

ROWS_OF_ELEMENTS = (
    *[row(op, formula, X) for op, formula in UNARY.items()],
    *[row(op, formula, positive(2, 3, 5)) for op, formula in OF_POSITIVE.items()],
    *[row(op, f, np.tanh(X)) for op, f in OF_UNIT.items()],
    row("acosh", np.arccosh, 1 + positive(2, 3, 5)),
    *[row(op, f, 9 * X, flags="constant") for op, f in ROUNDINGS.items()],
    *[row(op, f, counts(3, 4) - 4) for op, f in ROUNDINGS.items()],
    *[row(op, f, ROWS, positive(6, 5)) for op, f in OF_PAIRS.items()],
    *[row(op, f, normal(2, 1, 3), positive(4, 1)) for op, f in OF_PAIRS.items()],
    row("remainder", np.mod, 9 * ROWS, 0.75 + positive(5), flags="rounds"),
    row("fmod", np.fmod, 9 * ROWS, 0.75 + positive(5), flags="rounds"),
    row("floor_divide", floor_divide, 9 * ROWS, 0.75 + positive(5), flags="constant"),
    *[
        row(op, f, spread(dtype), spread(dtype, 7)[:, None])
        for op, f in OF_INTEGERS.items()
        for dtype in INTEGERS
    ],
    *[row(op, f, X > 0, normal(3, 5) > 0) for op, f in OF_INTEGERS.items() if op[0] == "b"],
    *[
        row(op, f, spread(dtype), np.array([[0], [1], [7], [8], [63], [64], [100]], dtype))
        for op, f in SHIFTS.items()
        for dtype in ("int8", "uint64")
    ],
    *[row("bitwise_not", np.invert, spread(dtype)) for dtype in INTEGERS],
    row("bitwise_not", np.invert, X > 0),
    row("clamp", np.clip, ROWS, normal(5) - 1, 0.5 + positive(6, 1)),
    row("clamp", np.clip, counts(6, 5), np.array(2), np.array(5)),
    row("lerp", lambda a, b, w: a + w * (b - a), ROWS, normal(6, 5, seed=1), normal(5)),
    row("elu", elu, X, alpha=1.5, scale=1.1, input_scale=0.7),
    row("softplus", softplus, X, beta=2.0, threshold=3.0),
    row("hardtanh", lambda x, low, high: np.clip(x, low, high), X, low=-0.7, high=0.9),
    row("leaky_relu", lambda x, negative_slope: np.where(x > 0, x, x * negative_slope), X,
        negative_slope=0.2),
    row("prelu", lambda x, w: np.where(x > 0, x, x * w), X, normal(3, 1)),
    row("softshrink", lambda x, lambd: np.sign(x) * np.maximum(abs(x) - lambd, 0), X, lambd=0.4),
    row("hardshrink", lambda x, lambd: np.where(abs(x) > lambd, x, 0), X, lambd=0.4),
    row("threshold", lambda x, threshold, value: np.where(x > threshold, x, value), X,
        threshold=0.1, value=-2.0),
    *[row("log_softmax", log_softmax, normal(*shape)) for shape in ((2, 3, 5), (6,), (4, 1))],
)  # fmt: skip
