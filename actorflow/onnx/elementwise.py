"""Operators of ONNX by elements, and those that make constants of types and shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

import actorflow.functional as af
from actorflow.onnx.program import DTYPES, Known, Operand, StepCall
from actorflow.tensor.tensor import Tensor, as_tensor

# ONNX's names of operands are capital letters; so are these.
# ruff: noqa: N803, SIM300


def _unary(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def operator(X: Tensor) -> Tensor:
        return function(X)

    return operator


def _binary(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def operator(A: Tensor, B: Tensor) -> Tensor:
        return function(A, B)

    return operator


def _folded(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def operator(*inputs: Tensor) -> Tensor:
        return functools.reduce(function, inputs)

    return operator


def _mean(*inputs: Tensor) -> Tensor:
    return functools.reduce(lambda a, b: a + b, inputs) / len(inputs)


def _div(A: Tensor, B: Tensor) -> Tensor:
    if A.dtype.is_float:
        return A / B
    # Toward zero, where floor_divide goes down.
    down = A // B
    if A.dtype.value.startswith("uint"):
        return down
    is_inexact = af.logical_and(down * B != A, af.logical_xor(A < 0, B < 0))
    return af.where(is_inexact, down + 1, down)


def _mod(A: Tensor, B: Tensor, *, fmod: int = 0) -> Tensor:
    return af.fmod(A, B) if fmod else af.remainder(A, B)


def _pow(X: Tensor, Y: Tensor) -> Tensor:
    """The result has the type of X."""
    if X.dtype.is_float:
        return af.pow(X, Y.to(X.dtype))
    if not Y.dtype.is_float:
        return af.pow(X, Y)
    return af.pow(X.to("float64"), Y.to("float64")).to(X.dtype)


def _clip(input: Tensor, min: Tensor | None = None, max: Tensor | None = None) -> Tensor:  # noqa: A002
    low = input if min is None else af.maximum(input, min.to(input.dtype))
    return low if max is None else af.minimum(low, max.to(input.dtype))


def _is_inf(X: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    up = (X == np.inf) if detect_positive else None
    down = (X == -np.inf) if detect_negative else None
    if up is None or down is None:
        return next((t for t in (up, down) if t is not None), af.logical_and(X == X, X != X))
    return af.logical_or(up, down)


def _of_alpha(function: Callable[..., Tensor], default: float = 1.0) -> Callable[..., Tensor]:
    def operator(X: Tensor, *, alpha: float = default) -> Tensor:
        return function(X, alpha)

    return operator


def _selu(
    X: Tensor, *, alpha: float = 1.6732632423543772, gamma: float = 1.0507009873554805
) -> Tensor:
    return af.elu(X, alpha) * gamma


def _gelu(X: Tensor, *, approximate: str = "none", step: StepCall) -> Tensor:
    if approximate not in ("none", "tanh"):
        step.refuse(f"knows approximate 'none' and 'tanh', got {approximate!r}")
    return af.gelu(X, approximate=approximate)


def _hard_sigmoid(X: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    return af.clamp(X * alpha + beta, 0.0, 1.0)


def _shrink(input: Tensor, *, bias: float = 0.0, lambd: float = 0.5) -> Tensor:  # noqa: A002
    inner = af.where(input > lambd, input - bias, 0.0)
    return af.where(input < -lambd, input + bias, inner)


def _swish(X: Tensor, *, alpha: float = 1.0) -> Tensor:
    return af.silu(X) if alpha == 1.0 else X * af.sigmoid(X * alpha)


def _swiglu(A: Tensor, B: Tensor, *, alpha: float = 1.0) -> Tensor:
    return _swish(A, alpha=alpha) * B


def _prelu(X: Tensor, slope: Tensor) -> Tensor:
    return af.where(X < 0, X * slope, X)


def _bit_shift(X: Tensor, Y: Tensor, *, direction: str, step: StepCall) -> Tensor:
    if direction not in ("LEFT", "RIGHT"):
        step.refuse(f"knows the directions LEFT and RIGHT, got {direction!r}")
    bits = 8 * X.dtype.itemsize
    near = af.minimum(Y, bits - 1)
    shifted = X << near if direction == "LEFT" else X >> near
    if direction == "RIGHT" and X.dtype.value.startswith("int"):
        return shifted  # the sign fills all
    return af.where(Y < bits, shifted, 0)


def _converted(x: Tensor, dtype: str | None, step: StepCall) -> Tensor:
    if dtype is None:
        step.refuse("converts to an element type that does not exist here")
    if dtype == "bfloat16":
        # Rounding to bfloat16 is no op: at the border of the model its caller rounds.
        if step.step.outputs[0] not in step.rounded:
            step.refuse("rounds to bfloat16 inside of a graph, which no op here does")
        return x.to("float32")
    # As numpy: from a float below zero to unsigned by way of a signed integer.
    return x.to("int64").to(dtype) if x.dtype.is_float and dtype[0] == "u" else x.to(dtype)


def _cast(
    input: Tensor,  # noqa: A002
    *,
    to: int,
    saturate: int = 1,  # of float8 alone
    round_mode: str = "up",  # of float8 alone
    step: StepCall,
) -> Tensor:
    return _converted(input, DTYPES.get(to), step)


def _cast_like(
    input: Tensor,  # noqa: A002
    target_type: Operand,
    *,
    saturate: int = 1,
    round_mode: str = "up",
    step: StepCall,
) -> Tensor:
    is_rounded = step.step.outputs[0] in step.rounded
    return _converted(input, "bfloat16" if is_rounded else str(target_type.dtype), step)


def _where(condition: Tensor, X: Tensor, Y: Tensor) -> Tensor:
    return af.where(condition, X, Y)


# Constants: known as soon as the type of an input is.


def _constant_value(
    *,
    value: Any = None,
    value_float: float | None = None,
    value_floats: Any = None,
    value_int: int | None = None,
    value_ints: Any = None,
    step: StepCall,
) -> np.ndarray[Any, Any]:
    if value is not None:
        return np.asarray(value)
    for given in (value_float, value_floats):
        if given is not None:
            return np.asarray(given, np.float32)
    for given in (value_int, value_ints):
        if given is not None:
            return np.asarray(given, np.int64)
    return step.refuse("has no value")


def _shape(data: Operand, *, start: int = 0, end: int | None = None) -> np.ndarray[Any, Any]:
    return np.asarray(tuple(data.shape)[slice(start, end)], np.int64)  # Python clamps as ONNX does


def _size(data: Operand) -> np.ndarray[Any, Any]:
    return np.asarray(np.prod(np.asarray(data.shape, object), initial=1), np.int64)


def _constant_of_shape(
    input: Known,  # noqa: A002
    *,
    value: Any = None,
) -> Tensor:
    fill = np.zeros((), np.float32) if value is None else np.asarray(value).reshape(())
    # A number that is broadcast: it takes no bytes here, whatever the shape is.
    return as_tensor(fill).broadcast_to(*[int(n) for n in input.reshape(-1)])


def _range(
    start: Known,
    limit: Known,
    delta: Known,
    *,
    stash_type: int = 1,  # float32, or what holds more
    step: StepCall,
) -> np.ndarray[Any, Any]:
    first, last, by = [x.reshape(()) for x in (start, limit, delta)]
    if not by:
        step.refuse("has a delta of 0")
    wide = float if first.dtype.kind == "f" else int
    span, pace = wide(last) - wide(first), wide(by)
    count = max(int(-(-span // pace)), 0)
    return (step.arange(count) * by + first).astype(first.dtype)


def _eye_like(
    input: Operand,  # noqa: A002
    *,
    dtype: int | None = None,
    k: int = 0,
    step: StepCall,
) -> Tensor:
    if len(input.shape) != 2:
        step.refuse(f"needs an input of two axes, got {list(input.shape)}")
    rows, columns = input.shape
    name = DTYPES.get(dtype) if dtype is not None else str(input.dtype)
    if name is None:
        step.refuse("makes an element type that does not exist here")
    # Compared in the plan: no table of them exists here, however large it is said to be.
    is_on = as_tensor(step.arange(columns)[None]) == step.arange(rows)[:, None] + k
    return _converted(is_on, name, step)


_OF_ONE_NAME = (
    "Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor HardSwish IsNaN Log Mish Neg"
    " Reciprocal Relu Round Sigmoid Sin Sinh Softplus Softsign Sqrt Tan Tanh"
)
_BINARY: dict[str, Callable[..., Tensor]] = {
    "Add": lambda a, b: a + b,
    "And": af.logical_and,
    "BitwiseAnd": af.bitwise_and,
    "BitwiseOr": af.bitwise_or,
    "BitwiseXor": af.bitwise_xor,
    "Equal": lambda a, b: a == b,
    "Greater": lambda a, b: a > b,
    "GreaterOrEqual": lambda a, b: a >= b,
    "Less": lambda a, b: a < b,
    "LessOrEqual": lambda a, b: a <= b,
    "Mul": lambda a, b: a * b,
    "Or": af.logical_or,
    "Sub": lambda a, b: a - b,
    "Xor": af.logical_xor,
}

ELEMENTWISE: dict[str, Callable[..., Any]] = {
    **{name: _unary(getattr(af, name.lower())) for name in _OF_ONE_NAME.split()},
    **{name: _binary(function) for name, function in _BINARY.items()},
    "BitwiseNot": _unary(af.bitwise_not),
    "Not": _unary(af.logical_not),
    "Sign": _unary(af.sign),
    "Max": _folded(af.maximum),
    "Min": _folded(af.minimum),
    "Sum": _folded(lambda a, b: a + b),
    "Mean": _mean,
    "BitShift": _bit_shift,
    "Cast": _cast,
    "CastLike": _cast_like,
    "Celu": _of_alpha(af.celu),
    "Clip": _clip,
    "Constant": _constant_value,
    "ConstantOfShape": _constant_of_shape,
    "Div": _div,
    "Elu": _of_alpha(af.elu),
    "EyeLike": _eye_like,
    "Gelu": _gelu,
    "HardSigmoid": _hard_sigmoid,
    "Identity": _unary(lambda x: x),
    "IsInf": _is_inf,
    "LeakyRelu": _of_alpha(af.leaky_relu, 0.01),
    "Mod": _mod,
    "PRelu": _prelu,
    "Pow": _pow,
    "Range": _range,
    "Selu": _selu,
    "Shape": _shape,
    "Shrink": _shrink,
    "Size": _size,
    "SwiGLU": _swiglu,
    "Swish": _swish,
    "ThresholdedRelu": _of_alpha(lambda x, alpha: af.threshold(x, alpha, 0.0)),
    "Where": _where,
}
