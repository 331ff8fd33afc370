"""The largest element of each window, its gradient and its likes, one tap after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.attributes import integers
from actors.kernels.interpret.bfloat16 import has_halves
from actors.kernels.kernel import Attrs, KernelNeeds, Operands, Workspace, in_sequence
from actors.kernels.scratch import Piece
from actors.kernels.work import BytePass, Work
from actors.protocol import Array, Arrays, Launch
from compiler.windows import Windows

POOLING_OPS = ("max_pool", "max_pool_grad", "max_pool_pick")


def windows_of(attrs: Attrs) -> Windows:
    """Return the windows of a pooling op."""
    kernel, strides, dilation, low = [
        integers(attrs, name) for name in ("kernel", "strides", "dilation", "low")
    ]
    return Windows(kernel, strides, dilation, low)


@dataclass(frozen=True, slots=True)
class PoolingKernel:
    """One of `POOLING_OPS`."""

    op: str

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"numpy.{self.op}"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take float32 and float64; scratch is two flags per window."""
        if has_halves((*inputs, *outputs)):
            return None
        taps = (*inputs, *outputs)[-1 if self.op == "max_pool" else 1]
        size = math.prod(integers(attrs, "kernel")) * float(taps.type.num_elements)
        work = Work(6.0, passes=((BytePass.STRIDED, 3 * size * inputs[0].dtype.itemsize),))
        return cost.needs(inputs, outputs, work, scratch.size_bytes(_pieces(taps.shape)))

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the fills, and the calls of each tap in order."""
        ways = windows_of(attrs)
        none = math.prod(ways.kernel)
        if self.op == "max_pool":
            (x,), (y, taps) = inputs, outputs
            fills: list[Launch] = [partial(y.fill, -np.inf), partial(taps.fill, none)]
        else:
            taps = inputs[1]
            x, y = (
                (outputs[0], inputs[0]) if self.op == "max_pool_grad" else (*inputs[:1], *outputs)
            )
            fills = [partial(outputs[0].fill, 0)]
        if not taps.size:
            return in_sequence(fills)
        flags = scratch.carve(workspace, _pieces(taps.shape))
        calls: list[Launch] = []
        for tap in ways.taps(x.shape[2:], taps.shape[2:]):
            own = np.array(tap.number, taps.dtype)
            here = [a[tap.windows] for a in (y, taps, *flags)]
            calls += self._calls(x[tap.places], own, np.array(none, taps.dtype), *here)
        return in_sequence((*fills, *calls))

    def _calls(
        self, x: Array, own: Array, none: Array, y: Array, taps: Array, is_own: Array, other: Array
    ) -> Iterator[Launch]:
        """Yield the calls of one tap, on the windows that have it."""
        if self.op != "max_pool":
            yield partial(np.equal, taps, own, out=is_own)
            if self.op == "max_pool_grad":
                yield partial(np.add, x, y, out=x, where=is_own)
            else:
                yield partial(np.copyto, y, x, where=is_own)
            return
        yield partial(np.greater, x, y, out=is_own)
        for same in (partial(np.not_equal, x, x), partial(np.equal, taps, none)):  # NaN, the first
            yield partial(same, out=other)
            yield partial(np.logical_or, is_own, other, out=is_own)
        yield partial(np.copyto, y, x, where=is_own)
        yield partial(np.copyto, taps, own, where=is_own)


def _pieces(shape: tuple[int, ...]) -> tuple[Piece, ...]:
    return (Piece(shape, np.dtype(np.bool_)),) * 2


POOLING_KERNELS = tuple([PoolingKernel(op) for op in POOLING_OPS])
