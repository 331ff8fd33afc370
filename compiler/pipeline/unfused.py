"""Graphs without fusion: each op is computed by itself, in a launch of its own.

`UNFUSED` is the way of a graph through the pipeline without the passes that join nodes, or put
others in the place of several: what such a plan computes is what the ops say, one after the other.
`lone_op` is the part of it that a single op goes through; eager mode runs what comes out of it.

Guarantees: a node that `lone_op` is given has the launches that it has in a plan of `UNFUSED`
whose launches write dense tensors. Where lowering has a launch write its part of a joined tensor
(`compiler.lowering.destinations`), a product may have another kernel, and other last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from compiler.contract.attrs import Attrs
from compiler.contract.types import TensorType, ValueId
from compiler.fusion.fuse import fuse_launches
from compiler.graph.graph import Graph, GraphBuilder, Output, prune
from compiler.graph.registry import Op
from compiler.graph.target import CompileOptions, Hardware
from compiler.ops.primitives.sources import INPUT
from compiler.pipeline.pipeline import PASSES
from compiler.pipeline.rewrites import Pass, PassContext, run_passes

_ACROSS_NODES = (
    "fuse_attention", "narrow_bodies", "sparse_update", "hold_weights", "channels_last",
    "round_constants", "round_in_updates", "recompute_cheap", "inline_cheap", "chunk_wide",
    "fuse_products", "merge_updates",
)  # fmt: skip
"""Passes that look at several nodes to put something else in their place."""

_OF_ONE_OP = (
    "update_programs", "stage_reductions", "narrow_broadcasts", "dense_operands", "fuse", "bodies",
)  # fmt: skip
"""What is left to do for one op: its program, in a form that kernels take."""


def _as_it_is(graph: Graph, context: PassContext) -> Graph:
    return graph


def _pruned(graph: Graph, context: PassContext) -> Graph:
    return prune(graph)


def _alone(graph: Graph, context: PassContext) -> Graph:
    return fuse_launches(graph, joins=False)


def without_fusion(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """Return the passes in their order, with those that look across nodes leaving all as it is."""
    runs = {**dict.fromkeys(_ACROSS_NODES, _as_it_is), "simplify": _pruned, "fuse": _alone}
    return tuple([replace(step, run=runs.get(step.name, step.run)) for step in passes])


UNFUSED = without_fusion(PASSES)


@dataclass(frozen=True, slots=True)
class LoneOperand:
    """An operand of a lone op: a dense tensor, seen through views, each an op with attributes."""

    type: TensorType
    views: tuple[tuple[Op, Attrs], ...] = ()


def lone_op(
    op: Op,
    attrs: Attrs,
    operands: Sequence[LoneOperand],
    hardware: Hardware,
    options: CompileOptions,
) -> Graph:
    """Return the graph of one op as it is lowered; its inputs are called "0", "1", ... as operands.

    Its outputs are those of the op, in order. An operand that no launch reads has no input.
    Raises CompileError.
    """
    b = GraphBuilder()
    values: list[ValueId] = []
    for number, operand in enumerate(operands):
        dtype, shape = operand.type.dtype.value, operand.type.shape
        value = b.emit_one(INPUT, name=str(number), dtype=dtype, shape=shape)
        for view, its in operand.views:
            (value,) = b.emit(view, (value,), its)
        values.append(value)
    outputs = b.emit(op, values, attrs)
    b.outputs = [Output(str(number), value) for number, value in enumerate(outputs)]
    steps = [step for step in UNFUSED if step.name in _OF_ONE_OP]
    return run_passes(b.freeze(), steps, PassContext(hardware, options), None)
