"""Functions that put elements elsewhere, or cut and join tensors."""

from __future__ import annotations

from collections.abc import Sequence

from actorflow.functional.names import with_numpy_names
from actorflow.literals import checked_size
from actorflow.tensor import Tensor, apply, as_tensor, checked_axis, integers
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.ops import slicing

__all__ = ["cat", "chunk", "concat", "split"]


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
