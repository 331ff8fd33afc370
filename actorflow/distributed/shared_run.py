"""A run that all ranks of a job are on together, as one of them has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from actorflow.data.source import content_hash
from actorflow.distributed.messages import (
    BatchDigest,
    CheckpointAt,
    CheckpointRequested,
    CutAt,
    DataEnded,
    DataGivenUp,
    DataRemains,
    EndAt,
    FromRank,
    GiveUpData,
    HoldRequested,
    LastStarted,
    OfRun,
    PeerDataEnded,
    StepReached,
    StepsGranted,
    StopRequested,
    ToRank,
)


def _ignore(*_: object) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCallbacks:
    """The callbacks of a run. The link's thread calls them, so they must not block.

    Args:
        grant: called with (steps, is_last): the run may begin steps up to this one, counted from
            the beginning of training and not of the run; with `is_last` it ends with this one.
        is_stepped: whether each step is asked for, so that between two of them nothing runs.
        abort: called once with the error that ends the run at once, on whichever rank it arose.
        checkpoint: called with a step that no rank has begun: all write the state after it, or the
            next one that can be written.
        stopping: called once, before the last grant, with the reason of a stop that was asked for.
        hold: called when the run is to stop and a rank lacks data: no step more may begin until the
            end is said, and `would_end` says which has.
        end_at: called with the last step of a run that holds.
        give_up_data: called when the source of another rank does not answer: no batch more is
            taken, and `data_given_up` says which step has all of its own.
        cut_at: called with the last step of a run that has given up its data.
    """

    grant: Callable[[int, bool], object]
    abort: Callable[[BaseException], object]
    is_stepped: bool = False
    checkpoint: Callable[[int], object] = _ignore
    stopping: Callable[[str], object] = _ignore
    hold: Callable[[], object] = _ignore
    end_at: Callable[[int], object] = _ignore
    give_up_data: Callable[[], object] = _ignore
    cut_at: Callable[[int], object] = _ignore


class SharedRun:
    """A run of this rank that the others are on, too. Its methods may be called from any thread.

    Steps are counted from the beginning of training, as `first_step` of `begin_run`.

    Args:
        number: which run of this process it is, from 1.
        callbacks: what it is told.
        say: sends a message to the coordinator, without waiting.
        first_step: the step before its first one.
    """

    def __init__(
        self,
        number: int,
        callbacks: RunCallbacks,
        say: Callable[[FromRank], object],
        first_step: int = 0,
    ) -> None:
        self.number = number
        self.is_over = False
        self._callbacks = callbacks
        self._say = say
        self._fed, self._reached = 0, first_step
        self._other_end: int | None = None
        self._is_aborted = False

    def fed(self, step: int) -> None:
        """Report that this rank has data for a step. No message unless another rank's data ended.

        To be called before the step begins; so that one that has more data than another says so
        before it waits for it in vain.
        """
        self._fed = max(self._fed, step)
        self._compare()

    def reached(self, step: int) -> None:
        """Report that this rank has the data of a step and begins it: more can be granted."""
        # max, since a message states what is true by now: one that comes late may not take back.
        self._reached = max(self._reached, step)
        self._say(StepReached(self.number, step))

    def given(self, step: int, digest: int, line: str, written: int, wrote: str) -> None:
        """Report the digest of the whole batch of a step; see `BatchDigest`."""
        self._say(BatchDigest(self.number, step, digest, line, written, wrote))

    def data_ended(self, step: int, why: str = "") -> None:
        """Report that this rank has no data after a step, and the reason, if there is one."""
        self._say(DataEnded(self.number, step, why))

    def would_end(self, step: int) -> None:
        """Report the last step begun by this rank, which holds until it receives the last step."""
        self._say(LastStarted(self.number, step))

    def data_given_up(self, step: int) -> None:
        """Report that this rank, which knows its last step, takes no data beyond that of a step."""
        self._say(DataGivenUp(self.number, step))

    def ask_stop(self, reason: str) -> None:
        """Ask for the end of the run on all ranks, at a step that the coordinator chooses.

        Takes no lock, so a signal handler may call it. The answer is a grant that is the last.
        """
        self._say(StopRequested(self.number, reason))

    def ask_checkpoint(self) -> None:
        """Ask for a checkpoint on all ranks; no effect while one that was told is still to come."""
        self._say(CheckpointRequested(self.number))

    def end(self, step: int) -> None:
        """Report that the run has ended without an error on this rank after a step. Idempotent."""
        if not self.is_over:
            self.is_over = True
            # After an abort the coordinator knows the failure, and no step is the end of this run.
            if not self._is_aborted:
                self._say(DataEnded(self.number, step))

    def leave(self) -> None:
        """Handle the end of this rank's script, which also ends a run that is stepped."""
        if self._callbacks.is_stepped:
            self.end(self._reached)

    def hear(self, message: ToRank) -> None:
        """Handle a message of the coordinator about a run; messages of earlier runs are ignored."""
        if isinstance(message, OfRun):
            # A grant may be under way when the run ends on this rank, so an old one is no fault.
            if message.run != self.number or self.is_over:
                return
            if isinstance(message, StepsGranted):
                if message.is_last:
                    self._callbacks.stopping(message.reason)
                self._callbacks.grant(message.steps, message.is_last)
            elif isinstance(message, CheckpointAt):
                self._callbacks.checkpoint(message.step)
            elif isinstance(message, HoldRequested):
                self._callbacks.hold()
            elif isinstance(message, EndAt):
                self._callbacks.end_at(message.step)
            elif isinstance(message, GiveUpData):
                self._callbacks.give_up_data()
            elif isinstance(message, CutAt):
                self._callbacks.cut_at(message.step)
            elif isinstance(message, PeerDataEnded):
                self._other_end = message.step
                self._compare()

    def abort(self, error: BaseException) -> None:
        """End the run with an error, once."""
        if not (self._is_aborted or self.is_over):
            self._is_aborted = True
            self._callbacks.abort(error)

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


NOTHING_WRITTEN = (0, "")


class BatchDigestReporter:
    """Reports the digest of the batches of a step; belongs to the thread that fetches them.

    Args:
        tell: called with what `SharedRun.given` takes.
        line: that line.
        first_step: the step before the first one.
        is_every: whether all steps are told, as those that the user makes one by one.

    `written` is of the step that is fed next: the digest of what was written to variables, and the
    user's line; it is set before the step is fed.
    """

    def __init__(
        self,
        tell: Callable[[int, int, str, int, str], object],
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
                self._tell(step, self._digest & _BITS, self._line, *self.written)
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
        array = batch[name]
        if isinstance(array, np.ndarray) and not array.dtype.hasobject:
            hasher.update(f"{name} {array.dtype.str} {array.shape}".encode())
            # The sample is contiguous, so these are views; the bytes are of elements, not of
            # memory's layout.
            hasher.update(_sample(array).reshape(-1).view(np.uint8).data)
    return int(hasher.intdigest())


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
