"""Along the last axis: the order of elements, and linear recurrences; flags and sums over tensors.

`non_finite` and `square_sum` hand one number from tensor to tensor, so that each is read while it
is still in the cache, and no launch is needed to join the answers.
"""

from __future__ import annotations

import math

import numpy as np

from compiler.contract.attrs import Attrs
from compiler.contract.types import DType, TensorType, ValueId
from compiler.graph.columns import (
    Grads,
    SbpSignature,
    by_axes,
    gradient_of,
    linear_in,
    reference_of,
    sbp_signatures,
)
from compiler.graph.graph import GraphBuilder, Node
from compiler.graph.program_builder import IterationDomain, ProgramBuilder, expand, frame
from compiler.graph.registry import (
    Array,
    Cost,
    OpTypeError,
    Types,
    cost,
    define,
    expect_inputs,
    expect_type,
    infer_type,
    recompute,
    typed,
)
from compiler.ops.families.arithmetic import MUL
from compiler.ops.language.define import fused_op
from compiler.ops.language.expressions import Expression
from compiler.ops.primitives.slicing import PAD, SLICE


def _value_range(x: Expression) -> tuple[Expression, ...]:
    is_finite, is_nan = x.abs() < math.inf, x != x
    least, most = is_finite.where(x, math.inf).min(), is_finite.where(x, -math.inf).max()
    counts = [flag.to(DType.FLOAT64).sum().to(x.dtype) for flag in (is_nan, x.abs() == math.inf)]
    finite = is_finite.where(x, 0.0).to(DType.FLOAT64)  # a float32 may not hold its square
    norm = (finite * finite).sum().sqrt().to(x.dtype)
    return least, most, *counts, norm


VALUE_RANGE = fused_op(
    "value_range",
    "x[*, D] -> least[*], most[*], nans[*], infinities[*], norm[*]",
    _value_range,
)
"""The least and the largest finite number of a row, how many are NaN or infinite, and the norm
of the finite ones: what `debug=` of a job tells of a value. Where no number is finite the least is
larger than the most."""

ARGSORT = define("argsort")
"""x -> int64, the places of the elements along the last axis in ascending order; equal ones as they
came. Floats or int64. NaN is larger than all. Attrs: descending."""

RECURRENCE = define("recurrence")
"""a, b -> y, y[i] = a[i] * y[i - 1] + b[i] along the last axis, with 0 before the first.

Floats, which are in float64 inside, or int64. Attrs: reverse, to go from the end.
"""


def _check(x: TensorType) -> None:
    if x.rank < 1 or not (x.dtype.is_float or x.dtype is DType.INT64):
        raise OpTypeError(f"needs an axis, and floats or int64; got {x}")


@infer_type.of(ARGSORT)
def _argsort_type(inputs: Types, attrs: Attrs) -> Types:
    (x,) = expect_inputs(inputs, "x")
    _check(x)
    attrs.bool_("descending")
    return (TensorType(DType.INT64, x.shape),)


@infer_type.of(RECURRENCE)
def _recurrence_type(inputs: Types, attrs: Attrs) -> Types:
    a, b = expect_inputs(inputs, "a", "b")
    _check(b)
    expect_type(a, "a", b)
    attrs.bool_("reverse")
    return (b,)


@reference_of(ARGSORT)
def _argsort(attrs: Attrs, x: Array) -> Array:
    if not attrs.bool_("descending"):
        return np.asarray(np.argsort(x, -1, kind="stable"))
    turned = np.argsort(x[..., ::-1], -1, kind="stable")[..., ::-1]
    return np.asarray(x.shape[-1] - 1 - turned)


@reference_of(RECURRENCE)
def _recurrence(attrs: Attrs, a: Array, b: Array) -> Array:
    wide = np.promote_types(b.dtype, np.float64) if b.dtype.kind == "f" else b.dtype
    result, total = np.empty(b.shape, b.dtype), np.zeros(b.shape[:-1], wide)
    order = range(b.shape[-1])
    for i in reversed(order) if attrs.bool_("reverse") else order:
        total = total * a[..., i] + b[..., i]
        result[..., i] = total
    return result


@cost.of(ARGSORT)
def _argsort_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    """Each pass of a merge sort moves a key and a place."""
    passes = max(1, inputs[0].shape[-1]).bit_length()
    return Cost(0.0, inputs[0].size_bytes + 32.0 * passes * inputs[0].num_elements)


@cost.of(RECURRENCE)
def _recurrence_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    return Cost(2.0 * inputs[0].num_elements, 3.0 * inputs[0].size_bytes)


