"""Whole variables of the parts that ranks have: by messages, or for a checkpoint through pipes.

`all_gather_variables` gives the whole to all ranks, between steps and at the end of a run.
`ShardGatherer` gives it to the first rank, for a checkpoint, while all train.

For a checkpoint each rank that has something to tell has a pipe to the first. Its thread of the
checkpoint writes its parts of a snapshot into that, in an order that all ranks know, and the first
rank's thread reads them where they belong: no message is larger than the pipe, nothing goes through
the coordinator, and a rank that dies is an end of file. Another process of the same user opens a
pipe as /proc/PID/fd/FD, as it does shared memory (`actors/collectives/segments.py`).

The first rank holds one copy of the whole of what any rank has not, and of what is in parts.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from actorflow.compile.plan_facts import saved_variables
from actorflow.distributed.process_group import ProcessGroup
from actors.machine.protocol import AllGatherObject
from compiler.contract.attrs import PlainValue
from compiler.contract.codec import from_row, to_row
from compiler.contract.errors import InternalError, PeerFailed
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
        joined = {n: _empty(owners[n], np.empty) for n in names}
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
    answers = gather("tell what it has of variables", tuple([to_row(shard) for shard in held]))
    table = [_table(rows) for rows in answers]
    if len(answers) != mesh.num_ranks:
        raise InternalError(
            f"{len(answers)} ranks sent their shards, and the mesh has {mesh.num_ranks} ranks"
        )
    return {name: _tellers(name, table, mesh) for name in _names(table)}


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


def _tellers(
    name: str, table: Sequence[Mapping[str, LocalShard]], mesh: Mesh
) -> tuple[tuple[int, ShardTransfer], ...]:
    """Return which rank sends which shard of a variable: the first holder; none if all hold it."""
    holders = [(rank, shards[name]) for rank, shards in enumerate(table) if name in shards]
    _, first = holders[0]
    for rank, shard in holders:
        if (shard.dtype, shard.shape) != (first.dtype, first.shape):
            raise InternalError(
                f"variable {name!r} is {first.dtype}{list(first.shape)} on rank {holders[0][0]} and"
                f" {shard.dtype}{list(shard.shape)} on rank {rank}"
            )
    # Every rank holds the whole, so nothing travels.
    if len(holders) == len(table) and not any([shard.splits for _, shard in holders]):
        return ()
    senders: dict[tuple[tuple[int, int], ...], tuple[int, ShardTransfer]] = {}
    for rank, shard in holders:
        slices = shard_slices(ShardingSpec(shard.shape, shard.splits), mesh, rank)
        place = tuple([(rows.start, rows.stop) for rows in slices])
        # Ranks in order, so the first rank that holds a part tells it, and no other.
        senders.setdefault(place, (rank, ShardTransfer(shard, slices)))
    check_cover(name, first.shape, [transfer for _, transfer in senders.values()])
    return tuple(senders.values())


def check_cover(name: str, shape: tuple[int, ...], parts: Sequence[ShardTransfer]) -> None:
    """Prove that every element of a variable is in one of its parts, and in no second one.

    The elements are counted in the grid that the ends of all parts make, so the cost follows the
    number of parts. Raises InternalError.
    """
    ends = [
        {0, size, *[end for p in parts for end in (p.own[axis].start, p.own[axis].stop)]}
        for axis, size in enumerate(shape)
    ]
    at = [{end: i for i, end in enumerate(sorted(cuts))} for cuts in ends]
    count = np.zeros([len(cuts) - 1 for cuts in at], np.int64)
    for part in parts:
        rows = zip(at, part.own, strict=True)
        # One cell of the grid is a box that no part cuts; each has to be counted once.
        count[tuple([slice(cuts[row.start], cuts[row.stop]) for cuts, row in rows])] += 1
    if (count != 1).any():
        raise InternalError(
            f"the shards of variable {name!r} {list(shape)} that ranks sent do not cover each"
            f" element once: {[str(part.own) for part in parts]}"
        )


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


def _empty(tellers: Sequence[tuple[int, ShardTransfer]], allocate: Allocate) -> Array:
    shard = tellers[0][1].held
    return allocate(shard.shape, shard.dtype)


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


PIPE_BYTES = 1 << 20
"""What a pipe holds where the system lets it: more has a rank and its reader wait less often."""
_HEAD = struct.Struct("<q")
"""Before the parts of a snapshot: its step."""


Allocate = Callable[[tuple[int, ...], str], Array]
"""From a shape and a dtype to an array."""


class ShardGatherer:
    """A rank's end of the pipes through which shards reach the first rank.

    All ranks make it at the same place, and then take the same snapshots in the same order, each on
    one thread. `stop` may be called from any other.

    Args:
        mesh: all ranks of the plan.
        shards: what this rank has of what is saved, whole or in parts: see `saved_shards`.
        group: this rank among all of them.
        wait_s: how long nothing may come from another rank; 0 for ever.
        allocate: makes the wholes, of a shape and a dtype, which are then filled.
        pipe_bytes: what a pipe is asked to hold.
    """

    def __init__(
        self,
        mesh: Mesh,
        shards: Sequence[LocalShard],
        group: ProcessGroup,
        wait_s: float,
        *,
        allocate: Allocate = np.empty,
        pipe_bytes: int = PIPE_BYTES,
    ) -> None:
        self._rank = group.rank
        self._allocate, self._pipe_bytes = allocate, pipe_bytes
        self._wait_ms = int(wait_s * 1000) or None
        owners = shard_owners(mesh, shards, group.all_gather_object)
        self._told = {name: pieces for name, pieces in owners.items() if pieces}
        self._joined: dict[str, Array] = {}
        self._lock = threading.Lock()
        self._why = ""
        self._files: list[int] = []
        # A pipe that nobody empties: one byte wakes whoever waits now, and everybody who waits
        # later.
        self._bell, self._ring = self._pipe()
        self._pipes = self._meet(group)

    @property
    def size_bytes(self) -> int:
        """What the first rank needs for the wholes that it joins; 0 where nothing is in parts."""
        return sum([_whole_bytes(pieces[0][1]) for pieces in self._told.values()])

    def send_shards(self, step: int, arrays: Mapping[str, Array]) -> None:
        """Send this rank's shards of a snapshot to the first rank. Blocks until it has read them.

        Raises PeerFailed where it does not, or where this is stopped.
        """
        pipe = self._pipes.get(0)
        if pipe is None:
            return  # it has nothing that others have not
        # The step goes first: a rank that took another snapshot is found before its bytes are mixed
        # in.
        self._write(pipe, memoryview(_HEAD.pack(step)))
        for name, pieces in self._told.items():
            for rank, piece in pieces:
                if rank == self._rank:
                    self._write(pipe, _dense_bytes(np.ascontiguousarray(_own(arrays, name, piece))))

    def gather_shards(self, step: int, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return whole variables, by name, on the first rank; they stay until the next call.

        Raises PeerFailed where a rank ended, or where this is stopped; MemoryError.
        """
        for rank, pipe in self._pipes.items():
            head = bytearray(_HEAD.size)
            self._read(pipe, rank, memoryview(head))
            (came,) = _HEAD.unpack(head)
            if came != step:
                raise InternalError(
                    f"rank {rank} sent its shards of step {came}, expected those of step {step}"
                )
        whole = {name: array for name, array in arrays.items() if name not in self._told}
        for name, pieces in self._told.items():
            joined = self._joined.get(name)
            if joined is None:
                joined = self._joined[name] = _empty(pieces, self._allocate)
            num_bytes = 0
            for rank, piece in pieces:
                # With the ellipsis an array without axes gives a view as well, and no copy.
                rows: tuple[Any, ...] = (*piece.own, ...)
                place = joined[rows]
                num_bytes += place.nbytes * np.may_share_memory(place, joined)
                if rank == 0:
                    place[...] = _own(arrays, name, piece)
                else:
                    self._take(rank, place)
            # Counted by views: a part that became a copy would be filled beside the whole, and
            # counts 0.
            if num_bytes != joined.nbytes:  # `check_cover` has shown that no two parts overlap
                raise InternalError(
                    f"ranks sent {num_bytes} of {joined.nbytes} bytes of variable {name!r}"
                )
            whole[name] = joined
        return whole

    def stop(self, why: str) -> None:
        """Make every wait, now or later, raise PeerFailed. The first reason counts."""
        with self._lock:
            if self._files and not self._why:
                self._why = why
                os.write(self._ring, b"x")

    def close(self) -> None:
        """Let go of the pipes, when nobody waits any more. Idempotent."""
        with self._lock:
            files, self._files, self._pipes = self._files, [], {}
            for file in files:
                os.close(file)

    def _meet(self, group: ProcessGroup) -> dict[int, int]:
        """Return this rank's ends of the pipes by the other rank: of the first, of each teller."""
        tellers = sorted({rank for pieces in self._told.values() for rank, _ in pieces} - {0})
        pairs = [self._pipe() for _ in tellers] if group.is_first else []
        offer = group.all_gather_object(
            "open pipes for checkpoints", (os.getpid(), *[end for _, end in pairs])
        )[0]
        pid, *ends = cast("tuple[int, ...]", offer)
        pipes = {rank: pair[0] for rank, pair in zip(tellers, pairs, strict=False)}
        if self._rank in tellers:
            path = f"/proc/{pid}/fd/{ends[tellers.index(self._rank)]}"
            # Not to wait for room in a pipe is a matter of each opening of it.
            pipes[0] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            self._files.append(pipes[0])
        # Until all have opened their ends the first rank must keep its own: /proc leads only to
        # open ones.
        group.all_gather_object("go on with open pipes for checkpoints", None)
        for _, end in pairs:  # or the end of a rank would be no end of its pipe
            self._files.remove(end)
            os.close(end)
        for pipe in pipes.values():
            # Only now: `poll` says when a pipe is ready, and a part may be larger than the room in
            # it.
            os.set_blocking(pipe, False)
            with suppress(OSError):  # of a user who has many
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, self._pipe_bytes)
        return pipes

    def _pipe(self) -> tuple[int, int]:
        """Return the reading and the writing end of a new pipe."""
        ends = os.pipe()
        self._files += ends
        return ends

    def _take(self, rank: int, place: Array) -> None:
        """Read a part into where it belongs: at once where that is dense, else by its rows."""
        if place.flags.c_contiguous:
            self._read(self._pipes[rank], rank, _dense_bytes(place))
            return
        for row in place:  # of one axis at least, or it were dense
            self._take(rank, row)

    def _read(self, pipe: int, rank: int, wanted: memoryview) -> None:
        while wanted:
            self._wait(pipe, select.POLLIN, rank)
            with suppress(BlockingIOError):
                # 0 bytes: all writers are gone.
                count = os.readv(pipe, [wanted])
                if not count:
                    raise PeerFailed(
                        f"rank {rank} ended before it sent its shards of a checkpoint", rank=rank
                    )
                wanted = wanted[count:]

    def _write(self, pipe: int, rest: memoryview) -> None:
        while rest:
            self._wait(pipe, select.POLLOUT, 0)
            with suppress(BlockingIOError):
                try:
                    rest = rest[os.write(pipe, rest) :]
                except BrokenPipeError:
                    text = "rank 0 ended where it was to join the parts of a checkpoint"
                    raise PeerFailed(text, rank=0) from None

    def _wait(self, pipe: int, event: int, rank: int) -> None:
        # poll and not select: descriptors above 1023 do not fit into a set of select.
        poll = select.poll()
        poll.register(pipe, event)
        poll.register(self._bell, select.POLLIN)
        ready = [file for file, _ in poll.poll(self._wait_ms)]
        if self._why:
            raise PeerFailed(self._why)
        if not ready:
            did = "tell its parts of" if event == select.POLLIN else "take this rank's parts of"
            raise PeerFailed(
                f"rank {rank} did not {did} a checkpoint within {(self._wait_ms or 0) / 1000:g} s"
                " (ACTORFLOW_RANK_SECONDS sets how long ranks wait for each other)",
                rank=rank,
            )


def saved_shards(plan: Plan) -> list[LocalShard]:
    """Return what this rank has of what a checkpoint holds."""
    saved, shards = {*saved_variables(plan)}, []
    for variable in sorted(plan.state, key=lambda v: v.name):
        if variable.name in saved:
            type_, part = plan.views[variable.view].type, variable.sharding
            shape, splits = (type_.shape, ()) if part is None else (part.shape, part.splits)
            shards.append(LocalShard(variable.name, numpy_dtype(type_.dtype).name, shape, splits))
    return shards


def _own(arrays: Mapping[str, Array], name: str, piece: ShardTransfer) -> Array:
    array = arrays[name]
    if (array.shape, array.dtype.name) != (piece.shape, piece.held.dtype):
        raise InternalError(
            f"variable {name!r} is {array.dtype}{list(array.shape)} in a snapshot, and the shard"
            f" of this rank is {piece.held.dtype}{list(piece.shape)}"
        )
    return array


def _dense_bytes(dense: Array) -> memoryview:
    return dense.reshape(-1).view(np.uint8).data


def _whole_bytes(piece: ShardTransfer) -> int:
    return int(np.prod(piece.held.shape, dtype=np.int64)) * piece.held.itemsize
