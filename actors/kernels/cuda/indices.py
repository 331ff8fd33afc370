"""Bad indices: a kernel reports a place and a value, and the host says what it always says.

No kernel addresses memory by an index that it has not compared with its extent: on a device that
would end the process.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from actors.kernels.axes import MAX_OUTER, columns_of, walk
from actors.kernels.cuda.calls import StatusWord
from actors.kernels.cuda.views import DeviceView
from actors.kernels.kernel import Operand
from compiler.errors import bad_index
from compiler.types import TensorType, numpy_dtype


def status_of(
    word: int, what: str, indices: TensorType, extent: int, axes: tuple[int, ...] = ()
) -> StatusWord:
    """Return how a launch tells of an index outside 0..extent - 1.

    `word` of the argument block is where the cell's address goes. The kernel reports the number of
    the index in row-major order, and its value as the int64 of the same bits. `axes`: see
    `bad_index`.
    """
    return StatusWord(word, partial(_explain, what, indices, extent, axes))


def _explain(
    what: str,
    indices: TensorType,
    extent: int,
    axes: tuple[int, ...],
    place: int,
    value: int,
) -> IndexError:
    position = tuple([int(axis) for axis in np.unravel_index(place, indices.shape)])
    wraps = numpy_dtype(indices.dtype) == np.uint64 and value < 0
    return bad_index(what, value + (1 << 64 if wraps else 0), position, extent, axes)


def are_ids(ids: Operand) -> bool:
    """Whether indices are integers whose places a kernel can walk, and count in 31 bits."""
    axes = walk(ids.shape, (ids.strides_bytes,), in_order=True)
    is_walked = len(axes) <= MAX_OUTER and ids.type.num_elements < 1 << 31
    return ids.type.dtype.is_integer and is_walked


def ids_words(ids: DeviceView) -> list[int]:
    """Return indices as kernels have them: address, type, number, and their places."""
    is_unsigned = ids.dtype.value.startswith("u")
    type_ = 2 * (ids.dtype.itemsize.bit_length() - 1) + is_unsigned
    return [ids.address, type_, ids.type.num_elements, *places_words(ids.shape, ids.strides_bytes)]


def places_words(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Return how the elements of axes lie in row-major order: how many axes, extents and steps."""
    return columns_of(walk(shape, (strides,), in_order=True), 1)
