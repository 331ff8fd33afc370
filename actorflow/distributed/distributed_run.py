"""A run that all ranks of a job are on together, as one of them has it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import xxhash

from actorflow.data.source import content_hash
from actorflow.distributed.messages import (
    BatchAnnounced,
    BatchDigest,
    CheckpointBegun,
    CheckpointEnded,
    CheckpointRequested,
    CheckpointTimedOut,
    CheckpointVote,
    DataEnded,
    DataGivenUp,
    DataRemains,
    FromRank,
    Instruction,
    LastStarted,
    OfCheckpoint,
    OfRun,
    PeerDataEnded,
    StepReached,
    StepsGranted,
    StopRequested,
)
from actorflow.distributed.rank_waits import RankWaits, unpack_waits
from actors.machine.errors import ActorFailed
from compiler.contract.arrays import as_array

# Steps begin where all ranks may begin them, and the run ends after one and the same step on each:
# a stop that one asks for is granted to all, at the edge of what has been granted so far. A rank
# that fails ends the others at once, and they raise what it raised (`actorflow.distributed`).


class RunMember(Protocol):
    """What a run asks of its rank; `actorflow.distributed.member.RankClient` is one."""

    rank: int

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the job, the same on all ranks; None if there is none."""

    def begin_run(self, run: DistributedRun) -> None:
        """Meet the others for a run, and number it."""

    def say(self, message: FromRank) -> None:
        """Send a message to the coordinator, without waiting."""

    def fail(self, error: BaseException, *, op: str = "", line: str = "") -> bool:
        """Report to the other ranks that this one has failed; return whether it was heard."""
        ...


