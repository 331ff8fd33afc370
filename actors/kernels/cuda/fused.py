"""The kernel "cuda.fused": a program as generated kernels."""

from __future__ import annotations

from dataclasses import dataclass

from actors.kernels.attributes import fused_program, integer
from actors.kernels.codegen.spaces import in_place_pairs
from actors.kernels.cuda.calls import DeviceCalls
from actors.kernels.cuda.gpu import Gpu
from actors.kernels.cuda.programs import (
    moved_bytes,
    program_calls,
    program_ns,
    program_pieces,
)
from actors.kernels.cuda.views import DeviceView, DeviceViews, PlacedView, on_device
from actors.kernels.cuda.walks import TeamWalk, made_for_device, matrix_views, walk_of
from actors.kernels.kernel import Attrs, KernelNeeds, Operands
from actors.kernels.native.gemm import MatrixView
from actors.kernels.scratch import size_bytes


@dataclass(frozen=True, slots=True)
class CudaFused:
    """`fused`: attrs program, rows, columns; operands in the order of the program.

    An update, whose outputs lie over inputs, may have one more input `skip` [] int64, and is left
    out where that is not 0.
    """

    gpu: Gpu
    name: str = "cuda.fused"
    op: str = "fused"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take every program, on evenly spaced rows of dense columns."""
        program = fused_program(attrs, "program")
        made = made_for_device(program)
        views = [DeviceView(0, x.type, x.strides_bytes) for x in (*inputs, *outputs)]
        own = (*views[: len(program.inputs)], *views[len(inputs) :])
        found = _walk(self.gpu, attrs, own)
        if found is None:
            return None
        walk, matrices = found
        return KernelNeeds(
            size_bytes(program_pieces(program, walk)),
            in_place_pairs(program, made.schedule, integer(attrs, "rows"), matrices),
            program_ns(self.gpu, program, walk, moved_bytes(matrices)),
        )

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> DeviceCalls:
        """Return the kernels of the program, one after another."""
        program = fused_program(attrs, "program")
        views = on_device((*inputs, *outputs))
        own = (*views[: len(program.inputs)], *views[len(inputs) :])
        skip = next(iter(views[len(program.inputs) : len(inputs)]), None)
        found = _walk(self.gpu, attrs, own)
        if found is None:
            raise ValueError(f"operands of shapes {[x.shape for x in own]} are not in rows")
        return program_calls(program, found[0], integer(attrs, "rows"), own, workspace, skip)


def _walk(
    gpu: Gpu, attrs: Attrs, views: DeviceViews
) -> tuple[TeamWalk, tuple[MatrixView, ...]] | None:
    matrices, program = matrix_views(views), fused_program(attrs, "program")
    if matrices is None:
        return None
    walk = walk_of(gpu, program, integer(attrs, "rows"), integer(attrs, "columns"), matrices)
    return None if walk is None else (walk, matrices)
