"""Elements by tensors of integers: taken, put and added.

Indices of several axes become numbers of rows of one table, on which two ops work: `embedding`,
which takes rows, and its gradient, which adds them up; what is put is looked up by the last place
that says where it goes. So all are the same on every run, with whatever number of threads. A
negative index counts from the end; one beyond an end fails the step with an IndexError that names
it, or the trace where it is a constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from actorflow.functional.elementwise import maximum, minimum, where
from actorflow.tensor.literals import refuse_masked, with_numpy_names
from actorflow.tensor.tensor import Operand, Tensor, apply, as_tensor, checked_axis
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError
from compiler.contract.types import DType
from compiler.graph.registry import OpTypeError, broadcast_shape
from compiler.ops.families import embedding
from compiler.ops.families.along import ARGSORT
from compiler.ops.primitives import slicing

__all__ = [
    "gather",
    "index_add",
    "index_copy",
    "index_fill",
    "index_put",
    "index_select",
    "masked_fill",
    "put",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "take",
    "take_along_axis",
    "take_along_dim",
]


Index = Any
"""A tensor of integers, an array or a list of them."""

_FEW = 16
"""Elements of a row up to which it is worth to put rows together before they are taken."""


_EXACT_BITS = 53
"""Of integers that doubles hold."""


class FlatIndices:
    """Numbers of rows of a table: an array where all is known, else a tensor.

    `extents` are those of the axes, `at` has an index for each that broadcast, and `users` says
    which of them are the user's.
    """

    def __init__(
        self, extents: Sequence[int], at: Sequence[Tensor | np.ndarray], users: Sequence[int]
    ) -> None:
        self.count = math.prod(extents)
        self.shape = broadcast_shapes([tuple(index.shape) for index in at])
        self.axes = tuple([extents[axis] for axis in users])
        if 0 in self.axes and 0 not in self.shape:
            raise CompileError(f"{find_source()}: an index into an axis without elements")
        flat: Tensor | np.ndarray = np.zeros((), np.int64)
        for axis, (extent, index) in enumerate(zip(extents, at, strict=True)):
            # Constant indices are checked and joined now, and cost the step nothing.
            if isinstance(flat, np.ndarray) and isinstance(index, np.ndarray):
                flat = flat * extent + (_inside(index, extent) if axis in users else index)
                continue
            flat = apply(
                embedding.FLAT_INDEX,
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
        return apply(embedding.EMBEDDING, table, self.ids, **self.attrs)

    def added(self, rows: Tensor) -> Tensor:
        """Return a table [count, D] of the sums of rows (shape + [D]) with equal numbers.

        Sums of integers wrap around. They are sums of doubles, which are exact: of so few bits at a
        time that no sum of all rows needs more than a double has.
        """
        if rows.dtype.is_float or not rows.dtype.is_integer:
            return apply(embedding.EMBEDDING_GRAD, rows, self.ids, rows=self.count, **self.attrs)
        # n summands of b bits need b + log2(n) bits.
        bits = _EXACT_BITS - math.prod(self.shape).bit_length()
        total: Tensor | None = None
        for low in range(0, 8 * rows.dtype.itemsize, bits):
            rest = rows.to("int64") // (1 << low) if low else rows.to("int64")
            is_last = low + bits >= 8 * rows.dtype.itemsize
            # The highest part keeps its sign; the others are remainders, 0 and above.
            part = self.added((rest if is_last else rest % (1 << bits)).to("float64")).to("int64")
            total = part if total is None else total + part * (1 << low)
        return as_tensor(total).to(rows.dtype)

    def put(self, x: Tensor, depth: int, source: Operand) -> Tensor:
        """Return x, whose first `depth` axes are the rows, with what is put at these numbers.

        `source` is a number, or a tensor of this shape and the other axes. Of several for one place
        the last counts.
        """
        tail = x.shape[depth:]
        if isinstance(source, Tensor) and source.ndim:
            if 0 in self.shape:
                return x
            rows = source.reshape(*self.shape, *tail)
            return apply(embedding.PUT_ROWS, x, self.ids, rows, depth=depth, **self.attrs)
        # -1 for rows that no index names.
        last = apply(embedding.LAST_PLACE, self.ids, rows=self.count, **self.attrs)
        return where((last >= 0).reshape(*x.shape[:depth], *[1] * len(tail)), source, x)


def _inside(index: np.ndarray, extent: int) -> np.ndarray:
    bad = (index < -extent) | (index >= extent)
    if bad.any():
        raise CompileError(
            f"{find_source()}: index {index[bad][0]} is outside {-extent}..{extent - 1}"
        )
    wide = index.astype(np.int64)  # the extent may be more than small integers hold
    return np.where(wide < 0, wide + extent, wide)


def broadcast_shapes(shapes: Sequence[tuple[int, ...]], what: str = "indices") -> tuple[int, ...]:
    """Return the common shape of what broadcasts. Raises CompileError where it does not."""
    try:
        return broadcast_shape(*shapes)
    except OpTypeError as error:
        raise CompileError(f"{find_source()}: {what}: {error}") from None


def index_value(given: Index, what: str) -> Tensor | np.ndarray:
    """Return an index as a tensor or an array of int64. Raises CompileError for other elements."""
    refuse_masked(given, what)
    try:
        index = given if isinstance(given, Tensor) else np.asarray(given)
    except ValueError as error:
        raise CompileError(f"{find_source()}: {what}: {error}") from None
    if isinstance(index, np.ndarray) and not index.size:
        index = index.astype(np.int64)  # an empty list is of floats
    kind = DType.BOOL if str(index.dtype) == "bool" else index.dtype
    if kind is DType.BOOL:
        raise CompileError(
            f"{find_source()}: {what} is a mask of bools, whose number of True is not known when"
            " a job is traced, and shapes are static. Choose with af.where(mask, x, 0), or sum"
            " over a mask"
        )
    if not str(index.dtype).startswith(("int", "uint")):
        raise CompileError(f"{find_source()}: {what} needs integers, got {index.dtype}")
    return index


def along(shape: Sequence[int], axis: int) -> np.ndarray:
    """Return the numbers of an axis, to be broadcast to a shape."""
    extents = [extent if at == axis else 1 for at, extent in enumerate(shape)]
    return np.arange(shape[axis], dtype=np.int64).reshape(extents)


def picked(x: Tensor, first: int, at: Sequence[Tensor | np.ndarray]) -> Tensor:
    """Return what indices that broadcast pick from neighbouring axes, in the place of those."""
    lead, axes, tail = _cut(x, first, len(at))
    users = list(range(len(at)))
    if math.prod(lead) > 1 and math.prod(tail) < _FEW:
        rows = FlatIndices(axes, at, users)
        # The transpose reads the whole table, so it has to pay: at least a quarter of the rows is
        # taken.
        if 4 * math.prod(rows.shape) >= math.prod(axes):  # the rows are put together first
            order = [*range(first, first + len(at)), *range(first)]
            turned = x.permute(*order, *range(len(order), x.ndim))
            out = rows.of(turned.reshape(rows.count, math.prod((*lead, *tail))))
            out, depth = out.reshape(*rows.shape, *lead, *tail), len(rows.shape)
            order = [*range(depth, depth + first), *range(depth)]
            return out.permute(*order, *range(len(order), out.ndim))
    rows = rows_of(x, first, at)
    out = rows.of(x.reshape(rows.count, math.prod(tail)))
    return out.reshape(*lead, *broadcast_shapes([tuple(i.shape) for i in at]), *tail)


def _cut(x: Tensor, first: int, num: int) -> tuple[tuple[int, ...], ...]:
    return x.shape[:first], x.shape[first : first + num], x.shape[first + num :]


def rows_of(x: Tensor, first: int, at: Sequence[Tensor | np.ndarray]) -> FlatIndices:
    """Return which rows of x, as a table of what lies behind the axes, indices mean."""
    lead, axes, _ = _cut(x, first, len(at))
    count = math.prod(lead)
    if count == 1:
        return FlatIndices(axes, at, list(range(len(at))))
    depth = len(broadcast_shapes([tuple(index.shape) for index in at]))
    number = np.arange(count, dtype=np.int64).reshape(count, *[1] * depth)
    return FlatIndices((count, *axes), (number, *at), list(range(1, 1 + len(at))))


def subscript(x: Tensor, given: Any) -> Tensor:
    """Return x[given]: integers, slices, None, one `...`, and tensors or arrays of integers.

    Follows torch: tensors broadcast together; what they pick lies where they stand if they stand
    side by side, else before all other axes.
    """
    items = list(given) if isinstance(given, tuple) else [given]
    num = sum([item is not None and item is not Ellipsis for item in items])
    at = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    items[at : at + 1] = [slice(None)] * (x.ndim - num)
    if num > x.ndim or any([item is Ellipsis for item in items]):
        raise CompileError(f"{find_source()}: too many indices for {x.type}: {given!r}")
    windows: list[range] = []
    shape: list[int] = []
    turned: list[int] = []
    tensors: dict[int, Tensor | np.ndarray] = {}
    for item in items:
        axis = len(windows)
        if item is None:
            shape.append(1)
            continue
        extent = x.shape[axis]
        window = _window(item, extent)
        if window is None:
            if isinstance(item, (slice, bool, str)) or not hasattr(item, "__getitem__"):
                raise _strange(item, axis, x)
            tensors[len(shape)] = index_value(item, f"the index of axis {axis}")
            window = range(extent)
        if window.step < 0:
            turned.append(len(shape))
            # SLICE knows positive steps only: take the same elements forwards and turn the axis
            # below.
            window = range(window[-1], window[0] + 1, -window.step) if window else range(0)
        if isinstance(item, slice) or len(shape) in tensors:
            shape.append(len(window))
        windows.append(window)
    part = apply(
        slicing.SLICE,
        x,
        starts=tuple([w.start for w in windows]),
        stops=tuple([max(w.start, w.stop) for w in windows]),
        steps=tuple([w.step for w in windows]),
    )
    part = part if part.shape == tuple(shape) else part.reshape(shape)
    for axis in turned:
        part = picked(part, axis, [np.arange(shape[axis])[::-1]])
    return _by_tensors(part, tensors) if tensors else part


def _strange(item: Any, axis: int, x: Tensor) -> CompileError:
    return CompileError(
        f"{find_source()}: index {item!r} of axis {axis} is not supported for {x.type}: use"
        " integers in range, slices, None, and tensors or arrays of integers"
    )


def _window(item: Any, extent: int) -> range | None:
    """Return what an index takes of an axis, or None where it is no integer or slice for it."""
    if isinstance(item, (bool, Tensor, np.bool_)):
        return None
    try:
        if isinstance(item, slice):
            return range(*item.indices(extent))
        position = item.__index__()
    except (AttributeError, TypeError, ValueError):
        return None
    if not -extent <= position < extent:
        return None
    return range(position % extent, position % extent + 1)


def _by_tensors(x: Tensor, tensors: dict[int, Tensor | np.ndarray]) -> Tensor:
    axes = list(tensors)
    # Tensors apart from each other: what they pick comes first, as in torch and numpy.
    if axes != list(range(axes[0], axes[0] + len(axes))):
        x = x.permute(*axes, *[axis for axis in range(x.ndim) if axis not in tensors])
        axes = [*range(len(axes))]
    return picked(x, axes[0], list(tensors.values()))


def _elements(x: Tensor, axis: int, index: Tensor | np.ndarray, what: str) -> FlatIndices:
    """Return which elements of x an index means along an axis, at its own places of the others."""
    shape = tuple(index.shape)
    fits = len(shape) == x.ndim and all(
        [n <= m for i, (n, m) in enumerate(zip(shape, x.shape, strict=True)) if i != axis]
    )
    if not fits:
        raise CompileError(
            f"{find_source()}: {what} along axis {axis} of {x.type} needs an index of as many axes,"
            f" none but that one longer; got {list(shape)}"
        )
    at = [index if i == axis else along(shape, i) for i in range(x.ndim)]
    return FlatIndices(x.shape, at, [axis])


@with_numpy_names
def gather(x: Tensor, dim: int, index: Index) -> Tensor:
    """Return out[i][j][k] = x[index[i][j][k]][j][k] for `dim` 0, and so on; of index's shape."""
    x = as_tensor(x)
    rows = _elements(x, checked_axis(x, dim), index_value(index, "the index of gather"), "gather")
    return rows.of(x.reshape(rows.count, 1)).reshape(rows.shape)


