"""Many ranks on virtual time: what training on a mesh will cost that no one here can run.

Every rank is a machine of its own with the plan of its class, its own speed and jitter. All stand
in one calendar and meet in collectives (`MultiRankSimulator`). So a slow rank holds up the others,
as far as plans do not overlap. The launches of one firing travel together: their bytes add up,
their messages do not. `actors.simulation.costs` says what a transfer takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from random import Random

from actors.machine.table import MachineTable
from actors.machine.transitions import Message, message
from actors.simulation.costs import Network, Transfer, transfers
from actors.simulation.simulate import Calendar, Meet, SimulatedRun, VirtualRank, simulate
from compiler.contract.collective import RECEIVE
from compiler.contract.errors import InternalError
from compiler.contract.plan_tables import ActorKind
from compiler.contract.rank_plans import CollectiveGroup, RankPlans

# A firing of a COMM actor begins on a rank when the rank's machine fires it and its stream is free.
# Its meetings come one after the other: each begins when the last rank of its group has come, and
# ends on all of them together, after the time of the transfer. Several groups may be under way, as
# may be several meetings of one group; on a rank, those of one stream come one after the other.
#
# Ranks that are alike (`compiler.contract.rank_plans`), in speed and in the time of all their
# transfers too, do the same at all times: one of them is run for all. With jitter no two are alike.


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """How ranks differ, and what joins them: `slowdowns` are factors on durations, by rank."""

    network: Network
    slowdowns: tuple[float, ...]
    jitter: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class SimulatedCollective:
    """A meeting of one group: who takes part, and when each time began to move bytes and ended.

    `members` are kinds of ranks with the actor and the turn in its firing; `present` are the kinds
    that have come. `number` is its place among all.
    """

    group: tuple[int, ...]
    meeting: CollectiveGroup
    duration_ns: float
    number: int = -1
    members: list[tuple[int, int, int]] = field(default_factory=list)
    present: list[int] = field(default_factory=list)
    times: list[tuple[int, int]] = field(default_factory=list)


class MultiRankSimulator:
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
        all_ranks = range(ranks.mesh.num_ranks)
        self.marks = [(options.slowdowns[rank], *self._durations_ns(rank)) for rank in all_ranks]
        self._kinds = tuple(all_ranks) if options.jitter else ranks.equivalence_classes(self.marks)
        # Reversed, so that the lowest rank of each kind stays.
        first = {kind: rank for rank, kind in reversed(list(enumerate(self._kinds)))}
        self.first_rank = [first[kind] for kind in range(len(first))]
        self.counts = [0] * len(first)
        for kind in self._kinds:
            self.counts[kind] += 1
        self._met: list[dict[int, list[SimulatedCollective]]] = [{} for _ in first]
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

    def _gather(self) -> list[SimulatedCollective]:
        """Return all gatherings, in the one order of the job, and note whom each kind meets.

        A group of one rank is none: what it does is a firing like any other.
        """
        by_key: dict[tuple[str, frozenset[int], tuple[int, int]], SimulatedCollective] = {}
        kinds_of: dict[tuple[int, ...], frozenset[int]] = {}
        for kind, rank in enumerate(self.first_rank):
            for meeting in self.ranks.meetings[self.ranks.class_of[rank]]:
                group = self.ranks.group(rank, meeting)
                if len(group) < 2:
                    continue
                if group not in kinds_of:
                    kinds_of[group] = frozenset([self._kinds[member] for member in group])
                key = meeting.group, kinds_of[group], meeting.place
                if key not in by_key:
                    by_key[key] = SimulatedCollective(
                        group, meeting, self._prices.duration_ns(rank, meeting)
                    )
                collectives = self._met[kind].setdefault(meeting.actor, [])
                by_key[key].members.append((kind, meeting.actor, len(collectives)))
                collectives.append(by_key[key])
        # The numbers break ties of time in the calendar: equal runs for equal seeds.
        in_order = sorted(by_key.values(), key=lambda c: (c.meeting.place, c.group))
        for number, gathering in enumerate(in_order):
            gathering.number = number
        return in_order

    def _meets(self, kind: int, num_actors: int) -> list[Meet | None]:
        """Return what each actor of a kind of ranks calls when it begins a firing."""
        collectives_of = self._met[kind]
        return [
            partial(self._come, collectives_of[actor][0], kind) if actor in collectives_of else None
            for actor in range(num_actors)
        ]

    def _come(self, gathering: SimulatedCollective, kind: int, _actor: int = 0) -> None:
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

    def _part(self, gathering: SimulatedCollective, now: int) -> None:
        """End a gathering: each rank comes to its next one, or its firing is done."""
        gathering.present.clear()
        for kind, actor, turn in gathering.members:
            run, collectives = self.runs[kind], self._met[kind][actor]
            if turn + 1 < len(collectives):
                # No event of the rank's own brought it here, so its clock is set.
                run.now = now
                self._come(collectives[turn + 1], kind)
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
                f"the ranks wait for each other: {len(present)} of {len(group)} ranks arrived at"
                f" firing {len(gathering.times)} of {gathering.meeting.moves[0]}, and rank"
                f" {missing[0]} did not. Two collectives may share a stream in an order that"
                " differs between ranks"
            )


class _Prices:
    """What meetings take on a network, and the bytes that ranks send there."""

    def __init__(self, ranks: RankPlans, network: Network) -> None:
        self._ranks = ranks
        self._network = network
        self._transfers: dict[tuple[str, int | None, int | None, str], dict[int, Transfer]] = {}

    def duration_ns(self, rank: int, meeting: CollectiveGroup) -> float:
        """Return the time of a meeting of a rank that nobody is late for."""
        return sum(
            [
                self._transfer(rank, meeting, op).duration_ns(size)
                for op, size in _sizes(meeting).items()
            ]
        )

    def sent_bytes(self, rank: int, meeting: CollectiveGroup) -> float:
        """Return the bytes that a rank sends in a meeting."""
        return sum(
            [
                self._transfer(rank, meeting, op).sent_bytes(size)
                for op, size in _sizes(meeting).items()
                if op != RECEIVE
            ]
        )

    def _transfer(self, rank: int, meeting: CollectiveGroup, op: str) -> Transfer:
        """Return how a rank moves bytes in a meeting, while all groups beside its own do so."""
        ranks, place = self._ranks, None
        if meeting.peer is not None:
            place = ranks.mesh.coordinates(rank)[ranks.mesh.axis(meeting.group)]
        key = meeting.group, meeting.peer, place, op
        if key not in self._transfers:
            groups = ranks.parallel_groups(rank, meeting)
            # A receive is the send of its peer, seen from the other end.
            ways = tuple([group[::-1] for group in groups]) if op == RECEIVE else groups
            by_group = transfers(self._network, op, ways)
            self._transfers[key] = {
                member: move
                for group, move in zip(groups, by_group, strict=True)
                for member in group
            }
        return self._transfers[key][rank]


@lru_cache(1 << 12)
def _sizes(meeting: CollectiveGroup) -> dict[str, int]:
    """Return the bytes that a group has together, by op: launches of one firing go together."""
    sizes: dict[str, int] = {}
    for move in meeting.moves:
        sizes[move.op] = sizes.get(move.op, 0) + move.whole.size_bytes
    return sizes


_RUNS = (ActorKind.COMPUTE, ActorKind.COPY)

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Spread:
    """How speeds differ: one rank is `straggler` times as slow, all by exp(N(0, sigma))."""

    straggler: float = 1.0
    sigma: float = 0.0

    def slowdowns(self, num_ranks: int, rng: Random) -> tuple[float, ...]:
        """Return the factor on the durations of every rank."""
        factors = [rng.lognormvariate(0.0, self.sigma) for _ in range(num_ranks)]
        if self.straggler != 1.0:
            factors[rng.randrange(num_ranks)] *= self.straggler
        return tuple(factors)


@dataclass(frozen=True, slots=True)
class RanksRun:
    """What a simulated run of many ranks did.

    `alone_ns` and `step_ns` are per step in steady state, of one rank of full speed without
    collectives (of several classes the slowest) and of the slowest of all ranks with them.
    `exposed_ns` is the part of a step in which a rank computes nothing while bytes move, `late_ns`
    the part in which it computes nothing while a collective waits for a later rank; means over the
    ranks. `slowest` is the run of rank
    `slowest_rank`, the one with the most to compute, and `wire_bytes` is what it sends per step.
    `num_kinds` is how many ranks were run: all others are like one of these.
    """

    num_ranks: int
    num_kinds: int
    steps: int
    makespan_ns: int
    alone_ns: float
    step_ns: float
    exposed_ns: float
    late_ns: float
    wire_bytes: float
    slowdowns: tuple[float, ...]
    slowest_rank: int
    slowest: SimulatedRun

    @property
    def efficiency(self) -> float:
        """Share of the ranks' steps that one rank alone would have done in the time."""
        return self.alone_ns / self.step_ns if self.step_ns else 1.0


