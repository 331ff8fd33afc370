"""The agent of a host: starts, watches, signals and ends the ranks there, as it is told.

`Agent` does that without a socket: messages of the launcher go in, messages to it come out. On the
launcher's own host it is called by the launcher's loop. On every other host `AgentService` is the
loop of a process, which connects to the launcher and ends with it: the process that was started
there by hand or by a scheduler (`serve_agent`), or one that `start_agent` starts.

*Liveness.* An agent says AgentAlive every `ALIVE_S` and the launcher answers. Who hears nothing for
a time takes the other for lost. Only time counts in which the listener itself was awake
(`AwakeClock`), so that a process that was stopped for a while blames nobody. Nothing is dropped or
sent again, as zmq's own heartbeats would have it. A peer whose process ended is heard of at once:
the system closes its connection, and that is as good as its silence.
"""

from __future__ import annotations

import hashlib
import os
import platform
import signal
import socket as sockets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from actorflow.distributed.agent_messages import (
    AgentAlive,
    AgentHello,
    AgentKeys,
    AgentRefused,
    AgentWelcome,
    EndRanks,
    FromAgent,
    JobEnded,
    LauncherAlive,
    LinkProbed,
    ProbeLink,
    RankExited,
    RankStopped,
    RankUnstarted,
    SignalRanks,
    SignalReceived,
    StartRanks,
    ToAgent,
)
from actorflow.distributed.link_probe import probe_link
from actorflow.distributed.messages import RankKeys, decode, encode, write_keys_fd
from actorflow.distributed.rank_process import (
    RankProcess,
    environment_of,
    split_cores,
    start_rank,
)
from actorflow.distributed.signal_notes import SignalNotes, empty
from actorflow.environment.host import kernel_host
from actorflow.environment.settings import Settings, SettingsError, __version__, logger
from compiler.contract.codec import DecodeError


