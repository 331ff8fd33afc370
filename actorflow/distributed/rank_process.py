"""The processes of ranks on one host: their cores, what they print, how they start and end.

`start_rank` starts one, on its share of the cores. `RankProcess` watches it by pidfd and signals
it; `OutputTail` keeps the last of what it prints. Nothing here waits, but for a process that was
killed or has exited.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from actorflow.distributed.messages import RankKeys, write_keys_fd
from actorflow.environment.settings import Settings


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


MOST_BYTES = 60 << 10
"""So that it fits a text of a message."""
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
        return _last_lines(self._kept, self._num_bytes)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.fd)


class LogTail:
    """The last of what a rank writes to a file, in place of `OutputTail`.

    The rank writes to the file itself: on a disk that hangs, it waits, and who watches it does not.

    Args:
        file: the file, opened for reading; what is in it already is not counted.
    """

    def __init__(self, file: Path) -> None:
        self.fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        self._begin = os.fstat(self.fd).st_size
        self._kept = b""
        self._num_bytes = 0

    def read(self) -> bool:
        """Return that nothing is to be awaited: a file can always be read."""
        return False

    def drain(self) -> None:
        """Keep the end of what was written."""
        end = os.fstat(self.fd).st_size
        self._num_bytes = end - self._begin
        self._kept = os.pread(self.fd, MOST_BYTES, max(self._begin, end - MOST_BYTES))

    def text(self) -> str:
        """Return the last lines, with a word on how much is left out; "" of blank ones alone."""
        return _last_lines(self._kept, self._num_bytes)

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)


def _last_lines(kept: bytes, num_bytes: int) -> str:
    lines = kept.decode("utf-8", "replace").splitlines()
    tail = lines[-MOST_LINES:]
    if not any([line.strip() for line in tail]):
        return ""
    is_cut = len(tail) < len(lines) or num_bytes > len(kept)
    head = [f"... ({num_bytes:,} bytes in all)"] if is_cut else []
    return "\n".join([*head, *tail])


_MAIN = "actorflow.cli.launched"


@dataclass(slots=True)
class RankProcess:
    """The process of a rank.

    `tail` is what it prints, None where that goes through. `code` is its exit status, or a negative
    signal that ended it, or None while it lives. `is_forced` says that we ended it, `is_stopped`
    that it is stopped (SIGSTOP).
    """

    rank: int
    popen: subprocess.Popen[bytes]
    pidfd: int
    tail: OutputTail | LogTail | None
    code: int | None = None
    is_forced: bool = False
    is_stopped: bool = False

    def send(self, number: int) -> None:
        """Send a signal, unless the process has exited."""
        if self.code is None:
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

    def look_for_stop(self) -> None:
        """Note whether the process was stopped, or goes on again, since the last look."""
        flags = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        with suppress(ChildProcessError):
            # Without WEXITED, so the exit status stays for `wait`. Several changes may be queued.
            while (change := os.waitid(os.P_PIDFD, self.pidfd, flags)) is not None:
                self.is_stopped = change.si_code == os.CLD_STOPPED


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

    Raises OSError where no process can be had, or no file for its output, and SettingsError where
    the environment is wrong.
    """
    is_shown = keys.rank == 0
    log = None if is_shown else _log_of(keys, environ)
    tail: OutputTail | LogTail | None = None if log is None else LogTail(log)
    # By descriptor: arguments are readable for everybody in /proc, variables for all child
    # processes.
    fd = write_keys_fd(keys.to_bytes())
    prefix = [sys.executable, "-m", _MAIN, str(fd), str(os.getpid())]
    try:
        with on_cores(cores), _written_to(log) as output_fd:
            popen = subprocess.Popen(
                [*prefix, *command],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=None if is_shown else output_fd,
                stderr=None if is_shown else subprocess.STDOUT,
                pass_fds=(fd,),
                # A group of its own, so that `kill_group` also reaches what the rank started.
                process_group=0,
            )
    except OSError:
        if tail is not None:
            tail.close()
        raise
    finally:
        os.close(fd)
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


def _log_of(keys: RankKeys, environ: Mapping[str, str]) -> Path | None:
    """Return the file for what a rank prints, with a line that says whose it is; None for none."""
    folder = Settings.from_env(environ).log_dir
    if folder is None:
        return None
    file = folder / f"rank-{keys.rank}.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as log:
        host, epoch = socket.gethostname(), keys.epoch
        log.write(f"--- rank {keys.rank} of {keys.num_ranks} on {host}, start {epoch}\n")
    return file


@contextmanager
def _written_to(log: Path | None) -> Iterator[int]:
    """Yield what Popen takes for the output of a process: a descriptor of the file, or a pipe."""
    if log is None:
        yield subprocess.PIPE
        return
    with log.open("ab") as file:  # its own writes and those of its child processes, each whole
        yield file.fileno()


def environment_of(
    environ: Mapping[str, str], keys: RankKeys, num_threads: int, link: str = ""
) -> dict[str, str]:
    """Return the environment of a rank, whose coordinator is at the endpoint of its keys.

    `link` is the ACTORFLOW_LINK of a host that states none.
    """
    address, _, port = keys.endpoint.removeprefix("tcp://").rpartition(":")
    variables = {
        "RANK": str(keys.rank),
        "WORLD_SIZE": str(keys.num_ranks),
        "LOCAL_RANK": str(keys.local_rank),
        "LOCAL_WORLD_SIZE": str(keys.num_local),
        "MASTER_ADDR": address.strip("[]"),
        "MASTER_PORT": port,
        "ACTORFLOW_THREADS": str(num_threads),
        "ACTORFLOW_EPOCH": str(keys.epoch),
        "ACTORFLOW_LAUNCH": keys.launch,
    }
    if link and not environ.get("ACTORFLOW_LINK"):
        variables["ACTORFLOW_LINK"] = link
    if keys.rank > 0:
        variables["PYTHONUNBUFFERED"] = "1"  # what it printed before it was killed is to be seen
    return {**environ, **variables}
