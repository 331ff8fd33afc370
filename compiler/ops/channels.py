"""Tensors from one stage of a pipeline to the next one.

A `send` on one rank and the `receive` of its neighbour that has the same attribute `order` are one
transfer: what the one reads is what the other makes, to the bit. A channel leads from a stage to
the next one, or to the one before. What goes through it for one batch is one bucket, and all
buckets of a channel go in the order of batches. Each end of a channel has a stream of its own: a
rank that waits for a neighbour keeps none of its other ends waiting, so neighbours that wait for
each other do not stand still.

A token is a tensor without elements, that stands for what has been sent. Whoever reads it comes
after that: so what leads back from a later stage is not waited for before a batch has gone there.
"""

from __future__ import annotations

import numpy as np

from compiler.attrs import Attrs
from compiler.graph import Node
from compiler.ops.rule import array_of
from compiler.ops.signature import Array, Types, expect_inputs
from compiler.ops.sources import declared_type
from compiler.registry import (
    Cost,
    Op,
    OpTypeError,
    cost,
    define,
    has_effect,
    infer_type,
    is_comm,
    recompute,
)
from compiler.types import DType, TensorType

TOKEN = TensorType(DType.UINT8, (0,))

SEND = define("send")
"""x -> token. Hand x to a neighbour.

The launch may end before the neighbour has x; then it has kept a copy, for x may be overwritten.
Attrs: group, the mesh's axis along which the neighbour lies; num_ranks along it; peer, the
neighbour's coordinate there; is_up, whether x goes to the higher stage; bucket and order as of
`all_reduce`.
"""

RECEIVE = define("receive")
"""*tokens -> x. Wait for x from a neighbour, when what the tokens stand for has been sent.

Attrs: those of `send`, but peer is who sends; dtype and shape of x.
"""

OVER_STAGES = define("over_stages")
"""x0, x1, ... -> their sum or maximum. What stage s makes is x_s; what comes of it is on all.

It is in graphs of all stages alone: the graph of one has an `all_reduce` along STAGE in its place,
the only collective there is along it. Attrs: those of `all_reduce`; by is "sum" or "max".
"""

for _op in (SEND, RECEIVE, OVER_STAGES):
    is_comm.register(_op, True)
    recompute.register(_op, False)
has_effect.register(SEND, True)


STAGE = "stage"
"""The name of the mesh's axis whose ranks run a stage each."""


def is_over_stages(node: Node) -> bool:
    """Whether a node makes one number of what all stages have made of a step."""
    return node.op is OVER_STAGES or (is_collective(node.op) and node.attrs["group"] == STAGE)


def is_collective(op: Op) -> bool:
    """Whether all ranks of a group meet in an op; else one of them sends what another receives."""
    return is_comm.get(op) and op not in (SEND, RECEIVE)


def _check(attrs: Attrs) -> None:
    peer, count = attrs.int_("peer"), attrs.int_("num_ranks")
    if not 0 <= peer < count:
        raise OpTypeError(f"needs a peer of 0 to {count - 1}, got {peer}")
    if not 0 <= attrs.int_("bucket") <= attrs.int_("order"):
        raise OpTypeError(
            f"needs 0 <= bucket <= order, got bucket {attrs.int_('bucket')}"
            f" and order {attrs.int_('order')}"
        )
    attrs.str_("group")
    attrs.bool_("is_up")


@infer_type.of(SEND)
def _send_type(inputs: Types, attrs: Attrs) -> Types:
    expect_inputs(inputs, "x")
    _check(attrs)
    return (TOKEN,)


@infer_type.of(RECEIVE)
def _receive_type(inputs: Types, attrs: Attrs) -> Types:
    for type_ in inputs:
        if type_ != TOKEN:
            raise OpTypeError(f"waits for tokens {TOKEN}, got {type_}")
    _check(attrs)
    return (declared_type(attrs),)


@infer_type.of(OVER_STAGES)
def _over_stages_type(inputs: Types, attrs: Attrs) -> Types:
    if not inputs or any([type_ != inputs[0] for type_ in inputs]):
        raise OpTypeError(f"needs equal types, got {', '.join(map(str, inputs)) or 'none'}")
    if attrs.str_("by") not in ("sum", "max"):
        raise OpTypeError(f"joins by sum or max, got {attrs.str_('by')!r}")
    return inputs[:1]


@array_of(OVER_STAGES)
def _over_stages(attrs: Attrs, *inputs: Array) -> Array:
    return np.asarray((np.sum if attrs.str_("by") == "sum" else np.max)(inputs, axis=0))


@cost.of(SEND, RECEIVE, OVER_STAGES)
def _cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    return Cost(0.0, float(sum([type_.size_bytes for type_ in (*inputs, *outputs)])))
