"""Where things run: devices and the streams on them.

A `Device` is a kind ("host", "cuda") with an index. A stream is an order in which a device executes
launches; what runs on two streams is ordered only by messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from compiler.rows import Bounds


@dataclass(frozen=True, slots=True)
class Device:
    """One memory and the processors that work on it."""

    kind: str
    index: Annotated[int, Bounds(0, 65535)] = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


HOST = Device("host", 0)
