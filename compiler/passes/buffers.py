"""Let each batch of a step see what the one before assigned, and the step keep the last one's.

    assign(buffer, f(buffer))  ->  held' = hold(held, f(handed_on(batch, buffer, held)))
                                   assign(buffer, held')

Batches of a step hand on a buffer in the scratch variable `batch/<name>`; the buffer itself is
written once per step, as parameters are. So whoever reads between steps finds what whole steps
made, a step that is skipped keeps nothing of any of its batches, and what a step that was cut left
behind is never read.

It runs before `autodiff`, which counts batches.

Guarantees: where a step has several batches, what is assigned is held once per batch.
"""

from __future__ import annotations

from dataclasses import replace

from compiler.graph import Graph, GraphBuilder, Output, Write
from compiler.ops.sources import SCRATCH, VARIABLE
from compiler.ops.update import ASSIGN, HANDED_ON, HOLD
from compiler.types import ValueId


def run(graph: Graph) -> Graph:
    """Return the graph with buffers that batches hand on. O(nodes)."""
    assigned = [node for node in graph.nodes if node.op is ASSIGN]
    if graph.accumulation is None or not assigned:
        return graph
    b = GraphBuilder.continuing(graph)
    every, batch = graph.accumulation.every, graph.accumulation.batch
    seen: dict[ValueId, ValueId] = {}
    held: dict[ValueId, ValueId] = {}
    for node in assigned:
        buffer = node.inputs[0]
        maker = b.producer_of(buffer)
        with b.beside(maker):
            name = f"batch/{maker.attrs.str_('name')}"
            (held[buffer],) = b.emit(VARIABLE, (), {**maker.attrs, "name": name, "role": SCRATCH})
            seen[buffer] = b.one(HANDED_ON, batch, buffer, held[buffer], every=every)
    early = [n for n in b.nodes if n.op is VARIABLE] + [n for n in b.nodes if n.op is HANDED_ON]
    b.nodes = early  # variables need nothing, so that whoever reads one may come next
    for node in graph.nodes:
        if node.op is ASSIGN:
            buffer, value = node.inputs
            with b.beside(node):
                value = b.one(HOLD, held[buffer], seen.get(value, value))
            b.writes.append(Write(held[buffer], value))
            b.nodes.append(replace(node, inputs=(buffer, value)))
        elif node.op is not VARIABLE:
            inputs = tuple([seen.get(v, v) for v in node.inputs])
            b.nodes.append(node if inputs == node.inputs else replace(node, inputs=inputs))
    b.outputs = [Output(o.name, seen.get(o.value, o.value)) for o in b.outputs]
    return b.freeze()
