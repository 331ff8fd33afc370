"""Whether a step has gone wrong: NaN or infinity among what it computed. It has no gradient.

One flag is handed from tensor to tensor, so that each is read while it is still in the cache, and
no launch is needed to join the answers.
"""

from __future__ import annotations

import numpy as np

from compiler.attrs import Attrs
from compiler.ops.signature import Array, Types, expect_float, expect_inputs, expect_type
from compiler.registry import Cost, cost, define, infer_type, recompute, reference
from compiler.types import DType, TensorType

NON_FINITE = define("non_finite")
"""x, earlier [] -> 1 where x holds NaN or infinity or earlier is 1, else 0; int64 [].

`earlier` may be left out.
"""

FLAG = TensorType(DType.INT64, ())

recompute.register(NON_FINITE, False)


@infer_type.of(NON_FINITE)
def _type(inputs: Types, attrs: Attrs) -> Types:
    names = ("x", "earlier") if len(inputs) > 1 else ("x",)
    x, *earlier = expect_inputs(inputs, *names)
    expect_float((x,), "x")
    for flag in earlier:
        expect_type(flag, "earlier", FLAG)
    return (FLAG,)


@reference.of(NON_FINITE)
def _reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    x, *earlier = inputs
    return (np.asarray(int(not np.isfinite(x).all() or any([bool(f) for f in earlier]))),)


@cost.of(NON_FINITE)
def _cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    return Cost(float(inputs[0].num_elements), float(inputs[0].size_bytes))
