"""What ranks and their coordinator say to each other: messages, keys, and frames on the wire.

Every message is a statement that stays true ("has come to step 12", not "one more"), so that one
that comes twice, or after a newer one, changes nothing. Ranks, runs and meetings are numbered; runs
and meetings from 1 up, on each rank by itself, which is why a number says which one is meant.
Steps are the user's: steps of training, in all, whatever the first of the run was.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, is_dataclass
from typing import Any, TypeVar

import msgpack

from compiler.contract.errors import InternalError


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank is there."""


@dataclass(frozen=True, slots=True)
class GatherEntered:
    """A rank has come to a meeting, and brings a packed value.

    `name` says what for, the same on all ranks, as what follows on "to": "compile job 'train'".
    `where` is the user's line there, of each its own, or nothing.
    """

    number: int
    name: str
    value: bytes
    where: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.where})" if self.where else self.name


@dataclass(frozen=True, slots=True)
class GatherTimedOut:
    """A rank has waited for so many seconds in all at a meeting, which is enough."""

    number: int
    seconds: int


@dataclass(frozen=True, slots=True)
class RunReady:
    """A rank is ready for a run whose next step comes after `first_step`."""

    run: int
    first_step: int


@dataclass(frozen=True, slots=True)
class StepReached:
    """A rank has come to a step, and so to all before it: it has the data of that."""

    run: int
    step: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A rank asks for the end of the run, for a reason."""

    run: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointRequested:
    """A rank asks for a checkpoint."""

    run: int


@dataclass(frozen=True, slots=True)
class DataEnded:
    """A rank's run has no step after this one: its data ended, or the run is over.

    `why` says what ended the data before its last batch, or nothing.
    """

    run: int
    step: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class LastStarted:
    """A rank that was told of a stop has begun no step after this one, and begins none until told.

    So the end may be there, although more was granted: its source does not answer, or another's.
    """

    run: int
    step: int


@dataclass(frozen=True, slots=True)
class DataGivenUp:
    """A rank that was told its last step has the data of this one, and takes no more of any.

    Its source does not answer, or another's; what the source still brings is dropped.
    """

    run: int
    step: int


@dataclass(frozen=True, slots=True)
class BatchDigest:
    """The whole batch of a step, as a rank was given it, has this digest.

    `line` is the user's line that reads it, or nothing. `written` is the digest of the variables
    that the user has written since the step before, 0 for none, and `wrote` the last line that did.
    """

    run: int
    step: int
    digest: int
    line: str
    written: int = 0
    wrote: str = ""


@dataclass(frozen=True, slots=True)
class DataRemains:
    """A rank has data for a step that comes after the end of another's."""

    run: int
    step: int


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A rank failed, by the fault of `rank`, as this one knows it: mostly itself.

    `op` and `line` say where, or nothing; `shown` is what its user is shown.
    """

    rank: int
    text: str
    op: str
    line: str
    shown: str


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
    | DataEnded
    | LastStarted
    | DataGivenUp
    | BatchDigest
    | DataRemains
    | RankFailed
    | ScriptEnded
)
"""What a rank says."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The coordinator knows this rank."""

    num_ranks: int


@dataclass(frozen=True, slots=True)
class GatherDone:
    """All ranks have come to a meeting; their values, by rank."""

    number: int
    values: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class StepsGranted:
    """A run may begin so many steps in all; with `is_last` never more, for a reason."""

    run: int
    steps: int
    is_last: bool
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointAt:
    """Every rank writes the state after this step, which none has begun yet."""

    run: int
    step: int


@dataclass(frozen=True, slots=True)
class HoldRequested:
    """A rank of a run that is to stop holds; all others do so, too, and say LastStarted."""

    run: int


@dataclass(frozen=True, slots=True)
class EndAt:
    """A run that holds ends after this step, which a rank has begun, and none has gone beyond."""

    run: int
    step: int


