"""The launch of a product through a library: its chunks as tables that C walks (gemm.c).

A `Library` says which products it takes and what scratch they need, and makes the launch. Two of
them stand here: numpy's own OpenBLAS, and the small product of gemm.c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from actors.kernels.common.gemm import Chunk, Gemm, ProductCall, ThreadCut, chunks_of
from actors.kernels.common.host_memory import address
from actors.kernels.common.kernel import Workspace
from actors.kernels.library import openblas, runtime
from actors.kernels.library.launch import NativeLaunch, Word, native_launch
from actors.machine.protocol import Array
from compiler.contract.errors import InternalError
from compiler.contract.types import DType

MAX_CALLS = 4096
"""More places of a batch than this are not worth a table; numpy's kernel walks them."""

_ALIGNMENT_BYTES = 64

Matrices = tuple[Array, Array, Array]
"""a, b and out of a `Gemm`, in this order also where the call has them swapped."""


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What is run on rows that are done: `void f(void *, row0, row1, worker)`.

    A chunk runs it on its own rows, or all chunks are made first and it runs on `blocks` of rows.
    `keep` is what must live as long as the launch.
    """

    function: int
    arguments: int
    keep: tuple[object, ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()


class Library(Protocol):
    """One way to compute products."""

    @property
    def name(self) -> str:
        """Its own name and the cut's: "onednn", "onednn.rows"."""
        ...

    @property
    def cut(self) -> ThreadCut:
        """How it cuts a product into chunks."""
        ...

    def scratch(self, gemm: Gemm, chunks: tuple[Chunk, ...]) -> ProductScratch | None:
        """Return the scratch of a product; None for one that is not taken."""
        ...

    def launch(
        self, gemm: Gemm, chunks: tuple[Chunk, ...], arrays: Matrices, place: PackedPlace
    ) -> NativeLaunch:
        """Return the launch on these arrays."""
        ...


@dataclass(frozen=True, slots=True)
class ProductScratch:
    """Bytes that a launch works in: some for each worker, and before them some for all."""

    worker_bytes: int = 0
    shared_bytes: int = 0

    def size_bytes(self, num_workers: int) -> int:
        """Return the bytes for so many workers."""
        return aligned(self.shared_bytes) + aligned(self.worker_bytes) * num_workers


@dataclass(frozen=True, slots=True)
class PackedPlace:
    """Where a launch works besides its arrays, on how many workers, and its epilogue."""

    workspace: Workspace
    scratch: ProductScratch
    num_workers: int
    epilogue: Epilogue | None

    @property
    def shared(self) -> int:
        """Where the scratch of all workers is."""
        return address(self.workspace)

    def of_worker(self, worker: int) -> int:
        """Where the scratch of one worker is."""
        return address(self.workspace) + self.scratch.size_bytes(worker)


def workspace_bytes(library: Library, gemm: Gemm) -> int | None:
    """Return the workspace of a product for the threads of now; None for one that is not taken."""
    chunks = chunks_of(gemm, library.cut)
    if sum([len(chunk.calls) for chunk in chunks]) > MAX_CALLS:
        return None
    scratch = library.scratch(gemm, chunks)
    workers = min(runtime.num_threads(), len(chunks))
    return None if scratch is None else scratch.size_bytes(workers)


