"""What joins ranks, and what an all-reduce takes on it: hosts, racks, and links that are shared.

Ranks stand host by host, hosts rack by rack. Inside a host every rank has a port of its own; all
ranks of a host share its link to the switch of the rack, and all hosts of a rack the rack's uplink.
Every link carries as much each way at the same time. What goes to another host passes the links
that lie between, and its message takes the latency of each kind once: of the hosts' links, and of
the racks' where it leaves the rack.

An algorithm is rounds of messages that are on their way at the same time. Where several share a
link they share it max-min fair: all rates rise together until a link is full, then those of the
others do (Bertsekas & Gallager, "Data Networks", 1992, section 6.5.2). A round takes as long as its
slowest message, for every rank needs what it receives.

- *ring*: each rank sends to the next one, 2 (N-1) rounds of 1/N of the bytes; no algorithm moves
  less (Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
- *halving*: vector halving and distance doubling, as many bytes in 2 log2 N rounds (Thakur,
  Rabenseifner & Gropp, "Optimization of collective communication operations in MPICH", 2005); N
  that is no power of two is priced with the next one's number of rounds.
- *hierarchical*: a ring inside of each host, of 1/L of the bytes for L ranks, and between hosts a
  ring for each of these parts; all parts of a host share its link.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

ALGORITHMS = ("ring", "halving", "hierarchical")

Pair = tuple[int, int]
"""Who sends, and who receives."""


@dataclass(frozen=True, slots=True)
class Wire:
    """A link: gigabytes (10^9) per second each way, and time per message."""

    gb_s: float
    latency_ns: float


@dataclass(frozen=True, slots=True)
class Network:
    """What joins the ranks.

    `between` is the link of each host, `inside` the port of each of its `per_host` ranks to the
    others there. With `per_rack` hosts to a rack, `uplink` is the link of each rack; 0: all hosts
    are at one switch. `algorithm` is one of `ALGORITHMS`.
    """

    between: Wire
    algorithm: str = "ring"
    per_host: int = 1
    inside: Wire = Wire(50.0, 1_000.0)
    per_rack: int = 0
    uplink: Wire = Wire(12.5, 1_000.0)

    def all_reduce_ns(self, num_ranks: int, size_bytes: float) -> float:
        """Return the time of an all-reduce that nobody is late for.

        Raises ValueError where the algorithm asks for full hosts, and one is not.
        """
        return sum(
            [
                times * max([latency + share * size_bytes / rate for latency, rate in paces])
                for times, share, paces in _rounds_paced(self, num_ranks)
            ]
        )

    def sent_bytes(self, num_ranks: int, size_bytes: float) -> float:
        """Return the bytes that each rank sends in an all-reduce."""
        rounds = _rounds_paced(self, num_ranks)
        return size_bytes * sum([times * share for times, share, _ in rounds])

    def way(self, pair: Pair) -> tuple[float, tuple[tuple[str, int, float], ...]]:
        """Return the latency of a message, and the links that it passes, with their gigabytes."""
        sender, receiver = pair
        hosts = sender // self.per_host, receiver // self.per_host
        if hosts[0] == hosts[1]:
            port = self.inside.gb_s
            return self.inside.latency_ns, (("out", sender, port), ("in", receiver, port))
        speed, latency = self.between.gb_s, self.between.latency_ns
        links = [("host out", hosts[0], speed), ("host in", hosts[1], speed)]
        racks = [host // self.per_rack if self.per_rack else 0 for host in hosts]
        if racks[0] != racks[1]:
            speed, latency = self.uplink.gb_s, latency + self.uplink.latency_ns
            links += [("rack out", racks[0], speed), ("rack in", racks[1], speed)]
        return latency, tuple(links)


_Pace = tuple[float, float]
"""Latency of a message, and the gigabytes per second that it gets."""

_Round = tuple[int, float, list[Pair]]
"""How often it comes, the share of all bytes in each message, and the messages."""


@lru_cache(64)
def _rounds_paced(
    network: Network, num_ranks: int
) -> tuple[tuple[int, float, tuple[_Pace, ...]], ...]:
    """Return the rounds with the paces of their messages, each pace once."""
    found: list[tuple[int, float, tuple[_Pace, ...]]] = []
    for times, share, pairs in _rounds(network, num_ranks):
        ways = [network.way(pair) for pair in pairs]
        rates = fair_rates([links for _, links in ways])
        paces = dict.fromkeys([(way[0], rate) for way, rate in zip(ways, rates, strict=True)])
        found.append((times, share, tuple(paces)))
    return tuple(found)


def _rounds(network: Network, num_ranks: int) -> Iterator[_Round]:
    if num_ranks < 2:
        return
    if network.algorithm == "ring":
        yield 2 * (num_ranks - 1), 1 / num_ranks, _ring(range(num_ranks))
    elif network.algorithm == "halving":
        yield from _halving(num_ranks)
    else:
        yield from _hierarchical(network.per_host, num_ranks)


def _ring(ranks: Sequence[int]) -> list[Pair]:
    return [(ranks[i - 1], ranks[i]) for i in range(len(ranks))]


def _halving(num_ranks: int) -> Iterator[_Round]:
    doublings = (num_ranks - 1).bit_length()
    of_power = 1 - 2.0**-doublings
    for i in range(doublings):
        share = 2.0 ** -(i + 1) * (1 - 1 / num_ranks) / of_power
        yield 2, share, [(r, r ^ 1 << i) for r in range(num_ranks) if r ^ 1 << i < num_ranks]


def _hierarchical(per_host: int, num_ranks: int) -> Iterator[_Round]:
    if num_ranks % per_host:
        raise ValueError(
            f"a hierarchical all-reduce needs full hosts: {num_ranks} ranks, {per_host} to a host"
        )
    starts = range(0, num_ranks, per_host)
    if per_host > 1:
        inside = [pair for start in starts for pair in _ring(range(start, start + per_host))]
        yield 2 * (per_host - 1), 1 / per_host, inside
    if len(starts) > 1:
        across = [pair for i in range(per_host) for pair in _ring([s + i for s in starts])]
        yield 2 * (len(starts) - 1), 1 / num_ranks, across


def fair_rates(ways: Sequence[Iterable[tuple[str, int, float]]]) -> list[float]:
    """Return the max-min fair rate of each of some messages, in the unit of the links' speeds.

    A message is given by its links: name, number and speed. O(links) for each speed that is found.
    """
    on_link: dict[tuple[str, int], list[int]] = {}
    left: dict[tuple[str, int], float] = {}
    for message, links in enumerate(ways):
        for name, number, speed in links:
            on_link.setdefault((name, number), []).append(message)
            left[name, number] = speed
    waiting = {link: len(messages) for link, messages in on_link.items()}
    rates = [0.0] * len(ways)
    is_open = [True] * len(ways)
    passed = [[link[:2] for link in links] for links in ways]
    while waiting:
        rate = min([left[link] / count for link, count in waiting.items()])
        # All links that are full at this rate at once: in a network of like hosts most are.
        full = [link for link, count in waiting.items() if left[link] <= rate * count * (1 + 1e-12)]
        for message in [m for link in full for m in on_link[link]]:
            if not is_open[message]:
                continue
            rates[message], is_open[message] = rate, False
            for link in passed[message]:
                left[link] -= rate
                waiting[link] -= 1
        waiting = {link: count for link, count in waiting.items() if count}
    return rates
