"""The plans of all ranks of a mesh: one for each class of ranks, and who has which.

Ranks that cannot be told apart are *alike*: same plan, and in every meeting ranks of the same kinds
as the other one's meet. What one of them does at some time all of them can do then, so that a proof
and a simulation look at one of each kind: a thousand ranks are mostly a dozen kinds.

Source: partition refinement, here of the ranks by whom they meet (Hopcroft, 1971; "colour
refinement" where edges of graphs are told apart so). That one node may stand for all that are alike
is what fibrations of graphs are (Boldi & Vigna, "Fibrations of graphs", 2002).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from compiler.errors import CompileError
from compiler.meetings import Meeting, meetings_of
from compiler.mesh import Mesh
from compiler.plan import Plan

Kind = tuple[str, int | None]
"""Group and peer of a meeting."""


@dataclass(frozen=True)
class RankPlans:
    """Rank r of the mesh runs `plans[class_of[r]]`. Raises CompileError where that is nothing."""

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
    def meetings(self) -> tuple[tuple[Meeting, ...], ...]:
        """The meetings of each class."""
        return tuple([meetings_of(plan) for plan in self.plans])

    @cached_property
    def _groups(self) -> dict[tuple[Kind, int], tuple[int, ...]]:
        """The ranks that a rank meets, by kind and rank; equal groups are one tuple."""
        shared: dict[tuple[int, ...], tuple[int, ...]] = {}
        found: dict[tuple[Kind, int], tuple[int, ...]] = {}
        first = [{(m.group, m.peer): m for m in own} for own in self.meetings]
        for rank, number in enumerate(self.class_of):
            for kind, meeting in first[number].items():
                if (kind, rank) in found:
                    continue
                group = meeting.ranks_at(self.mesh, rank)
                group = shared.setdefault(group, group)
                members = group if kind[1] is None else (rank,)
                found |= {(kind, member): group for member in members}
        return found

    def group(self, rank: int, meeting: Meeting) -> tuple[int, ...]:
        """Return the ranks that a rank meets in one of its meetings, itself among them."""
        return self._groups[(meeting.group, meeting.peer), rank]

    def beside(self, rank: int, meeting: Meeting) -> tuple[tuple[int, ...], ...]:
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
        found: dict[tuple[Kind, int | None], dict[tuple[int, ...], None]] = {}
        for (kind, rank), group in self._groups.items():
            place = None
            if kind[1] is not None:
                place = self.mesh.coordinates(rank)[self.mesh.axis(kind[0])]
                group = (rank, *[member for member in group if member != rank])
            found.setdefault((kind, place), {})[group] = None
        return {key: tuple(sorted(groups)) for key, groups in found.items()}

    def alike(self, marks: Sequence[Hashable] | None = None) -> tuple[int, ...]:
        """Return the kind of each rank, numbered in the order of the ranks.

        `marks` tell ranks apart that their plans do not; only ranks of one mark are alike.
        O(ranks x groups of a rank) for each round, of which there are as many as kinds at most.
        """
        kinds_of = [tuple(dict.fromkeys([(m.group, m.peer) for m in own])) for own in self.meetings]
        every = range(self.mesh.num_ranks)
        kinds = _numbered(list(zip(self.class_of, marks or self.class_of, strict=True)))
        while True:
            met: dict[tuple[int, ...], frozenset[int]] = {}
            rows: list[Hashable] = []
            for rank in every:
                groups = [self._groups[kind, rank] for kind in kinds_of[self.class_of[rank]]]
                for group in groups:
                    if group not in met:
                        met[group] = frozenset([kinds[member] for member in group])
                rows.append((kinds[rank], *[met[group] for group in groups]))
            finer = _numbered(rows)
            if finer == kinds:
                return tuple(kinds)
            kinds = finer


def _numbered(rows: Sequence[Hashable]) -> list[int]:
    """Return the number of each row among the different ones, in their order."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(row, len(numbers)) for row in rows]
