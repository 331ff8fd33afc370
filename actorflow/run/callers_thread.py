"""The thread of whoever calls `step`, for the time in which it runs launches itself."""

from __future__ import annotations

# What `signal` wraps: its enums cost ten times as much as the calls, and this is part of each step.
import _signal  # type: ignore[import-not-found]  # typeshed has no stub
import threading
from collections.abc import Callable
from contextvars import Context
from typing import Any

import numpy as np

from actors.kernels.common.host_memory import quiet_floating_point

_ARE_IN_CONTEXTS = np.lib.NumpyVersion(np.__version__) >= "2.0.0"
"""Whether numpy keeps how it treats overflow with the context, and not with the thread."""

_MAIN = threading.main_thread()

_SIGNALS = sorted([number for number in _signal.valid_signals() if number < 32])
"""All but those of real time: each is asked for its handler in every step."""


class CallersThread:
    """Runs launches on the caller's thread, which has its own settings again after that.

    numpy is as silent meanwhile as on a thread of a run. On the main thread a signal that comes
    meanwhile, ^C or any other with a handler of Python, is handled in `settle`: what handlers raise
    would tear a step in two. One thread at a time calls it.
    """

    __slots__ = ("_came", "_context")

    def __init__(self) -> None:
        self._context = Context()
        self._came: set[int] = set()
        if _ARE_IN_CONTEXTS:
            self._context.run(quiet_floating_point)

    def __call__(self, serve: Callable[[], bool]) -> bool:
        """Return what `serve` does."""
        if threading.current_thread() is not _MAIN:
            return self._quietly(serve)
        handlers = [(n, h) for n in _SIGNALS if callable(h := _signal.getsignal(n))]
        try:
            for number, _ in handlers:
                _signal.signal(number, self._note)
            return self._quietly(serve)
        finally:
            _restore(handlers)

    def settle(self) -> None:
        """Handle the signals that came, when the plan can be asked for anything again.

        Raises what their handlers do, of which none is left out.
        """
        if self._came and threading.current_thread() is _MAIN:
            try:
                _signal.raise_signal(self._came.pop())
            finally:
                self.settle()

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

    def _note(self, number: int, frame: object) -> None:
        self._came.add(number)


def _restore(handlers: list[tuple[int, Any]]) -> None:
    """Set handlers again, also where one that is set raises before the others are."""
    if handlers:
        try:
            _signal.signal(*handlers.pop())
        finally:
            _restore(handlers)
