"""Sums of many floats by numpy's kernels, in an order that loses little.

`add.reduce` along the last axis adds in pairs (Higham 1993, section 3), but over others adds rows
one after the other, and loses 1e-3 of a million float32. So columns are added in trees of 8 rows in
their own type, whose three roundings lose less than 2e-7 of a sum, and the trees in float64; numpy
casts them on the way, a buffer at a time. A product with ones in float64 takes as long.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from actors.kernels import scratch
from actors.protocol import Array, Launch

WIDE = np.dtype(np.float64)

SHORT_ROW = 64
"""Rows from here on go to `add.reduce`: of 128 float32 it takes 0.3 ns an element, and BLAS 0.07,
but with 64 terms one after the other where it has no vectors."""


def row_sums(x: Array, ones: Array, out: Array) -> Launch:
    """Return the call that writes the sums over the last axis of x; `ones` has its dtype."""
    if x.shape[-1] < SHORT_ROW:
        return partial(np.matmul, x, ones, out=out)
    return partial(np.add.reduce, x, axis=-1, out=out)


def column_sums(x: Array, total: Array, part: Array, trees: Array) -> list[Launch]:
    """Return the calls that add the sums over the rows of x [rows, columns] to `total`.

    `part` is scratch like `total`, in float64 for floats; `trees` has the dtype of x, and half as
    many elements, or none: then rows are added one by one.
    """
    rows, columns = x.shape
    treed = rows // 8 * 8 if trees.size else 0
    calls: list[Launch] = []
    summed = [x[treed:]] if treed < rows else []
    if treed:
        half = scratch.window(trees, (treed // 2, columns))
        quarter, eighth = half[: treed // 4], half[: treed // 8]
        calls += [
            partial(np.add, x[: treed // 2], x[treed // 2 : treed], out=half),
            partial(np.add, quarter, half[treed // 4 :], out=quarter),
            partial(np.add, eighth, quarter[treed // 8 :], out=eighth),
        ]
        summed.append(eighth)
    for terms in summed:
        calls.append(partial(np.add.reduce, terms, axis=0, dtype=total.dtype, out=part))
        calls.append(partial(np.add, total, part, out=total))
    return calls
