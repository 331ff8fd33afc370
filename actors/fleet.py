"""Ranks in one calendar, each with a plan of its own, that meet in groups.

A firing of a COMM actor begins on a rank when the rank's machine fires it and its stream is free.
Its meetings come one after the other: each begins when the last rank of its group has come, and
ends on all of them together, after the time of the transfer. Several groups may be under way, as
may be several meetings of one group; on a rank, those of one stream come one after the other.

Ranks that are alike (`compiler.rank_plans`), in speed and in the time of all their transfers too,
do the same at all times: one of them is run for all. With jitter no two are alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from random import Random

from actors.network import Network, Transfer, transfers
from actors.simulate import Calendar, Meet, SimulatedRun, VirtualRank
from actors.table import MachineTable
from actors.transitions import Message, message
from compiler.errors import InternalError
from compiler.meetings import RECEIVE, Meeting
from compiler.rank_plans import RankPlans


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """How ranks differ, and what joins them: `slowdowns` are factors on durations, by rank."""

    network: Network
    slowdowns: tuple[float, ...]
    jitter: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class Gathering:
    """A meeting of one group: who takes part, and when each time began to move bytes and ended.

    `members` are kinds of ranks with the actor and the turn in its firing; `present` are the kinds
    that have come. `number` is its place among all.
    """

    group: tuple[int, ...]
    meeting: Meeting
    duration_ns: float
    number: int = -1
    members: list[tuple[int, int, int]] = field(default_factory=list)
    present: list[int] = field(default_factory=list)
    times: list[tuple[int, int]] = field(default_factory=list)


class Fleet:
    """Ranks with their plans on virtual time.

    Args:
        ranks: The plan of each rank.
        durations_ns: Of a firing, by class of ranks and actor, at full speed.
        options: How ranks differ, and what joins them.

    `first_rank` has a rank of each kind, and `counts` how many ranks are of that kind. `marks` are
    what tells ranks of one plan apart: their slowdowns, and the times of their transfers.
    """

    def __init__(
        self, ranks: RankPlans, durations_ns: Sequence[Sequence[float]], options: FleetOptions
    ) -> None:
        self.ranks = ranks
        self.calendar = Calendar()
        self._options = options
        self._links = Random(f"{options.seed} links")
        self._prices = _Prices(ranks, options.network)
        every = range(ranks.mesh.num_ranks)
        self.marks = [(options.slowdowns[rank], *self._durations_ns(rank)) for rank in every]
        self._kinds = tuple(every) if options.jitter else ranks.alike(self.marks)
        first = {kind: rank for rank, kind in reversed(list(enumerate(self._kinds)))}
        self.first_rank = [first[kind] for kind in range(len(first))]
        self.counts = [0] * len(first)
        for kind in self._kinds:
            self.counts[kind] += 1
        self._met: list[dict[int, list[Gathering]]] = [{} for _ in first]
        self.gatherings = self._gather()
        tables = [MachineTable.of(plan) for plan in ranks.plans]
        self.runs = [
            VirtualRank(
                kind,
                tables[ranks.class_of[rank]],
                [d * options.slowdowns[rank] for d in durations_ns[ranks.class_of[rank]]],
                self.calendar,
                rng=Random(options.seed + rank),
                jitter=options.jitter,
                meets=self._meets(kind, tables[ranks.class_of[rank]].num_actors),
            )
            for kind, rank in enumerate(self.first_rank)
        ]

    def run(self, steps: int) -> Iterator[SimulatedRun]:
        """Run all kinds of ranks to their end; yield their runs, which take memory, in turn.

        Raises InternalError where ranks wait for each other for ever.
        """
        runs, calendar = self.runs, self.calendar
        for rank, run in zip(self.first_rank, self.runs, strict=True):
            plan = self.ranks.plans[self.ranks.class_of[rank]]
            run.start(steps * plan.int_option("accumulate", 1))
        while calendar:
            now, number, code = calendar.next()
            if number >= 0:
                runs[number].take(now, code)
            else:
                self._part(self.gatherings[-1 - number], now)
        self._check_met()
        for run in runs:
            yield run.finish(steps)

    def sent_bytes(self, kind: int, firings: Sequence[int]) -> float:
        """Return the bytes that a rank of a kind sends in so many firings of its actors."""
        rank, total = self.first_rank[kind], 0.0
        for meeting in self.ranks.meetings[self.ranks.class_of[rank]]:
            total += firings[meeting.actor] * self._prices.sent_bytes(rank, meeting)
        return total

    def transfers(self, kind: int, actor: int, firing: int) -> list[tuple[int, int]]:
        """Return when bytes moved in a firing of a rank of a kind."""
        return [gathering.times[firing] for gathering in self._met[kind].get(actor, ())]

    def _durations_ns(self, rank: int) -> list[float]:
        meetings = self.ranks.meetings[self.ranks.class_of[rank]]
        return [self._prices.duration_ns(rank, meeting) for meeting in meetings]

    # -- who meets whom --------------------------------------------------------------------------

    def _gather(self) -> list[Gathering]:
        """Return all gatherings, in the one order of the job, and note whom each kind meets.

        A group of one rank is none: what it does is a firing like any other.
        """
        found: dict[tuple[str, frozenset[int], tuple[int, int]], Gathering] = {}
        kinds_of: dict[tuple[int, ...], frozenset[int]] = {}
        for kind, rank in enumerate(self.first_rank):
            for meeting in self.ranks.meetings[self.ranks.class_of[rank]]:
                group = self.ranks.group(rank, meeting)
                if len(group) < 2:
                    continue
                if group not in kinds_of:
                    kinds_of[group] = frozenset([self._kinds[member] for member in group])
                key = meeting.group, kinds_of[group], meeting.place
                if key not in found:
                    found[key] = Gathering(group, meeting, self._prices.duration_ns(rank, meeting))
                own = self._met[kind].setdefault(meeting.actor, [])
                found[key].members.append((kind, meeting.actor, len(own)))
                own.append(found[key])
        in_order = sorted(found.values(), key=lambda own: (own.meeting.place, own.group))
        for number, gathering in enumerate(in_order):
            gathering.number = number
        return in_order

    def _meets(self, kind: int, num_actors: int) -> list[Meet | None]:
        """Return what each actor of a kind of ranks calls when it begins a firing."""
        met = self._met[kind]
        return [
            partial(self._come, met[actor][0], kind) if actor in met else None
            for actor in range(num_actors)
        ]

    def _come(self, gathering: Gathering, kind: int, _actor: int = 0) -> None:
        """Let a kind of ranks come to a gathering; the last one starts the transfer."""
        gathering.present.append(kind)
        if len(gathering.present) < len(gathering.members):
            return
        duration = gathering.duration_ns
        if self._options.jitter:
            jitter = self._options.jitter
            duration *= self._links.uniform(1 - jitter, 1 + jitter)
        now = self.runs[kind].now
        end = now + round(duration)
        gathering.times.append((now, end))
        self.calendar.together(end, gathering.number)

    def _part(self, gathering: Gathering, now: int) -> None:
        """End a gathering: each rank comes to its next one, or its firing is done."""
        gathering.present.clear()
        for kind, actor, turn in gathering.members:
            run, own = self.runs[kind], self._met[kind][actor]
            if turn + 1 < len(own):
                run.now = now
                self._come(own[turn + 1], kind)
            else:
                run.take(now, message(Message.DONE, actor))

    def _check_met(self) -> None:
        for gathering in self.gatherings:
            if not gathering.present:
                continue
            group = gathering.group
            present = [r for r in group if self._kinds[r] in gathering.present]
            missing = [r for r in group if self._kinds[r] not in gathering.present]
            raise InternalError(
                f"the ranks wait for each other: {len(present)} of {len(group)} came to firing"
                f" {len(gathering.times)} of {gathering.meeting.moves[0]}, rank {missing[0]} did"
                " not. Do two collectives share a stream in an order that differs between ranks?"
            )


class _Prices:
    """What meetings take on a network, and the bytes that ranks send there."""

    def __init__(self, ranks: RankPlans, network: Network) -> None:
        self._ranks = ranks
        self._network = network
        self._transfers: dict[tuple[str, int | None, int | None, str], dict[int, Transfer]] = {}

    def duration_ns(self, rank: int, meeting: Meeting) -> float:
        """Return the time of a meeting of a rank that nobody is late for."""
        return sum(
            [
                self._transfer(rank, meeting, op).duration_ns(size)
                for op, size in _sizes(meeting).items()
            ]
        )

    def sent_bytes(self, rank: int, meeting: Meeting) -> float:
        """Return the bytes that a rank sends in a meeting."""
        return sum(
            [
                self._transfer(rank, meeting, op).sent_bytes(size)
                for op, size in _sizes(meeting).items()
                if op != RECEIVE
            ]
        )

    def _transfer(self, rank: int, meeting: Meeting, op: str) -> Transfer:
        """Return how a rank moves bytes in a meeting, while all groups beside its own do so."""
        ranks, place = self._ranks, None
        if meeting.peer is not None:
            place = ranks.mesh.coordinates(rank)[ranks.mesh.axis(meeting.group)]
        key = meeting.group, meeting.peer, place, op
        if key not in self._transfers:
            groups = ranks.beside(rank, meeting)
            ways = tuple([group[::-1] for group in groups]) if op == RECEIVE else groups
            found = transfers(self._network, op, ways)
            self._transfers[key] = {
                member: own for group, own in zip(groups, found, strict=True) for member in group
            }
        return self._transfers[key][rank]


@lru_cache(1 << 12)
def _sizes(meeting: Meeting) -> dict[str, int]:
    """Return the bytes that a group has together, by op: launches of one firing go together."""
    sizes: dict[str, int] = {}
    for move in meeting.moves:
        sizes[move.op] = sizes.get(move.op, 0) + move.whole.size_bytes
    return sizes
