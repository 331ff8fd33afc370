"""The coordinator of a job: serves its agreement to the ranks, over zmq, from one thread.

It lives in the launcher and is called by it whenever a socket has something. Nothing that comes is
trusted before it was let in by key: the sockets speak CURVE, and an unlisted key is turned away
(`Doorman`, ZAP: RFC 27). Which rank a message is from follows from its key, and not from what it
says. What does not decode is refused and logged. It listens on 127.0.0.1, and on another address
only where ranks run on several hosts.

There are no heartbeats of zmq: the agent of a host is the parent of its ranks and learns from the
kernel that one died or was stopped, at once and without a guess. A heartbeat would drop the
connections of a launcher that is itself stopped for a while (^Z), and what was under way with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import z85

from actorflow.distributed.agreement import CoordinatorState, Sends
from actorflow.distributed.messages import (
    MOST_MESSAGE_BYTES,
    FromRank,
    RankKeys,
    decode,
    encode,
    routing_id,
)
from actorflow.distributed.rank_failure import FailureKind, RankFailure
from actorflow.environment.settings import is_worth_a_line, logger
from compiler.contract.codec import DecodeError

LOOPBACK = "127.0.0.1"
_DOMAIN = b"actorflow"
_DOOR = "inproc://zeromq.zap.01"
"""Where zmq asks, within a context, who may come in."""
HANDSHAKE_MS = 5_000
"""How long a stranger may keep a connection without a word; ours need some ms, but may be stopped
meanwhile."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank runs: `host` names its host, "" if there is one; its number there."""

    host: str
    local_rank: int
    num_local: int


def ranks_per_host(num_ranks: int, num_hosts: int) -> list[int]:
    """Return how many ranks each host has: the first ones have one more if they cannot be equal."""
    share, extra = divmod(num_ranks, num_hosts)
    return [share + (index < extra) for index in range(num_hosts)]


def places_on(hosts: Sequence[str], num_ranks: int) -> list[RankPlace]:
    """Return where each rank runs, on hosts of these names: neighbours on one host."""
    return [
        RankPlace(host if len(hosts) > 1 else "", local_rank, count)
        for host, count in zip(hosts, ranks_per_host(num_ranks, len(hosts)), strict=True)
        for local_rank in range(count)
    ]


def serving_router(
    context: zmq.Context[Any], pair: tuple[bytes, bytes], *, handshake_ms: int, most_bytes: int
) -> zmq.Socket[bytes]:
    """Return a socket that many send to, with its keys and every limit set; to be bound.

    A `Doorman` of the same context has to be there first, or zmq would let in every key.
    """
    router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    router.curve_server = True
    router.curve_publickey, router.curve_secretkey = pair
    router.zap_domain = _DOMAIN
    router.maxmsgsize = most_bytes
    router.handshake_ivl = handshake_ms
    router.linger = 0
    router.router_mandatory = True
    # The agreement bounds what is under way; with a bound here a rank that was stopped for a
    # while would miss what it was told.
    router.sndhwm = router.rcvhwm = 0
    return router


