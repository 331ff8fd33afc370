"""Functions that put elements elsewhere, or cut and join tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import overload

from actorflow.tensor.literals import checked_size, promote, with_numpy_names
from actorflow.tensor.tensor import Tensor, apply, as_tensor, checked_axis, integers
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError
from compiler.contract.sbp import Split
from compiler.ops.primitives import slicing

__all__ = [
    "cat",
    "chunk",
    "concat",
    "expand",
    "expand_as",
    "flatten",
    "hstack",
    "moveaxis",
    "movedim",
    "narrow",
    "permute",
    "reshape",
    "reshape_as",
    "select",
    "split",
    "squeeze",
    "stack",
    "swapaxes",
    "swapdims",
    "transpose",
    "unbind",
    "unflatten",
    "unsqueeze",
    "view",
    "view_as",
    "vstack",
]


@with_numpy_names
def concat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Join tensors of equal shape, but for `dim`, along that axis. Also called `cat`."""
    if not tensors:
        raise CompileError(f"{find_source()}: concat needs at least one tensor")
    parts = [as_tensor(part) for part in tensors]
    dtype = promote([part.dtype for part in parts])
    parts = [part if part.dtype is dtype else part.to(dtype) for part in parts]
    return apply(slicing.CONCAT, *parts, axis=checked_axis(parts[0], dim))


cat = concat


@overload
def split(x: int) -> Split: ...


@overload
def split(x: Tensor, split_size: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]: ...


@with_numpy_names
def split(
    x: Tensor | int | None = None, split_size: int | Sequence[int] | None = None, dim: int = 0
) -> tuple[Tensor, ...] | Split:
    """Cut a tensor along `dim` into parts of `split_size`, the last one of what is left.

    A list has the size of each part. For a number of parts see `chunk`. An axis alone, `split(0)`,
    is how a tensor lies on many ranks: a part of that axis on each (`actorflow.tensor.layouts`).
    """
    if x is None:
        raise CompileError(
            f"{find_source()}: af.split needs the axis to split over ranks, such as af.split(0),"
            " or a tensor and the sizes of its parts, af.split(x, 2)"
        )
    if split_size is None:
        if isinstance(x, Tensor):
            raise TypeError("split() missing 1 required positional argument: 'split_size'")
        return Split(checked_size(x, "the axis of af.split"))
    x = as_tensor(x)
    axis = checked_axis(x, dim)
    extent, sizes = x.shape[axis], integers(split_size, what="the size of a part")
    if isinstance(split_size, int) and sizes[0] > 0:
        size = sizes[0]
        sizes = tuple([min(size, extent - start) for start in range(0, extent, size)]) or (0,)
    if any([size < 0 for size in sizes]) or sum(sizes) != extent:
        raise CompileError(
            f"{find_source()}: cannot split extent {extent} of axis {axis} into parts of"
            f" {list(sizes)}; sizes are positive, and those of a list add up to the extent"
        )
    before = (slice(None),) * axis
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple(
        [x[(*before, slice(stop - n, stop))] for n, stop in zip(sizes, stops, strict=True)]
    )


@with_numpy_names
def chunk(x: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Cut a tensor along `dim` into `chunks` parts of equal extent, the last one perhaps shorter.

    There are fewer where the extent is too small, as in torch.
    """
    x, parts = as_tensor(x), checked_size(chunks, "the number of chunks")
    if parts < 1:
        raise CompileError(f"{find_source()}: chunks must be 1 or more, got {parts}")
    extent = x.shape[checked_axis(x, dim)]
    if not extent:
        return split(x, [0] * parts, dim)
    return split(x, -(-extent // parts), dim)


def flatten(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Make one axis of those from `start_dim` to `end_dim`, both included."""
    x = as_tensor(x)
    if not x.ndim:
        return x.reshape(1)
    first, last = checked_axis(x, start_dim), checked_axis(x, end_dim)
    if first > last:
        raise CompileError(
            f"{find_source()}: flatten needs start_dim before end_dim, got {start_dim} and"
            f" {end_dim} for {x.type}"
        )
    shape = x.shape
    return x.reshape(*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])


