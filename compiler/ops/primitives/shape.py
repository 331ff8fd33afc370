"""The same elements under another shape, mostly views that cost no launch, or under another dtype.

Gradients are in `compiler.ops.families.gradients`, but for that of `cast`. The rule for reshaping
without a copy is numpy's (`_attempt_nocopy_reshape`, numpy/_core/src/multiarray/shape.c), restated
on layouts.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from compiler.contract.attrs import Attrs
from compiler.contract.sbp import PARTIAL, PARTIAL_MAX, Split
from compiler.contract.types import DType, TensorType, ValueId, contiguous_strides, rounded
from compiler.graph.columns import (
    Grads,
    SbpSignature,
    Values,
    gradient_of,
    project,
    reference_of,
    sbp_signatures,
    streaming_cost,
    with_local_shape,
)
from compiler.graph.graph import GraphBuilder, Node, simplify
from compiler.graph.program_builder import ProgramBuilder, expand
from compiler.graph.registry import (
    Array,
    Layout,
    OpTypeError,
    Types,
    broadcast_shape,
    concat_slices,
    define,
    expect_inputs,
    infer_type,
    is_exact,
    typed,
    view,
)
from compiler.ops.primitives.sources import declared_dtype

RESHAPE = define("reshape")
"""x -> the elements in row-major order under another shape. Attrs: shape (no -1)."""

TRANSPOSE = define("transpose")
"""x -> axes reordered: axis i of the result is axis perm[i] of x. Attrs: perm."""

BROADCAST_TO = define("broadcast_to")
"""x -> x stretched to a shape by numpy's rule. Attrs: shape."""

STOP_GRADIENT = define("stop_gradient")
"""x -> x, and nothing flows back."""

COPY = define("copy")
"""x -> x in bytes of its own, dense."""


def reshape_to(b: GraphBuilder, value: ValueId, shape: tuple[int, ...]) -> ValueId:
    """Emit a reshape, or nothing when `value` has the shape already."""
    return value if b.type_of(value).shape == shape else b.emit_one(RESHAPE, value, shape=shape)


def broadcast_value(b: GraphBuilder, value: ValueId, shape: tuple[int, ...]) -> ValueId:
    """Emit a broadcast_to, or nothing when `value` has the shape already."""
    return (
        value if b.type_of(value).shape == shape else b.emit_one(BROADCAST_TO, value, shape=shape)
    )


def swap_last_axes(b: GraphBuilder, value: ValueId) -> ValueId:
    """Emit the transpose of the last two axes, or undo the one that produced `value`."""
    if is_swapped(b, value):
        return b.producer_of(value).inputs[0]
    return b.emit_one(TRANSPOSE, value, perm=swapping_perm(b.type_of(value).rank))


def is_swapped(b: GraphBuilder, value: ValueId) -> bool:
    """Whether `value` is a transpose of the last two axes."""
    node = b.producer_of(value)
    return node.op is TRANSPOSE and node.attrs["perm"] == swapping_perm(b.type_of(value).rank)


def swapping_perm(rank: int) -> tuple[int, ...]:
    """Return the permutation that swaps the last two axes."""
    return (*range(rank - 2), rank - 1, rank - 2)


@infer_type.of(RESHAPE)
def _reshape_type(inputs: Types, attrs: Attrs) -> Types:
    (x,) = expect_inputs(inputs, "x")
    shape = attrs.ints("shape")
    if any(extent < 0 for extent in shape):
        raise OpTypeError(f"needs extents of 0 or more, got shape {list(shape)}")
    result = TensorType(x.dtype, shape)
    if result.num_elements != x.num_elements:
        raise OpTypeError(
            f"needs a shape of {x.num_elements} elements like {list(x.shape)},"
            f" but {list(shape)} has {result.num_elements}"
        )
    return (result,)


@infer_type.of(TRANSPOSE)
def _transpose_type(inputs: Types, attrs: Attrs) -> Types:
    (x,) = expect_inputs(inputs, "x")
    perm = attrs.ints("perm")
    if sorted(perm) != list(range(x.rank)):
        raise OpTypeError(f"needs each of the {x.rank} axes once in perm, got {perm}")
    return (TensorType(x.dtype, tuple(x.shape[axis] for axis in perm)),)


@infer_type.of(BROADCAST_TO)
def _broadcast_type(inputs: Types, attrs: Attrs) -> Types:
    (x,) = expect_inputs(inputs, "x")
    shape = attrs.ints("shape")
    if broadcast_shape(x.shape, shape) != shape:
        raise OpTypeError(
            f"cannot stretch shape {list(x.shape)} to {list(shape)}: only extents of 1 and new"
            " leading axes stretch"
        )
    return (TensorType(x.dtype, shape),)