@gradient_of(RECURRENCE)
def _recurrence_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    """What flows into y[i] comes by way of y[i + 1] too: a recurrence the other way."""
    factor, (y,), reverse = node.inputs[0], node.outputs, node.attrs.bool_("reverse")
    if 0 in b.type_of(y).shape:
        return dy, dy
    flow = b.emit_one(RECURRENCE, _moved(b, factor, reverse), dy, reverse=not reverse)
    return b.emit_one(MUL, flow, _moved(b, y, not reverse)), flow


def _moved(b: GraphBuilder, x: ValueId, forward: bool) -> ValueId:
    """Emit x moved by one place along its last axis, with a 0 at the end that is left."""
    shape = b.type_of(x).shape
    rank, last = len(shape), shape[-1]
    none, one = (0,) * rank, (*(0,) * (rank - 1), 1)
    starts, stops = (none, (*shape[:-1], last - 1)) if forward else (one, shape)
    part = b.emit_one(SLICE, x, starts=starts, stops=stops, steps=(1,) * rank)
    low, high = (one, none) if forward else (none, one)
    return b.emit_one(PAD, part, low=low, high=high, steps=(1,) * rank)


@sbp_signatures.of(ARGSORT, RECURRENCE)
def _signatures(inputs: Types, outputs: Types, attrs: Attrs, parts: int) -> list[SbpSignature]:
    """Split any axis but the last; a recurrence is linear in what it adds."""
    names = [*map(str, range(inputs[0].rank - 1)), ""]
    linear = [linear_in(1, 2)] * (len(inputs) == 2)
    return [*by_axes([names] * len(inputs), [names]), *linear]


# Whether a step has gone wrong: NaN or infinity among what it computed. It has no gradient.

NON_FINITE = define("non_finite")
"""x, earlier [] -> 1 where x holds NaN or infinity or earlier is 1, else 0; int64 [].

`earlier` may be left out; x has elements.
"""

recompute.register(NON_FINITE, False)
typed(NON_FINITE, "x: float, earlier? = int64 -> int64")


@frame.of(NON_FINITE)
def _non_finite_frame(inputs: Types, outputs: Types, attrs: Attrs) -> IterationDomain:
    """See x as one row, whatever its axes: it is shared among threads by columns."""
    shape = inputs[0].shape
    return IterationDomain(shape, tuple([t.shape for t in inputs]), ((),), num_trailing=len(shape))


@expand.of(NON_FINITE)
def _expand_non_finite(
    p: ProgramBuilder, attrs: Attrs, types: Types, values: tuple[int, ...]
) -> tuple[int, ...]:
    x, *earlier = [Expression(p, v) for v in values]
    # Short floats are computed in float32. NaN compares as false: what is asked is who is finite.
    largest = np.finfo(np.float64 if x.dtype is DType.FLOAT64 else np.float32).max
    flag = 1 - (abs(x) <= float(largest)).to(DType.INT32).min().to(DType.INT64)
    for before in earlier:
        flag = flag.maximum(before)
    return (flag.value,)


@reference_of(NON_FINITE)
def _non_finite_reference(attrs: Attrs, x: Array, earlier: Array | bool = False) -> Array:
    return np.asarray(int(bool(earlier) or not np.isfinite(x).all()))


@cost.of(NON_FINITE)
def _non_finite_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    return Cost(float(inputs[0].num_elements), float(inputs[0].size_bytes))


# The sum of squares of many tensors, for norms of all of them. In float64 it overflows for no
# float32.

SQUARE_SUM = define("square_sum")
"""x, earlier [] -> earlier + the sum of x * x; float64 []. `earlier` may be left out."""

recompute.register(SQUARE_SUM, False)
typed(SQUARE_SUM, "x: float, earlier? = float64 -> float64")


@frame.of(SQUARE_SUM)
def _square_sum_frame(inputs: Types, outputs: Types, attrs: Attrs) -> IterationDomain:
    """See x as one row, whatever its axes: it is shared among threads by columns."""
    shape = inputs[0].shape
    return IterationDomain(shape, tuple([t.shape for t in inputs]), ((),), num_trailing=len(shape))


@expand.of(SQUARE_SUM)
def _expand_square_sum(
    p: ProgramBuilder, attrs: Attrs, types: Types, values: tuple[int, ...]
) -> tuple[int, ...]:
    x, *earlier = [Expression(p, v) for v in values]
    wide = x.to(DType.FLOAT64)
    total = (wide * wide).sum()
    for before in earlier:
        total = before + total
    return (total.value,)


@reference_of(SQUARE_SUM)
def _square_sum_reference(attrs: Attrs, x: Array, earlier: Array | float = 0.0) -> Array:
    return np.asarray(earlier + np.sum(np.square(x, dtype=np.float64)))


@cost.of(SQUARE_SUM)
def _square_sum_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    return Cost(2.0 * inputs[0].num_elements, float(inputs[0].size_bytes))
