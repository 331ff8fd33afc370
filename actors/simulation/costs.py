"""What simulated runs cost: collectives on a network, firings that share cores, and messages.

**Network.** Ranks stand host by host, hosts rack by rack. Inside a host every rank has a port of
its own; all ranks of a host share its link to the switch of the rack, and all hosts of a rack the
rack's uplink. Every link carries as much each way at the same time. What goes to another host
passes the links that lie between, and its message takes the latency of each kind once: of the
hosts' links, and of the racks' where it leaves the rack.

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
  ring for each of these parts; all parts of a host share its link. It is what the compiler prices
  (`compiler.contract.placement.collective_rounds`). Of a group that hosts have unlike parts of it
  is one ring.

Its first half leaves each rank its part of the sum, its second half brings the parts to all: so a
reduce-scatter, or an all-gather, is half of its rounds. In an all-to-all every rank sends to every
other one what is that one's, in N-1 rounds of 1/N^2 of the whole tensor; a hierarchy has rounds
inside of hosts and rounds between them. What one stage sends to another is one message. Groups that
do the same at the same time share what lies between them.

**Cores.** Firings that run at once share the cores of a machine (`SharedHost`, `RunningFirings`).
`RunCosts` holds what a firing costs beside its launches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, zip_longest
from typing import Annotated

from actors.kernels.common.cost import Price
from actors.machine.table import MachineTable
from compiler.contract.codec import Bounds
from compiler.contract.placement import collective_rounds
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import PORTED, Actor, ActorKind

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
        # Ranks are numbered host by host, and hosts rack by rack.
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
    """
    rounds_of: list[list[tuple[int, float, tuple[Pace, ...]]]] = [[] for _ in groups]
    for parallel in zip_longest(*[_rounds(network, op, group) for group in groups]):
        rounds = [(i, turn) for i, turn in enumerate(parallel) if turn is not None]
        ways = [network.way(pair) for _, (_, _, pairs) in rounds for pair in pairs]
        rates = iter(zip(ways, fair_rates([links for _, links in ways]), strict=True))
        for index, (times, share, pairs) in rounds:
            paces = [(latency, rate) for (latency, _), rate in islice(rates, len(pairs))]
            rounds_of[index].append((times, share, tuple(dict.fromkeys(paces))))
    return [Transfer(tuple(rounds)) for rounds in rounds_of]


