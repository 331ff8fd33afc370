"""The thread of whoever calls `step`, for the time in which it runs launches itself."""

from __future__ import annotations

# What `signal` wraps: its enums cost ten times as much as the calls, and this is part of each step.
import _signal  # type: ignore[import-not-found]  # typeshed has no stub
import threading
from collections.abc import Callable
from contextvars import Context
from types import FrameType
from typing import Any

import numpy as np

from actors.kernels.common.host_memory import quiet_floating_point

_ARE_IN_CONTEXTS = np.lib.NumpyVersion(np.__version__) >= "2.0.0"
"""Whether numpy keeps how it treats overflow with the context, and not with the thread."""

_MAIN = threading.main_thread()


class CallersThread:
    """Runs launches on the caller's thread, which has its own settings again after that.

    numpy is as silent meanwhile as on a thread of a run. On the main thread a ^C that comes
    meanwhile is handled after that: it would tear a step in two. One thread at a time calls it.
    """

    __slots__ = ("_came", "_context")

    def __init__(self) -> None:
        self._context = Context()
        self._came: list[FrameType | None] = []
        if _ARE_IN_CONTEXTS:
            self._context.run(quiet_floating_point)

    def __call__(self, serve: Callable[[], bool]) -> bool:
        """Return what `serve` does. Raises what the handler of a ^C does."""
        if threading.current_thread() is not _MAIN:
            return self._quietly(serve)
        handler: Any = _signal.getsignal(_signal.SIGINT)
        if not callable(handler):  # nothing of Python's would come in between
            return self._quietly(serve)
        _signal.signal(_signal.SIGINT, self._note)
        try:
            return self._quietly(serve)
        finally:
            _signal.signal(_signal.SIGINT, handler)
            if self._came:
                handler(_signal.SIGINT, self._came.pop())

    def _quietly(self, serve: Callable[[], bool]) -> bool:
        if _ARE_IN_CONTEXTS:
            return self._context.run(serve)
        errors, buffer_size = np.geterr(), np.getbufsize()
        quiet_floating_point()
        try:
            return serve()
        finally:
            np.seterr(**errors)
            np.setbufsize(buffer_size)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._came[:] = [frame]
