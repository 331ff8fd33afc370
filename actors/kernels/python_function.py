"""A kernel that calls a Python function with the arrays of a launch: for ops from outside.

The function gets inputs and outputs as they lie in the plan's memory, outputs last, and the op's
attributes by keyword. It fills the outputs; what it returns is of no concern.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from actors.kernels.kernel import Attrs, KernelNeeds, Operands, Workspace
from actors.protocol import Arrays, Launch
from compiler.types import DType


@dataclass(frozen=True, slots=True)
class PythonKernel:
    """Computes `op` by a function. It takes every call but those of bfloat16, which numpy lacks."""

    op: str
    function: Callable[..., object]

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"python.{self.op}"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Estimate a nanosecond per byte: no one knows what the function does."""
        operands = (*inputs, *outputs)
        if DType.BFLOAT16 in [operand.type.dtype for operand in operands]:
            return None
        return KernelNeeds(duration_ns=float(sum([o.type.size_bytes for o in operands])))

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the call of the function."""
        return partial(self.function, *inputs, *outputs, **attrs)
