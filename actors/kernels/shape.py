"""Ops that move elements: copies of views, pad and concat.

The compiler turns most of these into views; a kernel runs only where bytes must move.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.attributes import integer, integers
from actors.kernels.kernel import Attrs, KernelNeeds, Operand, in_sequence
from actors.kernels.scratch import Piece
from actors.protocol import Array, Launch


@dataclass(frozen=True, slots=True)
class CopyKernel:
    """Copy a view of the input: transpose, broadcast_to, slice, stop_gradient, copy."""

    op: str
    view: Callable[[Array, Attrs], Array]

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"numpy.{self.op}"

    def query(
        self, attrs: Attrs, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]
    ) -> KernelNeeds | None:
        """Take every call."""
        return KernelNeeds(duration_ns=cost.duration_ns((*inputs, *outputs)))

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        workspace: Array | None,
    ) -> Launch:
        """Return one copy."""
        return partial(np.copyto, outputs[0], self.view(inputs[0], attrs))


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

    def query(
        self, attrs: Attrs, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]
    ) -> KernelNeeds | None:
        """Take every call; scratch is a dense copy when neither side is dense."""
        (x,), (out,) = inputs, outputs
        pieces = _dense_copy(x.is_dense or out.is_dense, x.shape, x.dtype)
        return KernelNeeds(
            scratch.size_bytes(pieces), duration_ns=cost.duration_ns((x, out), passes=len(pieces))
        )

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        workspace: Array | None,
    ) -> Launch:
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


@dataclass(frozen=True, slots=True)
class PadKernel:
    """`pad`: zeros, then the input at `low`, every `steps` elements. The adjoint of slice."""

    name: str = "numpy.pad"
    op: str = "pad"

    def query(
        self, attrs: Attrs, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]
    ) -> KernelNeeds | None:
        """Take every call."""
        return KernelNeeds(duration_ns=cost.duration_ns((*inputs, *outputs), passes=1))

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        workspace: Array | None,
    ) -> Launch:
        """Return a fill and a strided copy."""
        (x,), (out,) = inputs, outputs
        steps = integers(attrs, "steps")
        places = [
            slice(low, low + (n - 1) * step + 1, step) if n else slice(0, 0)
            for low, n, step in zip(integers(attrs, "low"), x.shape, steps, strict=True)
        ]
        copy = partial(np.copyto, out[(*places, Ellipsis)], x)
        if x.shape == out.shape:
            return copy
        return in_sequence((partial(out.fill, 0), copy))


@dataclass(frozen=True, slots=True)
class ConcatKernel:
    """`concat`: the inputs one after the other along an axis."""

    name: str = "numpy.concat"
    op: str = "concat"

    def query(
        self, attrs: Attrs, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]
    ) -> KernelNeeds | None:
        """Take every call."""
        return KernelNeeds(duration_ns=cost.duration_ns((*inputs, *outputs)))

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        workspace: Array | None,
    ) -> Launch:
        """Return one copy per input."""
        axis, start = integer(attrs, "axis"), 0
        calls: list[Launch] = []
        for x in inputs:
            stop = start + x.shape[axis]
            index = (*[slice(None)] * axis, slice(start, stop))
            calls.append(partial(np.copyto, outputs[0][index], x))
            start = stop
        return in_sequence(calls)


SHAPE_KERNELS = (
    CopyKernel("copy", _same),
    CopyKernel("stop_gradient", _same),
    CopyKernel("transpose", _transposed),
    CopyKernel("broadcast_to", _broadcast),
    CopyKernel("slice", _sliced),
    ReshapeKernel(),
    PadKernel(),
    ConcatKernel(),
)
