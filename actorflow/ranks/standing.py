"""Where the threads of this process are that run code of the user, for a rank that hangs."""

from __future__ import annotations

import sys
import threading
import traceback
from types import FrameType

from actorflow.trace.code import is_users

_MOST_FRAMES = 8
"""Of a thread: the innermost ones say why it does not go on."""
_MOST_THREADS = 8


def threads_at() -> str:
    """Return the calls of threads that are in the user's code, and of the main thread, as text.

    The main thread comes last: while a plan runs it only waits, and what hangs is a function of the
    user's that we call, such as `on_step` or a data source. Of each the innermost calls are told,
    and the user's innermost one.
    """
    frames, main = sys._current_frames(), threading.main_thread()
    threads = [t for t in threading.enumerate() if t is not threading.current_thread()]
    others = [t for t in threads if t is not main and _users_call(frames.get(t.ident or 0))]
    told = [_told(t, frames[t.ident or 0]) for t in others[:_MOST_THREADS]]
    if main in threads and main.ident in frames:
        told.append(_told(main, frames[main.ident]))
    return "\n".join(told)


def _users_call(frame: FrameType | None) -> FrameType | None:
    """Return the innermost call of the user's code, or None."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _told(thread: threading.Thread, frame: FrameType) -> str:
    stack = traceback.extract_stack(frame)
    shown = stack[-_MOST_FRAMES:]
    users = [call for call in stack if is_users(call.filename)]
    if users and users[-1] not in shown:
        shown = traceback.StackSummary.from_list([users[-1], *shown])
    return f"thread {thread.name!r}:\n{''.join(traceback.format_list(shown))}"
