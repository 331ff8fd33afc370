"""The Python calls that other threads are in, read without touching their frames.

To walk `frame.f_back` of a thread that runs can crash the process: CPython 3.11 makes each frame
object as it is asked for; this may start the garbage collector, a finalizer of Python code lets
the thread go on, and the frame is gone before its object is filled in. `faulthandler` writes the
calls of all threads down in one piece, makes no object and keeps the interpreter's lock.
"""

from __future__ import annotations

import faulthandler
import os
import re
import tempfile
from typing import IO, NamedTuple

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_CALL = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


MAX_CALLS = 100
"""How many calls of a thread are told, and of how many threads: the limits of `faulthandler`."""


class StackCall(NamedTuple):
    """A call that a thread is in; `line` is 0 where it is unknown."""

    file: str
    line: int
    function: str


def thread_stacks() -> dict[int, tuple[StackCall, ...]]:
    """Return the calls of each thread by its `ident`, innermost first, as they are at one moment.

    The innermost `MAX_CALLS` calls of the newest `MAX_CALLS` threads.
    """
    with _scratch_file() as file:
        faulthandler.dump_traceback(file.fileno(), all_threads=True)
        file.seek(0)
        return _parsed(file.read().decode("ascii", "replace"))


def _scratch_file() -> IO[bytes]:
    # Memory where the system has such files: a hung disk may be what is looked into.
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("actorflow stacks"), "w+b")
    return tempfile.TemporaryFile()


def _parsed(text: str) -> dict[int, tuple[StackCall, ...]]:
    """Return what `faulthandler` wrote, by thread."""
    stacks: dict[int, list[StackCall]] = {}
    calls: list[StackCall] = []
    for row in text.splitlines():
        if thread := _THREAD.match(row):
            calls = stacks.setdefault(int(thread[1], 16), [])
        elif call := _CALL.fullmatch(row):
            file, line, function = call.groups()
            number = int(line) if line.isdigit() else 0
            calls.append(StackCall(_unescaped(file), number, _unescaped(function)))
    return {ident: tuple(calls) for ident, calls in stacks.items()}


def _unescaped(text: str) -> str:
    """Return a name with the characters that `faulthandler` writes as escapes."""
    return _ESCAPE.sub(lambda m: chr(int(m[1] or m[2] or m[3], 16)), text)
