"""Tensors between ranks, between stages of a pipeline, and between memories.

A collective is one launch on every rank, and completes on all of them together. It runs in an actor
of kind comm on a stream of its own, so that it overlaps with compute.

Ranks that disagree on which collective comes next would sum different tensors without an error. So
the order is written down: it is an attribute of each, set from the graph alone
(`compiler.sbp.collective_schedule`), and lowering obeys it, whatever it believes of durations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compiler.contract.attrs import Attrs
from compiler.contract.placement import STAGE as STAGE
from compiler.contract.sbp import PARTIAL, PARTIAL_MAX, PARTIAL_MIN, Sbp, Split
from compiler.contract.types import DType, TensorType, ValueId
from compiler.graph.columns import (
    Grads,
    LocalCall,
    SbpSignature,
    gradient_of,
    project,
    reference_of,
    sbp_signatures,
    streaming_cost,
)
from compiler.graph.graph import Graph, GraphBuilder, Node, cached_analysis
from compiler.graph.registry import (
    Array,
    Cost,
    Op,
    OpTypeError,
    Types,
    concat_slices,
    cost,
    define,
    expect_inputs,
    has_effect,
    infer_type,
    input_output_aliases,
    is_comm,
    is_exact,
    is_source,
    recompute,
    typed,
    view,
)
from compiler.ops.primitives.sources import declared_type

REDUCTIONS = ("sum", "max", "min")

BLOCKING, PREFETCH, DEFERRED = "awaited", "ahead", "late"
"""When a collective is wanted: at once, before it is read, or by nothing but the step's end."""

ALL_REDUCE = define("all_reduce")
"""x -> the sum of x over the ranks of a group, or its extreme, the same bits on each.

Attrs: num_ranks, those of the group; group, the axis of the mesh that they differ along; bucket, of
those that begin together in one firing; order, the place among all collectives of a graph; by,
"sum", "max" or "min"; when, which may be left out: "awaited", "ahead" or
"late"; is_back, which may be left out: whether it is of the backward pass of a pipeline's stage,
while other batches go forward. Buckets are numbered in that order too.
"""

is_comm.register(ALL_REDUCE, True)


def _check_comm(inputs: Types, attrs: Attrs) -> None:
    if attrs.int_("num_ranks") < 1:
        raise OpTypeError(f"needs num_ranks >= 1, got {attrs.int_('num_ranks')}")
    _check_turn(attrs)
    if "when" in attrs and attrs.str_("when") not in (BLOCKING, PREFETCH, DEFERRED):
        raise OpTypeError(f"is wanted ahead, awaited or late, got {attrs.str_('when')!r}")


def _check_turn(attrs: Attrs) -> None:
    bucket, order = attrs.int_("bucket"), attrs.int_("order")
    if not 0 <= bucket <= order:
        raise OpTypeError(f"needs 0 <= bucket <= order, got bucket {bucket} and order {order}")
    attrs.str_("group")


def _check_reduction(inputs: Types, attrs: Attrs) -> None:
    if attrs.str_("by") not in REDUCTIONS:
        raise OpTypeError(f"reduces by one of {', '.join(REDUCTIONS)}, got {attrs.str_('by')!r}")
    _check_comm(inputs, attrs)


typed(ALL_REDUCE, "x -> x", _check_reduction)


REDUCE_SCATTER = define("reduce_scatter")
"""x -> this rank's part of the sum, or extreme, of x over the ranks of a group.

Attrs: those of all_reduce; axis, along which parts are cut; rows, those of this rank: the first
ranks have one more where they are not even.
"""

ALL_GATHER = define("all_gather")
"""x -> the parts of all ranks of a group one after another. Attrs: those of all_reduce; axis; rows
of the whole."""

ALL_TO_ALL = define("all_to_all")
"""x -> from parts along an axis parts along another one. Attrs: those of all_reduce; axis and rows
of the whole as they were; to_axis and to_rows, those of this rank, as they will be."""

for _op in (REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL):
    is_comm.register(_op, True)


def peer_operands(op: Op, inputs: Sequence[ValueId], outputs: Sequence[ValueId]) -> list[ValueId]:
    """Return the operands of a collective that other ranks of its group work on.

    A rank adds up what all others read, for its own part of a sum; it writes what it has to where
    the others want it. So what is summed and scattered is read by others, what is gathered or
    exchanged is written by others, and of an all-reduce both.
    """
    reads = inputs if op in (ALL_REDUCE, REDUCE_SCATTER) else ()
    return [*reads, *(outputs if op is not REDUCE_SCATTER else ())]


