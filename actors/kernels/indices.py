"""Integer operands that choose rows: converted to index type and checked at every launch."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from actors.kernels.attributes import integers
from actors.kernels.kernel import Attrs, in_sequence
from actors.kernels.scratch import Piece
from actors.protocol import Array, Launch
from compiler.errors import bad_index

INDEX = np.dtype(np.int64)


def index_pieces(elements: int) -> tuple[Piece, ...]:
    """Return scratch for a dense int64 copy of the indices and for two extremes."""
    return (Piece((elements,), INDEX), Piece((2,), INDEX))


def checked(
    what: str,
    indices: Array,
    extent: int,
    dense: Array,
    extremes: Array,
    axes: tuple[int, ...] = (),
    first: int = 0,
) -> Launch:
    """Return the launch that copies `indices` to `dense` (flat) and checks 0 <= index < extent.

    The check is ours because numpy's own (mode "raise") works on a copy of the output. The launch
    raises IndexError naming `what`, the first bad value, its position and the allowed range; see
    `bad_index` for `axes`. Indices of one axis are counted from `first`.
    """
    if indices.size == 0:
        return in_sequence(())
    copy = partial(np.copyto, dense.reshape(indices.shape), indices, casting="unsafe")
    smallest, largest = extremes[0:1].reshape(()), extremes[1:].reshape(())
    minimum = partial(np.minimum.reduce, dense, out=smallest)
    maximum = partial(np.maximum.reduce, dense, out=largest)

    def launch() -> None:
        copy()
        minimum()
        maximum()
        if int(smallest) < 0 or int(largest) >= extent:
            raise _first_bad(what, indices, extent, axes, first)

    return launch


def as_index(array: Array) -> NDArray[np.int64]:
    """Return an array of the index type, as a type checker knows it."""
    return array.view(INDEX)


def fill_range(vector: Array, step: int) -> tuple[Launch, ...]:
    """Return the calls that fill an index vector with 0, step, 2 step, ..."""
    return (
        partial(vector.fill, step),
        partial(vector[:1].fill, 0),
        partial(np.add.accumulate, vector, out=vector),
    )


def axes_of(attrs: Attrs) -> tuple[int, ...]:
    """Return the extents of the axes that flat indices were made of; none for plain ids."""
    return integers(attrs, "axes") if "axes" in attrs else ()


def _first_bad(
    what: str, indices: Array, extent: int, axes: tuple[int, ...], first: int
) -> IndexError:
    numbers = indices.astype(object)  # any width, any sign; only on the way to the error
    position = tuple(np.argwhere((numbers < 0) | (numbers >= extent))[0].tolist())
    counted = (position[0] + first,) if len(position) == 1 else position
    return bad_index(what, int(indices[position]), counted, extent, axes)
