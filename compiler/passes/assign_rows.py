"""Rows that a buffer is assigned, written where the buffer lies.

    new = put_rows(buffer, ids, rows);  assign(buffer, new)
      ->  new = assign_rows(buffer, ids, rows)

`put_rows` makes a tensor of its own, and the assignment copies all of it back at the end of the
step. Where nothing else reads what the buffer had before, neither copy is needed: the rows go into
the buffer at once, and whoever reads the new tensor reads the buffer. A cache of keys then costs a
step its new rows, whatever its length.

Guarantees: values of all nodes are what they were; a buffer that is read elsewhere before it is
assigned, or whose assignment a broken step skips, keeps its copies.
"""

from __future__ import annotations

from dataclasses import replace

from compiler.contract.types import ValueId
from compiler.graph.graph import Graph, Node, consumers
from compiler.ops.families.embedding import ASSIGN_ROWS, PUT_ROWS
from compiler.ops.families.updates import ASSIGN
from compiler.storage.order import batches_per_step


def assign_rows(graph: Graph) -> Graph:
    """Return the graph with assignments of rows in place of those of whole buffers. O(nodes)."""
    if batches_per_step(graph) > 1:
        return graph
    readers, producers = consumers(graph), graph.producers()
    returned = {output.value for output in graph.outputs}
    values: dict[ValueId, ValueId] = {}
    puts: dict[int, Node] = {}
    assigns: set[int] = set()
    for index, node in enumerate(graph.nodes):
        # With a third input a broken step skips it.
        if node.op is not ASSIGN or len(node.inputs) != 2:
            continue
        variable, value = node.inputs
        place = producers[value]
        put = graph.nodes[place]
        is_alone = {*readers[variable]} == {place, index} and variable not in returned
        is_over = put.op is PUT_ROWS and put.inputs[0] == variable not in put.inputs[1:]
        if is_over and is_alone:
            puts[place] = replace(put, op=ASSIGN_ROWS)
            assigns.add(index)
            values[node.outputs[0]] = value
    if not puts:
        return graph
    nodes = [puts.get(i, node) for i, node in enumerate(graph.nodes) if i not in assigns]
    writes = [replace(w, value=values.get(w.value, w.value)) for w in graph.writes]
    return replace(graph, nodes=tuple(nodes), writes=tuple(writes))
