"""The links between hosts, each tried by a connection of its own.

Tensors between hosts need links that the control plane does not: the coordinator hears every host,
and a firewall may still part two of them. So each host listens, and in each round of a schedule two
hosts that are a pair connect to each other. A connection begins with a nonce that the hosts have
agreed on over their encrypted links, and nothing is answered without it. What crosses here are
bytes without a meaning: there is nothing to read, and nothing of it is trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from actorflow.environment.settings import Settings, SettingsError, logger
from compiler.contract.files import read_regular, replace_regular

CONNECT_S = 2.0
"""How long one connection, or one answer, may take."""
_STRANGER_S = 0.5
"""How long a stranger may hold up the listener: less than a peer waits for it."""
_NUM_PINGS = 20
_SMALL_BYTES, _LARGE_BYTES = 256 << 10, 4 << 20
_SLOW_S = 0.05
"""A link on which the small block took longer is not asked for the large one."""
_PING, _BLOCK = 1, 2
_REQUEST = struct.Struct("<BI")
_TIME = struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """What one host saw of its link to another.

    `peer` is the number of the other host. `round_trip_us` is the shortest of 20,
    `mb_per_s` what a block of 4 MB got in one direction, `clock_ahead_s` by how much the other
    host's clock is ahead of this one's. `problem` says why nothing was measured, or is "".
    """

    peer: int
    round_trip_us: float = 0.0
    mb_per_s: float = 0.0
    clock_ahead_s: float = 0.0
    problem: str = ""


def pairs_of_rounds(num_hosts: int, most_rounds: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs, in which every two hosts meet once: the circle method.

    With `most_rounds` fewer than the hosts need, some pairs are left out, the same on every host.
    """
    places: list[int | None] = list(range(num_hosts))
    if num_hosts % 2:
        places.append(None)  # who is paired with it pauses
    half, rounds = len(places) // 2, list[list[tuple[int, int]]]()
    for _ in range(min(len(places) - 1, most_rounds)):
        ends = zip(places[:half], reversed(places[half:]), strict=True)
        pairs = [(a, b) for a, b in ends if a is not None and b is not None]
        rounds.append([(min(pair), max(pair)) for pair in pairs])
        places.insert(1, places.pop())
    return rounds


MOST_PROBED = 8
"""Hosts that measure their link before a job, at most."""
PROBE_S = 2.0
"""How long all of them may take."""


def stated_link(figures: Sequence[LinkFigures]) -> str:
    """Return the link of hosts as ACTORFLOW_LINK states it; "" where none was measured.

    The slowest counts, as a collective takes as long as its slowest host. Both numbers are rounded
    to powers of the square root of 2, coarser than what they differ by from start to start: plans,
    and with them bits, depend on them.
    """
    measured = [one for one in figures if not one.problem]
    if not measured:
        return ""
    rate = min([one.mb_per_s for one in measured]) / 1e3
    latency_us = max([one.round_trip_us for one in measured]) / 2
    return f"{_coarse(max(rate, 1e-3)):.4f}:{_coarse(max(latency_us, 1.0)):.1f}"


