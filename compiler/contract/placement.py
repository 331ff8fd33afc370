"""Devices with their streams and memories, and the mesh of ranks.

A `Device` is a kind with an index; the host is one of them. A `Place` is a memory that one device
works on: bytes lie in one place, and only a copy brings them to another. A stream is an order in
which a device executes launches; what runs on two streams is ordered only by messages and events.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import chain, repeat
from typing import Annotated, NamedTuple

from compiler.contract.attrs import AttrValue
from compiler.contract.codec import Bounds
from compiler.contract.errors import CompileError, InternalError

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
        # `isdecimal` holds for digits of other scripts, too; hence `isascii`.
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
    devices = tuple([Device.parse(text) for text in texts])
    if len({*devices}) < len(devices):
        raise ValueError(f"devices must differ, got {', '.join(map(str, devices))}")
    return devices


@dataclass(frozen=True, slots=True)
class Place:
    """Where bytes lie: a memory, by the device that it belongs to."""

    device: Device
    memory: Memory

    def __str__(self) -> str:
        return f"{self.memory.value} memory of {self.device}"


HOST = Device(DeviceKind.HOST)
PINNED = Place(HOST, Memory.PINNED)
"""Host memory that devices copy from and to: batches, outputs, snapshots, offloaded values."""

SHARED = Place(HOST, Memory.SHARED)
"""Memory that ranks of one host share: registers of a rank that other ranks read or write."""

HOST_SIDE = -1
"""The place of what lies in PINNED memory, where a device's own memory has its number."""

RANK_SIDE = -2
"""The place of what lies in SHARED memory, likewise."""


# A mesh: ranks in a grid whose axes have names, what joins them, and who meets whom.

_MOST_RANKS_READ = 1 << 20
"""The most ranks of a mesh that is read from a plan file."""


@dataclass(frozen=True, slots=True)
class MeshLink:
    """What it takes to send a message, as stated: equal on all ranks."""

    bytes_per_ns: float = 12.5
    latency_ns: float = 5_000.0

    @property
    def is_possible(self) -> bool:
        """Whether there can be such a link: bytes move, and both numbers are finite."""
        return 0.0 < self.bytes_per_ns < math.inf and 0.0 <= self.latency_ns < math.inf

    def time_ns(self, sent_bytes: float, messages: int) -> float:
        """Return what it takes to send some bytes in some messages, one after the other."""
        return sent_bytes / self.bytes_per_ns + messages * self.latency_ns

    def __str__(self) -> str:
        return f"{self.bytes_per_ns:g} GB/s and {self.latency_ns / 1e3:g} us a message"


INSIDE_A_HOST = MeshLink(10.0, 10_000.0)
"""What joins processes of a host: a core that adds what lies in their shared memory, and wakes that
take 3 to 20 us for each message of a ring (benchmarks/results/ranks.md), by how busy the host is.
What goes in buckets shares them."""

BETWEEN_GPUS = MeshLink(300.0, 10_000.0)
"""What joins GPUs of a host by NVLink: an H100 is sold with 450 a direction, of which collectives
reach two thirds; a message is a launch and a handshake. As sold, not measured."""

BETWEEN_HOSTS = MeshLink(1.25, 30_000.0)
"""The link of a host to the others where nothing else is said: 10 Gbit/s, and 30 us for a message
over TCP. As sold, not measured."""


class Round(NamedTuple):
    """A message that each rank sends, `times` times: of the whole tensor 1 / (parts * ways).

    `is_between`: whether messages cross hosts.
    """

    times: int
    parts: int
    ways: int
    is_between: bool

    def sent_bytes(self, size_bytes: float) -> float:
        """Return what each rank sends in all, of a whole tensor of some bytes."""
        return self.times * size_bytes / self.parts / self.ways


