"""Graphs made ready for fusion: `stage_reductions`, `narrow_broadcasts`, then `dense_operands`."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from compiler.contract.attrs import NO_ATTRS, Attrs
from compiler.contract.program import Kind
from compiler.contract.spaces import Shape, Space, access_of
from compiler.contract.types import HALVES, DType, TensorType, ValueId, encoded
from compiler.fusion.members import FusionCandidates
from compiler.graph.graph import Graph, Node, consumers, new_value
from compiler.graph.program_builder import ProgramBuilder, expand, frame, pointwise_frame
from compiler.graph.registry import Op, broadcast_shape, is_exact, reference
from compiler.ops.families.embedding import EMBEDDING, EMBEDDING_GRAD
from compiler.ops.language.program_ops import FUSED, fused_attrs
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import ARGMAX, MAX, MEAN, SUM, reduced_shape
from compiler.ops.primitives.shape import BROADCAST_TO, CAST, COPY, RESHAPE, TRANSPOSE
from compiler.ops.primitives.sources import CONSTANT, constant_array
from compiler.storage.storage import assign_storage

# Copy what a fused kernel cannot read as it lies, so that no op with a program is left.
#
#     add(x, transpose(y))                  ->  add(x, copy(transpose(y)))
#     add(x[8, 6, 4, c], y[8, 1, 4, 1])     ->  add(x, copy(broadcast_to(y, [8, 6, 4, 1])))
#
#     matmul(transpose(x), y)               ->  matmul(copy(transpose(x)), y)
#     embedding(transpose(x), ids)          ->  embedding(copy(transpose(x)), ids)
#
# Operands are read row by row: rows that lie unevenly spaced, and such as are repeated in the
# middle, are copied to a dense tensor first. What walks over no elements becomes a kernel without
# operands. Matrices of products and rows that ids pick are copied where their elements are apart.
#
# Guarantees: the same bits; every node that has a frame fits its natural space.


def dense_operands(graph: Graph) -> Graph:
    """Return the graph with copies in front of the nodes that need them. O(nodes)."""
    members = FusionCandidates(graph)
    types = list(graph.types)
    nodes: list[Node] = []
    rows = _RowCopies(graph, types)
    for index, node in enumerate(graph.nodes):
        space = members.natural_space(index)
        if space is None:
            nodes += rows.before(index)
        elif space.rows * space.columns == 0:
            nodes.append(_of_nothing(node, space, types))
        elif not _is_plain(members, index, space) and members.fit(index, space, {}) is None:
            nodes += _with_copies(members, index, space, types)
        else:
            nodes.append(node)
    # By identity: most graphs need nothing, and keep their cached analyses.
    if all([before is after for before, after in zip(graph.nodes, nodes, strict=False)]):
        return graph
    return replace(graph, nodes=tuple(nodes), types=tuple(types))


class _RowCopies:
    """Copies for what reads tensors by rows and computes nothing that is fused.

    A product reads rows or columns of matrices, and what picks rows by ids or adds them up reads
    those of its first operand; without adjacent elements in them it would be computed one by one.
    A copy serves all that read its value, and a matrix is read in both directions.
    """

    def __init__(self, graph: Graph, types: list[TensorType]) -> None:
        self._graph, self._types = graph, types
        self._storage = assign_storage(graph)
        self._bases: dict[ValueId, ValueId] = {}
        self._copies: dict[tuple[object, ...], tuple[ValueId, bool]] = {}

    def before(self, index: int) -> list[Node]:
        """Return a node behind the copies of its operands that it is the first to need."""
        node = self._graph.nodes[index]
        if not self._storage.is_launch[index] and node.inputs:
            self._bases[node.outputs[0]] = self._base(node.inputs[0])
        if node.op not in _BY_ROWS:
            return [node]
        copies, inputs = _DenseCopies(node, self._types), list(node.inputs)
        for number in _BY_ROWS[node.op]:
            inputs[number] = self._read(node, inputs[number], copies)
        is_same = tuple(inputs) == node.inputs
        return [node] if is_same else [*copies.made, replace(node, inputs=tuple(inputs))]

    def _base(self, value: ValueId) -> ValueId:
        return self._bases.get(value, value)

    def _read(self, node: Node, value: ValueId, copies: _DenseCopies) -> ValueId:
        """Return a value, or a copy of it where a node needs one."""
        layout, type_ = self._storage.layout[value], self._types[value]
        steps = layout.strides_bytes
        axes = range(-2, 0) if node.op is MATMUL else range(-1, 0)
        # A number that is repeated is read as it is.
        near = (0, type_.dtype.itemsize)
        if 0 in type_.shape or any([type_.shape[a] == 1 or steps[a] in near for a in axes]):
            return value
        if node.op is EMBEDDING and _are_few(self._types[node.inputs[1]], type_):
            return value
        turned = (*range(type_.rank - 2), type_.rank - 1, type_.rank - 2)
        is_turned = type_.rank > 1 and steps[-2] < steps[-1]
        order = turned if is_turned else range(type_.rank)
        key = (
            *(self._base(value), layout.offset_bytes),
            *[(type_.shape[axis], steps[axis]) for axis in order],
        )
        if key not in self._copies:
            self._copies[key] = copies.add(value, type_.shape, type_.shape), is_turned
        copy, was_turned = self._copies[key]
        return copy if is_turned == was_turned else copies.turn(copy, turned)


def _are_few(ids: TensorType, table: TensorType) -> bool:
    """Whether copying a table moves more than picking rows whose elements are in lines of others.

    A line has 64 bytes, and is written as well where it is copied.
    """
    return ids.num_elements * 32 // table.dtype.itemsize < table.shape[0]


_BY_ROWS = {MATMUL: (0, 1), EMBEDDING: (0,), EMBEDDING_GRAD: (0,)}
"""The operands that are read so."""


def _is_plain(members: FusionCandidates, index: int, space: Space) -> bool:
    """Whether a node reads dense tensors as they are: most do, and need no closer look."""
    domain, root = members.frame_of(index), members.storage.root
    if domain is None or any([root[v] != v for v in members.graph.nodes[index].inputs]):
        return False
    operands = (*domain.inputs, *domain.outputs)
    return None not in [access_of(s, domain.shape, space.columns) for s in operands]


def _of_nothing(node: Node, space: Space, types: list[TensorType]) -> Node:
    """Return a kernel that makes what follows from no elements: more of them, and sums of 0.

    Sums over no columns are as many as there are rows, those over no rows as many as there are
    columns; here both are seen as rows.
    """
    outputs = [types[v] for v in node.outputs]
    space = Space(max(space.rows, space.columns), 0)
    p = ProgramBuilder(space.rows, space.columns)
    zeros = [
        p.widened(p.constant(0, type_.dtype), Kind.ROW if type_.num_elements else Kind.FULL)
        for type_ in outputs
    ]
    program, _ = p.finish(tuple(zeros))
    shapes = tuple([type_.shape for type_ in outputs])
    attrs = Attrs(fused_attrs(program, space, shapes, (node.op.name,)))
    return replace(node, op=FUSED, inputs=(), attrs=attrs)


def _with_copies(
    members: FusionCandidates, index: int, space: Space, types: list[TensorType]
) -> list[Node]:
    """Return a node behind the copies of those operands that no row can be read of."""
    domain = members.frame_of(index)
    node = members.graph.nodes[index]
    if domain is None:
        return [node]
    copies = _DenseCopies(node, types)
    inputs: list[ValueId] = []
    for value, shape in zip(node.inputs, domain.inputs, strict=True):
        if not members.can_read(value, access_of(shape, domain.shape, space.columns), space):
            value = copies.add(value, shape, _stretched(shape, domain.shape, space))
        inputs.append(value)
    return [*copies.made, replace(node, inputs=tuple(inputs))]


def _stretched(shape: Shape, walked: Shape, space: Space) -> Shape:
    """Return the least shape to which an operand must be repeated so that its rows can be read."""
    if access_of(shape, walked, space.columns) is not None:
        return shape
    aligned = (1,) * (len(walked) - len(shape)) + shape
    first = max([n for n in range(len(walked) + 1) if math.prod(walked[n:]) == space.columns])
    by_rows = (*walked[:first], *aligned[first:])
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
            extents = self._types[value].shape
            # A broadcast aligns at the last axis, which a reshape has to arrange first.
            if extents != shape[len(shape) - len(extents) :]:
                value = self._emit(RESHAPE, Attrs({"shape": shape}), value, shape)
            value = self._emit(BROADCAST_TO, Attrs({"shape": stretched}), value, stretched)
        return self._emit(COPY, NO_ATTRS, value, self._types[value].shape)

    def turn(self, value: ValueId, perm: tuple[int, ...]) -> ValueId:
        """Return a view of a value with its axes in another order."""
        shape = tuple([self._types[value].shape[axis] for axis in perm])
        return self._emit(TRANSPOSE, Attrs({"perm": perm}), value, shape)

    def _emit(self, op: Op, attrs: Attrs, value: ValueId, shape: Shape) -> ValueId:
        new = new_value(self._types, TensorType(self._types[value].dtype, shape))
        self.made.append(replace(self._node, op=op, inputs=(value,), outputs=(new,), attrs=attrs))
        return new


# Compute before a broadcast what is computed of its elements alone.
#
#     broadcast_to(a) * broadcast_to(b)  ->  broadcast_to(a * b)
#
# as in the gradient of a mean, which is one number for every element; a number computed of
# constants is a constant. Only where all that read the result can be part of a fused kernel, for
# those look through the broadcast; other kernels may be slower on a tensor of one element repeated.
#
# Guarantees: the same bits; no other node changes.


def narrow_broadcasts(graph: Graph) -> Graph:
    """Return the graph with narrower elementwise ops. O(nodes)."""
    if not any([node.op is BROADCAST_TO for node in graph.nodes]):
        return graph
    readers, roots = consumers(graph), frozenset(graph.roots())
    types = list(graph.types)
    narrow: dict[ValueId, ValueId] = {}
    numbers: dict[ValueId, Node] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op is CONSTANT:
            numbers[node.outputs[0]] = node
        elif node.op is RESHAPE and node.inputs[0] in numbers:
            numbers[node.outputs[0]] = numbers[node.inputs[0]]
        elif node.op is BROADCAST_TO:
            narrow[node.outputs[0]] = narrow.get(node.inputs[0], node.inputs[0])
        elif (
            any([v in narrow for v in node.inputs])
            and _is_pointwise(node)
            and node.outputs[0] not in roots
        ):
            inputs = tuple([narrow.get(v, v) for v in node.inputs])
            type_ = types[node.outputs[0]]
            shape = broadcast_shape(*[types[v].shape for v in inputs])
            are_ready = all([expand.has(graph.nodes[n].op) for n in readers[node.outputs[0]]])
            if math.prod(shape) < type_.num_elements and are_ready:
                smaller = narrow[node.outputs[0]] = new_value(types, TensorType(type_.dtype, shape))
                nodes.append(
                    _evaluated(replace(node, inputs=inputs, outputs=(smaller,)), numbers, types)
                )
                stretched = Attrs({"shape": type_.shape})
                node = replace(node, op=BROADCAST_TO, inputs=(smaller,), attrs=stretched)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes), types=tuple(types))


def _evaluated(node: Node, numbers: dict[ValueId, Node], types: list[TensorType]) -> Node:
    """Return a constant for a node of constants of one element, where all kernels give one bit."""
    (value,) = node.outputs
    type_ = types[value]
    constants = [numbers.get(v) for v in node.inputs]
    if type_.num_elements != 1 or not is_exact.get(node.op):
        return node
    arrays = [constant_array(number) for number in constants if number is not None]
    # An operand that is no constant.
    if len(arrays) < len(constants):
        return node
    with np.errstate(all="ignore"):
        (array,) = reference.get(node.op)(node.attrs, *arrays)
    data = encoded(np.asarray(array), type_.dtype)
    attrs = Attrs({"dtype": type_.dtype.value, "shape": type_.shape, "data": data})
    numbers[value] = replace(node, op=CONSTANT, inputs=(), attrs=attrs)
    return numbers[value]


def _is_pointwise(node: Node) -> bool:
    """Whether a node computes each element of its one output from those in the same place."""
    is_plain = frame.get(node.op) is pointwise_frame
    return expand.has(node.op) and is_plain and len(node.outputs) == 1 and bool(node.inputs)


# Cut reductions in two where one walk over rows and columns cannot make them.
#
#     sum(x[R, K, R'], axes 0 and 2)  ->  sum(sum(x, axis 2), axis 0)
#     mean(x, all axes)               ->  mean(mean(x, last axis), the other axes)
#     max(transpose(x), axis 0)       ->  max(x, the axis that this is)
#     argmax(x, axis 0)               ->  argmax(transpose(x), last axis)
#
# A fused kernel reduces the last axes or the first ones, and the kernels beside it reduce
# neighbours, all of them on dense tensors. One row of all elements could not be walked over
# together with what made it. The mean of equally many means is the mean.
#
# Floats of 16 bits are cast up before several stages, and down behind them: what a stage leaves
# would be rounded, and overflow, where the result does neither.
#
# Guarantees: the same values but for rounding; reduced axes are neighbours; no other node changes.


def stage_reductions(graph: Graph) -> Graph:
    """Return the graph with reductions in as many nodes as they need. O(nodes)."""
    types = list(graph.types)
    turned = {node.outputs[0]: node for node in graph.nodes if node.op is TRANSPOSE}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op is ARGMAX:
            nodes += _over_last_axis(node, types)
        elif node.op in (SUM, MEAN, MAX):
            nodes += _staged_wide(_before_transpose(node, turned), types)
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
    remaining = [source for axis, source in enumerate(perm) if axis not in axes]
    # What is left must come in the same order, else the transpose is still needed.
    if remaining != sorted(remaining):
        return node
    own_axes = tuple(sorted([perm[axis] for axis in axes]))
    attrs = Attrs({"axes": own_axes, "keepdims": False})
    return replace(node, inputs=before.inputs, attrs=attrs)


def _staged_wide(node: Node, types: list[TensorType]) -> list[Node]:
    """Return the reductions that stand for one, in float32 where there are several of 16 bits."""
    (x,), (y,), count = node.inputs, node.outputs, len(types)
    stages = _staged(node, types)
    if len(stages) == 1 or types[x].dtype not in HALVES:
        return stages
    # The stages are made again for float32: values of the first try are dropped.
    del types[count:]
    wide_x, wide_y = [
        new_value(types, replace(types[value], dtype=DType.FLOAT32)) for value in (x, y)
    ]
    up, down = [Attrs({"dtype": dtype.value}) for dtype in (DType.FLOAT32, types[x].dtype)]
    return [
        replace(node, op=CAST, inputs=(x,), outputs=(wide_x,), attrs=up),
        *_staged(replace(node, inputs=(wide_x,), outputs=(wide_y,)), types),
        replace(node, op=CAST, inputs=(wide_y,), outputs=(y,), attrs=down),
    ]


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
    if not {*wide} & {*axes} - {*last}:
        return [node]
    first, others = _split(node, tuple(last), types)
    return [first, *_staged(others, types)]


def _split(node: Node, stage: tuple[int, ...], types: list[TensorType]) -> tuple[Node, Node]:
    """Return the reduction over some axes of a node's, and that over the others."""
    x, is_kept = types[node.inputs[0]], node.attrs.bool_("keepdims")
    first = Attrs({"axes": stage, "keepdims": is_kept})
    middle = new_value(types, TensorType(x.dtype, reduced_shape(first, x.shape)))
    remaining = [axis for axis in node.attrs.ints("axes") if axis not in stage]
    if not is_kept:
        remaining = [axis - len([lower for lower in stage if lower < axis]) for axis in remaining]
    others = Attrs({"axes": tuple(remaining), "keepdims": is_kept})
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
    perm = (*[i for i in range(x.rank) if i != axis], axis)
    shape = (*types[node.outputs[0]].shape, x.shape[axis])
    turned = new_value(types, TensorType(x.dtype, tuple([x.shape[i] for i in perm])))
    rows = new_value(types, TensorType(x.dtype, shape))
    last = Attrs({"axis": len(shape) - 1, "keepdims": False})
    return [
        replace(node, op=TRANSPOSE, outputs=(turned,), attrs=Attrs({"perm": perm})),
        replace(node, op=RESHAPE, inputs=(turned,), outputs=(rows,), attrs=Attrs({"shape": shape})),
        replace(node, inputs=(rows,), attrs=last),
    ]
