"""Take the loss scale out of the gradients again, and let it follow how steps go.

    update(w, gradient, ..., step, skip)  ->  update(w, gradient * (1 / scale), ..., done, skip)

Float16 ends at 65,504 and begins at 6e-8, where many gradients lie. So the trace multiplies the
loss, and with it all gradients, by the output `loss_scale` (Micikevicius et al., Mixed Precision
Training, 2018, section 3.2). Here they are divided by it in float32, those of a whole step at once,
before anything reads them. That some are not finite then says that the scale was too large: the
step is one that `skip_updates` drops, the scale is made smaller, and larger again after many steps
that were not dropped. So torch's GradScaler does it, for which a dropped step is none of the
optimizer's either: where an update reads how many steps are done, it reads how many changed
something.

`unscale` runs before `skip_updates`, which looks at what is unscaled, and `rescale` after it.

Guarantees: with a scale every update reads gradients without it.
"""

from __future__ import annotations

from dataclasses import replace

from compiler.fusion.program import GRADIENT
from compiler.graph import Graph, GraphBuilder, Node
from compiler.ops.binary import DIV, MUL, SUB
from compiler.ops.elementwise import cast_to
from compiler.ops.shape import RESHAPE, TRANSPOSE
from compiler.ops.sources import VARIABLE, scalar
from compiler.ops.update import RESCALE, is_update
from compiler.options import LOSS_SCALE, SKIPPED
from compiler.types import DType, Phase, ValueId


def unscale(graph: Graph) -> Graph:
    """Return the graph with updates that read gradients without the scale. O(nodes)."""
    updates = [node for node in graph.nodes if is_update(node)]
    if not updates:  # a job that evaluates
        return graph
    b = GraphBuilder.continuing(_without(graph, updates))
    scale = _output(graph, LOSS_SCALE)
    with b.at("optimizer", updates[0].source, Phase.UPDATE, updates[0].device):
        inverse = b.one(DIV, scalar(b, 1.0, DType.FLOAT32), scale)
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
    done: dict[ValueId, ValueId] = {}
    for node in last:
        if node.op is RESCALE:
            b.nodes.append(_with_input(node, len(node.inputs) - 1, flag))
            continue
        for position, value in enumerate(node.inputs):
            maker = graph.nodes[made_by[value]]
            if maker.op is VARIABLE and maker.attrs["name"] == "step":
                if value not in done:
                    with b.at("optimizer", node.source, Phase.UPDATE, node.device):
                        done[value] = b.one(SUB, value, _output(graph, SKIPPED))
                node = _with_input(node, position, done[value])
        b.nodes.append(node)
    return b.freeze()


def _times(b: GraphBuilder, value: ValueId, inverse: ValueId) -> ValueId:
    """Emit a product in float32 or more, before views: there a product of matrices takes it in."""
    maker, dtype = b.producer_of(value), b.type_of(value).dtype
    if maker.op in (TRANSPOSE, RESHAPE):
        return b.one(maker.op, _times(b, maker.inputs[0], inverse), **maker.attrs)
    wide = DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32
    return cast_to(b, b.one(MUL, cast_to(b, value, wide), cast_to(b, inverse, wide)), dtype)


def _without(graph: Graph, nodes: list[Node]) -> Graph:
    taken = {id(node) for node in nodes}
    return replace(graph, nodes=tuple([node for node in graph.nodes if id(node) not in taken]))


def _with_input(node: Node, position: int, value: ValueId) -> Node:
    inputs = (*node.inputs[:position], value, *node.inputs[position + 1 :])
    return replace(node, inputs=inputs)


def _output(graph: Graph, name: str) -> ValueId:
    return next(output.value for output in graph.outputs if output.name == name)
