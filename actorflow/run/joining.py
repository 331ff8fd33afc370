"""Whole variables for a checkpoint, joined on the first rank from the parts of all, as they train.

Each rank that has something to tell has a pipe to the first. Its thread of the checkpoint writes
its parts of a snapshot into that, in an order that all ranks know, and the first rank's thread
reads them where they belong: no message is larger than the pipe, nothing goes through the
coordinator, and a rank that dies is an end of file. Another process of the same user opens a pipe
as /proc/PID/fd/FD, as it does shared memory (`actors/collectives/segments.py`).

The first rank holds one copy of the whole of what any rank has not, and of what is in parts.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

import numpy as np

from actorflow.run.among import Among
from actorflow.run.plan_facts import saved_variables
from actorflow.run.wholes import OfRank, Told, tellers_of
from compiler.errors import InternalError, PeerFailed
from compiler.plan import Plan
from compiler.types import numpy_dtype

Array = np.ndarray[Any, Any]

PIPE_BYTES = 1 << 20
"""What a pipe holds where the system lets it: more has a rank and its reader wait less often."""
_HEAD = struct.Struct("<q")
"""Before the parts of a snapshot: its step."""


class Joining:
    """A rank's end of the way on which parts come to the first rank.

    All ranks make it at the same place, and then take the same snapshots in the same order, each on
    one thread. `stop` may be called from any other.

    Args:
        plan: what it saves, in parts or not.
        among: this rank among all of the plan's.
        wait_s: how long nothing may come from another rank; 0 for ever.
    """

    def __init__(self, plan: Plan, among: Among, wait_s: float) -> None:
        self._rank = among.rank
        self._wait_ms = int(wait_s * 1000) or None
        told = tellers_of(plan.mesh, _saved(plan), among.gather)
        self._told = {name: pieces for name, pieces in told.items() if pieces}
        self._joined: dict[str, Array] = {}
        self._lock = threading.Lock()
        self._why = ""
        self._files: list[int] = []
        self._bell, self._ring = self._pipe()
        self._pipes = self._meet(among)

    @property
    def size_bytes(self) -> int:
        """What the first rank needs for the wholes that it joins; 0 where nothing is in parts."""
        return sum([_whole_bytes(pieces[0][1]) for pieces in self._told.values()])

    def tell(self, step: int, arrays: Mapping[str, Array]) -> None:
        """Tell the first rank this one's parts of a snapshot. Blocks until it has read them.

        Raises PeerFailed where it does not, or where this is stopped.
        """
        pipe = self._pipes.get(0)
        if pipe is None:
            return  # it has nothing that others have not
        self._write(pipe, memoryview(_HEAD.pack(step)))
        for name, pieces in self._told.items():
            for rank, piece in pieces:
                if rank == self._rank:
                    self._write(pipe, _bytes_of(np.ascontiguousarray(_own(arrays, name, piece))))

    def join(self, step: int, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return whole variables, by name, on the first rank; they stay until the next call.

        Raises PeerFailed where a rank ended, or where this is stopped; MemoryError.
        """
        for rank, pipe in self._pipes.items():
            head = bytearray(_HEAD.size)
            self._read(pipe, rank, memoryview(head))
            (came,) = _HEAD.unpack(head)
            if came != step:
                raise InternalError(f"rank {rank} tells its parts of step {came}, not of {step}")
        whole = {name: array for name, array in arrays.items() if name not in self._told}
        for name, pieces in self._told.items():
            joined = self._joined.get(name)
            if joined is None:
                held = pieces[0][1].held
                joined = self._joined[name] = np.empty(held.shape, held.dtype)
            for rank, piece in pieces:
                if rank == 0:
                    joined[piece.own] = _own(arrays, name, piece)
                else:
                    self._take(rank, joined[piece.own])
            whole[name] = joined
        return whole

    def stop(self, why: str) -> None:
        """Have whoever waits, now or later, raise PeerFailed. The first reason counts."""
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

    def _meet(self, among: Among) -> dict[int, int]:
        """Return this rank's ends of the pipes by the other rank: of the first, of each teller."""
        tellers = sorted({rank for pieces in self._told.values() for rank, _ in pieces} - {0})
        pairs = [self._pipe() for _ in tellers] if among.is_first else []
        said = among.gather(
            "open pipes for checkpoints", (os.getpid(), *[end for _, end in pairs])
        )[0]
        pid, *ends = cast("tuple[int, ...]", said)
        pipes = {rank: pair[0] for rank, pair in zip(tellers, pairs, strict=False)}
        if self._rank in tellers:
            path = f"/proc/{pid}/fd/{ends[tellers.index(self._rank)]}"
            # Not to wait for room in a pipe is a matter of each opening of it.
            pipes[0] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            self._files.append(pipes[0])
        among.gather("go on with open pipes for checkpoints", None)
        for _, end in pairs:  # or the end of a rank would be no end of its pipe
            self._files.remove(end)
            os.close(end)
        for pipe in pipes.values():
            os.set_blocking(pipe, False)
            with suppress(OSError):  # of a user who has many
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        return pipes

    def _pipe(self) -> tuple[int, int]:
        """Return the reading and the writing end of a new pipe."""
        ends = os.pipe()
        self._files += ends
        return ends

    def _take(self, rank: int, place: Array) -> None:
        """Read a part into where it belongs: at once where that is dense, else by its rows."""
        if place.flags.c_contiguous:
            self._read(self._pipes[rank], rank, _bytes_of(place))
            return
        for row in place:  # of one axis at least, or it were dense
            self._take(rank, row)

    def _read(self, pipe: int, rank: int, wanted: memoryview) -> None:
        while wanted:
            self._wait(pipe, select.POLLIN, rank)
            with suppress(BlockingIOError):
                count = os.readv(pipe, [wanted])
                if not count:
                    raise PeerFailed(
                        f"rank {rank} ended where its parts of a checkpoint were awaited", rank=rank
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


def _saved(plan: Plan) -> list[OfRank]:
    """Return what this rank has of what a checkpoint holds."""
    saved, found = {*saved_variables(plan)}, []
    for variable in sorted(plan.state, key=lambda v: v.name):
        if variable.name in saved:
            type_, part = plan.views[variable.view].type, variable.part
            shape, splits = (type_.shape, ()) if part is None else (part.shape, part.splits)
            found.append(OfRank(variable.name, numpy_dtype(type_.dtype).name, shape, splits))
    return found


def _own(arrays: Mapping[str, Array], name: str, piece: Told) -> Array:
    array = arrays[name]
    if (array.shape, array.dtype.name) != (piece.shape, piece.held.dtype):
        raise InternalError(
            f"variable {name!r} is {array.dtype}{list(array.shape)} in a snapshot, where this"
            f" rank's part is {piece.held.dtype}{list(piece.shape)}"
        )
    return array


def _bytes_of(dense: Array) -> memoryview:
    return dense.reshape(-1).view(np.uint8).data


def _whole_bytes(piece: Told) -> int:
    return int(np.prod(piece.held.shape, dtype=np.int64)) * piece.held.itemsize