@dataclass(frozen=True, slots=True)
class KeptLink:
    """The link of a job, in a file, so that a job that is submitted anew has the same plans.

    `path` is None where nothing is kept.
    """

    path: Path | None

    @classmethod
    def of_job(cls, cache: Path | None, script: str, num_hosts: int) -> KeptLink:
        """Return the link of a script on some hosts; `cache` is the folder of what is kept."""
        name = f"{Path(script).resolve()} {num_hosts}".encode()
        digest = hashlib.blake2b(name, digest_size=8).hexdigest()
        return cls(None if cache is None else cache / "links" / digest)

    def read(self) -> str:
        """Return the link as it was written; "" where there is none that can be read."""
        try:
            text = "" if self.path is None else read_regular(self.path, 64).decode("ascii")
            Settings.from_env({"ACTORFLOW_LINK": text})
        except (OSError, UnicodeError, SettingsError):
            return ""
        return text

    def write(self, link: str) -> None:
        """Keep a link; where that is impossible a line of the log says so."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_regular(self.path, link.encode(), is_shared=True, mode=0o600)
        except OSError as error:
            logger.warning("the link between hosts is not kept: %s", error)


def _coarse(number: float) -> float:
    return math.pow(2.0, round(2 * math.log2(number)) / 2)


def address_toward(host: str, port: int) -> str:
    """Return the address of this host on its way to another one. Raises OSError without a way."""
    kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    # A datagram socket that is connected sends nothing: the system only chooses the interface.
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


class LinkListener:
    """Answers the probes of other hosts on a thread of its own, until `close`.

    Args:
        address: where it listens, on a port that the system chooses: see `port`.
        nonce: what a connection begins with.
        clock: the time of day, in seconds.
    """

    def __init__(self, address: str, nonce: bytes, clock: Callable[[], float] = time.time) -> None:
        self._nonce, self._clock = nonce, clock
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family)
        self.port = int(self._server.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, name="link-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Callable twice."""
        with suppress(OSError):
            # Wakes `accept`, which a close of the descriptor alone would leave waiting.
            self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            # What fails here fails at the peer, which reports it with the names of both hosts.
            with connection, suppress(OSError):
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_STRANGER_S)
        if not hmac.compare_digest(_receive(connection, len(self._nonce)), self._nonce):
            return
        connection.settimeout(CONNECT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            kind, size = _REQUEST.unpack(_receive(connection, _REQUEST.size))
            if kind == _BLOCK:
                _receive(connection, min(size, _LARGE_BYTES))
            connection.sendall(_TIME.pack(self._clock()))


def probe_link(
    peer: int,
    address: tuple[str, int],
    nonce: bytes,
    clock: Callable[[], float] = time.time,
    counter: Callable[[], float] = time.perf_counter,
) -> LinkFigures:
    """Measure the link to another host's listener.

    Args:
        peer: the number of the other host.
        address: of its listener.
        nonce: what its listener waits for.
        clock: the time of day, in seconds.
        counter: seconds, monotonic.
    """
    try:
        with socket.create_connection(address, CONNECT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(nonce)
            pings = [_ping(connection, clock, counter) for _ in range(_NUM_PINGS)]
            # The shortest one waited least on either side, so its clocks are compared best.
            round_trip_s, clock_ahead_s = min(pings)
            rate = _rate(connection, counter)
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else str(error)
        return LinkFigures(peer, problem=f"{address[0]}, port {address[1]}: {reason}")
    return LinkFigures(peer, round_trip_s * 1e6, rate / 1e6, clock_ahead_s)


def _ping(
    connection: socket.socket, clock: Callable[[], float], counter: Callable[[], float]
) -> tuple[float, float]:
    """Return the seconds of a round trip, and by how much the other clock is ahead."""
    begin_s, sent_s = counter(), clock()
    answered_s = _ask(connection, _PING, b"")
    round_trip_s = counter() - begin_s
    return round_trip_s, answered_s - (sent_s + round_trip_s / 2)


def _rate(connection: socket.socket, counter: Callable[[], float]) -> float:
    """Return the bytes per second in one direction."""
    rate = 0.0
    for size in (_SMALL_BYTES, _LARGE_BYTES):
        begin_s = counter()
        _ask(connection, _BLOCK, bytes(size))
        elapsed_s = counter() - begin_s
        rate = size / max(elapsed_s, 1e-9)
        if elapsed_s > _SLOW_S:
            break
    return rate


def _ask(connection: socket.socket, kind: int, block: bytes) -> float:
    connection.sendall(_REQUEST.pack(kind, len(block)) + block)
    answer: float = _TIME.unpack(_receive(connection, _TIME.size))[0]
    return answer


def _receive(connection: socket.socket, size: int) -> bytes:
    """Return so many bytes. Raises ConnectionError where the other side ends before."""
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 18))
        if not part:
            raise ConnectionError("the connection was closed")
        parts += part
    return bytes(parts)
