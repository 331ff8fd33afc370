"""Products by oneDNN: one primitive per extent of a chunk, memory objects for every call.

A product may be packed: b is first copied, in panels, to the layout that the library likes best, in
the workspace of the launch, and then read by every chunk. That makes chunks of few rows nearly as
fast as large ones, and pays with many rows: 3 to 5 % with 2048, nothing with 256. Blocks of 256
rows are another 3 to 7 % faster where two cores are all there is, and too few chunks for many. In
a loop whose b is the same at every step, it is packed once, before the loop (`PrepackedGemm`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from actors.kernels.common.gemm import Chunk, Gemm, ProductCall, ThreadCut, chunks_of
from actors.kernels.common.host_memory import address
from actors.kernels.library import onednn, runtime
from actors.kernels.library.gemm_launch import (
    Matrices,
    PackedPlace,
    ProductScratch,
    aligned,
    calls_of,
    head_words,
    named,
)
from actors.kernels.library.launch import NativeLaunch, Word, argument_block, native_launch
from actors.machine.protocol import Array
from compiler.contract.errors import InternalError

PACKED_ROWS = 512
"""Rows of a product that is worth packing, at least."""

PANEL_COLUMNS = 64
"""Panels begin at multiples of this: the widest block of the library's layouts."""

_MAX_PANELS = 16
_DENSE = "brg"
"""What the name of an implementation begins with that reads a packed b without unpacking it."""


@dataclass(frozen=True, slots=True)
class OneDnn:
    """float32 and bfloat16."""

    cut: ThreadCut = ThreadCut.TILES
    is_packed: bool = False

    @property
    def name(self) -> str:
        """Its own name and the cut's."""
        if self.is_packed:
            return "onednn.packed" if self.cut is ThreadCut.ROWS else "onednn.packed.blocks"
        return named("onednn", self.cut)

    def scratch(self, gemm: Gemm, chunks: tuple[Chunk, ...]) -> ProductScratch | None:
        """Take what the library has an implementation for."""
        if self.is_packed and (gemm.batch or gemm.m < PACKED_ROWS):
            return None
        primitives = [product_of(gemm, call, is_packed=self.is_packed) for call in _shapes(chunks)]
        products = [primitive for primitive in primitives if primitive is not None]
        if len(products) < len(primitives):
            return None
        size = max([primitive.scratch_bytes for primitive in products])
        if not self.is_packed:
            return ProductScratch(size)
        packs = _packs(gemm, products[0])
        if packs is None or not all([_reads_packed(p, products[0]) for p in products]):
            return None
        size = max([size, *[primitive.scratch_bytes for _, primitive in packs]])
        return ProductScratch(size, products[0].packed_bytes)

    def launch(
        self, gemm: Gemm, chunks: tuple[Chunk, ...], arrays: Matrices, place: PackedPlace
    ) -> NativeLaunch:
        """Make the memory objects of every call; a status that is not 0 is the launch's."""
        item, out_item = gemm.dtype.itemsize, gemm.out_dtype.itemsize
        a, b, out = [address(array) for array in arrays]
        table = CallTable(place)
        for call in calls_of(chunks):
            primitive = product_of(gemm, call, is_packed=self.is_packed)
            if primitive is None:
                raise InternalError(f"{self.name} refuses a chunk of {gemm.key}: {call}")
            weights = place.shared if self.is_packed else b + call.b * item
            table.add(
                primitive,
                (onednn.SOURCE, a + call.a * item),
                (onednn.WEIGHTS, weights),
                (onednn.DESTINATION, out + call.out * out_item),
            )
        before, packing = (0, ()) if not self.is_packed else self._packing(gemm, chunks, b, place)
        words, keep = table.words(chunks, place, before)
        function = runtime.address_in("gemm.c", "af_gemm_onednn")
        return native_launch(function, words, (*keep, packing, *arrays), onednn.explain)

    def _packing(
        self, gemm: Gemm, chunks: tuple[Chunk, ...], b: int, place: PackedPlace
    ) -> tuple[int, tuple[object, ...]]:
        """Return the block of the calls that pack b, and what keeps it alive."""
        product = product_of(gemm, chunks[0].calls[0], is_packed=True)
        packs = None if product is None else _packs(gemm, product)
        if packs is None:
            raise InternalError(f"{self.name} does not pack the operand b of {gemm.key}")
        table = CallTable(place)
        for first, primitive in packs:
            source = b + first * gemm.b.column * gemm.dtype.itemsize
            table.add(primitive, (onednn.SOURCE, source), (onednn.DESTINATION, place.shared))
        # Chunks without a product: each stands for one call of the table, so that threads share the
        # packing.
        one_each = [Chunk((ProductCall(0, 0, 0, 0, 0, 0),), 0, 0)] * len(packs)
        alone = PackedPlace(place.workspace, place.scratch, place.num_workers, None)
        words, keep = table.words(one_each, alone, 0)
        block = argument_block(words)
        return ctypes.addressof(block), (block, *keep)


