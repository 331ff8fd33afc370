"""Cutting a tensor into equal parts: the adjoint of concat.

Several slices of one tensor would do as well, but each of their gradients is as large as the
tensor; here one concat brings all parts back at once.
"""

from __future__ import annotations

import numpy as np

from compiler.attrs import Attrs
from compiler.graph import GraphBuilder, Node
from compiler.ops.rule import Grads
from compiler.ops.shape import broadcast_value
from compiler.ops.signature import Array, Types, expect_inputs
from compiler.ops.slicing import CONCAT
from compiler.ops.sources import scalar
from compiler.registry import OpTypeError, define, infer_type, is_exact, reference
from compiler.rules import gradient
from compiler.types import TensorType

SPLIT = define("split")
"""x -> `sections` dense parts of equal extent along an axis. Attrs: axis, sections."""

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
