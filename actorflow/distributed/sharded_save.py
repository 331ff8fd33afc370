"""A checkpoint of several ranks: each writes its own pieces, all vote, the first one commits.

`saved_pieces` says who writes what, from one table that all ranks have. `SaveVotes` is a rank's way
to the votes, through the coordinator. `ShardedSaver` goes through the phases of one checkpoint, as
the protocol in `actorflow.checkpoint.manager` has them:

    first rank                                    every rank
    ----------                                    ----------
    make the directory of an attempt
    CheckpointBegun(step, attempt)          ->
                                                  write own pieces into it, fsync
                                            <-    CheckpointVote(step, files, pieces, hashes)
    with all votes: manifest, rename, fsync
    CheckpointEnded(step, is saved?)        ->

It all happens on the threads of the snapshots, while training goes on, and never in a meeting of
ranks, for these belong to the main threads. A rank that dies aborts the job, and with it every
wait; what is left of the attempt, the next writer of the directory removes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from actorflow.checkpoint.errors import CheckpointDropped, CheckpointError
from actorflow.checkpoint.manager import CheckpointManager, SavedFacts
from actorflow.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest
from actorflow.checkpoint.shard import (
    MAX_SHARD_BYTES,
    Groups,
    Parts,
    TensorEntry,
    WrittenPieces,
)
from actorflow.distributed.messages import (
    CheckpointBegun,
    CheckpointEnded,
    CheckpointTimedOut,
    CheckpointVotes,
    OfCheckpoint,
    Words,
)
from actorflow.distributed.unshard import LocalShard, shard_holders
from actors.machine.protocol import AllGatherObject
from compiler.contract.codec import DecodeError, from_msgpack, from_row, to_msgpack, to_row
from compiler.contract.errors import InternalError, PeerFailed
from compiler.contract.placement import Mesh

# Who writes what.


@dataclass(frozen=True, slots=True)
class SavedPieces:
    """What all ranks save together, and which of it one of them writes.

    `tensors` are whole; of those in `own` this rank writes its part; all have `size_bytes`.
    """

    tensors: tuple[TensorEntry, ...]
    own: Parts
    num_ranks: int
    num_pieces: int
    size_bytes: int

    @property
    def num_files(self) -> int:
        """At most how many files all ranks write, in two groups of each."""
        return 2 * self.num_ranks + self.size_bytes // MAX_SHARD_BYTES


def saved_pieces(
    mesh: Mesh, shards: Sequence[LocalShard], gather: AllGatherObject, rank: int
) -> SavedPieces:
    """Return what a rank writes of a checkpoint; all ranks call it with what they hold.

    Of the ranks that hold a piece the one with the fewest bytes so far writes it, of equals the
    lowest; large pieces come first, so that all write about as much. Raises PeerFailed as `gather`,
    and InternalError where the ranks' shards do not make up the variables.
    """
    holders = shard_holders(mesh, shards, gather)
    tensors: list[TensorEntry] = []
    pieces = [(one, ranks) for told in holders.values() for one, ranks in told]
    for name, told in holders.items():
        shard = told[0][0].held
        tensors.append(TensorEntry(name, shard.dtype, shard.shape))
    # Offsets break ties, so that the order is that of the pieces and not of what told them.
    pieces.sort(key=lambda p: (-p[0].size_bytes, p[0].held.name, [rows.start for rows in p[0].own]))
    loads = [0] * mesh.num_ranks
    own: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for piece, ranks in pieces:
        writer = min(ranks, key=lambda holder: (loads[holder], holder))
        loads[writer] += piece.size_bytes
        if writer == rank:
            own[piece.held.name] = piece.held.shape, tuple([rows.start for rows in piece.own])
    return SavedPieces(tuple(tensors), own, mesh.num_ranks, len(pieces), sum(loads))


# Votes.

T = TypeVar("T")


LAST_WAIT_S = 10.0
"""How long a rank whose run has failed waits for what others do for the checkpoint under way."""

_NOTHING = WrittenPieces((), (), has_nan=False)


@dataclass(frozen=True, slots=True)
class Ballot:
    """What a rank has written; or why it has not: `refused`, or the variable `nan` that holds NaN.

    A state with NaN that training made is not worth a checkpoint, which is no fault of the rank's.
    """

    written: WrittenPieces = _NOTHING
    refused: Words = ""
    nan: Words = ""

    def pack(self) -> bytes:
        """Return it as bytes."""
        packed = to_msgpack(to_row(self))
        if len(packed) <= MAX_MANIFEST_BYTES:
            return packed
        text = f"its pieces are too many for a manifest: {len(self.written.pieces)}"
        return Ballot(refused=text).pack()

    @classmethod
    def unpack(cls, packed: bytes, rank: int) -> Ballot:
        """Return the ballot of a rank; what is no ballot counts as one that refuses."""
        try:
            return from_row(cls, from_msgpack(packed))
        except DecodeError as error:
            return cls(refused=f"rank {rank} sent no ballot: {error}")


class SaveTeller(Protocol):
    """What says things of checkpoints to the coordinator: `DistributedRun`."""

    def checkpoint_begun(self, step: int, attempt: str) -> None:
        """Report that the directory of an attempt is there."""

    def checkpoint_vote(self, step: int, value: bytes) -> None:
        """Report what this rank has done."""

    def checkpoint_timed_out(self, step: int, seconds: int, *, is_final: bool) -> None:
        """Report that the others take too long; first, after half of the time, to be answered."""

    def checkpoint_ended(
        self, step: int, *, is_saved: bool, rank: int, reason: str, nan: str = ""
    ) -> None:
        """Report how it ended."""


class SaveVotes:
    """A rank's view of the checkpoint that is being written; one thread waits, any other tells.

    Args:
        teller: reports to the coordinator.
        wait_s: how long to wait for another rank before that is reported; 0 for ever.
    """

    def __init__(self, teller: SaveTeller, wait_s: float) -> None:
        self.teller = teller
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._begun: CheckpointBegun | None = None
        self._votes: CheckpointVotes | None = None
        self._ended: CheckpointEnded | None = None
        self._answered = -1
        """The step for which a report was answered: the coordinator is awake."""
        self._why: str | None = None
        self._last_why: tuple[float, str] | None = None
        """When patience ends, on the clock of time.monotonic, and why it does."""

    def hear(self, message: OfCheckpoint) -> None:
        """Take what the coordinator says. Does not block for long."""
        with self._changed:
            match message:
                case CheckpointBegun():
                    self._begun = message
                case CheckpointVotes():
                    self._votes = message
                case CheckpointTimedOut():
                    self._answered = message.step
                case CheckpointEnded():
                    self._ended = message
            self._changed.notify_all()

    def stop(self, why: str) -> None:
        """Make every wait, now or later, raise PeerFailed. The first reason counts."""
        with self._changed:
            self._why = why if self._why is None else self._why
            self._changed.notify_all()

    def hurry(self, why: str, wait_s: float = LAST_WAIT_S) -> None:
        """Make every wait, now or later, raise PeerFailed so many seconds from now.

        For a rank whose run has failed: the checkpoint that is being written is worth a little
        patience, but a rank that has not come to it yet may be waiting for this one.
        """
        with self._changed:
            if self._last_why is None:
                self._last_why = time.monotonic() + wait_s, why
            self._changed.notify_all()

    def wait_begun(self, step: int) -> str | None:
        """Return the attempt to save a step; None where it ended before it began.

        Raises PeerFailed where it was stopped, InternalError where another step is saved.
        """

        def begun() -> tuple[str | None] | None:
            if self._ended is not None and self._ended.step >= step:
                return (None,)
            if self._begun is None or self._begun.step < step:
                return None
            if self._begun.step > step:
                raise InternalError(
                    f"rank 0 saves step {self._begun.step}, and this rank step {step}"
                )
            return (self._begun.attempt,)

        return self._wait(step, begun)[0]

    def wait_votes(self, step: int) -> tuple[bytes, ...]:
        """Return the votes of all ranks, by rank. Raises PeerFailed where it was stopped."""

        def voted() -> CheckpointVotes | None:
            return self._votes if self._votes is not None and self._votes.step == step else None

        return self._wait(step, voted).values

    def wait_ended(self, step: int) -> CheckpointEnded:
        """Return how the checkpoint of a step ended. Raises PeerFailed where it was stopped."""

        def ended() -> CheckpointEnded | None:
            return self._ended if self._ended is not None and self._ended.step >= step else None

        return self._wait(step, ended)

    def _wait(self, step: int, look: Callable[[], T | None]) -> T:
        is_final, left_s = False, self._wait_s / 2 or None
        with self._changed:
            self._answered = -1
            while True:
                if self._why is not None:
                    raise PeerFailed(self._why)
                came = look()
                if came is not None:
                    return came
                if not is_final and self._answered == step:
                    is_final, left_s = True, self._wait_s / 2
                if self._last_why is not None:
                    until_s, why = self._last_why
                    if not self._changed.wait(max(0.0, until_s - time.monotonic())):
                        raise PeerFailed(why)
                elif not self._changed.wait(left_s) and self._last_why is None:
                    # Whose fault it is, the coordinator knows: it aborts the job, or they come.
                    seconds, left_s = math.ceil(self._wait_s), None
                    self.teller.checkpoint_timed_out(step, seconds, is_final=is_final)


# The two phases.


class ShardedSaver:
    """Saves steps together with the other ranks. One thread saves.

    Args:
        manager: of the run directory; the first rank's is the writer.
        pieces: who writes what.
        votes: the way to the others.
        rank: this one.
    """

    def __init__(
        self, manager: CheckpointManager, pieces: SavedPieces, votes: SaveVotes, rank: int
    ) -> None:
        self._manager, self._pieces, self._votes, self._rank = manager, pieces, votes, rank

    def save(self, step: int, groups: Groups, facts: SavedFacts, nan: str = "") -> str:
        """Save a step with all ranks; return once it is durable.

        Returns the name of a variable that holds NaN, for which all dropped it, or "".

        Args:
            step: updates done.
            groups: what this rank has, by name by group: what it is to write, and perhaps more.
            facts: what else is saved; the first rank's count.
            nan: a variable of this rank for which the state is not worth saving, or nothing.

        Raises:
            CheckpointError: this rank could not write.
            CheckpointDropped: another one could not.
            PeerFailed: another one ended, or this was stopped.
        """
        if self._rank:
            return self._follow(step, groups, nan)
        return self._lead(step, groups, facts, nan)

    def _lead(self, step: int, groups: Groups, facts: SavedFacts, nan: str) -> str:
        manager, pieces, teller = self._manager, self._pieces, self._votes.teller
        try:
            draft = manager.draft(step, facts, pieces.tensors, pieces.num_ranks)
            need_bytes = manager.need_bytes(
                draft, pieces.size_bytes, pieces.num_files, pieces.num_pieces
            )
            manager.begin(draft, need_bytes)
            ballots, own_error = self._all_ballots(draft, groups, nan)
            refusing = next((r for r, ballot in enumerate(ballots) if ballot.refused), None)
            broken = min([ballot.nan for ballot in ballots if ballot.nan], default="")
            if refusing is None and not broken:
                manager.commit(draft, [ballot.written for ballot in ballots], need_bytes)
        except CheckpointError as error:
            # The others wait for the end of this attempt, and must not do so for ever.
            teller.checkpoint_ended(step, is_saved=False, rank=0, reason=str(error))
            raise
        if refusing is None and not broken:
            teller.checkpoint_ended(step, is_saved=True, rank=0, reason="")
            manager.collect(step)
            return ""
        manager.drop(draft)
        reason = "" if refusing is None else ballots[refusing].refused
        teller.checkpoint_ended(
            step, is_saved=False, rank=refusing or 0, reason=reason, nan="" if reason else broken
        )
        if own_error is not None:
            raise own_error
        if refusing is not None:
            raise CheckpointDropped(refusing, reason)
        return broken

    def _all_ballots(
        self, draft: Manifest, groups: Groups, nan: str
    ) -> tuple[list[Ballot], CheckpointError | None]:
        """Have all ranks write; return what each has done, and why this one could not."""
        votes, step = self._votes, draft.step
        try:
            votes.teller.checkpoint_begun(step, draft.attempt)
            own, error = self._write(step, draft.attempt, groups, nan)
            votes.teller.checkpoint_vote(step, own.pack())
            packed = votes.wait_votes(step)
        except BaseException:
            # Another rank may still write into it: what then stays, the next writer removes.
            self._manager.drop(draft)
            raise
        return [Ballot.unpack(one, rank) for rank, one in enumerate(packed)], error

    def _follow(self, step: int, groups: Groups, nan: str) -> str:
        votes, error = self._votes, None
        attempt = votes.wait_begun(step)
        if attempt is not None:
            ballot, error = self._write(step, attempt, groups, nan)
            votes.teller.checkpoint_vote(step, ballot.pack())
        end = votes.wait_ended(step)
        if error is not None:
            raise error
        if not end.is_saved and end.reason:
            raise CheckpointDropped(end.rank, end.reason)
        return end.nan

    def _write(
        self, step: int, attempt: str, groups: Groups, nan: str
    ) -> tuple[Ballot, CheckpointError | None]:
        """Write this rank's pieces; return its ballot, and the error that is told in it."""
        if nan:
            return Ballot(nan=nan), None
        own = self._pieces.own
        named = {
            f"{group}-rank{self._rank}": {n: a for n, a in arrays.items() if n in own}
            for group, arrays in groups.items()
        }
        try:
            return Ballot(self._manager.write(step, attempt, named, own)), None
        except CheckpointError as error:
            return Ballot(refused=str(error)), error