@with_numpy_names
def take_along_dim(x: Tensor, indices: Index, dim: int | None = None) -> Tensor:
    """Return `gather` of x and indices that broadcast; of both flattened without `dim`."""
    x, index = as_tensor(x), index_value(indices, "the indices of take_along_dim")
    if dim is None:
        return take(x.reshape(-1), index.reshape(-1))
    axis = checked_axis(x, dim)
    if len(index.shape) != x.ndim:
        raise CompileError(
            f"{find_source()}: take_along_dim needs indices of {x.ndim} axes as {x.type} has, got"
            f" {list(index.shape)}"
        )
    shapes = [[n if i != axis else 1 for i, n in enumerate(s)] for s in (x.shape, index.shape)]
    wide = list(broadcast_shapes([tuple(shape) for shape in shapes]))
    both = [(*wide[:axis], n, *wide[axis + 1 :]) for n in (x.shape[axis], index.shape[axis])]
    return gather(x.broadcast_to(both[0]), axis, as_tensor(index).broadcast_to(both[1]))


take_along_axis = take_along_dim


@with_numpy_names
def index_select(x: Tensor, dim: int, index: Index) -> Tensor:
    """Return the slices of x along `dim` at the integers of a vector."""
    x, indices = as_tensor(x), _vector(index, "index_select")
    return picked(x, checked_axis(x, dim), [indices])


