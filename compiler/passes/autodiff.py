"""Gradients and updates: the backward pass, and all that stands between a gradient and its update.

`differentiate` takes the gradients of the objectives (`compiler.ops.families.gradients`) and turns
update rules into nodes, each on the device of its variable. The other passes work on these nodes:
averages, clipping, the loss scale, steps that are skipped, updates of rows, updates in parts.

Each rule is of one objective: what another one would add to a gradient is never made. All gradients
are taken at the variables as they are before the step. A step of several batches divides an
objective's own gradient by their number, adds the gradients of each up in scratch variables, and
updates from those. An objective that is a mean by weight (`compiler.ops.families.weights`) has the
gradient of each batch multiplied by its weight, and their sum divided by that of the weights. The
graph is of whole tensors; `compiler.sbp.distribute` cuts it for ranks.

Guarantees of `differentiate`: no update rule is left; each written variable has one write.
"""

from __future__ import annotations

import math
from dataclasses import replace

from compiler.contract.errors import CompileError, InternalError
from compiler.contract.program import GRADIENT
from compiler.contract.types import DType, Phase, ValueId
from compiler.graph.graph import (
    Graph,
    GraphBuilder,
    Node,
    Output,
    UpdateRule,
    Write,
    prune,
    sole_readers,
)
from compiler.graph.registry import input_output_aliases
from compiler.graph.target import GRAD_NORM, LOSS_SCALE, SKIPPED, CompileOptions
from compiler.ops.families.along import NON_FINITE, SQUARE_SUM
from compiler.ops.families.arithmetic import ADD, DIV, MAXIMUM, MINIMUM, MUL, SQRT, SUB
from compiler.ops.families.embedding import EMBEDDING_GRAD, update_of_rows
from compiler.ops.families.gradients import emit_gradients
from compiler.ops.families.updates import (
    ACCUMULATE,
    COUNT,
    EMA_UPDATE,
    INCREMENT,
    RESCALE,
    ends_step,
    is_update,
)
from compiler.ops.families.weights import WEIGHTED_MEAN, BatchWeight, weight_of
from compiler.ops.language.define import keeps_rows, stages, update
from compiler.ops.primitives.shape import COPY, RESHAPE, TRANSPOSE, cast_to
from compiler.ops.primitives.sources import SCRATCH, VARIABLE, scalar
from compiler.passes import simplify
from compiler.sbp.stages import over_stages, stages_of


def differentiate(graph: Graph) -> Graph:
    """Return the graph with gradients and update nodes.

    Raises CompileError naming op and user line.
    """
    if not graph.updates:
        return graph
    b = GraphBuilder.continuing(graph)
    gradients: dict[ValueId, ValueId] = {}
    inverses: dict[ValueId, ValueId] = {}
    for objective in graph.objectives():
        weight = None if graph.accumulation is None else weight_of(graph, objective)
        seed = _seed(b, objective, weight)
        variables = tuple([rule.variable for rule in graph.updates if rule.objective == objective])
        gradients |= emit_gradients(b, {objective: seed}, variables)
        if weight is not None:
            inverses[objective] = _inverse(b, objective, weight, len(inverses))
    for rule in graph.updates:
        inverse = None if rule.objective is None else inverses.get(rule.objective)
        _emit_update(b, rule, gradients.get(rule.variable), inverse)
    if graph.accumulation is not None:
        batch = graph.accumulation.batch
        counter = b.producer_of(batch)
        with b.at("optimizer", counter.source, Phase.UPDATE, counter.device):
            b.writes.append(Write(batch, b.emit_one(INCREMENT, batch)))
    b.updates = []
    return b.freeze()


def _seed(b: GraphBuilder, objective: ValueId, weight: BatchWeight | None) -> ValueId:
    """Emit the share of a batch in the objective of its step.

    Equal shares of all batches need no division of the sum of gradients. Shares by weight do, for
    their sum is known after the last batch. A weight is divided by its largest value at once: so no
    gradient outgrows a narrow type, and where all counts the bits are those of equal shares.
    """
    dtype = b.type_of(objective).dtype
    with b.like_node(b.producer_of(objective), Phase.BACKWARD):
        share = scalar(b, 1.0 if b.accumulation is None else 1.0 / b.accumulation.every, dtype)
        if weight is None:
            return share
        count = scalar(b, float(weight.count), dtype)
        return b.emit_one(MUL, b.emit_one(DIV, cast_to(b, weight.value, dtype), count), share)


