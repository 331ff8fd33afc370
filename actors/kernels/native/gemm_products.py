"""Products by numpy's own OpenBLAS, and by the small product of gemm.c.

The small one packs nothing and so wins where a call of a library costs as much as the product.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.kernels.library import openblas
from actors.kernels.native import runtime
from actors.kernels.native.gemm import Chunk, Gemm, ThreadCut
from actors.kernels.native.gemm_launch import (
    Matrices,
    PackedPlace,
    ProductScratch,
    aligned,
    calls_of,
    head_words,
    named,
)
from actors.kernels.native.launch import NativeLaunch, address, native_launch
from compiler.errors import InternalError
from compiler.types import DType

SMALL_FLOPS = 2 * 64**3
"""Up to this many per matrix the small product is asked; at any size for few rows or columns."""

SMALL_ROWS, SMALL_COLUMNS = 4, 64
_LANES = 16


@dataclass(frozen=True, slots=True)
class OpenBlas:
    """float32 and float64 through the library that numpy carries."""

    cut: ThreadCut = ThreadCut.TILES

    @property
    def name(self) -> str:
        """Its own name and the cut's."""
        return named("openblas", self.cut)

    def scratch(self, gemm: Gemm, chunks: tuple[Chunk, ...]) -> ProductScratch | None:
        """Take float32 and float64 where numpy's library is OpenBLAS; no scratch."""
        is_known = gemm.dtype in (DType.FLOAT32, DType.FLOAT64) and gemm.out_dtype is gemm.dtype
        blas = openblas.found() if is_known else None
        if blas is None or (blas.integer_bits == 32 and _largest(gemm) >= 1 << 31):
            return None
        return ProductScratch()

    def launch(
        self, gemm: Gemm, chunks: tuple[Chunk, ...], arrays: Matrices, place: PackedPlace
    ) -> NativeLaunch:
        """Tell the library to use one thread, for ours call it at once."""
        blas = openblas.found()
        if blas is None:
            raise InternalError("a plan has kernels of OpenBLAS, which numpy does not carry here")
        openblas.use_one_thread()
        is_double = gemm.dtype is DType.FLOAT64
        function = f"af_gemm_{'dgemm' if is_double else 'sgemm'}{blas.integer_bits}"
        target = blas.dgemm if is_double else blas.sgemm
        return _product_launch(function, gemm, chunks, arrays, place, target)


@dataclass(frozen=True, slots=True)
class Small:
    """float32 by the small product of gemm.c."""

    name: str = "c"
    cut: ThreadCut = ThreadCut.ROWS

    def scratch(self, gemm: Gemm, chunks: tuple[Chunk, ...]) -> ProductScratch | None:
        """Take small matrices, and few rows; scratch is one panel of b."""
        flops = 2 * gemm.m * gemm.n * gemm.k
        is_low = gemm.m <= SMALL_ROWS and gemm.b.column == 1
        is_small = flops <= SMALL_FLOPS or is_low or gemm.n <= SMALL_COLUMNS
        is_float = gemm.dtype is DType.FLOAT32 and gemm.out_dtype is DType.FLOAT32
        is_taken = is_small and is_float and not gemm.adds
        return ProductScratch(4 * _LANES * gemm.k) if is_taken else None

    def launch(
        self, gemm: Gemm, chunks: tuple[Chunk, ...], arrays: Matrices, place: PackedPlace
    ) -> NativeLaunch:
        """Return the launch of gemm.c."""
        return _product_launch("af_gemm_small", gemm, chunks, arrays, place, 0)


def _product_launch(
    function: str,
    gemm: Gemm,
    chunks: tuple[Chunk, ...],
    arrays: Matrices,
    place: PackedPlace,
    target: int,
) -> NativeLaunch:
    item = gemm.dtype.itemsize
    a, b, out = [address(array) for array in arrays]
    rows = [
        (c.rows, c.columns, gemm.k, a + c.a * item, b + c.b * item, out + c.out * item)
        for c in calls_of(chunks)
    ]
    calls = np.array(rows, np.int64)
    words, held = head_words(chunks, place)
    words += [address(calls), gemm.a.row, gemm.a.column, gemm.b.row, gemm.b.column, gemm.out.row]
    words += [target, float(gemm.adds), place.of_worker(0), aligned(place.scratch.worker_bytes)]
    where = runtime.address_in("gemm.c", function)
    return native_launch(where, words, (*held, calls, *arrays))


def _largest(gemm: Gemm) -> int:
    sides = (gemm.a, gemm.b, gemm.out)
    return max([gemm.m, gemm.n, gemm.k, *[max(side.row, side.column) for side in sides]])
