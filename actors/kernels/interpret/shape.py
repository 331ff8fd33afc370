"""Ops that move elements: copies of views, pad and concat.

The compiler turns most of these into views; a kernel runs only where bytes must move.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.attributes import integer, integers
from actors.kernels.interpret.blocks import num_elements
from actors.kernels.kernel import Attrs, KernelNeeds, Operand, Operands, Workspace, in_sequence
from actors.kernels.scratch import Piece
from actors.kernels.work import BytePass, Work, broadcast_strides, over_operands
from actors.protocol import Array, Arrays, Launch
from compiler.types import contiguous_strides

Copy = tuple[Array, Array]
"""A target and a source of one shape."""

CopiesOf = Callable[[Arrays, Arrays, Attrs], list[list[Copy]]]
"""The phases of an op on its inputs and outputs; the copies of a phase may be made in any order."""


@dataclass(frozen=True, slots=True)
class CopyKernel:
    """Copies between views of inputs and outputs."""

    op: str
    copies: CopiesOf
    work: Callable[[Operands, Operands, Attrs], Work]

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"numpy.{self.op}"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take every call."""
        return cost.needs(inputs, outputs, self.work(inputs, outputs, attrs))

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the copies."""
        phases = self.copies(inputs, outputs, attrs)
        return in_sequence([partial(np.copyto, *copy) for copies in phases for copy in copies])


def _of_view(op: str, view: Callable[[Array, Attrs], Array]) -> CopyKernel:
    """Return the kernel that copies a view of its input."""

    def copies(inputs: Arrays, outputs: Arrays, attrs: Attrs) -> list[list[Copy]]:
        return [[(outputs[0], view(inputs[0], attrs))]]

    def work(inputs: Operands, outputs: Operands, attrs: Attrs) -> Work:
        x, out = inputs[0], outputs[0]
        strides = (_view_strides(op, x, out.shape, attrs), out.strides_bytes)
        return over_operands(out.shape, strides, _sizes(x, out))

    return CopyKernel(op, copies, work)


def _view_strides(op: str, x: Operand, shape: tuple[int, ...], attrs: Attrs) -> tuple[int, ...]:
    """Return the strides of the copied view of x."""
    if op == "transpose":
        return tuple([x.strides_bytes[axis] for axis in integers(attrs, "perm")])
    if op == "slice":
        steps = integers(attrs, "steps")
        return tuple([s * step for s, step in zip(x.strides_bytes, steps, strict=True)])
    return broadcast_strides(x.shape, x.strides_bytes, shape)


def _sizes(x: Operand, out: Operand) -> tuple[int, int]:
    return x.dtype.itemsize, out.dtype.itemsize


def _same(x: Array, attrs: Attrs) -> Array:
    return x


def _transposed(x: Array, attrs: Attrs) -> Array:
    return x.transpose(integers(attrs, "perm"))


def _broadcast(x: Array, attrs: Attrs) -> Array:
    return np.broadcast_to(x, integers(attrs, "shape"))


def _sliced(x: Array, attrs: Attrs) -> Array:
    bounds = (integers(attrs, "starts"), integers(attrs, "stops"), integers(attrs, "steps"))
    index: tuple[Any, ...] = tuple([slice(*bound) for bound in zip(*bounds, strict=True)])
    return x[(*index, Ellipsis)]


@dataclass(frozen=True, slots=True)
class ReshapeKernel:
    """`reshape`: a copy through whichever side can be seen in the other's shape."""

    name: str = "numpy.reshape"
    op: str = "reshape"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take every call; scratch is a dense copy when neither side is dense."""
        (x,), (out,) = inputs, outputs
        pieces = _dense_copy(x.is_dense or out.is_dense, x.shape, x.dtype)
        one = x if out.is_dense else out
        dense = contiguous_strides(one.shape, x.dtype.itemsize)
        work = over_operands(one.shape, (one.strides_bytes, dense), _sizes(x, out))
        if pieces:
            extra = ((BytePass.STRIDED, float(x.type.size_bytes)),)
            work = replace(work, calls=2.0, passes=(*work.passes, *extra))
        return cost.needs(inputs, outputs, work, scratch.size_bytes(pieces))

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return one copy, or two through scratch."""
        (x,), (out,) = inputs, outputs
        if out.flags.c_contiguous:
            return partial(np.copyto, out.reshape(x.shape), x)
        if x.flags.c_contiguous:
            return partial(np.copyto, out, x.reshape(out.shape))
        (dense,) = scratch.carve(workspace, _dense_copy(False, x.shape, x.dtype))
        return in_sequence(
            (partial(np.copyto, dense, x), partial(np.copyto, out, dense.reshape(out.shape)))
        )


def _dense_copy(
    is_free: bool, shape: tuple[int, ...], dtype: np.dtype[np.generic]
) -> tuple[Piece, ...]:
    return () if is_free else (Piece(shape, dtype),)


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


def _pad_work(inputs: Operands, outputs: Operands, attrs: Attrs) -> Work:
    x, out = inputs[0], outputs[0]
    steps = integers(attrs, "steps")
    strides = tuple([s * step for s, step in zip(out.strides_bytes, steps, strict=True)])
    copy = over_operands(x.shape, (x.strides_bytes, strides), _sizes(x, out))
    zeros = (BytePass.SIMPLE, float(out.type.size_bytes))
    return replace(copy, calls=2.0, passes=(*copy.passes, zeros))


def _joined(inputs: Arrays, outputs: Arrays, attrs: Attrs) -> list[list[Copy]]:
    """The inputs one after the other along an axis."""
    (out,), axis, stop = outputs, integer(attrs, "axis"), 0
    copies: list[Copy] = []
    for part in inputs:
        start, stop = stop, stop + part.shape[axis]
        copies.append((out[(*[slice(None)] * axis, slice(start, stop))], part))
    return [copies]


def _concat_work(inputs: Operands, outputs: Operands, attrs: Attrs) -> Work:
    """Return the work of copying parts of a tensor along an axis: a loop per part and row."""
    rows = num_elements(outputs[0].shape[: integer(attrs, "axis")])
    size = float(sum([part.type.size_bytes for part in inputs]))
    return Work(len(inputs), len(inputs) * (rows - 1.0), ((BytePass.SIMPLE, size),))


COPY_KERNELS = (
    _of_view("copy", _same),
    _of_view("stop_gradient", _same),
    _of_view("transpose", _transposed),
    _of_view("broadcast_to", _broadcast),
    _of_view("slice", _sliced),
    CopyKernel("pad", _padded, _pad_work),
    CopyKernel("concat", _joined, _concat_work),
)

SHAPE_KERNELS = (*COPY_KERNELS, ReshapeKernel())
