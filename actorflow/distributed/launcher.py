"""Several processes as one job: started, watched and ended together.

The launcher decides for the whole job; what is done on a host, its agent does (`Agent`), that of
the launcher's own host in the launcher's process. One thread and one loop wait for everything: the
sockets of the coordinator, what agents have to tell, and signals. All ranks end with the launcher:
the system kills those of its host when it dies, whatever it dies of, and other agents hear of it.
When a rank fails the others are told, and end by themselves. A rank that has not exited after
`grace_s` receives SIGTERM, and after twice that SIGKILL, with its whole group.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import zmq

from actorflow.distributed.agent import ALIVE_S, Agent
from actorflow.distributed.agent_messages import (
    AgentHello,
    AgentRefused,
    EndRanks,
    RankExited,
    RankStopped,
    RankUnstarted,
    SignalRanks,
    SignalReceived,
    StartRanks,
)
from actorflow.distributed.coordinator import Coordinator, places_on, ranks_per_host
from actorflow.distributed.hosts import (
    SILENT_S,
    AgentLost,
    AgentSilent,
    HostAgents,
    News,
    differences,
    host_name,
)
from actorflow.distributed.link_probe import KeptLink, stated_link
from actorflow.distributed.rank_failure import FailureKind, listed
from actorflow.distributed.restart import (
    BY_SIGNAL,
    GRACE_S,
    WINDOW_S,
    EpochEnd,
    RestartPolicy,
    kind_of_exit,
    supervise,
)
from actorflow.distributed.signal_notes import SignalNotes, empty
from actorflow.environment.settings import Settings, logger
from compiler.contract.errors import ActorflowError

AGAIN_S = 2.0
"""How long after the first a signal counts as a second wish: later than for a rank that trains
(`actorflow.run.stopping.AGAIN_S`), which then takes the copy that it is sent for a second one, too.
"""
START_S = 30.0
"""What the start of a rank's process may take, besides the time that ranks wait."""


@dataclass(frozen=True, slots=True)
class RankLaunch:
    """What is to be launched.

    Args:
        command: a script and its arguments.
        num_ranks: how many processes run it, once all hosts are there.
        wait_s: how long ranks wait for each other, 0 for ever.
        grace_s: how long ranks may take to end by themselves after one has failed.
        restarts: how often all ranks are started again after a failure, within
            `restart_window_s`; 0 for never.
        are_hosts_mixed: whether hosts may differ in what decides the bits of kernels.
        needs_link: whether the link between hosts is measured where it is not stated.
        launch: tells this launch from all others.
    """

    command: Sequence[str]
    num_ranks: int
    wait_s: float
    grace_s: float
    restarts: int = 0
    restart_window_s: float = WINDOW_S
    are_hosts_mixed: bool = False
    needs_link: bool = True
    launch: str = field(default_factory=lambda: os.urandom(8).hex())


def launch(asked: RankLaunch, environ: Mapping[str, str], agents: HostAgents | None = None) -> int:
    """Run a script as several ranks, from the main thread; return the job's exit status.

    That is the status of the rank that failed first in the last epoch, or 0. What went wrong is
    printed once, to stderr. Raises ActorflowError where processes cannot be started, or hosts do
    not come or differ.

    Args:
        asked: what is launched.
        environ: the environment of the ranks on this host.
        agents: those of all hosts, which are closed at the end; None where all ranks run here.
    """
    if not hasattr(os, "pidfd_open"):
        raise ActorflowError("'actorflow launch' needs Linux: it watches processes by pidfd")
    if agents is None:
        agents = agents_of_one_host(asked, environ)
    if asked.restarts:
        asked = replace(asked, grace_s=min(asked.grace_s, GRACE_S))
    policy = RestartPolicy(asked.restarts, asked.restart_window_s)
    notes = SignalNotes(time.monotonic)
    epochs = Epochs(asked, environ, agents, notes)
    status = 1
    try:
        # One watch over signals for all epochs: one that comes between two is not lost.
        with notes.woken() as bell:
            agents.poller.register(bell, zmq.POLLIN)
            status = supervise(
                epochs.run, policy, clock=time.monotonic, wait=epochs.wait, report=_report
            )
    finally:
        agents.close(status)
    return status