def simulate_ranks(
    ranks: RankPlans,
    steps: int,
    *,
    network: Network,
    spread: Spread = Spread(),
    jitter: float = 0.0,
    seed: int = 0,
    durations_ns: Sequence[Sequence[float]] | None = None,
) -> RanksRun:
    """Run `steps` steps on every rank to their end on virtual time.

    Takes the time of a run for each kind of ranks that can be told apart, by plans, by whom they
    meet, and by speed: with jitter, or speeds that all differ, for each rank.

    Args:
        ranks: The plan of each rank.
        steps: Steps to admit on every rank.
        network: What joins them.
        spread: How their speeds differ; drawn by the seed.
        jitter: Durations, of collectives too, are scaled by a factor within 1 - jitter and
            1 + jitter.
        seed: Equal seeds give equal runs.
        durations_ns: Duration of a firing by class of ranks and actor, on a rank of full speed,
            whatever it says of COMM actors; default: as the plans estimate.

    Raises:
        ValueError: The number of durations is wrong.
        InternalError: The ranks wait for each other for ever.
    """
    local = _local_ns(ranks, durations_ns)
    num_ranks = ranks.mesh.num_ranks
    alone_ns = max(
        [
            simulate(plan, steps, durations, seed=seed, jitter=jitter).period_ns
            for plan, durations in zip(ranks.plans, local, strict=True)
        ]
    )
    slowdowns = spread.slowdowns(num_ranks, Random(f"{seed} slowdowns"))
    fleet = MultiRankSimulator(ranks, local, FleetOptions(network, slowdowns, jitter, seed))
    makespan = exposed = late = longest = slowest_kind = 0
    step_ns = 0.0
    slowest: SimulatedRun | None = None
    for kind, run in enumerate(fleet.run(steps)):
        makespan, step_ns = max(makespan, run.makespan_ns), max(step_ns, run.period_ns)
        computing, uncovered, waiting = _coverage(fleet, kind, run)
        exposed += fleet.counts[kind] * uncovered
        late += fleet.counts[kind] * waiting
        if slowest is None or computing > longest:
            longest, slowest_kind, slowest = computing, kind, run
    if slowest is None:
        raise ValueError("there are no ranks")
    shares = max(num_ranks * steps, 1)
    return RanksRun(
        num_ranks=num_ranks,
        num_kinds=len(fleet.runs),
        steps=steps,
        makespan_ns=makespan,
        alone_ns=alone_ns,
        step_ns=step_ns,
        exposed_ns=exposed / shares,
        late_ns=late / shares,
        wire_bytes=fleet.sent_bytes(slowest_kind, slowest.firings) / max(steps, 1),
        slowdowns=slowdowns,
        slowest_rank=fleet.first_rank[slowest_kind],
        slowest=slowest,
    )


