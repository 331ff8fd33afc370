"""Many ranks on virtual time: what data parallelism will cost that no one here can run.

Every rank is a machine of its own with a copy of one plan, its own speed and its own jitter; they
meet in collectives. A firing of a COMM actor begins on a rank when the rank's machine fires it and
its stream is free, and ends on all ranks together: when the last of them has come, plus the time of
the transfer. So a slow rank holds up the others, as far as the plan does not overlap. The launches
of one firing travel together: their bytes add up, their messages do not.

What a transfer takes is the business of `actors.network`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from actors.network import Network
from actors.simulate import Calendar, SimulatedRun, VirtualRank
from actors.table import MachineTable
from actors.transitions import Message, message
from compiler.errors import InternalError
from compiler.plan import Actor, ActorKind, Plan

ALL_REDUCE = "all_reduce"

_EVERYONE = -1
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
    collectives and of the slowest of all ranks with them. `exposed_ns` is the part of a step in
    which a rank computes nothing while bytes move, `late_ns` the part in which it computes nothing
    while a collective waits for a later rank; means over the ranks. `wire_bytes` is what each rank
    sends per step. `slowest` is the run of rank `slowest_rank`, the one with the most to compute.
    """

    num_ranks: int
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
    plan: Plan,
    num_ranks: int,
    steps: int,
    *,
    network: Network,
    spread: Spread = Spread(),
    jitter: float = 0.0,
    seed: int = 0,
    durations_ns: Sequence[float] | None = None,
) -> RanksRun:
    """Run `steps` steps of a plan on every one of `num_ranks` ranks to their end on virtual time.

    Args:
        plan: A plan whose COMM actors launch all-reduces.
        num_ranks: Number of ranks, each with the plan's whole work.
        steps: Steps to admit on every rank.
        network: What joins them.
        spread: How their speeds differ; drawn by the seed.
        jitter: Durations, of collectives too, are scaled by a factor within 1 - jitter and
            1 + jitter.
        seed: Equal seeds give equal runs.
        durations_ns: Duration of a firing per actor on a rank of full speed, whatever it says of
            COMM actors; default: as the plan estimates.

    Raises:
        ValueError: num_ranks is below 1, or the number of durations is wrong.
        InternalError: The ranks wait for each other for ever.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be 1 or more, got {num_ranks}")
    if durations_ns is None:
        durations_ns = [actor.duration_ns for actor in plan.actors]
    if len(durations_ns) != len(plan.actors):
        raise ValueError(
            f"expected durations_ns for {len(plan.actors)} actors, got {len(durations_ns)}"
        )
    local = [
        0.0 if actor.kind is ActorKind.COMM else duration
        for actor, duration in zip(plan.actors, durations_ns, strict=True)
    ]
    (alone,) = _Fleet(plan, local, network, (1.0,), jitter, seed).run(steps)
    slowdowns = spread.slowdowns(num_ranks, Random(f"{seed} slowdowns"))
    fleet = _Fleet(plan, local, network, slowdowns, jitter, seed)
    makespan = exposed = late = longest = slowest_rank = 0
    step_ns = 0.0
    slowest = alone
    for rank, run in enumerate(fleet.run(steps)):
        makespan, step_ns = max(makespan, run.makespan_ns), max(step_ns, run.period_ns)
        computing, uncovered, waiting = fleet.coverage(run)
        exposed, late = exposed + uncovered, late + waiting
        if not rank or computing > longest:
            longest, slowest_rank, slowest = computing, rank, run
    shares = max(num_ranks * steps, 1)
    return RanksRun(
        num_ranks=num_ranks,
        steps=steps,
        makespan_ns=makespan,
        alone_ns=alone.period_ns,
        step_ns=step_ns,
        exposed_ns=exposed / shares,
        late_ns=late / shares,
        wire_bytes=fleet.wire_bytes(slowest) / max(steps, 1),
        slowdowns=slowdowns,
        slowest_rank=slowest_rank,
        slowest=slowest,
    )


class _Fleet:
    """Ranks in one calendar, and the collectives that some of them have come to."""

    def __init__(
        self,
        plan: Plan,
        local_ns: Sequence[float],
        network: Network,
        slowdowns: Sequence[float],
        jitter: float,
        seed: int,
    ) -> None:
        self.plan = plan
        self.network = network
        self.num_ranks = len(slowdowns)
        self.jitter = jitter
        self.rng = Random(f"{seed} links")
        self.calendar = Calendar()
        self.sizes = [collective_bytes(plan, actor) for actor in plan.actors]
        self.present: dict[tuple[int, int], int] = {}
        self.met_at: dict[tuple[int, int], int] = {}
        table = MachineTable.of(plan)
        is_comm = [actor.kind is ActorKind.COMM for actor in plan.actors]
        self.ranks = [
            VirtualRank(
                rank,
                table,
                [duration * slowdown for duration in local_ns],
                self.calendar,
                rng=Random(seed + rank),
                jitter=jitter,
                meets=[partial(self._meet, rank) if meets else None for meets in is_comm],
            )
            for rank, slowdown in enumerate(slowdowns)
        ]

    def run(self, steps: int) -> Iterator[SimulatedRun]:
        """Run all ranks to their end; yield their runs, which take memory, one after the other."""
        ranks, calendar = self.ranks, self.calendar
        for rank in ranks:
            rank.start(steps * self.plan.int_option("accumulate", 1))
        while calendar:
            now, number, code = calendar.next()
            if number != _EVERYONE:
                ranks[number].take(now, code)
            else:
                for rank in ranks:
                    rank.take(now, code)
        self._check_met()
        for rank in ranks:
            yield rank.finish(steps)

    def _meet(self, rank: int, actor: int) -> None:
        """Let a rank come to a collective; the last one starts the transfer."""
        key = (actor, self.ranks[rank].machine.firing_index(actor))
        present = self.present.get(key, 0) + 1
        self.present[key] = present
        if present < self.num_ranks:
            return
        del self.present[key]
        now = self.met_at[key] = self.ranks[rank].now
        duration = self.network.all_reduce_ns(self.num_ranks, self.sizes[actor])
        if self.jitter:
            duration *= self.rng.uniform(1 - self.jitter, 1 + self.jitter)
        self.calendar.schedule(now + round(duration), _EVERYONE, message(Message.DONE, actor))

    def _check_met(self) -> None:
        for (actor, firing), present in self.present.items():
            raise InternalError(
                f"the ranks wait for each other: {present} of {self.num_ranks} came to firing"
                f" {firing} of {self.plan.actors[actor].name!r}. Do two collectives share a stream"
                " in an order that differs between ranks?"
            )

    def wire_bytes(self, run: SimulatedRun) -> float:
        """Return the bytes that a rank sends in a run."""
        moved = [f * size for f, size in zip(run.firings, self.sizes, strict=True)]
        return self.network.sent_bytes(self.num_ranks, sum(moved))

    def coverage(self, run: SimulatedRun) -> tuple[int, int, int]:
        """Return three times of a rank's run.

        In which it computes; in which bytes move that no compute covers; and in which neither is
        true while a collective waits for a later rank.
        """
        kinds = [actor.kind for actor in self.plan.actors]
        compute = [row[2:] for row in run.rows if kinds[row[0]] in _RUNS]
        comm = [row for row in run.rows if kinds[row[0]] is ActorKind.COMM]
        transfers = [(self.met_at[row[:2]], row[3]) for row in comm]
        computing, moving = _union_ns(compute), _union_ns(compute + transfers)
        waiting = _union_ns(compute + [row[2:] for row in comm])
        return computing, moving - computing, waiting - moving


def collective_bytes(plan: Plan, actor: Actor) -> int:
    """Return the bytes that an actor reduces over the ranks in a firing, in all its launches."""
    views = [view for launch in actor.launches if launch.op == ALL_REDUCE for view in launch.inputs]
    return sum([plan.views[view].type.size_bytes for view in views])


def _union_ns(intervals: Iterable[Interval]) -> int:
    """Return the time covered by intervals."""
    total, until = 0, 0
    for start, end in sorted(intervals):
        if end > until:
            total += end - max(start, until)
            until = end
    return total