typed(STOP_GRADIENT, "x -> x")
typed(COPY, "x -> x")

_MOVES = (RESHAPE, TRANSPOSE, BROADCAST_TO, STOP_GRADIENT, COPY)
for _op in _MOVES:
    is_exact.register(_op, True)
streaming_cost(*_MOVES)
reference_of(RESHAPE)(lambda attrs, x: x.reshape(attrs.ints("shape")).copy())
reference_of(TRANSPOSE)(lambda attrs, x: x.transpose(attrs.ints("perm")).copy())
reference_of(BROADCAST_TO)(lambda attrs, x: np.broadcast_to(x, attrs.ints("shape")).copy())
reference_of(STOP_GRADIENT, COPY)(lambda attrs, x: x.copy())


@view.of(RESHAPE)
def _reshape_view(
    input_type: TensorType, layout: Layout, output_type: TensorType, attrs: Attrs
) -> Layout | None:
    strides = reshaped_strides(
        input_type.shape, layout.strides_bytes, output_type.shape, input_type.dtype.itemsize
    )
    return None if strides is None else Layout(layout.offset_bytes, strides)


# Kept: layers repeat, and each storage of a graph asks again.
@lru_cache(1 << 12)
def reshaped_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], new_shape: tuple[int, ...], itemsize: int
) -> tuple[int, ...] | None:
    """Return the strides of `new_shape` over the same storage, or None where elements must move.

    Walks both shapes in groups of equal products; a group of old axes that lies evenly (each stride
    is the next extent times the next stride) can be cut anew. Axes of extent 1 have no say.
    O(rank).
    """
    if 0 in shape:
        return contiguous_strides(new_shape, itemsize)
    old = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    wide = [axis for axis, n in enumerate(new_shape) if n != 1]
    result = list(contiguous_strides(new_shape, itemsize))
    i = j = 0
    while i < len(old):
        i_end, j_end = i + 1, j + 1
        old_product, new_product = old[i][0], new_shape[wide[j]]
        while old_product != new_product:
            if old_product < new_product:
                if old[i_end - 1][1] != old[i_end][0] * old[i_end][1]:
                    return None
                old_product *= old[i_end][0]
                i_end += 1
            else:
                new_product *= new_shape[wide[j_end]]
                j_end += 1
        step = old[i_end - 1][1]
        for axis in reversed(wide[j:j_end]):
            result[axis] = step
            step *= new_shape[axis]
        i, j = i_end, j_end
    return tuple(result)


@view.of(TRANSPOSE)
def _transpose_view(
    input_type: TensorType, layout: Layout, output_type: TensorType, attrs: Attrs
) -> Layout | None:
    strides = tuple([layout.strides_bytes[axis] for axis in attrs.ints("perm")])
    return Layout(layout.offset_bytes, strides)


@view.of(BROADCAST_TO)
def _broadcast_view(
    input_type: TensorType, layout: Layout, output_type: TensorType, attrs: Attrs
) -> Layout | None:
    new_axes = output_type.rank - input_type.rank
    strides = [0] * new_axes
    for old, new, stride in zip(
        input_type.shape, output_type.shape[new_axes:], layout.strides_bytes, strict=True
    ):
        strides.append(stride if old == new else 0)
    return Layout(layout.offset_bytes, tuple(strides))


view.of(STOP_GRADIENT)(lambda input_type, layout, output_type, attrs: layout)
concat_slices.of(STOP_GRADIENT, COPY)(lambda output_type, layout, input_types, attrs: (layout,))


@concat_slices.of(RESHAPE)
def _inside_reshape(
    output_type: TensorType, layout: Layout, input_types: Types, attrs: Attrs
) -> tuple[Layout | None, ...]:
    return (_reshape_view(output_type, layout, input_types[0], attrs),)


@concat_slices.of(TRANSPOSE)
def _inside_transpose(
    output_type: TensorType, layout: Layout, input_types: Types, attrs: Attrs
) -> tuple[Layout | None, ...]:
    strides = [0] * input_types[0].rank
    for axis, stride in zip(attrs.ints("perm"), layout.strides_bytes, strict=True):
        strides[axis] = stride
    return (Layout(layout.offset_bytes, tuple(strides)),)


