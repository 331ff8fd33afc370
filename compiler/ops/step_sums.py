"""A sum over the steps of a scan, as one op on what the steps made, stacked.

    the sum over t of x[t].T @ dy[t]   ->  reshape(x).T @ reshape(dy)
    the sum over t of sum(dy[t], axes)  ->  sum(dy, (0, axes + 1))

So a weight's gradient is one large product after the loop, not a small one and a pass over the
whole weight in every step. What is summed may be a sum of such, under another shape or transposed.
"""

from __future__ import annotations

from collections.abc import Mapping

from compiler.graph import GraphBuilder
from compiler.ops.binary import ADD
from compiler.ops.matmul import MATMUL
from compiler.ops.reduce import SUM
from compiler.ops.shape import RESHAPE, TRANSPOSE, is_swapped, reshape_to, swap_last_axes
from compiler.types import ValueId

_SEEN_ANEW = (RESHAPE, TRANSPOSE)


Addends = dict[ValueId, bool]
"""What must be stacked, and whether that is worth it though nobody else stacks it."""


def addends(b: GraphBuilder, value: ValueId) -> Addends | None:
    """Return what must be stacked for the sum of a value over all steps; None where it must run.

    For a product it is worth its memory; for a sum over axes only where it is stacked anyway.
    """
    node = b.producer_of(value)
    if node.op in _SEEN_ANEW:
        return addends(b, node.inputs[0])
    if node.op is ADD and b.type_of(node.inputs[0]) == b.type_of(node.inputs[1]):
        one, other = [addends(b, v) for v in node.inputs]
        if one is None or other is None:
            return None
        return {v: one.get(v, False) or other.get(v, False) for v in (*one, *other)}
    if node.op is SUM:
        return {node.inputs[0]: False}
    is_plain = node.op is MATMUL and not node.attrs and b.type_of(value).rank == 2
    if is_plain and b.type_of(node.inputs[1]).rank == 2 and is_swapped(b, node.inputs[0]):
        return {b.producer_of(node.inputs[0]).inputs[0]: True, node.inputs[1]: True}
    return None


def emit_sum(
    b: GraphBuilder, inside: GraphBuilder, value: ValueId, stacked: Mapping[ValueId, ValueId]
) -> ValueId:
    """Emit the sum over all steps of a value of a body, of its addends of all steps."""
    node, type_ = inside.producer_of(value), inside.type_of(value)
    if node.op in _SEEN_ANEW:
        return b.one(node.op, emit_sum(b, inside, node.inputs[0], stacked), **node.attrs)
    if node.op is ADD:
        one, other = [emit_sum(b, inside, v, stacked) for v in node.inputs]
        return b.one(ADD, one, other)
    if node.op is SUM:
        axes = (0, *[axis + 1 for axis in node.attrs.ints("axes")])
        total = b.one(SUM, stacked[node.inputs[0]], axes=axes, keepdims=False)
        return reshape_to(b, total, type_.shape)
    parts = (inside.producer_of(node.inputs[0]).inputs[0], node.inputs[1])
    left, right = [_rows(b, stacked[part]) for part in parts]
    return b.one(MATMUL, swap_last_axes(b, left), right)


def _rows(b: GraphBuilder, value: ValueId) -> ValueId:
    """Return matrices of all steps as one, with the rows of one after the other's."""
    steps, rows, columns = b.type_of(value).shape
    return reshape_to(b, value, (steps * rows, columns))