def product_of(gemm: Gemm, call: ProductCall, *, is_packed: bool) -> onednn.Primitive | None:
    """Return the primitive of a call, whose b is plain or packed; None where it is refused."""
    return onednn.matmul(
        onednn.Matrix(gemm.dtype, call.rows, gemm.k, gemm.a.row, gemm.a.column),
        weights_of(gemm, call.columns, is_packed=is_packed),
        onednn.Matrix(gemm.out_dtype, call.rows, call.columns, gemm.out.row, gemm.out.column),
        adds=gemm.adds,
    )


def _shapes(chunks: Sequence[Chunk]) -> list[ProductCall]:
    """Return one call of every extent that occurs, in order."""
    shapes: dict[tuple[int, int], ProductCall] = {}
    for call in calls_of(chunks):
        # Chunks of one shape share a primitive; at the edges there are up to three other shapes.
        shapes.setdefault((call.rows, call.columns), call)
    return list(shapes.values())


def weights_of(gemm: Gemm, columns: int, *, is_packed: bool) -> onednn.Matrix:
    """Return how columns of b lie: as they are, or packed."""
    steps = (0, 0) if is_packed else (gemm.b.row, gemm.b.column)
    return onednn.Matrix(gemm.dtype, gemm.k, columns, *steps, is_packed)


def _reads_packed(product: onednn.Primitive, first: onednn.Primitive) -> bool:
    return product.name.startswith(_DENSE) and onednn.pack_alike(product, first)


