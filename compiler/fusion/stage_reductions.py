"""Cut reductions in two where one walk over rows and columns cannot make them.

    sum(x[R, K, R'], axes 0 and 2)  ->  sum(sum(x, axis 2), axis 0)
    mean(x, all axes)               ->  mean(mean(x, last axis), the other axes)
    max(transpose(x), axis 0)       ->  max(x, the axis that this is)
    argmax(x, axis 0)               ->  argmax(transpose(x), last axis)

A fused kernel reduces the last axes or the first ones, and the kernels beside it reduce neighbours,
all of them on dense tensors. One row of all elements could not be walked over together with what
made it. The mean of equally many means is the mean.

Guarantees: the same values but for rounding; reduced axes are neighbours, but in short floats,
which would be rounded twice; no other node changes.
"""

from __future__ import annotations

from dataclasses import replace

from compiler.attrs import Attrs
from compiler.graph import Graph, Node, new_value
from compiler.ops.reduce import ARGMAX, MAX, MEAN, SUM, reduced_shape
from compiler.ops.shape import RESHAPE, TRANSPOSE
from compiler.types import HALVES, TensorType, ValueId


def stage_reductions(graph: Graph) -> Graph:
    """Return the graph with reductions in as many nodes as they need. O(nodes)."""
    types = list(graph.types)
    turned = {node.outputs[0]: node for node in graph.nodes if node.op is TRANSPOSE}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op is ARGMAX:
            nodes += _over_last_axis(node, types)
        elif node.op in (SUM, MEAN, MAX):
            nodes += _staged(_before_transpose(node, turned), types)
        else:
            nodes.append(node)
    if all([before is after for before, after in zip(graph.nodes, nodes, strict=False)]):
        return graph
    return replace(graph, nodes=tuple(nodes), types=tuple(types))


def _before_transpose(node: Node, turned: dict[ValueId, Node]) -> Node:
    """Return a reduction of what a transpose shows, where the axes that are left keep order."""
    before, axes = turned.get(node.inputs[0]), node.attrs.ints("axes")
    if before is None or node.attrs.bool_("keepdims"):
        return node
    perm = before.attrs.ints("perm")
    left = [own for axis, own in enumerate(perm) if axis not in axes]
    if left != sorted(left):
        return node
    own_axes = tuple(sorted([perm[axis] for axis in axes]))
    attrs = Attrs({"axes": own_axes, "keepdims": False})
    return replace(node, inputs=before.inputs, attrs=attrs)


def _staged(node: Node, types: list[TensorType]) -> list[Node]:
    """Return the reductions that stand for one, the last axes first."""
    x, axes = types[node.inputs[0]], node.attrs.ints("axes")
    wide = [axis for axis, n in enumerate(x.shape) if n != 1]
    if set(wide) <= {*axes}:
        is_cut = x.dtype.is_float and len(wide) > 1
        return [*_split(node, tuple(wide[-1:]), types)] if is_cut else [node]
    last: list[int] = []
    for axis in reversed(wide):
        if axis in axes:
            last.insert(0, axis)
        elif last:
            break
    is_short = x.dtype in HALVES
    if is_short or not {*wide} & {*axes} - {*last}:
        return [node]
    first, others = _split(node, tuple(last), types)
    return [first, *_staged(others, types)]


def _split(node: Node, stage: tuple[int, ...], types: list[TensorType]) -> tuple[Node, Node]:
    """Return the reduction over some axes of a node's, and that over the others."""
    x, is_kept = types[node.inputs[0]], node.attrs.bool_("keepdims")
    first = Attrs({"axes": stage, "keepdims": is_kept})
    middle = new_value(types, TensorType(x.dtype, reduced_shape(first, x.shape)))
    rest = [axis for axis in node.attrs.ints("axes") if axis not in stage]
    if not is_kept:
        rest = [axis - len([gone for gone in stage if gone < axis]) for axis in rest]
    others = Attrs({"axes": tuple(rest), "keepdims": is_kept})
    return (
        replace(node, outputs=(middle,), attrs=first),
        replace(node, inputs=(middle,), attrs=others),
    )


def _over_last_axis(node: Node, types: list[TensorType]) -> list[Node]:
    """Return an argmax over the last axis, in front of which the axis is moved there.

    The argmax comes last, for it may be an output of the job, which no view is.
    """
    x, axis = types[node.inputs[0]], node.attrs.int_("axis")
    if all([n == 1 for n in x.shape[axis + 1 :]]):
        return [node]
    perm = (*[own for own in range(x.rank) if own != axis], axis)
    over = (*types[node.outputs[0]].shape, x.shape[axis])
    turned = new_value(types, TensorType(x.dtype, tuple([x.shape[own] for own in perm])))
    shown = new_value(types, TensorType(x.dtype, over))
    last = Attrs({"axis": len(over) - 1, "keepdims": False})
    return [
        replace(node, op=TRANSPOSE, outputs=(turned,), attrs=Attrs({"perm": perm})),
        replace(node, op=RESHAPE, inputs=(turned,), outputs=(shown,), attrs=Attrs({"shape": over})),
        replace(node, inputs=(shown,), attrs=last),
    ]