def _inverse(b: GraphBuilder, objective: ValueId, weight: BatchWeight, number: int) -> ValueId:
    """Emit what the sums of gradients by weight are multiplied with."""
    maker, dtype = b.producer_of(objective), b.type_of(objective).dtype
    every = 1 if b.accumulation is None else b.accumulation.every
    at = ("optimizer", maker.source, Phase.UPDATE, maker.device)
    with b.at(*at, maker.stage):
        # No parameter can have this name, whose layout on ranks a sum over batches would take.
        total = _variable(b, f"sum/weights of objective {number}", SCRATCH, dtype)
        # The weight and not the share, which a kernel of wide values would have to return, too.
        of_step = _accumulated(b, total, cast_to(b, weight.value, dtype))
    with b.at(*at):
        whole = over_stages(b, COPY, [(of_step, maker.stage)], "sum", dtype)
        most = scalar(b, float(every * weight.count), dtype)
        return b.emit_one(WEIGHTED_MEAN, most, whole, count=1)  # finite where nothing counts


def _accumulated(b: GraphBuilder, total: ValueId, value: ValueId) -> ValueId:
    """Emit the sum of a value over the batches of a step, in a scratch variable."""
    if b.accumulation is None:
        raise InternalError("a step of one batch has no sum over batches")
    of_step = b.emit_one(ACCUMULATE, total, value, b.accumulation.batch, every=b.accumulation.every)
    b.writes.append(Write(total, of_step))
    return of_step


def _emit_update(
    b: GraphBuilder, rule: UpdateRule, grad: ValueId | None, inverse: ValueId | None
) -> None:
    variable = b.producer_of(rule.variable)
    if grad is None:
        raise CompileError(
            f"{variable.source}: parameter {variable.attrs['name']!r} has no path to the loss that"
            " trains it: its gradient would always be zero. Use it in the loss, remove it, freeze"
            " it with parameter.freeze(), or leave it out with trainable="
        )
    with b.at("optimizer", variable.source, Phase.UPDATE, variable.device):
        grad = _collect(b, variable, grad)
        grad = grad if inverse is None else _times(b, grad, inverse)
        inputs = (rule.variable, grad, *rule.state, *rule.scalars)
        outputs = b.emit(rule.op, inputs, rule.attrs)
    # The update writes over the variable and its state: each pair is a write at the end of the
    # step.
    for output, over in input_output_aliases.get(rule.op):
        b.writes.append(Write(inputs[over], outputs[output]))


def _collect(b: GraphBuilder, variable: Node, grad: ValueId) -> ValueId:
    """Return the gradient of the whole step: summed over its batches."""
    if b.accumulation is None:
        return grad
    type_ = b.type_of(grad)
    total = b.emit_one(
        VARIABLE,
        name=f"gradient/{variable.attrs.str_('name')}",
        dtype=type_.dtype.value,
        shape=type_.shape,
        role=SCRATCH,
        init=(("kind", "zeros"),),
    )
    return _accumulated(b, total, grad)


# Let averages of parameters read what the updates of a step make of them.
#
#     approach(average, weight, share)  ->  approach(average, adamw_update(weight, ...), share)
#
# A job is traced before its parameters have updates, so until gradients are final an average reads
# the parameter before the step, which the passes in between leave alone.
#
# Guarantees: an average is made after the update of what it averages, and of what that made.


def follow_updates(graph: Graph) -> Graph:
    """Return the graph with averages at its end, of new values. O(nodes)."""
    news = {write.variable: write.value for write in graph.writes}
    others, averages = [], []
    for node in graph.nodes:
        if node.op is not EMA_UPDATE or node.inputs[1] not in news:
            others.append(node)
            continue
        average, value, *rest = node.inputs
        averages.append(replace(node, inputs=(average, news[value], *rest)))
    return replace(graph, nodes=(*others, *averages)) if averages else graph


# Let no update read a gradient that is too large.
#
#     update(w, gradient, ...)  ->  update(w, min(max(gradient, -value), value), ...)
#     update(w, gradient, ...)  ->  update(w, gradient * min(1, most / (norm + 1e-6)), ...)
#
# where `norm` is the Euclidean norm of the gradients of all updates of the step together, in
# float64: torch.nn.utils.clip_grad_value_ and clip_grad_norm_ (Pascanu et al., On the difficulty of
# training recurrent neural networks, 2013). Values are clipped first where both are asked for. A
# norm that is NaN makes all gradients NaN, an infinite one makes them 0, and NaN where they were
# infinite.
#
# All gradients stay alive until the last of them is made, where each could otherwise go with its
# update. The multiplication costs no pass over them: the update's own program takes it in
# (`compiler.fusion.merge_updates`). The norm before clipping is the output `grad_norm`; with an
# infinite `most` it is all there is.
#
# It runs after gradients have lost the loss's scale, were summed over batches, and were searched
# for NaN: a step that is dropped is dropped for what it computed.
#
# Guarantees: every update of the optimizer reads clipped gradients.

