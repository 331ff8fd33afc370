"""Let a softmax between two products compute its scores block by block.

    softmax(q @ kT, scale, causal) @ v  ->  attention(q, k, v, scale, causal)

with a product with a positive constant, or a quotient by one, before the softmax taken into the
scale. Only scores and probabilities that nothing else reads are replaced: where a job returns them,
or drops some of them out, they have to exist. Operands with other leading axes than each other's
are left alone, too: one key for all heads is one large product as it is.

Runs before autodiff, so that the gradient is of the new op, and in every job: what a plan may spend
on memory never changes its results.

Guarantees: no softmax is left that only a product reads, as its left operand, and that reads only a
product of equal leading axes; scope and source of the new node are those of the softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from compiler.graph import Graph, GraphBuilder, Node, sole_readers
from compiler.ops.attention import ATTENTION
from compiler.ops.binary import DIV, MUL
from compiler.ops.matmul import MATMUL
from compiler.ops.shape import swap_last_axes
from compiler.ops.softmax import SOFTMAX
from compiler.ops.sources import CONSTANT, constant_array
from compiler.types import ValueId


@dataclass(frozen=True, slots=True)
class _Scores:
    """Where attention gets its scores from: operands, scale, and the nodes that go with them."""

    q: ValueId
    k_swapped: ValueId
    scale: float
    softmax: Node
    nodes: tuple[int, ...]


def run(graph: Graph) -> Graph:
    """Return the graph with attention in place of products around a softmax. O(nodes)."""
    found = _find(graph)
    if not found:
        return graph
    dropped = {index for scores in found.values() for index in scores.nodes}
    b = GraphBuilder()
    new_id: list[ValueId] = [ValueId(-1)] * len(graph.types)
    for index, node in enumerate(graph.nodes):
        if index in dropped:
            continue
        scores = found.get(index)
        if scores is None:
            with b.beside(node):
                outputs = b.emit(node.op, [new_id[v] for v in node.inputs], node.attrs)
        else:
            outputs = _emit(b, scores, new_id, new_id[node.inputs[1]])
        for old, new in zip(node.outputs, outputs, strict=True):
            new_id[old] = new
    return b.freeze_as(graph, new_id)


def _find(graph: Graph) -> dict[int, _Scores]:
    """Return, by the index of the product with v, the scores whose probabilities it alone reads."""
    if not any([node.op is SOFTMAX for node in graph.nodes]):
        return {}
    producers = graph.producers()
    is_kept = [reader < 0 for reader in sole_readers(graph)]
    found: dict[int, _Scores] = {}
    for index, node in enumerate(graph.nodes):
        if node.op is not MATMUL or is_kept[node.inputs[0]]:
            continue
        p, v = node.inputs
        made_by = producers[p]
        if graph.nodes[made_by].op is SOFTMAX and p != v and _is_same_batch(graph, p, v):
            scores = _trace_back(graph, made_by, producers, is_kept)
            # One launch runs on one device and stage, and each of these where the user put it.
            if scores is not None and _is_in_one_place(graph, (index, *scores.nodes)):
                found[index] = scores
    return found


def _trace_back(
    graph: Graph, softmax: int, producers: tuple[int, ...], is_kept: list[bool]
) -> _Scores | None:
    """Walk from the softmax back to the product of q and kT, past a constant factor."""
    node = graph.nodes[softmax]
    value, scale = node.inputs[0], node.attrs.float_("scale")
    passed = [softmax]
    while not is_kept[value]:
        passed.append(producers[value])
        producer = graph.nodes[passed[-1]]
        if producer.op is MATMUL:
            q, k_swapped = producer.inputs
            if not _is_same_batch(graph, q, k_swapped) or graph.types[value].shape[-1] == 0:
                return None
            return _Scores(q, k_swapped, scale, node, tuple(passed))
        factored = _without_factor(graph, producer, producers)
        if factored is None:
            return None
        value, scale = factored[0], scale * factored[1]
        if not 0.0 < scale < np.inf:
            return None
    return None


def _without_factor(
    graph: Graph, node: Node, producers: tuple[int, ...]
) -> tuple[ValueId, float] | None:
    """Return x and c of a node x * c, c * x or x / (1/c) with a constant c of one element."""
    if node.op not in (MUL, DIV):
        return None
    pairs = ((node.inputs[0], node.inputs[1]), (node.inputs[1], node.inputs[0]))
    for x, factor in pairs if node.op is MUL else pairs[:1]:
        source = graph.nodes[producers[factor]]
        is_one = graph.types[factor].num_elements == 1
        if source.op is CONSTANT and is_one and graph.types[x] == graph.types[node.outputs[0]]:
            number = float(constant_array(source).reshape(()))
            if number > 0:
                return x, number if node.op is MUL else 1.0 / number
    return None


def _is_in_one_place(graph: Graph, nodes: tuple[int, ...]) -> bool:
    return len({(graph.nodes[index].device, graph.nodes[index].stage) for index in nodes}) == 1


def _is_same_batch(graph: Graph, a: ValueId, b: ValueId) -> bool:
    return graph.types[a].shape[:-2] == graph.types[b].shape[:-2]


def _emit(
    b: GraphBuilder, scores: _Scores, new_id: list[ValueId], v: ValueId
) -> tuple[ValueId, ...]:
    """Emit attention and return y, the one output that the product had."""
    node = scores.softmax
    attrs = {"scale": scores.scale, "causal": node.attrs.bool_("causal")}
    with b.beside(node):
        k = swap_last_axes(b, new_id[scores.k_swapped])
        y, _ = b.emit(ATTENTION, (new_id[scores.q], k, v), attrs)
    return (y,)
