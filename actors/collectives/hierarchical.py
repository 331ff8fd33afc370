"""The transport between ranks on several hosts: shared memory inside each, messages between them.

Groups of a mesh that lie inside one host meet in its memory, by the code of one host alone. Of the
others the ranks of a host meet there too, and send each other what `crossing` says. Which ranks
share a host is told by the names that each was given, never found out by a try.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from actors.collectives.crossing import Crossing
from actors.collectives.pieces import MessageBuffers, PointToPoint
from actors.collectives.shared_memory import SharedMemory
from actors.kernels.library.toolchain import Toolchain
from actors.machine.protocol import AllGatherObject, Array, Block, Launch
from compiler.contract.collective import Collective
from compiler.contract.errors import DeviceError, PeerFailed
from compiler.contract.placement import Mesh


class Connect(Protocol):
    """Connects this rank to all others of the job; all ranks call it together."""

    def __call__(self, rank: int, num_ranks: int, gather: AllGatherObject) -> TaggedTransport:
        """Return the messages between ranks. Raises DeviceError or PeerFailed."""


class TaggedTransport(PointToPoint, Protocol):
    """Messages of all plans of a process, which tags tell apart."""

    @property
    def next_tag(self) -> int:
        """The first tag that this rank has not used."""
        ...

    def claim_tags(self, first: int, count: int) -> None:
        """Use these from now on. Raises DeviceError where there are none left."""
        ...


class HierarchicalCommunicator:
    """A rank's end of the transport between hosts; see `Communicator`.

    Args:
        rank: which rank of the mesh this is.
        mesh: all ranks.
        gather: how ranks tell each other where they are; called in `ready`.
        toolchain: what builds the C half.
        host: the name of this rank's host; ranks with the same share memory.
        connect: makes the messages between hosts; called where a group crosses them.
        deadline_s: how long a launch waits for the others before it raises.
        memory: this rank's end inside its host; None for a new one.

    Attributes:
        rank, mesh, has_clean_abort: see `Communicator`.

    Raises DeviceError without a C compiler, or for a rank that is not in the mesh.
    """

    has_clean_abort = True

    def __init__(
        self,
        rank: int,
        mesh: Mesh,
        gather: AllGatherObject,
        toolchain: Toolchain | None,
        *,
        host: str,
        connect: Connect,
        deadline_s: float = 300.0,
        memory: SharedMemory | None = None,
    ) -> None:
        if not host:
            raise DeviceError(f"rank {rank} is on a host without a name; one of several has one")
        self._memory = memory or SharedMemory(
            rank, mesh, gather, toolchain, host=host, deadline_s=deadline_s
        )
        self._host, self._toolchain = host, toolchain
        self.rank, self.mesh = rank, mesh
        self._gather, self._connect = gather, connect
        self._transport: TaggedTransport | None = None

    @property
    def waited_ns(self) -> int:
        """How long this rank has waited for others, or for messages; see `Communicator`."""
        return self._memory.waited_ns

    @property
    def bytes_sent(self) -> int:
        """How many bytes this rank has sent to other hosts, for all plans of its process."""
        return 0 if self._transport is None else self._transport.bytes_sent

    def allocate(self, size_bytes: int, alignment: int) -> Block:
        """Return memory that the ranks of this host will map; see `Communicator.allocate`."""
        return self._memory.allocate(size_bytes, alignment)

    def beside(self) -> Callable[[], HierarchicalCommunicator]:
        """Return what makes ends on the same memory; see `Communicator.beside`."""
        make = partial(
            HierarchicalCommunicator, self.rank, self.mesh, self._gather, self._toolchain,
            host=self._host, connect=self._connect,
        )  # fmt: skip
        beside = self._memory.beside()
        return lambda: make(memory=beside())

    def bind(
        self, collective: Collective, inputs: tuple[Array, ...], outputs: tuple[Array, ...]
    ) -> Launch:
        """Return the launch of a collective; see `Communicator.bind`."""
        return self._memory.bind(collective, inputs, outputs)

    def ready(self) -> None:
        """Meet all ranks once, agree, and plan the messages; see `Communicator.ready`."""
        self._memory.ready()
        # Of which all ranks know alike: those without a group that crosses are asked as well.
        if not self._memory.has_crossings:
            return
        self._transport = transport = self._connect(self.rank, self.mesh.num_ranks, self._gather)
        own_tags = (transport.next_tag, 2 * self._memory.num_lanes)
        first = 0
        for rank, row in enumerate(self._gather("number the lanes between hosts", own_tags)):
            if not (isinstance(row, tuple) and len(row) == 2 and isinstance(row[0], int)):
                raise PeerFailed(f"rank {rank} sent no tag but {row!r}", rank=rank)
            first = max(first, row[0])
        transport.claim_tags(first, own_tags[1])
        library = self._memory.library
        for lane in self._memory.crossings:
            pool: dict[tuple[object, ...], MessageBuffers] = {}
            for launches in lane.calls:
                crossing = Crossing(
                    lane, launches, transport, library, first + 2 * lane.number, pool
                )
                for launch in launches:
                    launch.meet_by(crossing)
            # A rank that comes for another collective of the lane sends what that takes: it must
            # fit, for its header to be read.
            most = max([buffers.size_bytes for buffers in pool.values()], default=0)
            for buffers in pool.values():
                buffers.allocate(most)

    def abort(self, reason: str, at_fault: int | None = None) -> None:
        """Wake whoever waits on this host; see `Communicator.abort`.

        Ranks on other hosts hear of it from the coordinator.
        """
        self._memory.abort(reason, at_fault)

    def close(self) -> None:
        """Let go of other ranks' memory; see `Communicator.close`."""
        self._memory.close()