@with_numpy_names
def unflatten(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Make several axes of `sizes`, of which one may be -1, of one."""
    x = as_tensor(x)
    axis, parts = checked_axis(x, dim), integers(sizes, what="a size")
    product = math.prod([size for size in parts if size != -1])
    extent = x.shape[axis]
    if parts.count(-1) == 1 and product > 0:
        parts = tuple([extent // product if size == -1 else size for size in parts])
    if any([size < 0 for size in parts]) or math.prod(parts) != extent:
        raise CompileError(
            f"{find_source()}: cannot unflatten axis {axis} of {x.type} into {list(parts)}: its"
            f" extent is {extent}, and sizes multiply to it, one of them perhaps -1"
        )
    return x.reshape(*x.shape[:axis], *parts, *x.shape[axis + 1 :])


def permute(x: Tensor, dims: int | Sequence[int]) -> Tensor:
    """Put the axes into another order."""
    return as_tensor(x).permute(*integers(dims, what="an axis"))


def reshape(x: Tensor, shape: int | Sequence[int]) -> Tensor:
    """Return the same elements in row-major order under another shape; one extent may be -1."""
    return as_tensor(x).reshape(*integers(shape, what="an extent"))


def swapaxes(x: Tensor, dim0: int, dim1: int) -> Tensor:
    """Exchange two axes. Also called `swapdims` and `transpose`."""
    return as_tensor(x).swapaxes(dim0, dim1)


swapdims = transpose = swapaxes


def view(x: Tensor, *shape: int | Sequence[int]) -> Tensor:
    """Return `reshape`, of any tensor: where the bytes lie is the plan's business."""
    return as_tensor(x).reshape(*shape)


def view_as(x: Tensor, other: Tensor) -> Tensor:
    """Return the elements of x in the shape of another tensor. Also called `reshape_as`."""
    return as_tensor(x).reshape(as_tensor(other).shape)


reshape_as = view_as


def movedim(x: Tensor, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    """Move axes to other places; the others stay in order. Also called `moveaxis`."""
    x = as_tensor(x)
    sources, targets = [
        [checked_axis(x, axis) for axis in integers(axes, what="an axis")]
        for axes in (source, destination)
    ]
    if not len(sources) == len({*sources}) == len({*targets}) == len(targets):
        raise CompileError(
            f"{find_source()}: movedim needs as many places as axes, each once; got {source} to"
            f" {destination}"
        )
    order = [axis for axis in range(x.ndim) if axis not in sources]
    for place, axis in sorted(zip(targets, sources, strict=True)):
        order.insert(place, axis)
    return x.permute(*order)


moveaxis = movedim


@with_numpy_names
def squeeze(x: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    """Leave out axes of extent 1: all of them, or those of `dim` that are."""
    x = as_tensor(x)
    dims = range(x.ndim) if dim is None else integers(dim, what="an axis")
    axes = {checked_axis(x, axis) for axis in dims} if x.ndim else set()
    shape = tuple([n for axis, n in enumerate(x.shape) if n != 1 or axis not in axes])
    return x if shape == x.shape else x.reshape(shape)


@with_numpy_names
def unsqueeze(x: Tensor, dim: int) -> Tensor:
    """Put an axis of extent 1 before axis `dim`; -1 puts it last."""
    x = as_tensor(x)
    place = _new_axis(x, dim)
    return x.reshape(*x.shape[:place], 1, *x.shape[place:])


def _new_axis(x: Tensor, dim: int) -> int:
    place = checked_size(dim, "an axis")
    if not -x.ndim - 1 <= place <= x.ndim:
        raise CompileError(
            f"{find_source()}: axis {place} is out of range for one more of {x.type}"
        )
    return place % (x.ndim + 1)


def expand(x: Tensor, *sizes: int | Sequence[int]) -> Tensor:
    """Stretch axes of extent 1, and add leading ones; -1 leaves an extent as it is."""
    x = as_tensor(x)
    extents = integers(*sizes, what="an extent")
    old = (*[1] * (len(extents) - x.ndim), *x.shape)
    pairs = zip(extents, old[-len(extents) :] if extents else (), strict=True)
    if any([n == -1 for n in extents[: max(0, len(extents) - x.ndim)]]):
        raise CompileError(f"{find_source()}: expand cannot leave a new axis as it is: {sizes}")
    return x.broadcast_to(tuple([m if n == -1 else n for n, m in pairs]))


def expand_as(x: Tensor, other: Tensor) -> Tensor:
    """Stretch x to the shape of another tensor."""
    return as_tensor(x).broadcast_to(as_tensor(other).shape)


@with_numpy_names
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Join tensors of one shape along a new axis."""
    if not tensors:
        raise CompileError(f"{find_source()}: stack needs at least one tensor")
    all_ = [as_tensor(tensor) for tensor in tensors]
    if {t.shape for t in all_} != {all_[0].shape}:
        listed = " and ".join([str(t.type) for t in all_])
        raise CompileError(f"{find_source()}: stack needs tensors of one shape, got {listed}")
    axis = _new_axis(all_[0], dim)
    return concat([unsqueeze(t, axis) for t in all_], axis)


def vstack(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors along the first axis; numbers and vectors are rows."""
    rows = [as_tensor(t) for t in tensors]
    return concat([t.reshape(1, -1) if t.ndim < 2 else t for t in rows], 0)


def hstack(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors along the second axis, vectors along their only one."""
    parts = [as_tensor(t) for t in tensors]
    parts = [t if t.ndim else t.reshape(1) for t in parts]
    return concat(parts, 0 if parts and parts[0].ndim == 1 else 1)


@with_numpy_names
def unbind(x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    """Return the slices along `dim`, without it."""
    x = as_tensor(x)
    return tuple([select(x, dim, at) for at in range(x.shape[checked_axis(x, dim)])])


@with_numpy_names
def select(x: Tensor, dim: int, index: int) -> Tensor:
    """Return the slice at one place along `dim`, without that axis."""
    x = as_tensor(x)
    before = (slice(None),) * checked_axis(x, dim)
    return x[(*before, checked_size(index, "an index"))]


@with_numpy_names
def narrow(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Return `length` slices along `dim` from `start` on."""
    x = as_tensor(x)
    axis = checked_axis(x, dim)
    first, count = checked_size(start, "the start"), checked_size(length, "the length")
    extent = x.shape[axis]
    first = first + extent if first < 0 else first
    if not (count >= 0 and first >= 0 and first + count <= extent):
        raise CompileError(
            f"{find_source()}: narrow wants {count} from {start} on, of axis {axis} of {x.type}"
        )
    return x[(*(slice(None),) * axis, slice(first, first + count))]
