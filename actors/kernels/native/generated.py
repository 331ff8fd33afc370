"""Kernels whose C is made for a call, not written in a file.

All functions of a plan are built by one start of the compiler (`runtime.prepare`); so whoever loads
a plan first collects them from its kernels. A kernel binds as well without: its function is built
then.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from actors.kernels.kernel import Attrs, Operands
from actors.kernels.native.runtime import CFunction


@runtime_checkable
class Generated(Protocol):
    """What a kernel has besides (see `kernel.Kernel`) when it generates functions."""

    def functions(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> tuple[CFunction, ...]:
        """Return the functions that `bind` needs for a call which `query` takes."""
        ...