def _report(text: str) -> None:
    print(f"actorflow launch: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class EpochSize:
    """How many hosts and ranks an epoch has, and threads each rank: bits depend on the last two."""

    num_hosts: int
    num_ranks: int
    num_threads: int

    def difference(self, before: EpochSize | None, most_hosts: int) -> str:
        """Return a line for the user where it is not as the epoch before, or as the job may be."""
        if before is None and self.num_hosts < most_hosts:
            return (
                f"{self} on {self.num_hosts} of {most_hosts} hosts; one that comes later has part"
                " from the next restart on"
            )
        if before is None or str(before) == str(self):
            return ""
        return (
            f"{self} from here on, {before} before: batches stay, and losses differ in their last"
            " bits from those of a run without this change"
        )

    def __str__(self) -> str:
        ranks = f"{self.num_ranks} rank{'' if self.num_ranks == 1 else 's'}"
        return f"{ranks} with {self.num_threads} thread{'' if self.num_threads == 1 else 's'} each"


@dataclass(slots=True)
class Epochs:
    """The epochs of a launch, and the time between them.

    Args:
        asked: what is launched.
        environ: the environment of the launcher.
        agents: of all hosts; their poller looks at the bell of `notes`.
        notes: the signals to the launcher.
    """

    asked: RankLaunch
    environ: Mapping[str, str]
    agents: HostAgents
    notes: SignalNotes
    _size: EpochSize | None = None

    def run(self, epoch: int) -> EpochEnd:
        """Wait for the agents of hosts, and run an epoch on them. Raises ActorflowError."""
        agents = self.agents
        # Those of hosts that stayed are there; a host that was lost may come again.
        if not agents.gather(self.notes, are_mixed=self.asked.are_hosts_mixed):
            return EpochEnd(BY_SIGNAL + (self.notes.first or 0), is_stopped=True)
        if agents.link is None:  # once: a restart is to have the plans, and the bits, of the start
            agents.link = self._link()
            return self.run(epoch)  # a host may have been lost meanwhile
        # As many on each host as if all were there.
        num_ranks = self.asked.num_ranks * len(agents.hosts) // agents.num_hosts
        asked = replace(self.asked, num_ranks=num_ranks)
        places = places_on(agents.names, num_ranks)
        coordinator = Coordinator(
            num_ranks, asked.wait_s, epoch=epoch, address=agents.address, places=places
        )
        launcher = Launcher(asked, self.environ, coordinator, agents, self.notes)
        size = EpochSize(len(agents.hosts), num_ranks, launcher.num_threads)
        if told := size.difference(self._size, agents.num_hosts):
            _report(told)
        self._size = size
        return launcher.run()

    def _link(self) -> str:
        """Return the link between hosts that ranks are told: stated, kept or measured; or ""."""
        asked, settings = self.asked, Settings.from_env(self.environ)
        stated = self.environ.get("ACTORFLOW_LINK", "").strip()
        if stated or self.agents.num_hosts == 1 or not asked.needs_link:
            return stated
        kept = KeptLink.of_job(settings.cache, asked.command[0], self.agents.num_hosts)
        if link := kept.read():
            _report(f"the link between hosts is {link}, as measured before ({kept.path})")
            return link
        figures = self.agents.probe_links(self.notes)
        if not (link := stated_link(figures)):
            why = next((f": {one.problem}" for one in figures), "")
            _report(
                f"the link between hosts was not measured{why}; it is taken for {settings.link}"
            )
            return ""
        kept.write(link)
        where = f"; kept in {kept.path}" if kept.path is not None else ""
        _report(f"the link between hosts was measured: ACTORFLOW_LINK={link} (GB/s:us){where}")
        return link

    def wait(self, seconds: float) -> int | None:
        """Wait, and answer agents; return the signal that came meanwhile or before, or None."""
        due_s = time.monotonic() + seconds
        while self.notes.first is None and (left_s := due_s - time.monotonic()) > 0:
            self.agents.idle(min(left_s, ALIVE_S), self.notes)
        return self.notes.first


def agents_of_one_host(asked: RankLaunch, environ: Mapping[str, str]) -> HostAgents:
    """Return the one agent of a job whose ranks all run on this host."""
    poller = zmq.Poller()
    return HostAgents(poller, Agent(asked.command, environ, poller))


@dataclass(slots=True)
class _RankState:
    """What the launcher knows of a rank. `code` is an exit status, or a negative signal."""

    rank: int
    host: int
    code: int | None = None
    is_forced: bool = False
    stopped_at_s: float | None = None
    tail: str = ""

    @property
    def status(self) -> int | None:
        """The exit status as a shell tells it, 128 + signal; None while the process lives."""
        return BY_SIGNAL - self.code if self.code is not None and self.code < 0 else self.code


class Launcher:
    """One epoch of a launch. `run` is all of it: `start`, then a `turn` for what came or is due.

    A turn reads no clock: what it does follows from the time and the events that it is handed.

    Attributes:
        notes: the signals to the launcher, which a turn passes on.

    Args:
        asked: what is launched.
        environ: the environment of the launcher, which says how many threads a rank has.
        coordinator: serves the ranks; closed at the end of `run`.
        agents: of all hosts; they have been gathered.
        notes: see there.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        asked: RankLaunch,
        environ: Mapping[str, str],
        coordinator: Coordinator,
        agents: HostAgents,
        notes: SignalNotes,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._asked, self._environ = asked, environ
        self._coordinator, self._agents = coordinator, agents
        self.notes, self._clock = notes, clock
        self._names = dict(zip(agents.hosts, agents.names, strict=True))
        self._log_dirs = {host: agents.hellos[host].log_dir for host in agents.hosts}
        counts = ranks_per_host(asked.num_ranks, len(agents.hosts))
        self._counts = dict(zip(agents.hosts, counts, strict=True))
        places = [host for host, count in self._counts.items() for _ in range(count)]
        self._ranks = [_RankState(rank, host) for rank, host in enumerate(places)]
        self._signals: dict[int, dict[int, float]] = {}
        """By signal and host that received it: when it first came, by the clock."""
        self._ending_since_s: float | None = None
        self._waiting_since_s: float | None = None
        self._started_s = clock()

    def run(self) -> EpochEnd:
        """Start all, serve them until the last has ended; tell and return how it ended.

        The poller of the agents looks at the bell of `notes`.
        """
        poller, bell = self._agents.poller, self.notes.bell
        for source in self._coordinator.sockets:
            poller.register(source, zmq.POLLIN)
        try:
            self.start()
            timeout_ms: int | None = 0
            while any([rank.code is None for rank in self._ranks]):
                events = dict(poller.poll(timeout_ms))
                if bell in events:
                    empty(bell)
                # Once a turn: what falls due while it is looked at is done in the next one.
                timeout_ms = self.turn(events, self._clock())
        finally:
            for source in self._coordinator.sockets:
                poller.unregister(source)
            self._coordinator.close()
        # Also a signal that came too late to be passed on.
        is_stopped = bool(self._signals) or self.notes.first is not None
        return EpochEnd(self._verdict(), self._coordinator.failure, is_stopped)

    def turn(self, events: Mapping[Any, int], now_s: float) -> int | None:
        """Do what the events and the time ask for; return the milliseconds until more is due.

        `events` are the sockets and descriptors that can be read. None: nothing will be due unless
        something comes.
        """
        news = self._agents.turn(events, now_s)
        # Signals before messages before exits: a rank's last words are served before its death is
        # judged.
        for number, came_s in self.notes.take():
            self._pass_on(number, 0, came_s, now_s)
        self._coordinator.serve()
        for host, one in news:
            self._take(host, one, now_s)
        self._look_for_stopped(now_s)
        self._look_for_silent(now_s)
        self._escalate(now_s)
        self._tell_who_runs(now_s)
        return self._timeout_ms(now_s)

    def start(self) -> None:
        """Tell the agents to start the process of each rank."""
        now_s, epoch, threads = self._clock(), self._coordinator.epoch, self.num_threads
        for host in self._agents.hosts:
            keys = [self._coordinator.keys(rank.rank) for rank in self._ranks if rank.host == host]
            launch, link = self._asked.launch, self._agents.link or ""
            packed = tuple([replace(one, launch=launch).to_bytes() for one in keys])
            self._agents.tell(host, StartRanks(epoch, threads, link, packed), now_s)

    @property
    def num_threads(self) -> int:
        """The threads of a rank, the same for all: kernels, and so bits, depend on them."""
        if text := self._environ.get("ACTORFLOW_THREADS"):
            return int(text)
        hellos = self._agents.hellos
        return max(1, min([hellos[h].num_cores // n for h, n in self._counts.items()]))

    def _pass_on(self, number: int, host: int, came_s: float, now_s: float) -> None:
        """Pass a signal on to all ranks, which a host received; several copies are one wish."""
        first_s = self._signals.setdefault(number, {})
        if host in first_s:
            if came_s < first_s[host] + AGAIN_S:
                return  # ranks have it
            self._begin_ending(now_s)  # asked for twice: at once
        elif first_s:
            first_s[host] = came_s  # as a scheduler signals all hosts
            return
        first_s.setdefault(host, came_s)
        self._agents.send_all(SignalRanks(self._coordinator.epoch, number), now_s)

    def _take(self, host: int, news: News, now_s: float) -> None:
        """Take what the agent of a host says."""
        if isinstance(news, AgentLost):
            self._lose(host, news, now_s)
        elif isinstance(news, AgentSilent):
            _report(
                f"host {self._names[host]} has been silent for {SILENT_S:g} s: it is stopped or"
                f" its link is down; its ranks are lost after {news.limit_s:g} s (--host-timeout)"
            )
        elif isinstance(news, SignalReceived):
            self._pass_on(news.signal, host, now_s, now_s)
        elif isinstance(news, AgentHello) and host not in self._names:
            self._greet(host, news, now_s)
        if not isinstance(news, RankUnstarted | RankExited | RankStopped):
            return
        if news.epoch != self._coordinator.epoch:
            return  # of ranks that are gone
        if not (news.rank < len(self._ranks) and self._ranks[news.rank].host == host):
            logger.warning("host %s tells of rank %s, which is not there", host, news.rank)
            return
        rank = self._ranks[news.rank]
        if isinstance(news, RankExited):
            self._exited(rank, news, now_s)
        elif isinstance(news, RankStopped):
            rank.stopped_at_s = now_s if news.is_stopped else None
        else:
            raise ActorflowError(
                f"rank {rank.rank} of {len(self._ranks)} cannot be started"
                f"{self._on_host(rank)}: {news.reason}; those that were are ended again"
            )

    def _greet(self, host: int, hello: AgentHello, now_s: float) -> None:
        """Tell of a host that came late; refuse one that would end the next epoch."""
        hellos = {**self._agents.hellos, host: hello}
        text = differences(hellos, are_mixed=self._asked.are_hosts_mixed)
        if text:
            self._agents.tell(host, AgentRefused(text), now_s)
        _report(text or f"host {host_name(host, hello)} came; it has part from the next restart on")

    def _exited(self, rank: _RankState, news: RankExited, now_s: float) -> None:
        rank.code = -news.signal if news.signal else news.status
        rank.is_forced, rank.tail = news.is_forced, news.tail
        self._waiting_since_s = now_s
        if not self._coordinator.has_left(rank.rank):
            # A death by a signal that we did not send explains why others missed this rank; an
            # exit does not.
            is_cause = rank.code < 0 and not rank.is_forced
            kind = kind_of_exit(rank.code)
            self._coordinator.lost(rank.rank, _words(rank.code), explains=is_cause, kind=kind)

    def _lose(self, host: int, news: AgentLost, now_s: float) -> None:
        """Take the ranks of a host for lost, whose agent is."""
        for rank in self._ranks:
            if rank.host == host and rank.code is None:
                rank.code, rank.is_forced = -signal.SIGKILL, True
                self._waiting_since_s = now_s
                self._coordinator.lost(rank.rank, f"is lost: its host {news.reason}", explains=True)

    def _on_host(self, rank: _RankState) -> str:
        several = self._agents.num_hosts > 1
        return f" on host {self._names[rank.host]}" if several else ""

    def _look_for_stopped(self, now_s: float) -> None:
        wait_s = self._asked.wait_s
        for rank in self._ranks:
            since_s = rank.stopped_at_s if rank.code is None else None
            failure = self._coordinator.failure
            if since_s is None:
                continue
            # Another rank may have waited for longer; that this one is stopped says why.
            is_missed = failure is not None and failure.is_hearsay and failure.rank == rank.rank
            if is_missed or (wait_s and now_s >= since_s + wait_s):
                ago_s = int(now_s - since_s) if is_missed else wait_s
                text = f"was stopped (SIGSTOP) {ago_s:g} s ago and has not continued"
                self._coordinator.lost(rank.rank, text, explains=is_missed)

    def _silent_until_s(self) -> float | None:
        """Return until when ranks may have said nothing yet; None where none is awaited."""
        wait_s, ranks = self._asked.wait_s, self._ranks
        silent = [r for r in ranks if r.code is None and not self._coordinator.has_heard(r.rank)]
        is_awaited = wait_s and silent and self._coordinator.failure is None
        return self._started_s + wait_s + START_S if is_awaited else None

    def _look_for_silent(self, now_s: float) -> None:
        """Fail ranks that cannot reach the coordinator and do not find that out themselves."""
        until_s = self._silent_until_s()
        if until_s is None or now_s < until_s:
            return
        for rank in self._ranks:
            if rank.code is None and not self._coordinator.has_heard(rank.rank):
                text = f"has not said a word {until_s - self._started_s:g} s after its start"
                text = f"{text}, at {self._coordinator.endpoint}"
                self._coordinator.lost(rank.rank, text, kind=FailureKind.SILENCE)

    def _escalate(self, now_s: float) -> None:
        """Tell agents to end the ranks that do not exit by themselves after a failure."""
        if self._coordinator.failure is not None:
            self._begin_ending(now_s)

    def _tell_who_runs(self, now_s: float) -> None:
        """Print once which ranks still run long after others ended: they may work, or hang."""
        since_s, wait_s = self._waiting_since_s, self._asked.wait_s
        if not wait_s or since_s is None or now_s < since_s + wait_s:
            return
        self._waiting_since_s = None
        running = tuple([rank.rank for rank in self._ranks if rank.code is None])
        if running and self._ending_since_s is None:
            runs = "runs" if len(running) == 1 else "run"
            text = f"{listed(running)} still {runs}, {wait_s:g} s after the others have ended"
            _report(text)

    def _begin_ending(self, now_s: float) -> None:
        if self._ending_since_s is None:
            self._ending_since_s = now_s
            grace_ms = int(self._asked.grace_s * 1000)
            self._agents.send_all(EndRanks(self._coordinator.epoch, grace_ms), now_s)

    def _timeout_ms(self, now_s: float) -> int | None:
        """Return how long to wait for news before something is due that was not at a time."""
        due = self._agents.due_s(now_s)
        wait_s = self._asked.wait_s
        if wait_s and self._waiting_since_s is not None:
            due.append(self._waiting_since_s + wait_s)
        if (until_s := self._silent_until_s()) is not None:
            due.append(until_s)
        for rank in self._ranks:
            if rank.stopped_at_s is not None and wait_s and rank.code is None:
                due.append(rank.stopped_at_s + wait_s)
        # Only the future: what is due is done in this turn. One ms more, so that it is due on
        # waking.
        delays = [at - now_s for at in due]
        return min([1 + int(s * 1000) for s in delays if s > 0], default=None)

    def _verdict(self) -> int:
        failure = self._coordinator.failure
        if failure is None:
            return self._late_verdict()
        rank = self._ranks[failure.rank]
        # A status that our own signal caused says nothing; 0 would call a failed job a success.
        by_itself = rank.status if rank.status and not rank.is_forced else 1
        # The user asked for this end, so it is no error to print.
        if by_itself - BY_SIGNAL in self._signals:
            logger.info("%s, as requested of the launcher", failure.told)
            return by_itself
        if rank.tail:
            print(f"--- what rank {rank.rank} printed last:\n{rank.tail}\n---", file=sys.stderr)
        head = failure.told
        if failure.shown:
            head = f"rank {failure.rank} of {len(self._ranks)} failed"
            head += self._on_host(rank)
            head += f" in {failure.op}" if failure.op else ""
            head += f" ({failure.line})" if failure.line else ""
            head += f":\n{failure.shown.rstrip()}"
        if logs := self._logs():
            head += f"\nwhat ranks above 0 printed is in {logs}"
        _report(head)
        return by_itself

    def _logs(self) -> str:
        """Return the files with what ranks printed, by host; "" where there are none."""
        by_host = list[str]()
        for host, folder in self._log_dirs.items():
            ranks = [rank for rank in self._ranks if rank.host == host and rank.rank > 0]
            if folder and ranks:
                files = f"{folder}/rank-{ranks[0].rank}.log"
                files += f" to rank-{ranks[-1].rank}.log" if len(ranks) > 1 else ""
                by_host.append(files + self._on_host(ranks[0]))
        return ", ".join(by_host)

    def _late_verdict(self) -> int:
        """Return the exit status where all scripts ended well, or were stopped."""
        for rank in self._ranks:
            if rank.status:
                if rank.status - BY_SIGNAL not in self._signals:
                    ending = _words(rank.code or 0)
                    who = f"rank {rank.rank}{self._on_host(rank)}"
                    _report(f"{who} {ending}, after its script had ended well")
                return rank.status
        return 0


def _words(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"
    if code == 0:
        return "ended without a word (os._exit?)"
    return f"ended with exit status {code}"
