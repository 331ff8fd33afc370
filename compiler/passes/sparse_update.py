"""Let an update touch only the rows of a table that a batch picked.

    sgd_update(param, embedding_grad(dy, ids), lr)  ->  embedding_sgd_update(param, dy, ids, lr)

wherever nothing else reads the gradient, the rule leaves rows without gradient as they are, and the
table has more rows than the batch has ids: on a smaller table most rows change anyway, and the
gradient of all of it, which threads share by columns, is no slower. A table that is picked from
twice has the sum of two gradients, and keeps its update; so does one whose gradients are summed
over batches or ranks.

The results are those of the two ops: the rows of equal ids are added in the same order, and rows
that no id names lose a gradient of zero.

Guarantees: no such update is left.
"""

from __future__ import annotations

from dataclasses import replace

from compiler.fusion.program import GRADIENT
from compiler.fusion.updates import keeps_rows, update
from compiler.graph import Graph, Node, sole_readers
from compiler.ops.embedding import EMBEDDING_GRAD
from compiler.ops.sparse_update import update_of_rows
from compiler.prune import prune


def run(graph: Graph) -> Graph:
    """Return the graph with updates of rows in place of updates of tables. O(nodes)."""
    gradients = {node.outputs[0]: node for node in graph.nodes if node.op is EMBEDDING_GRAD}
    if not gradients:
        return graph
    alone = sole_readers(graph)
    nodes: list[Node] = []
    for index, node in enumerate(graph.nodes):
        gradient = gradients.get(node.inputs[GRADIENT]) if update_of_rows.has(node.op) else None
        if gradient is not None and alone[node.inputs[GRADIENT]] == index:
            node = _of_rows(graph, node, gradient)
        nodes.append(node)
    return prune(replace(graph, nodes=tuple(nodes)))


def _of_rows(graph: Graph, node: Node, gradient: Node) -> Node:
    """Return the update of the rows that were picked, or the one of the table where that is it."""
    found, types = update.get(node.op), tuple([graph.types[v] for v in node.inputs])
    program = found.program_for(types, node.attrs)
    olds = tuple([old for _, old in found.over])
    num_ids = graph.types[gradient.inputs[1]].num_elements
    if types[0].shape[0] <= num_ids or not keeps_rows(program, GRADIENT, olds):
        return node
    inputs = (*node.inputs[:GRADIENT], *gradient.inputs, *node.inputs[GRADIENT + 1 :])
    return replace(node, op=update_of_rows.get(node.op), inputs=inputs)
