"""Tensors between ranks.

A collective is one launch on every rank, and completes on all of them together. It runs in an actor
of kind comm on a stream of its own, so that it overlaps with compute.

Ranks that disagree on which collective comes next would sum different tensors without an error. So
the order is written down: it is an attribute of each, set by a pass from the graph alone
(`compiler.passes.buckets`), and lowering obeys it, whatever it believes of durations.
"""

from __future__ import annotations

from compiler.attrs import Attrs
from compiler.ops.signature import Types, typed
from compiler.registry import OpTypeError, define, is_comm

EVERYONE = "all"
"""The group of all ranks."""

ALL_REDUCE = define("all_reduce")
"""x -> the mean of x over the ranks of a group, the same on each. Floats.

Attrs: num_ranks, those of the group; group, its name; bucket, of those that begin together in one
firing; order, the place among all collectives of a graph. Buckets are numbered in that order too.
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


typed(ALL_REDUCE, "x: float -> x", _check)
