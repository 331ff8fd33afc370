"""Who may talk to the coordinator: a pair of keys for each rank, and how a rank gets its own.

CURVE alone lets in every key, so the coordinator has a list (`actorflow.ranks.coordinator`). The
secret of a rank goes to its process through memory without a name, which is gone when both have
closed it: an argument of a command can be read by everybody on the machine, a variable is
inherited by whatever the rank starts.
"""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass

import msgpack

from compiler.errors import InternalError

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


def hand_over(keys: RankKeys) -> int:
    """Return a descriptor for a child that is started: who has it may read the keys once."""
    fd = os.memfd_create("actorflow-rank", os.MFD_CLOEXEC)
    os.write(fd, msgpack.packb(astuple(keys)))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def take_over(fd: int) -> RankKeys:
    """Read the keys of this rank and close their descriptor.

    Raises InternalError where it holds none.
    """
    try:
        with os.fdopen(fd, "rb") as file:
            row = msgpack.unpackb(file.read(_MOST_BYTES))
        return RankKeys(*row)
    except (OSError, ValueError, TypeError, msgpack.UnpackException) as error:
        raise InternalError(f"descriptor {fd} holds no keys of a rank: {error!r}") from None