class DistributedRun:
    """This rank's side of a run that all ranks of a job are on; any thread may call its methods.

    Steps are counted from the beginning of training and not of the run. Before `begin` nothing is
    said, but that `asked` is kept.

    Args:
        member: this rank, which meets the others for the run.
        first_step: the step before its first one.
        obey: called with each instruction of the coordinator, and with what is said of checkpoints,
            on the link's thread: it must not block.
        abort: called there once, with the error that ends the run at once, on whichever rank it
            arose.
        is_stepped: whether each step is asked for, so that between two of them nothing runs.
        hosts: the names of the ranks' hosts, by rank; none where all run on one.
        clock: seconds, monotonic.

    Several plans may take turns in one run, each stepped by itself: all count its steps together.
    Those of the others come by `join` and `take_turn`. What the coordinator grants is for the plan
    that has the turn, and an abort for all of them.

    `asked` is why this rank asked for the end, if it did. `number` says which run of this process
    it is, from 1, once it has begun. `waited_ns` returns how long this rank has waited for others
    in collectives; `waits` is of all ranks, on the first one.
    """

    def __init__(
        self,
        member: RunMember,
        first_step: int,
        *,
        obey: Callable[[Instruction | OfCheckpoint], object],
        abort: Callable[[BaseException], object],
        is_stepped: bool = False,
        hosts: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.waited_ns: Callable[[], int] = lambda: 0
        self.waits, self._clock = RankWaits(hosts), clock
        self.first_step = first_step
        self.asked = ""
        self.number = 0
        self.is_over = False
        self._member = member
        # Guards who has the turn: the link's thread hears, a user's thread gives it to another.
        self._lock = threading.RLock()
        self._obey, self._aborts = obey, [abort]
        self._newest: StepsGranted | None = None
        self._num_announced = 0  # since the last step
        self._is_stepped = is_stepped
        self._fed, self._reached = 0, first_step
        self._other_end: int | None = None
        self._is_aborted = False

    def begin(self) -> None:
        """Meet the others for the run. Raises PeerFailed where one does not come."""
        self._member.begin_run(self)
        if self.asked:
            self.ask_stop(self.asked)

    def join(self, abort: Callable[[BaseException], object]) -> None:
        """Have a plan of the run ended with it, by `abort`, until it parts. Idempotent."""
        self.part(abort)
        self._aborts = [*self._aborts, abort]
        if self._is_aborted and self._member.failure is not None:
            abort(self._member.failure)

    def part(self, abort: Callable[[BaseException], object]) -> None:
        """Forget a plan of the run; no effect on one that is forgotten."""
        self._aborts = [other for other in self._aborts if other != abort]

    def take_turn(
        self,
        obey: Callable[[Instruction | OfCheckpoint], object],
        begin: Callable[[], object],
    ) -> None:
        """Direct instructions to another plan from now on, which begins with what was granted.

        `begin` is called between the last instruction to the plan that had the turn and the first
        one to this.
        """
        with self._lock:
            begin()
            self._obey = obey
            if self._newest is not None:
                obey(self._newest)

    def report_data_ready(self, step: int) -> None:
        """Report that this rank has the data of a step, before it begins: more can be granted."""
        self._fed = max(self._fed, step)
        # A rank that has more data than another says so before it waits for it in vain.
        self._compare()
        # max, since a message states what is true by now: one that comes late may not take back.
        self._reached = max(self._reached, step)
        self._say(StepReached(self.number, step, self.waited_ns() // 1000))

    def batches(self, lines: Mapping[str, str]) -> BatchDigestReporter:
        """Return what sees whole batches, and reports them; `lines` are those that read the fields.

        Where the user gives them one by one, all are reported.
        """
        line = next(iter(lines.values()), "")
        return BatchDigestReporter(
            self._report_batch, line, self.first_step, is_every=self._is_stepped
        )

    def announce(self, step: int, batch: Mapping[str, Any]) -> None:
        """Report for which batch of a step this rank opens a plan, before it waits for others.

        A rank that makes that step on a plan that it has, for a batch of other types, would wait
        for this one in turn.
        """
        self._num_announced += 1
        self._say(BatchAnnounced(self.number, step, self._num_announced, batch_types(batch)))

    def _report_batch(
        self, step: int, digest: int, line: str, written: int, wrote: str, types: str
    ) -> None:
        count = self._num_announced
        self._say(BatchDigest(self.number, step, digest, line, written, wrote, types, count))
        self._num_announced = 0

    def data_ended(self, step: int, why: str = "") -> None:
        """Report that this rank has no data after a step, and the reason, if there is one."""
        self._say(DataEnded(self.number, step, why))

    def report_last_started(self, step: int) -> None:
        """Report the last step that has begun; no later one begins before all have reported."""
        self._say(LastStarted(self.number, step))

    def data_given_up(self, step: int) -> None:
        """Report the step with the last data that this rank takes; the run may be cut after it."""
        self._say(DataGivenUp(self.number, step))

    def ask_stop(self, reason: str) -> None:
        """Ask for the end on all ranks, at a step that the coordinator chooses.

        Takes no lock, so a signal handler may call it. The answer is a grant that is the last.
        """
        self.asked = self.asked or reason
        self._say(StopRequested(self.number, reason))

    def ask_checkpoint(self) -> None:
        """Ask for a checkpoint on all ranks; no effect while one that was told is still to come."""
        self._say(CheckpointRequested(self.number))

    def checkpoint_begun(self, step: int, attempt: str) -> None:
        """Report that the directory of an attempt is there, for all to write into."""
        self._say(CheckpointBegun(self.number, step, attempt))

    def checkpoint_vote(self, step: int, value: bytes) -> None:
        """Report that this rank has done its part of a checkpoint, or cannot."""
        self._say(CheckpointVote(self.number, step, value))

    def checkpoint_timed_out(self, step: int, seconds: int, *, is_final: bool) -> None:
        """Report that this rank waits for others to save a step, at last for long enough."""
        self._say(CheckpointTimedOut(self.number, step, seconds, is_final))

    def checkpoint_ended(
        self, step: int, *, is_saved: bool, rank: int, reason: str, nan: str = ""
    ) -> None:
        """Report that the checkpoint of a step is durable, or dropped."""
        self._say(CheckpointEnded(self.number, step, is_saved, rank, reason, nan))

    def ended(self, step: int) -> None:
        """Report that the run has ended without an error on this rank after a step. Idempotent."""
        if not self.is_over:
            self.is_over = True
            # After an abort the coordinator knows the failure, and no step is the end of this run.
            if not self._is_aborted:
                self._say(DataEnded(self.number, step))

    def leave(self) -> None:
        """Handle the end of this rank's script, which also ends a run that is stepped."""
        if self._is_stepped:
            self.ended(self._reached)

    def hear(self, message: OfRun) -> None:
        """Handle a message of the coordinator about a run; messages of earlier runs are ignored."""
        # A grant may be under way when the run ends on this rank, so an old one is no fault.
        if message.run != self.number or self.is_over:
            return
        if isinstance(message, PeerDataEnded):
            self._other_end = message.step
            self._compare()
            return
        with self._lock:
            if isinstance(message, StepsGranted):
                self._newest = message
                if message.waits:
                    self.waits.take(self._clock(), unpack_waits(message.waits))
            self._obey(message)

    def abort(self, error: BaseException) -> None:
        """End the run with an error, once."""
        if not (self._is_aborted or self.is_over):
            self._is_aborted = True
            for abort in self._aborts:
                abort(error)

    def report_failure(self, error: BaseException) -> BaseException:
        """Report an error to the other ranks; return the first error of the job, to be raised."""
        if isinstance(error, ActorFailed):
            self._member.fail(error, op=error.op, line=str(error.source))
        else:
            self._member.fail(error)
        first = self._member.failure
        is_others = first is not None and getattr(first, "rank", None) != self._member.rank
        return first if first is not None and is_others else error

    def _say(self, message: FromRank) -> None:
        if self.number:
            self._member.say(message)

    def _compare(self) -> None:
        # Both threads come here after they wrote what is theirs, so one of them sees both.
        if self._other_end is not None and self._fed > self._other_end:
            self._say(DataRemains(self.number, self._fed))


# Each rank takes its rows of a batch that it was given whole, and drops the others. So data that is
# sharded by rank, as other systems want it, would train on half of it without a word. Nothing that
# a source says of itself shows that; what it gives does.

_SAMPLE_BYTES = 1 << 16
"""Of an array that are read for its digest: some microseconds; of a longer one every n-th element.
"""
_FIRST_STEPS, _EVERY = 8, 16
"""The first steps of a run report digests of their batches; after them every n-th step does."""
_BITS = (1 << 62) - 1
_MOST_CHARACTERS = 1000


NOTHING_WRITTEN = (0, "")


class BatchDigestReporter:
    """Reports the digest of the batches of a step; belongs to the thread that fetches them.

    Args:
        tell: called with what a `BatchDigest` says, but for the run.
        line: that line.
        first_step: the step before the first one.
        is_every: whether all steps are told, as those that the user makes one by one.

    `written` is of the step that is fed next: the digest of what was written to variables, and the
    user's line; it is set before the step is fed.
    """

    def __init__(
        self,
        tell: Callable[[int, int, str, int, str, str], object],
        line: str,
        first_step: int,
        *,
        is_every: bool = False,
    ) -> None:
        self._tell, self._line = tell, line
        self._first_step, self._is_every = first_step, is_every
        self._digest = 0
        self.written = NOTHING_WRITTEN

    def see(self, step: int, batch: Mapping[str, Any], *, is_last: bool) -> None:
        """Take a batch of a step, of which it may be the last."""
        if self._is_every or step - self._first_step <= _FIRST_STEPS or step % _EVERY == 0:
            self._digest = digest_of(batch, self._digest)
            if is_last:
                # Where plans take turns, a batch of other types is one for another plan.
                types = batch_types(batch) if self._is_every else ""
                self._tell(step, self._digest & _BITS, self._line, *self.written, types)
        if is_last:
            self._digest = 0


def digest_of(batch: Mapping[str, Any], seed: int = 0) -> int:
    """Return a hash of 64 bits of a batch's arrays: their names, types, and a sample of each.

    Of an array above 64 KiB that is every n-th element along its longest axes, so that neither its
    layout in memory nor its size matters.
    """
    hasher = xxhash.xxh3_64(seed=seed)
    # Sorted: ranks may build their dict in another order.
    for name in sorted(batch):
        array = as_array(batch[name])
        if array is not None and not array.dtype.hasobject:
            hasher.update(f"{name} {array.dtype.str} {array.shape}".encode())
            # The sample is contiguous, so these are views; the bytes are of elements, not of
            # memory's layout.
            hasher.update(_sample(array).reshape(-1).view(np.uint8).data)
    return int(hasher.intdigest())


def batch_types(batch: Mapping[str, Any]) -> str:
    """Return the types of a batch's arrays as text: "x float32[8, 256], y int32[8]"."""
    arrays = [(name, as_array(batch[name])) for name in sorted(batch)]
    texts = [f"{name} {a.dtype}{list(a.shape)}" for name, a in arrays if a is not None]
    return ", ".join(texts)[:_MOST_CHARACTERS]


def digest_of_state(values: Mapping[str, np.ndarray[Any, Any]]) -> int:
    """Return a hash of variables, names and all elements; 0 for none."""
    if not values:
        return 0
    hasher = xxhash.xxh3_64()
    for name in sorted(values):
        hasher.update(f"{name} {content_hash(np.atleast_1d(values[name]))}".encode())
    # Never 0, which means nothing written, and below 2**62, the largest int of a message.
    return 1 + (int(hasher.intdigest()) >> 3)  # as a message has it


def _sample(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    strides = [1] * array.ndim
    shape, num_bytes = list(array.shape), array.nbytes
    while num_bytes > _SAMPLE_BYTES:
        # Halve the longest axis: a single stride over all elements could keep one column of a
        # matrix.
        axis = max(range(len(shape)), key=shape.__getitem__)
        if shape[axis] < 2:
            break  # elements that are larger than the sample
        strides[axis] *= 2
        shape[axis] = -(-shape[axis] // 2)
        num_bytes = array.dtype.itemsize * int(np.prod(shape))
    return np.ascontiguousarray(array[tuple([slice(None, None, n) for n in strides])])