_WIDE = DType.FLOAT64
_NO_DIVISION_BY_ZERO = 1e-6
"""What torch adds to a norm."""


def clip_gradients(graph: Graph, options: CompileOptions) -> Graph:
    """Return the graph with updates that read clipped gradients. O(nodes)."""
    updates = [node for node in graph.nodes if is_update(node)]
    if not updates:  # a job that evaluates
        return graph
    # Taken out and put at the end again: updates read what is emitted in between.
    others = tuple([node for node in graph.nodes if not is_update(node)])
    b = GraphBuilder.continuing(replace(graph, nodes=others))
    gradients = [node.inputs[GRADIENT] for node in updates]
    if options.clip_value:
        gradients = [_within(b, node, options.clip_value) for node in updates]
    if options.clip_norm:
        pairs = zip(graph.nodes, stages_of(graph), strict=True)
        norm = _norm(b, updates[0], gradients, [own for node, own in pairs if is_update(node)])
        b.outputs.append(Output(GRAD_NORM, norm))
        if math.isfinite(options.clip_norm):
            gradients = _scaled(b, updates, gradients, norm, options.clip_norm)
    for node, gradient in zip(updates, gradients, strict=True):
        inputs = (*node.inputs[:GRADIENT], gradient, *node.inputs[GRADIENT + 1 :])
        b.nodes.append(replace(node, inputs=inputs))
    return b.freeze()


def _within(b: GraphBuilder, node: Node, value: float) -> ValueId:
    gradient = node.inputs[GRADIENT]
    dtype = b.type_of(gradient).dtype
    with b.at("optimizer", node.source, Phase.UPDATE, node.device):
        low = b.emit_one(MAXIMUM, gradient, scalar(b, -value, dtype))
        return b.emit_one(MINIMUM, low, scalar(b, value, dtype))


def _norm(b: GraphBuilder, first: Node, gradients: list[ValueId], stages: list[int]) -> ValueId:
    """Emit the norm of some gradients, squares added up in the order of their making."""
    pairs = zip(gradients, stages, strict=True)
    # A view has the same squares: what it shows is summed without a copy.
    views = [(_shown(b, v), stage) for v, stage in pairs if b.type_of(v).num_elements]
    with b.at("optimizer", first.source, Phase.UPDATE, first.device):
        # A gradient that is read twice counts twice.
        return b.emit_one(SQRT, over_stages(b, SQUARE_SUM, sorted(views), "sum", _WIDE))


def _scaled(
    b: GraphBuilder, updates: list[Node], gradients: list[ValueId], norm: ValueId, most: float
) -> list[ValueId]:
    first = updates[0]
    with b.at("optimizer", first.source, Phase.UPDATE, first.device):
        above_zero = b.emit_one(ADD, norm, scalar(b, _NO_DIVISION_BY_ZERO, _WIDE))
        share = b.emit_one(DIV, scalar(b, most, _WIDE), above_zero)
        share = b.emit_one(MINIMUM, share, scalar(b, 1.0, _WIDE))
        factors: dict[DType, ValueId] = {}
        for value in gradients:
            dtype = b.type_of(value).dtype
            if dtype not in factors:
                factors[dtype] = cast_to(b, share, dtype)
    scaled: list[ValueId] = []
    for node, value in zip(updates, gradients, strict=True):
        with b.at("optimizer", node.source, Phase.UPDATE, node.device):
            scaled.append(b.emit_one(MUL, value, factors[b.type_of(value).dtype]))
    return scaled


def _shown(b: GraphBuilder, value: ValueId) -> ValueId:
    """Return what a value shows in another order: the same squares."""
    maker = b.producer_of(value)
    return value if maker.op not in (TRANSPOSE, RESHAPE) else _shown(b, maker.inputs[0])


