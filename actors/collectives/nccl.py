"""The transport between GPUs, one a rank: collectives are calls of NCCL on streams.

A launch is bound before its ranks have met. In `ready` they compare what they will do, as ranks in
shared memory do, and make a communicator for each lane, in one order; from then on it is known what
a launch puts on its stream, and its chain can be captured.

NCCL moves contiguous memory, so parts lie along the first axis (`compiler.passes.contiguous`). What
it has no type for moves as bytes, and booleans are reduced as bytes of 0 and 1.

**Who notices what.** Ranks on other GPUs do not see that one has ended: the coordinator does, and
then `abort` lets the streams of this rank go on. What was enqueued behind a collective works on
bytes that mean nothing, and so every wait for the device raises from then on. A thread asks the
library now and then whether a call has failed.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from actors.collectives.handshake import (
    CollectiveDescriptor,
    CommunicatorKey,
    RankDescriptor,
    check_collectives,
    check_hosts,
    check_meshes,
    described,
    input_shape,
    lane_of,
    offered,
    output_shape,
    this_host,
)
from actors.kernels.cuda.calls import NCCL_DTYPES, CollectiveKind, DeviceCalls, RunCollective
from actors.machine.protocol import AllGatherObject, Block, Launch, PlacedArray
from compiler.contract.collective import RECEIVE, SEND, Collective
from compiler.contract.errors import DeviceError, InternalError, PeerFailed
from compiler.contract.placement import Mesh
from compiler.contract.types import DType

_KINDS = {
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    "all_gather": CollectiveKind.ALL_GATHER,
}


class UnpreparedLaunch(Protocol):
    """A launch of a device that learns what it does when its ranks have met."""

    def prepare(self, calls: DeviceCalls) -> None:
        """Say what the launch does, before it is first put on a stream."""

    def __call__(self) -> None:
        """Run by itself, to the end."""


class CollectiveDevice(Protocol):
    """A GPU with communicators; see `actors.device.cuda.device.CudaDevice`."""

    def unique_id(self) -> bytes:
        """Return what the ranks of a new communicator know it by."""

    def join_communicator(
        self, unique_id: bytes, num_ranks: int, rank: int, deadline_s: float
    ) -> int:
        """Return a communicator when all its ranks are there. Raises DeviceError."""

    def connect_neighbours(self, communicator: int, place: int) -> None:
        """Send a byte from the first of two ranks to the other one, and wait."""

    def make_collective(self) -> UnpreparedLaunch:
        """Return a launch that is prepared once there are communicators."""

    def finish_chains(self) -> None:
        """Make graphs of the chains whose launches are prepared by now. Raises DeviceError."""

    def check_communicator(self, communicator: int) -> None:
        """Raise DeviceError where a collective has failed; any thread may ask."""

    def give_up(self, communicators: Sequence[int], error: Exception) -> None:
        """End what waits for other ranks, and raise `error` in every later wait, as a fault."""


@dataclass(frozen=True, slots=True)
class _BoundLaunch:
    """A launch and the addresses of its operands; 0 where it has none."""

    launch: UnpreparedLaunch
    source: int
    target: int


@dataclass(slots=True)
class _BoundCollective:
    """A collective of the plan, and its launches, one a slot phase."""

    collective: Collective
    lane: CommunicatorKey
    place: tuple[int, int]
    launches: list[_BoundLaunch] = field(default_factory=list)


class NcclCommunicator:
    """A rank's end of the transport between GPUs; see `Communicator`.

    Args:
        rank: Which rank of the mesh this is.
        mesh: All ranks.
        gather: How ranks compare their collectives, and tell the ids of communicators.
        device: The GPU of this rank, which no other has.
        host: The name of this rank's host; "" where all ranks must be on it.
        deadline_s: How long `ready` waits for the others before it raises.
        look_s: How often the library is asked whether a call has failed.
        joined: Communicators of lanes that are there already, for another plan that takes turns.

    Attributes:
        rank, mesh, has_clean_abort, waited_ns: See `Communicator`.
    """

    has_clean_abort = False
    waited_ns = 0

    def __init__(
        self,
        rank: int,
        mesh: Mesh,
        gather: AllGatherObject,
        device: CollectiveDevice,
        *,
        host: str = "",
        deadline_s: float = 300.0,
        look_s: float = 1.0,
        joined: dict[CommunicatorKey, int] | None = None,
    ) -> None:
        self.rank, self.mesh, self._gather = rank, mesh, gather
        self._host = host
        self._device, self._deadline_s, self._look_s = device, deadline_s, look_s
        self._bound: dict[tuple[str, int], _BoundCollective] = {}
        # Plans that take turns use those of a lane one after the other: each costs memory.
        self._joined = {} if joined is None else joined
        self._communicators: list[int] = []
        self._given_up: PeerFailed | None = None
        self._lock = threading.RLock()
        self._is_over = threading.Event()

    # -- binding ---------------------------------------------------------------------------------

    def allocate(self, size_bytes: int, alignment: int) -> Block:
        """Refuse: what ranks exchange lies in the memory of their GPUs."""
        raise InternalError("a plan with collectives on GPUs asked for shared memory of the host")

    def beside(self) -> Callable[[], NcclCommunicator]:
        """Return what makes ends on the same communicators; see `Communicator.beside`."""
        return partial(
            NcclCommunicator, self.rank, self.mesh, self._gather, self._device,
            host=self._host, deadline_s=self._deadline_s, look_s=self._look_s, joined=self._joined,
        )  # fmt: skip

    def bind(
        self,
        collective: Collective,
        inputs: tuple[PlacedArray, ...],
        outputs: tuple[PlacedArray, ...],
    ) -> Launch:
        """Return the launch of a collective; see `Communicator.bind`."""
        lane = lane_of(collective, self.mesh, self.rank)
        _check(collective)
        operands = (
            None if collective.op == RECEIVE else inputs[0],  # what it has more are tokens
            None if collective.op == SEND else outputs[0],
        )
        if not all([view is None or view.is_dense for view in operands]):
            raise DeviceError(f"{described(collective)} moves rows that lie one after another")
        launch = self._device.make_collective()
        places = [0 if view is None else view.address for view in operands]
        self._bound_of(collective, lane).launches.append(_BoundLaunch(launch, *places))
        return launch

    def _bound_of(self, collective: Collective, lane: CommunicatorKey) -> _BoundCollective:
        """Return the entry of a collective; two of one order are of two programs of the plan."""
        key = (collective.site.actor, collective.order)
        if key not in self._bound:
            alike = [
                b
                for b in self._bound.values()
                if b.lane == lane and b.collective.order == collective.order
            ]
            place = (len(alike), collective.order)
            self._bound[key] = _BoundCollective(collective, lane, place)
        return self._bound[key]

    # -- agreement -------------------------------------------------------------------------------

    def ready(self) -> None:
        """Meet all ranks, agree, and make the communicators; see `Communicator.ready`."""
        rows = [
            CollectiveDescriptor(b.lane, b.place, offered(b.collective, self._place(b.lane)), ())
            for b in self._bound.values()
        ]
        own = RankDescriptor(
            self._host or this_host(), os.getpid(), (), str(self.mesh), tuple(rows)
        )
        answers = self._gather("agree on collectives", own.row())
        offers = [RankDescriptor.of(value, rank) for rank, value in enumerate(answers)]
        # All ranks check the same offers, so all raise, or none does.
        if not self._host:
            check_hosts(offers)
        check_meshes(offers)
        check_collectives(offers, self.mesh.groups())
        lanes = own.lanes
        own_ids = [
            self._device.unique_id()
            if self._members(lane)[0] == self.rank and lane not in self._joined
            else b""
            for lane in lanes
        ]
        ids = self._gather("join the communicators of their GPUs", tuple(own_ids))
        # Sorted on all ranks: of two communicators none waits for the other.
        for lane in lanes:
            members = self._members(lane)
            is_new, own_place = lane not in self._joined, members.index(self.rank)
            if is_new:
                made = ids[members[0]]
                unique_id = (
                    made[offers[members[0]].lanes.index(lane)] if isinstance(made, tuple) else 0
                )
                if not isinstance(unique_id, bytes):
                    raise PeerFailed(
                        f"rank {members[0]} sent no NCCL id for {lane}", rank=members[0]
                    )
                self._joined[lane] = self._device.join_communicator(
                    unique_id, len(members), own_place, self._deadline_s
                )
            communicator = self._joined[lane]
            with self._lock:
                self._communicators.append(communicator)
                if self._given_up is not None:
                    # An abort that came before there was anything to end.
                    self._device.give_up((communicator,), self._given_up)
            if is_new and lane.sender >= 0:
                self._device.connect_neighbours(communicator, own_place)
            self._prepare(lane, communicator, own_place)
        self._device.finish_chains()
        if self._communicators:
            name = f"nccl errors of rank {self.rank}"
            threading.Thread(target=self._watch, name=name, daemon=True).start()

    def _prepare(self, lane: CommunicatorKey, communicator: int, own: int) -> None:
        """Say what the launches of a lane do."""
        for bound in [b for b in self._bound.values() if b.lane == lane]:
            for b in bound.launches:
                call = run_of(bound.collective, own, communicator, b.source, b.target)
                b.launch.prepare((call,))

    def _place(self, lane: CommunicatorKey) -> int:
        """Return the place of this rank along the axis of a lane."""
        return self.mesh.group(self.rank, lane.axis).index(self.rank)

    def _members(self, lane: CommunicatorKey) -> tuple[int, ...]:
        return lane.members(self.mesh.group(self.rank, lane.axis))

    # -- ending ----------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._is_over.wait(self._look_s):
            for communicator in self._communicators:
                try:
                    self._device.check_communicator(communicator)
                except DeviceError as error:
                    self.abort(str(error))
                    return

    def abort(self, reason: str, at_fault: int | None = None) -> None:
        """End what waits on this rank's streams; see `Communicator.abort`.

        The other ranks hear of it from the coordinator.
        """
        with self._lock:
            # The first reason stays: those that follow are mostly consequences of it.
            if self._given_up is not None or self._is_over.is_set():
                return
            self._given_up = PeerFailed(reason, rank=self.rank if at_fault is None else at_fault)
            self._device.give_up(self._communicators, self._given_up)
            self._is_over.set()

    def close(self) -> None:
        """Drop the launches; the communicators end with the device."""
        with self._lock:
            self._is_over.set()
            self._bound.clear()


def _check(collective: Collective) -> None:
    """Check that NCCL can do it. Raises DeviceError."""
    c, what = collective, described(collective)
    if c.by and c.reads.dtype not in (*NCCL_DTYPES, DType.BOOL):
        raise DeviceError(f"{what} is of a type that NCCL does not reduce")
    if c.op == "all_to_all":
        # Rank i has rows of the second axis, of which all get one, and gets one of the first.
        is_contiguous = (c.axis, c.to_axis) == (1, 0) and c.whole.shape[0] == c.num_ranks
    else:
        is_contiguous = math.prod(c.whole.shape[: c.axis or c.to_axis or 0]) == 1
    if not is_contiguous:
        raise DeviceError(f"{what} is of parts that do not lie in one piece, as NCCL's do")


def run_of(
    collective: Collective, own: int, communicator: int, source: int, target: int
) -> RunCollective:
    """Return the call of NCCL that the rank at a place of a communicator makes."""
    c, dtype, by, width = collective, collective.reads.dtype, collective.by, 1
    if dtype not in NCCL_DTYPES:
        # A boolean is one byte, 0 or 1: its sum is "or", and so is the larger one.
        width, dtype, by = dtype.itemsize, DType.UINT8, "max" if by == "sum" else by
    ranks = range(c.num_ranks)
    counts: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    if c.peer is not None:
        # The one that sends is the first of two.
        count = width * c.reads.num_elements
        counts, received = ((0, 0), (count, 0)) if own else ((0, count), (0, 0))
    elif c.op == "all_to_all":
        counts = (width * math.prod(input_shape(c, own)[1:]),) * c.num_ranks
        received = tuple([width * math.prod(input_shape(c, rank)[1:]) for rank in ranks])
    elif c.op == "all_reduce":
        counts = (width * c.reads.num_elements,)
    else:
        shape_of = input_shape if c.op == "all_gather" else output_shape
        counts = tuple([width * math.prod(shape_of(c, rank)) for rank in ranks])
    kind = _KINDS.get(c.op, CollectiveKind.EXCHANGE)
    return RunCollective(kind, communicator, source, target, counts, dtype, by, received)
