"""Tensors between ranks.

A collective is one launch on every rank, and completes on all of them together. It runs in an actor
of kind comm on a stream of its own, so that it overlaps with compute.

Ranks that disagree on which collective comes next would sum different tensors without an error. So
the order is written down: it is an attribute of each, set by a pass from the graph alone
(`compiler.passes.buckets`), and lowering obeys it, whatever it believes of durations.
"""

from __future__ import annotations

from compiler.attrs import Attrs
from compiler.ops.signature import Types, expect_float, expect_inputs, typed
from compiler.registry import OpTypeError, define, infer_type, is_comm
from compiler.types import TensorType

REDUCTIONS = ("sum", "max", "min")

EVERYONE = "all"
"""The group of all ranks."""

ALL_REDUCE = define("all_reduce")
"""x -> the mean of x over the ranks of a group, the same on each; floats. With `by` another.

Attrs: num_ranks, those of the group; group, its name; bucket, of those that begin together in one
firing; order, the place among all collectives of a graph; by, which may be left out: "sum", "max"
or "min" over the ranks in place of the mean. Buckets are numbered in that order too.
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
    attrs.str_("group")


def _check_reduction(inputs: Types, attrs: Attrs) -> None:
    if "by" not in attrs:  # a mean
        expect_float(inputs, "x")
    elif attrs.str_("by") not in REDUCTIONS:
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


def _with_rows(type_: TensorType, axis: int, rows: int) -> TensorType:
    if not 0 <= axis < type_.rank:
        raise OpTypeError(f"needs an axis of {type_}, got {axis}")
    shape = list(type_.shape)
    shape[axis] = rows
    return TensorType(type_.dtype, tuple(shape))


@infer_type.of(REDUCE_SCATTER, ALL_GATHER)
def _parts_type(inputs: Types, attrs: Attrs) -> Types:
    (x,) = expect_inputs(inputs, "x")
    _check(inputs, attrs)
    return (_with_rows(x, attrs.int_("axis"), attrs.int_("rows")),)


@infer_type.of(ALL_TO_ALL)
def _exchanged_type(inputs: Types, attrs: Attrs) -> Types:
    (x,) = expect_inputs(inputs, "x")
    _check(inputs, attrs)
    x = _with_rows(x, attrs.int_("axis"), attrs.int_("rows"))
    return (_with_rows(x, attrs.int_("to_axis"), attrs.int_("to_rows")),)
