"""Starting the process of a rank: what it inherits, and what it finds in its environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actorflow.ranks.cores import on_cores
from actorflow.ranks.keys import RankKeys, hand_over
from actorflow.ranks.output import OutputTail

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
    fd = hand_over(keys)
    own = [sys.executable, "-m", _MAIN, str(fd), str(os.getpid())]
    is_shown = keys.rank == 0
    try:
        with on_cores(cores):
            popen = subprocess.Popen(
                [*own, *command],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=None if is_shown else subprocess.PIPE,
                stderr=None if is_shown else subprocess.STDOUT,
                pass_fds=(fd,),
                process_group=0,
            )
    finally:
        os.close(fd)
    tail = None
    try:
        if popen.stdout is not None:
            with popen.stdout as output:
                tail = OutputTail(os.dup(output.fileno()))
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
    own = {
        "RANK": str(keys.rank),
        "WORLD_SIZE": str(keys.num_ranks),
        "LOCAL_RANK": str(keys.rank),
        "LOCAL_WORLD_SIZE": str(keys.num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if not environ.get("ACTORFLOW_THREADS"):
        own["ACTORFLOW_THREADS"] = str(num_threads)
    if keys.rank > 0:
        own["PYTHONUNBUFFERED"] = "1"  # what it printed before it was killed is to be seen
    return {**environ, **own}
