"""What a kernel has besides `query` and `bind` when its launch is a generated C function."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from actors.kernels.kernel import Attrs, Operand
from actors.kernels.native.runtime import CFunction


@runtime_checkable
class Generated(Protocol):
    """A kernel whose launches are generated functions, known from types and layouts alone."""

    def functions(
        self, attrs: Attrs, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]
    ) -> tuple[CFunction, ...]:
        """Return the functions that `bind` will ask the runtime for."""
        ...
