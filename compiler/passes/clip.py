"""Let no update read a gradient that is too large.

    update(w, gradient, ...)  ->  update(w, min(max(gradient, -value), value), ...)
    update(w, gradient, ...)  ->  update(w, gradient * min(1, most / (norm + 1e-6)), ...)

where `norm` is the Euclidean norm of the gradients of all updates of the step together, in float64:
torch.nn.utils.clip_grad_value_ and clip_grad_norm_ (Pascanu et al., On the difficulty of training
recurrent neural networks, 2013). Values are clipped first where both are asked for. A norm that is
NaN makes all gradients NaN, an infinite one makes them 0, and NaN where they were infinite.

All gradients stay alive until the last of them is made, where each could otherwise go with its
update. The multiplication costs no pass over them: the update's own program takes it in
(`compiler.fusion.update_programs`). The norm before clipping is the output `grad_norm`; with an
infinite `most` it is all there is.

It runs after gradients have lost the loss's scale, were summed over batches and ranks, and were
searched for NaN: a step that is dropped is dropped for what it computed.

Guarantees: every update of the optimizer reads clipped gradients.
"""

from __future__ import annotations

import math
from dataclasses import replace

from compiler.fusion.program import GRADIENT
from compiler.graph import Graph, GraphBuilder, Node, Output
from compiler.ops.binary import ADD, DIV, MAXIMUM, MINIMUM, MUL
from compiler.ops.elementwise import SQRT, cast_to
from compiler.ops.shape import RESHAPE, TRANSPOSE
from compiler.ops.sources import scalar
from compiler.ops.square_sum import SQUARE_SUM
from compiler.ops.update import is_update
from compiler.options import GRAD_NORM, CompileOptions
from compiler.passes.stages import over_stages, stages_of
from compiler.types import DType, Phase, ValueId

_WIDE = DType.FLOAT64
_NO_DIVISION_BY_ZERO = 1e-6
"""What torch adds to a norm."""


def run(graph: Graph, options: CompileOptions) -> Graph:
    """Return the graph with updates that read clipped gradients. O(nodes)."""
    updates = [node for node in graph.nodes if is_update(node)]
    if not updates:  # a job that evaluates
        return graph
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
        low = b.one(MAXIMUM, gradient, scalar(b, -value, dtype))
        return b.one(MINIMUM, low, scalar(b, value, dtype))


def _norm(b: GraphBuilder, first: Node, gradients: list[ValueId], stages: list[int]) -> ValueId:
    """Emit the norm of some gradients, squares added up in the order of their making."""
    pairs = zip(gradients, stages, strict=True)
    shown = [(_shown(b, v), stage) for v, stage in pairs if b.type_of(v).num_elements]
    with b.at("optimizer", first.source, Phase.UPDATE, first.device):
        # A gradient that is read twice counts twice.
        return b.one(SQRT, over_stages(b, SQUARE_SUM, sorted(shown), "sum", _WIDE))


def _scaled(
    b: GraphBuilder, updates: list[Node], gradients: list[ValueId], norm: ValueId, most: float
) -> list[ValueId]:
    first = updates[0]
    with b.at("optimizer", first.source, Phase.UPDATE, first.device):
        above_zero = b.one(ADD, norm, scalar(b, _NO_DIVISION_BY_ZERO, _WIDE))
        share = b.one(DIV, scalar(b, most, _WIDE), above_zero)
        share = b.one(MINIMUM, share, scalar(b, 1.0, _WIDE))
        factors: dict[DType, ValueId] = {}
        for value in gradients:
            dtype = b.type_of(value).dtype
            if dtype not in factors:
                factors[dtype] = cast_to(b, share, dtype)
    scaled: list[ValueId] = []
    for node, value in zip(updates, gradients, strict=True):
        with b.at("optimizer", node.source, Phase.UPDATE, node.device):
            scaled.append(b.one(MUL, value, factors[b.type_of(value).dtype]))
    return scaled


def _shown(b: GraphBuilder, value: ValueId) -> ValueId:
    """Return what a value shows in another order: the same squares."""
    maker = b.producer_of(value)
    return value if maker.op not in (TRANSPOSE, RESHAPE) else _shown(b, maker.inputs[0])