class Agent:
    """The ranks of one host, of one epoch at a time. Belongs to the main thread.

    Args:
        command: the script with its arguments.
        environ: the environment of the ranks, to which their numbers are added.
        poller: polls what the agent waits for; `turn` is handed what it found.
        start_process: starts a rank's process; see `start_rank`.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        poller: zmq.Poller,
        *,
        start_process: Callable[..., RankProcess] = start_rank,
    ) -> None:
        self._command, self._environ = command, environ
        self._poller, self._start_process = poller, start_process
        self._ranks: list[RankProcess] = []
        self._epoch = 0
        self._news: list[FromAgent] = []
        self._ending: tuple[float, float] | None = None
        """Since when ranks are to end, and the grace period, in seconds."""

    def hello(self) -> AgentHello:
        """Return what the launcher is told of this host."""
        script = ""
        with suppress(OSError, IndexError):
            script = hashlib.sha256(Path(self._command[0]).read_bytes()).hexdigest()
        num_cores = len(os.sched_getaffinity(0))
        versions = __version__, platform.python_version()
        log_dir = Settings.from_env(self._environ).log_dir
        logs = "" if log_dir is None else str(log_dir.absolute())
        kernels = astuple(kernel_host(self._environ))
        return AgentHello(sockets.gethostname(), *versions, script, num_cores, logs, *kernels)

    def take(self, message: ToAgent, now_s: float) -> None:
        """Do what the launcher says; what follows from it comes out of the next `turn`."""
        if isinstance(message, StartRanks):
            self._start(message)
        elif isinstance(message, ProbeLink):
            figures = probe_link(0, (message.address, message.port), message.nonce)
            seen = int(figures.round_trip_us * 1e3), int(figures.mb_per_s * 1e6)
            self._news.append(LinkProbed(*seen, figures.problem))
        elif isinstance(message, SignalRanks) and message.epoch == self._epoch:
            for rank in self._ranks:
                rank.send(message.signal)
                rank.send(signal.SIGCONT)  # one that is stopped could not end, nor the others
        elif isinstance(message, EndRanks) and message.epoch == self._epoch:
            self._ending = self._ending or (now_s, message.grace_ms / 1000)
            self._escalate(now_s)
        elif isinstance(message, JobEnded):
            self.close()

    def turn(self, events: Mapping[Any, int], now_s: float) -> list[FromAgent]:
        """Do what the events and the time ask for; return what there is to tell.

        `events` are the descriptors that can be read.
        """
        self._read_output(events)
        self._reap(events)
        self._look_for_stopped()
        self._escalate(now_s)
        news, self._news = self._news, []
        return news

    def due_s(self) -> list[float]:
        """Return when something is due that was not at a time."""
        if self._ending is None:
            return []
        since_s, grace_s = self._ending
        return [since_s + grace_s, since_s + 2 * grace_s]

    def close(self) -> None:
        """Kill the ranks that live, and forget all. Idempotent."""
        for rank in self._ranks:
            if rank.code is None:
                rank.kill_group()
                rank.wait()
                self._poller.unregister(rank.pidfd)
            os.close(rank.pidfd)
            if rank.tail is not None:
                with suppress(KeyError):  # its end was read
                    self._poller.unregister(rank.tail.fd)
                rank.tail.close()
        self._ranks = []
        self._ending = None

    def _start(self, message: StartRanks) -> None:
        self.close()
        self._epoch = message.epoch
        parts = split_cores(sorted(os.sched_getaffinity(0)), len(message.keys))
        for number, packed in enumerate(message.keys):
            keys = RankKeys.from_bytes(packed)
            cores = None if parts is None else parts[number]
            environ = environment_of(self._environ, keys, message.num_threads, message.link)
            try:
                rank = self._start_process(keys, self._command, environ, cores)
            except (OSError, SettingsError) as error:
                self._news.append(RankUnstarted(self._epoch, keys.rank, str(error)))
                return
            self._ranks.append(rank)
            self._poller.register(rank.pidfd, zmq.POLLIN)
            if rank.tail is not None:
                self._poller.register(rank.tail.fd, zmq.POLLIN)

    def _read_output(self, events: Mapping[Any, int]) -> None:
        for rank in self._ranks:
            tail = rank.tail
            if tail is not None and tail.fd in events and not tail.read():
                self._poller.unregister(tail.fd)

    def _reap(self, events: Mapping[Any, int]) -> None:
        for rank in self._ranks:
            if rank.code is not None or rank.pidfd not in events:
                continue
            self._poller.unregister(rank.pidfd)
            rank.kill_group()  # what it started and left behind
            code = rank.code = rank.wait()
            tail = ""
            if rank.tail is not None:
                rank.tail.drain()
                tail = rank.tail.text()
                with suppress(KeyError):  # its end was read
                    self._poller.unregister(rank.tail.fd)
            status, number = (code, 0) if code >= 0 else (0, -code)
            self._news.append(
                RankExited(self._epoch, rank.rank, status, number, rank.is_forced, tail)
            )

    def _look_for_stopped(self) -> None:
        for rank in self._ranks:
            if rank.code is None:
                was_stopped = rank.is_stopped
                rank.look_for_stop()
                if rank.is_stopped != was_stopped:
                    self._news.append(RankStopped(self._epoch, rank.rank, rank.is_stopped))

    def _escalate(self, now_s: float) -> None:
        """Signal ranks that have not exited by themselves although they are to end."""
        if self._ending is None:
            return
        # SIGTERM after one grace period, SIGKILL of the whole group after the second.
        since_s, grace_s = self._ending
        for rank in self._ranks:
            if rank.code is None and now_s >= since_s + 2 * grace_s:
                rank.is_forced = True
                rank.kill_group()
            elif rank.code is None and now_s >= since_s + grace_s and not rank.is_forced:
                rank.is_forced = True
                rank.send(signal.SIGTERM)


# The process of an agent, on a host that is not the launcher's.

ALIVE_S = 0.5
"""How often an agent says that it goes on."""
_MOST_GAP_S = 1.0
"""What the time between two turns counts at most: a longer one is that of a process that was
stopped, or of a machine that is overloaded."""
_MOST_FAILED = 10
"""Connections that may end in their handshake: the first may come amid the end of an older job."""
MOST_AGENT_BYTES = 1 << 20
"""Of a frame between a launcher and an agent; the longest holds the keys of all ranks of a host."""


class AwakeClock:
    """The time, in seconds, in which this process was awake."""

    def __init__(self, now_s: float) -> None:
        self.now_s = 0.0
        self._before_s = now_s

    def turn(self, now_s: float) -> None:
        """Note that the process is awake now."""
        self.now_s += min(now_s - self._before_s, _MOST_GAP_S)
        self._before_s = now_s


def serve_agent(keys: AgentKeys, environ: Mapping[str, str]) -> int:
    """Serve a launcher as the agent of this host, from the main thread; return its exit status.

    That is the status of the whole job, or 1 where the launcher was lost or does not take this
    host; what went wrong is printed to stderr.
    """
    return AgentService(keys, environ).run()


class AgentService:
    """The agent of a host that is not the launcher's. `run` is all of it.

    Args:
        keys: its keys.
        environ: the environment of the ranks.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        keys: AgentKeys,
        environ: Mapping[str, str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys, self._clock = keys, clock
        self._poller = zmq.Poller()
        self._agent = Agent(keys.command, environ, self._poller)
        self._notes = SignalNotes(clock)
        self._awake = AwakeClock(clock())
        self._is_welcome = False
        self._heard_s = self._alive_s = 0.0
        """When, awake, the launcher was heard last, and when the next sign of life is due."""
        self._num_alive = self._num_failed = 0
        self._context = zmq.Context()
        self._socket = _socket_of(self._context, keys)
        # Kept, and disabled before it is closed: else the context's I/O thread stands still.
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )

    def run(self) -> int:
        """Connect, serve until the job is over, end all ranks, and return the exit status."""
        try:
            with self._notes.woken() as bell:
                for source in (bell, self._socket, self._monitor):
                    self._poller.register(source, zmq.POLLIN)
                self._socket.connect(self._keys.endpoint)
                self._send(self._agent.hello())
                status = None
                while status is None:
                    # Never longer than a sign of life may take.
                    events = dict(self._poller.poll(self._timeout_ms(self._clock())))
                    if bell in events:
                        empty(bell)
                    status = self._turn(events, self._clock())
                return status
        finally:
            self._agent.close()
            self._socket.disable_monitor()
            self._context.destroy(0)

    def _timeout_ms(self, now_s: float) -> int:
        # Never longer than until the next sign of life.
        delays = [ALIVE_S, *[due - now_s for due in self._agent.due_s()]]
        return min([1 + int(s * 1000) for s in delays if s > 0])

    def _turn(self, events: Mapping[Any, int], now_s: float) -> int | None:
        """Do what the events and the time ask for; return the exit status once it is known."""
        self._awake.turn(now_s)
        # Before the messages: one that came before the connection broke says why it did.
        is_cut = self._is_cut()
        if is_cut and not self._is_welcome:  # the launcher may have forgotten this host
            self._send(self._agent.hello())
        is_cut = is_cut and self._is_welcome
        for message in self._messages():
            self._heard_s = self._awake.now_s
            status = self._take(message, now_s)
            if status is not None:
                return status
        for number, _ in self._notes.take():
            if not self._is_welcome:
                return 128 + number
            self._send(SignalReceived(number))
        for news in self._agent.turn(events, now_s):
            self._send(news)
        if self._is_welcome and self._awake.now_s >= self._alive_s:
            self._alive_s = self._awake.now_s + ALIVE_S
            self._num_alive += 1
            self._send(AgentAlive(self._num_alive))
        return self._judge(is_cut=is_cut)

    def _take(self, message: ToAgent, now_s: float) -> int | None:
        if isinstance(message, AgentWelcome):
            self._is_welcome = True
        elif isinstance(message, AgentRefused):
            return self._failed(message.reason)
        elif isinstance(message, JobEnded):
            return message.status
        elif not isinstance(message, LauncherAlive):
            self._agent.take(message, now_s)
        return None

    def _judge(self, *, is_cut: bool) -> int | None:
        """Return the exit status where the launcher cannot be reached, at first or any more."""
        keys, silent_s = self._keys, self._awake.now_s - self._heard_s
        launcher = f"the launcher at {keys.endpoint}"
        if is_cut:
            return self._failed(f"{launcher} closed the connection; the ranks here are ended")
        if self._is_welcome and silent_s >= keys.timeout_s:
            return self._failed(
                f"{launcher} has been silent for {keys.timeout_s:g} s (--host-timeout); the ranks"
                " here are ended"
            )
        if not self._is_welcome and self._num_failed >= _MOST_FAILED:
            return self._failed(
                f"{launcher} closed {self._num_failed} connections before it knew this host: the"
                " key files of both hosts hold different secrets, or another program listens there"
            )
        if not self._is_welcome and keys.wait_s and silent_s >= keys.wait_s:
            return self._failed(
                f"{launcher} could not be reached within {keys.wait_s:g} s"
                " (ACTORFLOW_RANK_SECONDS): it has not been started, its address is another one,"
                " or a firewall drops the packets"
            )
        return None

    def _failed(self, text: str) -> int:
        keys = self._keys
        head = f"actorflow launch: host {keys.index} of {keys.num_hosts}"
        print(f"{head}: {text}", file=sys.stderr, flush=True)
        return 1

    def _send(self, message: FromAgent) -> None:
        self._socket.send_multipart(encode(message), copy=False)

    def _messages(self) -> list[ToAgent]:
        """Return all messages that have come."""
        messages: list[ToAgent] = []
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return messages
            try:
                messages.append(decode([frame.buffer for frame in frames], ToAgent))
            except DecodeError as error:
                logger.warning("a message of the launcher was refused: %s", error)

    def _is_cut(self) -> bool:
        """Return whether a connection broke; count those that broke before they stood."""
        is_cut = False
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            is_cut = is_cut or event == zmq.EVENT_DISCONNECTED
            self._num_failed += event != zmq.EVENT_DISCONNECTED
        return is_cut


