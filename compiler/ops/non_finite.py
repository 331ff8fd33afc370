"""Whether a step has gone wrong: NaN or infinity among what it computed. It has no gradient.

One flag is handed from tensor to tensor, so that each is read while it is still in the cache, and
no launch is needed to join the answers.
"""

from __future__ import annotations

import numpy as np

from compiler.attrs import Attrs
from compiler.ops.rule import array_of
from compiler.ops.signature import Array, Types, typed
from compiler.registry import Cost, cost, define, recompute

NON_FINITE = define("non_finite")
"""x, earlier [] -> 1 where x holds NaN or infinity or earlier is 1, else 0; int64 [].

`earlier` may be left out.
"""

recompute.register(NON_FINITE, False)
typed(NON_FINITE, "x: float, earlier? = int64 -> int64")


@array_of(NON_FINITE)
def _reference(attrs: Attrs, x: Array, earlier: Array | bool = False) -> Array:
    return np.asarray(int(bool(earlier) or not np.isfinite(x).all()))


@cost.of(NON_FINITE)
def _cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    return Cost(float(inputs[0].num_elements), float(inputs[0].size_bytes))
