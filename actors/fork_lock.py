"""Locks of the process, and what a forked child makes of them."""

from __future__ import annotations

import os
import threading
import weakref


def forkable_lock() -> threading.RLock:
    """Return a reentrant lock that a forked child finds open, unless the forking thread held it.

    Only that thread lives on in the child; whoever else held the lock would hold it for ever there.
    It is a lock of C: in an `__enter__` of Python's an interrupt could come between the lock and
    the `with` that lets go of it, and nobody would.
    """
    lock = threading.RLock()
    _all.add(lock)
    return lock


_all: weakref.WeakSet[threading.RLock] = weakref.WeakSet()


def _open_all_in_child() -> None:
    for lock in list(_all):
        if not lock._is_owned():  # type: ignore[attr-defined]  # what Condition asks too
            lock._at_fork_reinit()  # type: ignore[attr-defined]  # what threading does to its own


os.register_at_fork(after_in_child=_open_all_in_child)
