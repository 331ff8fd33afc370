"""Tensors between ranks.

A collective is one launch on every rank, and completes on all of them together. It runs in an actor
of kind comm on a stream of its own, so that it overlaps with compute.

Ranks that disagree on which collective comes next would sum different tensors without an error. So
the order is written down: it is an attribute of each, set from the graph alone
(`compiler.turns`), and lowering obeys it, whatever it believes of durations.
"""

from __future__ import annotations

from collections.abc import Sequence

from compiler.attrs import Attrs
from compiler.ops.signature import Types, expect_inputs, typed
from compiler.registry import Op, OpTypeError, define, infer_type, is_comm
from compiler.types import TensorType, ValueId

REDUCTIONS = ("sum", "max", "min")

AWAITED, AHEAD, LATE = "awaited", "ahead", "late"
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


def _check(inputs: Types, attrs: Attrs) -> None:
    if attrs.int_("num_ranks") < 1:
        raise OpTypeError(f"needs num_ranks >= 1, got {attrs.int_('num_ranks')}")
    if attrs.int_("bucket") < 0 or attrs.int_("order") < attrs.int_("bucket"):
        raise OpTypeError(
            f"needs 0 <= bucket <= order, got bucket {attrs.int_('bucket')}"
            f" and order {attrs.int_('order')}"
        )
    if "when" in attrs and attrs.str_("when") not in (AWAITED, AHEAD, LATE):
        raise OpTypeError(f"is wanted ahead, awaited or late, got {attrs.str_('when')!r}")
    attrs.str_("group")


def _check_reduction(inputs: Types, attrs: Attrs) -> None:
    if attrs.str_("by") not in REDUCTIONS:
        raise OpTypeError(f"reduces by one of {', '.join(REDUCTIONS)}, got {attrs.str_('by')!r}")
    _check(inputs, attrs)


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


def met_values(op: Op, inputs: Sequence[ValueId], outputs: Sequence[ValueId]) -> list[ValueId]:
    """Return the operands of a collective that other ranks of its group work on.

    A rank adds up what all others read, for its own part of a sum; it writes what it has to where
    the others want it. So what is summed and scattered is read by others, what is gathered or
    exchanged is written by others, and of an all-reduce both.
    """
    read = inputs if op in (ALL_REDUCE, REDUCE_SCATTER) else ()
    return [*read, *(outputs if op is not REDUCE_SCATTER else ())]


def sent_in_ring(op: Op, size_bytes: float, num_ranks: int) -> tuple[float, int]:
    """Return the bytes that each rank of a group sends in a ring, and in how many messages.

    `size_bytes` are those of what the ranks reduce, gather or exchange together: no algorithm sends
    less (Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
    """
    share, around = size_bytes * (num_ranks - 1) / num_ranks, num_ranks - 1
    if op is ALL_REDUCE:
        return 2 * share, 2 * around
    return (share / num_ranks if op is ALL_TO_ALL else share), around


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
    _check(inputs, attrs)
    return (_with_rows(x, attrs.int_("axis"), attrs.int_("rows")),)


@infer_type.of(ALL_TO_ALL)
def _exchanged_type(inputs: Types, attrs: Attrs) -> Types:
    (x,) = expect_inputs(inputs, "x")
    _check(inputs, attrs)
    x = _with_rows(x, attrs.int_("axis"), attrs.int_("rows"))
    return (_with_rows(x, attrs.int_("to_axis"), attrs.int_("to_rows")),)
