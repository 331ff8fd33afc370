"""Where progress text goes. It is never the reason for which a run ends, or waits.

A stream may be full, closed, replaced or not there, its reader may be gone or asleep, its encoding
may lack a letter. The first of these troubles is said in the log; the text is lost, and the run
goes on.
"""

from __future__ import annotations

import io
import os
import select
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from actorflow.logs import logger, once

_PIECE = 400
"""Letters written at once: at 10 bytes each they fit the 4,096 that a ready pipe takes whole."""

_KEPT = 256
"""Pieces that wait for a reader who is asleep; the oldest are dropped first."""


class Console:
    """Writes text to the stream that `stream` returns at that moment, such as `sys.stdout`.

    Nobody waits for a reader: what finds no room is dropped, or kept until there is. Belongs to one
    thread at a time.
    """

    def __init__(self, stream: Callable[[], Any]) -> None:
        self._stream = stream
        self._waiting: deque[str] = deque(maxlen=_KEPT)
        self._tell_trouble = once(logger.warning)

    def is_terminal(self) -> bool:
        """Whether the stream of this moment is a terminal."""
        try:
            return bool(self._stream().isatty())
        except Exception:  # a stream is whatever somebody put there
            return False

    def write(self, text: str, *, is_kept: bool) -> None:
        """Write a text; where there is no room for it now, keep it for the next call or drop it."""
        try:
            self._send()  # what waits comes first
            if is_kept or (not self._waiting and _has_room(self._stream())):
                self._waiting.extend(_pieces(text))
                self._send()
        except Exception as error:  # whatever a foreign stream raises
            self._waiting.clear()
            self._tell_trouble(f"progress cannot be written ({error}); the run goes on without it")

    def _send(self) -> None:
        while self._waiting:
            stream = self._stream()
            if not _has_room(stream):
                return
            if stream is not None:
                _write(stream, self._waiting[0])
            self._waiting.popleft()


def _pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), _PIECE):
        yield text[start : start + _PIECE]


def _has_room(stream: Any) -> bool:
    """Whether a piece can be written, or has nowhere to go, without waiting for who reads it."""
    try:
        fd = stream.fileno()
    except Exception:  # no file at all, or no stream
        return True
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))  # a broken one is ready too: to fail


def _write(stream: Any, text: str) -> None:
    """Write so that a failure leaves nothing behind that Python would fail on again at exit."""
    fd = _plain_file(stream)
    if fd is None:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            stream.write(text.encode("ascii", "backslashreplace").decode())
        stream.flush()
        return
    stream.flush()  # what the program itself has printed comes first
    data = memoryview(text.encode(stream.encoding, "backslashreplace"))
    while data:
        data = data[os.write(fd, data) :]


def _plain_file(stream: Any) -> int | None:
    """Return the descriptor of a text stream as Python makes it, or None for any other."""
    if type(stream) is not io.TextIOWrapper:
        return None
    buffer: Any = stream.buffer
    raw = buffer.raw if type(buffer) is io.BufferedWriter else buffer
    return raw.fileno() if type(raw) is io.FileIO else None
