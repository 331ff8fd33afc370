"""A lock of the process, and what a forked child makes of it."""

from __future__ import annotations

import os
import threading
import weakref


class ForkLock:
    """A reentrant lock that a forked child finds open, unless the forking thread itself held it.

    Only that thread lives on in the child; whoever else held the lock would hold it for ever there.
    """

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _open_in_child(self) -> None:
        if not self._lock._is_owned():  # type: ignore[attr-defined]  # what Condition asks too
            self._lock = threading.RLock()


_all: weakref.WeakSet[ForkLock] = weakref.WeakSet()


def _open_all_in_child() -> None:
    for lock in list(_all):
        lock._open_in_child()


os.register_at_fork(after_in_child=_open_all_in_child)
