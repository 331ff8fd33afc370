"""Firings that run at once share the cores of a machine: how fast each of them gets on.

A firing that runs alone keeps some cores busy: its *demand*, in threads' worth of work. While all
demands fit into the machine's capacity, each firing runs at full speed. Beyond, nobody gets more
than a fair share while another wants more: shares are max-min fair (Bertsekas & Gallager, "Data
Networks", 1992, 6.5), and a firing is slowed down as far as its share is below its demand. So two
streams whose launches use all cores gain nothing from each other, and two whose launches run on one
thread gain a factor of two on two cores.

The capacity is what all cores do in the time of one alone, which memory and shared cores bound: a
measured number, not the count of cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharedHost:
    """A machine that several streams run on, and what firings cost there beside their launches.

    `capacity` is in threads' worth of work, `demands` by actor; `wake_ns` by actor is what passes
    until a thread that waits begins, `post_ns` until others hear that a firing has ended.
    """

    capacity: float
    demands: tuple[float, ...]
    wake_ns: tuple[float, ...]
    post_ns: tuple[float, ...]


def fair_shares(demands: Sequence[float], capacity: float) -> tuple[float, ...]:
    """Return the max-min fair shares: nobody gets more than it wants, or than who wants more.

    Their sum is that of the demands, or the capacity if that is less. O(n log n).
    """
    shares = [0.0] * len(demands)
    left = capacity
    order = sorted(range(len(demands)), key=demands.__getitem__)
    for place, index in enumerate(order):
        shares[index] = min(demands[index], left / (len(order) - place))
        left -= shares[index]
    return tuple(shares)


class RunningFirings:
    """The firings under way, each with the work that is left of it.

    Times are whole nanoseconds; `due` tells when a firing ends if nothing else begins or ends.
    """

    __slots__ = ("_capacity", "_demands", "_due", "_left_ns", "_since", "_speeds")

    def __init__(self, host: SharedHost) -> None:
        self._capacity = host.capacity
        self._demands = host.demands
        self._left_ns: dict[int, float] = {}
        self._speeds: dict[int, float] = {}
        self._due: dict[int, int] = {}
        self._since = 0

    def begin(self, actor: int, now: int, duration_ns: float) -> None:
        """Add a firing that takes this long when it is alone."""
        self._advance(now)
        self._left_ns[actor] = duration_ns
        self._share(now)

    def end(self, actor: int, now: int) -> None:
        """Take a firing out."""
        self._advance(now)
        for column in (self._left_ns, self._speeds, self._due):
            del column[actor]
        self._share(now)

    def is_due(self, actor: int, now: int) -> bool:
        """Whether a firing ends now; others have changed its end since it was announced, if not."""
        return self._due.get(actor) == now

    def due(self) -> Iterator[tuple[int, int]]:
        """Yield the firings under way with their ends."""
        yield from self._due.items()

    def _advance(self, now: int) -> None:
        passed = now - self._since
        for actor, speed in self._speeds.items():
            self._left_ns[actor] -= passed * speed
        self._since = now

    def _share(self, now: int) -> None:
        wanted = [self._demands[actor] for actor in self._left_ns]
        shares = fair_shares(wanted, self._capacity)
        for actor, demand, share in zip(self._left_ns, wanted, shares, strict=True):
            self._speeds[actor] = share / demand if demand else 1.0
            left_ns = max(self._left_ns[actor], 0.0)
            self._due[actor] = now + round(left_ns / self._speeds[actor])
