"""Sums, means and maxima over middle axes in C (`reduce.c`).

Fused kernels take what is reduced over the last axes or the first ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from actors.kernels import cost
from actors.kernels.attributes import integers
from actors.kernels.axes import Axis, walk
from actors.kernels.kernel import Attrs, KernelNeeds, Operands, Workspace
from actors.kernels.native import chunks, runtime
from actors.kernels.native.launch import Word, address, native_launch
from actors.kernels.work import NATIVE_CALLS, BytePass, CWork, Work
from actors.protocol import Arrays, Launch
from compiler.errors import InternalError
from compiler.types import DType

_TYPES = (DType.FLOAT32, DType.FLOAT64, DType.INT32, DType.INT64)
"""The types of reduce.c, in its order."""

_MAX_COLUMNS, _MIN_COLUMNS = 512, 64
"""Of a block: what fits on the stack, and cache lines enough for the prefetchers."""

_ENOUGH_UNITS = 16


@dataclass(frozen=True, slots=True)
class NativeReduce:
    """`sum`, `mean` or `max`."""

    op: str

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"c.{self.op}"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take the common types over neighbouring axes, with a dense output."""
        (x,), (out,) = inputs, outputs
        if not (
            runtime.is_on() and x.type.dtype in _TYPES and x.type.num_elements and out.is_dense
        ):
            return None
        if self.op == "mean" and not x.type.dtype.is_float:
            return None
        if _walked(attrs, x.shape, x.strides_bytes, x.dtype.itemsize) is None:
            return None
        size = float(x.type.size_bytes)
        in_c = partial(_reduced_in_c, size)
        work = Work(NATIVE_CALLS, passes=((BytePass.SIMPLE, size),), in_c=in_c)
        return cost.needs(inputs, outputs, work)

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return one launch."""
        (x,), (out,) = inputs, outputs
        found = _walked(attrs, x.shape, x.strides, x.itemsize)
        if found is None:
            raise InternalError(f"{self.name} was bound to axes that it does not take")
        outer, rows, columns = found
        wanted = outer.extent * columns.extent // _ENOUGH_UNITS
        block = max(_MIN_COLUMNS, min(_MAX_COLUMNS, wanted))
        units = outer.extent * -(-columns.extent // block)
        form = _TYPES.index(DType(x.dtype.name)) + len(_TYPES) * (self.op == "max")
        words: list[Word] = [
            *(address(x), address(out), rows.extent, columns.extent),
            *(outer.steps[0], rows.steps[0], x.itemsize),
            *(block, units, chunks.units_per_chunk(units, x.nbytes), runtime.num_threads(), form),
            float(rows.extent) if self.op == "mean" else 1.0,
        ]
        return native_launch(runtime.address_in("reduce.c", "af_reduce"), words, (x, out))


def _reduced_in_c(size_bytes: float) -> CWork:
    return CWork(((BytePass.REDUCE, size_bytes),), pieces=chunks.num_chunks(size_bytes))


def _walked(
    attrs: Attrs, shape: tuple[int, ...], strides: tuple[int, ...], item: int
) -> tuple[Axis, Axis, Axis] | None:
    """Return x as [outer, rows, columns], columns dense, or None where it does not lie so."""
    given = integers(attrs, "axes")
    axes = [axis for axis in given if shape[axis] != 1] or given[:1]
    if not axes:
        return None
    first, last = axes[0], axes[-1] + 1
    if math.prod(shape[first:last]) != math.prod([shape[axis] for axis in axes]):
        return None
    found = [
        walk(shape[a:b], (strides[a:b],), in_order=True) or (Axis(1, (item,)),)
        for a, b in ((0, first), (first, last), (last, len(shape)))
    ]
    if any([len(part) > 1 for part in found]) or found[2][0].steps != (item,):
        return None
    outer, rows, columns = [part[0] for part in found]
    return outer, rows, columns


NATIVE_REDUCE_KERNELS = tuple([NativeReduce(op) for op in ("sum", "mean", "max")])