@dataclass(frozen=True, slots=True)
class GiveUpData:
    """A rank of a run that is to stop has given up its data; all others do so, and say it."""

    run: int


@dataclass(frozen=True, slots=True)
class CutAt:
    """A run ends after this step, of which all ranks have the data, and drops later ones."""

    run: int
    step: int


@dataclass(frozen=True, slots=True)
class PeerDataEnded:
    """A rank's run has no step after this one; a rank that has data for more answers."""

    run: int
    step: int


@dataclass(frozen=True, slots=True)
class Aborted:
    """The job has failed, by a rank, somewhere or nowhere."""

    rank: int
    text: str
    op: str
    line: str


@dataclass(frozen=True, slots=True)
class Ack:
    """What this rank said last, that it failed or left, was heard: it may end."""


OfRun = StepsGranted | CheckpointAt | HoldRequested | EndAt | GiveUpData | CutAt | PeerDataEnded
"""What it says of a run."""

ToRank = Welcome | GatherDone | OfRun | Aborted | Ack
"""What the coordinator says."""


# Keys. CURVE alone lets in every key, so the coordinator has a list
# (`actorflow.distributed.coordinator`). The secret of a rank goes to its process through memory
# without a name, which is gone when both have closed it: an argument of a command can be read by
# everybody on the machine, a variable is inherited by whatever the rank starts.

_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class RankKeys:
    """What a rank needs to talk to its coordinator. Keys are Z85, as zmq makes and takes them.

    `wait_s` is how long ranks wait for each other, 0 for ever.
    """

    rank: int
    num_ranks: int
    endpoint: str
    server_public: bytes
    public: bytes
    secret: bytes
    wait_s: float


def routing_id(rank: int, epoch: int = 1) -> bytes:
    """Return how the coordinator calls a rank; a rank that is started anew has another epoch."""
    return b"%d.%d" % (rank, epoch)


def write_keys_fd(keys: RankKeys) -> int:
    """Return a descriptor for a child process, which reads the keys from it once."""
    # CLOEXEC keeps it out of every child but the rank, to which Popen hands it by `pass_fds`.
    fd = os.memfd_create("actorflow-rank", os.MFD_CLOEXEC)
    os.write(fd, msgpack.packb(astuple(keys)))
    # The child shares the offset of this descriptor and reads from where it stands.
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def read_keys_fd(fd: int) -> RankKeys:
    """Read the keys of this rank and close their descriptor.

    Raises InternalError where it holds none.
    """
    try:
        with os.fdopen(fd, "rb") as file:
            # The number of the descriptor is an argument, so what it names may be any file: read it
            # bounded.
            row = msgpack.unpackb(file.read(_MOST_BYTES))
        return RankKeys(*row)
    except (OSError, ValueError, TypeError, msgpack.UnpackException) as error:
        raise InternalError(f"descriptor {fd} holds no keys of a rank: {error!r}") from None


# The wire: an array of msgpack, and a frame of its own for everything of bytes. Nothing that comes
# is trusted: a message is decoded by the types of its fields, and whatever does not fit them is
# refused in words. There is no pickle on this wire.

VERSION = 2
MOST_MESSAGE_BYTES = 256 << 20
"""Of a frame, as sockets count it: a peer that sends a longer one is disconnected."""
MOST_FRAME_BYTES = MOST_MESSAGE_BYTES - (1 << 10)
"""Of a value that a rank brings to a meeting, a plan has some megabytes; encryption adds to it."""
MOST_HEAD_BYTES = 1 << 20
"""Of the part of a message that is no value."""
_MOST_TEXT = 1 << 16
_MOST_INT = 1 << 62

_KINDS = {
    name: kind
    for name, kind in sorted(globals().items())
    if inspect.isclass(kind) and is_dataclass(kind) and kind.__module__ == __name__
}

M = TypeVar("M")


class Malformed(Exception):
    """What came over the wire is no message; says what is wrong with it."""


