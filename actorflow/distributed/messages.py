"""What ranks and their coordinator say to each other: messages, keys, and frames on the wire.

Every message is a statement that stays true ("has come to step 12", not "one more"), so that one
that comes twice, or after a newer one, changes nothing. Ranks, runs and meetings are numbered; runs
and meetings from 1 up, on each rank by itself, which is why a number says which one is meant.
Steps are the user's: steps of training, in all, whatever the first of the run was.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args

from compiler.contract.codec import (
    Bounds,
    DecodeError,
    from_msgpack,
    from_row,
    text_where,
    to_msgpack,
    to_row,
    unexpected,
)
from compiler.contract.errors import InternalError

_MOST_TEXT = 1 << 16

Words = Annotated[
    str, text_where(lambda text: len(text) <= _MOST_TEXT, f"at most {_MOST_TEXT} characters")
]
"""A text of any characters, which a sender cuts."""

Number = Annotated[int, Bounds(0, (1 << 62) - 1)]


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank is there."""


@dataclass(frozen=True, slots=True)
class GatherEntered:
    """A rank has come to a meeting, and brings a packed value.

    `name` says what for, the same on all ranks, as what follows on "to": "compile job 'train'".
    `where` is the user's line there, of each its own, or nothing.
    """

    number: Number
    name: Words
    value: bytes
    where: Words = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.where})" if self.where else self.name


@dataclass(frozen=True, slots=True)
class GatherTimedOut:
    """A rank waits in a meeting: it has done so for so many seconds, which is enough.

    First, with `is_final` False, it asks after half of the time, and is sent the same back. Time in
    which nobody answers, as the launcher is stopped, is nobody's fault and does not count.
    """

    number: Number
    seconds: Number
    is_final: bool


@dataclass(frozen=True, slots=True)
class RunReady:
    """A rank is ready for a run whose next step comes after `first_step`."""

    run: Number
    first_step: Number


@dataclass(frozen=True, slots=True)
class StepReached:
    """A rank has come to a step, and so to all before it: it has the data of that.

    `waited_us` is how long it has waited in collectives for others since the run began.
    """

    run: Number
    step: Number
    waited_us: Number = 0


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A rank asks for the end of the run, for a reason."""

    run: Number
    reason: Words


@dataclass(frozen=True, slots=True)
class CheckpointRequested:
    """A rank asks for a checkpoint."""

    run: Number


@dataclass(frozen=True, slots=True)
class CheckpointBegun:
    """The first rank has made the directory of an attempt to save a step; all write into it."""

    run: Number
    step: Number
    attempt: Words


@dataclass(frozen=True, slots=True)
class CheckpointVote:
    """A rank has written what it has to write of the checkpoint of a step, or cannot.

    `value` is packed, and for the first rank alone.
    """

    run: Number
    step: Number
    value: bytes


@dataclass(frozen=True, slots=True)
class CheckpointTimedOut:
    """A rank waits for the others to save a step; see `GatherTimedOut`."""

    run: Number
    step: Number
    seconds: Number
    is_final: bool


@dataclass(frozen=True, slots=True)
class CheckpointEnded:
    """The checkpoint of a step is durable, or else dropped, because of a rank and for a reason.

    Without a reason it was dropped because the variable `nan` holds NaN.
    """

    run: Number
    step: Number
    is_saved: bool
    rank: Number
    reason: Words
    nan: Words = ""


@dataclass(frozen=True, slots=True)
class DataEnded:
    """A rank's run has no step after this one: its data ended, or the run is over.

    `why` says what ended the data before its last batch, or nothing.
    """

    run: Number
    step: Number
    why: Words = ""


@dataclass(frozen=True, slots=True)
class LastStarted:
    """A rank that was told of a stop has begun no step after this one, and begins none until told.

    So the end may be there, although more was granted: its source does not answer, or another's.
    """

    run: Number
    step: Number


@dataclass(frozen=True, slots=True)
class DataGivenUp:
    """A rank that was told its last step has the data of this one, and takes no more of any.

    Its source does not answer, or another's; what the source still brings is dropped.
    """

    run: Number
    step: Number


@dataclass(frozen=True, slots=True)
class BatchDigest:
    """The whole batch of a step, as a rank was given it, has this digest.

    `line` is the user's line that reads it, or nothing. `written` is the digest of the variables
    that the user has written since the step before, 0 for none, and `wrote` the last line that did.
    `types` are those of its arrays, in a run whose steps are asked for one by one;
    `num_announced` counts the plans that were opened for it.
    """

    run: Number
    step: Number
    digest: Number
    line: Words
    written: Number = 0
    wrote: Words = ""
    types: Words = ""
    num_announced: Number = 0


@dataclass(frozen=True, slots=True)
class BatchAnnounced:
    """A rank has a batch of these types for a step, and opens a plan for it, which takes all ranks.

    `number` counts what it has announced since the step before: what fails may be tried again with
    another batch.
    """

    run: Number
    step: Number
    number: Number
    types: Words


@dataclass(frozen=True, slots=True)
class DataRemains:
    """A rank has data for a step that comes after the end of another's."""

    run: Number
    step: Number


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A rank failed, by the fault of `rank`, as this one knows it: mostly itself.

    `op` and `line` say where, or nothing; `shown` is what its user is shown. `is_mistake` says that
    the same script fails in the same way whenever it is started.
    """

    rank: Number
    text: Words
    op: Words
    line: Words
    shown: Words
    is_mistake: bool = False


@dataclass(frozen=True, slots=True)
class ScriptEnded:
    """A rank's script has ended well."""


