"""Let a step whose loss or gradients are not finite change nothing but the counters.

    update(variable, gradient, ...)  ->  update(variable, gradient, ..., skip)

where `skip` says whether a loss, or what an update reads besides its variables (the gradient, the
learning rate), holds NaN or infinity. It is part of the step and not a decision of the host, which
learns of a step when later ones have long begun. All gradients stay alive until the last of them is
made, where each could otherwise go with its update: whoever wants all of a step or nothing of it
pays that. Where a step sums gradients over batches, the sums are looked at, which live so long
anyway, and a broken batch drops its whole step.

The flag passes from one tensor to the next, first the losses, then the others as they are made.
The variable `skipped` counts the steps dropped; its value before a step is an output of that step.

It runs after `simplify`, which leaves one learning rate where every update had its own, and before
ranks meet, so that all of them decide by the losses and gradients of all.

What the job assigns to buffers is left out as well, and not looked at: it may be meant so.

Guarantees: every update of the optimizer, and every assignment, reads the one flag.
"""

from __future__ import annotations

from dataclasses import replace

from compiler.errors import CompileError
from compiler.fusion.staged import stages
from compiler.fusion.updates import update
from compiler.graph import Graph, GraphBuilder, Node, Output, Write
from compiler.ops.non_finite import NON_FINITE
from compiler.ops.shape import TRANSPOSE
from compiler.ops.sources import SCRATCH, VARIABLE
from compiler.ops.update import ACCUMULATE, COUNT, ends_step, is_update
from compiler.options import SKIPPED
from compiler.passes.stages import over_stages, stages_of
from compiler.types import DType, Phase, ValueId

_ZEROS = (("kind", "zeros"),)


def run(graph: Graph, losses: tuple[str, ...] = ("loss",)) -> Graph:
    """Return the graph with updates that can be skipped. O(nodes).

    Raises CompileError where an update has no way to be skipped, or a name is taken.
    """
    updates = [node for node in graph.nodes if ends_step(node)]
    if not updates:
        return graph
    for node in updates:
        if not update.has(node.op) and not stages.has(node.op):
            raise CompileError(
                f"{node.source}: on_nan='skip' drops a step's updates, and {node.op} cannot be"
                " dropped: define it by its program (`compiler.fusion.updates`)"
            )
    if any([output.name == SKIPPED for output in graph.outputs]):
        raise CompileError(
            f"the job returns {SKIPPED!r}, which on_nan='skip' returns itself: how many steps were"
            " skipped. Give the job's own another name"
        )
    others = tuple([node for node in graph.nodes if not ends_step(node)])
    b = GraphBuilder.continuing(replace(graph, nodes=others))
    with b.at("optimizer", updates[0].source, Phase.UPDATE, updates[0].device):
        flag = _flag(b, graph, updates, losses)
        counter = _variable(b, SKIPPED, "counter", DType.INT64)
        b.writes.append(Write(counter, b.one(COUNT, counter, flag)))
    b.outputs.append(Output(SKIPPED, counter))
    b.nodes += [replace(node, inputs=(*node.inputs, flag)) for node in updates]
    return b.freeze()


def _flag(b: GraphBuilder, graph: Graph, updates: list[Node], losses: tuple[str, ...]) -> ValueId:
    """Emit the search through losses and what updates read, in the order of their making."""
    made_by, stages = graph.producers(), stages_of(graph)
    read = [
        value
        for node in updates
        if is_update(node)
        for position, value in enumerate(node.inputs)
        if graph.types[value].dtype.is_float and position not in [over for _, over in node.writes]
    ]
    read = [_untransposed(b, value) for value in read if graph.types[value].num_elements]
    values = [
        (_loss_of_step(b, o), stages[made_by[o.value]]) for o in graph.outputs if o.name in losses
    ]
    ordered = sorted(dict.fromkeys(read), key=lambda value: made_by[value])
    values += [(value, stages[made_by[value]]) for value in ordered]
    return over_stages(b, NON_FINITE, values, "max", DType.INT64)


def _untransposed(b: GraphBuilder, value: ValueId) -> ValueId:
    """Return what a value shows in another order: a search needs no copy of it."""
    maker = b.producer_of(value)
    return value if maker.op is not TRANSPOSE else _untransposed(b, maker.inputs[0])


def _loss_of_step(b: GraphBuilder, output: Output) -> ValueId:
    """Return what is finite if the losses of all batches of a step are."""
    loss, steps = output.value, b.accumulation
    if steps is not None:
        with b.on(b.producer_of(loss).device):
            of_step = _variable(b, f"sum/{output.name}", SCRATCH, b.type_of(loss).dtype)
            loss = b.one(ACCUMULATE, of_step, loss, steps.batch, every=steps.every)
        b.writes.append(Write(of_step, loss))
    return loss


def _variable(b: GraphBuilder, name: str, role: str, dtype: DType) -> ValueId:
    return b.one(VARIABLE, name=name, dtype=dtype.value, shape=(), role=role, init=_ZEROS)