def _with_rows(type_: TensorType, axis: int, rows: int) -> TensorType:
    if not 0 <= axis < type_.rank:
        raise OpTypeError(f"needs an axis of {type_}, got {axis}")
    shape = list(type_.shape)
    shape[axis] = rows
    return TensorType(type_.dtype, tuple(shape))


@infer_type.of(REDUCE_SCATTER)
def _reduced_part_type(inputs: Types, attrs: Attrs) -> Types:
    (x,) = expect_inputs(inputs, "x")
    _check_reduction(inputs, attrs)
    return (_with_rows(x, attrs.int_("axis"), attrs.int_("rows")),)


@infer_type.of(ALL_GATHER)
def _gathered_type(inputs: Types, attrs: Attrs) -> Types:
    (x,) = expect_inputs(inputs, "x")
    _check_comm(inputs, attrs)
    return (_with_rows(x, attrs.int_("axis"), attrs.int_("rows")),)


@infer_type.of(ALL_TO_ALL)
def _exchanged_type(inputs: Types, attrs: Attrs) -> Types:
    (x,) = expect_inputs(inputs, "x")
    _check_comm(inputs, attrs)
    x = _with_rows(x, attrs.int_("axis"), attrs.int_("rows"))
    return (_with_rows(x, attrs.int_("to_axis"), attrs.int_("to_rows")),)


# A `send` on one rank and the `receive` of its neighbour that has the same attribute `order` are
# one transfer: what the one reads is what the other makes, to the bit. A channel leads from a stage
# to the next one, or to the one before. What goes through it for one batch is one bucket, and all
# buckets of a channel go in the order of batches. Each end of a channel has a stream of its own: a
# rank that waits for a neighbour keeps none of its other ends waiting, so neighbours that wait for
# each other do not stand still.
#
# A token is a tensor without elements, that stands for what has been sent. Whoever reads it comes
# after that: so what leads back from a later stage is not waited for before a batch has gone there.

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


def is_over_stages(node: Node) -> bool:
    """Whether a node makes one number of what all stages have made of a step."""
    return node.op is OVER_STAGES or (is_collective(node.op) and node.attrs["group"] == STAGE)


def is_collective(op: Op) -> bool:
    """Whether all ranks of a group meet in an op; else one of them sends what another receives."""
    return is_comm.get(op) and op not in (SEND, RECEIVE)


def _check_channel(attrs: Attrs) -> None:
    peer, count = attrs.int_("peer"), attrs.int_("num_ranks")
    if not 0 <= peer < count:
        raise OpTypeError(f"needs a peer of 0 to {count - 1}, got {peer}")
    _check_turn(attrs)
    attrs.bool_("is_up")


@infer_type.of(SEND)
def _send_type(inputs: Types, attrs: Attrs) -> Types:
    expect_inputs(inputs, "x")
    _check_channel(attrs)
    return (TOKEN,)


@infer_type.of(RECEIVE)
def _receive_type(inputs: Types, attrs: Attrs) -> Types:
    for type_ in inputs:
        if type_ != TOKEN:
            raise OpTypeError(f"needs tokens of type {TOKEN}, got {type_}")
    _check_channel(attrs)
    return (declared_type(attrs),)


@infer_type.of(OVER_STAGES)
def _over_stages_type(inputs: Types, attrs: Attrs) -> Types:
    if not inputs or any([type_ != inputs[0] for type_ in inputs]):
        raise OpTypeError(f"needs equal types, got {', '.join(map(str, inputs)) or 'none'}")
    if attrs.str_("by") not in ("sum", "max"):
        raise OpTypeError(f"joins by sum or max, got {attrs.str_('by')!r}")
    return inputs[:1]


@reference_of(OVER_STAGES)
def _over_stages(attrs: Attrs, *inputs: Array) -> Array:
    return np.asarray((np.sum if attrs.str_("by") == "sum" else np.max)(inputs, axis=0))


@cost.of(SEND, RECEIVE, OVER_STAGES)
def _cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    return Cost(0.0, float(sum([type_.size_bytes for type_ in (*inputs, *outputs)])))


# A value lies in the memory of the device that its node computes on. Two kinds of nodes say
# otherwise: a copy, whose value lies in the place `to`, and a source with an attribute `place`. A
# place is the number of a device of the job, or HOST_SIDE, the memory of the host that devices copy
# from and to. Nothing computes there: it holds what comes from outside and what goes there, and
# what a device need not hold all the time.
#
# A copy is one launch of the plain copy kernel. It runs in an actor of kind copy, on a stream of
# its own for each direction, so that it overlaps with compute. Copies with the same `bucket` run in
# one actor. What flows back through a copy that the user wrote needs none of its own: like any
# value it is brought to where it is read (`compiler.passes.place`).

