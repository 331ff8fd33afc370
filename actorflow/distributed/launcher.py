"""Several processes as one job: started, watched and ended together.

One thread and one loop wait for everything: the sockets of the coordinator, the processes (by
pidfd), what they print, and signals. All ranks end with the launcher: the system kills them when it
dies, whatever it dies of. When a rank fails the others are told, and end by themselves. A rank that
has not exited after `grace_s` receives SIGTERM, and after twice that SIGKILL, with its whole group.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from types import FrameType
from typing import Any

import zmq

from actorflow.distributed.agreement import listed
from actorflow.distributed.coordinator import Coordinator
from actorflow.distributed.messages import RankKeys, write_keys_fd
from actorflow.environment.settings import logger
from compiler.contract.errors import ActorflowError


def split_cores(cores: Sequence[int], num_ranks: int) -> list[tuple[int, ...]] | None:
    """Divide cores among ranks: each rank gets neighbours, and the first ranks get one core more.

    Return None if there are fewer cores than ranks: the system then schedules the ranks.
    """
    if len(cores) < num_ranks:
        return None
    share, extra = divmod(len(cores), num_ranks)
    # The first `more` ranks have each + 1 cores, so rank r begins after min(r, more) extra ones.
    cuts = [rank * share + min(rank, extra) for rank in range(num_ranks + 1)]
    ordered = sorted(cores)
    return [tuple(ordered[a:b]) for a, b in pairwise(cuts)]


@contextmanager
def on_cores(cores: Sequence[int] | None) -> Iterator[None]:
    """Restrict this thread, and the processes that it starts meanwhile, to these cores."""
    if cores is None:
        yield
        return
    # A child inherits the affinity of the thread that starts it. `preexec_fn` would do it in the
    # child, but is unsafe with threads.
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


MOST_BYTES = 64 << 10
MOST_LINES = 60
_READ_BYTES = 64 << 10


class OutputTail:
    """The last of what comes out of a pipe.

    Args:
        fd: where it comes out; closed by `close`.
    """

    def __init__(self, fd: int) -> None:
        # The one loop reads all pipes; a read that blocks would stop the watch over all ranks.
        os.set_blocking(fd, False)
        self.fd = fd
        self._kept = b""
        self._num_bytes = 0

    def read(self) -> bool:
        """Keep what has come; return whether more may come. Never blocks."""
        try:
            output = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return True
        self._num_bytes += len(output)
        # Only the end is kept: a rank may print for days, and the reason of its failure comes last.
        self._kept = (self._kept + output)[-MOST_BYTES:]
        return bool(output)

    def drain(self) -> None:
        """Keep all that has come. What is under way from processes that live on may be missed."""
        before = -1
        while before != self._num_bytes:
            before = self._num_bytes
            self.read()

    def text(self) -> str:
        """Return the last lines, with a word on how much is left out; "" of blank ones alone."""
        lines = self._kept.decode("utf-8", "replace").splitlines()
        tail = lines[-MOST_LINES:]
        if not any([line.strip() for line in tail]):
            return ""
        is_cut = len(tail) < len(lines) or self._num_bytes > len(self._kept)
        head = [f"... ({self._num_bytes:,} bytes in all)"] if is_cut else []
        return "\n".join([*head, *tail])

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.fd)


_MAIN = "actorflow.cli.launched"


@dataclass(slots=True)
class RankProcess:
    """The process of a rank.

    `tail` is what it prints, None where that goes through. `status` is its exit status as a shell
    tells it, 128 + signal, or None while it lives. `is_forced` says that we ended it.
    `stopped_at_s` is when it was stopped (SIGSTOP), on the clock of `time.monotonic`, or None.
    """

    rank: int
    popen: subprocess.Popen[bytes]
    pidfd: int
    tail: OutputTail | None
    status: int | None = None
    is_forced: bool = False
    stopped_at_s: float | None = None

    def send(self, number: int) -> None:
        """Send a signal, unless the process has exited."""
        if self.status is None:
            with suppress(ProcessLookupError):
                # By pidfd: the number of a process may have been given to another one by now.
                signal.pidfd_send_signal(self.pidfd, number)

    def kill_group(self) -> None:
        """Kill the process and all that it started, before `wait`."""
        # Before the process is reaped: until then nobody else can have its number.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for the exit; return its status, or a negative signal that ended the process."""
        return self.popen.wait()

    def look_for_stop(self, now_s: float) -> None:
        """Note whether the process was stopped, or goes on again, since the last look."""
        flags = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        with suppress(ChildProcessError):
            # Without WEXITED, so the exit status stays for `wait`. Several changes may be queued.
            while (change := os.waitid(os.P_PIDFD, self.pidfd, flags)) is not None:
                self.stopped_at_s = now_s if change.si_code == os.CLD_STOPPED else None