@lru_cache(1 << 10)
def collective_rounds(op: str, num_ranks: int, per_host: int) -> tuple[Round, ...]:
    """Return the rounds of a collective among ranks of which each host has `per_host`.

    This is the one statement of what a collective sends: layouts, buckets, durations in plans and
    the simulator follow it. Sums and gathers go round each host, with parts of 1/L for L ranks
    there; then each of these parts goes round the hosts, from each rank to the one with its place
    on the next host. On one host, and with one rank on each, that is a ring: no algorithm sends
    less (Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms", 2009). In an all-to-all each
    rank sends to every other one what is that one's.

    `op` is the name of an op (`compiler.ops.primitives.transfer`). A message from one rank to
    another is taken to cross where hosts do not have all ranks.
    """
    if num_ranks < 2:
        return ()
    size = min(per_host, num_ranks)
    if op in ("send", "receive"):
        return (Round(1, 1, 1, is_between=size < num_ranks),)
    # An all-reduce is a reduce-scatter and then an all-gather, which are the same rounds.
    halves, ways = 2 if op == "all_reduce" else 1, 1
    inside, between = (size - 1, size), (num_ranks // size - 1, num_ranks)
    if op == "all_to_all":
        ways = num_ranks
        inside, between = (size - 1, num_ranks), (num_ranks - size, num_ranks)
    levels = ((*inside, False), (*between, True))
    return tuple([Round(halves * n, parts, ways, is_far) for n, parts, is_far in levels if n])


@dataclass(frozen=True, slots=True)
class AxisLinks:
    """What joins the ranks along an axis of the mesh, which may lie partly in a host.

    `per_host` is how many ranks of a group are on each host; all of them, or more, where none
    crosses. `between` is what one rank has of its host's link while all ranks there send.
    """

    inside: MeshLink
    between: MeshLink
    per_host: int

    @staticmethod
    def alike(link: MeshLink) -> AxisLinks:
        """Return what one link joins everywhere: the ranks of one host."""
        return AxisLinks(link, link, _MOST_RANKS_READ)

    def time_ns(self, op: str, size_bytes: float, num_ranks: int) -> float:
        """Return what a collective of some ranks takes when nobody is late.

        `size_bytes` are those of the whole: of what all ranks reduce, gather or exchange together.
        """
        time = 0.0
        for one in collective_rounds(op, num_ranks, self.per_host):
            time += self._of(one).time_ns(one.sent_bytes(size_bytes), one.times)
        return time

    def least_bytes(self, num_ranks: int) -> float:
        """Return what an all-reduce moves in the time of its messages; 0 of a single rank."""
        rounds = collective_rounds("all_reduce", num_ranks, self.per_host)
        if not rounds:
            return 0.0
        if len(rounds) == 1:  # without a division, so that whole numbers stay whole
            link = self._of(rounds[0])
            return rounds[0].parts * link.latency_ns * link.bytes_per_ns
        messages_ns = sum([one.times * self._of(one).latency_ns for one in rounds])
        return messages_ns / sum(
            [one.sent_bytes(1.0) / self._of(one).bytes_per_ns for one in rounds]
        )

    def with_messages(self, share: float) -> AxisLinks:
        """Return the links of a tensor that takes a share of the time of its messages."""
        inside, between = [
            MeshLink(link.bytes_per_ns, link.latency_ns * share)
            for link in (self.inside, self.between)
        ]
        return AxisLinks(inside, between, self.per_host)

    def _of(self, one: Round) -> MeshLink:
        return self.between if one.is_between else self.inside


MeshLinks = tuple[AxisLinks, ...]
"""One for each axis of the mesh."""


STAGE = "stage"
"""The name of the axis whose ranks run a stage of a pipeline each."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in a grid, numbered in row-major order; `names` and `shape` have one entry per axis."""

    names: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return math.prod(self.shape)

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Names and extents, axis by axis."""
        return tuple(zip(self.names, self.shape, strict=True))

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return where a rank is. Raises ValueError for one that is not in the mesh."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} is not in a mesh of {self.num_ranks} ranks")
        indices = []
        # Row-major: the last axis counts fastest.
        for extent in reversed(self.shape):
            indices.append(rank % extent)
            rank //= extent
        return tuple(reversed(indices))

    def rank(self, coordinates: Sequence[int]) -> int:
        """Return the number of the rank at some coordinates."""
        number = 0
        for index, extent in zip(coordinates, self.shape, strict=True):
            number = number * extent + index
        return number

    def group(self, rank: int, axis: int) -> tuple[int, ...]:
        """Return the ranks that differ from one along an axis alone, itself among them."""
        coordinates = list(self.coordinates(rank))
        ranks = []
        for index in range(self.shape[axis]):
            coordinates[axis] = index
            ranks.append(self.rank(coordinates))
        return tuple(ranks)

    def groups(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return every axis with each group of ranks along it, both in ascending order."""
        axes, ranks = range(len(self.names)), range(self.num_ranks)
        return list(dict.fromkeys([(a, self.group(rank, a)) for a in axes for rank in ranks]))

    def axis(self, name: str) -> int:
        """Return the number of an axis. Raises CompileError for a name that none has."""
        if name not in self.names:
            names = ", ".join(map(repr, self.names)) or "none"
            raise CompileError(f"the mesh has no axis {name!r}; its axes are: {names}")
        return self.names.index(name)

    def extent(self, name: str) -> int:
        """Return how many ranks differ along an axis; 1 where there is no such axis."""
        return dict(self.axes).get(name, 1)

    def without(self, name: str) -> Mesh:
        """Return the mesh of ranks that differ along other axes alone, if there is that axis."""
        axes = [axis for axis in self.axes if axis[0] != name]
        return Mesh(tuple([n for n, _ in axes]), tuple([extent for _, extent in axes]))

    def __str__(self) -> str:
        return " x ".join([f"{name}={extent}" for name, extent in self.axes])


def mesh_of(pairs: AttrValue) -> Mesh:
    """Return the mesh of pairs (name, extent), as a plan records it; that of one rank of none.

    Raises InternalError for anything else.
    """
    extents: dict[str, int] = {}
    for row in pairs if isinstance(pairs, tuple) else (pairs,):
        match row:
            case (str() as name, int() as extent) if name not in extents and extent > 0:
                extents[name] = extent
            case _:
                raise InternalError(f"option mesh is {pairs!a:.60}, no pairs of names and extents")
    mesh = Mesh(tuple(extents), tuple(extents.values()))
    if mesh.num_ranks > _MOST_RANKS_READ:
        raise InternalError(f"option mesh is {mesh}: {_MOST_RANKS_READ} ranks at most")
    return mesh


SINGLE_RANK_MESH = Mesh((), ())
"""The mesh of a job that one rank runs."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Hosts that take the ranks of a mesh one after the other, and what joins these.

    `sizes` has the ranks of each host in order; hosts after the last one have as many as that one.
    `inside` joins ranks of a host. `between` is the link of a host, which its ranks share.
    """

    sizes: tuple[int, ...]
    inside: MeshLink
    between: MeshLink

    def of_ranks(self, num_ranks: int) -> tuple[int, ...]:
        """Return the number of the host of each rank."""
        numbers: list[int] = []
        for host, size in enumerate(chain(self.sizes, repeat(self.sizes[-1]))):
            if len(numbers) >= num_ranks:
                break
            numbers += [host] * min(size, num_ranks - len(numbers))
        return tuple(numbers)

    def along(self, mesh: Mesh, axis: int) -> AxisLinks:
        """Return what joins the ranks along an axis of a mesh. O(ranks)."""
        host_of, extent = self.of_ranks(mesh.num_ranks), mesh.shape[axis]
        stride = math.prod(mesh.shape[axis + 1 :])
        firsts = [rank for rank in range(mesh.num_ranks) if rank // stride % extent == 0]
        groups = [host_of[rank : rank + extent * stride : stride] for rank in firsts]
        counts = {count for group in groups for count in Counter(group).values()}
        # Where hosts have unlike parts of groups all messages are taken to cross, which is not too
        # cheap for any of them.
        per_host = min(counts) if len(counts) == 1 else 1
        num_senders = max(Counter(host_of).values())
        share = MeshLink(self.between.bytes_per_ns / num_senders, self.between.latency_ns)
        return AxisLinks(self.inside, share, per_host)

    @property
    def record(self) -> HostsRecord:
        """The hosts as a plan records them."""
        inside, between = self.inside, self.between
        return (
            self.sizes,
            (inside.bytes_per_ns, inside.latency_ns),
            (between.bytes_per_ns, between.latency_ns),
        )

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.sizes))
        return f"hosts of {sizes} ranks ({self.inside} inside, {self.between} between them)"


