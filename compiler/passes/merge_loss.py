"""Compute the loss of a linear layer and its gradients in one pass over the logits.

    linear_cross_entropy, linear_cross_entropy_grad  ->  linear_cross_entropy_train

wherever the gradient of the loss does not depend on the loss itself: a constant factor, a share of
accumulated batches, a learned temperature do not; the square of a loss does, and keeps the two ops,
which compute the logits twice. The train op runs where the forward pass ends, and x, which only it
reads, dies there.

Gradients that nobody reads are no outputs: of inputs, say, or of a frozen weight.

Guarantees: every gradient of these ops is read, and no unused node is left.
"""

from __future__ import annotations

from dataclasses import replace

from compiler.attrs import Attrs
from compiler.graph import Graph, Node, consumers
from compiler.ops.linear_loss import (
    GRADIENTS,
    LINEAR_CROSS_ENTROPY,
    LINEAR_CROSS_ENTROPY_GRAD,
    LINEAR_CROSS_ENTROPY_TRAIN,
)
from compiler.prune import prune
from compiler.types import ValueId


def run(graph: Graph) -> Graph:
    """Return the graph with each of these losses in one node with its gradients.

    O(nodes) per loss.
    """
    saved = [node.outputs[1] for node in graph.nodes if node.op is LINEAR_CROSS_ENTROPY]
    if not saved:
        return graph
    graph = _with_read_gradients(graph)
    for lse in saved:
        graph = _merge(graph, lse)
    return prune(graph)


def _with_read_gradients(graph: Graph) -> Graph:
    readers, roots = consumers(graph), set(graph.roots())
    nodes = list(graph.nodes)
    for index, node in enumerate(graph.nodes):
        if node.op is not LINEAR_CROSS_ENTROPY_GRAD:
            continue
        made = [name for name in GRADIENTS if node.attrs.bool_(name)]
        read = {
            name: value
            for name, value in zip(made, node.outputs, strict=True)
            if readers[value] or value in roots
        }
        flags = {name: name in read for name in GRADIENTS}
        nodes[index] = replace(
            node, outputs=tuple(read.values()), attrs=Attrs({**node.attrs, **flags})
        )
    return replace(graph, nodes=tuple(nodes))


def _merge(graph: Graph, lse: ValueId) -> Graph:
    """Put the loss that saves `lse` and its gradients into one node, if the order allows.

    What stands between the two goes before the node, or behind it where it needs the loss.
    """
    readers = consumers(graph)[lse]
    if len(readers) != 1 or lse in graph.roots():
        return graph
    first, last = graph.producers()[lse], readers[0]
    forward, backward = graph.nodes[first], graph.nodes[last]
    if backward.op is not LINEAR_CROSS_ENTROPY_GRAD or backward.inputs[-1] != lse:
        return graph
    before, behind = _split(graph, first, last)
    needs_loss = {v for node in (forward, *behind) for v in node.outputs}
    if any([v in needs_loss for v in backward.inputs[:-1]]):
        return graph
    merged = replace(
        backward,
        op=LINEAR_CROSS_ENTROPY_TRAIN,
        inputs=backward.inputs[:-1],
        outputs=(forward.outputs[0], *backward.outputs),
    )
    nodes = (*graph.nodes[:first], *before, merged, *behind, *graph.nodes[last + 1 :])
    return replace(graph, nodes=nodes)


def _split(graph: Graph, first: int, last: int) -> tuple[list[Node], list[Node]]:
    """Return the nodes between two that do not need the first one, and those that do."""
    needs = set(graph.nodes[first].outputs)
    before: list[Node] = []
    behind: list[Node] = []
    for node in graph.nodes[first + 1 : last]:
        if any([v in needs for v in node.inputs]):
            needs.update(node.outputs)
            behind.append(node)
        else:
            before.append(node)
    return before, behind
