"""The process of a rank: `python -m actorflow.cli.launched FD PARENT SCRIPT.py [ARGS]`.

`actorflow launch` starts it; FD holds the keys of the rank, PARENT is the launcher. It dies with
the launcher, however that ends. An error of the script is told to the launcher, which shows it
once, instead of being printed here.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import sys
import threading
from typing import NoReturn

from actorflow.cli.launch import run_script, tell_error
from actorflow.distributed.member import RankClient, init_rank
from actorflow.distributed.messages import RankKeys, read_keys_fd

_PR_SET_PDEATHSIG = 1
_CLEAN = (None, 0, *[128 + s for s in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)])
"""Exit statuses of a script that ended well, or that a signal ended cleanly."""


def main(arguments: list[str]) -> int:
    """Run a script as a rank, and return its exit status."""
    fd, parent, script, *rest = arguments
    die_with(int(parent))
    member = init_rank(RankKeys.from_bytes(read_keys_fd(int(fd))))
    try:
        member.learn_hosts()
        run_script(script, rest)
    except SystemExit as ended:
        if ended.code in _CLEAN:
            _leave(member)
        raise
    except Exception as error:
        return _failed(member, error)
    _leave(member)
    return 0


def _leave(member: RankClient) -> None:
    # As Python itself does at its end, but before the others are told that nothing more comes.
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it is closed
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    member.leave()


def _failed(member: RankClient, error: Exception) -> int:
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        tell_error(error)
    # Printed here only if the launcher has not heard it, so that the error is shown once.
    if not member.fail(error, shown=stderr.getvalue()) and sys.stderr is not None:
        sys.stderr.write(stderr.getvalue())
    return 1


def die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends; exit at once if it has ended."""
    # The kernel ties this to the parent's thread that forked, which is the launcher's main thread.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # After prctl: a parent that ended before it sends no signal any more.
    if os.getppid() != parent:
        _quit()


def _quit() -> NoReturn:
    os._exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
