"""`matmul` through native libraries: one kernel per library, and per shape the one that is fastest.

Every kernel asks the same table (`tuning`) which library a product is for, and takes those of its
own; so their order in the catalogue does not matter, and what no library takes is left to numpy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

from actors.kernels.common import cost
from actors.kernels.common.gemm import Gemm, ThreadCut, chunks_of, gemm_of, views_of
from actors.kernels.common.kernel import (
    Attrs,
    BytePass,
    CWork,
    KernelNeeds,
    MatrixProduct,
    Operands,
    Work,
    Workspace,
    item_weight,
)
from actors.kernels.library import runtime, tuning
from actors.kernels.library.gemm_launch import (
    Library,
    OpenBlas,
    Small,
    gemm_launch,
    workspace_bytes,
)
from actors.kernels.library.gemm_onednn import OneDnn
from actors.machine.protocol import Arrays, Launch
from compiler.contract.errors import InternalError

LIBRARIES: tuple[Library, ...] = (
    OneDnn(ThreadCut.ROWS, is_packed=True),
    OneDnn(ThreadCut.BLOCKS, is_packed=True),
    OneDnn(ThreadCut.ROWS),
    OneDnn(ThreadCut.HALVES),
    OneDnn(ThreadCut.TILES),
    OpenBlas(ThreadCut.ROWS),
    OpenBlas(ThreadCut.TILES),
    Small(),
)
"""In the order in which the fixed rule prefers them, the small product apart."""

_CALLS = 0.5
"""What a launch costs before it multiplies, in calls of numpy."""


@dataclass(frozen=True, slots=True)
class NativeMatmulKernel:
    """`matmul` by one library: leading axes broadcast; rows or columns of a matrix adjacent."""

    library: Library
    op: str = "matmul"

    @property
    def name(self) -> str:
        """Name in the plan: "onednn.matmul"."""
        return f"{self.library.name}.{self.op}"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take the products that this library is chosen for."""
        gemm = _gemm_of(inputs, outputs) if runtime.is_enabled() else None
        if gemm is None or tuning.library_for(gemm, LIBRARIES) != self.library.name:
            return None
        return self.needs(attrs, inputs, outputs)

    def needs(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Return what a product needs that this library can compute."""
        gemm = _gemm_of(inputs, outputs) if runtime.is_enabled() else None
        size = None if gemm is None else workspace_bytes(self.library, gemm)
        if gemm is None or size is None:
            return None
        return cost.needs(inputs, outputs, product_work(gemm, self.library), size)

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the native launch."""
        gemm = _gemm_of(inputs, outputs)
        if gemm is None:
            raise InternalError(f"{self.name} is bound to arrays that it does not take")
        a, b = (inputs[1], inputs[0]) if gemm.is_swapped else inputs
        return gemm_launch(self.library, gemm, (a, b, outputs[0]), workspace)


def _gemm_of(inputs: Operands | Arrays, outputs: Operands | Arrays) -> Gemm | None:
    views = views_of((*inputs, *outputs))
    return None if views is None else gemm_of(*views)


def product_work(gemm: Gemm, library: Library) -> Work:
    """Return the work of a product by a library."""
    count = gemm.flops / (2 * gemm.m * gemm.n * gemm.k) * item_weight(gemm.dtype.itemsize)
    products = (MatrixProduct(count, gemm.m, gemm.n, gemm.k),)
    return Work(_CALLS, products=products, in_c=partial(product_in_c, gemm, library))


def product_in_c(gemm: Gemm, library: Library) -> CWork:
    """Return what C does of a product: the calls of its chunks, and where b is packed, the copy."""
    chunks, weight = chunks_of(gemm, library.cut), item_weight(gemm.dtype.itemsize)
    # By extents: the rate of a product depends on them, and most chunks are alike.
    calls = Counter([(call.rows, call.columns) for chunk in chunks for call in chunk.calls])
    products = [MatrixProduct(weight * n, *extents, gemm.k) for extents, n in calls.items()]
    copied = 2.0 * gemm.k * gemm.n * gemm.dtype.itemsize if _is_packed(library) else 0.0
    return CWork(
        ((BytePass.SIMPLE, copied),) if copied else (),
        tuple(products),
        pieces=len(chunks),
        openings=2 if copied else 1,
    )


def _is_packed(library: Library) -> bool:
    return isinstance(library, OneDnn) and library.is_packed


NATIVE_MATMUL_KERNELS = tuple([NativeMatmulKernel(library) for library in LIBRARIES])