# Take the loss scale out of the gradients again, and let it follow how steps go.
#
#     update(w, gradient, ..., step, skip)  ->  update(w, gradient * (1 / scale), ..., done, skip)
#
# Float16 ends at 65,504 and begins at 6e-8, where many gradients lie. So the trace multiplies the
# loss, and with it all gradients, by the output `loss_scale` (Micikevicius et al., Mixed Precision
# Training, 2018, section 3.2). Here they are divided by it in float32, those of a whole step at
# once, before anything reads them. If some are not finite then, the scale was too large:
# `skip_updates` drops the step and the scale becomes smaller; it becomes larger again after many
# steps that were not dropped. torch's GradScaler does the same, and a dropped step is none of the
# optimizer's there either: an update that reads how many steps are done reads how many changed
# something.
#
# `unscale` runs before `skip_updates`, which looks at what is unscaled, and `rescale` after it.
#
# Guarantees: with a scale every update reads gradients without it.


def unscale(graph: Graph) -> Graph:
    """Return the graph with updates that read gradients without the scale. O(nodes)."""
    updates = [node for node in graph.nodes if is_update(node)]
    if not updates:  # a job that evaluates
        return graph
    b = GraphBuilder.continuing(_without(graph, updates))
    scale = _output(graph, LOSS_SCALE)
    with b.at("optimizer", updates[0].source, Phase.UPDATE, updates[0].device):
        inverse = b.emit_one(DIV, scalar(b, 1.0, DType.FLOAT32), scale)
    for node in updates:
        with b.at("optimizer", node.source, Phase.UPDATE, node.device):
            gradient = _times(b, node.inputs[GRADIENT], inverse)
        b.nodes.append(_with_input(node, GRADIENT, gradient))
    return b.freeze()


def rescale(graph: Graph) -> Graph:
    """Return the graph with a scale that follows the flag of `skip_updates`. O(nodes)."""
    updates = [node for node in graph.nodes if is_update(node)]
    if not updates:
        return graph
    last = [node for node in graph.nodes if is_update(node) or node.op is RESCALE]
    made_by, flag = graph.producers(), updates[0].inputs[-1]
    b = GraphBuilder.continuing(_without(graph, last))
    without_skipped: dict[ValueId, ValueId] = {}
    for node in last:
        if node.op is RESCALE:
            b.nodes.append(_with_input(node, len(node.inputs) - 1, flag))
            continue
        for position, value in enumerate(node.inputs):
            maker = graph.nodes[made_by[value]]
            if maker.op is VARIABLE and maker.attrs["name"] == "step":
                if value not in without_skipped:
                    with b.at("optimizer", node.source, Phase.UPDATE, node.device):
                        without_skipped[value] = b.emit_one(SUB, value, _output(graph, SKIPPED))
                node = _with_input(node, position, without_skipped[value])
        b.nodes.append(node)
    return b.freeze()


def _times(b: GraphBuilder, value: ValueId, inverse: ValueId) -> ValueId:
    """Emit a product in float32 or more, before views: there a product of matrices takes it in."""
    maker, dtype = b.producer_of(value), b.type_of(value).dtype
    if maker.op in (TRANSPOSE, RESHAPE):
        return b.emit_one(maker.op, _times(b, maker.inputs[0], inverse), **maker.attrs)
    wide = DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32
    return cast_to(b, b.emit_one(MUL, cast_to(b, value, wide), cast_to(b, inverse, wide)), dtype)


def _without(graph: Graph, nodes: list[Node]) -> Graph:
    # By identity: equal nodes may stand in a graph twice.
    removed = {id(node) for node in nodes}
    return replace(graph, nodes=tuple([node for node in graph.nodes if id(node) not in removed]))


def _with_input(node: Node, position: int, value: ValueId) -> Node:
    inputs = (*node.inputs[:position], value, *node.inputs[position + 1 :])
    return replace(node, inputs=inputs)


def _output(graph: Graph, name: str) -> ValueId:
    return next(output.value for output in graph.outputs if output.name == name)


# Let a step whose loss or gradients are not finite change nothing but the counters.
#
#     update(variable, gradient, ...)  ->  update(variable, gradient, ..., skip)
#
# where `skip` says whether a loss, or what an update reads besides its variables (the gradient, the
# learning rate), holds NaN or infinity. It is part of the step and not a decision of the host,
# which learns of a step when later ones have long begun. All gradients stay alive until the last of
# them is made, where each could otherwise go with its update: whoever wants all of a step or
# nothing of it pays that. Where a step sums gradients over batches, the sums are looked at, which
# live so long anyway, and a broken batch drops its whole step.
#
# The flag passes from one tensor to the next, first the losses, then the others as they are made.
# The variable `skipped` counts the steps dropped; its value before a step is an output of that
# step.
#
# It runs after `simplify`, which leaves one learning rate where every update had its own, and
# before ranks meet, so that all of them decide by the losses and gradients of all.
#
# What the job assigns to buffers is left out as well, and not looked at: it may be meant so.
#
# Guarantees: every update of the optimizer, and every assignment, reads the one flag.

