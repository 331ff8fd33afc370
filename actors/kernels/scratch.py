"""Planned scratch: its size from shapes at compile time, its arrays at load.

A kernel lists the `Piece`s it wants once, in a function that both `query` and `bind` call; so the
bytes asked for and the arrays carved cannot differ. Pieces begin at multiples of 64 bytes (a
cache line, and the widest vector register).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from actors.protocol import Array
from compiler.errors import InternalError

ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """A dense array of scratch."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def size_bytes(self) -> int:
        """Bytes with padding to the alignment."""
        dense = math.prod(self.shape) * self.dtype.itemsize
        return -(-dense // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def size_bytes(pieces: tuple[Piece, ...]) -> int:
    """Return the bytes of all pieces together."""
    return sum(piece.size_bytes for piece in pieces)


def carve(workspace: Array | None, pieces: tuple[Piece, ...]) -> tuple[Array, ...]:
    """Return the arrays of `pieces` in `workspace`. Raises InternalError if it is too small."""
    needed, given = size_bytes(pieces), 0 if workspace is None else workspace.size
    if given < needed:
        raise InternalError(f"a kernel needs {needed} bytes of workspace and was given {given}")
    arrays: list[Array] = []
    offset = 0
    for piece in pieces:
        dense = math.prod(piece.shape) * piece.dtype.itemsize
        if workspace is None or dense == 0:
            arrays.append(np.empty(piece.shape, piece.dtype))
        else:
            arrays.append(workspace[offset : offset + dense].view(piece.dtype).reshape(piece.shape))
        offset += piece.size_bytes
    return tuple(arrays)


def workers_for(
    pieces: Callable[[int], tuple[Piece, ...]], workspace: Array | None, most: int
) -> int:
    """Return how many workers a workspace has room for, at least one: a plan may know fewer."""
    given = 0 if workspace is None else workspace.size
    while most > 1 and size_bytes(pieces(most)) > given:
        most -= 1
    return max(1, most)


def window(flat: Array, shape: tuple[int, ...]) -> Array:
    """Return the first bytes of a vector of scratch as a dense array of `shape`."""
    return flat[: math.prod(shape)].reshape(shape)
