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
from compiler.graph import Graph, Node, consumers
from compiler.ops.embedding import EMBEDDING_GRAD
from compiler.ops.sparse_update import EMBEDDING_SGD_UPDATE
from compiler.ops.update import SGD_UPDATE
from compiler.types import ValueId


def run(graph: Graph) -> Graph:
    """Return the graph with updates of rows in place of updates of tables. O(nodes)."""
    gradients = {node.outputs[0]: node for node in graph.nodes if node.op is EMBEDDING_GRAD}
    if not gradients:
        return graph
    readers, roots = consumers(graph), set(graph.roots())
    nodes: list[Node] = []
    dropped: set[ValueId] = set()
    for node in graph.nodes:
        gradient = gradients.get(node.inputs[1]) if node.op is SGD_UPDATE else None
        if gradient is None or not _is_sparse(graph, node, gradient):
            nodes.append(node)
            continue
        value = gradient.outputs[0]
        if len(readers[value]) > 1 or value in roots:
            nodes.append(node)
            continue
        param, _, lr = node.inputs
        nodes.append(
            replace(
                node,
                op=EMBEDDING_SGD_UPDATE,
                inputs=(param, *gradient.inputs, lr),
                attrs=NO_ATTRS,
            )
        )
        dropped.add(value)
    left = [node for node in nodes if not node.outputs or node.outputs[0] not in dropped]
    return replace(graph, nodes=tuple(left))


def _is_sparse(graph: Graph, update: Node, gradient: Node) -> bool:
    ids = graph.types[gradient.inputs[1]]
    is_plain = update.attrs.float_("weight_decay") == 0.0
    return is_plain and graph.types[update.inputs[0]].shape[0] > ids.num_elements