def start_rank(
    keys: RankKeys,
    command: Sequence[str],
    environ: Mapping[str, str],
    cores: tuple[int, ...] | None,
) -> RankProcess:
    """Start a rank's process, in a process group of its own. From the main thread alone.

    The system kills the process when the thread that started it ends: see `actorflow.cli.launched`.
    It reads no terminal: another group than the terminal's would be stopped for it.

    Args:
        keys: its keys, which go through a descriptor.
        command: the script and its arguments.
        environ: its environment.
        cores: which it may use, or None for all.

    Raises OSError where no process can be had.
    """
    # By descriptor: arguments are readable for everybody in /proc, variables for all child
    # processes.
    fd = write_keys_fd(keys)
    prefix = [sys.executable, "-m", _MAIN, str(fd), str(os.getpid())]
    is_shown = keys.rank == 0
    try:
        with on_cores(cores):
            popen = subprocess.Popen(
                [*prefix, *command],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=None if is_shown else subprocess.PIPE,
                stderr=None if is_shown else subprocess.STDOUT,
                pass_fds=(fd,),
                # A group of its own, so that `kill_group` also reaches what the rank started.
                process_group=0,
            )
    finally:
        os.close(fd)
    tail = None
    try:
        if popen.stdout is not None:
            with popen.stdout as output:
                # A copy: `with` closes the pipe's own descriptor, and Popen buffers reads, which
                # hides from poll.
                tail = OutputTail(os.dup(output.fileno()))
        # A pidfd polls readable at exit, and never names another process that got the same number.
        return RankProcess(keys.rank, popen, os.pidfd_open(popen.pid), tail)
    except OSError:  # of descriptors there are no more
        popen.kill()
        popen.wait()
        if tail is not None:
            tail.close()
        raise


