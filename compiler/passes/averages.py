"""Let averages of parameters read what the updates of a step make of them.

    approach(average, weight, share)  ->  approach(average, adamw_update(weight, ...), share)

A job is traced before its parameters have updates, so until gradients are final an average reads
the parameter before the step, which the passes in between leave alone.

Guarantees: an average is made after the update of what it averages, and of what that made.
"""

from __future__ import annotations

from dataclasses import replace

from compiler.graph import Graph
from compiler.ops.update import APPROACH


def run(graph: Graph) -> Graph:
    """Return the graph with averages at its end, of new values. O(nodes)."""
    news = {write.variable: write.value for write in graph.writes}
    others, averages = [], []
    for node in graph.nodes:
        if node.op is not APPROACH or node.inputs[1] not in news:
            others.append(node)
            continue
        average, value, *rest = node.inputs
        averages.append(replace(node, inputs=(average, news[value], *rest)))
    return replace(graph, nodes=(*others, *averages)) if averages else graph
