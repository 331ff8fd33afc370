"""Layouts for convolutions: images with their channels last, weights as the kernel likes them.

    relu(conv(x))  ->  shown(relu(y')),  y' = dense(shown(conv(x)))

Types stay what they are, channels second. An image [N, C, *spatial] gets a twin [N, S, C], S being
all places; what acts on elements, and sums over channels or places, is computed on twins, and what
else reads the image reads the twin's view. A convolution reads such views, and writes what it makes
where its twin is (see `compiler.lowering.destinations`), so that nothing is moved but at the ends
of a chain: what comes as it is fed, and what a reshape joins.

Whether it pays is what the kernels of the convolutions answer for operands that lie so.

Guarantees: the same values but for the order of sums; no other node changes.
"""

from __future__ import annotations

import math
from dataclasses import replace

from compiler.contract.attrs import Attrs, AttrValue
from compiler.contract.types import TensorType, ValueId, contiguous_strides
from compiler.graph.graph import Graph, Node, new_value, prune
from compiler.graph.program_builder import expand, frame, pointwise_frame
from compiler.graph.registry import Layout, Op
from compiler.graph.target import CompileOptions, Hardware
from compiler.ops.primitives.convolution import (
    CONV,
    CONV_INPUT_GRAD,
    CONV_WEIGHT_GRAD,
    MAX_POOL,
    MAX_POOL_GRAD,
    MAX_POOL_PICK,
)
from compiler.ops.primitives.reduce import MAX, MEAN, SUM
from compiler.ops.primitives.shape import BROADCAST_TO, COPY, RESHAPE, TRANSPOSE
from compiler.ops.primitives.sources import OF_MODEL, ROUNDED, VARIABLE
from compiler.storage.storage import call_of, dense_layout

_CONVOLUTIONS = (CONV, CONV_INPUT_GRAD, CONV_WEIGHT_GRAD)
_POOLS = (MAX_POOL, MAX_POOL_GRAD, MAX_POOL_PICK)
_REDUCTIONS = (SUM, MEAN, MAX)

Shape = tuple[int, ...]


def put_channels_last(graph: Graph, hardware: Hardware) -> Graph:
    """Return the graph with images channels last, or as it is. O(nodes)."""
    if not any([node.op in _CONVOLUTIONS for node in graph.nodes]) or not _pays(graph, hardware):
        return graph
    twins = _Twins(graph)
    for node in graph.nodes:
        twins.take(node)
    return prune(replace(graph, nodes=tuple(twins.nodes), types=tuple(twins.types)))


def _pays(graph: Graph, hardware: Hardware) -> bool:
    """Whether kernels take images with channels last, and less time for them."""
    gained = 0.0
    for node in graph.nodes:
        if node.op not in _CONVOLUTIONS + _POOLS:
            continue
        target, types = hardware.targets[node.device], graph.types
        dense = {v: dense_layout(types[v]) for v in (*node.inputs, *node.outputs)}
        last = dense | {v: _channels_last(types[v]) for v in _images(node)}
        try:
            before, after = [
                target.query(call_of(node, types, lies.__getitem__)) for lies in (dense, last)
            ]
        except LookupError:
            return False
        gained += before.duration_ns - after.duration_ns
    return gained > 0


def _images(node: Node) -> tuple[ValueId, ...]:
    """Return the operands of a node that are images, not weights."""
    if node.op is CONV_WEIGHT_GRAD:
        return node.inputs
    return (*(node.inputs if node.op in _POOLS else node.inputs[:1]), *node.outputs)


def _channels_last(type_: TensorType) -> Layout:
    images, channels, *spatial = type_.shape
    strides = contiguous_strides((images, *spatial, channels), type_.dtype.itemsize)
    return Layout(0, (strides[0], strides[-1], *strides[1:-1]))