def environment_of(
    environ: Mapping[str, str], keys: RankKeys, port: int, num_threads: int
) -> dict[str, str]:
    """Return the environment of a rank; a number of threads that the user set stands."""
    variables = {
        "RANK": str(keys.rank),
        "WORLD_SIZE": str(keys.num_ranks),
        "LOCAL_RANK": str(keys.local_rank),
        "LOCAL_WORLD_SIZE": str(keys.num_local),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if not environ.get("ACTORFLOW_THREADS"):
        variables["ACTORFLOW_THREADS"] = str(num_threads)
    if keys.rank > 0:
        variables["PYTHONUNBUFFERED"] = "1"  # what it printed before it was killed is to be seen
    return {**environ, **variables}


AGAIN_S = 2.0
"""How long after the first a signal counts as a second wish: later than for a rank that trains
(`actorflow.run.stopping.AGAIN_S`), which then takes the copy that it is sent for a second one, too.
"""
START_S = 30.0
"""What the start of a rank's process may take, besides the time that ranks wait."""
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BY_SIGNAL = 128
"""What a shell adds to the number of the signal that ended a process."""


@dataclass(frozen=True, slots=True)
class RankLaunch:
    """What is to be launched.

    Args:
        command: a script and its arguments.
        num_ranks: how many processes run it.
        wait_s: how long ranks wait for each other, 0 for ever.
        grace_s: how long ranks may take to end by themselves after one has failed.
    """

    command: Sequence[str]
    num_ranks: int
    wait_s: float
    grace_s: float


def launch(asked: RankLaunch, environ: Mapping[str, str]) -> int:
    """Run a script as several ranks, from the main thread; return the job's exit status.

    That is the status of the rank that failed first, or 0. What went wrong is printed once, to
    stderr. Raises ActorflowError where processes cannot be started.
    """
    if not hasattr(os, "pidfd_open"):
        raise ActorflowError("'actorflow launch' needs Linux: it watches processes by pidfd")
    return Launcher(asked, environ, Coordinator(asked.num_ranks, asked.wait_s)).run()


class Launcher:
    """One launch. `run` is all of it: `start`, then a `turn` whenever something came or is due.

    A turn reads no clock: what it does follows from the time and the events that it is handed.

    Args:
        asked: what is launched.
        environ: the environment of the ranks, to which their numbers are added.
        coordinator: serves the ranks; closed at the end of `run`.
        start_process: starts a rank's process; see `start_rank`.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        asked: RankLaunch,
        environ: Mapping[str, str],
        coordinator: Coordinator,
        *,
        start_process: Callable[..., RankProcess] = start_rank,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._asked, self._environ = asked, environ
        self._coordinator = coordinator
        self._start_process, self._clock = start_process, clock
        self._ranks: list[RankProcess] = []
        # The handler only appends (atomic under the GIL); the loop reads by index and never
        # removes.
        self._noted: list[tuple[int, float]] = []
        self._num_noted = 0
        self._signals: dict[int, float] = {}
        """Signals that were passed on to ranks, and when each came first (`time.monotonic`)."""
        self._ending_since_s: float | None = None
        self._waiting_since_s: float | None = None
        self._started_s = clock()
        self._poller = zmq.Poller()
        for socket in self._coordinator.sockets:
            self._poller.register(socket, zmq.POLLIN)

    def run(self) -> int:
        """Start all, serve them until the last has ended, and return the exit status."""
        with self._woken_by_signals() as bell:
            self._poller.register(bell, zmq.POLLIN)
            try:
                self.start()
                timeout_ms = self._timeout_ms(self._clock())
                while any([rank.status is None for rank in self._ranks]):
                    events = dict(self._poller.poll(timeout_ms))
                    if bell in events:
                        _empty(bell)
                    # Once a turn: what falls due while it is looked at is done in the next one.
                    timeout_ms = self.turn(events, self._clock())
            finally:
                self._end_all()
        return self._verdict()

    def turn(self, events: Mapping[Any, int], now_s: float) -> int | None:
        """Do what the events and the time ask for; return the milliseconds until more is due.

        `events` are the sockets and descriptors that can be read. None: nothing will be due unless
        something comes.
        """
        # Signals before messages before exits: a rank's last words are served before its death is
        # judged.
        self._pass_on_signals(now_s)
        self._coordinator.serve()
        self._read_output(events)
        self._reap(events, now_s)
        self._look_for_stopped(now_s)
        self._look_for_silent(now_s)
        self._escalate(now_s)
        self._tell_who_runs(now_s)
        return self._timeout_ms(now_s)

    def start(self) -> None:
        """Start the process of each rank. Raises ActorflowError where one cannot be started."""
        cores = sorted(os.sched_getaffinity(0))
        parts = split_cores(cores, self._asked.num_ranks)
        for number in range(self._asked.num_ranks):
            rank_cores = None if parts is None else parts[number]
            keys = self._coordinator.keys(number)
            threads = 1 if rank_cores is None else len(rank_cores)
            environ = environment_of(self._environ, keys, self._coordinator.port, threads)
            try:
                rank = self._start_process(keys, self._asked.command, environ, rank_cores)
            except OSError as error:
                raise ActorflowError(
                    f"rank {number} of {self._asked.num_ranks} cannot be started: {error}; those"
                    " that were are ended again"
                ) from error
            self._ranks.append(rank)
            self._poller.register(rank.pidfd, zmq.POLLIN)
            if rank.tail is not None:
                self._poller.register(rank.tail.fd, zmq.POLLIN)

    @contextmanager
    def _woken_by_signals(self) -> Iterator[int]:
        """Note signals while this is open, and yield what is readable when one came."""
        # O_NONBLOCK: the wakeup write happens in signal context and may not wait for a full pipe.
        read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        before: dict[int, Any] = {}
        woken = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        try:
            number: int
            for number in _PASSED_ON:
                if signal.getsignal(number) != signal.SIG_IGN:  # of nohup, which ranks inherit
                    before[number] = signal.signal(number, self._note)
            # A child that is stopped is told by this one alone; without a handler none is woken.
            before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
            yield read_end
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(woken)
            os.close(read_end)
            os.close(write_end)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.note_signal(number, self._clock())

    def note_signal(self, number: int, came_s: float) -> None:
        """Note a signal to the launcher, for the next turn; callable from a signal handler."""
        self._noted.append((number, came_s))

    def _pass_on_signals(self, now_s: float) -> None:
        while self._num_noted < len(self._noted):
            number, came_s = self._noted[self._num_noted]
            self._num_noted += 1
            if number in self._signals:
                if came_s < self._signals[number] + AGAIN_S:
                    continue  # a copy of one wish: ranks have it
                self._begin_ending(now_s)  # asked for twice: at once
            self._signals.setdefault(number, came_s)
            for rank in self._ranks:
                rank.send(number)
                rank.send(signal.SIGCONT)  # one that is stopped could not end, nor the others

    def _read_output(self, came: Mapping[Any, int]) -> None:
        for rank in self._ranks:
            tail = rank.tail
            if tail is not None and tail.fd in came and not tail.read():
                self._poller.unregister(tail.fd)

    def _reap(self, came: Mapping[Any, int], now_s: float) -> None:
        for rank in self._ranks:
            if rank.status is not None or rank.pidfd not in came:
                continue
            self._poller.unregister(rank.pidfd)
            rank.kill_group()  # what it started and left behind
            code = rank.wait()
            rank.status = _BY_SIGNAL - code if code < 0 else code
            self._waiting_since_s = now_s
            if rank.tail is not None:
                rank.tail.drain()
            if not self._coordinator.has_left(rank.rank):
                # A death by a signal that we did not send explains why others missed this rank; an
                # exit does not.
                is_cause = code < 0 and not rank.is_forced
                self._coordinator.lost(rank.rank, _words(code), explains=is_cause)

    def _look_for_stopped(self, now_s: float) -> None:
        for rank in self._ranks:
            if rank.status is not None:
                continue
            rank.look_for_stop(now_s)
            wait_s, since_s = self._asked.wait_s, rank.stopped_at_s
            if wait_s and since_s is not None and now_s >= since_s + wait_s:
                text = f"was stopped (SIGSTOP) {wait_s:g} s ago and has not continued"
                self._coordinator.lost(rank.rank, text)

    def _silent_until_s(self) -> float | None:
        """Return until when ranks may have said nothing yet; None where none is awaited."""
        wait_s, ranks = self._asked.wait_s, self._ranks
        silent = [r for r in ranks if r.status is None and not self._coordinator.has_heard(r.rank)]
        is_awaited = wait_s and silent and self._coordinator.failure is None
        return self._started_s + wait_s + START_S if is_awaited else None

    def _look_for_silent(self, now_s: float) -> None:
        """Fail ranks that cannot reach the coordinator and do not find that out themselves."""
        until_s = self._silent_until_s()
        if until_s is None or now_s < until_s:
            return
        for rank in self._ranks:
            if rank.status is None and not self._coordinator.has_heard(rank.rank):
                text = f"has not said a word {until_s - self._started_s:g} s after its start"
                self._coordinator.lost(rank.rank, f"{text}, at {self._coordinator.endpoint}")

    def _escalate(self, now_s: float) -> None:
        """Signal ranks that have not exited by themselves after a failure."""
        if self._coordinator.failure is not None:
            self._begin_ending(now_s)
        if self._ending_since_s is None:
            return
        # SIGTERM one grace period after the failure, SIGKILL of the whole group after the second.
        since_s, grace_s = self._ending_since_s, self._asked.grace_s
        for rank in self._ranks:
            if rank.status is None and now_s >= since_s + 2 * grace_s:
                rank.is_forced = True
                rank.kill_group()
            elif rank.status is None and now_s >= since_s + grace_s and not rank.is_forced:
                rank.is_forced = True
                rank.send(signal.SIGTERM)

    def _tell_who_runs(self, now_s: float) -> None:
        """Print once which ranks still run long after others ended: they may work, or hang."""
        since_s, wait_s = self._waiting_since_s, self._asked.wait_s
        if not wait_s or since_s is None or now_s < since_s + wait_s:
            return
        self._waiting_since_s = None
        running = tuple([rank.rank for rank in self._ranks if rank.status is None])
        if running and self._ending_since_s is None:
            runs = "runs" if len(running) == 1 else "run"
            text = f"{listed(running)} still {runs}, {wait_s:g} s after the others have ended"
            print(f"actorflow launch: {text}", file=sys.stderr, flush=True)

    def _begin_ending(self, now_s: float) -> None:
        if self._ending_since_s is None:
            self._ending_since_s = now_s

    def _timeout_ms(self, now_s: float) -> int | None:
        """Return how long to wait for news before something is due that was not at a time."""
        due: list[float] = []
        if self._ending_since_s is not None:
            grace_s = self._asked.grace_s
            due = [self._ending_since_s + grace_s, self._ending_since_s + 2 * grace_s]
        wait_s = self._asked.wait_s
        if wait_s and self._waiting_since_s is not None:
            due.append(self._waiting_since_s + wait_s)
        if (until_s := self._silent_until_s()) is not None:
            due.append(until_s)
        for rank in self._ranks:
            if rank.stopped_at_s is not None and wait_s and rank.status is None:
                due.append(rank.stopped_at_s + wait_s)
        # Only the future: what is due is done in this turn. One ms more, so that it is due on
        # waking.
        delays = [at - now_s for at in due]
        return min([1 + int(s * 1000) for s in delays if s > 0], default=None)

    def _end_all(self) -> None:
        for rank in self._ranks:
            if rank.status is None:
                rank.kill_group()
                # An exit status is lost, as we ended it.
                rank.status = _BY_SIGNAL - min(0, rank.wait())
            os.close(rank.pidfd)
            if rank.tail is not None:
                rank.tail.close()
        self._coordinator.close()

    def _verdict(self) -> int:
        failure = self._coordinator.failure
        if failure is None:
            return self._late_verdict()
        rank = self._ranks[failure.rank]
        # A status that our own signal caused says nothing; 0 would call a failed job a success.
        by_itself = rank.status if rank.status and not rank.is_forced else 1
        # The user asked for this end, so it is no error to print.
        if by_itself - _BY_SIGNAL in self._signals:
            logger.info("%s, as requested of the launcher", failure.told)
            return by_itself
        if rank.tail is not None and (text := rank.tail.text()):
            print(f"--- what rank {rank.rank} printed last:\n{text}\n---", file=sys.stderr)
        head = f"actorflow launch: {failure.told}"
        if failure.shown:
            head = f"actorflow launch: rank {failure.rank} of {len(self._ranks)} failed"
            head += f" in {failure.op}" if failure.op else ""
            head += f" ({failure.line})" if failure.line else ""
            head += f":\n{failure.shown.rstrip()}"
        print(head, file=sys.stderr)
        return by_itself

    def _late_verdict(self) -> int:
        """Return the exit status where all scripts ended well, or were stopped."""
        for rank in self._ranks:
            if rank.status:
                if rank.status - _BY_SIGNAL not in self._signals:
                    ending = _words(rank.popen.returncode)
                    text = f"rank {rank.rank} {ending}, after its script had ended well"
                    print(f"actorflow launch: {text}", file=sys.stderr)
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


def _empty(bell: int) -> None:
    with suppress(BlockingIOError):
        # Drained whole: several signals may have left a byte each, and one poll answers all.
        while os.read(bell, 4096):
            pass