_MAIN = "actorflow.cli.agent"


def start_agent(
    keys: AgentKeys, environ: Mapping[str, str], outputs: tuple[int, int] | None = None
) -> subprocess.Popen[bytes]:
    """Start the agent of this host as a process, which is killed when this thread ends.

    Args:
        keys: its keys, which go through a descriptor.
        environ: its environment, which ranks inherit.
        outputs: descriptors for what it and rank 0 print to stdout and stderr; None for those of
            this process.

    Raises OSError where no process can be had.
    """
    fd = write_keys_fd(keys.to_bytes())
    command = [sys.executable, "-m", _MAIN, str(fd), str(os.getpid())]
    try:
        stdout, stderr = outputs or (None, None)
        # A process group of its own: Ray sends SIGTERM to that of an actor that was killed, which
        # would be taken for the user's wish to stop the job, where it comes before our SIGKILL.
        return subprocess.Popen(
            command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            pass_fds=(fd,), process_group=0,
        )  # fmt: skip
    finally:
        os.close(fd)


def _socket_of(context: zmq.Context[Any], keys: AgentKeys) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.ipv6 = "[" in keys.endpoint
    socket.curve_serverkey = keys.server_public
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    # At random, so that two processes which take themselves for one host are told apart.
    socket.routing_id = b"%d.%s" % (keys.index, os.urandom(8).hex().encode())
    socket.maxmsgsize = MOST_AGENT_BYTES
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0
    socket.reconnect_ivl, socket.reconnect_ivl_max = 100, 1000
    return socket
