"""Which rank has which part of a variable, and whole variables of the parts that ranks have.

`shard_holders` is the table that all ranks have: of every distinct part, who holds it. From it
follows who sends what, here, and who writes what, in `sharded_save`.

`all_gather_variables` gives the whole to all ranks, between steps and at the end of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from actorflow.checkpoint.manifest import cover_fault
from actorflow.compile.plan_facts import saved_variables
from actors.machine.protocol import AllGatherObject
from compiler.contract.attrs import PlainValue
from compiler.contract.codec import from_row, to_row
from compiler.contract.errors import InternalError
from compiler.contract.placement import Mesh
from compiler.contract.plan import Plan
from compiler.contract.sbp import shard_slices
from compiler.contract.types import ShardingSpec, numpy_dtype

# What travels goes through the ranks' `gather`, in messages of bounded size. Who tells what follows
# from one table that all ranks have, so nobody asks: of every distinct part the first rank that has
# it, and nobody of what all have whole. A variable that only some ranks have, as those of a
# pipeline's stages, comes to all.

Array = np.ndarray[Any, Any]

MESSAGE_BYTES = 16 << 20
"""What all ranks together tell in one message."""


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A variable as one rank has it, by numpy's name; `splits` are empty where that is all of it.

    `shape` is that of the whole.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    splits: tuple[tuple[str, int], ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class ShardTransfer:
    """A part of a variable that one rank tells the others, and where it lies in the whole."""

    held: LocalShard
    own: tuple[slice, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The part's own."""
        return tuple([rows.stop - rows.start for rows in self.own])

    @property
    def size_bytes(self) -> int:
        """Bytes of the part, dense."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.held.itemsize


def shard_values(plan: Plan, values: Mapping[str, Array], rank: int) -> dict[str, Array]:
    """Return what a rank has of whole variables, dense."""
    parts, mesh = {v.name: v.sharding for v in plan.state}, plan.mesh
    slices = {name: shard_slices(part, mesh, rank) for name in values if (part := parts.get(name))}
    return {
        name: np.ascontiguousarray(value[slices[name]]) if name in slices else value
        for name, value in values.items()
    }


def all_gather_variables(
    plan: Plan,
    arrays: Mapping[str, Array],
    gather: AllGatherObject,
    rank: int,
    *,
    message_bytes: int = MESSAGE_BYTES,
) -> dict[str, Array]:
    """Return whole variables of which `arrays` has what this rank has; equal on all ranks.

    All ranks call it with the variables of their own plans, after the same step; one that a rank
    does not have comes to it all the same. A variable that every rank holds whole is returned as it
    is; the rest is new and read-only. Holds one copy of the wholes, and tells about
    `message_bytes` in a message. Raises PeerFailed as `gather`,
    and InternalError if ranks disagree on the variables.
    """
    # The same table on all ranks, so the rounds below are as many on each: nobody waits alone.
    owners = shard_owners(plan.mesh, _held(plan, arrays), gather)
    num_ranks = plan.mesh.num_ranks
    whole = {name: array for name, array in arrays.items() if not owners.get(name)}
    for names in _batched(
        [(name, tellers) for name, tellers in owners.items() if tellers], message_bytes
    ):
        joined = {n: _empty(owners[n]) for n in names}
        queues = [[(n, p) for n in names for r, p in owners[n] if r == o] for o in range(num_ranks)]
        _exchange(queues, joined, arrays, gather, rank, message_bytes)
        for name, array in joined.items():
            array.flags.writeable = False
            whole[name] = array
    return whole


def shard_owners(
    mesh: Mesh, held: Iterable[LocalShard], gather: AllGatherObject
) -> dict[str, tuple[tuple[int, ShardTransfer], ...]]:
    """Return, by variable name in sorted order, which rank sends which shard.

    The first rank that holds a distinct shard sends it. A variable that every rank holds whole has
    no sender. All ranks call this with what they hold. Raises as `all_gather_variables`.
    """
    holders = shard_holders(mesh, held, gather)
    num_ranks = mesh.num_ranks
    return {
        name: ()
        if not told[0][0].held.splits and len(told[0][1]) == num_ranks
        else tuple([(ranks[0], shard) for shard, ranks in told])
        for name, told in holders.items()
    }


def shard_holders(
    mesh: Mesh, held: Iterable[LocalShard], gather: AllGatherObject
) -> dict[str, tuple[tuple[ShardTransfer, tuple[int, ...]], ...]]:
    """Return, by variable name in sorted order, its distinct shards and the ranks that hold each.

    All ranks call this with what they hold. Raises as `all_gather_variables`.
    """
    answers = gather("tell what it has of variables", tuple([to_row(shard) for shard in held]))
    table = [_table(rows) for rows in answers]
    if len(answers) != mesh.num_ranks:
        raise InternalError(
            f"{len(answers)} ranks sent their shards, and the mesh has {mesh.num_ranks} ranks"
        )
    return {name: _holders(name, table, mesh) for name in _names(table)}


def _held(plan: Plan, arrays: Mapping[str, Array]) -> Iterator[LocalShard]:
    parts = {variable.name: variable.sharding for variable in plan.state}
    for name in sorted(arrays):
        array, part = arrays[name], parts.get(name)
        shape = array.shape if part is None else part.shape
        yield LocalShard(name, array.dtype.name, shape, () if part is None else part.splits)


def _table(rows: PlainValue) -> dict[str, LocalShard]:
    """Return what a rank says that it has, by name."""
    shards = [from_row(LocalShard, row) for row in cast("tuple[Any, ...]", rows)]
    return {shard.name: shard for shard in shards}


def _names(table: Sequence[Mapping[str, LocalShard]]) -> list[str]:
    # Sorted, so that all ranks go through the variables in one order.
    return sorted({name for shards in table for name in shards})


def _holders(
    name: str, table: Sequence[Mapping[str, LocalShard]], mesh: Mesh
) -> tuple[tuple[ShardTransfer, tuple[int, ...]], ...]:
    holders = [(rank, shards[name]) for rank, shards in enumerate(table) if name in shards]
    _, first = holders[0]
    shards: dict[tuple[tuple[int, int], ...], tuple[ShardTransfer, list[int]]] = {}
    for rank, shard in holders:
        if (shard.dtype, shard.shape) != (first.dtype, first.shape):
            raise InternalError(
                f"variable {name!r} is {first.dtype}{list(first.shape)} on rank {holders[0][0]} and"
                f" {shard.dtype}{list(shard.shape)} on rank {rank}"
            )
        slices = shard_slices(ShardingSpec(shard.shape, shard.splits), mesh, rank)
        place = tuple([(rows.start, rows.stop) for rows in slices])
        # Ranks in order, so the first rank that holds a part comes first.
        shards.setdefault(place, (ShardTransfer(shard, slices), []))[1].append(rank)
    boxes = [
        (tuple([rows.start for rows in shard.own]), shard.shape) for shard, _ in shards.values()
    ]
    if wrong := cover_fault(first.shape, boxes):
        raise InternalError(f"variable {name!r} {list(first.shape)} of all ranks {wrong}: {boxes}")
    return tuple([(shard, tuple(ranks)) for shard, ranks in shards.values()])


def _batched(
    told: Iterable[tuple[str, Sequence[tuple[int, ShardTransfer]]]], message_bytes: int
) -> Iterator[list[str]]:
    """Yield names of variables that go together: small ones share their messages."""
    batch: list[str] = []
    size_bytes = 0
    for name, tellers in told:
        variable_bytes = sum([piece.size_bytes for _, piece in tellers])
        if batch and size_bytes + variable_bytes > message_bytes:
            yield batch
            batch, size_bytes = [], 0
        batch.append(name)
        size_bytes += variable_bytes
    if batch:
        yield batch


def _empty(tellers: Sequence[tuple[int, ShardTransfer]]) -> Array:
    shard = tellers[0][1].held
    return np.empty(shard.shape, shard.dtype)


def _exchange(
    queues: Sequence[Sequence[tuple[str, ShardTransfer]]],
    joined: Mapping[str, Array],
    arrays: Mapping[str, Array],
    gather: AllGatherObject,
    rank: int,
    message_bytes: int,
) -> None:
    """Send this rank's shards and write all ranks' into `joined`, in rounds of bounded size."""
    payload = b"".join([_piece_bytes(name, piece, arrays[name]) for name, piece in queues[rank]])
    sizes = [sum([piece.size_bytes for _, piece in queue]) for queue in queues]
    # The limit is of all ranks together, since each receives what all tell.
    step = max(1, message_bytes // len(queues))
    received = [bytearray() for _ in queues]
    for begin in range(0, max(sizes), step):
        what = f"tell its parts of {', '.join(joined)}"
        parts = gather(what[:80], payload[begin : begin + step])
        for other, part in enumerate(parts):
            # Sizes are known beforehand, so a rank whose queue is done sends empty bytes until the
            # last is.
            size = min(step, max(0, sizes[other] - begin))
            if not isinstance(part, bytes) or len(part) != size:
                raise InternalError(f"rank {other} did not send {size} bytes of its variables")
            received[other] += part
    for queue, buffer in zip(queues, received, strict=True):
        begin = 0
        for name, piece in queue:
            joined[name][piece.own] = np.ndarray(piece.shape, piece.held.dtype, buffer, begin)
            begin += piece.size_bytes


def _piece_bytes(name: str, piece: ShardTransfer, array: Array) -> bytes:
    if array.shape != piece.shape:
        raise InternalError(
            f"variable {name!r} is {list(array.shape)}, and the shard of this rank is"
            f" {list(piece.shape)}"
        )
    return array.tobytes()


def saved_shards(plan: Plan) -> list[LocalShard]:
    """Return what this rank has of what a checkpoint holds."""
    saved, shards = {*saved_variables(plan)}, []
    for variable in sorted(plan.state, key=lambda v: v.name):
        if variable.name in saved:
            type_, part = plan.views[variable.view].type, variable.sharding
            shape, splits = (type_.shape, ()) if part is None else (part.shape, part.splits)
            shards.append(LocalShard(variable.name, numpy_dtype(type_.dtype).name, shape, splits))
    return shards
