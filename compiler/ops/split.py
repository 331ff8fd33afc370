"""Cutting a tensor into equal parts: the adjoint of concat.

Several slices of one tensor are the same, but each of their gradients is as large as the tensor;
here one concat brings all parts back at once. Once the gradient is there, slices it becomes: views,
which cost no launch.
"""

from __future__ import annotations

import numpy as np

from compiler.attrs import Attrs
from compiler.graph import GraphBuilder, Node
from compiler.ops.rule import Grads, Values
from compiler.ops.shape import broadcast_value
from compiler.ops.signature import Array, Types, expect_inputs
from compiler.ops.slicing import CONCAT, SLICE
from compiler.ops.sources import scalar
from compiler.registry import OpTypeError, define, infer_type, is_exact, reference
from compiler.rules import gradient, simplify
from compiler.types import TensorType

SPLIT = define("split")
"""x -> `sections` parts of equal extent along an axis. Attrs: axis, sections."""

is_exact.register(SPLIT, True)


@infer_type.of(SPLIT)
def _split_type(inputs: Types, attrs: Attrs) -> Types:
    (x,) = expect_inputs(inputs, "x")
    axis, sections = attrs.int_("axis"), attrs.int_("sections")
    if not 0 <= axis < x.rank:
        raise OpTypeError(f"needs an axis in 0..{x.rank - 1}, got {axis}")
    if sections < 1 or x.shape[axis] % sections:
        raise OpTypeError(
            f"cannot cut extent {x.shape[axis]} of axis {axis} into {sections} equal parts"
        )
    shape = (*x.shape[:axis], x.shape[axis] // sections, *x.shape[axis + 1 :])
    return (TensorType(x.dtype, shape),) * sections


@reference.of(SPLIT)
def _split_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    parts = np.split(inputs[0], attrs.int_("sections"), axis=attrs.int_("axis"))
    return tuple([part.copy() for part in parts])


@gradient.of(SPLIT)
def _split_gradient(b: GraphBuilder, node: Node, grads: Grads) -> Grads:
    parts = []
    for output, grad in zip(node.outputs, grads, strict=True):
        if grad is None:
            type_ = b.type_of(output)
            grad = broadcast_value(b, scalar(b, 0.0, type_.dtype), type_.shape)
        parts.append(grad)
    return (b.one(CONCAT, *parts, axis=node.attrs.int_("axis")),)


@simplify.of(SPLIT)
def _simplify_split(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    axis, sections = node.attrs.int_("axis"), node.attrs.int_("sections")
    shape = b.type_of(inputs[0]).shape
    zeros, steps, extent = (0,) * len(shape), (1,) * len(shape), shape[axis] // sections
    parts = []
    for start in range(0, sections * extent, extent) if extent else [0] * sections:
        starts = (*zeros[:axis], start, *zeros[axis + 1 :])
        stops = (*shape[:axis], start + extent, *shape[axis + 1 :])
        parts.append(b.one(SLICE, *inputs, starts=starts, stops=stops, steps=steps))
    return tuple(parts)
