"""Whether a tensor holds NaN or infinity, by numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.interpret.bfloat16 import has_bfloat16
from actors.kernels.interpret.blocks import block_elements, cut
from actors.kernels.kernel import Attrs, KernelNeeds, Operands, Workspace
from actors.kernels.scratch import Piece
from actors.kernels.work import BytePass, over_blocks
from actors.protocol import Arrays, Launch

_BOOL = np.dtype(np.bool_)


@dataclass(frozen=True, slots=True)
class NonFiniteKernel:
    """`non_finite`(x, earlier) -> flag; `earlier` may be left out."""

    name: str = "numpy.non_finite"
    op: str = "non_finite"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take floats; scratch is the answers of a block."""
        x = inputs[0]
        if not x.type.dtype.is_float or has_bfloat16(inputs):
            return None
        work = over_blocks(
            x.type.num_elements, x.dtype.itemsize, {BytePass.SIMPLE: 1, BytePass.REDUCE: 1}
        )
        size = scratch.size_bytes(_pieces(x.type.num_elements, x.dtype))
        return cost.needs(inputs, outputs, work, size)

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the launch over blocks; the first that is not finite ends it."""
        (x, *earlier), (out,) = inputs, outputs
        (answers,) = scratch.carve(workspace, _pieces(x.size, x.dtype))
        blocks = cut((x,), x.ndim, block_elements(x.itemsize))
        tests = [(block, scratch.window(answers, block.shape)) for (block,) in blocks]

        def launch() -> None:
            is_found = any([flag.item() for flag in earlier])
            for block, is_finite in tests:
                if is_found:
                    break
                np.isfinite(block, out=is_finite)
                is_found = not is_finite.all()
            out.fill(is_found)

        return launch


def _pieces(elements: int, dtype: np.dtype[np.generic]) -> tuple[Piece, ...]:
    return (Piece((min(elements, block_elements(dtype.itemsize)),), _BOOL),)


NON_FINITE_KERNELS = (NonFiniteKernel(),)