def _local_ns(
    ranks: RankPlans, durations_ns: Sequence[Sequence[float]] | None
) -> list[list[float]]:
    """Return the durations of firings by class and actor, none of COMM actors."""
    if durations_ns is None:
        durations_ns = [[actor.duration_ns for actor in plan.actors] for plan in ranks.plans]
    if len(durations_ns) != len(ranks.plans):
        raise ValueError(
            f"expected durations_ns for {len(ranks.plans)} plans, got {len(durations_ns)}"
        )
    for plan, row in zip(ranks.plans, durations_ns, strict=True):
        if len(row) != len(plan.actors):
            raise ValueError(f"expected durations_ns for {len(plan.actors)} actors, got {len(row)}")
    return [
        [
            0.0 if actor.kind is ActorKind.COMM else duration
            for actor, duration in zip(plan.actors, row, strict=True)
        ]
        for plan, row in zip(ranks.plans, durations_ns, strict=True)
    ]


def _coverage(fleet: MultiRankSimulator, kind: int, run: SimulatedRun) -> tuple[int, int, int]:
    """Return three times of a rank's run.

    In which it computes; in which bytes move that no compute covers; and in which neither is true
    while a collective waits for a later rank.
    """
    plan = fleet.ranks.plans[fleet.ranks.class_of[fleet.first_rank[kind]]]
    kinds = [actor.kind for actor in plan.actors]
    compute = [row[2:] for row in run.rows if kinds[row[0]] in _RUNS]
    comm = [row for row in run.rows if kinds[row[0]] is ActorKind.COMM]
    moved = [span for row in comm for span in fleet.transfers(kind, row[0], row[1])]
    computing, moving = _union_ns(compute), _union_ns(compute + moved)
    waiting = _union_ns(compute + [row[2:] for row in comm])
    return computing, moving - computing, waiting - moving


def _union_ns(intervals: Iterable[Interval]) -> int:
    """Return the time covered by intervals."""
    total, until = 0, 0
    for start, end in sorted(intervals):
        if end > until:
            total += end - max(start, until)
            until = end
    return total
