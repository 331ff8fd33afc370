"""Products of a loop whose b is the same at every step: it is packed once, before the loop.

A library that gets a plain b copies it, block by block, into the layout that it likes, in every
call. With the few rows of a recurrent step that takes a third of the time (20 x 2048 x 512: 454 us
against 319 on one thread), and b does not change. Each chunk of columns is packed on its own, so
that threads share the columns, whose halves then stay in the cache of each from step to step.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.kernels.library import onednn
from actors.kernels.library.gemm_onednn import PACKED_ROWS, CallTable, product_of, weights_of
from actors.kernels.native import runtime
from actors.kernels.native.gemm import Chunk, Gemm, ProductCall, ThreadCut, chunks_of
from actors.kernels.native.gemm_launch import (
    Matrices,
    PackedPlace,
    ProductScratch,
    aligned,
    calls_of,
)
from actors.kernels.native.launch import NativeLaunch, address, native_launch
from actors.protocol import Array


@dataclass(frozen=True, slots=True)
class _PackedColumns:
    """A run of columns of b: the element it begins at, its pack, and where that is, in bytes."""

    first: int
    pack: onednn.Primitive
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class HeldProduct:
    """A product by a packed b; `size_bytes` are what it keeps and works in."""

    gemm: Gemm
    chunks: tuple[Chunk, ...]
    products: tuple[onednn.Primitive, ...]
    columns: tuple[_PackedColumns, ...]
    scratch: ProductScratch

    @staticmethod
    def of(gemm: Gemm | None) -> HeldProduct | None:
        """Return how a product goes; None for one of many rows, or none of the library's."""
        if gemm is None or gemm.batch or gemm.m >= PACKED_ROWS:
            return None
        chunks = chunks_of(gemm, ThreadCut.TILES)
        products: list[onednn.Primitive] = []
        columns: dict[int, _PackedColumns] = {}
        firsts: dict[int, onednn.Primitive] = {}
        size = 0
        for call in calls_of(chunks):
            product = product_of(gemm, call, is_packed=True)
            b = weights_of(gemm, call.columns, is_packed=False)
            pack = None if product is None else onednn.pack(b, 0, call.columns, product)
            if product is None or pack is None:
                return None
            products.append(product)
            if call.b not in columns:
                columns[call.b] = _PackedColumns(call.b, pack, size)
                firsts[call.b] = product
                size += aligned(product.packed_bytes)
            elif not onednn.pack_alike(product, firsts[call.b]):  # of pieces with other rows
                return None
        packs = [one.pack for one in columns.values()]
        worker = max([primitive.scratch_bytes for primitive in (*products, *packs)])
        scratch = ProductScratch(worker, size)
        return HeldProduct(gemm, chunks, tuple(products), tuple(columns.values()), scratch)

    @property
    def size_bytes(self) -> int:
        """Bytes of the packed b, and of the scratch of all threads."""
        return aligned(self.scratch.size_bytes(self._num_workers))

    @property
    def _num_workers(self) -> int:
        return min(runtime.num_threads(), len(self.chunks))

    def launches(self, arrays: Matrices, kept: Array) -> tuple[NativeLaunch, NativeLaunch]:
        """Return what packs b into `kept`, and the product of a step, which reads it there."""
        item, out_item = self.gemm.dtype.itemsize, self.gemm.out_dtype.itemsize
        a, b, out = [address(array) for array in arrays]
        place = PackedPlace(kept, self.scratch, self._num_workers, None)
        where = {one.first: place.shared + one.offset_bytes for one in self.columns}
        packing, table = CallTable(place), CallTable(place)
        for one in self.columns:
            source = (onednn.SOURCE, b + one.first * item)
            packing.add(one.pack, source, (onednn.DESTINATION, where[one.first]))
        for call, product in zip(calls_of(self.chunks), self.products, strict=True):
            table.add(
                product,
                (onednn.SOURCE, a + call.a * item),
                (onednn.WEIGHTS, where[call.b]),
                (onednn.DESTINATION, out + call.out * out_item),
            )
        one_each = [Chunk((ProductCall(0, 0, 0, 0, 0, 0),), 0, 0)] * len(self.columns)
        function = runtime.address_in("gemm.c", "af_gemm_onednn")
        made: list[NativeLaunch] = []
        for own, chunks in ((packing, one_each), (table, self.chunks)):
            words, keep = own.words(chunks, place, 0)
            made.append(native_launch(function, words, (*keep, *arrays), onednn.explain))
        return made[0], made[1]
