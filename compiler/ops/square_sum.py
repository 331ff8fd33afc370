"""The sum of squares of a tensor, added to that of others: what norms of many tensors are made of.

One number is handed from tensor to tensor, so that each is read while it is still in the cache, and
no launch is needed to add the sums up. In float64 it overflows for no float32.
"""

from __future__ import annotations

import numpy as np

from compiler.attrs import Attrs
from compiler.fusion.builder import ProgramBuilder
from compiler.fusion.expansion import Frame, expand, frame
from compiler.fusion.expressions import Expression
from compiler.ops.rule import array_of
from compiler.ops.signature import Array, Types, typed
from compiler.registry import Cost, cost, define, recompute
from compiler.types import DType

SQUARE_SUM = define("square_sum")
"""x, earlier [] -> earlier + the sum of x * x; float64 []. `earlier` may be left out."""

recompute.register(SQUARE_SUM, False)
typed(SQUARE_SUM, "x: float, earlier? = float64 -> float64")


@frame.of(SQUARE_SUM)
def _frame(inputs: Types, outputs: Types, attrs: Attrs) -> Frame:
    """See x as one row, whatever its axes: it is shared among threads by columns."""
    shape = inputs[0].shape
    return Frame(shape, tuple([t.shape for t in inputs]), ((),), num_trailing=len(shape))


@expand.of(SQUARE_SUM)
def _expand(
    p: ProgramBuilder, attrs: Attrs, types: Types, values: tuple[int, ...]
) -> tuple[int, ...]:
    x, *earlier = [Expression(p, v) for v in values]
    wide = x.to(DType.FLOAT64)
    total = (wide * wide).sum()
    for before in earlier:
        total = before + total
    return (total.value,)


@array_of(SQUARE_SUM)
def _reference(attrs: Attrs, x: Array, earlier: Array | float = 0.0) -> Array:
    return np.asarray(earlier + np.sum(np.square(x, dtype=np.float64)))


@cost.of(SQUARE_SUM)
def _cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    return Cost(2.0 * inputs[0].num_elements, float(inputs[0].size_bytes))