FromRank = (
    Hello
    | GatherEntered
    | GatherTimedOut
    | RunReady
    | StepReached
    | StopRequested
    | CheckpointRequested
    | CheckpointBegun
    | CheckpointVote
    | CheckpointTimedOut
    | CheckpointEnded
    | DataEnded
    | LastStarted
    | DataGivenUp
    | BatchDigest
    | BatchAnnounced
    | DataRemains
    | RankFailed
    | ScriptEnded
)
"""What a rank says."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The coordinator knows this rank."""

    num_ranks: Number


@dataclass(frozen=True, slots=True)
class GatherDone:
    """All ranks have come to a meeting; their values, by rank."""

    number: Number
    values: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class StepsGranted:
    """A run may begin so many steps in all; with `is_last` never more, for a reason.

    `waits` is packed and for the first rank alone: how long each rank has waited for the others
    (`actorflow.distributed.rank_waits`), or nothing.
    """

    run: Number
    steps: Number
    is_last: bool
    reason: Words
    waits: bytes = b""


@dataclass(frozen=True, slots=True)
class CheckpointAt:
    """Every rank writes the state after this step, which none has begun yet."""

    run: Number
    step: Number


@dataclass(frozen=True, slots=True)
class CheckpointVotes:
    """All ranks have voted on the checkpoint of a step; their votes, by rank. To the first rank."""

    run: Number
    step: Number
    values: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class HoldRequested:
    """A rank of a run that is to stop holds; all others do so, too, and say LastStarted."""

    run: Number


@dataclass(frozen=True, slots=True)
class EndAt:
    """A run that holds ends after this step, which a rank has begun, and none has gone beyond."""

    run: Number
    step: Number


@dataclass(frozen=True, slots=True)
class GiveUpData:
    """A rank of a run that is to stop has given up its data; all others do so, and say it."""

    run: Number


@dataclass(frozen=True, slots=True)
class CutAt:
    """A run ends after this step, of which all ranks have the data, and drops later ones."""

    run: Number
    step: Number


@dataclass(frozen=True, slots=True)
class PeerDataEnded:
    """A rank's run has no step after this one; a rank that has data for more answers."""

    run: Number
    step: Number


@dataclass(frozen=True, slots=True)
class Aborted:
    """The job has failed, by a rank, somewhere or nowhere."""

    rank: Number
    text: Words
    op: Words
    line: Words


@dataclass(frozen=True, slots=True)
class Ack:
    """What this rank said last, that it failed or left, was heard: it may end."""


Instruction = StepsGranted | CheckpointAt | HoldRequested | EndAt | GiveUpData | CutAt
"""What all ranks of a run are to do."""

OfCheckpoint = CheckpointBegun | CheckpointVotes | CheckpointTimedOut | CheckpointEnded
"""What is said of a checkpoint that is being written: by the first rank, or of all ranks."""

OfRun = Instruction | OfCheckpoint | PeerDataEnded
"""What it says of a run."""

ToRank = Welcome | GatherDone | GatherTimedOut | OfRun | Aborted | Ack
"""What the coordinator says."""


# Keys. CURVE alone lets in every key, so the coordinator has a list
# (`actorflow.distributed.coordinator`). The secret of a rank goes to its process through memory
# without a name, which is gone when both have closed it: an argument of a command can be read by
# everybody on the machine, a variable is inherited by whatever the rank starts.

_MOST_KEY_BYTES = 1 << 22
"""Those of an agent hold the arguments of a script."""


