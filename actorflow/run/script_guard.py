"""Errors of a run in a script without `if __name__ == "__main__":`, whose workers import it again.

A process that multiprocessing starts by "spawn" or "forkserver" imports the script that started it,
under the name `__mp_main__`. A run at the top of the script begins again there, where Python starts
no further process; so the worker ends, and its pool is broken. The run in the worker and the one
that waits for it get a note each that names the line.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from types import FrameType

from actorflow.tensor.tracer import shown_path

_WORKER = "__mp_main__"
"""The name of a script that a worker imports, as `multiprocessing.spawn` gives it."""

_LAUNCHERS = {f"multiprocessing.popen_{x}" for x in ("spawn_posix", "spawn_win32", "forkserver")}
"""Modules that Python imports once the first process is started that imports the script."""

_ENDS_OF_WORKERS = (BrokenExecutor, EOFError, ConnectionError)
"""What those raise who wait for a worker that has ended: of a pool, of a pipe, of a socket."""


@contextmanager
def guard_noted() -> Iterator[None]:
    """Add a note to an error of a run that began again, or whose workers begin it again."""
    try:
        yield
    except Exception as error:
        note = _note_on(error)
        if note:
            error.add_note(note)
        raise


def _note_on(error: Exception) -> str:
    """Return what an error does not say of the script; "" where the script is not its cause."""
    frame = _script_frame()
    if frame is None:
        return ""
    line = f"{shown_path(frame.f_code.co_filename)}:{frame.f_lineno}"
    mend = 'Put the call into a function, and call that under if __name__ == "__main__":'
    if frame.f_globals["__name__"] == _WORKER:
        return (
            f"{line} ran in a worker process, which imports the script that started it; expected"
            f" only definitions there. {mend}"
        )
    starts_workers = not _LAUNCHERS.isdisjoint(sys.modules)
    if isinstance(error, _ENDS_OF_WORKERS) and starts_workers and not _is_guarded(frame):
        return (
            f"{line} is run by whoever imports the script, as a worker process does that was"
            " started by 'spawn' or 'forkserver': the run began again there, and the worker ended."
            f" {mend}"
        )
    return ""


def _script_frame() -> FrameType | None:
    """Return where the top of the script is at: the line that led here; None on other ways."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        is_script = frame.f_globals.get("__name__") in ("__main__", _WORKER)
        if is_script and frame.f_code.co_name == "<module>":
            return frame
        frame = frame.f_back
    return None


def _is_guarded(frame: FrameType) -> bool:
    """Return whether a line of a script stands under a test of `__name__`, or cannot be read."""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    try:
        statements = ast.parse("".join(lines)).body
    except SyntaxError:  # the file has changed since it was imported
        return True
    here = [s for s in statements if s.lineno <= frame.f_lineno <= (s.end_lineno or s.lineno)]
    tests = [node for s in here if isinstance(s, ast.If) for node in ast.walk(s.test)]
    return not here or "__name__" in [node.id for node in tests if isinstance(node, ast.Name)]
