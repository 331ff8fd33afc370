"""Floating-point operations of a job, counted from its graph before anything is compiled.

The formula: a matrix product [.., m, k] x [.., k, n] is 2 m n k operations per matrix forward. In
training it costs as much again for each operand whose gradient is needed, which is every operand
that a parameter leads to: so a product of an activation by a weight counts three times, and the
first layer, whose input is data, twice. So do convolutions. What a scan computes counts at each of
its steps. Products of causal attention, into and out of a causal softmax, count half. Nothing else
counts, nor does work that an engine does again.
"""

from __future__ import annotations

from compiler.graph.graph import Graph, Node
from compiler.graph.registry import cost
from compiler.ops.families.loops import SCAN, ScanParts
from compiler.ops.families.normalisation import SOFTMAX
from compiler.ops.primitives.convolution import CONV
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.sources import VARIABLE


def model_flops(graph: Graph) -> float:
    """Return the operations of one batch of a traced job, see the file's docstring."""
    trained = {rule.variable for rule in graph.updates}
    leads = [False] * len(graph.types)
    for node in graph.nodes:
        if node.op is VARIABLE:
            leads[node.outputs[0]] = node.outputs[0] in trained
    return _flops(graph, leads, is_training=bool(graph.updates))


def _flops(graph: Graph, leads: list[bool], *, is_training: bool) -> float:
    """Return the operations of a graph. `leads`: whether parameters lead to a value.

    Of values that nodes make it is found out here.
    """
    causal = _causal(graph)
    total = 0.0
    for node in graph.nodes:
        if any([leads[v] for v in node.inputs]):
            for value in node.outputs:
                leads[value] = True
        if node.op in (MATMUL, CONV):
            times = 1 + (sum(leads[v] for v in node.inputs) if is_training else 0)
            share = 0.5 if any([v in causal for v in (*node.inputs, *node.outputs)]) else 1.0
            total += times * share * _forward(graph, node)
        elif node.op is SCAN:
            parts = ScanParts.of(node.attrs)
            body = parts.body
            inner = [False] * len(body.graph.types)
            # From the second step on a carry is what a step made.
            values = (*node.outputs[: parts.carries], *node.inputs[parts.carries :])
            for operand, value in zip(body.operands, values, strict=True):
                inner[operand] = leads[value]
            total += parts.length * _flops(body.graph, inner, is_training=is_training)
    return total


def _causal(graph: Graph) -> set[int]:
    """Return the values that enter or leave a causal softmax."""
    nodes = [n for n in graph.nodes if n.op is SOFTMAX and n.attrs["causal"]]
    return {int(value) for node in nodes for value in (*node.inputs, *node.outputs)}


def _forward(graph: Graph, node: Node) -> float:
    inputs = tuple([graph.types[v] for v in node.inputs])
    outputs = tuple([graph.types[v] for v in node.outputs])
    return float(cost.get(node.op)(inputs, outputs, node.attrs).flops)