HostsRecord = tuple[tuple[int, ...], tuple[float, float], tuple[float, float]]


def hosts_of(record: AttrValue) -> Hosts | None:
    """Return the hosts that a plan records; None where it records none, for one host.

    Raises InternalError for anything else.
    """
    match record:
        case ():
            return None
        case (tuple() as sizes, (float() as a, float() as b), (float() as c, float() as d)):
            links = MeshLink(a, b), MeshLink(c, d)
            numbers = tuple([size for size in sizes if isinstance(size, int) and size > 0])
            are_whole = numbers and len(numbers) == len(sizes)
            if are_whole and all([link.is_possible for link in links]):
                return Hosts(numbers, *links)
    raise InternalError(f"option hosts is {record!a:.60}, no sizes of hosts and two links")


@dataclass(frozen=True, slots=True)
class RankContext:
    """Who trains together: the mesh, what joins its ranks along each axis, and one of them.

    A plan is of rank `rank` and of all whose part of the work is the same. Links are stated and not
    measured: what follows from them is the same on every rank. `hosts` is None where all ranks are
    on one.
    """

    mesh: Mesh = SINGLE_RANK_MESH
    links: MeshLinks = ()
    rank: int = 0
    hosts: Hosts | None = None

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return self.mesh.num_ranks

    def without(self, name: str) -> RankContext:
        """Return the ranks at this one's coordinate along an axis, if there is that axis."""
        if name not in self.mesh.names:
            return self
        axis, at = self.mesh.axis(name), self.mesh.coordinates(self.rank)
        flat, links = self.mesh.without(name), (*self.links[:axis], *self.links[axis + 1 :])
        # Without hosts: their sizes count the ranks that are left out here, too.
        return RankContext(flat, links, flat.rank((*at[:axis], *at[axis + 1 :])))

    def link(self, name: str) -> AxisLinks:
        """Return what joins the ranks along an axis. Raises CompileError where there is none."""
        return self.links[self.mesh.axis(name)]


SINGLE_RANK = RankContext()


def joined(mesh: Mesh, link: MeshLink, rank: int = 0) -> RankContext:
    """Return ranks of one host, joined alike along every axis; an axis of one rank is none."""
    return on_hosts(mesh, Hosts((mesh.num_ranks,), link, link), rank)


def on_hosts(mesh: Mesh, hosts: Hosts, rank: int = 0) -> RankContext:
    """Return ranks that some hosts take one after the other; an axis of one rank is none."""
    axes = [axis for axis in mesh.axes if axis[1] > 1]
    wide = Mesh(tuple([name for name, _ in axes]), tuple([extent for _, extent in axes]))
    links = tuple([hosts.along(wide, axis) for axis in range(len(axes))])
    is_one = hosts.sizes[0] >= mesh.num_ranks
    return RankContext(wide, links, rank, None if is_one else hosts)
