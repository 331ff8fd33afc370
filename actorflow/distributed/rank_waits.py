"""Who of the ranks is waited for: told by how long each has waited for the others.

Ranks meet in collectives. Who comes last waits for nobody, and all others wait for it. So of ranks
that share the work alike the one with the least waiting is the slowest, for whichever reason: its
host, its processor's heat, its data. Each rank counts how long it has waited, and says it with the
steps it comes to; the first rank is told those of all, and judges them here. Decisions that ranks
agree on do not depend on it.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

WINDOW_S = 2.0
NUM_WINDOWS = 3
"""Windows in which a rank is behind before it is named: a single one may be a pause of its host."""
CLEARLY = 0.1
"""By which share of the time a rank that is behind waits less than the one in the middle."""


class RankWaits:
    """Which share of the time each rank has waited, over windows of time.

    Attributes:
        hosts: the names of the ranks' hosts, by rank; none where all run on one.
        shares: of the last window, by rank; none before there was one.
        behind: the rank that the others wait for, or None where none is clearly behind.
    """

    def __init__(self, hosts: Sequence[str] = ()) -> None:
        self.hosts = hosts
        self.shares: tuple[float, ...] = ()
        self.behind: int | None = None
        self._since: tuple[float, Sequence[int]] | None = None
        self._windows: deque[tuple[float, ...]] = deque(maxlen=NUM_WINDOWS)

    def take(self, now_s: float, waited_us: Sequence[int]) -> None:
        """Take how long each rank has waited since the run began."""
        if self._since is None or len(self._since[1]) != len(waited_us):
            self._since = now_s, waited_us
        since_s, before_us = self._since
        seconds = now_s - since_s
        if seconds < WINDOW_S:
            return
        self._since = now_s, waited_us
        # Several collectives may wait at a time, each counted.
        self.shares = tuple([
            min(1.0, (now_us - then_us) / (seconds * 1e6))
            for now_us, then_us in zip(waited_us, before_us, strict=True)
        ])  # fmt: skip
        self._windows.append(self.shares)
        self.behind = rank_behind(self._windows) if len(self._windows) == NUM_WINDOWS else None

    def row(self) -> dict[str, Any]:
        """Return what a row of metrics has of it; nothing before the end of the first window."""
        if not self.shares:
            return {}
        return {
            "waiting_by_rank": [round(share, 3) for share in self.shares],
            "rank_behind": self.behind,
        }

    def __str__(self) -> str:
        """Say which rank is behind, and how far."""
        if self.behind is None:
            return ""
        host = f" on host {self.hosts[self.behind]}" if self.hosts else ""
        middle = sorted(self.shares)[len(self.shares) // 2]
        return (
            f"rank {self.behind}{host} is behind: it waits {self.shares[self.behind]:.0%} of the"
            f" time for other ranks, and they {middle:.0%}"
        )


def rank_behind(windows: Sequence[Sequence[float]]) -> int | None:
    """Return the rank that waited least, of those clearly behind in every window, or None."""
    behind = set(range(len(windows[0])))
    for shares in windows:
        # The middle one, and not the next: all ranks of a slow host are behind together.
        most = sorted(shares)[len(shares) // 2] - CLEARLY
        behind &= {rank for rank, share in enumerate(shares) if share <= most}
    totals = {rank: sum([shares[rank] for shares in windows]) for rank in sorted(behind)}
    return min(totals, key=totals.__getitem__, default=None)


def pack_waits(waited_us: Sequence[int]) -> bytes:
    """Return how long each rank has waited as the bytes of a message."""
    return struct.pack(f"<{len(waited_us)}Q", *waited_us)


def unpack_waits(data: bytes) -> tuple[int, ...]:
    """Return what `pack_waits` packed; what is left over of other bytes is dropped."""
    return struct.unpack_from(f"<{len(data) // 8}Q", data)
