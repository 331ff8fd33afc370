"""Let plain descent touch only the rows of a table that a batch picked.

    sgd_update(param, embedding_grad(dy, ids), lr)  ->  embedding_sgd_update(param, dy, ids, lr)

wherever nothing else reads the gradient, nothing decays, and the table has more rows than the batch
has ids: on a smaller table most rows change anyway, and the gradient of all of it, which threads
share by columns, is no slower. A table that is picked from twice has the sum of two gradients, and
keeps its update; so does one whose gradients are summed over batches or ranks.

The results are those of the two ops: the rows of equal ids are added in the same order, and rows
that no id names lose a gradient of zero.

Guarantees: no such update is left.
"""

from __future__ import annotations

from dataclasses import replace

from compiler.attrs import NO_ATTRS
from compiler.graph import Graph, Node, sole_readers
from compiler.ops.embedding import EMBEDDING_GRAD
from compiler.ops.sparse_update import EMBEDDING_SGD_UPDATE
from compiler.ops.update import SGD_UPDATE
from compiler.prune import prune


def run(graph: Graph) -> Graph:
    """Return the graph with updates of rows in place of updates of tables. O(nodes)."""
    gradients = {node.outputs[0]: node for node in graph.nodes if node.op is EMBEDDING_GRAD}
    if not gradients:
        return graph
    alone = sole_readers(graph)
    nodes: list[Node] = []
    for index, node in enumerate(graph.nodes):
        gradient = gradients.get(node.inputs[1]) if node.op is SGD_UPDATE else None
        if gradient is not None and alone[node.inputs[1]] == index:
            node = _of_rows(graph, node, gradient)
        nodes.append(node)
    return prune(replace(graph, nodes=tuple(nodes)))


def _of_rows(graph: Graph, update: Node, gradient: Node) -> Node:
    """Return the update of the rows that were picked, or the one of the table where that is it."""
    param, _, lr = update.inputs
    is_plain = update.attrs.float_("weight_decay") == 0.0
    if not is_plain or graph.types[param].shape[0] <= graph.types[gradient.inputs[1]].num_elements:
        return update
    inputs = (param, *gradient.inputs, lr)
    return replace(update, op=EMBEDDING_SGD_UPDATE, inputs=inputs, attrs=NO_ATTRS)