@dataclass(frozen=True, slots=True)
class RankKeys:
    """What a rank needs to talk to its coordinator. Keys are Z85, as zmq makes and takes them.

    `wait_s` is how long ranks wait for each other, 0 for ever. `epoch` counts the starts of the
    job's ranks, from 1. `host` names the host, "" where all ranks run on one; `local_rank` is the
    rank's number among the `num_local` of its host. `launch` is the same for all epochs of a job.
    """

    rank: Number
    num_ranks: Number
    endpoint: str
    server_public: bytes
    public: bytes
    secret: bytes
    wait_s: float
    epoch: Number
    host: Words
    local_rank: Number
    num_local: Number
    launch: Words = ""

    def to_bytes(self) -> bytes:
        """Return the keys as bytes, which are as secret as they are."""
        return to_msgpack(to_row(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> RankKeys:
        """Return the keys that `to_bytes` packed. Raises InternalError for other bytes."""
        try:
            return from_row(cls, from_msgpack(data))
        except DecodeError as error:
            raise InternalError(f"the bytes hold no keys of a rank: {error}") from None


def routing_id(rank: int, epoch: int) -> bytes:
    """Return how the coordinator calls a rank; a rank that is started anew has another epoch."""
    return b"%d.%d" % (rank, epoch)


def write_keys_fd(keys: bytes) -> int:
    """Return a descriptor for a child process, which reads packed keys from it once."""
    # CLOEXEC keeps it out of every child but the one to which Popen hands it by `pass_fds`.
    fd = os.memfd_create("actorflow-keys", os.MFD_CLOEXEC)
    os.write(fd, keys)
    # The child shares the offset of this descriptor and reads from where it stands.
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def read_keys_fd(fd: int) -> bytes:
    """Return the packed keys in a descriptor of this process, and close it.

    Raises InternalError where it cannot be read.
    """
    try:
        with os.fdopen(fd, "rb") as file:
            # The number of the descriptor is an argument, so what it names may be any file: read it
            # bounded.
            return file.read(_MOST_KEY_BYTES)
    except OSError as error:
        raise InternalError(f"descriptor {fd} holds no keys: {error}") from None


# The wire: a row in msgpack, and a frame of its own for everything of bytes, so that values are not
# packed twice. Nothing that comes is trusted: what does not fit the fields of a message is refused.
# There is no pickle on this wire.

VERSION = 2
MOST_MESSAGE_BYTES = 256 << 20
"""Of a frame, as sockets count it: a peer that sends a longer one is disconnected."""
MOST_FRAME_BYTES = MOST_MESSAGE_BYTES - (1 << 10)
"""Of a value that a rank brings to a meeting, a plan has some megabytes; encryption adds to it."""
MOST_HEAD_BYTES = 1 << 20
"""Of the part of a message that is no value."""


def encode(message: object) -> list[bytes]:
    """Return the frames of a message. Texts that are too long are cut, and broken ones mended."""
    head: list[Any] = [VERSION, type(message).__name__]
    frames: list[bytes] = []
    for value in to_row(message):
        if isinstance(value, bytes):
            frames.append(value)
        elif isinstance(value, tuple):
            frames.extend(value)
        elif isinstance(value, str):
            head.append(value[:_MOST_TEXT].encode(errors="replace").decode())
        else:
            head.append(value)
    return [to_msgpack(head), *frames]


def decode(frames: Sequence[bytes | memoryview], kinds: Any) -> Any:
    """Return the message of some frames, one of `kinds`: a union of classes of messages.

    Raises DecodeError.
    """
    if not frames:
        raise DecodeError("a message has no frame at all")
    if len(frames[0]) > MOST_HEAD_BYTES:
        raise DecodeError(f"a head has {len(frames[0])} bytes, more than {MOST_HEAD_BYTES}")
    head = from_msgpack(frames[0])
    if not isinstance(head, tuple) or len(head) < 2:
        raise unexpected(head, "a row of a version, a kind and fields", "a head")
    version, name, *values = head
    if type(version) is not int or version != VERSION:
        raise unexpected(version, f"version {VERSION} of messages", "the version")
    # Of `kinds` alone, so a rank cannot send what only the coordinator may say.
    kind = next((kind for kind in get_args(kinds) if kind.__name__ == name), None)
    if kind is None:
        raise unexpected(name, "a message that may be sent here", "its kind")
    rest, row = [bytes(frame) for frame in frames[1:]], list[Any]()
    for field in fields(kind):
        if field.type == "tuple[bytes, ...]":
            row.append(tuple(rest))
            rest = []
            continue
        source = rest if field.type == "bytes" else values
        row += source[:1]
        del source[:1]
    # What is missing or left over shows in the length of the row.
    return from_row(kind, (*row, *values, *rest))


def pack_value(value: Any, name: str) -> bytes:
    """Pack what a rank brings to a meeting. Raises ValueError where it cannot travel."""
    try:
        packed = to_msgpack(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"the value of a rank for {name!r} must consist of numbers, texts, bytes, None and"
            f" tuples: {error}"
        ) from None
    if len(packed) > MOST_FRAME_BYTES:
        raise ValueError(
            f"the value of a rank for {name!r} has {len(packed):,} bytes; a message has"
            f" {MOST_FRAME_BYTES:,} at most"
        )
    return packed
