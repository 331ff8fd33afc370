"""What a device's kernels must tell the compiler, so that planning for a device needs no device.

The roof fills this protocol from `actors/kernels`. A kernel has two lives: `query` here, at compile
time, from shapes alone; `bind` at load, with addresses (see `actors/protocol.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from compiler.attrs import Attrs
from compiler.registry import Layout
from compiler.types import TensorType


@dataclass(frozen=True, slots=True)
class CallOperand:
    """A tensor as a kernel sees it: type and layout; strides of 0 repeat an axis."""

    type: TensorType
    layout: Layout


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One launch to plan: op, attributes, operands."""

    op: str
    attrs: Attrs
    inputs: tuple[CallOperand, ...]
    outputs: tuple[CallOperand, ...]


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """What the planner must know of the kernel chosen for a call.

    `in_place` lists pairs (output, input) that may share bytes when both are dense, equal in size
    and the input dies here; of a value that is read at several positions, all must be listed.
    `workspace_bytes` is scratch, planned like any tensor and live during the launch only.
    """

    kernel: str
    workspace_bytes: int = 0
    in_place: tuple[tuple[int, int], ...] = ()
    duration_ns: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """The way between a device's memory and its host's; both directions run at once."""

    in_bytes_per_ns: float
    out_bytes_per_ns: float
    latency_ns: float

    def in_ns(self, size_bytes: int) -> float:
        """Return the time of one copy to the device."""
        return self.latency_ns + size_bytes / self.in_bytes_per_ns

    def out_ns(self, size_bytes: int) -> float:
        """Return the time of one copy to the host."""
        return self.latency_ns + size_bytes / self.out_bytes_per_ns


class Target(Protocol):
    """The kernels of one kind of device.

    A device with memory of its own has an attribute `link` besides; ask `link_of`.
    """

    @property
    def fingerprint(self) -> str:
        """Everything the answers depend on (libraries, versions): part of the plan's key."""
        ...

    def query(self, call: KernelCall) -> KernelInfo:
        """Choose a kernel. Raises LookupError when the device has none for this op."""
        ...


def link_of(target: Target) -> Link | None:
    """Return the link to the host's memory; None where the device works on that memory itself.

    Plans depend on it, so it belongs in the target's fingerprint.
    """
    link = getattr(target, "link", None)
    return link if isinstance(link, Link) else None
