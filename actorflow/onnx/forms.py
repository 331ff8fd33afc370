"""Several ops that ONNX has as one operator: found before a graph is written, from its end on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compiler.contract.types import ValueId
from compiler.graph.graph import Graph, Node, sole_readers
from compiler.ops.primitives.sources import CONSTANT, VARIABLE


@dataclass(frozen=True, slots=True)
class OperatorForm:
    """An operator in the place of a node and of those before it.

    `place` is the node that has its attributes, `inputs` are what it reads.
    """

    op_type: str
    place: int
    inputs: tuple[ValueId, ...]
    epsilon: float = 0.0


def chosen_forms(graph: Graph, wanted: Sequence[ValueId]) -> dict[int, OperatorForm | None]:
    """Return the nodes that must be written, by place: as a form, or None as they are."""
    needed, found = {*wanted}, dict[int, OperatorForm | None]()
    for place in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[place]
        if needed.isdisjoint(node.outputs):
            continue
        found[place] = _form_of(graph, place, node)
        form = found[place]
        needed.update(node.inputs if form is None else form.inputs)
    return found


def _form_of(graph: Graph, place: int, node: Node) -> OperatorForm | None:
    if node.op.name == "matmul":
        return _product(graph, place, node)
    if node.op.name == "reshape":
        return _batch_norm(graph, place, node)
    return _with_bias(graph, node) if node.op.name == "add" else None


def _maker(graph: Graph, value: ValueId) -> Node:
    return graph.nodes[graph.producers()[value]]


def _product(graph: Graph, place: int, node: Node) -> OperatorForm | None:
    """A product of a matrix with a transposed parameter, which so keeps its layout and name."""
    x, turned = node.inputs
    before = _maker(graph, turned)
    if graph.types[x].rank != 2 or before.op.name != "transpose" or graph.types[turned].rank != 2:
        return None
    weight = before.inputs[0]
    is_turned = before.attrs.ints("perm") == (1, 0) and _maker(graph, weight).op is VARIABLE
    return OperatorForm("Gemm", place, (x, weight)) if is_turned else None


def _with_bias(graph: Graph, node: Node) -> OperatorForm | None:
    """A product or convolution and a vector of parameters along its channels."""
    readers = sole_readers(graph)
    for value, other in (node.inputs, node.inputs[::-1]):
        place = graph.producers()[value]
        maker = graph.nodes[place]
        if readers[value] < 0 or maker.op.name not in ("matmul", "conv"):
            continue
        product = _product(graph, place, maker) if maker.op.name == "matmul" else None
        rank, channels = graph.types[value].rank, graph.types[value].shape[1]
        bias = _vector(graph, other, (channels, *[1] * (rank - 2)))
        if bias is None or (maker.op.name == "matmul" and product is None):
            continue
        if product is None:
            return OperatorForm("Conv", place, (*maker.inputs, bias))
        return OperatorForm("Gemm", place, (*product.inputs, bias))
    return None


def _vector(graph: Graph, value: ValueId, shape: tuple[int, ...]) -> ValueId | None:
    """Return the vector of parameters that lies so along an axis, or None."""
    maker = _maker(graph, value)
    if graph.types[value].shape != shape:
        return None
    if maker.op.name == "reshape":
        value = maker.inputs[0]
        maker = _maker(graph, value)
    is_vector = maker.op is VARIABLE and graph.types[value].rank == 1
    return value if is_vector else None


def _batch_norm(graph: Graph, place: int, node: Node) -> OperatorForm | None:
    """A batch norm by running statistics: (x - mean) * (rsqrt(var + eps) * scale) + shift."""
    made = graph.types[node.outputs[0]]
    found = _matched(graph, node.inputs[0], "add", ("mul", ("sub", "reshape", ""), _RSTD), "")
    if found is None or made.rank < 2:
        return None
    flat, mean, var, epsilon, scale, shift = found
    x = _maker(graph, flat).inputs[0]
    channels = (1, made.shape[1], 1)
    stored = [_vector(graph, v, channels) for v in (scale, shift, mean, var)]
    number = _maker(graph, epsilon)
    vectors = tuple([v for v in stored if v is not None])
    if len(vectors) < 4 or number.op is not CONSTANT or graph.types[x] != made:
        return None
    data = number.attrs["data"]
    numbers = np.frombuffer(data if isinstance(data, bytes) else b"", made.dtype.value)
    return OperatorForm("BatchNormalization", place, (x, *vectors), float(numbers.reshape(())))


_RSTD = ("mul", ("rsqrt", ("add", "", "")), "")


def _matched(graph: Graph, value: ValueId, op: str, *below: object) -> list[ValueId] | None:
    """Return the leaves of a tree of ops, in order, or None. "" is any value, a name its op."""
    node = _maker(graph, value)
    if node.op.name != op or len(node.inputs) != len(below):
        return None
    leaves: list[ValueId] = []
    for operand, wanted in zip(node.inputs, below, strict=True):
        if isinstance(wanted, tuple):
            inner = _matched(graph, operand, *wanted)
            if inner is None:
                return None
            leaves += inner
        elif wanted and _maker(graph, operand).op.name != wanted:
            return None
        else:
            leaves.append(operand)
    return leaves
