"""A mesh: ranks in a grid whose axes have names, what joins them, and who meets whom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from compiler.attrs import AttrValue
from compiler.errors import CompileError, InternalError

_MOST_RANKS_READ = 1 << 20
"""Of a mesh that a plan names, whoever made it."""


@dataclass(frozen=True, slots=True)
class MeshLink:
    """What it takes to send along an axis of the mesh, as stated: equal on all ranks."""

    bytes_per_ns: float = 12.5
    latency_ns: float = 5_000.0

    def time_ns(self, sent_bytes: float, messages: int) -> float:
        """Return what it takes to send some bytes in some messages, one after the other."""
        return sent_bytes / self.bytes_per_ns + messages * self.latency_ns

    def least_bytes(self, parts: int) -> float:
        """Return what a ring of some ranks moves in the time of its messages, 2 (p - 1) of each."""
        return parts * self.latency_ns * self.bytes_per_ns if parts > 1 else 0.0


INSIDE_A_HOST = MeshLink(10.0, 10_000.0)
"""What joins processes of a host: a core that adds what lies in their shared memory, and wakes that
take 3 to 20 us for each message of a ring (benchmarks/results/ranks.md), by how busy the host is.
What goes in buckets shares them."""

MeshLinks = tuple[MeshLink, ...]
"""One for each axis of the mesh."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in a grid, numbered in row-major order; `names` and `shape` have one entry per axis."""

    names: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return math.prod(self.shape)

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Names and extents, axis by axis."""
        return tuple(zip(self.names, self.shape, strict=True))

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

    def extent(self, name: str) -> int:
        """Return how many ranks differ along an axis; 1 where there is no such axis."""
        return dict(self.axes).get(name, 1)

    def without(self, name: str) -> Mesh:
        """Return the mesh of ranks that differ along other axes alone, if there is that axis."""
        kept = [axis for axis in self.axes if axis[0] != name]
        return Mesh(tuple([n for n, _ in kept]), tuple([extent for _, extent in kept]))

    def __str__(self) -> str:
        return " x ".join([f"{name}={extent}" for name, extent in self.axes])


def mesh_of(pairs: AttrValue) -> Mesh:
    """Return the mesh of pairs (name, extent), as a plan records it; that of one rank of none.

    Raises InternalError for anything else.
    """
    found: dict[str, int] = {}
    for row in pairs if isinstance(pairs, tuple) else (pairs,):
        match row:
            case (str() as name, int() as extent) if name not in found and extent > 0:
                found[name] = extent
            case _:
                raise InternalError(f"option mesh is {pairs!a:.60}, no pairs of names and extents")
    mesh = Mesh(tuple(found), tuple(found.values()))
    if mesh.num_ranks > _MOST_RANKS_READ:
        raise InternalError(f"option mesh is {mesh}: {_MOST_RANKS_READ} ranks at most")
    return mesh


ONE = Mesh((), ())
"""The mesh of a job that one rank runs."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Who trains together: the mesh, what joins its ranks along each axis, and one of them.

    A plan is of rank `rank` and of all whose part of the work is the same. Links are stated and not
    measured: what follows from them is the same on every rank.
    """

    mesh: Mesh = ONE
    links: MeshLinks = ()
    rank: int = 0

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return self.mesh.num_ranks

    def without(self, name: str) -> Ranks:
        """Return the ranks at this one's coordinate along an axis, if there is that axis."""
        if name not in self.mesh.names:
            return self
        axis, at = self.mesh.axis(name), self.mesh.coordinates(self.rank)
        flat, links = self.mesh.without(name), (*self.links[:axis], *self.links[axis + 1 :])
        return Ranks(flat, links, flat.rank((*at[:axis], *at[axis + 1 :])))

    def link(self, name: str) -> MeshLink:
        """Return what joins the ranks along an axis. Raises CompileError where there is none."""
        return self.links[self.mesh.axis(name)]


ALONE = Ranks()


def joined(mesh: Mesh, link: MeshLink, rank: int = 0) -> Ranks:
    """Return ranks that are joined alike along every axis; an axis of one rank is none."""
    axes = [axis for axis in mesh.axes if axis[1] > 1]
    wide = Mesh(tuple([name for name, _ in axes]), tuple([extent for _, extent in axes]))
    return Ranks(wide, (link,) * len(axes), rank)
