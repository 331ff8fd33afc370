"""Put the program of every update into its node, and let its operands lie as kernels read them.

    sgd_update(param, grad, lr)       ->  sgd_update(param, copy(grad), lr), with program, space
    sgd_update(param, grad * c, lr)   ->  sgd_update(param, grad, lr, c), whose program multiplies

Updates join no cluster of `fuse`: they write over what others read. So what is done to a gradient
element by element for its update alone, such as clipping it, becomes part of the update's program:
numbers that it needs follow the operands that the update has anyway. A gradient whose rows lie
unevenly, as a transposed one, is copied first.

Guarantees: every op with an `update` cell carries a fused program on operands in even rows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from compiler.attrs import NO_ATTRS, Attrs
from compiler.fusion.builder import ProgramBuilder
from compiler.fusion.expansion import expand, frame, pointwise_frame
from compiler.fusion.program import GRADIENT, FusedProgram, Kind, ProgramInput
from compiler.fusion.spaces import Space, row_stride
from compiler.fusion.updates import update
from compiler.graph import Graph, Node, new_value, sole_readers
from compiler.lowering.storage import assign_storage
from compiler.ops.fused import FUSED, fused_attrs
from compiler.ops.shape import COPY
from compiler.ops.update import is_update
from compiler.registry import Layout, Op, Types, runs_as
from compiler.types import Phase, TensorType, ValueId


def update_programs(graph: Graph) -> Graph:
    """Return the graph with updates that carry their programs. O(nodes)."""
    if not any([update.has(node.op) for node in graph.nodes]):
        return graph
    layout, types = assign_storage(graph).layout, list(graph.types)
    taken_in = {i: _taken_in(graph, i) for i, node in enumerate(graph.nodes) if _has_program(node)}
    gone = {id(step) for steps in taken_in.values() for step in steps}
    nodes: list[Node] = []
    for index, node in enumerate(graph.nodes):
        if id(node) in gone:
            continue
        if not update.has(node.op):
            nodes.append(node)
        elif index in taken_in:
            steps = taken_in[index]
            node = _with_operands_of(node, steps)
            copies, inputs = _in_rows(node, layout, types)
            own = tuple([types[v] for v in inputs])
            before = tuple([(step.op, step.attrs, len(step.inputs)) for step in steps])
            attrs = _attrs(node.op, own, node.attrs, before)
            nodes += [*copies, replace(node, inputs=inputs, attrs=attrs)]
        else:  # the gradient of a table is made row by row, and lies as the table
            table, _, _, *rest = [types[v] for v in node.inputs]
            nodes.append(replace(node, attrs=_attrs(node.op, (table, table, *rest), node.attrs)))
    return replace(graph, nodes=tuple(nodes), types=tuple(types))


def _has_program(node: Node) -> bool:
    return update.has(node.op) and runs_as.get(node.op) == FUSED.name


def _taken_in(graph: Graph, index: int) -> tuple[Node, ...]:
    """Return what is done to the gradient of an update for it alone, in order.

    Each step reads the gradient first, and numbers besides.
    """
    node, alone, makers = graph.nodes[index], sole_readers(graph), graph.producers()
    if not is_update(node):  # a counter
        return ()
    value, reader, steps = node.inputs[GRADIENT], index, list[Node]()
    while alone[value] == reader:
        reader = makers[value]
        step = graph.nodes[reader]
        if (
            step.phase is not Phase.UPDATE
            or step.device != node.device
            or not _is_by_numbers(graph, step)
        ):
            break
        steps.insert(0, step)
        value = step.inputs[0]
    return tuple(steps)


def _is_by_numbers(graph: Graph, step: Node) -> bool:
    if (
        not expand.has(step.op)
        or frame.get(step.op) is not pointwise_frame
        or len(step.outputs) != 1
    ):
        return False
    first, *others = [graph.types[v] for v in step.inputs]
    return first == graph.types[step.outputs[0]] and not any([t.shape for t in others])


def _with_operands_of(node: Node, steps: tuple[Node, ...]) -> Node:
    """Return an update that reads what its steps read."""
    if not steps:
        return node
    count = update.get(node.op).num_operands
    more = [v for step in steps for v in step.inputs[1:]]
    own = (*node.inputs[:GRADIENT], steps[0].inputs[0], *node.inputs[GRADIENT + 1 : count])
    return replace(node, inputs=(*own, *more, *node.inputs[count:]))


_Steps = tuple[tuple[Op, Attrs, int], ...]
"""Ops that come before an update, their attributes, and how many operands they have."""


@lru_cache(maxsize=4096)  # layers repeat, and share what they are alike in
def _attrs(op: Op, operands: Types, attrs: Attrs, before: _Steps = ()) -> Attrs:
    """Return what a fused kernel of the update has as attributes, and its own."""
    found, shape = update.get(op), operands[0].shape
    space = Space(math.prod(shape[:-1]), math.prod(shape[-1:]))
    program = found.program_for(operands, attrs)
    if before:
        program = _after(program, before, operands)
    own = fused_attrs(program, space, (shape,) * len(found.over), (op.name,))
    return Attrs({**attrs, **own})


def _after(program: FusedProgram, before: _Steps, operands: Types) -> FusedProgram:
    """Return a program on a gradient to which other steps are done before."""
    p = ProgramBuilder(1, 1)
    values = [p.input(operand) for operand in program.inputs]
    gradient, at = values[GRADIENT], len(values)
    numbers = sum([count - 1 for _, _, count in before])
    more = [p.input(ProgramInput(t.dtype, Kind.SCALAR)) for t in operands[at : at + numbers]]
    for op, attrs, count in before:
        types = (operands[GRADIENT], *operands[at : at + count - 1])
        (gradient,) = expand.get(op)(p, attrs, types, (gradient, *more[: count - 1]))
        at, more = at + count - 1, more[count - 1 :]
    values[GRADIENT] = gradient
    return p.whole(p.replay(program, tuple(values)))


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
