"""Reductions over axes, `sum_to`, which undoes a broadcast, and the check of indices in references.

Gradients are in `compiler.ops.families.gradients`.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from compiler.contract.attrs import Attrs
from compiler.contract.errors import bad_index
from compiler.contract.sbp import PARTIAL, PARTIAL_MAX, Partial, Split
from compiler.contract.types import DType, TensorType, ValueId
from compiler.graph.columns import (
    SbpSignature,
    Values,
    by_axes,
    reference_of,
    sbp_signatures,
    streaming_cost,
)
from compiler.graph.graph import GraphBuilder, Node, simplify
from compiler.graph.program_builder import IterationDomain, ProgramBuilder, expand, frame
from compiler.graph.registry import (
    Array,
    OpTypeError,
    Types,
    define,
    expect_axes,
    expect_float,
    expect_inputs,
    expect_number,
    infer_type,
)
from compiler.ops.primitives.shape import reshape_to

SUM = define("sum")
"""x -> sum over axes, in the dtype of x; 0 over no elements. Attrs: axes, keepdims."""

MEAN = define("mean")
"""x -> mean over axes. Floats. Attrs: axes, keepdims."""

MAX = define("max")
"""x -> maximum over axes, NaN where one is. Attrs: axes, keepdims.

Ties share the gradient; `by_place`, of one axis, the first has it. Where the maximum is NaN the
gradient is NaN, or, with `nan_shares`, those that are NaN share it.
"""

ARGMAX = define("argmax")
"""x -> int64 index of the first largest element along an axis. Attrs: axis, keepdims."""


def sum_to(b: GraphBuilder, value: ValueId, shape: tuple[int, ...]) -> ValueId:
    """Emit the sum of `value` over the axes along which `shape` was stretched to its shape.

    The adjoint of broadcasting; emits nothing when the shapes are equal.
    """
    wide = b.type_of(value).shape
    if wide == shape:
        return value
    narrow = (1,) * (len(wide) - len(shape)) + shape
    axes = tuple(i for i, (n, m) in enumerate(zip(wide, narrow, strict=True)) if n != m)
    if axes:
        value = b.emit_one(SUM, value, axes=axes, keepdims=False)
    return reshape_to(b, value, shape)


def kept_shape(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return `shape` with extents of 1 on the reduced axes."""
    return tuple(1 if axis in axes else n for axis, n in enumerate(shape))