class _Twins:
    """The graph so far, and the twin of each image that has one."""

    def __init__(self, graph: Graph) -> None:
        self.nodes: list[Node] = []
        self.types = list(graph.types)
        self._twins: dict[ValueId, ValueId] = {}
        self._views: dict[ValueId, ValueId] = {}
        self._stretched: dict[ValueId, ValueId] = {}

    def take(self, node: Node) -> None:
        """Add a node, on twins where it can be."""
        if node.op in _REDUCTIONS and node.inputs[0] in self._twins and self._reduce(node):
            return
        if _is_pointwise(node) and self._act(node):
            return
        is_window = node.op in _CONVOLUTIONS + _POOLS
        if any([v in self._views for v in node.inputs]):
            node = replace(node, inputs=tuple([self._views.get(v, v) for v in node.inputs]))
        self.nodes.append(node)
        if is_window and node.op is not CONV_WEIGHT_GRAD:
            for value in node.outputs:
                twin = self._gathered(node, value)
                view = self._views[value] = new_value(self.types, self.types[value])
                self._show(node, twin, view)
                self._twins[value] = twin
        elif node.op is RESHAPE and node.inputs[0] in self._twins:
            before, after = [self.types[v].shape for v in (*node.inputs, *node.outputs)]
            if len(after) > 2 and after[:2] == before[:2]:
                self._twins[node.outputs[0]] = self._twins[node.inputs[0]]
        elif node.op is BROADCAST_TO:
            self._stretched[node.outputs[0]] = node.inputs[0]

    def _gathered(self, node: Node, image: ValueId) -> ValueId:
        """Return the twin of an image that a node has made."""
        n, c, *spatial = self.types[image].shape
        axes = (0, *range(2, 2 + len(spatial)), 1)
        last = self._emit(node, TRANSPOSE, image, (n, *spatial, c), perm=axes)
        shape = (n, math.prod(spatial), c)
        return self._emit(node, COPY, self._reshaped(node, last, shape), shape)

    def _show(self, node: Node, twin: ValueId, image: ValueId) -> None:
        """Let an image be the view of its twin."""
        n, c, *spatial = self.types[image].shape
        apart = self._reshaped(node, twin, (n, *spatial, c))
        perm = (0, len(spatial) + 1, *range(1, len(spatial) + 1))
        self.nodes.append(
            replace(
                node, op=TRANSPOSE, inputs=(apart,), outputs=(image,), attrs=Attrs({"perm": perm})
            )
        )
        self._twins[image] = twin

    def _act(self, node: Node) -> bool:
        """Add a node on elements, on twins; False where none of its operands has one."""
        shape = self.types[node.outputs[0]].shape
        ranks = {self.types[v].rank for v in node.inputs if v in self._twins}
        if ranks != {len(shape)}:
            return False
        inputs = [self._lying(node, value, shape) for value in node.inputs]
        operands = tuple([value for value in inputs if value is not None])
        if len(operands) < len(inputs):
            return False
        n, c, *spatial = shape
        flat = (n, math.prod(spatial), c)
        twins = [new_value(self.types, TensorType(self.types[v].dtype, flat)) for v in node.outputs]
        self.nodes.append(replace(node, inputs=operands, outputs=tuple(twins)))
        for image, twin in zip(node.outputs, twins, strict=True):
            self._show(node, twin, image)
        return True

    def _lying(self, node: Node, value: ValueId, shape: Shape) -> ValueId | None:
        """Return an operand of an image's shape as it is read beside twins; None if it is not."""
        if value in self._twins:
            return self._twins[value]
        operand_shape = self.types[value].shape
        if not operand_shape:
            return value
        n, c, *spatial = (1,) * (len(shape) - len(operand_shape)) + operand_shape
        places = math.prod(spatial)
        if spatial != [1] * len(spatial) and tuple(spatial) != shape[2:]:
            return None
        if 1 in (c, places):
            return self._reshaped(node, value, (n, places, c))
        if value in self._stretched:
            narrow = self._lying(node, self._stretched[value], shape)
            if narrow is not None:
                whole = (n, places, c)
                return self._emit(node, BROADCAST_TO, narrow, whole, shape=whole)
        return self._emit(
            node,
            TRANSPOSE,
            self._reshaped(node, value, (n, c, places)),
            (n, places, c),
            perm=(0, 2, 1),
        )

    def _reduce(self, node: Node) -> bool:
        """Add a reduction of a twin; False for one that leaves channels before places, or some."""
        axes, rank = {*node.attrs.ints("axes")}, self.types[node.inputs[0]].rank
        spatial = {*range(2, rank)}
        if (spatial & axes and spatial - axes) or not (spatial <= axes or 1 in axes):
            return False
        twin, (result,) = self._twins[node.inputs[0]], node.outputs
        twin_axes = tuple([k for k, old in enumerate((0, 2, 1)) if old in axes])
        extents = tuple([n for k, n in enumerate(self.types[twin].shape) if k not in twin_axes])
        total = self._emit(node, node.op, twin, extents, axes=twin_axes, keepdims=False)
        shape = self.types[result].shape
        self.nodes.append(replace(node, op=RESHAPE, inputs=(total,), attrs=Attrs({"shape": shape})))
        return True

    def _reshaped(self, node: Node, value: ValueId, shape: Shape) -> ValueId:
        if self.types[value].shape == shape:
            return value
        return self._emit(node, RESHAPE, value, shape, shape=shape)

    def _emit(self, node: Node, op: Op, value: ValueId, to: Shape, **attrs: AttrValue) -> ValueId:
        output = new_value(self.types, TensorType(self.types[value].dtype, to))
        self.nodes.append(
            replace(node, op=op, inputs=(value,), outputs=(output,), attrs=Attrs(attrs))
        )
        return output


