"""The plans of all ranks of a mesh: one plan for each class of ranks, and their collectives.

Two ranks are *alike* if they run the same plan, and the groups of their collectives consist of
ranks of the same kinds. What one of them does at some time, the others can do then. So a proof and
a simulation look at one rank of each kind: a thousand ranks are mostly a dozen kinds.

Source: partition refinement, here of the ranks by whom they meet (Hopcroft, 1971; "colour
refinement" where edges of graphs are told apart so). That one node may stand for all that are alike
is what fibrations of graphs are (Boldi & Vigna, "Fibrations of graphs", 2002).
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from compiler.contract.collective import Collective, collective_of
from compiler.contract.errors import CompileError, InternalError
from compiler.contract.placement import Mesh
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import ActorKind, is_evaluation_actor

# A *move* is a launch of a COMM actor: tensors of the ranks of a group that become others, as
# `Collective` describes it. A *meeting* is the moves in a row of one actor that have one group: its
# ranks begin it together, and end it together. Most actors are one meeting; a bucket of several
# groups is several, one after the other. The group is that of the ranks that differ along one axis
# of the mesh, or two of these where one sends what the other receives.
#
# A plan never says which rank it is, so neither do its meetings: `ranks_at` does, for a rank.


@dataclass(frozen=True, slots=True)
class CollectiveGroup:
    """Moves of one actor in a row: number `turn` of those of its firing.

    `group` names an axis of the mesh; `peer` is None where all ranks along it meet, else the place
    along it of the one whom something is sent to or received from. `program` is 0 for the steps, 1
    for the evaluation between them: each has an order of its own, in which no number comes twice.
    """

    actor: int
    turn: int
    group: str
    peer: int | None
    program: int
    moves: tuple[Collective, ...]

    @property
    def place(self) -> tuple[int, int]:
        """Its place among all meetings of the job: program, and order there."""
        return self.program, self.moves[0].order

    def ranks_at(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """Return the ranks that a rank meets there, itself among them, in order.

        Raises CompileError where the mesh has no such axis.
        """
        group = mesh.group(rank, mesh.axis(self.group))
        if self.peer is None:
            return group
        if not 0 <= self.peer < len(group):
            raise InternalError(
                f"{self.moves[0]} is for place {self.peer} along {self.group!r}, which has"
                f" {len(group)}"
            )
        # Sorted, so that sender and receiver name one group.
        return tuple(sorted({rank, group[self.peer]}))


def collective_groups(plan: Plan) -> tuple[CollectiveGroup, ...]:
    """Return the meetings of a plan, by actor and turn. O(launches of COMM actors).

    Raises InternalError where a launch lacks attributes, or two launches have the same ones.
    """
    meetings: list[CollectiveGroup] = []
    keys: set[tuple[str, int | None, tuple[int, int]]] = set()
    for actor in plan.actors:
        if actor.kind is not ActorKind.COMM:
            continue
        moves = [collective_of(plan, actor, launch) for launch in actor.launches]
        rows = itertools.groupby(moves, key=lambda move: (move.group, move.peer))
        for turn, ((group, peer), together) in enumerate(rows):
            meeting = CollectiveGroup(
                actor.id, turn, group, peer, int(is_evaluation_actor(actor.name)), tuple(together)
            )
            if (group, peer, meeting.place) in keys:
                raise InternalError(
                    f"two collectives of plan {plan.name!r} are number {meeting.moves[0].order} of"
                    f" their group along {group!r}, the second one is {meeting.moves[0]}"
                )
            keys.add((group, peer, meeting.place))
            meetings.append(meeting)
    return tuple(meetings)


Kind = tuple[str, int | None]
"""Group and peer of a meeting."""


@dataclass(frozen=True)
class RankPlans:
    """Rank r of the mesh runs `plans[class_of[r]]`. Raises CompileError if a rank has no plan."""

    mesh: Mesh
    plans: tuple[Plan, ...]
    class_of: tuple[int, ...]

    def __post_init__(self) -> None:
        count = self.mesh.num_ranks
        if len(self.class_of) != count:
            raise CompileError(
                f"a mesh of {self.mesh} has {count} ranks, and there are plans for"
                f" {len(self.class_of)}; start as many ranks as the mesh has"
            )
        for rank, number in enumerate(self.class_of):
            if not 0 <= number < len(self.plans):
                raise CompileError(
                    f"rank {rank} is of class {number}, and there are {len(self.plans)} plans"
                )

    @staticmethod
    def same(plan: Plan, mesh: Mesh) -> RankPlans:
        """Return one plan for all ranks."""
        return RankPlans(mesh, (plan,), (0,) * mesh.num_ranks)

    @cached_property
    def meetings(self) -> tuple[tuple[CollectiveGroup, ...], ...]:
        """The meetings of each class."""
        return tuple([collective_groups(plan) for plan in self.plans])

    @cached_property
    def _groups(self) -> dict[tuple[Kind, int], tuple[int, ...]]:
        """The ranks that a rank meets, by kind and rank; equal groups are one tuple."""
        shared: dict[tuple[int, ...], tuple[int, ...]] = {}
        groups: dict[tuple[Kind, int], tuple[int, ...]] = {}
        # One meeting per kind will do: group and peer alone decide which ranks meet.
        first = [{(m.group, m.peer): m for m in meetings} for meetings in self.meetings]
        for rank, number in enumerate(self.class_of):
            for kind, meeting in first[number].items():
                if (kind, rank) in groups:
                    continue
                group = meeting.ranks_at(self.mesh, rank)
                group = shared.setdefault(group, group)
                # All along an axis have one group. Of a pair each end finds it by its own peer.
                members = group if kind[1] is None else (rank,)
                groups |= {(kind, member): group for member in members}
        return groups

    def group(self, rank: int, meeting: CollectiveGroup) -> tuple[int, ...]:
        """Return the ranks that a rank meets in one of its meetings, itself among them."""
        return self._groups[(meeting.group, meeting.peer), rank]

    def parallel_groups(self, rank: int, meeting: CollectiveGroup) -> tuple[tuple[int, ...], ...]:
        """Return all groups that meet as that of a rank does, its own among them, in order.

        They differ along the other axes of the mesh. Of two ranks these groups have the one first
        that has the place of this rank along the axis.
        """
        kind = meeting.group, meeting.peer
        axis = self.mesh.axis(meeting.group)
        place = None if meeting.peer is None else self.mesh.coordinates(rank)[axis]
        return self._beside[kind, place]

    @cached_property
    def _beside(self) -> dict[tuple[Kind, int | None], tuple[tuple[int, ...], ...]]:
        groups_at: dict[tuple[Kind, int | None], dict[tuple[int, ...], None]] = {}
        for (kind, rank), group in self._groups.items():
            place = None
            if kind[1] is not None:
                place = self.mesh.coordinates(rank)[self.mesh.axis(kind[0])]
                group = (rank, *[member for member in group if member != rank])
            groups_at.setdefault((kind, place), {})[group] = None
        return {key: tuple(sorted(groups)) for key, groups in groups_at.items()}

    def equivalence_classes(self, marks: Sequence[Hashable] | None = None) -> tuple[int, ...]:
        """Return the kind of each rank, numbered in the order of the ranks.

        `marks` tell ranks apart that their plans do not; only ranks of one mark are alike.
        O(ranks x groups of a rank) for each round, of which there are as many as kinds at most.
        """
        kinds_of = [tuple(dict.fromkeys([(m.group, m.peer) for m in row])) for row in self.meetings]
        ranks = range(self.mesh.num_ranks)
        # Refine from the plans (and marks) by the kinds that are met, until no round splits a kind.
        kinds = _numbered(list(zip(self.class_of, marks or self.class_of, strict=True)))
        while True:
            # By group: all its members meet the same kinds, so that these are collected once.
            kinds_met: dict[tuple[int, ...], frozenset[int]] = {}
            rows: list[Hashable] = []
            for rank in ranks:
                groups = [self._groups[kind, rank] for kind in kinds_of[self.class_of[rank]]]
                for group in groups:
                    if group not in kinds_met:
                        kinds_met[group] = frozenset([kinds[member] for member in group])
                rows.append((kinds[rank], *[kinds_met[group] for group in groups]))
            finer = _numbered(rows)
            # Numbers go by first occurrence, so equal partitions are equal lists.
            if finer == kinds:
                return tuple(kinds)
            kinds = finer


def _numbered(rows: Sequence[Hashable]) -> list[int]:
    """Return the number of each row among the different ones, in their order."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(row, len(numbers)) for row in rows]
