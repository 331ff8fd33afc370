"""Sums of many floats by numpy's kernels, in an order that loses little.

`add.reduce` along the last axis adds in pairs (Higham 1993, section 3), but over others adds rows
one after the other, and loses 1e-3 of a million float32; a product with ones loses what BLAS
loses. So long rows go to `add.reduce`, short ones to BLAS, and columns are added in trees of 8,
upcast, a block at a time, and added up in float64 by a product with ones: what is left is the
rounding of three additions and of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from actors.kernels import scratch
from actors.kernels.interpret.blocks import cut, num_elements
from actors.kernels.scratch import Piece
from actors.protocol import Array, Launch

WIDE = np.dtype(np.float64)

TERMS = 8192
"""Of a block in float64. OpenBLAS multiplies up to 9,216 elements by a vector on the calling thread
alone; with more it waits for the others, and the order depends on how many there are."""

_TREE = 8
"""Rows of float32 that are added as they are: three roundings lose less than 2e-7 of a sum."""

SHORT_ROW = 64
"""Rows from here on go to `add.reduce`: of 128 float32 it takes 0.3 ns an element, and BLAS 0.07,
but with 64 terms one after the other where it has no vectors."""


@dataclass(frozen=True, slots=True)
class SumScratch:
    """A block in float64, and two vectors of results under way."""

    wide: Array
    totals: Array
    parts: Array


def sum_pieces(terms: int, results: int) -> tuple[Piece, Piece, Piece]:
    """Return the scratch, as `SumScratch` has it: for at most so many terms and results."""
    vector = Piece((results,), WIDE)
    return (Piece((min(terms, TERMS),), WIDE), vector, vector)


def row_sums(x: Array, ones: Array, out: Array) -> Launch:
    """Return the call that writes the sums over the last axis of x; `ones` has its dtype."""
    if x.shape[-1] < SHORT_ROW:
        return partial(np.matmul, x, ones, out=out)
    return partial(np.add.reduce, x, axis=-1, out=out)


def column_sums(x: Array, num_axes: int, ones: Array, totals: Array, s: SumScratch) -> list[Launch]:
    """Return the calls that add the sums over the first `num_axes` axes of x to `totals`.

    `totals`, and the vector of ones, are float64; the further axes of x are those of `totals`, a
    single one where they have more than TERMS elements.
    """
    calls: list[Launch] = []
    columns = totals.size
    for first in range(0, columns, TERMS):
        piece = x[..., first : first + TERMS] if columns > TERMS else x
        total = totals.reshape(-1)[first : first + TERMS]
        if num_axes == 1 and piece.ndim == 2 and x.dtype == np.float32:
            most = 2 * s.wide.size // total.size // _TREE * _TREE
            rows = len(piece) // _TREE * _TREE if most else 0
            for begin in range(0, rows, max(most, 1)):
                calls += _trees(piece[begin : min(begin + most, rows)], ones, total, s)
            piece = piece[rows:]
        for (block,) in cut((piece,), num_axes, max(1, min(TERMS // total.size, ones.size))):
            rows = num_elements(block.shape) // total.size
            part = s.parts[: total.size]
            wide = scratch.window(s.wide, (rows, total.size))
            calls += [
                partial(np.copyto, wide.reshape(block.shape), block),
                partial(np.matmul, ones[:rows], wide, out=part),
                partial(np.add, total, part, out=total),
            ]
    return calls


def _trees(x: Array, ones: Array, total: Array, s: SumScratch) -> list[Launch]:
    """Return the calls that add the columns of a matrix, in trees of 8 rows, to `total`.

    The first half of the scratch has the trees, the second what comes of them in float64.
    """
    rows, columns = x.shape
    half = scratch.window(s.wide.view(x.dtype), (rows // 2, columns))
    quarter, eighth = half[: rows // 4], half[: rows // 8]
    wide = scratch.window(s.wide[s.wide.size // 2 :], eighth.shape)
    part = s.parts[:columns]
    return [
        partial(np.add, x[: rows // 2], x[rows // 2 :], out=half),
        partial(np.add, quarter, half[rows // 4 :], out=quarter),
        partial(np.add, eighth, quarter[rows // 8 :], out=eighth),
        partial(np.copyto, wide, eighth),
        partial(np.matmul, ones[: rows // 8], wide, out=part),
        partial(np.add, total, part, out=total),
    ]
