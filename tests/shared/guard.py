"""A process that outlives a test run, and ends the programs that the run leaves.

A run marks its environment, so that all programs that its tests start, and theirs, are marked. The
guard waits for the end of a pipe that the run holds open, which comes however the run ends, then
kills what is marked. Linux only, where /proc tells the environment of a process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import uuid
from pathlib import Path

MARK = "TESTS_OF_RUN"
"""A variable that programs of tests inherit. Not of ours: unknown ACTORFLOW_ names are reported."""

ROUNDS = 20
"""Looks for programs, each of which may find what another had just started."""


def start() -> int | None:
    """Mark this process and start its guard; return the pipe's end, which has to stay open.

    None where a guard watches already, as in the workers of a run, and where there is no /proc.
    """
    if MARK in os.environ or not Path("/proc/self/environ").exists():
        return None
    mark = uuid.uuid4().hex
    read_end, write_end = os.pipe()
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    os.posix_spawn(  # no object of subprocess, which would miss its end
        sys.executable,
        [sys.executable, __file__, mark],
        environment,
        file_actions=[(os.POSIX_SPAWN_DUP2, read_end, 0)],
        setsid=True,  # ^C in a terminal is for the run
    )
    os.close(read_end)
    os.environ[MARK] = mark
    return write_end


def marked(mark: str) -> list[int]:
    """Return the processes whose environment at their start had the mark."""
    variable, pids = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):  # it ended, or is another user's
                if variable in (folder / "environ").read_bytes().split(b"\0"):
                    pids.append(int(folder.name))
    return pids


def kill_marked(mark: str) -> None:
    """Kill them until none is left."""
    for _ in range(ROUNDS):
        processes = marked(mark)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if not processes:
            return


if __name__ == "__main__":
    sys.stdin.buffer.read()
    kill_marked(sys.argv[1])
