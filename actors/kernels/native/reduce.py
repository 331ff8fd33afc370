"""Sums, means and maxima over any axes, and argmax, in C (`reduce.c`).

Fused kernels take most row reductions; here is what they leave: leading and middle axes, operands
that are not dense, and whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from actors.kernels import cost
from actors.kernels.attributes import flag, integer, integers
from actors.kernels.kernel import Attrs, KernelNeeds, Operands, Workspace
from actors.kernels.native import chunks, runtime
from actors.kernels.native.axes import MAX_OUTER, Axis, columns_of, walk
from actors.kernels.native.launch import Word, address, native_launch
from actors.kernels.work import NATIVE_CALLS, BytePass, Work
from actors.protocol import Array, Arrays, Launch
from compiler.errors import InternalError
from compiler.types import DType

_TYPES = (DType.FLOAT32, DType.FLOAT64, DType.INT32, DType.INT64)
"""The types of reduce.c, in its order."""

_MAX_COLUMNS = 512
_ENOUGH_UNITS = 16
_MAX_SPLITS = 32
Strides = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _ReducedLayout:
    """How a reduction is walked (see reduce.c). Steps are of x and the output, or of x alone."""

    kept: tuple[Axis, ...]
    columns: Axis
    reduced: tuple[Axis, ...]
    run: Axis
    splits: int

    @property
    def num_results(self) -> int:
        """Elements of the output."""
        return _count(self.kept) * self.columns.extent

    @property
    def num_units(self) -> int:
        """Calls of the reduction, each for a block of columns and a split."""
        return _count(self.kept) * _num_blocks(self.columns) * self.splits

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the partial results."""
        return 8 * self.splits * self.num_results if self.splits > 1 else 0


