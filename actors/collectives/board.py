"""A rank's board: what all others look at while they meet.

First the word of who gave the run up, with the reason of the rank whose board it is; then, for each
lane, the two lines of the rank (`Line`); then two places aside for each lane.
"""

from __future__ import annotations

import ctypes
import os

from actors.collectives.native import CameTo, Line
from actors.collectives.segments import Segment

ASIDE_BYTES = 16 << 10
"""Operands up to this size are copied aside: one arrival, which costs as much as copying them."""

_AT_FAULT_AT, _REASON_AT, _LINES_AT = 32, 64, 4096
_REASON_BYTES = _LINES_AT - _REASON_AT
_LINE_BYTES = ctypes.sizeof(Line)


class Board:
    """A board in a segment of this process; `num_lanes` is that of the rank."""

    __slots__ = ("_num_lanes", "_segment")

    def __init__(self, segment: Segment, num_lanes: int) -> None:
        self._segment, self._num_lanes = segment, num_lanes

    @property
    def num_lanes(self) -> int:
        """How many lanes it has."""
        return self._num_lanes

    @staticmethod
    def size_bytes(num_lanes: int) -> int:
        """Return the bytes of a board."""
        return _LINES_AT + num_lanes * (_LINE_BYTES + 2 * ASIDE_BYTES)

    @property
    def mark(self) -> int:
        """The address of the word of who gave up first: 0, or one more than the rank."""
        return self._segment.address

    def marked_by(self) -> int | None:
        """Return who gave up first."""
        number = ctypes.c_uint32.from_address(self.mark).value
        return number - 1 if number else None

    def line(self, lane: int) -> int:
        """Return the address of the rank's line of a lane."""
        return self._segment.address + _LINES_AT + lane * _LINE_BYTES

    def aside(self, lane: int) -> int:
        """Return the address of the two places aside of a lane."""
        lines = _LINES_AT + self._num_lanes * _LINE_BYTES
        return self._segment.address + lines + lane * 2 * ASIDE_BYTES

    def came_to(self, lane: int, turn: int) -> CameTo:
        """Return what the rank said of an arrival; `turn` is the arrival's number, modulo 2."""
        found: CameTo = Line.from_address(self.line(lane)).came_to[turn]
        return found

    def write_reason(self, text: str, at_fault: int) -> None:
        """Say why this rank gives up, and whose fault that is, before it leaves its mark."""
        ctypes.c_uint32.from_address(self._segment.address + _AT_FAULT_AT).value = at_fault
        # Names of files may hold what is no text: a reason must not be lost for it.
        data = text.encode("utf-8", "replace")[: _REASON_BYTES - 1]
        ctypes.memmove(self._segment.address + _REASON_AT, data + b"\0", len(data) + 1)

    def at_fault(self) -> int:
        """Return the rank whose fault the rank's giving up is."""
        return ctypes.c_uint32.from_address(self._segment.address + _AT_FAULT_AT).value

    def reason(self) -> str:
        """Return what the rank wrote."""
        at = self._segment.address + _REASON_AT
        return ctypes.string_at(at, _REASON_BYTES).partition(b"\0")[0].decode("utf-8", "replace")


def watched(pid: int) -> int:
    """Return a descriptor that tells when a process has ended; -1 for this one.

    A number of a process may be given to another one later; the descriptor stays with this one.
    Raises OSError when it has ended.
    """
    if pid == os.getpid() or not hasattr(os, "pidfd_open"):
        return -1
    return os.pidfd_open(pid)
