"""Where things run and lie: devices with their streams and memories, as closed sets.

A `Device` is a kind with an index; the host is one of them. A `Place` is a memory that one device
works on: bytes lie in one place, and only a copy brings them to another. A stream is an order in
which a device executes launches; what runs on two streams is ordered only by messages and events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from compiler.row_values import Bounds

MAX_DEVICES = 65_536
"""Devices of one kind."""


class DeviceKind(Enum):
    """What a device is. SIM computes by numpy and is late as a CUDA device may be."""

    HOST = "host"
    SIM = "sim"
    CUDA = "cuda"


class Memory(Enum):
    """What a block of bytes is.

    HOST is ordinary memory of a process; PINNED is memory of the host that devices copy from and
    to; DEVICE is a device's own; SHARED is seen by several processes of a host.
    """

    HOST = "host"
    PINNED = "pinned"
    DEVICE = "device"
    SHARED = "shared"


class StreamRole(Enum):
    """What a stream is for; a device has several of one role, told apart by their index.

    H2D copies into the device and D2H out of it, whatever is at the other end. A PORT runs code of
    the user or the file system: a source or a sink.
    """

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    COMM = "comm"
    PORT = "port"


@dataclass(frozen=True, slots=True)
class Device:
    """A processor with the memory that it works on; its text is "host:0", "sim:1"."""

    kind: DeviceKind
    index: Annotated[int, Bounds(0, MAX_DEVICES - 1)] = 0

    @staticmethod
    def parse(text: object) -> Device:
        """Return the device of a text such as "host", "sim" or "sim:1".

        Raises ValueError, which names the kinds that there are.
        """
        if not isinstance(text, str):
            raise ValueError(f'a device is named by a text such as "sim:1", got {text!r}')
        name, _, number = text.partition(":")
        kinds = {kind.value: kind for kind in DeviceKind}
        index = int(number or "0") if (number or "0").isdecimal() and number.isascii() else -1
        if name not in kinds or not 0 <= index < MAX_DEVICES or text.endswith(":"):
            raise ValueError(
                f"no device is called {text!r}; expected one of {', '.join(kinds)}, perhaps with a"
                ' number, as in "sim:1"'
            )
        return Device(kinds[name], index)

    @property
    def place(self) -> Place:
        """The memory that the device's launches work on."""
        return Place(self, Memory.HOST if self.kind is DeviceKind.HOST else Memory.DEVICE)

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.index}"


def distinct_devices(texts: Sequence[object]) -> tuple[Device, ...]:
    """Return the devices of some texts, in order. Raises ValueError for none, or one twice."""
    found = tuple([Device.parse(text) for text in texts])
    if len({*found}) < len(found):
        raise ValueError(f"devices must differ, got {', '.join(map(str, found))}")
    return found


@dataclass(frozen=True, slots=True)
class Place:
    """Where bytes lie: a memory, by the device that it belongs to."""

    device: Device
    memory: Memory

    def __str__(self) -> str:
        return f"{self.memory.value} memory of {self.device}"


HOST = Device(DeviceKind.HOST)
PINNED = Place(HOST, Memory.PINNED)
"""Where devices meet the host: batches, outputs and snapshots, and values that are kept there."""

SHARED = Place(HOST, Memory.SHARED)
"""Where ranks of one host meet: what others work on of a rank's registers."""

HOST_SIDE = -1
"""The place of what lies in PINNED memory, where a device's own memory has its number."""

RANK_SIDE = -2
"""The place of what lies in SHARED memory, likewise."""
