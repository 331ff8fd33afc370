"""Ops that move elements, as strided copies between views of inputs and outputs.

The compiler turns most of these into views; a kernel runs only where bytes must move.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce

import numpy as np
from numpy.lib.stride_tricks import as_strided

from actors.kernels import cost
from actors.kernels.attributes import integer, integers
from actors.kernels.kernel import Attrs, KernelNeeds, Operands, Workspace, in_sequence
from actors.kernels.work import Work, over_operands
from actors.protocol import Array, Arrays, Launch

Copy = tuple[Array, Array]
"""A target and a source of one shape; a source that cannot be written is a constant."""

CopiesOf = Callable[[Arrays, Arrays, Attrs], list[list[Copy]]]
"""The phases of an op on its inputs and outputs; the copies of a phase may be made in any order."""


@dataclass(frozen=True, slots=True)
class CopyKernel:
    """Copies between views of inputs and outputs."""

    op: str
    copies: CopiesOf

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"numpy.{self.op}"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take every call, but for a reshape between two tensors that are both not dense."""
        if not can_copy(self.op, inputs, outputs):
            return None
        phases = self.copies(shown(inputs), shown(outputs), attrs)
        each = [_work(target, source) for copies in phases for target, source in copies]
        work = reduce(Work.then, each, Work(0.0))
        return cost.needs(inputs, outputs, work, in_place=written_over(self.op))

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the copies."""
        phases = self.copies(inputs, outputs, attrs)
        return in_sequence([partial(np.copyto, *copy) for copies in phases for copy in copies])


def can_copy(op: str, inputs: Operands, outputs: Operands) -> bool:
    """Whether an op is copies of views, operands lying so.

    A reshape only sees dense ones anew, and a block is made of such.
    """
    if op == "copy_block":
        return all([x.is_dense for x in (*inputs, *outputs)])
    return op != "reshape" or inputs[0].is_dense or outputs[0].is_dense


def written_over(op: str) -> tuple[tuple[int, int], ...]:
    """Return the pairs (output, input) of an op where the input is never read."""
    return ((0, 0),) if op == "carry" else ()


def shown(operands: Operands) -> Arrays:
    """Return arrays that lie as operands do, in bytes that nobody may touch."""
    return tuple([as_strided(np.empty((), x.dtype), x.shape, x.strides_bytes) for x in operands])


def _work(target: Array, source: Array) -> Work:
    sizes = (source.itemsize, target.itemsize)
    return over_operands(target.shape, (source.strides, target.strides), sizes)


def _copied(inputs: Arrays, outputs: Arrays, attrs: Attrs) -> list[list[Copy]]:
    return [[(outputs[0], inputs[0])]]


def _carried(inputs: Arrays, outputs: Arrays, attrs: Attrs) -> list[list[Copy]]:
    """The new value, wherever the old one lay."""
    return [[(outputs[0], inputs[1])]]


def _copied_as_one(inputs: Arrays, outputs: Arrays, attrs: Attrs) -> list[list[Copy]]:
    """Neighbours in memory, and the bytes between them, as one copy of bytes."""
    size = integer(attrs, "size_bytes")
    target, source = [_bytes_from(operands[0], size) for operands in (outputs, inputs)]
    return [[(target, source)]]


def _bytes_from(first: Array, size_bytes: int) -> Array:
    """Return so many bytes of the memory that an array lies in, from where it begins."""
    return as_strided(first.reshape(-1)[:1].view(np.uint8), (size_bytes,), (1,))


def _reshaped(inputs: Arrays, outputs: Arrays, attrs: Attrs) -> list[list[Copy]]:
    """One copy through whichever side can be seen in the other's shape."""
    (x,), (out,) = inputs, outputs
    dense = out.flags.c_contiguous
    return [[(out.reshape(x.shape), x) if dense else (out, x.reshape(out.shape))]]


def _padded(inputs: Arrays, outputs: Arrays, attrs: Attrs) -> list[list[Copy]]:
    """Zeros, then the input at `low`, every `steps` elements. The adjoint of slice."""
    (x,), (out,) = inputs, outputs
    steps = integers(attrs, "steps")
    places = [
        slice(low, low + (n - 1) * step + 1, step) if n else slice(0, 0)
        for low, n, step in zip(integers(attrs, "low"), x.shape, steps, strict=True)
    ]
    inside = [(out[(*places, Ellipsis)], x)]
    if x.shape == out.shape:
        return [inside]
    return [[(out, np.broadcast_to(np.zeros((), out.dtype), out.shape))], inside]


def _joined(inputs: Arrays, outputs: Arrays, attrs: Attrs) -> list[list[Copy]]:
    """The inputs one after the other along an axis."""
    (out,), axis, stop = outputs, integer(attrs, "axis"), 0
    copies: list[Copy] = []
    for part in inputs:
        start, stop = stop, stop + part.shape[axis]
        copies.append((out[(*[slice(None)] * axis, slice(start, stop))], part))
    return [copies]


SHAPE_KERNELS = (
    CopyKernel("copy", _copied),
    CopyKernel("carry", _carried),
    CopyKernel("copy_block", _copied_as_one),
    CopyKernel("reshape", _reshaped),
    CopyKernel("pad", _padded),
    CopyKernel("concat", _joined),
)
