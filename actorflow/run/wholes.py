"""Whole variables of the parts that ranks have: told by one holder of each part, joined by all.

What travels goes through the ranks' `gather`, in messages of bounded size: for the end of a run and
for looks between steps, not for training. Who tells what follows from one table that all ranks
have, so nobody asks: of every distinct part the first rank that has it, and nobody of what all have
whole. A variable that only some ranks have, as those of a pipeline's stages, comes to all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from actors.collectives.protocol import Gather
from compiler.attrs import PlainValue
from compiler.errors import InternalError
from compiler.mesh import Mesh
from compiler.plan import Plan
from compiler.sbp.parts import own_part
from compiler.types import PartOf

Array = np.ndarray[Any, Any]

MESSAGE_BYTES = 16 << 20
"""What all ranks together tell in one message."""


@dataclass(frozen=True, slots=True)
class OfRank:
    """A variable as one rank has it, by numpy's name; `splits` are empty where that is all of it.

    `shape` is that of the whole.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    splits: tuple[tuple[str, int], ...]

    @property
    def row(self) -> PlainValue:
        """What travels."""
        return self.name, self.dtype, self.shape, self.splits

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Told:
    """A part of a variable that one rank tells the others, and where it lies in the whole."""

    held: OfRank
    own: tuple[slice, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The part's own."""
        return tuple([rows.stop - rows.start for rows in self.own])

    @property
    def size_bytes(self) -> int:
        """Bytes of the part, dense."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.held.itemsize


def cut(plan: Plan, values: Mapping[str, Array], rank: int) -> dict[str, Array]:
    """Return what a rank has of whole variables, dense."""
    parts, mesh = {v.name: v.part for v in plan.state}, plan.mesh
    own = {name: own_part(part, mesh, rank) for name in values if (part := parts.get(name))}
    return {
        name: np.ascontiguousarray(value[own[name]]) if name in own else value
        for name, value in values.items()
    }


def gather_whole(
    plan: Plan, arrays: Mapping[str, Array], gather: Gather, rank: int
) -> dict[str, Array]:
    """Return whole variables of which `arrays` has what this rank has; equal on all ranks.

    All ranks call it with the variables of their own plans, after the same step; one that a rank
    does not have comes to it all the same. What nobody needs to tell is handed back as it is, the
    rest is new and read-only. Holds one copy of the wholes. Raises PeerFailed as `gather`, and
    InternalError where ranks disagree on what there is.
    """
    told = tellers_of(plan.mesh, _held(plan, arrays), gather)
    num_ranks = plan.mesh.num_ranks
    whole = {name: array for name, array in arrays.items() if not told.get(name)}
    for names in _batched([(name, tellers) for name, tellers in told.items() if tellers]):
        joined = {n: _empty(told[n]) for n in names}
        queues = [[(n, p) for n in names for r, p in told[n] if r == o] for o in range(num_ranks)]
        _exchange(queues, joined, arrays, gather, rank)
        for name, array in joined.items():
            array.flags.writeable = False
            whole[name] = array
    return whole


def tellers_of(
    mesh: Mesh, held: Iterable[OfRank], gather: Gather
) -> dict[str, tuple[tuple[int, Told], ...]]:
    """Return who tells which part of each variable, by name and in order of names; a rank and it.

    Of every distinct part that is the first rank that has it, and nobody of what all have whole.
    All ranks call it, each with what it has. Raises as `gather_whole`.
    """
    said = gather("tell what it has of variables", tuple([own.row for own in held]))
    table = [_table(rows) for rows in said]
    if len(said) != mesh.num_ranks:
        raise InternalError(f"{len(said)} ranks tell their parts, of a mesh of {mesh.num_ranks}")
    return {name: _tellers(name, table, mesh) for name in _names(table)}


def _held(plan: Plan, arrays: Mapping[str, Array]) -> Iterator[OfRank]:
    parts = {variable.name: variable.part for variable in plan.state}
    for name in sorted(arrays):
        array, part = arrays[name], parts.get(name)
        shape = array.shape if part is None else part.shape
        yield OfRank(name, array.dtype.name, shape, () if part is None else part.splits)


def _table(rows: PlainValue) -> dict[str, OfRank]:
    """Return what a rank says that it has, by name."""
    found = [OfRank(*row) for row in cast("tuple[Any, ...]", rows)]
    return {held.name: held for held in found}


def _names(table: Sequence[Mapping[str, OfRank]]) -> list[str]:
    return sorted({name for held in table for name in held})


def _tellers(
    name: str, table: Sequence[Mapping[str, OfRank]], mesh: Mesh
) -> tuple[tuple[int, Told], ...]:
    """Return who tells which part of a variable: the first rank that has it; nobody if all do."""
    holders = [(rank, held[name]) for rank, held in enumerate(table) if name in held]
    _, first = holders[0]
    for rank, held in holders:
        if (held.dtype, held.shape) != (first.dtype, first.shape):
            raise InternalError(
                f"variable {name!r} is {first.dtype}{list(first.shape)} on rank {holders[0][0]} and"
                f" {held.dtype}{list(held.shape)} on rank {rank}"
            )
    if len(holders) == len(table) and not any([held.splits for _, held in holders]):
        return ()
    found: dict[tuple[tuple[int, int], ...], tuple[int, Told]] = {}
    for rank, held in holders:
        own = own_part(PartOf(held.shape, held.splits), mesh, rank)
        place = tuple([(rows.start, rows.stop) for rows in own])
        found.setdefault(place, (rank, Told(held, own)))
    return tuple(found.values())


def _batched(told: Iterable[tuple[str, Sequence[tuple[int, Told]]]]) -> Iterator[list[str]]:
    """Yield names of variables that go together: small ones share their messages."""
    batch: list[str] = []
    size_bytes = 0
    for name, tellers in told:
        own = sum([piece.size_bytes for _, piece in tellers])
        if batch and size_bytes + own > MESSAGE_BYTES:
            yield batch
            batch, size_bytes = [], 0
        batch.append(name)
        size_bytes += own
    if batch:
        yield batch


def _empty(tellers: Sequence[tuple[int, Told]]) -> Array:
    held = tellers[0][1].held
    return np.empty(held.shape, held.dtype)


def _exchange(
    queues: Sequence[Sequence[tuple[str, Told]]],
    joined: Mapping[str, Array],
    arrays: Mapping[str, Array],
    gather: Gather,
    rank: int,
) -> None:
    """Tell this rank's parts, and put all ranks' into `joined`, in rounds of bounded size."""
    own = b"".join([_bytes_of(name, piece, arrays[name]) for name, piece in queues[rank]])
    sizes = [sum([piece.size_bytes for _, piece in queue]) for queue in queues]
    step = max(1, MESSAGE_BYTES // len(queues))
    came = [bytearray() for _ in queues]
    for begin in range(0, max(sizes), step):
        what = f"tell its parts of {', '.join(joined)}"
        parts = gather(what[:80], own[begin : begin + step])
        for other, part in enumerate(parts):
            wanted = min(step, max(0, sizes[other] - begin))
            if not isinstance(part, bytes) or len(part) != wanted:
                raise InternalError(f"rank {other} did not tell {wanted} bytes of its variables")
            came[other] += part
    for queue, data in zip(queues, came, strict=True):
        begin = 0
        for name, piece in queue:
            joined[name][piece.own] = np.ndarray(piece.shape, piece.held.dtype, data, begin)
            begin += piece.size_bytes


def _bytes_of(name: str, piece: Told, array: Array) -> bytes:
    if array.shape != piece.shape:
        raise InternalError(
            f"variable {name!r} is {list(array.shape)} here, where this rank's part is"
            f" {list(piece.shape)}"
        )
    return array.tobytes()
