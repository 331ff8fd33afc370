"""What a rank printed last: kept, and shown only where that rank is the first to fail."""

from __future__ import annotations

import os

MOST_BYTES = 64 << 10
MOST_LINES = 60
_READ_BYTES = 64 << 10


class OutputTail:
    """The last of what comes out of a pipe.

    Args:
        fd: where it comes out; closed by `close`.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._kept = b""
        self._num_bytes = 0

    def read(self) -> bool:
        """Keep what has come; return whether more may come. Never blocks."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return True
        self._num_bytes += len(data)
        self._kept = (self._kept + data)[-MOST_BYTES:]
        return bool(data)

    def drain(self) -> None:
        """Keep all that has come. What is under way from processes that live on may be missed."""
        before = -1
        while before != self._num_bytes:
            before = self._num_bytes
            self.read()

    def text(self) -> str:
        """Return the last lines, with a word on how much is left out; "" of blank ones alone."""
        lines = self._kept.decode("utf-8", "replace").splitlines()
        shown = lines[-MOST_LINES:]
        if not any([line.strip() for line in shown]):
            return ""
        is_cut = len(shown) < len(lines) or self._num_bytes > len(self._kept)
        head = [f"... ({self._num_bytes:,} bytes in all)"] if is_cut else []
        return "\n".join([*head, *shown])

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.fd)
