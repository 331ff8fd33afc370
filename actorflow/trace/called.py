"""Which of the user's functions a trace has called: what a walk over names could not follow shows.

A walk finds a function by the names in the code. One that is fetched by a text, `globals()[name]`
or `getattr(module, name)`, or that comes out of an object which is not looked into, is found by
watching the trace itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

from actorflow.trace.code import is_ours, is_users, is_users_module, parts_of

Called = dict[int, tuple[CodeType, str, str]]
"""Of the functions that were called: code, module, and the file of who called first; by `id` of the
code, which is kept. (To hash a code object takes longer than the call.)"""

_NOT_OF_THE_TRACE = frozenset(("<module>", "__del__", "__repr__", "__str__"))
"""Code that runs for other reasons: an import, an object that goes, a text for people."""


@contextmanager
def calls_watched() -> Iterator[Called | None]:
    """Yield what gets all functions that this thread calls.

    None under a debugger or a measure of coverage: only one at a time can watch.
    """
    called: Called = {}
    if sys.gettrace() is not None:
        yield None
        return

    def note(frame: FrameType, event: str, argument: object) -> None:
        code, caller = frame.f_code, frame.f_back
        if id(code) not in called and caller is not None:
            module = str(frame.f_globals.get("__name__"))
            called[id(code)] = (code, module, caller.f_code.co_filename)

    sys.settrace(note)
    try:
        yield called
    finally:
        if sys.gettrace() is note:  # and no debugger that a breakpoint has started
            sys.settrace(None)


def not_read(called: Called, read: list[CodeType]) -> list[str]:
    """Return the functions of the user that were called and not read, each with its line.

    What we call ourselves is read, or belongs to an op and not to the job.
    """
    known = {part for code in read for part in parts_of(code)}
    missed = [
        f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
        for code, module, caller in called.values()
        if is_users(code.co_filename) and is_users_module(module) and not is_ours(caller)
        if code not in known and code.co_name not in _NOT_OF_THE_TRACE
    ]
    return sorted(missed)
