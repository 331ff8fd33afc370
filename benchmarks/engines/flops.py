"""Floating-point operations of a job, counted from its graph before anything is compiled.

The formula: a matrix product [.., m, k] x [.., k, n] is 2 m n k operations per matrix forward. In
training it costs as much again for each operand whose gradient is needed, which is every operand
that a parameter leads to: so a product of an activation by a weight counts three times, and the
first layer, whose input is data, twice. So do convolutions. Products of causal attention, into and
out of a causal softmax, count half. Nothing else counts, nor does work that an engine does again.
"""

from __future__ import annotations

from compiler.graph.graph import Graph, Node
from compiler.graph.registry import cost
from compiler.ops.families.normalisation import SOFTMAX
from compiler.ops.primitives.convolution import CONV
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.sources import VARIABLE


def model_flops(graph: Graph) -> float:
    """Return the operations of one batch of a traced job, see the file's docstring."""
    is_training = bool(graph.updates)
    trained = {rule.variable for rule in graph.updates}
    leads = [False] * len(graph.types)
    for node in graph.nodes:
        if node.op is VARIABLE:
            leads[node.outputs[0]] = node.outputs[0] in trained
        elif any([leads[v] for v in node.inputs]):
            for value in node.outputs:
                leads[value] = True
    causal = _causal(graph)
    total = 0.0
    for node in graph.nodes:
        if node.op in (MATMUL, CONV):
            times = 1 + (sum(leads[v] for v in node.inputs) if is_training else 0)
            share = 0.5 if any([v in causal for v in (*node.inputs, *node.outputs)]) else 1.0
            total += times * share * _forward(graph, node)
    return total


def _causal(graph: Graph) -> set[int]:
    """Return the values that enter or leave a causal softmax."""
    nodes = [n for n in graph.nodes if n.op is SOFTMAX and n.attrs["causal"]]
    return {int(value) for node in nodes for value in (*node.inputs, *node.outputs)}


def _forward(graph: Graph, node: Node) -> float:
    inputs = tuple([graph.types[v] for v in node.inputs])
    outputs = tuple([graph.types[v] for v in node.outputs])
    return float(cost.get(node.op)(inputs, outputs, node.attrs).flops)
