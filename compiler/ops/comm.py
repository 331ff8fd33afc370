"""Tensors between ranks.

A collective is one launch on every rank, and completes on all of them together. It runs in an actor
of kind comm on a stream of its own, so that it overlaps with compute.
"""

from __future__ import annotations

from compiler.attrs import Attrs
from compiler.ops.signature import Types, expect_float, expect_inputs
from compiler.registry import OpTypeError, define, infer_type, is_comm

ALL_REDUCE = define("all_reduce")
"""x -> the mean of x over all ranks, the same on each. Floats. Attrs: num_ranks."""

is_comm.register(ALL_REDUCE, True)


@infer_type.of(ALL_REDUCE)
def _all_reduce_type(inputs: Types, attrs: Attrs) -> Types:
    (x,) = expect_inputs(inputs, "x")
    expect_float((x,), "x")
    if attrs.int_("num_ranks") < 1:
        raise OpTypeError(f"needs num_ranks >= 1, got {attrs.int_('num_ranks')}")
    return (x,)