_ZEROS = (("kind", "zeros"),)


def skip_updates(graph: Graph, losses: tuple[str, ...] = ("loss",)) -> Graph:
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
                " dropped: define it by its program (`compiler.ops.language.define`)"
            )
    if any([output.name == SKIPPED for output in graph.outputs]):
        raise CompileError(
            f"the job returns {SKIPPED!r}, and on_nan='skip' adds an output of this name, the"
            " number of skipped steps. Rename the output of the job"
        )
    others = tuple([node for node in graph.nodes if not ends_step(node)])
    b = GraphBuilder.continuing(replace(graph, nodes=others))
    with b.at("optimizer", updates[0].source, Phase.UPDATE, updates[0].device):
        flag = _flag(b, graph, updates, losses)
        counter = _variable(b, SKIPPED, "counter", DType.INT64)
        b.writes.append(Write(counter, b.emit_one(COUNT, counter, flag)))
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
    loss = output.value
    if b.accumulation is not None:
        with b.on(b.producer_of(loss).device):
            total = _variable(b, f"sum/{output.name}", SCRATCH, b.type_of(loss).dtype)
            loss = _accumulated(b, total, loss)
    return loss


def _variable(b: GraphBuilder, name: str, role: str, dtype: DType) -> ValueId:
    return b.emit_one(VARIABLE, name=name, dtype=dtype.value, shape=(), role=role, init=_ZEROS)


# Let an update touch only the rows of a table that a batch picked.
#
#     sgd_update(param, embedding_grad(dy, ids), lr)  ->  embedding_sgd_update(param, dy, ids, lr)
#
# wherever nothing else reads the gradient, the rule leaves rows without gradient as they are, and
# the table has more rows than the batch has ids: on a smaller table most rows change anyway, and
# the gradient of all of it, which threads share by columns, is no slower. A table that is picked
# from twice has the sum of two gradients, and keeps its update; so does one whose gradients are
# summed over batches or ranks.
#
# The results are those of the two ops: the rows of equal ids are added in the same order, and rows
# that no id names lose a gradient of zero.
#
# Guarantees: no such update is left.


def update_rows(graph: Graph) -> Graph:
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
    definition_of_op, types = update.get(node.op), tuple([graph.types[v] for v in node.inputs])
    program = definition_of_op.program_for(types, node.attrs)
    olds = tuple([old for _, old in definition_of_op.over])
    num_ids = graph.types[gradient.inputs[1]].num_elements
    if types[0].shape[0] <= num_ids or not keeps_rows(program, GRADIENT, olds):
        return node
    inputs = (*node.inputs[:GRADIENT], *gradient.inputs, *node.inputs[GRADIENT + 1 :])
    return replace(node, op=update_of_rows.get(node.op), inputs=inputs)


# Put in the place of updates that need norms or products what they are made of.
#
#     lamb_update(w, dw, m, v, lr, step)
#       ->  change = ...; trust = |w| / |change|;  lamb_step(w, dw, m, v, lr * trust, step)
#
# It runs once gradients are final: without a loss scale, of all ranks, and with the flag of broken
# steps on every update. What parameters share, such as powers of the step, is then computed once.
#
# Guarantees: every update that is left has a program.


def stage_updates(graph: Graph) -> Graph:
    """Return the graph with updates by programs alone. O(nodes)."""
    if not any([stages.has(node.op) for node in graph.nodes]):
        return graph
    b, new_id = GraphBuilder(), [ValueId(-1)] * len(graph.types)
    for node in graph.nodes:
        inputs = tuple([new_id[value] for value in node.inputs])
        if stages.has(node.op):
            with b.like_node(node):
                outputs = stages.get(node.op).emit(b, inputs, node.attrs)
        else:
            outputs = b.copy(node, inputs, [graph.types[v] for v in node.outputs])
        for before, after in zip(node.outputs, outputs, strict=True):
            new_id[before] = after
    return simplify.simplify_graph(b.freeze_as(graph, new_id))
