"""Many ranks on virtual time: what training on a mesh will cost that no one here can run.

Every rank is a machine of its own with the plan of its class, its own speed and jitter; they meet
in collectives (`actors.fleet`). So a slow rank holds up the others, as far as plans do not
overlap. The launches of one firing travel together: their bytes add up, their messages do not.

What a transfer takes is the business of `actors.network`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from actors.fleet import Fleet, FleetOptions
from actors.network import Network
from actors.simulate import SimulatedRun, simulate
from compiler.plan import ActorKind
from compiler.rank_plans import RankPlans

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
        ValueError: The number of durations is wrong, or the network's algorithm cannot run there.
        InternalError: The ranks wait for each other for ever.
    """
    local = _local_ns(ranks, durations_ns)
    num_ranks = ranks.mesh.num_ranks
    alone_ns = max(
        [
            simulate(plan, steps, own, seed=seed, jitter=jitter).period_ns
            for plan, own in zip(ranks.plans, local, strict=True)
        ]
    )
    slowdowns = spread.slowdowns(num_ranks, Random(f"{seed} slowdowns"))
    fleet = Fleet(ranks, local, FleetOptions(network, slowdowns, jitter, seed))
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
    for plan, own in zip(ranks.plans, durations_ns, strict=True):
        if len(own) != len(plan.actors):
            raise ValueError(f"expected durations_ns for {len(plan.actors)} actors, got {len(own)}")
    return [
        [
            0.0 if actor.kind is ActorKind.COMM else duration
            for actor, duration in zip(plan.actors, own, strict=True)
        ]
        for plan, own in zip(ranks.plans, durations_ns, strict=True)
    ]


def _coverage(fleet: Fleet, kind: int, run: SimulatedRun) -> tuple[int, int, int]:
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
