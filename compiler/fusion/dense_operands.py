"""Make ready what a fused kernel cannot read as it lies, so that no op with a program is left.

    add(x, transpose(y))                  ->  add(x, copy(transpose(y)))
    add(x[8, 6, 4, c], y[8, 1, 4, 1])     ->  add(x, copy(broadcast_to(y, [8, 6, 4, 1])))

Operands are read row by row: rows that lie unevenly spaced, and such as are repeated in the middle,
are copied to a dense tensor first. What walks over no elements becomes a kernel without operands.

Guarantees: the same bits; every node that has a frame fits its natural space.
"""

from __future__ import annotations

import math
from dataclasses import replace

from compiler.attrs import NO_ATTRS, Attrs
from compiler.fusion.builder import ProgramBuilder
from compiler.fusion.members import Members
from compiler.fusion.program import Kind
from compiler.fusion.spaces import Shape, Space, access_of
from compiler.graph import Graph, Node, new_value
from compiler.ops.fused import FUSED, fused_attrs
from compiler.ops.shape import BROADCAST_TO, COPY, RESHAPE
from compiler.registry import Op
from compiler.types import TensorType, ValueId


def dense_operands(graph: Graph) -> Graph:
    """Return the graph with copies in front of the nodes that need them. O(nodes)."""
    members = Members(graph)
    types = list(graph.types)
    nodes: list[Node] = []
    for index, node in enumerate(graph.nodes):
        space = members.natural_space(index)
        if space is None:
            nodes.append(node)
        elif space.rows * space.columns == 0:
            nodes.append(_of_nothing(node, space, types))
        elif not _is_plain(members, index, space) and members.fit(index, space, {}) is None:
            nodes += _with_copies(members, index, space, types)
        else:
            nodes.append(node)
    if all([before is after for before, after in zip(graph.nodes, nodes, strict=False)]):
        return graph
    return replace(graph, nodes=tuple(nodes), types=tuple(types))


def _is_plain(members: Members, index: int, space: Space) -> bool:
    """Whether a node reads dense tensors as they are: most do, and need no closer look."""
    found, root = members.frame_of(index), members.storage.root
    if found is None or any([root[v] != v for v in members.graph.nodes[index].inputs]):
        return False
    operands = (*found.inputs, *found.outputs)
    return None not in [access_of(s, found.shape, space.columns) for s in operands]


def _of_nothing(node: Node, space: Space, types: list[TensorType]) -> Node:
    """Return a kernel that makes what follows from no elements: more of them, and sums of 0.

    Sums over no columns are as many as there are rows, those over no rows as many as there are
    columns; here both are seen as rows.
    """
    outputs = [types[v] for v in node.outputs]
    space = Space(max(space.rows, space.columns), 0)
    p = ProgramBuilder(space.rows, space.columns)
    made = [
        p.widened(p.constant(0, type_.dtype), Kind.ROW if type_.num_elements else Kind.FULL)
        for type_ in outputs
    ]
    program, _ = p.finish(tuple(made))
    shapes = tuple([type_.shape for type_ in outputs])
    attrs = Attrs(fused_attrs(program, space, shapes, (node.op.name,)))
    return replace(node, op=FUSED, inputs=(), attrs=attrs)


def _with_copies(members: Members, index: int, space: Space, types: list[TensorType]) -> list[Node]:
    """Return a node behind the copies of those operands that no row can be read of."""
    found = members.frame_of(index)
    node = members.graph.nodes[index]
    if found is None:
        return [node]
    copies = _DenseCopies(node, types)
    inputs: list[ValueId] = []
    for value, shape in zip(node.inputs, found.inputs, strict=True):
        if not members.can_read(value, access_of(shape, found.shape, space.columns), space):
            value = copies.add(value, shape, _stretched(shape, found.shape, space))
        inputs.append(value)
    return [*copies.made, replace(node, inputs=tuple(inputs))]


def _stretched(shape: Shape, walked: Shape, space: Space) -> Shape:
    """Return the least shape to which an operand must be repeated so that its rows can be read."""
    if access_of(shape, walked, space.columns) is not None:
        return shape
    own = (1,) * (len(walked) - len(shape)) + shape
    first = max([n for n in range(len(walked) + 1) if math.prod(walked[n:]) == space.columns])
    by_rows = (*walked[:first], *own[first:])
    return walked if access_of(by_rows, walked, space.columns) is None else by_rows


class _DenseCopies:
    """Dense copies in front of a node, which they share scope and source with."""

    def __init__(self, node: Node, types: list[TensorType]) -> None:
        self.made: list[Node] = []
        self._node = node
        self._types = types

    def add(self, value: ValueId, shape: Shape, stretched: Shape) -> ValueId:
        """Return a copy of a value that lies as `shape` and is repeated to `stretched`."""
        if stretched != shape:
            own = self._types[value].shape
            if own != shape[len(shape) - len(own) :]:
                value = self._emit(RESHAPE, Attrs({"shape": shape}), value, shape)
            value = self._emit(BROADCAST_TO, Attrs({"shape": stretched}), value, stretched)
        return self._emit(COPY, NO_ATTRS, value, self._types[value].shape)

    def _emit(self, op: Op, attrs: Attrs, value: ValueId, shape: Shape) -> ValueId:
        made = new_value(self._types, TensorType(self._types[value].dtype, shape))
        self.made.append(replace(self._node, op=op, inputs=(value,), outputs=(made,), attrs=attrs))
        return made