COPY_TO = define("copy_to")
"""x -> x in place `to`; with a second input, over that variable. Attrs: to, bucket."""

COPY_BLOCK = define("copy_block")
"""x, ... -> x, ...: neighbours in memory, there and here alike, as one copy. Attrs: size_bytes.

The block has so many bytes, from the first tensor to the end of the last; what lies between two of
them is nobody's. No graph has it: lowering makes it of what it has given places, and
`compiler.verify.verify` proves those.
"""

input_output_aliases.register(COPY_TO, ((0, 1),))
is_exact.register(COPY_TO, True)
recompute.register(COPY_TO, False)
typed(COPY_TO, "x, variable? = x -> x")
infer_type.register(COPY_BLOCK, lambda inputs, attrs: inputs)


def is_copy(node: Node) -> bool:
    """Whether a node takes a value from one place to another."""
    return node.op is COPY_TO


@cached_analysis
def value_devices(graph: Graph) -> tuple[int, ...]:
    """Return, per value, the number of the device where it lies, or HOST_SIDE. O(nodes)."""
    column = [0] * len(graph.types)
    ops = {node.op for node in graph.nodes}
    sources = {op for op in ops if is_source.get(op)}
    views = {op for op in ops if view.has(op)}
    for node in graph.nodes:
        if is_copy(node):
            place = node.attrs.int_("to")
        elif node.op in sources:
            place = node.attrs.int_("place") if "place" in node.attrs else node.device
        elif node.op in views:
            place = column[node.inputs[0]]
        else:
            place = node.device
        for value in node.outputs:
            column[value] = place
    return tuple(column)


def value_device(graph: Graph, value: ValueId) -> int:
    """Return the number of the device where a value lies, or HOST_SIDE."""
    return value_devices(graph)[value]


def next_bucket(graph: Graph) -> int:
    """Return a bucket that no copy of a graph is in, nor any above it."""
    return max([node.attrs.int_("bucket") for node in graph.nodes if is_copy(node)], default=-1) + 1


@reference_of(COPY_TO)
def _copy(attrs: Attrs, x: Array, *over: Array) -> Array:
    return np.array(x)


@gradient_of(COPY_TO)
def _pass_on(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return (dy, *[None for _ in node.inputs[1:]])


@cost.of(COPY_TO)
def _copy_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    return Cost(0.0, float(inputs[0].size_bytes + outputs[0].size_bytes))


# By `to_sbp` a job says how a value lies on its ranks. It computes nothing: projection brings the
# value into the layout, and leaves the op out (`compiler.sbp.distribute`); what flows back through
# it may lie otherwise.

TO_SBP = define("to_sbp")
"""x -> x. Attrs: sbp, a `Layout`: pairs of an axis of the mesh and a word."""


def _check_to_sbp(inputs: Types, attrs: Attrs) -> None:
    pairs = attrs.get("sbp", ())
    for pair in pairs if isinstance(pairs, tuple) else (pairs,):
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[1], Sbp):
            raise OpTypeError(f"needs pairs of an axis of the mesh and a word, got {pair!r}")
        word = pair[1]
        if isinstance(word, Split) and word.axis >= inputs[0].rank:
            raise OpTypeError(f"cannot split axis {word.axis} of {inputs[0]}")


typed(TO_SBP, "x -> x", _check_to_sbp)
is_exact.register(TO_SBP, True)
streaming_cost(TO_SBP)
reference_of(TO_SBP)(lambda attrs, x: x.copy())
gradient_of(TO_SBP)(lambda b, node, dy: (dy,))
view.of(TO_SBP)(lambda input_type, layout, output_type, attrs: layout)
concat_slices.of(TO_SBP)(lambda output_type, layout, input_types, attrs: (layout,))


@sbp_signatures.of(TO_SBP)
def _signatures(inputs: Types, outputs: Types, attrs: Attrs, parts: int) -> list[SbpSignature]:
    words: list[Sbp] = [PARTIAL, PARTIAL_MAX, PARTIAL_MIN]
    words += [Split(axis) for axis in range(inputs[0].rank)]
    return [SbpSignature((word,), (word,)) for word in words]


@project.of(TO_SBP)
def _what_came(b: GraphBuilder, call: LocalCall) -> tuple[ValueId, ...]:
    return call.inputs
