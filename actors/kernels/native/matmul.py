"""`matmul` through native libraries: one kernel per library, and per shape the one that is fastest.

Every kernel asks the same table (`tuning`) which library a product is for, and takes those of its
own; so their order in the catalogue does not matter, and what no library takes is left to numpy.
"""

from __future__ import annotations

from functools import partial

from actors.kernels.common import cost
from actors.kernels.common.gemm import Gemm, ThreadCut, gemm_of, views_of
from actors.kernels.common.kernel import (
    Attrs,
    HostPlan,
    Kernel,
    KernelPlan,
    MatrixProduct,
    Operands,
    Work,
    Workspace,
    item_weight,
)
from actors.kernels.library import runtime, tuning
from actors.kernels.library.gemm_launch import (
    FewRows,
    Library,
    OpenBlas,
    Small,
    gemm_launch,
    workspace_bytes,
)
from actors.kernels.library.gemm_onednn import OneDnn
from actors.machine.protocol import Arrays, Launch

LIBRARIES: tuple[Library, ...] = (
    OneDnn(ThreadCut.ROWS, is_packed=True),
    OneDnn(ThreadCut.BLOCKS, is_packed=True),
    OneDnn(ThreadCut.ROWS),
    OneDnn(ThreadCut.HALVES),
    OneDnn(ThreadCut.TILES),
    OpenBlas(ThreadCut.ROWS),
    OpenBlas(ThreadCut.TILES),
    Small(),
    FewRows(),
)
"""In the order in which the fixed rule prefers them; the last two it takes by themselves."""

_CALLS = 0.5
"""What a launch costs before it multiplies, in calls of numpy."""


def _plan_product(
    library: Library, attrs: Attrs, inputs: Operands, outputs: Operands
) -> HostPlan | None:
    """Plan `matmul` by one library: leading axes broadcast; rows or columns of a matrix adjacent.

    It takes the products that this library can compute.
    """
    gemm = _gemm_of(inputs, outputs) if runtime.is_enabled() else None
    size = None if gemm is None else workspace_bytes(library, gemm)
    if gemm is None or size is None:
        return None

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        a, b = (inputs[1], inputs[0]) if gemm.is_swapped else inputs
        return gemm_launch(library, gemm, (a, b, outputs[0]), workspace)

    return KernelPlan(cost.needs(inputs, outputs, product_work(gemm), size), bind)


def _gemm_of(inputs: Operands, outputs: Operands) -> Gemm | None:
    views = views_of((*inputs, *outputs))
    return None if views is None else gemm_of(*views)


def product_work(gemm: Gemm) -> Work:
    """Return the work of a product."""
    count = gemm.flops / (2 * gemm.m * gemm.n * gemm.k) * item_weight(gemm.dtype.itemsize)
    products = (MatrixProduct(count, gemm.m, gemm.n, gemm.k),)
    return Work(_CALLS, products=products, is_native=True)


def _is_fastest(library: Library, attrs: Attrs, inputs: Operands, outputs: Operands) -> bool:
    gemm = _gemm_of(inputs, outputs) if runtime.is_enabled() else None
    return gemm is not None and tuning.library_for(gemm, LIBRARIES) == library.name


NATIVE_MATMUL_KERNELS = tuple(
    [
        Kernel(f"{x.name}.matmul", "matmul", partial(_plan_product, x), partial(_is_fastest, x))
        for x in LIBRARIES
    ]
)
