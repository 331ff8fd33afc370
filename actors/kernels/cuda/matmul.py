"""The kernel "cuda.matmul": products by cuBLASLt, in calls that `products` plans."""

from __future__ import annotations

from dataclasses import dataclass

from actors.kernels import scratch
from actors.kernels.cuda.calls import DeviceCalls
from actors.kernels.cuda.gpu import Gpu
from actors.kernels.cuda.products import plan_product
from actors.kernels.cuda.views import DeviceView, PlacedView, carve, on_device
from actors.kernels.kernel import Attrs, KernelNeeds, Operands
from compiler.errors import InternalError


@dataclass(frozen=True, slots=True)
class CudaMatmul:
    """`matmul` of any floats: leading axes broadcast, operands and output strided."""

    gpu: Gpu
    name: str = "cuda.matmul"
    op: str = "matmul"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take every product; scratch is what is copied, and what the library works in."""
        planned = plan_product(self.gpu, *inputs, *outputs)
        if planned is None:
            return None
        size = scratch.size_bytes(planned.pieces)
        return KernelNeeds(size, duration_ns=planned.duration_ns())

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> DeviceCalls:
        """Return copies and products."""
        a, b, out = on_device((*inputs, *outputs))
        planned = plan_product(self.gpu, a.as_operand, b.as_operand, out.as_operand)
        if planned is None:
            raise InternalError(f"{self.name} is bound to views that it does not take: {a} {b}")
        return planned.calls((a, b, out), carve(workspace, planned.pieces))
