"""Normalisation by statistics of the tensor itself (Ioffe & Szegedy, Batch Normalization, 2015)."""

from __future__ import annotations

from compiler.fusion.define import fused_op
from compiler.graph import GraphBuilder, Node
from compiler.ops.binary import ADD, MUL, SUB, scaled
from compiler.ops.reduce import sum_to
from compiler.ops.rule import Grads, gradient_of
from compiler.types import ValueId

BATCH_NORM = fused_op(
    "batch_norm",
    "x, mean, rstd, weight, bias -> y",
    lambda x, mean, rstd, weight, bias: (x - mean) * rstd * weight + bias,
    has_rule=True,
)
"""y = (x - mean) * rstd * weight + bias, where mean and rstd are those of x, over the axes of
extent 1 that they have.

Its gradient is that of all three: x gets what flows back through its statistics as well, and these
get nothing.
"""


@gradient_of(BATCH_NORM)
def _batch_norm(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    """Two sums of one walk, where the derived formula has two walks more over x."""
    x, mean, rstd, weight, bias = node.inputs
    kept = b.type_of(mean)
    share = kept.num_elements / max(1, b.type_of(x).num_elements)
    difference = b.one(SUB, x, mean)  # rather than normal: cheap enough to be made twice
    sum_dy = sum_to(b, dy, kept.shape)
    sum_product = b.one(MUL, sum_to(b, b.one(MUL, dy, difference), kept.shape), rstd)
    slope = b.one(MUL, scaled(b, sum_product, share), rstd)
    away = b.one(ADD, b.one(MUL, difference, slope), scaled(b, sum_dy, share))
    dx = b.one(MUL, b.one(SUB, dy, away), b.one(MUL, rstd, weight))
    pairs = ((sum_product, weight), (sum_dy, bias))
    narrow = [sum_to(b, value, b.type_of(like).shape) for value, like in pairs]
    return (dx, None, None, *narrow)
