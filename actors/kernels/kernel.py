"""What a kernel is: asked from shapes at compile time, bound to bytes at load.

`query` sees types and layouts only, so a plan can be made on any machine. `bind` gets the arrays
and the planned scratch, prepares every view, and returns a launch: one call without arguments
that allocates nothing and writes only its outputs and its scratch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from actors.kernels.work import Work
from actors.protocol import Array, Arrays, Launch
from compiler.plan import AttrValue
from compiler.types import DType, TensorType, contiguous_strides, numpy_dtype

Attrs = Mapping[str, AttrValue]


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor as a kernel sees it at compile time; a stride of 0 repeats an axis."""

    type: TensorType
    offset_bytes: int
    strides_bytes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the tensor."""
        return self.type.shape

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The element type as numpy has it; bfloat16 is uint16 there."""
        return numpy_dtype(self.type.dtype)

    @property
    def is_dense(self) -> bool:
        """Whether the bytes are those of a row-major copy."""
        return is_dense(self.shape, self.strides_bytes, self.dtype.itemsize)


Operands = tuple[Operand, ...]


def operands_of(arrays: Arrays) -> Operands:
    """Return arrays as `query` sees them; none of bfloat16, which numpy does not know."""
    return tuple([Operand(TensorType(DType(x.dtype.name), x.shape), 0, x.strides) for x in arrays])


Workspace = Array | None
"""Planned scratch: a dense vector of uint8; None where a call needs none."""


@dataclass(frozen=True, slots=True)
class KernelNeeds:
    """What the planner must know of a kernel for one call.

    `in_place` lists pairs (output, input) that may share bytes; where inputs share bytes, each
    needs its pair. `workspace_bytes` is scratch that the launch overwrites before it reads;
    `duration_ns` is an estimate, the same on every machine. `work` is what the estimate was made
    from; with it the launch can be priced for another machine (`cost`).

    Where it `keeps` the input at a place, a variable that no step writes, in a form of its own, the
    workspace is the launch's from step to step: zeros at first, and whenever that variable is given
    other values.
    """

    workspace_bytes: int = 0
    in_place: tuple[tuple[int, int], ...] = ()
    duration_ns: float = 0.0
    work: Work | None = None
    keeps: int | None = None


class Asked(Protocol):
    """What is known of a kernel of any device before there is one."""

    @property
    def name(self) -> str:
        """Name in the plan, unique in the catalogue of its device: "numpy.fused"."""
        ...

    @property
    def op(self) -> str:
        """Name of the op computed."""
        ...

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Return what this call needs, or None when this kernel does not take it."""
        ...


class Kernel(Asked, Protocol):
    """One way to compute an op on the host."""

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the launch on these arrays.

        `workspace` is a dense vector of uint8, aligned to 64 bytes, of at least the bytes that
        `query` named for the same types and layouts (None when it named 0).
        """
        ...


@runtime_checkable
class OneOfSeveral(Protocol):
    """What a kernel has besides when `query` takes only the calls that it is chosen for.

    Of several kernels that could take a call, the one that is fastest on this machine is chosen. A
    plan has chosen already, perhaps elsewhere; then what counts is what the kernel can.
    """

    def needs(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Return what this call needs, whoever is chosen for it; None for one it cannot take."""
        ...


def is_dense(shape: tuple[int, ...], strides_bytes: tuple[int, ...], itemsize: int) -> bool:
    """Return whether the strides are those of a row-major copy; extents of 1 do not matter."""
    if 0 in shape:
        return True
    dense = contiguous_strides(shape, itemsize)
    return all(n == 1 or s == d for n, s, d in zip(shape, strides_bytes, dense, strict=True))


def in_sequence(calls: Iterable[Launch]) -> Launch:
    """Return one launch that makes these calls in order."""
    chain = tuple(calls)
    if len(chain) == 1:
        return chain[0]

    def launch() -> None:
        for call in chain:
            call()

    return launch


def equal_operands(output: int, outputs: Operands, inputs: Operands) -> tuple[tuple[int, int], ...]:
    """Return the pairs (output, input) where an input could give its bytes to this output."""
    out = outputs[output]
    return tuple(
        (output, index)
        for index, operand in enumerate(inputs)
        if out.is_dense and operand.is_dense and operand.type == out.type
    )