class Coordinator:
    """The coordinator of a job. Belongs to the thread that makes it.

    Attributes:
        epoch: how often the ranks of the job have been started, this time counted.
        endpoint: where it listens, with the `port`.

    Args:
        num_ranks: how many ranks there are.
        wait_s: how long ranks wait for each other, 0 for ever.
        refused: called with a text for what was refused, less and less often.
        epoch: see there.
        address: where it listens, on a free port.
        places: where each rank runs; None for all on this host.
        handshake_ms: how long a connection may take to say who it is.
        most_bytes: of a frame; whoever sends a longer one is disconnected.
    """

    def __init__(
        self,
        num_ranks: int,
        wait_s: float,
        refused: Callable[[str], object] = logger.warning,
        *,
        epoch: int = 1,
        address: str = LOOPBACK,
        places: Sequence[RankPlace] | None = None,
        handshake_ms: int = HANDSHAKE_MS,
        most_bytes: int = MOST_MESSAGE_BYTES,
    ) -> None:
        places = places_on([""], num_ranks) if places is None else places
        self._agreement = CoordinatorState(num_ranks, hosts=[place.host for place in places])
        self.epoch = epoch
        self._tell_refused = refused
        self._num_refused = 0
        self._context = zmq.Context()
        own = zmq.curve_keypair()
        pairs = [zmq.curve_keypair() for _ in range(num_ranks)]
        self._doorman = Doorman(self._context, [pair[0] for pair in pairs], self._refused)
        self._router = serving_router(
            self._context, own, handshake_ms=handshake_ms, most_bytes=most_bytes
        )
        self._router.ipv6 = address.startswith("[")
        self.port: int = self._router.bind_to_random_port(f"tcp://{address}")
        self.endpoint = f"tcp://{address}:{self.port}"
        self._keys = tuple(
            [
                RankKeys(
                    rank=rank,
                    num_ranks=num_ranks,
                    endpoint=self.endpoint,
                    server_public=own[0],
                    public=pair[0],
                    secret=pair[1],
                    wait_s=wait_s,
                    epoch=epoch,
                    host=place.host,
                    local_rank=place.local_rank,
                    num_local=place.num_local,
                )
                for rank, (pair, place) in enumerate(zip(pairs, places, strict=True))
            ]
        )

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """What is to be polled for reading; `serve` reads it."""
        return self._router, self._doorman.socket

    @property
    def failure(self) -> RankFailure | None:
        """The first failure of the job, or None."""
        return self._agreement.failure

    def keys(self, rank: int) -> RankKeys:
        """Return the keys of a rank."""
        return self._keys[rank]

    def has_left(self, rank: int) -> bool:
        """Whether a rank has said that its script ended well."""
        return self._agreement.has_left(rank)

    def serve(self) -> None:
        """Take everything that has come, and answer. Does not block."""
        self._doorman.serve()
        while True:
            try:
                sender, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            rank = _rank_of(sender, frames, self.epoch)
            if rank is None:
                self._refused("a message came under the name of another rank; it was refused")
                continue
            try:
                message: FromRank = decode([frame.buffer for frame in frames], FromRank)
            except DecodeError as error:
                self._refused(f"a message of rank {rank} was refused: {error}")
                continue
            self._send(self._agreement.on_message(rank, message))

    def has_heard(self, rank: int) -> bool:
        """Whether a rank has ever said anything."""
        return self._agreement.has_heard(rank)

    def lost(
        self,
        rank: int,
        text: str,
        *,
        explains: bool = False,
        kind: FailureKind = FailureKind.KILL,
    ) -> None:
        """Report a rank's failed exit; `text` is a predicate, such as "was ended by SIGKILL".

        Whatever it said before is to be served first. With `explains` that is why others missed it.
        """
        self._send(self._agreement.on_process_exit(rank, text, explains=explains, kind=kind))

    def close(self) -> None:
        """Close the sockets; whatever is not sent yet is dropped. Idempotent."""
        self._router.close(0)
        self._doorman.socket.close(0)
        self._context.destroy(0)

    def _refused(self, text: str) -> None:
        self._num_refused += 1
        if is_worth_a_line(self._num_refused):  # whoever floods us does not fill the log, too
            self._tell_refused(text)

    def _send(self, sends: Sends) -> None:
        for rank, message in sends:
            # A rank that is no longer there needs no answer; its parent knows how it ended.
            with suppress(zmq.ZMQError):
                # NOBLOCK with no high-water mark: the launcher's only thread never waits for a
                # rank.
                frames = [routing_id(rank, self.epoch), *encode(message)]
                self._router.send_multipart(frames, zmq.NOBLOCK, copy=False)


class Doorman:
    """The ZAP handler: admits listed keys, and sets the number of each in the list as User-Id.

    Args:
        context: that of the socket which is served.
        public: the keys, as Z85.
        refused: called with a text for what was refused.
    """

    def __init__(
        self, context: zmq.Context[Any], public: Iterable[bytes], refused: Callable[[str], object]
    ) -> None:
        self._numbers = {key: number for number, key in enumerate(public)}
        self._refused = refused
        # REP: ZAP asks one question at a time, and waits for each answer.
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_DOOR)

    def serve(self) -> None:
        """Answer all who ask to come in."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, request, domain, address, _, mechanism, *credentials = frames
            number = None
            if mechanism == b"CURVE" and domain == _DOMAIN and len(credentials) == 1:
                # ZAP hands over the 32 raw bytes of the key; the list holds it as text.
                number = self._numbers.get(z85.encode(credentials[0]))
            if number is None:
                self._refused(
                    f"a connection from {address.decode('ascii', 'replace')} without a key of this"
                    " job was refused"
                )
                answer = [b"400", b"no key of this job", b"", b""]
            else:
                answer = [b"200", b"", b"%d" % number, b""]
            self.socket.send_multipart([version, request, *answer])


def number_of(frames: Sequence[zmq.Frame]) -> int | None:
    """Return the number of the key that a message came with, as the `Doorman` has set it."""
    if not frames:
        return None
    # zmq sets User-Id from the answer of the doorman, so the sender cannot choose it.
    user = frames[0].get("User-Id")
    return int(user) if isinstance(user, str) and user.isdigit() else None


def _rank_of(sender: zmq.Frame, frames: Sequence[zmq.Frame], epoch: int) -> int | None:
    """Return the rank of the key that a message came with, or None for another's name."""
    rank = number_of(frames)
    return rank if rank is not None and sender.bytes == routing_id(rank, epoch) else None
