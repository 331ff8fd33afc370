"""Put the program of every update into its node, and let its operands lie as kernels read them.

    sgd_update(param, grad, lr)  ->  sgd_update(param, copy(grad), lr), with program and space

Updates join no cluster of `fuse`: they write over what others read. A gradient whose rows lie
unevenly, as a transposed one, is copied first.

Guarantees: every op with an `update` cell carries a fused program on operands in even rows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from compiler.attrs import NO_ATTRS, Attrs
from compiler.fusion.program import Kind
from compiler.fusion.spaces import Space, row_stride
from compiler.fusion.updates import update
from compiler.graph import Graph, Node, new_value
from compiler.lowering.storage import assign_storage
from compiler.ops.fused import FUSED, fused_attrs
from compiler.ops.shape import COPY
from compiler.registry import Layout, Op, Types, runs_as
from compiler.types import TensorType, ValueId


def update_programs(graph: Graph) -> Graph:
    """Return the graph with updates that carry their programs. O(nodes)."""
    if not any([update.has(node.op) for node in graph.nodes]):
        return graph
    layout, types = assign_storage(graph).layout, list(graph.types)
    nodes: list[Node] = []
    for node in graph.nodes:
        if not update.has(node.op):
            nodes.append(node)
        elif runs_as.get(node.op) == FUSED.name:
            copies, inputs = _in_rows(node, layout, types)
            own = tuple([types[v] for v in inputs])
            nodes += [*copies, replace(node, inputs=inputs, attrs=_attrs(node.op, own, node.attrs))]
        else:  # the gradient of a table is made row by row, and lies as the table
            table, _, _, *rest = [types[v] for v in node.inputs]
            nodes.append(replace(node, attrs=_attrs(node.op, (table, table, *rest), node.attrs)))
    return replace(graph, nodes=tuple(nodes), types=tuple(types))


@lru_cache(maxsize=4096)  # layers repeat, and share what they are alike in
def _attrs(op: Op, operands: Types, attrs: Attrs) -> Attrs:
    """Return what a fused kernel of the update has as attributes, and its own."""
    found, shape = update.get(op), operands[0].shape
    space = Space(math.prod(shape[:-1]), math.prod(shape[-1:]))
    program = found.program_for(operands, attrs)
    own = fused_attrs(program, space, (shape,) * len(found.over), (op.name,))
    return Attrs({**attrs, **own})


def _in_rows(
    node: Node, layout: tuple[Layout, ...], types: list[TensorType]
) -> tuple[list[Node], tuple[ValueId, ...]]:
    """Return the inputs of an update, with copies of those whose rows lie unevenly."""
    copies: list[Node] = []
    inputs: list[ValueId] = []
    columns = math.prod(types[node.inputs[0]].shape[-1:])
    for value in node.inputs:
        type_ = types[value]
        strides = tuple([step // type_.dtype.itemsize for step in layout[value].strides_bytes])
        if type_.shape and row_stride(Kind.FULL, columns, type_.shape, strides) is None:
            made = new_value(types, type_)
            copies.append(replace(node, op=COPY, inputs=(value,), outputs=(made,), attrs=NO_ATTRS))
            value = made
        inputs.append(value)
    return copies, tuple(inputs)
