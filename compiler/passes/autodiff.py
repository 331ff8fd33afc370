"""Reverse-mode differentiation as a graph rewrite.

Source: Griewank & Walther, Evaluating Derivatives, 2008, ch. 3.

Walks the nodes backwards from the objective; each op's `gradient` column emits ordinary nodes into
the same graph, with the scope, source and device of the forward node. Contributions to one value
are added where the value was made, in the order in which the walk meets them, so the result is
deterministic. Then the update rules become update nodes, each on the device of its variable.

A step of several batches divides the objective's own gradient by their number, adds the gradients
of each up in scratch variables, and updates from those. The gradients are those of one rank; what
other ranks add is the business of `compiler.passes.collectives`.

Guarantees: objective None, updates empty, accumulation None, one write per written variable.
"""

from __future__ import annotations

from compiler.errors import CompileError
from compiler.graph import Graph, GraphBuilder, Node, UpdateRule, Write
from compiler.ops.binary import ADD
from compiler.ops.shape import STOP_GRADIENT
from compiler.ops.slicing import joined_pads
from compiler.ops.sources import SCRATCH, VARIABLE, scalar
from compiler.ops.update import ACCUMULATE, INCREMENT
from compiler.registry import writes
from compiler.rules import gradient
from compiler.types import Phase, ValueId


def run(graph: Graph) -> Graph:
    """Return the graph with gradients and update nodes.

    Raises CompileError naming op and user line.
    """
    if graph.objective is None:
        return graph
    b = GraphBuilder.continuing(graph)
    wanted = tuple(rule.variable for rule in graph.updates)
    gradients = _differentiate(b, graph, graph.objective, wanted)
    for rule in graph.updates:
        _emit_update(b, rule, gradients.get(rule.variable))
    if graph.accumulation is not None:
        batch = graph.accumulation.batch
        counter = b.producer_of(batch)
        with b.at("optimizer", counter.source, Phase.UPDATE, counter.device):
            b.writes.append(Write(batch, b.one(INCREMENT, batch)))
    b.objective, b.updates, b.accumulation = None, [], None
    return b.freeze()


def _differentiate(
    b: GraphBuilder, graph: Graph, objective: ValueId, wanted: tuple[ValueId, ...]
) -> dict[ValueId, ValueId]:
    depends = _depends_on(graph, wanted)
    gradients: dict[ValueId, ValueId] = {}
    if not depends[objective]:
        return gradients
    producer = graph.nodes[graph.producers()[objective]]
    share = 1.0 if graph.accumulation is None else 1.0 / graph.accumulation.every
    with b.beside(producer, Phase.BACKWARD):
        gradients[objective] = scalar(b, share, graph.types[objective].dtype)
    for node in reversed(graph.nodes):
        flowing = tuple([gradients.get(v) for v in node.outputs])
        if not any([depends[v] for v in node.inputs]) or all([g is None for g in flowing]):
            continue
        with b.beside(node, Phase.BACKWARD):
            for value, gradient_value in zip(node.inputs, _pull(b, node, flowing), strict=True):
                if gradient_value is None or not depends[value]:
                    continue
                earlier = gradients.get(value)
                if earlier is not None:
                    with b.on(b.producer_of(value).device):
                        gradient_value = _sum(b, earlier, gradient_value)
                gradients[value] = gradient_value
    return gradients


def _sum(b: GraphBuilder, one: ValueId, other: ValueId) -> ValueId:
    """Emit a sum of gradients; those of slices that lie side by side are joined before."""
    joined = joined_pads(b, one, other)
    if joined is not None:
        return joined
    before = b.producer_of(one)
    if before.op is ADD:
        joined = joined_pads(b, before.inputs[1], other)
    return b.one(ADD, one, other) if joined is None else b.one(ADD, before.inputs[0], joined)


def _pull(
    b: GraphBuilder, node: Node, flowing: tuple[ValueId | None, ...]
) -> tuple[ValueId | None, ...]:
    if not gradient.has(node.op):
        raise CompileError(
            f"{node.source}: {node.op} has no gradient, but a parameter is reached only through it;"
            " cut the path with .detach(), or register a gradient for the op"
        )
    return gradient.get(node.op)(b, node, flowing)


def _depends_on(graph: Graph, wanted: tuple[ValueId, ...]) -> list[bool]:
    depends = [False] * len(graph.types)
    for value in wanted:
        depends[value] = True
    for node in graph.nodes:
        if node.op is not STOP_GRADIENT and any([depends[v] for v in node.inputs]):
            for value in node.outputs:
                depends[value] = graph.types[value].dtype.is_float
    return depends


def _emit_update(b: GraphBuilder, rule: UpdateRule, grad: ValueId | None) -> None:
    variable = b.producer_of(rule.variable)
    if grad is None:
        raise CompileError(
            f"{variable.source}: parameter {variable.attrs['name']!r} has no path to the loss: its"
            " gradient would always be zero. Use it in the loss, remove it, or freeze it with"
            " parameter.freeze()"
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