def _layout(
    shape: tuple[int, ...], x: Strides, out: Strides, axes: tuple[int, ...], item: int
) -> _ReducedLayout | None:
    """Return the walk, or None where there are too many axes. `out` has a stride per axis of x."""
    keep = [axis for axis in range(len(shape)) if axis not in axes]
    kept = list(_walk_of(shape, (x, out), keep))
    reduced = list(_walk_of(shape, (x,), axes))
    if max(len(kept), len(reduced)) > MAX_OUTER:
        return None
    dense = next((i for i, axis in enumerate(kept) if axis.steps[0] == item), None)
    columns = Axis(1, (0, 0)) if dense is None else kept.pop(dense)
    run = reduced.pop() if reduced else Axis(1, (0,))
    units = max(1, _count(kept) * _num_blocks(columns))
    splits = 1
    if units < _ENOUGH_UNITS:
        elements = math.prod(shape)
        places = _count(reduced)
        cuts = places if places > 1 else run.extent
        splits = max(1, min(_MAX_SPLITS // units, elements // units // chunks.SPLIT_ELEMENTS, cuts))
    return _ReducedLayout(tuple(kept), columns, tuple(reduced), run, splits)


def _walk_of(
    shape: tuple[int, ...], strides: Sequence[Strides], axes: Sequence[int]
) -> tuple[Axis, ...]:
    own = [tuple([steps[axis] for axis in axes]) for steps in strides]
    return walk(tuple([shape[axis] for axis in axes]), own, in_order=False)


def _count(axes: Sequence[Axis]) -> int:
    return math.prod([axis.extent for axis in axes])


def _num_blocks(columns: Axis) -> int:
    return -(-columns.extent // _MAX_COLUMNS)


def _strides_by_axis(strides: Strides, rank: int, attrs: Attrs) -> Strides:
    """Return a stride of the output for every axis of x; 0 for the reduced ones."""
    axes = integers(attrs, "axes")
    if flag(attrs, "keepdims"):
        return tuple([0 if axis in axes else step for axis, step in enumerate(strides)])
    left = iter(strides)
    return tuple([0 if axis in axes else next(left) for axis in range(rank)])


@dataclass(frozen=True, slots=True)
class ReduceKernel:
    """`sum`, `mean` or `max`."""

    op: str

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"c.{self.op}"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take the common types; scratch is the partial results, where results are few."""
        (x,), (out,) = inputs, outputs
        if not runtime.is_on() or x.type.dtype not in _TYPES or out.type.dtype != x.type.dtype:
            return None
        if self.op == "mean" and not x.type.dtype.is_float:
            return None
        if self.op == "max" and x.type.num_elements == 0:
            return None
        layout = self._layout(attrs, x.shape, x.strides_bytes, out.strides_bytes, x.dtype.itemsize)
        if layout is None:
            return None
        work = Work(NATIVE_CALLS, passes=((BytePass.SIMPLE, float(x.type.size_bytes)),))
        return cost.needs(inputs, outputs, work, layout.workspace_bytes)

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return one launch."""
        (x,), (out,) = inputs, outputs
        layout = self._layout(attrs, x.shape, x.strides, out.strides, x.itemsize)
        if layout is None:
            raise InternalError(f"c.{self.op} was bound to axes that it does not take")
        count = math.prod([x.shape[axis] for axis in integers(attrs, "axes")])
        words: list[Word] = [
            *(address(x), address(out), address(workspace)),
            *columns_of(layout.kept, 2),
            *(layout.columns.extent, *layout.columns.steps, _MAX_COLUMNS),
            *columns_of(layout.reduced, 1),
            *(_count(layout.reduced), layout.run.extent, layout.run.steps[0]),
            *(layout.splits, layout.num_units),
            chunks.units_per_chunk(layout.num_units, x.size * x.itemsize),
            *(runtime.num_threads(), layout.num_results),
            float(count) if self.op == "mean" else 1.0,
            _form(self.op, x),
        ]
        where = runtime.address_in("reduce.c", "af_reduce")
        return native_launch(where, words, (x, out, workspace))

    def _layout(
        self, attrs: Attrs, shape: tuple[int, ...], x: Strides, out: Strides, item: int
    ) -> _ReducedLayout | None:
        axes = integers(attrs, "axes")
        return _layout(shape, x, _strides_by_axis(out, len(shape), attrs), axes, item)


def _form(op: str, x: Array) -> int:
    """Return the place in the table `forms` of reduce.c."""
    return (len(_TYPES) if op == "max" else 0) + _TYPES.index(DType(x.dtype.name))


@dataclass(frozen=True, slots=True)
class NativeArgmax:
    """`argmax`: position of the first maximum along an axis, or of the first NaN."""

    name: str = "c.argmax"
    op: str = "argmax"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take the common types with a dense output."""
        (x,), (out,) = inputs, outputs
        axis = integer(attrs, "axis")
        if not (runtime.is_on() and x.type.dtype in _TYPES and out.is_dense) or x.shape[axis] == 0:
            return None
        if len(_other_axes(x.shape, x.strides_bytes, axis)) > MAX_OUTER:
            return None
        work = Work(NATIVE_CALLS, passes=((BytePass.REDUCE, float(x.type.size_bytes)),))
        return cost.needs(inputs, outputs, work)

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return one launch."""
        (x,), (out,) = inputs, outputs
        axis = integer(attrs, "axis")
        words: list[Word] = [
            *(address(x), address(out)),
            *columns_of(_other_axes(x.shape, x.strides, axis), 1),
            *(x.shape[axis], x.strides[axis]),
            *(out.size, chunks.units_per_chunk(out.size, 2 * x.size * x.itemsize)),
            *(runtime.num_threads(), _TYPES.index(DType(x.dtype.name))),
        ]
        where = runtime.address_in("reduce.c", "af_argmax")
        return native_launch(where, words, (x, out))


def _other_axes(shape: tuple[int, ...], strides: Strides, axis: int) -> tuple[Axis, ...]:
    others = [other for other in range(len(shape)) if other != axis]
    own = tuple([strides[other] for other in others])
    return walk(tuple([shape[other] for other in others]), (own,), in_order=True)


NATIVE_REDUCE_KERNELS = (
    ReduceKernel("sum"),
    ReduceKernel("mean"),
    ReduceKernel("max"),
    NativeArgmax(),
)