@simplify.of(RESHAPE)
def _simplify_reshape(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    shape = node.attrs.ints("shape")
    before = b.producer_of(inputs[0])
    if before.op is RESHAPE:
        return (reshape_to(b, before.inputs[0], shape),)
    return inputs if b.type_of(inputs[0]).shape == shape else None


@simplify.of(TRANSPOSE)
def _simplify_transpose(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    perm = node.attrs.ints("perm")
    value = inputs[0]
    before = b.producer_of(value)
    if before.op is TRANSPOSE:
        earlier = before.attrs.ints("perm")
        perm = tuple(earlier[axis] for axis in perm)
        value = before.inputs[0]
    if perm == tuple(range(len(perm))):
        return (value,)
    return (b.emit_one(TRANSPOSE, value, perm=perm),) if value != inputs[0] else None


@simplify.of(BROADCAST_TO)
def _simplify_broadcast(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    shape = node.attrs.ints("shape")
    before = b.producer_of(inputs[0])
    if before.op is BROADCAST_TO:
        return (broadcast_value(b, before.inputs[0], shape),)
    return inputs if b.type_of(inputs[0]).shape == shape else None


def _kept(pairs: Iterable[tuple[int, int]]) -> list[SbpSignature]:
    """Return the signatures of an op that keeps axes (of the input, of the result), and sums."""
    signatures = [SbpSignature((Split(axis),), (Split(new_axis),)) for axis, new_axis in pairs]
    return [*signatures, *[SbpSignature((share,), (share,)) for share in (PARTIAL, PARTIAL_MAX)]]


@sbp_signatures.of(STOP_GRADIENT, COPY)
def _same_signatures(inputs: Types, outputs: Types, attrs: Attrs, parts: int) -> list[SbpSignature]:
    return _kept([(axis, axis) for axis in range(inputs[0].rank)])


@sbp_signatures.of(TRANSPOSE)
def _transpose_signatures(
    inputs: Types, outputs: Types, attrs: Attrs, parts: int
) -> list[SbpSignature]:
    return _kept([(axis, new_axis) for new_axis, axis in enumerate(attrs.ints("perm"))])


@sbp_signatures.of(BROADCAST_TO)
def _stretched_signatures(
    inputs: Types, outputs: Types, attrs: Attrs, parts: int
) -> list[SbpSignature]:
    """Split what is there already: of a new axis each rank makes its own part of a whole one."""
    (x,), (y,) = inputs, outputs
    new = y.rank - x.rank
    return _kept([(axis, new + axis) for axis, n in enumerate(x.shape) if n == y.shape[new + axis]])


@sbp_signatures.of(RESHAPE)
def _reshape_signatures(
    inputs: Types, outputs: Types, attrs: Attrs, parts: int
) -> list[SbpSignature]:
    """Split the first axis of each group of axes that becomes a group of as many elements.

    Where an axis is cut, or several are joined, only even parts are rows of both.
    """
    (x,), (y,) = inputs, outputs
    return _kept(_group_starts(x.shape, y.shape, parts))


project.of(RESHAPE, BROADCAST_TO)(with_local_shape)


def _group_starts(
    shape: tuple[int, ...], new_shape: tuple[int, ...], parts: int
) -> list[tuple[int, int]]:
    """Return the first axes of groups, of both shapes, that parts cut at the same elements."""
    old_axes = [(axis, n) for axis, n in enumerate(shape) if n != 1]
    new_axes = [(axis, n) for axis, n in enumerate(new_shape) if n != 1]
    starts = []
    while old_axes and new_axes and 0 not in shape:
        (axis, extent), (new_axis, new_extent) = old_axes.pop(0), new_axes.pop(0)
        is_even = extent % parts == new_extent % parts == 0
        if extent == new_extent or is_even:
            starts.append((axis, new_axis))
        while extent != new_extent:
            if extent < new_extent:
                extent *= old_axes.pop(0)[1]
            else:
                new_extent *= new_axes.pop(0)[1]
    return starts


CAST = define("cast")
"""x -> x in another dtype, as numpy's astype. Attrs: dtype.

To bfloat16 by way of float32, to the nearest, ties to even; a NaN stays one.
"""


def cast_to(b: GraphBuilder, value: ValueId, dtype: DType) -> ValueId:
    """Emit a cast, or nothing when `value` has the dtype already."""
    return value if b.type_of(value).dtype is dtype else b.emit_one(CAST, value, dtype=dtype.value)


@infer_type.of(CAST)
def _cast_type(inputs: Types, attrs: Attrs) -> Types:
    (x,) = expect_inputs(inputs, "x")
    return (TensorType(declared_dtype(attrs), x.shape),)


is_exact.register(CAST, True)


@reference_of(CAST)
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
