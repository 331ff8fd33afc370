"""Windows on a device's memory: an address with a type, which nothing on the host looks behind."""

from __future__ import annotations

import math
from dataclasses import dataclass

from actors.kernels.kernel import Operand, is_dense
from actors.kernels.scratch import Piece, size_bytes
from actors.protocol import Array
from compiler.errors import InternalError
from compiler.types import DType, TensorType


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A tensor in the memory of a device, at an address, with strides in bytes."""

    address: int
    type: TensorType
    strides_bytes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the tensor."""
        return self.type.shape

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self.type.dtype

    @property
    def is_dense(self) -> bool:
        """Whether the bytes are those of a row-major copy."""
        return is_dense(self.shape, self.strides_bytes, self.dtype.itemsize)

    @property
    def as_operand(self) -> Operand:
        """The view as `query` saw it; its offset is 0."""
        return Operand(self.type, 0, self.strides_bytes)


PlacedView = DeviceView | Array
"""What a kernel of a device binds: memory of the device, or pinned memory of the host."""

DeviceViews = tuple[DeviceView, ...]


def address_of(view: PlacedView) -> int:
    """Return where the first element lies, as the device sees it."""
    return view.address if isinstance(view, DeviceView) else int(view.ctypes.data)


def on_device(views: tuple[PlacedView, ...]) -> DeviceViews:
    """Return views of what lies on the device. Raises InternalError for an array of the host."""
    found = tuple([view for view in views if isinstance(view, DeviceView)])
    if len(found) != len(views):
        raise InternalError(
            "a kernel that works on a device's memory is given an array of the host"
        )
    return found


def carve(workspace: DeviceView | None, pieces: tuple[Piece, ...]) -> tuple[int, ...]:
    """Return the address of each piece in a workspace; 0 for one without bytes.

    Raises InternalError where the workspace is too small.
    """
    needed = size_bytes(pieces)
    given = 0 if workspace is None else workspace.type.size_bytes
    if given < needed:
        raise InternalError(f"a kernel needs {needed} bytes of workspace and was given {given}")
    addresses, place = [], 0 if workspace is None else workspace.address
    for piece in pieces:
        addresses.append(place if math.prod(piece.shape) else 0)
        place += piece.size_bytes
    return tuple(addresses)
