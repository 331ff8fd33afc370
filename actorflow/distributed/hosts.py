"""The hosts of a job, as its launcher sees them: one agent on each.

`HostAgents` is told what the agents are to do and returns what they say. The agent of the
launcher's own host is called directly; agents of other hosts are reached through `AgentServer`, by
zmq. Both take the same messages. A host whose agent was silent for too long, or whose connection
was closed, is lost: `AgentLost` stands in its place, once. How silence is measured is said in
`actorflow.distributed.agent`.

A second agent of a host is a mistake, or comes after a power cut, of which no connection tells. It
waits. The first word of the first agent refuses it; `RIVAL_S` without one, and it takes the place.
No number of a start would decide better: a second one may be started on another machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from actorflow.distributed.agent import ALIVE_S, MOST_AGENT_BYTES, Agent, AwakeClock
from actorflow.distributed.agent_messages import (
    AgentAlive,
    AgentHello,
    AgentKeys,
    AgentRefused,
    AgentWelcome,
    FromAgent,
    HostLimits,
    JobEnded,
    LauncherAlive,
    LinkProbed,
    ProbeLink,
    SignalReceived,
    ToAgent,
    agent_keys,
    derived_pair,
)
from actorflow.distributed.coordinator import (
    HANDSHAKE_MS,
    LOOPBACK,
    Doorman,
    number_of,
    serving_router,
)
from actorflow.distributed.link_probe import MOST_PROBED, PROBE_S, LinkFigures, LinkListener
from actorflow.distributed.messages import decode, encode
from actorflow.distributed.signal_notes import SignalNotes, empty
from actorflow.environment.settings import is_worth_a_line, logger
from compiler.contract.codec import DecodeError, printable
from compiler.contract.errors import ActorflowError

RIVAL_S = 3.0
"""How long an agent may say nothing while another one waits for its place: as many signs of life as
the least --host-timeout has."""
SILENT_S = 4.0
"""After which silence of an agent the user is told; a stall of a second or two is none."""
_GOODBYE_MS = 2_000
"""How long the end of the job may take to reach the agents."""


@dataclass(frozen=True, slots=True)
class AgentLost:
    """The agent of a host is gone, and so are its ranks; `reason` is a predicate of the host."""

    reason: str


@dataclass(frozen=True, slots=True)
class AgentSilent:
    """The agent of a host has been silent for `SILENT_S`, and is lost after `limit_s`."""

    limit_s: float


News = FromAgent | AgentSilent | AgentLost


@dataclass(slots=True)
class _Peer:
    """An agent that is connected: its name in zmq, its connection, and when it was last heard.

    `rival` is another one of its host, that waits for its end, with what it said.
    """

    routing_id: bytes
    fd: int
    heard_s: float
    rival: tuple[_Peer, AgentHello] | None = None
    is_silent: bool = False


class AgentServer:
    """The launcher's side of the agents of other hosts. Belongs to the thread that makes it.

    Attributes:
        num_hosts: how many hosts the job has, that of the launcher included if it has ranks.
        least_hosts: how many of them are enough to start.
        endpoint: where it listens.
        limits: how long it waits for hosts.

    Args:
        num_hosts: see there.
        secret: the secret of the job, of which all keys follow.
        listen: address and port; port 0 for a free one.
        limits: see there.
        clock: seconds, monotonic.
        refused: called with a text for what was refused, less and less often.
        handshake_ms: how long a connection may take to say who it is.

    Raises ActorflowError where it cannot listen there.
    """

    def __init__(
        self,
        num_hosts: int,
        secret: bytes,
        listen: tuple[str, int],
        limits: HostLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
        refused: Callable[[str], object] = logger.warning,
        handshake_ms: int = HANDSHAKE_MS,
    ) -> None:
        self.num_hosts, self.limits = num_hosts, limits
        self.least_hosts = limits.least_hosts or num_hosts
        self._secret, self._tell_refused, self._num_refused = secret, refused, 0
        self._awake = AwakeClock(clock())
        self._peers: dict[int, _Peer] = {}
        self._context = zmq.Context()
        public = [derived_pair(secret, f"agent {index}")[0] for index in range(num_hosts)]
        self._doorman = Doorman(self._context, public, self._refused)
        pair = derived_pair(secret, "launcher")
        self._router = serving_router(
            self._context, pair, handshake_ms=handshake_ms, most_bytes=MOST_AGENT_BYTES
        )
        # Kept, and disabled before it is closed: else the context's I/O thread stands still.
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.address, port = listen
        self._router.ipv6 = self.address.startswith("[")
        try:
            self._router.bind(f"tcp://{self.address}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise ActorflowError(
                f"the launcher cannot listen to agents at {self.address}:{port}: {error.strerror};"
                " give an address of this host and a port that is free"
            ) from None
        bound = self._router.getsockopt(zmq.LAST_ENDPOINT)
        self.endpoint: str = bound.decode() if isinstance(bound, bytes) else str(bound)

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """What is to be polled for reading; `turn` reads it."""
        return self._router, self._doorman.socket, self._monitor

    def keys(self, index: int, command: tuple[str, ...]) -> AgentKeys:
        """Return the keys of the agent of a host, which runs a script with its arguments."""
        return agent_keys(self._secret, index, self.num_hosts, self.endpoint, self.limits, command)

    def tell(self, index: int, message: ToAgent) -> None:
        """Send a message to the agent of a host; one that is lost needs none."""
        if index in self._peers:
            self._send(self._peers[index].routing_id, message)

    def turn(self, now_s: float) -> list[tuple[int, News]]:
        """Return what agents said since the last turn, and which are lost."""
        self._awake.turn(now_s)
        # Before the messages: what an agent said before its connection broke is heard first.
        broken, reused = self._broken()
        before = {index: peer.fd for index, peer in self._peers.items()}
        news, gone = self._take_all(), list[tuple[int, AgentLost]]()
        for index, peer in sorted(self._peers.items()):
            # A descriptor may have a new connection by now, and an agent that came with it.
            is_new = before.get(index) != peer.fd and peer.fd in reused
            rival = None if peer.rival is None else peer.rival[0]
            if rival is not None and rival.fd in broken - reused:
                rival = peer.rival = None
            if peer.fd in broken and not is_new:
                gone.append((index, AgentLost("was lost: its agent has ended")))
            elif self._awake.now_s - peer.heard_s >= self.limits.silence_s:
                text = f"was lost: its agent has been silent for {self.limits.silence_s:g} s"
                gone.append((index, AgentLost(f"{text} (--host-timeout)")))
            elif rival is not None and self._awake.now_s - rival.heard_s >= RIVAL_S:
                text = "was lost: its agent was started again, and the one before was silent for"
                gone.append((index, AgentLost(f"{text} {RIVAL_S:g} s")))
            elif self._awake.now_s - peer.heard_s >= SILENT_S and not peer.is_silent:
                peer.is_silent = True
                news.append((index, AgentSilent(self.limits.silence_s)))
        for index, one in gone:
            news.append((index, one))
            rival_hello = self._peers.pop(index).rival
            if rival_hello is not None:
                self._welcome(index, rival_hello[0])
                news.append((index, rival_hello[1]))
        return news

    def close(self, linger_ms: int = 0) -> None:
        """Close the sockets, once what was sent has gone or after the time. Idempotent."""
        if not self._context.closed:
            self._router.disable_monitor()
            self._context.destroy(linger_ms)

    def _take_all(self) -> list[tuple[int, News]]:
        self._doorman.serve()
        news: list[tuple[int, News]] = []
        while True:
            try:
                sender, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return news
            index = number_of(frames)
            if index is None:
                self._refused("a message without a frame came to the launcher; it was refused")
                continue
            try:
                message: FromAgent = decode([frame.buffer for frame in frames], FromAgent)
            except DecodeError as error:
                # Its key is right, so it is ours, of another version.
                text = f"host {index} sends what this version of actorflow cannot read ({error})"
                self._send(sender.bytes, AgentRefused(text))
                self._refused(text)
                continue
            if self._is_of_peer(index, sender, message):
                news.append((index, message))

    def _is_of_peer(self, index: int, sender: zmq.Frame, message: FromAgent) -> bool:
        """Note from whom a message came, and answer; return whether it is to be heard."""
        peer, routing_id = self._peers.get(index), sender.bytes
        came = _Peer(routing_id, int(sender.get(zmq.SRCFD)), self._awake.now_s)
        if peer is None and isinstance(message, AgentHello):
            peer = self._welcome(index, came)
        if peer is None:
            return False  # of an agent that was lost before
        if peer.routing_id != routing_id:
            is_first = peer.rival is None or peer.rival[0].routing_id == routing_id
            if isinstance(message, AgentHello) and is_first:
                peer.rival = came, message
            else:
                self._refuse_second(index, routing_id)
            return False
        if peer.rival is not None:
            self._refuse_second(index, peer.rival[0].routing_id)
            peer.rival = None
        # The system's number of the connection, as the monitor tells it when that breaks.
        peer.fd, peer.heard_s, peer.is_silent = came.fd, came.heard_s, False
        if isinstance(message, AgentAlive):
            self._send(routing_id, LauncherAlive(message.counter))
        return True

    def _welcome(self, index: int, peer: _Peer) -> _Peer:
        peer.heard_s = self._awake.now_s
        self._peers[index] = peer
        self._send(peer.routing_id, AgentWelcome())
        return peer

    def _refuse_second(self, index: int, routing_id: bytes) -> None:
        text = f"another process is host {index} of this job already"
        self._send(routing_id, AgentRefused(f"{text}; give each host a number of its own"))
        self._refused(f"{text}; a second one was refused")

    def _broken(self) -> tuple[set[int], set[int]]:
        """Return the descriptors of connections that broke, and which of them were taken anew."""
        broken: set[int] = set()
        reused: set[int] = set()
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            fd = int(event["value"])
            if event["event"] == zmq.EVENT_DISCONNECTED:
                broken.add(fd)
                reused.discard(fd)
            elif fd in broken:
                reused.add(fd)
        return broken, reused

    def _send(self, routing_id: bytes, message: ToAgent) -> None:
        # Without a route the agent is gone, which the monitor tells.
        with suppress(zmq.ZMQError):
            self._router.send_multipart([routing_id, *encode(message)], zmq.NOBLOCK, copy=False)

    def _refused(self, text: str) -> None:
        self._num_refused += 1
        if is_worth_a_line(self._num_refused):  # whoever floods us does not fill the log, too
            self._tell_refused(text)


class HostAgents:
    """The agents of all hosts of a job, by the number of the host.

    Attributes:
        poller: polls what agents wait for, and whatever else its user registers.
        address: where the coordinator of the ranks is to listen.
        num_hosts: how many hosts there may be.
        hosts: those that have part in an epoch, once `gather` has returned; ascending.
        hellos: what each host said of itself that is there, once `gather` has returned.
        link: what ranks are told of the link between hosts; None until that is known.

    Args:
        poller: see there; that of `local`, too.
        local: the agent of this host, which is host 0; None if none of the ranks runs here.
        server: serves the agents of all other hosts; None if there is none.
        absent: returns which hosts cannot come any more, and why.
        start_agents: called with the hosts that have no agent, before they are waited for; None
            where agents are started by somebody else.
    """

    def __init__(
        self,
        poller: zmq.Poller,
        local: Agent | None,
        server: AgentServer | None = None,
        absent: Callable[[], Mapping[int, str]] = dict,
        start_agents: Callable[[tuple[int, ...]], object] | None = None,
    ) -> None:
        self._absent, self._start_agents = absent, start_agents
        self.poller, self._local, self._server = poller, local, server
        self.address = LOOPBACK if server is None else server.address
        self.num_hosts = 1 if server is None else server.num_hosts
        self.hosts = tuple(range(self.num_hosts))
        self.hellos: dict[int, AgentHello] = {}
        self.link: str | None = None
        self._probed: dict[int, LinkFigures] = {}
        if local is not None:
            self.hellos[0] = local.hello()
        for socket in () if server is None else server.sockets:
            poller.register(socket, zmq.POLLIN)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of `hosts`, which tell them apart; in texts "host " goes before."""
        return tuple([host_name(index, self.hellos[index]) for index in self.hosts])

    def gather(
        self,
        notes: SignalNotes | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        are_mixed: bool = False,
    ) -> bool:
        """Wait for the agents of hosts, compare what they say, and set `hosts`.

        All are waited for at first, and later those of the epoch before: one that was absent then
        has part if it has come meanwhile. With the fewest that are needed here, the others have
        the grace time. With `are_mixed` hosts may differ in what decides the bits of kernels: a
        line of the log says so. Returns False where `notes` has a signal, which may have come to
        any host. Raises ActorflowError where too few come in time, or hosts differ; those that came
        are told.
        """
        if self._start_agents is not None and (missing := self._missing()):
            self._start_agents(missing)
        started_s = now_s = clock()
        enough_s: float | None = None
        while self._server is not None:
            if len(self.hellos) < self._server.least_hosts:
                enough_s = None
            elif enough_s is None:
                enough_s = now_s
            is_over = enough_s is not None and now_s >= enough_s + self._server.limits.grace_s
            if is_over or (enough_s is not None and not self._awaited()):
                break
            if notes is not None and notes.first is not None:
                return False
            now_s = self.idle(ALIVE_S, notes, clock)
            self._look_for_missing(self._server, now_s, now_s - started_s)
        self._refuse(differences(self.hellos, are_mixed=are_mixed), clock())
        if text := _first_difference(self.hellos, _OF_BITS):
            logger.warning("%s; copies of a value may drift apart on such hosts", text)
        self.hosts = tuple(sorted(self.hellos))
        return True

    def probe_links(
        self,
        notes: SignalNotes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> list[LinkFigures]:
        """Let some hosts measure their links to this one; return what they saw in `PROBE_S`.

        One after the other, so that each has this host's link for itself.
        """
        others = [index for index in sorted(self.hellos) if index or self._local is None]
        chosen = others[:: max(1, -(-len(others) // MOST_PROBED))]
        nonce, until_s = os.urandom(32), clock() + PROBE_S
        self._probed = {}
        listener = LinkListener(self.address, nonce)
        try:
            for index in chosen:
                self.tell(index, ProbeLink(self.address, listener.port, nonce), clock())
                while index in self.hellos and index not in self._probed and clock() < until_s:
                    self.idle(max(0.0, min(ALIVE_S, until_s - clock())), notes, clock)
        finally:
            listener.close()
        return list(self._probed.values())

    def idle(
        self,
        seconds: float,
        notes: SignalNotes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> float:
        """Wait for news while no ranks run, note signals to agents, and return the time.

        Agents are answered, or they would take the launcher for lost.
        """
        events = dict(self.poller.poll(1 + int(1000 * seconds)))
        now_s = clock()
        for _, one in self.turn(events, now_s):
            if notes is not None and isinstance(one, SignalReceived):
                notes.note(one.signal, now_s)
        if notes is not None:
            empty(notes.bell)  # the end of a child rings it, too
        return now_s

    def _missing(self) -> tuple[int, ...]:
        return tuple([i for i in range(self.num_hosts) if i not in self.hellos])

    def _awaited(self) -> set[int]:
        return set(self.hosts) - self.hellos.keys() - self._absent().keys()

    def _look_for_missing(self, server: AgentServer, now_s: float, waited_s: float) -> None:
        missing, least = self._missing(), server.least_hosts
        absent = [why for index, why in sorted(self._absent().items()) if index in missing]
        if len(absent) > self.num_hosts - least:
            self._refuse(absent[0], now_s)
        wait_s = server.limits.wait_s
        if wait_s and waited_s >= wait_s and len(self.hellos) < least:
            number = "host " if len(missing) == 1 else "hosts "
            of = f"{self.num_hosts}" if least == self.num_hosts else f"{least}:{self.num_hosts}"
            text = (
                f"{number}{', '.join(map(str, missing))} of {of} did not connect to the"
                f" launcher at {server.endpoint} within {wait_s:g} s (ACTORFLOW_RANK_SECONDS)"
            )
            self._refuse(text, now_s)

    def _refuse(self, text: str, now_s: float) -> None:
        if text:
            self.send_all(AgentRefused(text), now_s)
            raise ActorflowError(text)

    def tell(self, index: int, message: ToAgent, now_s: float) -> None:
        """Tell the agent of a host something."""
        if index == 0 and self._local is not None:
            self._local.take(message, now_s)
        elif self._server is not None:
            self._server.tell(index, message)

    def send_all(self, message: ToAgent, now_s: float) -> None:
        """Tell all agents something."""
        for index in range(self.num_hosts):
            self.tell(index, message, now_s)

    def turn(self, events: Mapping[Any, int], now_s: float) -> list[tuple[int, News]]:
        """Return what agents say, and which are lost, with the numbers of their hosts."""
        news: list[tuple[int, News]] = []
        if self._local is not None:
            news += [(0, one) for one in self._local.turn(events, now_s)]
        for index, one in () if self._server is None else self._server.turn(now_s):
            if isinstance(one, AgentHello):
                self.hellos[index] = one
            elif isinstance(one, AgentLost):  # it may be started again
                self.hellos.pop(index, None)
            elif isinstance(one, LinkProbed):
                seen = one.round_trip_ns / 1e3, one.bytes_per_s / 1e6
                self._probed[index] = LinkFigures(index, *seen, problem=one.problem)
            news.append((index, one))
        return news

    def due_s(self, now_s: float) -> list[float]:
        """Return when something is due that was not at a time."""
        due = [] if self._local is None else self._local.due_s()
        # A launcher that slept longer would take itself for one that was stopped.
        return due if self._server is None else [*due, now_s + ALIVE_S]

    def close(self, status: int) -> None:
        """End all agents, and what is left of their ranks; they exit with a status. Idempotent."""
        if self._local is not None:
            self._local.close()
        if self._server is not None:
            for index in range(self.num_hosts):
                self._server.tell(index, JobEnded(status))
            self._server.close(_GOODBYE_MS)


def host_name(index: int, hello: AgentHello) -> str:
    """Return what a host is called in texts, after the word "host"."""
    return f"{index} ({printable(hello.hostname)})"


_COMPARED: Sequence[tuple[str, str, str]] = (
    ("version", "has actorflow", "install the same version on all hosts"),
    ("python", "has Python", "install the same version on all hosts"),
    ("script", "has another script, of SHA-256", "give all hosts the same script"),
)
"""What hosts say of themselves that has to be the same, in words, and how to mend it."""

_OF_BITS: Sequence[tuple[str, str, str]] = (
    ("processor", "has the processor", "take equal hosts"),
    ("instructions", "has instructions that the other lacks:", "take equal hosts"),
    ("compiler", "has the C compiler", "install the same version on all hosts, or name it by CC"),
    ("libraries", "has", "install the same versions on all hosts"),
)
"""The same of what decides the bits of kernels. Ranks of one job hold copies of parameters, which
each updates for itself."""


def differences(hellos: Mapping[int, AgentHello], *, are_mixed: bool = False) -> str:
    """Return the first difference between hosts that is refused; "" for none.

    With `are_mixed` they may differ in what decides the bits of kernels.
    """
    text = _first_difference(hellos, _COMPARED)
    if text or are_mixed:
        return text
    text = _first_difference(hellos, _OF_BITS)
    mend = "kernels, and so bits, depend on it: give --mixed-hosts to run all the same"
    return text and f"{text}; {mend}"


def _first_difference(
    hellos: Mapping[int, AgentHello], compared: Sequence[tuple[str, str, str]]
) -> str:
    (first, one), *others = sorted(hellos.items())
    for index, other in others:
        for name, words, mend in compared:
            ours, theirs = getattr(one, name), getattr(other, name)
            if ours != theirs:
                if name == "instructions":
                    ours, theirs = _without(ours, theirs), _without(theirs, ours)
                most = _MOST_DIGITS if name == "script" else _MOST_SHOWN
                return (
                    f"host {host_name(index, other)} {words}"
                    f" {printable(theirs[:most]) or 'none'}, host {host_name(first, one)}"
                    f" {printable(ours[:most]) or 'none'}: {mend}"
                )
    return ""


_MOST_DIGITS, _MOST_SHOWN = 12, 200


def _without(words: str, others: str) -> str:
    return " ".join([word for word in words.split() if word not in others.split()])
