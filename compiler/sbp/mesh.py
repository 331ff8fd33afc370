"""A mesh: ranks in a grid whose axes have names, and who meets whom along one of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from compiler.errors import CompileError


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in a grid, numbered in row-major order; `names` and `shape` have one entry per axis."""

    names: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return math.prod(self.shape)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return where a rank is. Raises ValueError for one that is not in the mesh."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} is not in a mesh of {self.num_ranks} ranks")
        found = []
        for extent in reversed(self.shape):
            found.append(rank % extent)
            rank //= extent
        return tuple(reversed(found))

    def rank(self, coordinates: Sequence[int]) -> int:
        """Return the number of the rank at some coordinates."""
        found = 0
        for own, extent in zip(coordinates, self.shape, strict=True):
            found = found * extent + own
        return found

    def group(self, rank: int, axis: int) -> tuple[int, ...]:
        """Return the ranks that differ from one along an axis alone, itself among them."""
        own = list(self.coordinates(rank))
        found = []
        for index in range(self.shape[axis]):
            own[axis] = index
            found.append(self.rank(own))
        return tuple(found)

    def axis(self, name: str) -> int:
        """Return the number of an axis. Raises CompileError for a name that none has."""
        if name not in self.names:
            known = ", ".join(map(repr, self.names)) or "none"
            raise CompileError(f"the mesh has no axis {name!r}; its axes are: {known}")
        return self.names.index(name)

    def __str__(self) -> str:
        pairs = zip(self.names, self.shape, strict=True)
        return " x ".join([f"{name}={extent}" for name, extent in pairs])
