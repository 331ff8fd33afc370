"""What joins ranks, and what collectives take on it: hosts, racks, and links that are shared.

Ranks stand host by host, hosts rack by rack. Inside a host every rank has a port of its own; all
ranks of a host share its link to the switch of the rack, and all hosts of a rack the rack's uplink.
Every link carries as much each way at the same time. What goes to another host passes the links
that lie between, and its message takes the latency of each kind once: of the hosts' links, and of
the racks' where it leaves the rack.

An algorithm is rounds of messages that are on their way at the same time. Where several share a
link they share it max-min fair: all rates rise together until a link is full, then those of the
others do (Bertsekas & Gallager, "Data Networks", 1992, section 6.5.2). A round takes as long as its
slowest message, for every rank needs what it receives.

Of an all-reduce:

- *ring*: each rank sends to the next one, 2 (N-1) rounds of 1/N of the bytes; no algorithm moves
  less (Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
- *halving*: vector halving and distance doubling, as many bytes in 2 log2 N rounds (Thakur,
  Rabenseifner & Gropp, "Optimization of collective communication operations in MPICH", 2005); N
  that is no power of two is priced with the next one's number of rounds.
- *hierarchical*: a ring inside of each host, of 1/L of the bytes for L ranks, and between hosts a
  ring for each of these parts; all parts of a host share its link.

Its first half leaves each rank its part of the sum, its second half brings the parts to all: so a
reduce-scatter, or an all-gather, is half of its rounds. In an all-to-all every rank sends to every
other one what is that one's, in N-1 rounds of 1/N^2 of the whole tensor; what one stage sends to
another is one message. Groups that do the same at the same time share what lies between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, zip_longest

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


Pace = tuple[float, float]
"""Latency of a message, and the gigabytes per second that it gets."""

_Round = tuple[int, float, list[Pair]]
"""How often it comes, the share of all bytes in each message, and the messages."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a collective is on a network, in rounds: how often, the share of all bytes, and paces.

    A message of each round is as fast as one of its paces, of which none comes twice.
    """

    rounds: tuple[tuple[int, float, tuple[Pace, ...]], ...]

    def duration_ns(self, size_bytes: float) -> float:
        """Return the time that it takes when nobody is late; bytes are those of the whole."""
        return sum(
            [
                times * max([latency + share * size_bytes / rate for latency, rate in paces])
                for times, share, paces in self.rounds
            ]
        )

    def sent_bytes(self, size_bytes: float) -> float:
        """Return the bytes that each rank that sends sends."""
        return size_bytes * sum([times * share for times, share, _ in self.rounds])


@lru_cache(256)
def transfers(network: Network, op: str, groups: tuple[tuple[int, ...], ...]) -> list[Transfer]:
    """Return a collective in each of some groups of ranks, all at the same time.

    A group is in the order of its parts; of one that sends it is the sender and the receiver.

    Raises ValueError where the algorithm asks for full hosts, and one is not.
    """
    found: list[list[tuple[int, float, tuple[Pace, ...]]]] = [[] for _ in groups]
    for together in zip_longest(*[_rounds(network, op, group) for group in groups]):
        rounds = [(i, own) for i, own in enumerate(together) if own is not None]
        ways = [network.way(pair) for _, (_, _, pairs) in rounds for pair in pairs]
        rates = iter(zip(ways, fair_rates([links for _, links in ways]), strict=True))
        for index, (times, share, pairs) in rounds:
            own = [(latency, rate) for (latency, _), rate in islice(rates, len(pairs))]
            found[index].append((times, share, tuple(dict.fromkeys(own))))
    return [Transfer(tuple(rounds)) for rounds in found]


def _rounds(network: Network, op: str, ranks: Sequence[int]) -> Iterator[_Round]:
    count = len(ranks)
    if count < 2:
        return
    if op in ("send", "receive"):
        yield 1, 1.0, [(ranks[0], ranks[1])]
    elif op == "all_to_all":
        # Where all links are alike, so are all rounds.
        alike = network.per_host == 1 and not network.per_rack
        for away in range(1, 2 if alike else count):
            pairs = [(ranks[i - away], ranks[i]) for i in range(count)]
            yield count - 1 if alike else 1, 1 / count**2, pairs
    else:
        halves = 2 if op == "all_reduce" else 1
        for times, share, pairs in _half_rounds(network, ranks):
            yield halves * times, share, pairs


def _half_rounds(network: Network, ranks: Sequence[int]) -> Iterator[_Round]:
    """Yield the rounds of the first half of an all-reduce; those of the second are as many."""
    if network.algorithm == "ring":
        yield len(ranks) - 1, 1 / len(ranks), _ring(ranks)
    elif network.algorithm == "halving":
        yield from _halving(ranks)
    else:
        yield from _hierarchical(network.per_host, ranks)


def _ring(ranks: Sequence[int]) -> list[Pair]:
    return [(ranks[i - 1], ranks[i]) for i in range(len(ranks))]


def _halving(ranks: Sequence[int]) -> Iterator[_Round]:
    count = len(ranks)
    doublings = (count - 1).bit_length()
    of_power = 1 - 2.0**-doublings
    for i in range(doublings):
        share = 2.0 ** -(i + 1) * (1 - 1 / count) / of_power
        yield 1, share, [(ranks[r], ranks[r ^ 1 << i]) for r in range(count) if r ^ 1 << i < count]


def _hierarchical(per_host: int, ranks: Sequence[int]) -> Iterator[_Round]:
    by_host: dict[int, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(rank // per_host, []).append(rank)
    hosts = list(by_host.values())
    own = len(hosts[0])
    if any([len(host) != own for host in hosts]):
        raise ValueError(
            f"a hierarchical all-reduce needs full hosts: {len(ranks)} ranks, {per_host} to a host"
        )
    if own > 1:
        yield own - 1, 1 / own, [pair for host in hosts for pair in _ring(host)]
    if len(hosts) > 1:
        across = [pair for i in range(own) for pair in _ring([host[i] for host in hosts])]
        yield len(hosts) - 1, 1 / len(ranks), across


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
