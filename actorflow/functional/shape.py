"""Functions that put elements elsewhere, or cut and join tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from actorflow.functional.names import with_numpy_names
from actorflow.literals import checked_size
from actorflow.tensor import Tensor, apply, as_tensor, checked_axis, integers
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.ops import slicing

__all__ = ["cat", "chunk", "concat", "flatten", "split", "unflatten"]


@with_numpy_names
def concat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Join tensors of equal shape, but for `dim`, along that axis. Also called `cat`."""
    if not isinstance(tensors, Sequence):
        raise CompileError(
            f"{find_source()}: concat needs a list of tensors, got {type(tensors).__name__}"
        )
    if not tensors:
        raise CompileError(f"{find_source()}: concat needs at least one tensor")
    first = as_tensor(tensors[0])
    return apply(slicing.CONCAT, first, *tensors[1:], axis=checked_axis(first, dim))


cat = concat


@with_numpy_names
def split(x: Tensor, split_size: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Cut a tensor along `dim` into parts of `split_size`, the last one of what is left.

    A list has the size of each part. For a number of parts see `chunk`.
    """
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
    known = math.prod([size for size in parts if size != -1])
    extent = x.shape[axis]
    if parts.count(-1) == 1 and known > 0:
        parts = tuple([extent // known if size == -1 else size for size in parts])
    if any([size < 0 for size in parts]) or math.prod(parts) != extent:
        raise CompileError(
            f"{find_source()}: cannot unflatten axis {axis} of {x.type} into {list(sizes)}: its"
            f" extent is {extent}, and sizes multiply to it, one of them perhaps -1"
        )
    return x.reshape(*x.shape[:axis], *parts, *x.shape[axis + 1 :])
