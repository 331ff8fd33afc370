"""The gradients of the objectives, and from update rules the nodes that change variables.

`compiler.gradients` differentiates; each update is on the device of its variable.

Each rule is of one objective: what another one would add to a gradient is never made. All are taken
at the variables as they are before the step.

A step of several batches divides an objective's own gradient by their number, adds the gradients
of each up in scratch variables, and updates from those. The gradients are those of one rank; what
other ranks add is the business of `compiler.passes.collectives`.

Guarantees: updates empty, one write per written variable.
"""

from __future__ import annotations

from compiler.errors import CompileError
from compiler.gradients import emit_gradients
from compiler.graph import Graph, GraphBuilder, Node, UpdateRule, Write
from compiler.ops.sources import SCRATCH, VARIABLE, scalar
from compiler.ops.update import ACCUMULATE, INCREMENT
from compiler.registry import writes
from compiler.types import Phase, ValueId


def run(graph: Graph) -> Graph:
    """Return the graph with gradients and update nodes.

    Raises CompileError naming op and user line.
    """
    if not graph.updates:
        return graph
    b = GraphBuilder.continuing(graph)
    gradients: dict[ValueId, ValueId] = {}
    for objective in graph.objectives():
        gradients |= _differentiate(b, graph, objective)
    for rule in graph.updates:
        _emit_update(b, rule, gradients.get(rule.variable))
    if graph.accumulation is not None:
        batch = graph.accumulation.batch
        counter = b.producer_of(batch)
        with b.at("optimizer", counter.source, Phase.UPDATE, counter.device):
            b.writes.append(Write(batch, b.one(INCREMENT, batch)))
    b.updates = []
    return b.freeze()


def _differentiate(b: GraphBuilder, graph: Graph, objective: ValueId) -> dict[ValueId, ValueId]:
    wanted = tuple([rule.variable for rule in graph.updates if rule.objective == objective])
    share = 1.0 if graph.accumulation is None else 1.0 / graph.accumulation.every
    with b.beside(b.producer_of(objective), Phase.BACKWARD):
        seed = scalar(b, share, b.type_of(objective).dtype)
    return emit_gradients(b, {objective: seed}, wanted)


def _emit_update(b: GraphBuilder, rule: UpdateRule, grad: ValueId | None) -> None:
    variable = b.producer_of(rule.variable)
    if grad is None:
        raise CompileError(
            f"{variable.source}: parameter {variable.attrs['name']!r} has no path to the loss that"
            " trains it: its gradient would always be zero. Use it in the loss, remove it, freeze"
            " it with parameter.freeze(), or leave it out with trainable="
        )
    with b.at("optimizer", variable.source, Phase.UPDATE, variable.device):
        grad = _collect(b, variable, grad)
        inputs = (rule.variable, grad, *rule.state, *rule.scalars)
        outputs = b.emit(rule.op, inputs, rule.attrs)
    for output, over in writes.get(rule.op):
        b.writes.append(Write(inputs[over], outputs[output]))


def _collect(b: GraphBuilder, variable: Node, grad: ValueId) -> ValueId:
    """Return the gradient of the whole step: summed over its batches."""
    if b.accumulation is None:
        return grad
    type_ = b.type_of(grad)
    total = b.one(
        VARIABLE,
        name=f"gradient/{variable.attrs.str_('name')}",
        dtype=type_.dtype.value,
        shape=type_.shape,
        role=SCRATCH,
        init=(("kind", "zeros"),),
    )
    every, batch = b.accumulation.every, b.accumulation.batch
    grad = b.one(ACCUMULATE, total, grad, batch, every=every)
    b.writes.append(Write(total, grad))
    return grad