def encode(message: FromRank | ToRank) -> list[bytes]:
    """Return the frames of a message. Texts that are too long are cut."""
    type_: type[Any] = type(message)
    head: list[Any] = [VERSION, type_.__name__]
    frames: list[bytes] = []
    # The head holds the plain fields in their order; bytes follow as frames, so values are not
    # packed twice.
    for name, kind in _fields(type_):
        value: Any = getattr(message, name)
        if kind == "bytes":
            frames.append(value)
        elif kind == "tuple[bytes, ...]":
            frames.extend(value)
        else:
            head.append(value[:_MOST_TEXT] if kind == "str" else value)
    return [msgpack.packb(head, unicode_errors="replace"), *frames]


def decode(frames: Sequence[bytes | memoryview], kinds: Any) -> Any:
    """Return the message of some frames, one of `kinds`: a union of classes of messages.

    Raises Malformed.
    """
    if not frames:
        raise Malformed("no frame at all")
    kind, values = _head(frames[0])
    # issubclass takes a union of classes; so a rank cannot send what only the coordinator may say.
    if kind is None or not issubclass(kind, kinds):
        raise Malformed("a kind of message that nobody may send here")
    rest, fields = list(frames[1:]), list[Any]()
    for name, type_ in _fields(kind):
        if type_ == "bytes":
            if not rest:
                raise Malformed(f"{kind.__name__} without its {name}")
            fields.append(bytes(rest.pop(0)))
        elif type_ == "tuple[bytes, ...]":
            fields.append(tuple([bytes(frame) for frame in rest]))
            rest = []
        elif not values:
            raise Malformed(f"{kind.__name__} without its {name}")
        else:
            fields.append(_checked(values.pop(0), type_, f"{name} of {kind.__name__}"))
    if rest or values:
        raise Malformed(f"{kind.__name__} with more than it has fields")
    return kind(*fields)


def pack_value(value: Any, name: str) -> bytes:
    """Pack what a rank brings to a meeting. Raises ValueError where it cannot travel."""
    try:
        packed: bytes = msgpack.packb(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"what a rank brings to {name!r} is made of numbers, texts, bytes, None and tuples:"
            f" {error}"
        ) from None
    if len(packed) > MOST_FRAME_BYTES:
        raise ValueError(
            f"what a rank brings to {name!r} has {len(packed):,} bytes; at most"
            f" {MOST_FRAME_BYTES:,} travel"
        )
    return packed


def unpack_value(packed: bytes) -> Any:
    """Return what was packed, with tuples for sequences. Raises Malformed."""
    try:
        return msgpack.unpackb(packed, use_list=False, strict_map_key=True)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise Malformed(f"a value that cannot be unpacked ({type(error).__name__})") from None


def _head(frame: bytes | memoryview) -> tuple[type[Any] | None, list[Any]]:
    if len(frame) > MOST_HEAD_BYTES:
        raise Malformed(f"a head of {len(frame)} bytes, where at most {MOST_HEAD_BYTES} come")
    try:
        head = msgpack.unpackb(frame)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise Malformed(f"no msgpack ({type(error).__name__})") from None
    if not isinstance(head, list) or len(head) < 2:
        raise Malformed("no array of a version, a kind and fields")
    version, name, *values = head
    if type(version) is not int or version != VERSION:
        raise Malformed(f"another version than {VERSION}")
    return _KINDS.get(name) if isinstance(name, str) else None, values


def _checked(value: Any, kind: str, what: str) -> Any:
    if type(value).__name__ != kind:  # a bool is no int here
        raise Malformed(f"{what} is no {kind}")
    if kind == "int" and not 0 <= value < _MOST_INT:
        raise Malformed(f"{what} is beyond what it can be")
    if kind == "str" and len(value) > _MOST_TEXT:
        raise Malformed(f"{what} is too long")
    return value


def _fields(kind: type[Any]) -> list[tuple[str, str]]:
    return [(field.name, str(field.type)) for field in fields(kind)]
