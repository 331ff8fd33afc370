"""Rows of a table by indices of several axes, which a user gave or the place of an element has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from actorflow.functional.elementwise import maximum, where
from actorflow.tensor import Operand, Tensor, apply, as_tensor
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.ops import embedding as rows_ops
from compiler.ops.signature import broadcast_shape
from compiler.registry import OpTypeError
from compiler.types import DType

Index = Any
"""A tensor of integers, an array or a list of them."""

_FEW = 16
"""Elements of a row up to which it is worth to put rows together before they are taken."""


_EXACT_BITS = 53
"""Of integers that doubles hold."""


class RowNumbers:
    """Numbers of rows of a table: an array where all is known, else a tensor.

    `extents` are those of the axes, `at` has an index for each that broadcast, and `users` says
    which of them are the user's.
    """

    def __init__(
        self, extents: Sequence[int], at: Sequence[Tensor | np.ndarray], users: Sequence[int]
    ) -> None:
        self.count = math.prod(extents)
        self.shape = together([tuple(index.shape) for index in at])
        self.axes = tuple([extents[axis] for axis in users])
        if 0 in self.axes and 0 not in self.shape:
            raise CompileError(f"{find_source()}: an index into an axis without elements")
        flat: Tensor | np.ndarray = np.zeros((), np.int64)
        for axis, (extent, index) in enumerate(zip(extents, at, strict=True)):
            if isinstance(flat, np.ndarray) and isinstance(index, np.ndarray):
                flat = flat * extent + (_inside(index, extent) if axis in users else index)
                continue
            flat = apply(
                rows_ops.FLAT_INDEX,
                as_tensor(flat),
                as_tensor(index).to("int64"),
                extent=extent,
                number=users.index(axis) if axis in users else 0,
                count=len(users),
                rows=self.count,
            )
        self.is_known = isinstance(flat, np.ndarray)
        self.ids = as_tensor(flat)

    @property
    def attrs(self) -> dict[str, Any]:
        """What an op must know to tell of a bad one; constants were checked."""
        return {} if self.is_known else {"axes": self.axes}

    def of(self, table: Tensor) -> Tensor:
        """Return the rows of a table [count, D]: shape + [D]."""
        return apply(rows_ops.EMBEDDING, table, self.ids, **self.attrs)

    def added(self, rows: Tensor) -> Tensor:
        """Return a table [count, D] of the sums of rows (shape + [D]) with equal numbers.

        Sums of integers wrap around. They are sums of doubles, which are exact: of so few bits at a
        time that no sum of all rows needs more than a double has.
        """
        if rows.dtype.is_float or not rows.dtype.is_integer:
            return apply(rows_ops.EMBEDDING_GRAD, rows, self.ids, rows=self.count, **self.attrs)
        bits = _EXACT_BITS - math.prod(self.shape).bit_length()
        total: Tensor | None = None
        for low in range(0, 8 * rows.dtype.itemsize, bits):
            rest = rows.to("int64") // (1 << low) if low else rows.to("int64")
            is_last = low + bits >= 8 * rows.dtype.itemsize
            part = self.added((rest if is_last else rest % (1 << bits)).to("float64")).to("int64")
            total = part if total is None else total + part * (1 << low)
        return as_tensor(total).to(rows.dtype)

    def put(self, table: Tensor, rows: Operand) -> Tensor:
        """Return a table [count, D] with rows (shape + [D], or a number) at these numbers.

        Of several for one place the last counts.
        """
        last = apply(rows_ops.LAST_PLACE, self.ids, rows=self.count, **self.attrs)
        if isinstance(rows, Tensor) and rows.ndim:
            if 0 in self.shape:
                return table
            flat = rows.reshape(math.prod(self.shape), table.shape[1])
            rows = apply(rows_ops.EMBEDDING, flat, maximum(last, 0))
        return where((last >= 0).reshape(self.count, 1), rows, table)


def _inside(index: np.ndarray, extent: int) -> np.ndarray:
    bad = (index < -extent) | (index >= extent)
    if bad.any():
        raise CompileError(
            f"{find_source()}: index {index[bad][0]} is outside {-extent}..{extent - 1}"
        )
    wide = index.astype(np.int64)  # the extent may be more than small integers hold
    return np.where(wide < 0, wide + extent, wide)


def together(shapes: Sequence[tuple[int, ...]], what: str = "indices") -> tuple[int, ...]:
    """Return the common shape of what broadcasts. Raises CompileError where it does not."""
    try:
        return broadcast_shape(*shapes)
    except OpTypeError as error:
        raise CompileError(f"{find_source()}: {what}: {error}") from None


def index_value(given: Index, what: str) -> Tensor | np.ndarray:
    """Return an index as a tensor or an array of int64. Raises CompileError for other elements."""
    try:
        index = given if isinstance(given, Tensor) else np.asarray(given)
    except ValueError as error:
        raise CompileError(f"{find_source()}: {what}: {error}") from None
    if isinstance(index, np.ndarray) and not index.size:
        index = index.astype(np.int64)  # an empty list is of floats
    kind = DType.BOOL if str(index.dtype) == "bool" else index.dtype
    if kind is DType.BOOL:
        raise CompileError(
            f"{find_source()}: {what} is a mask of bools, which takes as many elements as it has"
            " True: shapes are static here. Choose with af.where(mask, x, 0), or sum over a mask"
        )
    if not str(index.dtype).startswith(("int", "uint")):
        raise CompileError(f"{find_source()}: {what} needs integers, got {index.dtype}")
    return index


def along(shape: Sequence[int], axis: int) -> np.ndarray:
    """Return the numbers of an axis, to be broadcast to a shape."""
    own = [extent if at == axis else 1 for at, extent in enumerate(shape)]
    return np.arange(shape[axis], dtype=np.int64).reshape(own)


def picked(x: Tensor, first: int, at: Sequence[Tensor | np.ndarray]) -> Tensor:
    """Return what indices that broadcast pick from neighbouring axes, in the place of those."""
    lead, axes, tail = _cut(x, first, len(at))
    users = list(range(len(at)))
    if math.prod(lead) > 1 and math.prod(tail) < _FEW:
        rows = RowNumbers(axes, at, users)
        if 4 * math.prod(rows.shape) >= math.prod(axes):  # the rows are put together first
            order = [*range(first, first + len(at)), *range(first)]
            turned = x.permute(*order, *range(len(order), x.ndim))
            made = rows.of(turned.reshape(rows.count, math.prod((*lead, *tail))))
            made, depth = made.reshape(*rows.shape, *lead, *tail), len(rows.shape)
            order = [*range(depth, depth + first), *range(depth)]
            return made.permute(*order, *range(len(order), made.ndim))
    rows = rows_of(x, first, at)
    made = rows.of(x.reshape(rows.count, math.prod(tail)))
    return made.reshape(*lead, *together([tuple(i.shape) for i in at]), *tail)


def _cut(x: Tensor, first: int, num: int) -> tuple[tuple[int, ...], ...]:
    return x.shape[:first], x.shape[first : first + num], x.shape[first + num :]


def rows_of(x: Tensor, first: int, at: Sequence[Tensor | np.ndarray]) -> RowNumbers:
    """Return which rows of x, as a table of what lies behind the axes, indices mean."""
    lead, axes, _ = _cut(x, first, len(at))
    count = math.prod(lead)
    if count == 1:
        return RowNumbers(axes, at, list(range(len(at))))
    depth = len(together([tuple(index.shape) for index in at]))
    number = np.arange(count, dtype=np.int64).reshape(count, *[1] * depth)
    return RowNumbers((count, *axes), (number, *at), list(range(1, 1 + len(at))))
