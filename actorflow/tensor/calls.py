"""Which functions a trace calls, recorded without watching what a tensor operation does inside.

A walk over the code finds a function by its name. One that is fetched by a text, or comes out of an
object that is not looked into, is found by recording the calls of the trace itself.

Python's trace hook slows every instruction of the thread down, not calls alone: on Python 3.11 a
trace takes 2.2 times as long with it. Most of those instructions are ours, between the call of an
operation and its node in the graph, where no function of the user is called. So the recording
pauses there (`pause_recording`), unless the op is the user's own, whose types may be inferred by
functions of theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import cast

Called = dict[int, tuple[CodeType, str, str]]
"""Of the functions that were called: code, module, and the file of who called first; by `id` of the
code, which is kept. (To hash a code object takes longer than the call.)"""

Recorder = Callable[[FrameType, str, object], None]
"""A trace hook that records calls."""


@contextmanager
def record_calls() -> Iterator[Called | None]:
    """Yield what gets all functions that this thread calls, but for those of `pause_recording`.

    None under a debugger or a measure of coverage: only one at a time can watch.
    """
    called: Called = {}
    if sys.gettrace() is not None:
        yield None
        return
    recorder = _recorder_into(called)
    sys.settrace(recorder)
    try:
        yield called
    finally:
        if sys.gettrace() is recorder:  # and no debugger that a breakpoint has started
            sys.settrace(None)


def _recorder_into(called: Called) -> Recorder:
    def note(frame: FrameType, event: str, argument: object) -> None:
        # Called for each call of this thread; without a return value it is not called for lines,
        # too.
        code, caller = frame.f_code, frame.f_back
        if id(code) not in called and caller is not None:
            module = str(frame.f_globals.get("__name__"))
            called[id(code)] = (code, module, caller.f_code.co_filename)

    return note


_CODE_OF_RECORDERS = _recorder_into({}).__code__


def pause_recording() -> Recorder | None:
    """Stop recording calls until `sys.settrace` gets what is returned; None: nothing to resume.

    A debugger or a measure of coverage goes on.
    """
    hook = sys.gettrace()
    if hook is None or getattr(hook, "__code__", None) is not _CODE_OF_RECORDERS:
        return None
    sys.settrace(None)
    return cast("Recorder", hook)