def gemm_launch(
    library: Library,
    gemm: Gemm,
    arrays: Matrices,
    workspace: Workspace,
    epilogue: Epilogue | None = None,
    max_workers: int | None = None,
) -> NativeLaunch:
    """Return the launch of a product on as many workers as the workspace has room for.

    An epilogue needs a product without a batch, and blocks unless the library cuts whole rows.
    Raises InternalError without them, for a product that the library does not take, and for too
    small a workspace.
    """
    has_rows = library.cut.has_whole_rows or (epilogue is not None and epilogue.blocks)
    if epilogue is not None and (gemm.batch or not has_rows):
        raise InternalError(f"{library.name} leaves no whole rows of {gemm.key} to an epilogue")
    chunks = chunks_of(gemm, library.cut)
    scratch = library.scratch(gemm, chunks)
    if scratch is None:
        raise InternalError(f"{library.name} does not take the product {gemm.key} of a plan")
    needed, size = scratch.size_bytes(1), 0 if workspace is None else workspace.size
    if size < needed:
        raise InternalError(f"{library.name} needs {needed} bytes of workspace and got {size}")
    workers = min(runtime.num_threads() if max_workers is None else max_workers, len(chunks))
    # Fewer workers rather than an error: the plan may have been made for fewer threads.
    while scratch.size_bytes(workers) > size:
        workers -= 1
    return library.launch(gemm, chunks, arrays, PackedPlace(workspace, scratch, workers, epilogue))


def head_words(
    chunks: Sequence[Chunk], place: PackedPlace
) -> tuple[list[Word], tuple[object, ...]]:
    """Return the first words of a block, and what they point to."""
    # Calls of chunk i are those from first[i] to first[i + 1].
    first = np.cumsum([0, *[len(chunk.calls) for chunk in chunks]], dtype=np.int64)
    epilogue = place.epilogue or Epilogue(0, 0)
    blocks = epilogue.blocks
    rows = np.array(blocks or [(c.row, c.row + c.rows) for c in chunks], np.int64)
    words: list[Word] = [len(chunks), place.num_workers, address(first), address(rows)]
    words += [len(blocks), epilogue.function, epilogue.arguments, 0]
    return words, (first, rows, epilogue, place.workspace)


def calls_of(chunks: Sequence[Chunk]) -> list[ProductCall]:
    """Return the calls of all chunks in order."""
    return [call for chunk in chunks for call in chunk.calls]


def aligned(size: int) -> int:
    """Return a size with padding to the alignment of scratch."""
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def named(library: str, cut: ThreadCut) -> str:
    """Return the name of a library that cuts so."""
    return library if cut is ThreadCut.TILES else f"{library}.{cut.value}"


# The small product packs nothing and so wins where a call of a library costs as much as the
# product.

SMALL_FLOPS = 2 * 64**3
"""Up to this many per matrix the small product is asked; at any size for few rows or columns."""

SMALL_ROWS, SMALL_COLUMNS = 4, 64
_LANES = 16
_CONVERTED = 32 << 10
"""Elements of three small matrices of bfloat16 at most, which are converted as they lie."""

_UNIT = 4 * _LANES
"""Elements to a multiple of which gemm.c fills up the rows of few."""


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
        blas = openblas.numpy_openblas() if is_known else None
        # Extents and strides are passed as 32-bit integers there and would wrap around.
        if blas is None or (blas.integer_bits == 32 and _largest(gemm) >= 1 << 31):
            return None
        return ProductScratch()

    def launch(
        self, gemm: Gemm, chunks: tuple[Chunk, ...], arrays: Matrices, place: PackedPlace
    ) -> NativeLaunch:
        """Tell the library to use one thread, for ours call it at once."""
        blas = openblas.numpy_openblas()
        if blas is None:
            raise InternalError("a plan has kernels of OpenBLAS, which this build of numpy lacks")
        # Our pool calls it from several threads at once; its own threads would fight for the cores.
        openblas.use_one_thread()
        is_double = gemm.dtype is DType.FLOAT64
        function = f"af_gemm_{'dgemm' if is_double else 'sgemm'}{blas.integer_bits}"
        target = blas.dgemm if is_double else blas.sgemm
        return _product_launch(function, gemm, chunks, arrays, place, target)


