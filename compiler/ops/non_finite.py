"""Whether a step has gone wrong: NaN or infinity among what it computed. It has no gradient.

One flag is handed from tensor to tensor, so that each is read while it is still in the cache, and
no launch is needed to join the answers.
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

NON_FINITE = define("non_finite")
"""x, earlier [] -> 1 where x holds NaN or infinity or earlier is 1, else 0; int64 [].

`earlier` may be left out; x has elements.
"""

recompute.register(NON_FINITE, False)
typed(NON_FINITE, "x: float, earlier? = int64 -> int64")


@frame.of(NON_FINITE)
def _frame(inputs: Types, outputs: Types, attrs: Attrs) -> Frame:
    """See x as one row, whatever its axes: it is shared among threads by columns."""
    shape = inputs[0].shape
    return Frame(shape, tuple([t.shape for t in inputs]), ((),), num_trailing=len(shape))


@expand.of(NON_FINITE)
def _expand(
    p: ProgramBuilder, attrs: Attrs, types: Types, values: tuple[int, ...]
) -> tuple[int, ...]:
    x, *earlier = [Expression(p, v) for v in values]
    # Short floats are computed in float32. NaN compares as false: what is asked is who is finite.
    largest = np.finfo(np.float64 if x.dtype is DType.FLOAT64 else np.float32).max
    flag = 1 - (abs(x) <= float(largest)).to(DType.INT32).min().to(DType.INT64)
    for before in earlier:
        flag = flag.maximum(before)
    return (flag.value,)


@array_of(NON_FINITE)
def _reference(attrs: Attrs, x: Array, earlier: Array | bool = False) -> Array:
    return np.asarray(int(bool(earlier) or not np.isfinite(x).all()))


@cost.of(NON_FINITE)
def _cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    return Cost(float(inputs[0].num_elements), float(inputs[0].size_bytes))
