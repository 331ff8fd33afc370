"""Compute before a broadcast what is computed of its elements alone.

    broadcast_to(a) * broadcast_to(b)  ->  broadcast_to(a * b)

as in the gradient of a mean, which is one number for every element; a number computed of constants
is a constant. Only where all that read the result can be part of a fused kernel, for those look
through the broadcast; other kernels may be slower on a tensor of one element repeated.

Guarantees: the same bits; no other node changes.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from compiler.attrs import Attrs
from compiler.bfloat16 import encoded
from compiler.fusion.expansion import expand, frame, pointwise_frame
from compiler.graph import Graph, Node, consumers, new_value
from compiler.ops.shape import BROADCAST_TO, RESHAPE
from compiler.ops.signature import broadcast_shape
from compiler.ops.sources import CONSTANT, constant_array
from compiler.registry import is_exact, reference
from compiler.types import TensorType, ValueId


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
                made = narrow[node.outputs[0]] = new_value(types, TensorType(type_.dtype, shape))
                nodes.append(
                    _evaluated(replace(node, inputs=inputs, outputs=(made,)), numbers, types)
                )
                stretched = Attrs({"shape": type_.shape})
                node = replace(node, op=BROADCAST_TO, inputs=(made,), attrs=stretched)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes), types=tuple(types))


def _evaluated(node: Node, numbers: dict[ValueId, Node], types: list[TensorType]) -> Node:
    """Return a constant for a node of constants of one element, where all kernels give one bit."""
    (made,) = node.outputs
    type_ = types[made]
    held = [numbers.get(v) for v in node.inputs]
    if type_.num_elements != 1 or not is_exact.get(node.op):
        return node
    arrays = [constant_array(number) for number in held if number is not None]
    if len(arrays) < len(held):
        return node
    with np.errstate(all="ignore"):
        (result,) = reference.get(node.op)(node.attrs, *arrays)
    data = encoded(np.asarray(result), type_.dtype)
    attrs = Attrs({"dtype": type_.dtype.value, "shape": type_.shape, "data": data})
    numbers[made] = replace(node, op=CONSTANT, inputs=(), attrs=attrs)
    return numbers[made]


def _is_pointwise(node: Node) -> bool:
    """Whether a node computes each element of its one output from those in the same place."""
    is_plain = frame.get(node.op) is pointwise_frame
    return expand.has(node.op) and is_plain and len(node.outputs) == 1 and bool(node.inputs)