@dataclass(frozen=True, slots=True)
class Small:
    """float32 and bfloat16 by the small product of gemm.c.

    Sums are float32 in either case. bfloat16 is converted on the way, which pays where a call of
    the library takes as long as the product.
    """

    name: str = "c"
    cut: ThreadCut = ThreadCut.ROWS

    def scratch(self, gemm: Gemm, chunks: tuple[Chunk, ...]) -> ProductScratch | None:
        """Take small matrices, and few rows of float32.

        Scratch is one panel of b, and of bfloat16 all three matrices as floats.
        """
        is_tiny = 2 * gemm.m * gemm.n * gemm.k <= SMALL_FLOPS
        if gemm.adds:
            return None
        if gemm.dtype is DType.BFLOAT16:
            elements = gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n
            is_taken = is_tiny and elements <= _CONVERTED
            return ProductScratch(4 * (_LANES * gemm.k + elements)) if is_taken else None
        is_low = gemm.m <= SMALL_ROWS and gemm.b.column == 1
        is_small = is_tiny or is_low or gemm.n <= SMALL_COLUMNS
        is_float = gemm.dtype is DType.FLOAT32 and gemm.out_dtype is DType.FLOAT32
        return ProductScratch(4 * _LANES * gemm.k) if is_small and is_float else None

    def launch(
        self, gemm: Gemm, chunks: tuple[Chunk, ...], arrays: Matrices, place: PackedPlace
    ) -> NativeLaunch:
        """Return the launch of gemm.c."""
        return _product_launch("af_gemm_small", gemm, chunks, arrays, place, 0)


FEW_ROWS = 8
"""Rows of a product that takes about as long as reading b does."""

FEW_BYTES = 64 << 10
"""A smaller b is in the first-level cache, where the small product multiplies as fast."""


@dataclass(frozen=True, slots=True)
class FewRows:
    """float32 and bfloat16 with few rows, which read b once, in order and on all threads (gemm.c).

    Sums are float32 in either case.
    """

    name: str = "c.columns"
    cut: ThreadCut = ThreadCut.COLUMNS

    def scratch(self, gemm: Gemm, chunks: tuple[Chunk, ...]) -> ProductScratch | None:
        """Take few rows and a b that is worth it; scratch is a panel of b, or the rows."""
        is_half = gemm.dtype is DType.BFLOAT16 and gemm.b.column != 1
        is_float = gemm.dtype is DType.FLOAT32 and gemm.out_dtype is DType.FLOAT32
        bytes_of_b = gemm.n * gemm.k * gemm.dtype.itemsize
        is_few = gemm.m <= FEW_ROWS and bytes_of_b >= FEW_BYTES
        if not (is_half or is_float) or not is_few or gemm.adds or gemm.batch:
            return None
        if gemm.b.column == 1:
            return ProductScratch(4 * gemm.k * _LANES)
        return ProductScratch(4 * gemm.m * (-(-gemm.k // _UNIT) * _UNIT))

    def launch(
        self, gemm: Gemm, chunks: tuple[Chunk, ...], arrays: Matrices, place: PackedPlace
    ) -> NativeLaunch:
        """Return the launch of gemm.c."""
        return _product_launch("af_gemm_few_rows", gemm, chunks, arrays, place, 0)


def _product_launch(
    function: str,
    gemm: Gemm,
    chunks: tuple[Chunk, ...],
    arrays: Matrices,
    place: PackedPlace,
    target: int,
) -> NativeLaunch:
    item, out_item = gemm.dtype.itemsize, gemm.out_dtype.itemsize
    a, b, out = [address(array) for array in arrays]
    rows = [
        (c.rows, c.columns, gemm.k, a + c.a * item, b + c.b * item, out + c.out * out_item)
        for c in calls_of(chunks)
    ]
    calls = np.array(rows, np.int64)
    words, keep = head_words(chunks, place)
    words += [address(calls), gemm.a.row, gemm.a.column, gemm.b.row, gemm.b.column, gemm.out.row]
    words += [target, float(gemm.adds), place.of_worker(0), aligned(place.scratch.worker_bytes)]
    words += [item, out_item]
    entry = runtime.address_in("gemm.c", function)
    return native_launch(entry, words, (*keep, calls, *arrays))


def _largest(gemm: Gemm) -> int:
    sides = (gemm.a, gemm.b, gemm.out)
    return max([gemm.m, gemm.n, gemm.k, *[max(side.row, side.column) for side in sides]])