def _packs(
    gemm: Gemm, product: onednn.Primitive
) -> tuple[tuple[int, onednn.Primitive], ...] | None:
    """Return the copies that pack b, each with its first column; None where one is refused."""
    blocks = -(-gemm.n // PANEL_COLUMNS)
    # Whole panels of the library's layout, so that no two copies write one.
    width = PANEL_COLUMNS * -(-blocks // _MAX_PANELS)
    b = weights_of(gemm, gemm.n, is_packed=False)
    copies = [
        (first, onednn.pack(b, first, min(width, gemm.n - first), product))
        for first in range(0, gemm.n, width)
    ]
    packs = tuple([(first, primitive) for first, primitive in copies if primitive is not None])
    return packs if len(packs) == len(copies) else None


@dataclass(slots=True)
class CallTable:
    """The calls of a block as C reads them, and what they point to."""

    place: PackedPlace
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    kept: list[object] = field(default_factory=list)
    scratch: dict[int, Array] = field(default_factory=dict)

    def add(self, primitive: onednn.Primitive, *arguments: tuple[int, int]) -> None:
        """Add a call with its memories: which argument, at which address."""
        memories = np.zeros((len(arguments), 2), np.int64)
        for entry, (argument, place) in zip(memories, arguments, strict=True):
            memory = onednn.memory(primitive, argument, place)
            # The table has handles only; the object would destroy the memory.
            self.kept.append(memory)
            entry[:] = argument, onednn.handle_of(memory)
        self.kept.append(memories)
        scratch = address(self._scratch(primitive))
        self.rows.append((primitive.handle, address(memories), len(memories), scratch))

    def words(
        self, chunks: Sequence[Chunk], place: PackedPlace, before: int, is_done: int = 0
    ) -> tuple[list[Word], tuple[object, ...]]:
        """Return the block's words, and what keeps alive what they point to.

        `before` is a block that is run first, while there is a 0 at `is_done`, or always.
        """
        words, keep = head_words(chunks, place)
        calls = np.array(self.rows, np.int64)
        words += [before, address(calls), onednn.address_of("dnnl_primitive_execute")]
        words += [onednn.stream(), onednn.address_of("omp_get_max_threads")]
        words += [onednn.address_of("omp_set_num_threads"), is_done]
        return words, (*keep, calls, *self.kept, *self.scratch.values())

    def _scratch(self, primitive: onednn.Primitive) -> Array | None:
        """Return the handles of a primitive's scratch, one per worker; None when it needs none."""
        if not primitive.scratch_bytes:
            return None
        if primitive.handle not in self.scratch:
            memories = [
                onednn.scratch(primitive, self.place.of_worker(worker))
                for worker in range(self.place.num_workers)
            ]
            self.kept.extend(memories)
            handles = [onednn.handle_of(memory) for memory in memories]
            self.scratch[primitive.handle] = np.array(handles, np.int64)
        return self.scratch[primitive.handle]


# A library that gets a plain b copies it, block by block, into the layout that it likes, in every
# call. With the few rows of a recurrent step that takes a third of the time (20 x 2048 x 512: 454
# us against 319 on one thread), and b does not change. Each chunk of columns is packed on its own,
# so that threads share the columns, whose halves then stay in the cache of each from step to step.


@dataclass(frozen=True, slots=True)
class _PackedColumns:
    """A run of columns of b: the element it begins at, its pack, and where that is, in bytes."""

    first: int
    pack: onednn.Primitive
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class PrepackedGemm:
    """A product by a packed b; `size_bytes` are what it keeps and works in."""

    gemm: Gemm
    chunks: tuple[Chunk, ...]
    products: tuple[onednn.Primitive, ...]
    columns: tuple[_PackedColumns, ...]
    scratch: ProductScratch

    @staticmethod
    def of(gemm: Gemm | None) -> PrepackedGemm | None:
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
            # Row blocks of one column block read the same b, which is packed once.
            if call.b not in columns:
                columns[call.b] = _PackedColumns(call.b, pack, size)
                firsts[call.b] = product
                size += aligned(product.packed_bytes)
            elif not onednn.pack_alike(product, firsts[call.b]):  # of pieces with other rows
                return None
        packs = [one.pack for one in columns.values()]
        worker = max([primitive.scratch_bytes for primitive in (*products, *packs)])
        scratch = ProductScratch(worker, size)
        return PrepackedGemm(gemm, chunks, tuple(products), tuple(columns.values()), scratch)

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
        addresses = {panel.first: place.shared + panel.offset_bytes for panel in self.columns}
        packing, table = CallTable(place), CallTable(place)
        for panel in self.columns:
            source = (onednn.SOURCE, b + panel.first * item)
            packing.add(panel.pack, source, (onednn.DESTINATION, addresses[panel.first]))
        for call, product in zip(calls_of(self.chunks), self.products, strict=True):
            table.add(
                product,
                (onednn.SOURCE, a + call.a * item),
                (onednn.WEIGHTS, addresses[call.b]),
                (onednn.DESTINATION, out + call.out * out_item),
            )
        one_each = [Chunk((ProductCall(0, 0, 0, 0, 0, 0),), 0, 0)] * len(self.columns)
        function = runtime.address_in("gemm.c", "af_gemm_onednn")
        native_launches: list[NativeLaunch] = []
        for calls, chunks in ((packing, one_each), (table, self.chunks)):
            words, keep = calls.words(chunks, place, 0)
            native_launches.append(native_launch(function, words, (*keep, *arrays), onednn.explain))
        return native_launches[0], native_launches[1]
