"""What ranks tell each other before the first step, and whether they will meet for the same.

Every rank checks what all have said, so that all come to the same answer: either all go on, or each
raises the error of the first two that disagree.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from actors.collectives.lanes import RankLane
from compiler.attrs import PlainValue
from compiler.errors import PeerFailed

FORMAT = 1
"""Of an offer, and of the memory that it tells of."""

MEND = "run the same script with the same options and data on all ranks"

Row = tuple[int, int, int, int]
"""Where a launch has its operands: segment and offset of what it reads, and of what it leaves."""


@dataclass(frozen=True, slots=True)
class CollectiveOffer:
    """A collective of one rank: its place among those of a lane, its text, and its rows."""

    lane: RankLane
    place: tuple[int, int]
    text: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """All that a rank tells: which host and process, its segments, its collectives."""

    host: str
    pid: int
    segments: tuple[tuple[int, int], ...]
    mesh: str
    collectives: tuple[CollectiveOffer, ...]

    @property
    def lanes(self) -> list[RankLane]:
        """The lanes that the rank is in, as they lie on its board."""
        return sorted({c.lane for c in self.collectives})

    def along(self, lane: RankLane) -> list[CollectiveOffer]:
        """Return the collectives of a lane, in their order."""
        return sorted([c for c in self.collectives if c.lane == lane], key=lambda c: c.place)

    def row(self) -> PlainValue:
        """Return the offer as a value that can be sent."""
        return (
            FORMAT, self.host, self.pid, self.segments, self.mesh,
            tuple([(tuple(c.lane), c.place, c.text, c.rows) for c in self.collectives]),
        )  # fmt: skip

    @staticmethod
    def of(value: Any, rank: int) -> Offer:
        """Read what a rank sent. Raises PeerFailed where that is no offer."""
        try:
            format_, host, pid, segments, mesh, collectives = value
            if format_ != FORMAT:
                raise ValueError(f"format {format_}")
            return Offer(
                str(host),
                int(pid),
                tuple([(int(fd), int(size)) for fd, size in segments]),
                str(mesh),
                tuple([_collective(*row) for row in collectives]),
            )
        except (TypeError, ValueError) as error:
            raise PeerFailed(
                f"rank {rank} offers its memory as another version of actorflow does ({error});"
                " run the same version on all ranks",
                rank=rank,
            ) from None


def _collective(lane: Sequence[int], place: Sequence[int], text: str, rows: Any) -> CollectiveOffer:
    program, order = place
    found = tuple([(int(a), int(b), int(c), int(d)) for a, b, c, d in rows])
    return CollectiveOffer(RankLane(*map(int, lane)), (int(program), int(order)), str(text), found)


def this_host() -> str:
    """Return what processes have alike that can open each other's files: boot and namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return os.uname().nodename


def check_hosts(offers: Sequence[Offer]) -> None:
    """Check that all ranks are on one host, of one mesh. Raises PeerFailed."""
    first = offers[0]
    for rank, offer in enumerate(offers):
        if offer.host != first.host:
            raise PeerFailed(
                f"rank {rank} runs on another host, or in another container, than rank 0; ranks"
                " share memory, which works on one host only",
                rank=rank,
            )
        if offer.mesh != first.mesh:
            raise PeerFailed(
                f"rank {rank} has a mesh of {offer.mesh}, rank 0 one of {first.mesh}; {MEND}",
                rank=rank,
            )


def check_collectives(offers: Sequence[Offer], groups: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Check that ranks of a group meet for the same, in one order.

    `groups` are all of them, as the number of an axis and the ranks. Raises PeerFailed, which names
    the first collective that two ranks do not have alike.
    """
    for axis, ranks in groups:
        lanes = {c.lane for rank in ranks for c in offers[rank].collectives}
        for lane in sorted([lane for lane in lanes if lane.axis == axis]):
            first, *others = lane.members(ranks)
            for rank in others:
                for mine, theirs in _pairs(offers[first].along(lane), offers[rank].along(lane)):
                    if mine != theirs:
                        raise PeerFailed(
                            f"rank {rank} has {theirs} where rank {first} has {mine}; they would"
                            f" take different tensors for one: {MEND}",
                            rank=rank,
                        )


def _pairs(
    mine: Sequence[CollectiveOffer], theirs: Sequence[CollectiveOffer]
) -> Iterator[tuple[str, str]]:
    for a, b in zip_longest(mine, theirs):
        none = "no further collective"
        yield (none if a is None else a.text, none if b is None else b.text)