def _rounds(network: Network, op: str, ranks: Sequence[int]) -> Iterator[_Round]:
    count = len(ranks)
    if count < 2:
        return
    if op in ("send", "receive"):
        yield 1, 1.0, [(ranks[0], ranks[1])]
        return
    hosts = _parts_of_hosts(network, ranks)
    if network.algorithm == "halving" and op != "all_to_all":
        # A reduce-scatter and then an all-gather, which are the same rounds.
        halves = 2 if op == "all_reduce" else 1
        for times, share, pairs in _halving(ranks):
            yield halves * times, share, pairs
        return
    for turn in collective_rounds(op, count, len(hosts[0])):
        share = turn.sent_bytes(1.0) / turn.times
        if op == "all_to_all":
            ways = _all_to_all(network, hosts, is_between=turn.is_between)
            yield from [(turn.times // len(ways), share, pairs) for pairs in ways]
        elif not turn.is_between:
            yield turn.times, share, [pair for host in hosts for pair in _ring(host)]
        else:
            yield (
                turn.times,
                share,
                [pair for lane in zip(*hosts, strict=True) for pair in _ring(lane)],
            )


def _parts_of_hosts(network: Network, ranks: Sequence[int]) -> list[list[int]]:
    """Return the ranks of a group by host; each alone where hosts mean nothing to the algorithm.

    So it is, too, where hosts have unlike parts of the group: it is one ring then.
    """
    by_host: dict[int, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(rank // network.per_host, []).append(rank)
    hosts = list(by_host.values())
    is_alike = all([len(host) == len(hosts[0]) for host in hosts])
    return hosts if is_alike and network.algorithm == "hierarchical" else [[rank] for rank in ranks]


def _all_to_all(
    network: Network, hosts: Sequence[Sequence[int]], *, is_between: bool
) -> list[list[Pair]]:
    """Return the messages of rounds of an all-to-all inside of hosts, or between them.

    Rounds that take the same time are returned once.
    """
    count, size = len(hosts), len(hosts[0])
    if not is_between:
        return [[(host[i - 1], host[i]) for host in hosts for i in range(size)]]
    # Where each host is as far as any other one, and a part of a group alone, rounds are alike.
    is_alike = not network.per_rack and (size > 1 or network.per_host == 1)
    return [
        [(a, b) for i in range(count) for a, b in zip(hosts[i - away], hosts[i], strict=True)]
        for away in range(1, 2 if is_alike else count)
    ]


def _ring(ranks: Sequence[int]) -> list[Pair]:
    return [(ranks[i - 1], ranks[i]) for i in range(len(ranks))]


def _halving(ranks: Sequence[int]) -> Iterator[_Round]:
    count = len(ranks)
    doublings = (count - 1).bit_length()
    # What the shares of all rounds add up to for a power of two; others are scaled to (1 - 1/N).
    of_power = 1 - 2.0**-doublings
    for i in range(doublings):
        share = 2.0 ** -(i + 1) * (1 - 1 / count) / of_power
        yield 1, share, [(ranks[r], ranks[r ^ 1 << i]) for r in range(count) if r ^ 1 << i < count]


def fair_rates(ways: Sequence[Iterable[tuple[str, int, float]]]) -> list[float]:
    """Return the max-min fair rate of each of some messages, in the unit of the links' speeds.

    A message is given by its links: name, number and speed. O(links) for each speed that is found.
    """
    on_link: dict[tuple[str, int], list[int]] = {}
    spare: dict[tuple[str, int], float] = {}
    for message, links in enumerate(ways):
        for name, number, speed in links:
            on_link.setdefault((name, number), []).append(message)
            spare[name, number] = speed
    active = {link: len(messages) for link, messages in on_link.items()}
    rates = [0.0] * len(ways)
    is_open = [True] * len(ways)
    passed = [[link[:2] for link in links] for links in ways]
    while active:
        # Progressive filling: the fullest link bounds the rate of all messages that are still open.
        rate = min([spare[link] / count for link, count in active.items()])
        # All links that are full at this rate at once: in a network of like hosts most are.
        # The tolerance is for rounding: links that fill up together must be taken together.
        full = [link for link, count in active.items() if spare[link] <= rate * count * (1 + 1e-12)]
        for message in [m for link in full for m in on_link[link]]:
            if not is_open[message]:
                continue
            rates[message], is_open[message] = rate, False
            for link in passed[message]:
                spare[link] -= rate
                active[link] -= 1
        active = {link: count for link, count in active.items() if count}
    return rates


# How firings share cores. One that runs alone keeps some cores busy: its *demand*, in threads'
# worth of work. While all demands fit into the machine's capacity, each firing runs at full speed.
# Beyond, nobody gets more than a fair share while another wants more: shares are max-min fair
# (Bertsekas & Gallager, "Data Networks", 1992, 6.5), and a firing is slowed down as far as its
# share is below its demand. So two streams whose launches use all cores gain nothing from each
# other, and two whose launches run on one thread gain a factor of two on two cores.
#
# The capacity is what all cores do in the time of one alone, which memory and shared cores bound: a
# measured number, not the count of cores.


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
    spare = capacity
    # Smallest first: what it does not use is left for those that want more.
    order = sorted(range(len(demands)), key=demands.__getitem__)
    for place, index in enumerate(order):
        shares[index] = min(demands[index], spare / (len(order) - place))
        spare -= shares[index]
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
        demands = [self._demands[actor] for actor in self._left_ns]
        shares = fair_shares(demands, self._capacity)
        for actor, demand, share in zip(self._left_ns, demands, shares, strict=True):
            self._speeds[actor] = share / demand if demand else 1.0
            left_ns = max(self._left_ns[actor], 0.0)
            # Announced anew for all: who begins or ends changes everybody's speed.
            self._due[actor] = now + round(left_ns / self._speeds[actor])


# A chain that runs on the dispatcher's thread costs a *turn* besides: the messages of its end, and
# the next begin. Between threads a message costs a *hop*: one thread lets the other go on, which
# sleeps. A port is Python on a thread of its own, and keeps one core busy.


Cost = Annotated[float, Bounds(0.0, 1e12)]


@dataclass(frozen=True, slots=True)
class RunCosts:
    """What a run of any plan costs here, beside its launches.

    `source_ns` and `sink_ns` are for one firing of a port, `port_byte_ns` for a byte of a batch.
    """

    turn_ns: Cost = 0.0
    hop_ns: Cost = 0.0
    source_ns: Cost = 0.0
    sink_ns: Cost = 0.0
    port_byte_ns: Cost = 0.0


def on_host(
    plan: Plan, firings: Sequence[Price], capacity: float, costs: RunCosts
) -> tuple[tuple[float, ...], SharedHost]:
    """Return the durations of a plan's firings with all that they cost, and who shares the cores.

    `firings` has the launches alone, by actor; `capacity` is as in `SharedHost`.
    """
    has_threads = MachineTable.of(plan).is_detached
    prices: list[Price] = []
    for actor, price, has_thread in zip(plan.actors, firings, has_threads, strict=True):
        if actor.kind in PORTED:
            port = _port_ns(plan, actor, costs)
            prices.append(Price(port, port))
        else:
            turn = 0.0 if has_thread else costs.turn_ns
            prices.append(Price(price.duration_ns + turn, price.busy_ns + turn))
    wakes = costs.hop_ns + (costs.turn_ns if all(has_threads) else 0.0)
    return tuple([x.duration_ns for x in prices]), SharedHost(
        capacity,
        tuple([x.busy_ns / x.duration_ns if x.duration_ns else 1.0 for x in prices]),
        tuple([wakes if has_thread else 0.0 for has_thread in has_threads]),
        tuple([costs.hop_ns if has_thread else 0.0 for has_thread in has_threads]),
    )


def _port_ns(plan: Plan, actor: Actor, costs: RunCosts) -> float:
    ports = (*actor.inputs, *actor.outputs)
    size = sum([plan.registers[port.register].size_bytes * port.rate for port in ports])
    base_ns = costs.source_ns if actor.kind is ActorKind.SOURCE else costs.sink_ns
    return base_ns + size * costs.port_byte_ns
