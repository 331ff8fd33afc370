"""Taking parts and putting parts together: slice and its adjoint pad, and concat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compiler.contract.attrs import Attrs
from compiler.contract.sbp import PARTIAL, PARTIAL_MAX, Partial
from compiler.contract.types import TensorType, ValueId
from compiler.graph.columns import (
    Grads,
    LocalCall,
    SbpSignature,
    Values,
    by_axes,
    gradient_of,
    project,
    reference_of,
    sbp_signatures,
    streaming_cost,
)
from compiler.graph.graph import GraphBuilder, Node, simplify
from compiler.graph.registry import (
    Array,
    Cost,
    Layout,
    OpTypeError,
    Types,
    concat_slices,
    cost,
    define,
    expect_equal_dtypes,
    expect_inputs,
    infer_type,
    is_exact,
    view,
)

SLICE = define("slice")
"""x -> x[starts:stops:steps], a view. Attrs: starts, stops, steps: one per axis, steps >= 1."""

PAD = define("pad")
"""x -> zeros with x placed into them, the adjoint of slice. Attrs: low, high, steps: one per axis.

An extent n > 0 becomes low + (n - 1) * step + 1 + high; an extent of 0 becomes low + high.
"""

CONCAT = define("concat")
"""x0, x1, ... -> the inputs one after another along an axis. Attrs: axis."""

for _op in (SLICE, PAD, CONCAT):
    is_exact.register(_op, True)


@infer_type.of(SLICE)
def _slice_type(inputs: Types, attrs: Attrs) -> Types:
    (x,) = expect_inputs(inputs, "x")
    starts, stops, steps = attrs.ints("starts"), attrs.ints("stops"), attrs.ints("steps")
    if not len(starts) == len(stops) == len(steps) == x.rank:
        raise OpTypeError(f"needs a start, stop and step for each of the {x.rank} axes")
    for axis, (n, start, stop, step) in enumerate(zip(x.shape, starts, stops, steps, strict=True)):
        if step < 1:
            raise OpTypeError(f"needs steps of 1 or more, got {step} for axis {axis}")
        if not 0 <= start <= stop <= n:
            raise OpTypeError(
                f"has {start}:{stop} for axis {axis}, outside 0 <= start <= stop <= {n}"
            )
    return (TensorType(x.dtype, _sliced_shape(attrs)),)


@infer_type.of(PAD)
def _pad_type(inputs: Types, attrs: Attrs) -> Types:
    (x,) = expect_inputs(inputs, "x")
    low, high, steps = attrs.ints("low"), attrs.ints("high"), attrs.ints("steps")
    if not len(low) == len(high) == len(steps) == x.rank:
        raise OpTypeError(f"needs low, high and step for each of the {x.rank} axes")
    if any(n < 0 for n in (*low, *high)) or any(step < 1 for step in steps):
        raise OpTypeError(
            f"needs low and high of 0 or more and steps of 1 or more,"
            f" got low={low}, high={high}, steps={steps}"
        )
    extents = zip(low, high, x.shape, steps, strict=True)
    return (TensorType(x.dtype, tuple(l_ + h + _span(n, step) for l_, h, n, step in extents)),)


@infer_type.of(CONCAT)
def _concat_type(inputs: Types, attrs: Attrs) -> Types:
    if not inputs:
        raise OpTypeError("needs at least one input, got none")
    dtype = expect_equal_dtypes(inputs)
    axis, first = attrs.int_("axis"), inputs[0]
    if not 0 <= axis < first.rank:
        raise OpTypeError(f"has axis {axis} outside 0..{first.rank - 1}; scalars need a reshape")
    for index, type_ in enumerate(inputs):
        if not _agree(type_.shape, first.shape, axis):
            raise OpTypeError(
                f"needs equal extents on all axes but {axis}: input 0 is {list(first.shape)},"
                f" input {index} is {list(type_.shape)}"
            )
    total = sum(type_.shape[axis] for type_ in inputs)
    return (TensorType(dtype, (*first.shape[:axis], total, *first.shape[axis + 1 :])),)


def _agree(shape: tuple[int, ...], other: tuple[int, ...], axis: int) -> bool:
    return len(shape) == len(other) and all(
        n == m for i, (n, m) in enumerate(zip(shape, other, strict=True)) if i != axis
    )


def _ranges(attrs: Attrs) -> list[range]:
    parts = zip(attrs.ints("starts"), attrs.ints("stops"), attrs.ints("steps"), strict=True)
    return [range(*part) for part in parts]


def _sliced_shape(attrs: Attrs) -> tuple[int, ...]:
    return tuple([len(r) for r in _ranges(attrs)])


def _span(extent: int, step: int) -> int:
    """Return how many positions `extent` elements cover that lie `step` apart."""
    return (extent - 1) * step + 1 if extent else 0


@reference_of(SLICE)
def _slice(attrs: Attrs, x: Array) -> Array:
    return np.array(x[tuple([slice(r.start, r.stop, r.step) for r in _ranges(attrs)])])


@reference_of(PAD)
def _pad(attrs: Attrs, x: Array) -> Array:
    low, high, steps = attrs.ints("low"), attrs.ints("high"), attrs.ints("steps")
    spans = tuple(_span(n, step) for n, step in zip(x.shape, steps, strict=True))
    shape = tuple(l_ + span + h for l_, span, h in zip(low, spans, high, strict=True))
    result = np.zeros(shape, x.dtype)
    index = zip(low, spans, steps, strict=True)
    result[tuple(slice(l_, l_ + span, step) for l_, span, step in index)] = x
    return result


reference_of(CONCAT)(lambda attrs, *parts: np.concatenate(parts, attrs.int_("axis")))
streaming_cost(PAD, CONCAT)


@cost.of(SLICE)
def _slice_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    return Cost(0.0, 2.0 * outputs[0].size_bytes)


@view.of(SLICE)
def _slice_view(
    input_type: TensorType, layout: Layout, output_type: TensorType, attrs: Attrs
) -> Layout | None:
    strides = layout.strides_bytes
    steps = attrs.ints("steps")
    offset = layout.offset_bytes
    if 0 not in output_type.shape:  # an empty view stays at an address inside the storage
        offset += sum(n * stride for n, stride in zip(attrs.ints("starts"), strides, strict=True))
    return Layout(offset, tuple([s * step for s, step in zip(strides, steps, strict=True)]))


@concat_slices.of(CONCAT)
def _inside_concat(
    output_type: TensorType, layout: Layout, input_types: Types, attrs: Attrs
) -> tuple[Layout | None, ...]:
    axis, offset = attrs.int_("axis"), layout.offset_bytes
    parts: list[Layout | None] = []
    for type_ in input_types:
        parts.append(Layout(offset, layout.strides_bytes))
        offset += type_.shape[axis] * layout.strides_bytes[axis]
    return tuple(parts)


@gradient_of(SLICE)
def _slice_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    low, steps = node.attrs.ints("starts"), node.attrs.ints("steps")
    extents = zip(b.type_of(node.inputs[0]).shape, low, b.type_of(dy).shape, steps, strict=True)
    high = tuple(n - start - _span(count, step) for n, start, count, step in extents)
    return (b.emit_one(PAD, dy, low=low, high=high, steps=steps),)


@gradient_of(PAD)
def _pad_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    starts, steps = node.attrs.ints("low"), node.attrs.ints("steps")
    extents = zip(starts, b.type_of(node.inputs[0]).shape, steps, strict=True)
    stops = tuple(start + _span(n, step) for start, n, step in extents)
    return (b.emit_one(SLICE, dy, starts=starts, stops=stops, steps=steps),)


@gradient_of(CONCAT)
def _concat_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    axis, rank = node.attrs.int_("axis"), b.type_of(dy).rank
    parts: list[ValueId] = []
    stop = 0
    for shape in [b.type_of(value).shape for value in node.inputs]:
        start, stop = stop, stop + shape[axis]
        starts = tuple([start if i == axis else 0 for i in range(rank)])
        stops = tuple([stop if i == axis else n for i, n in enumerate(shape)])
        parts.append(b.emit_one(SLICE, dy, starts=starts, stops=stops, steps=(1,) * rank))
    return tuple(parts)


@simplify.of(SLICE)
def _simplify_slice(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    if b.type_of(inputs[0]).shape == _sliced_shape(node.attrs):
        return inputs
    before = b.producer_of(inputs[0])
    if before.op is not SLICE:
        return None
    starts: list[int] = []
    stops: list[int] = []
    steps: list[int] = []
    for outer, inner in zip(_ranges(node.attrs), _ranges(before.attrs), strict=True):
        both = inner[outer.start : outer.stop : outer.step]
        starts.append(both.start)
        stops.append(both.start + _span(len(both), both.step))
        steps.append(both.step)
    return b.emit(
        SLICE,
        before.inputs,
        {"starts": tuple(starts), "stops": tuple(stops), "steps": tuple(steps)},
    )


@simplify.of(PAD)
def _simplify_pad(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    before = (b.type_of(inputs[0]),)
    return inputs if _pad_type(before, node.attrs) == before else None


@simplify.of(CONCAT)
def _simplify_concat(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    if len(inputs) == 1:
        return inputs
    axis, parts = node.attrs.int_("axis"), list[ValueId]()
    full = [value for value in inputs if b.type_of(value).shape[axis]] or inputs[:1]
    for value in full:
        before = b.producer_of(value)
        is_joined = before.op is CONCAT and before.attrs == node.attrs
        parts += before.inputs if is_joined else (value,)
    return None if tuple(parts) == tuple(inputs) else b.emit(CONCAT, parts, node.attrs)


def joined_pads(b: GraphBuilder, x: ValueId, y: ValueId) -> ValueId | None:
    """Emit the sum of two tensors that are padded to lie side by side: a pad of both, joined.

    None where they are not. So the gradients of slices that cut a tensor up become one concat.
    """
    first, second = b.producer_of(x), b.producer_of(y)
    if not first.op is second.op is PAD:
        return None
    if first.attrs.ints("low") > second.attrs.ints("low"):
        first, second = second, first
    extents = b.type_of(first.inputs[0]).shape
    low, low_of_second = first.attrs.ints("low"), second.attrs.ints("low")
    steps = first.attrs.ints("steps")
    axes = [axis for axis, start in enumerate(low) if start != low_of_second[axis]]
    if len(axes) != 1 or {*steps, *second.attrs.ints("steps")} != {1}:
        return None
    (axis,) = axes
    is_near = low[axis] + extents[axis] == low_of_second[axis]
    of_second = b.type_of(second.inputs[0]).shape
    if not (is_near and _agree(extents, of_second, axis)):
        return None
    both = b.emit_one(CONCAT, *first.inputs, *second.inputs, axis=axis)
    return b.emit_one(PAD, both, low=low, high=second.attrs.ints("high"), steps=steps)


def _signatures_of(
    inputs: Types, is_whole: Sequence[bool], shares: Sequence[Partial]
) -> list[SbpSignature]:
    """Return the signatures of ops that leave some axes whole, and all others as they are."""
    names = [str(axis) if whole else "" for axis, whole in enumerate(is_whole)]
    signatures = by_axes([names] * len(inputs), [names])
    return [*signatures, *[SbpSignature((share,) * len(inputs), (share,)) for share in shares]]


@sbp_signatures.of(SLICE)
def _slice_signatures(
    inputs: Types, outputs: Types, attrs: Attrs, parts: int
) -> list[SbpSignature]:
    is_whole = [n == m for n, m in zip(inputs[0].shape, outputs[0].shape, strict=True)]
    return _signatures_of(inputs, is_whole, (PARTIAL, PARTIAL_MAX))


@project.of(SLICE)
def _slice_of_part(b: GraphBuilder, call: LocalCall) -> tuple[ValueId, ...]:
    """Take all of what is split."""
    part, full, attrs = b.type_of(call.inputs[0]).shape, call.whole_inputs[0].shape, call.node.attrs
    stops = [
        n if n != whole else stop
        for n, whole, stop in zip(part, full, attrs.ints("stops"), strict=True)
    ]
    return b.emit(SLICE, call.inputs, {**attrs, "stops": tuple(stops)})


@sbp_signatures.of(PAD)
def _pad_signatures(inputs: Types, outputs: Types, attrs: Attrs, parts: int) -> list[SbpSignature]:
    is_whole = [n == m for n, m in zip(inputs[0].shape, outputs[0].shape, strict=True)]
    return _signatures_of(inputs, is_whole, (PARTIAL,))


@sbp_signatures.of(CONCAT)
def _concat_signatures(
    inputs: Types, outputs: Types, attrs: Attrs, parts: int
) -> list[SbpSignature]:
    is_whole = [axis != attrs.int_("axis") for axis in range(outputs[0].rank)]
    return _signatures_of(inputs, is_whole, (PARTIAL, PARTIAL_MAX))