def reduced_shape(attrs: Attrs, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a reduction over attrs `axes` and `keepdims`."""
    axes = attrs.ints("axes")
    if attrs.bool_("keepdims"):
        return kept_shape(shape, axes)
    return tuple(n for axis, n in enumerate(shape) if axis not in axes)


def num_reduced(attrs: Attrs, shape: tuple[int, ...]) -> int:
    """Return how many elements go into one element of the result."""
    return math.prod(shape[axis] for axis in attrs.ints("axes"))


def total(
    x: Array, axes: int | tuple[int, ...], count: int = 1, *, keepdims: bool = False
) -> Array:
    """Return the sum of an array over axes, divided by `count`, in its dtype.

    Floats are added up in float64, whatever their width: references are what kernels are held to.
    """
    if x.dtype.kind != "f":
        return np.asarray(np.sum(x, axes, x.dtype, keepdims=keepdims))
    wide = np.asarray(np.sum(x, axes, np.promote_types(x.dtype, np.float64), keepdims=keepdims))
    return np.asarray((wide / count).astype(x.dtype))


@infer_type.of(SUM)
def _sum_type(inputs: Types, attrs: Attrs) -> Types:
    (x,) = expect_inputs(inputs, "x")
    expect_number(x, "x")
    expect_axes(attrs.ints("axes"), x.rank)
    return (TensorType(x.dtype, reduced_shape(attrs, x.shape)),)


@infer_type.of(MEAN)
def _mean_type(inputs: Types, attrs: Attrs) -> Types:
    expect_float(expect_inputs(inputs, "x"), "x")
    return _max_type(inputs, attrs)


@infer_type.of(MAX)
def _max_type(inputs: Types, attrs: Attrs) -> Types:
    (result,) = _sum_type(inputs, attrs)
    if num_reduced(attrs, inputs[0].shape) == 0:
        raise OpTypeError(
            f"needs at least one element along axes {attrs.ints('axes')},"
            f" got shape {list(inputs[0].shape)}"
        )
    return (result,)


@infer_type.of(ARGMAX)
def _argmax_type(inputs: Types, attrs: Attrs) -> Types:
    (x,) = expect_inputs(inputs, "x")
    one = Attrs({"axes": (attrs.int_("axis"),), "keepdims": attrs["keepdims"]})
    return (TensorType(DType.INT64, _max_type((x,), one)[0].shape),)


@reference_of(SUM)
def _sum_of(attrs: Attrs, x: Array, count: int = 1) -> Array:
    if num_reduced(attrs, x.shape) == 1:  # numpy starts from 0.0 and loses a -0.0
        return x.reshape(reduced_shape(attrs, x.shape)).copy()
    return total(x, attrs.ints("axes"), count, keepdims=attrs.bool_("keepdims"))


@reference_of(MEAN)
def _mean_of(attrs: Attrs, x: Array) -> Array:
    return _sum_of(attrs, x, num_reduced(attrs, x.shape))


@reference_of(MAX)
def _max_of(attrs: Attrs, x: Array) -> Array:
    return np.asarray(np.max(x, attrs.ints("axes"), keepdims=attrs.bool_("keepdims")))


@reference_of(ARGMAX)
def _argmax_of(attrs: Attrs, x: Array) -> Array:
    index = np.argmax(x, attrs.int_("axis"), keepdims=attrs.bool_("keepdims"))
    return np.asarray(index, np.int64)


streaming_cost(SUM, MEAN, MAX, ARGMAX, flops=1.0)


@simplify.of(SUM, MEAN, MAX)
def _simplify_reduction(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    """A reduction of single elements is a reshape."""
    shape = b.type_of(inputs[0]).shape
    if num_reduced(node.attrs, shape) != 1:
        return None
    return (reshape_to(b, inputs[0], reduced_shape(node.attrs, shape)),)


@frame.of(ARGMAX)
def _argmax_frame(inputs: Types, outputs: Types, attrs: Attrs) -> IterationDomain | None:
    """Take the last axis; `stage_reductions` leaves no other."""
    (x,), axis = inputs, attrs.int_("axis")
    if not _are_reduced(range(axis, x.rank), (axis,), x.shape):
        return None
    return IterationDomain(x.shape, (x.shape,), (kept_shape(x.shape, (axis,)),), x.rank - axis)


MAX_SUMMED_COLUMNS = 1 << 14
"""Sums over rows are kept per chunk of rows; wider ones are left to a kernel that cuts columns."""


@frame.of(MAX)
def _row_frame(inputs: Types, outputs: Types, attrs: Attrs) -> IterationDomain | None:
    """Take reductions over the last axes."""
    (x,) = inputs
    axes = _wide_axes(attrs, x.shape)
    if not axes or not _are_reduced(range(axes[0], x.rank), axes, x.shape):
        return None
    reduced = kept_shape(x.shape, attrs.ints("axes"))
    return IterationDomain(x.shape, (x.shape,), (reduced,), x.rank - axes[0])


@frame.of(SUM, MEAN)
def _sum_frame(inputs: Types, outputs: Types, attrs: Attrs) -> IterationDomain | None:
    """Take sums over the last axes, or over the first, whose result is write_only."""
    (x,) = inputs
    domain, axes = _row_frame(inputs, outputs, attrs), _wide_axes(attrs, x.shape)
    if domain is not None or not axes:
        return domain
    columns = x.shape[axes[-1] + 1 :]
    is_first = _are_reduced(range(axes[-1] + 1), axes, x.shape)
    if not is_first or math.prod(columns) > MAX_SUMMED_COLUMNS:
        return None
    reduced = kept_shape(x.shape, attrs.ints("axes"))
    return IterationDomain(x.shape, (x.shape,), (reduced,), len(columns), write_only=(0,))


def _wide_axes(attrs: Attrs, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes that are reduced, without those of one element."""
    return tuple([axis for axis in attrs.ints("axes") if shape[axis] != 1])


def _are_reduced(span: range, axes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a reduction leaves nothing of a span of axes."""
    return all([axis in axes or shape[axis] == 1 for axis in span])


@expand.of(MAX)
def _max(p: ProgramBuilder, attrs: Attrs, types: Types, values: tuple[int, ...]) -> tuple[int, ...]:
    return (p.reduce("row_max", values[0]),)


@expand.of(ARGMAX)
def _argmax(
    p: ProgramBuilder, attrs: Attrs, types: Types, values: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the least number of a column that holds the maximum, which is NaN where one is."""
    (x,) = values
    is_largest = p.op("eq", x, p.reduce("row_max", x))
    if types[0].dtype.is_float:
        is_largest = p.op("or", is_largest, p.op("ne", x, x))
    beyond = p.constant(np.iinfo(np.int32).max, DType.INT32)
    place = p.reduce("row_min", p.op("select", is_largest, p.column_index(), beyond))
    return (p.cast(place, DType.INT64),)


@expand.of(SUM)
def _sum(p: ProgramBuilder, attrs: Attrs, types: Types, values: tuple[int, ...]) -> tuple[int, ...]:
    return (p.reduce(_sum_name(attrs, types), values[0]),)


@expand.of(MEAN)
def _mean(
    p: ProgramBuilder, attrs: Attrs, types: Types, values: tuple[int, ...]
) -> tuple[int, ...]:
    """Scale before a sum over columns, whose result no instruction may read.

    And before any of float16: as an output beside the mean the sum would overflow, and the mean be
    of what is stored.
    """
    (x,) = values
    share = p.constant_like(1.0 / num_reduced(attrs, types[0].shape), x)
    if types[0].dtype is not DType.FLOAT16 and _sum_name(attrs, types) == "row_sum":
        return (p.op("mul", p.reduce("row_sum", x), share),)
    return (p.reduce(_sum_name(attrs, types), p.op("mul", x, share)),)


def _sum_name(attrs: Attrs, types: Types) -> str:
    """Return the instruction, as the frame of these types has it."""
    return "row_sum" if _row_frame(types, types, attrs) is not None else "column_sum"


def _reduction_signatures(
    inputs: Types, outputs: Types, attrs: Attrs, parts: int, share: Partial = PARTIAL
) -> list[SbpSignature]:
    """Split what stays, or what is reduced: then each rank has a share."""
    (x,), axes = inputs, attrs.ints("axes")
    names = ["" if axis in axes else str(axis) for axis in range(x.rank)]
    outs = names if attrs.bool_("keepdims") else [n for i, n in enumerate(names) if i not in axes]
    reduced = [SbpSignature((Split(axis),), (share,)) for axis in axes]
    return [*by_axes([names], [outs]), *reduced, SbpSignature((share,), (share,))]


@sbp_signatures.of(ARGMAX)
def _argmax_signatures(
    inputs: Types, outputs: Types, attrs: Attrs, parts: int
) -> list[SbpSignature]:
    """Split what stays; along a last axis it follows from the program, places and all."""
    axis = attrs.int_("axis")
    names = ["" if i == axis else str(i) for i in range(inputs[0].rank)]
    outs = names if attrs.bool_("keepdims") else [n for i, n in enumerate(names) if i != axis]
    return by_axes([names], [outs])


sbp_signatures.of(SUM, MEAN)(_reduction_signatures)
sbp_signatures.of(MAX)(partial(_reduction_signatures, share=PARTIAL_MAX))


# Kernels refuse such indices at run time with the same words.


def check_indices(indices: Array, count: int, name: str, axes: tuple[int, ...] = ()) -> None:
    """Raise IndexError when an index lies outside 0..count-1, naming it and its position."""
    bad = (indices < 0) | (indices >= count)
    if bad.any():
        position = tuple(int(i) for i in np.argwhere(bad)[0])
        raise bad_index(name, int(indices[position]), position, count, axes)
