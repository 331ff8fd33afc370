"""Ops of one input that act on each element alone; their gradients are in `core_gradients`."""

from __future__ import annotations

import numpy as np

from compiler.attrs import Attrs
from compiler.bfloat16 import rounded
from compiler.graph import GraphBuilder, Node
from compiler.ops.rule import Values, pointwise
from compiler.ops.signature import SIGNED, Array, Types, expect_float, expect_inputs
from compiler.ops.sources import declared_dtype
from compiler.registry import OpTypeError, define, infer_type, is_exact, reference
from compiler.rules import simplify
from compiler.types import DType, TensorType, ValueId

NEG = define("neg")
"""x -> -x. Floats and signed integers."""

ABS = define("abs")
"""x -> |x|. Floats and signed integers; the gradient at 0 is 0."""

SQUARE = define("square")
"""x -> x * x. Floats and signed integers."""

EXP = define("exp")
"""x -> e^x. Floats."""

LOG = define("log")
"""x -> natural logarithm. Floats; -inf at 0, NaN below."""

SQRT = define("sqrt")
"""x -> square root. Floats; NaN below 0."""

RSQRT = define("rsqrt")
"""x -> 1 / sqrt(x). Floats."""

RECIPROCAL = define("reciprocal")
"""x -> 1 / x. Floats."""

SIN = define("sin")
"""x -> sine. Floats, radians."""

COS = define("cos")
"""x -> cosine. Floats, radians."""

CAST = define("cast")
"""x -> x in another dtype, as numpy's astype. Attrs: dtype.

To bfloat16 by way of float32, to the nearest, ties to even; a NaN stays one.
"""

_SIGNED_TOO = (NEG, ABS, SQUARE)
_FLOAT_ONLY = (EXP, LOG, SQRT, RSQRT, RECIPROCAL, SIN, COS)


def cast_to(b: GraphBuilder, value: ValueId, dtype: DType) -> ValueId:
    """Emit a cast, or nothing when `value` has the dtype already."""
    return value if b.type_of(value).dtype is dtype else b.one(CAST, value, dtype=dtype.value)


def expect_float_or_signed(type_: TensorType) -> None:
    """Check that an input has a sign. Raises OpTypeError."""
    if not type_.dtype.is_float and type_.dtype not in SIGNED:
        raise OpTypeError(
            f"needs floats or signed integers, got {type_.dtype}; cast it with .to('int64')"
        )


@infer_type.of(*_SIGNED_TOO)
def _signed_type(inputs: Types, attrs: Attrs) -> Types:
    expect_inputs(inputs, "x")
    expect_float_or_signed(inputs[0])
    return inputs


@infer_type.of(*_FLOAT_ONLY)
def _float_type(inputs: Types, attrs: Attrs) -> Types:
    expect_inputs(inputs, "x")
    expect_float(inputs, "x")
    return inputs


@infer_type.of(CAST)
def _cast_type(inputs: Types, attrs: Attrs) -> Types:
    (x,) = expect_inputs(inputs, "x")
    return (TensorType(declared_dtype(attrs), x.shape),)


for _op in (NEG, ABS, SQUARE, SQRT, CAST):
    is_exact.register(_op, True)

reference.register(NEG, pointwise(np.negative))
reference.register(ABS, pointwise(np.abs))
reference.register(SQUARE, pointwise(np.square))
reference.register(EXP, pointwise(np.exp))
reference.register(LOG, pointwise(np.log))
reference.register(SQRT, pointwise(np.sqrt))
reference.register(RSQRT, pointwise(lambda x: 1 / np.sqrt(x)))
reference.register(RECIPROCAL, pointwise(lambda x: 1 / x))
reference.register(SIN, pointwise(np.sin))
reference.register(COS, pointwise(np.cos))


@reference.of(CAST)
def _cast_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    if declared_dtype(attrs) is DType.BFLOAT16:
        return (rounded(inputs[0]),)
    return (inputs[0].astype(attrs.str_("dtype")),)


@simplify.of(NEG)
def _simplify_neg(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    before = b.producer_of(inputs[0])
    return before.inputs if before.op is NEG else None


@simplify.of(ABS, SQUARE)
def _simplify_even(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    """An even function does not see the sign."""
    before = b.producer_of(inputs[0])
    return b.emit(node.op, before.inputs) if before.op in (NEG, ABS) else None


@simplify.of(CAST)
def _simplify_cast(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    target = DType(node.attrs.str_("dtype"))
    before = b.producer_of(inputs[0])
    source = b.type_of(inputs[0]).dtype
    if source is target:
        return inputs
    if before.op is CAST and _is_lossless(b.type_of(before.inputs[0]).dtype, source, target):
        return (cast_to(b, before.inputs[0], target),)
    return None


def _is_lossless(first: DType, middle: DType, last: DType) -> bool:
    """Whether first -> middle -> last gives the bits of first -> last.

    Only inside one kind of dtype: numpy calls int64 -> float64 safe though it rounds, and what an
    out-of-range float becomes as an integer depends on the width it comes from.
    """
    all_floats = first.is_float and middle.is_float and last.is_float
    all_integers = first.is_integer and middle.is_integer and last.is_integer
    if not (all_floats or all_integers) or middle is DType.BFLOAT16:
        return False
    if first is DType.BFLOAT16:
        return middle is not DType.FLOAT16
    return np.can_cast(first.value, middle.value, "safe")
