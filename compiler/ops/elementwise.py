"""Ops of one input that act on each element alone."""

from __future__ import annotations

import numpy as np

from compiler.attrs import Attrs
from compiler.bfloat16 import rounded
from compiler.fusion.builder import ProgramBuilder
from compiler.fusion.define import fused_op
from compiler.fusion.expansion import expand
from compiler.fusion.expressions import Expression
from compiler.graph import GraphBuilder, Node
from compiler.ops.rule import Grads, Values, array_of, gradient_of
from compiler.ops.signature import Array, Types, expect_inputs
from compiler.ops.sources import declared_dtype
from compiler.registry import define, infer_type, is_exact
from compiler.rules import simplify
from compiler.types import DType, TensorType, ValueId

NEG = fused_op("neg", "x: signed -> y", lambda x: -x)

ABS = fused_op("abs", "x: signed -> y", abs)
"""The gradient at 0 is 0."""

SQUARE = fused_op("square", "x: signed -> y", lambda x: x * x)

EXP = fused_op("exp", "x -> y", Expression.exp)

LOG = fused_op("log", "x -> y", Expression.log)
"""-inf at 0, NaN below."""

SQRT = fused_op("sqrt", "x -> y", Expression.sqrt)
"""NaN below 0."""

RSQRT = fused_op("rsqrt", "x -> y", Expression.rsqrt)

RECIPROCAL = fused_op("reciprocal", "x -> y", Expression.reciprocal)

SIN = fused_op("sin", "x -> y", Expression.sin)

COS = fused_op("cos", "x -> y", Expression.cos)

CAST = define("cast")
"""x -> x in another dtype, as numpy's astype. Attrs: dtype.

To bfloat16 by way of float32, to the nearest, ties to even; a NaN stays one.
"""


def cast_to(b: GraphBuilder, value: ValueId, dtype: DType) -> ValueId:
    """Emit a cast, or nothing when `value` has the dtype already."""
    return value if b.type_of(value).dtype is dtype else b.one(CAST, value, dtype=dtype.value)


@infer_type.of(CAST)
def _cast_type(inputs: Types, attrs: Attrs) -> Types:
    (x,) = expect_inputs(inputs, "x")
    return (TensorType(declared_dtype(attrs), x.shape),)


is_exact.register(CAST, True)


@array_of(CAST)
def _cast_reference(attrs: Attrs, x: Array) -> Array:
    if declared_dtype(attrs) is DType.BFLOAT16:
        return rounded(x)
    return np.asarray(x.astype(attrs.str_("dtype")))


@expand.of(CAST)
def _cast(
    p: ProgramBuilder, attrs: Attrs, types: Types, values: tuple[int, ...]
) -> tuple[int, ...]:
    return (p.cast(values[0], DType(attrs.str_("dtype"))),)


@gradient_of(CAST)
def _cast_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    dtype = b.type_of(node.inputs[0]).dtype
    return (cast_to(b, dy, dtype) if dtype.is_float else None,)


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
