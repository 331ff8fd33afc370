"""Which nodes run once per batch, and which once per step.

Where a step sums gradients over several batches, the graph falls into two parts that meet only in
the sums: forward, backward and the additions run once per batch; what needs the finished sums, and
whatever only updates need, runs once per step. So does an output that is made of the sums, such as
their norm: there is one of it per step. What all stages of a pipeline make together is made of the
sums of some of them, though a stage without trained parameters has none. Everywhere else a step is
one batch, and there is one part.
"""

from __future__ import annotations

from compiler.facts import fact
from compiler.graph import Graph, mark_needed
from compiler.ops.channels import is_over_stages
from compiler.ops.sources import SCRATCH, VARIABLE
from compiler.ops.update import ACCUMULATE, PER_BATCH
from compiler.types import ValueId


@fact
def batches_per_step(graph: Graph) -> int:
    """Return how many batches one update of the parameters consumes, 1 without accumulation."""
    return 1 if graph.accumulation is None else graph.accumulation.every


@fact
def needed_per_step(graph: Graph) -> tuple[bool, ...]:
    """Mark the nodes that the writes of a step need, as far back as what batches leave. O(nodes).

    All False where a step is one batch.
    """
    if graph.accumulation is None:
        return (False,) * len(graph.nodes)
    scratch = _scratch(graph)
    wanted = [w.value for w in graph.writes if w.variable not in scratch]
    return mark_needed(graph, [*wanted, *outputs_per_step(graph)], ends_at=PER_BATCH)


@fact
def needed_per_batch(graph: Graph) -> tuple[bool, ...]:
    """Mark the nodes that outputs, and the writes of a batch, need. O(nodes)."""
    scratch, per_step = _scratch(graph), outputs_per_step(graph)
    wanted = [w.value for w in graph.writes if w.variable in scratch]
    wanted += graph.effects()
    return mark_needed(graph, wanted + [o.value for o in graph.outputs if o.value not in per_step])


@fact
def outputs_per_step(graph: Graph) -> tuple[ValueId, ...]:
    """Return the values of outputs that are made of the sums over batches. O(nodes)."""
    if graph.accumulation is None:
        return ()
    of_sums: set[ValueId] = set()
    for node in graph.nodes:
        is_sum = node.op is ACCUMULATE or is_over_stages(node)
        if is_sum or not of_sums.isdisjoint(node.inputs):
            of_sums.update(node.outputs)
    return tuple([o.value for o in graph.outputs if o.value in of_sums])


def _scratch(graph: Graph) -> set[ValueId]:
    """Return the variables that are written once per batch."""
    return {
        node.outputs[0]
        for node in graph.nodes
        if node.op is VARIABLE and node.attrs.str_("role") == SCRATCH
    }