def _vector(index: Index, what: str) -> Tensor | np.ndarray:
    indices = index_value(index, f"the index of {what}")
    if len(indices.shape) > 1:
        raise CompileError(
            f"{find_source()}: {what} needs a vector of indices, got {list(indices.shape)}"
        )
    return indices.reshape(-1)


def take(x: Tensor, index: Index) -> Tensor:
    """Return the elements of x, flattened, at integers; of the index's shape."""
    return picked(as_tensor(x).reshape(-1), 0, [index_value(index, "the index of take")])


@with_numpy_names
def scatter(x: Tensor, dim: int, index: Index, src: Operand) -> Tensor:
    """Return x with out[index[i][j][k]][j][k] = src[i][j][k] for `dim` 0, and so on.

    `src` is a number or a tensor; of several for one place the last in row-major order counts.
    """
    x = as_tensor(x)
    rows = _elements(x, checked_axis(x, dim), index_value(index, "the index of scatter"), "scatter")
    source = _source(x, src, rows.shape) if isinstance(src, (Tensor, np.ndarray)) else src
    return rows.put(x, x.ndim, source)


@with_numpy_names
def scatter_add(x: Tensor, dim: int, index: Index, src: Tensor) -> Tensor:
    """Return x with src[i][j][k] added to out[index[i][j][k]][j][k] for `dim` 0, and so on."""
    x = as_tensor(x)
    indices = index_value(index, "the index of scatter_add")
    rows = _elements(x, checked_axis(x, dim), indices, "scatter_add")
    source = _source(x, src, rows.shape)
    return x + rows.added(source.reshape(*rows.shape, 1)).reshape(x.shape)


_COMBINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "prod": lambda a, b: a * b,
    "amax": maximum,
    "amin": minimum,
}


@with_numpy_names
def scatter_reduce(
    x: Tensor, dim: int, index: Index, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Return x with elements of `src` for one place combined, as `scatter_add` adds them.

    `reduce` is "sum", "prod", "mean", "amax" or "amin". With `include_self` x is one of the
    elements; without it counts where the index names no place.
    """
    x = as_tensor(x)
    known = ("sum", "mean", *_COMBINED)
    if reduce not in known:
        raise CompileError(f"{find_source()}: scatter_reduce knows {known}, got {reduce!r}")
    indices = index_value(index, "the index of scatter_reduce")
    rows = _elements(x, checked_axis(x, dim), indices, "scatter_reduce")
    table, source = x.reshape(rows.count, 1), _source(x, src, rows.shape)
    if not math.prod(rows.shape):
        return x
    if reduce in _COMBINED:
        combine = _COMBINED[reduce]
        all_of_one = _combined(rows, source.reshape(-1), combine)
        if not include_self:
            return rows.put(table, 1, all_of_one.reshape(-1, 1)).reshape(x.shape)
        base = table if reduce != "prod" else table * 0 + 1
        return combine(table, rows.put(base, 1, all_of_one.reshape(-1, 1))).reshape(x.shape)
    if not include_self:
        table = rows.put(table, 1, 0)
    total = table + rows.added(source.reshape(*rows.shape, 1))
    if reduce == "mean":
        ones = as_tensor(np.ones((), x.dtype.value)).broadcast_to(*rows.shape, 1)
        count = rows.added(ones) + (1 if include_self else 0)
        count = maximum(count, 1)
        total = total / count if x.dtype.is_float else total // count
    return total.reshape(x.shape)


def _combined(
    rows: FlatIndices, values: Tensor, combine: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return for each element what it and those before it for the same place come to.

    A segmented scan of the elements in order of their places (Hillis & Steele, 1986): log2(n) steps
    over all of them, whatever the places are. The last one for a place has the whole.
    """
    order = apply(ARGSORT, rows.ids.broadcast_to(*rows.shape).reshape(-1), descending=False)
    places = picked(rows.ids.broadcast_to(*rows.shape).reshape(-1), 0, [order])
    values, count, far = picked(values, 0, [order]), len(values), 1
    while far < count:
        is_one = places[far:] == places[:-far]
        both = where(is_one, combine(values[:-far], values[far:]), values[far:])
        values = apply(slicing.CONCAT, values[:far], both, axis=0)
        far *= 2
    return picked(values, 0, [apply(ARGSORT, order, descending=False)])


def _source(x: Tensor, src: Operand, shape: tuple[int, ...]) -> Tensor:
    """Return what is put: the first elements of a tensor that is as large as the index, or more."""
    source = as_tensor(src, x.dtype)
    fits = source.ndim == len(shape) and all(
        [n <= m for n, m in zip(shape, source.shape, strict=True)]
    )
    if not fits:
        raise CompileError(
            f"{find_source()}: what is put has to cover the index of shape {list(shape)}, got"
            f" {source.type}"
        )
    return source if source.shape == shape else subscript(source, tuple(map(slice, shape)))


def _slices(
    x: Tensor, dim: int, index: Index, source: Operand, what: str
) -> tuple[Tensor, FlatIndices, Tensor]:
    """Return x as a table, the rows that are meant, and what is put or added there."""
    axis, indices = checked_axis(x, dim), _vector(index, what)
    rows, width = rows_of(x, axis, [indices]), math.prod(x.shape[axis + 1 :])
    shape = (*x.shape[:axis], indices.shape[0], *x.shape[axis + 1 :])
    values = as_tensor(source, x.dtype)
    if values.shape == shape:
        values = values.reshape(*rows.shape, width)
    elif values.ndim:
        raise CompileError(
            f"{find_source()}: {what} along axis {axis} of {x.type} needs a source of shape"
            f" {list(shape)}, got {values.type}"
        )
    return x.reshape(rows.count, width), rows, values


@with_numpy_names
def index_add(
    x: Tensor, dim: int, index: Index, source: Tensor, *, alpha: float | int = 1
) -> Tensor:
    """Return x with alpha times the slices of `source` added to its own at a vector of indices."""
    x = as_tensor(x)
    table, rows, values = _slices(x, dim, index, source, "index_add")
    return (table + rows.added(values if alpha == 1 else values * alpha)).reshape(x.shape)


@with_numpy_names
def index_copy(x: Tensor, dim: int, index: Index, source: Tensor) -> Tensor:
    """Return x with the slices of `source` at a vector of indices; the last one counts."""
    x = as_tensor(x)
    _, rows, values = _slices(x, dim, index, source, "index_copy")
    return rows.put(x, checked_axis(x, dim) + 1, values)


@with_numpy_names
def index_fill(x: Tensor, dim: int, index: Index, value: Operand) -> Tensor:
    """Return x with a number at all elements of its slices at a vector of indices."""
    x, number = as_tensor(x), as_tensor(value, as_tensor(x).dtype)
    if number.ndim:
        raise CompileError(f"{find_source()}: index_fill needs a number, got {number.type}")
    _, rows, _ = _slices(x, dim, index, number, "index_fill")
    return rows.put(x, checked_axis(x, dim) + 1, number)


def put(x: Tensor, index: Index, source: Tensor, *, accumulate: bool = False) -> Tensor:
    """Return x with elements of `source` at integers that number its elements in order."""
    x = as_tensor(x)
    return index_put(
        x.reshape(-1), (index,), as_tensor(source, x.dtype), accumulate=accumulate
    ).reshape(x.shape)


def index_put(
    x: Tensor, indices: Sequence[Index], values: Operand, *, accumulate: bool = False
) -> Tensor:
    """Return x with x[indices] = values, or += with `accumulate`; indices are of the first axes.

    Values broadcast to x[indices]; the last of several for one place counts.
    """
    x = as_tensor(x)
    at = [index_value(index, "an index of index_put") for index in indices]
    if not 0 < len(at) <= x.ndim:
        raise CompileError(f"{find_source()}: {len(at)} indices for {x.type}")
    rows, tail = rows_of(x, 0, at), x.shape[len(at) :]
    wide = as_tensor(values, x.dtype).broadcast_to(*rows.shape, *tail)
    if not accumulate:
        return rows.put(x, len(at), wide)
    flat = wide.reshape(*rows.shape, math.prod(tail))
    return (x.reshape(rows.count, math.prod(tail)) + rows.added(flat)).reshape(x.shape)


def masked_fill(x: Tensor, mask: Tensor, value: Operand) -> Tensor:
    """Return x, in its dtype, with a number where `mask`, of bools, holds; it broadcasts."""
    x = as_tensor(x)
    return where(mask, value.to(x.dtype) if isinstance(value, Tensor) else value, x)
