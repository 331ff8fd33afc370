"""A kernel of a CUDA device: planned from shapes, described at load as calls on addresses."""

from __future__ import annotations

from typing import Protocol

from actors.kernels.cuda.calls import LaunchCalls
from actors.kernels.cuda.views import DeviceView, PlacedView
from actors.kernels.kernel import Attrs, KernelNeeds, Operands


class CudaKernel(Protocol):
    """One way to compute an op on a GPU; made for one description of it (`Gpu`).

    Grid and scratch follow from shapes and the description alone: so a launch gives the same bits
    on every card of an architecture, and a plan is the same wherever it is made.
    """

    @property
    def name(self) -> str:
        """Name in the plan, unique in the catalogue: "cuda.fused"."""
        ...

    @property
    def op(self) -> str:
        """Name of the op computed."""
        ...

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Return what this call needs, or None when this kernel does not take it."""
        ...

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> LaunchCalls:
        """Return the calls of the launch on these views, in order.

        `workspace` is a dense vector of uint8 of at least the bytes that `query` named for the same
        types and layouts. Only a copy between places meets arrays of the host.
        """
        ...
