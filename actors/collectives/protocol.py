"""What the runtime asks of a transport between ranks, and what a transport asks of its run.

A rank runs its own plan. Its collectives have one order on all ranks (attribute `order`), and a
launch of one of them completes on all ranks of its group together. Ranks whose graphs differ have
plans that differ: registers lie elsewhere and have other slots, so a transport asks each rank where
its operands are, and takes nothing for granted but that all know the mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from actors.device.protocol import Block
from actors.protocol import Array, Launch
from compiler.attrs import AttrValue, PlainValue
from compiler.mesh import Mesh
from compiler.types import TensorType


class Gather(Protocol):
    """How ranks come to know what each of them has to say; no tensors go this way."""

    def __call__(self, name: str, value: PlainValue) -> list[PlainValue]:
        """Return the values of all ranks, by rank, once all have come to this name.

        A name says what is done there, as what follows on "to": one that does not come is told so.
        Names come in the same order on all ranks, and may come again. Blocks; raises PeerFailed
        where another rank has failed, or does not come in time.
        """
        ...


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A launch of a COMM actor, for one slot of each register that it touches.

    Attributes:
        op: Which collective it is, by the name of its op (`compiler.ops.comm`).
        attrs: The op's attributes, with group, order and num_ranks.
        inputs: The types of its operands, which a view alone does not tell of bfloat16.
        outputs: The types of what it leaves.
        actor: The name of its actor.
        stream: Which of the rank's streams between ranks that is on: streams run side by side.
        where: For messages: what it is in the model, and the user's line.
    """

    op: str
    attrs: Mapping[str, AttrValue]
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    actor: str
    stream: int
    where: str


class Communicator(Protocol):
    """A rank's end of a transport, for one loaded plan.

    Used in this order: `allocate` and `bind`, `ready`, then the launches, at last `close`. `abort`
    may come at any time.
    """

    @property
    def rank(self) -> int:
        """Which rank this is."""
        ...

    @property
    def mesh(self) -> Mesh:
        """All ranks."""
        ...

    def allocate(self, size_bytes: int, alignment: int) -> Block:
        """Return memory of the host that collectives work on, as `DeviceStore.allocate`.

        Raises MemoryError where it cannot be had.
        """
        ...

    def bind(
        self, call: CollectiveCall, inputs: tuple[Array, ...], outputs: tuple[Array, ...]
    ) -> Launch:
        """Return what meets the other ranks each time that it is called.

        What peers work on lies in memory of `allocate`. The launch raises PeerFailed where another
        rank does not come, or comes to something else. Raises DeviceError for what this transport
        does not move.
        """
        ...

    def ready(self) -> None:
        """Meet all ranks once, when everything is bound, and agree on what will be met for.

        Blocks. Raises PeerFailed, on every rank, where ranks of a group have other collectives; the
        message names both.
        """
        ...

    def abort(self, reason: str, at_fault: int | None = None) -> None:
        """Have whoever waits in a launch, on any rank, raise PeerFailed at once; from any thread.

        `at_fault` is the rank whose fault it is, this one where nothing is said. The first reason
        is the one that all tell. No launch goes through after that.
        """
        ...

    def close(self) -> None:
        """Let go of the memory of other ranks, when no launch runs. May be called twice."""
        ...
