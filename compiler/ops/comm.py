"""Tensors between ranks.

A collective is one launch on every rank, and completes on all of them together. It runs in an actor
of kind comm on a stream of its own, so that it overlaps with compute.
"""

from __future__ import annotations

from compiler.attrs import Attrs
from compiler.ops.signature import Types, typed
from compiler.registry import OpTypeError, define, is_comm

ALL_REDUCE = define("all_reduce")
"""x -> the mean of x over all ranks, the same on each. Floats. Attrs: num_ranks."""

is_comm.register(ALL_REDUCE, True)


def _check(inputs: Types, attrs: Attrs) -> None:
    if attrs.int_("num_ranks") < 1:
        raise OpTypeError(f"needs num_ranks >= 1, got {attrs.int_('num_ranks')}")


typed(ALL_REDUCE, "x: float -> x", _check)