def _is_pointwise(node: Node) -> bool:
    return expand.has(node.op) and frame.get(node.op) is pointwise_frame and bool(node.inputs)


# Let convolutions of jobs that only read their weights keep these as their kernels like them.
#
#     y = conv(x, w)  ->  y = conv(x, w, held=True)
#
# A library brings weights to a layout of its own before it convolves, which for one picture takes a
# fifth of the time. Where w is a variable that no step writes, a kernel may do so once: its launch
# has scratch of its own for the whole run, which is zeros again when w is given other values (see
# `compiler.graph.target.KernelInfo`). So a plan has room for such weights twice, and says so; a run
# gives up those that only such launches read once they are packed (`actorflow.run.packed_values`).
#
# Not for jobs that train, whose evaluations read what their steps write, nor where bytes are
# counted.
#
# Guarantees: the same values; no other node changes.


def hold_weights(graph: Graph, hardware: Hardware, options: CompileOptions) -> Graph:
    """Return the graph with weights held where the kernels of a device hold them. O(nodes)."""
    if options.is_training or options.asks_for_less or options.mesh:
        return graph
    changed = {write.variable for write in graph.writes}
    read_only = {
        node.outputs[0]
        for node in graph.nodes
        if node.op is VARIABLE and node.attrs["role"] in (*OF_MODEL, ROUNDED)
    } - changed
    nodes = [
        _held(graph, node, hardware) if _reads(node, read_only) else node for node in graph.nodes
    ]
    is_same = all([new is old for new, old in zip(nodes, graph.nodes, strict=True)])
    return graph if is_same else replace(graph, nodes=tuple(nodes))


def _reads(node: Node, read_only: set[ValueId]) -> bool:
    return node.op is CONV and node.inputs[1] in read_only


def _held(graph: Graph, node: Node, hardware: Hardware) -> Node:
    """Return a convolution that holds its weights; itself where its device has no kernel for it."""
    packing = replace(node, attrs=Attrs({**node.attrs, "held": True}))
    call = call_of(packing, graph.types, lambda value: dense_layout(graph.types[value]))
    try:
        needs = hardware.targets[node.device].query(call)
    except LookupError:  # lowering says so, with the user's line
        return node
    return node if needs.prepacked_input is None else packing
