"""The plans of all ranks of a mesh: one plan for each class of ranks, and their collectives.

Two ranks are *alike* if they run the same plan, and the groups of their collectives consist of
ranks of the same kinds. What one of them does at some time, the others can do then. So a proof and
a simulation look at one rank of each kind: a thousand ranks are mostly a dozen kinds.

Source: partition refinement, here of the ranks by whom they meet (Hopcroft, 1971; "colour
refinement" where edges of graphs are told apart so). That one node may stand for all that are alike
is what fibrations of graphs are (Boldi & Vigna, "Fibrations of graphs", 2002).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from compiler.contract.attrs import Attrs
from compiler.contract.errors import CompileError, InternalError
from compiler.contract.placement import Mesh
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import ActorKind, Launch, is_evaluation_actor
from compiler.contract.types import TensorType

# A *move* is a launch of a COMM actor: tensors of the ranks of a group that become others. A
# *meeting* is the moves in a row of one actor that have one group: its ranks begin it together, and
# end it together. Most actors are one meeting; a bucket of several groups is several, one after the
# other. The group is that of the ranks that differ along one axis of the mesh, or two of these
# where one sends what the other receives.
#
# A plan never says which rank it is, so neither do its meetings: `ranks_at` does, for a rank.

SEND, RECEIVE = "send", "receive"
REDUCING = ("all_reduce", "reduce_scatter")

Parts = tuple[tuple[int, int, int], ...]
"""Axis of a tensor, its extent as all ranks have it together, and that of a rank's own part."""


@dataclass(frozen=True, slots=True)
class CollectiveOp:
    """A launch as the others of its group must have it, but for `parts` and the words of a user.

    `whole` is what the ranks reduce, gather or exchange together; `group_size` how many they are.
    `by` is empty where nothing is reduced. `name` and `source` tell a user which one it is.
    """

    op: str
    order: int
    by: str
    axes: tuple[int, ...]
    whole: TensorType
    group_size: int
    parts: Parts
    name: str
    source: str

    def __str__(self) -> str:
        at = f" ({self.source})" if self.source else ""
        return f"{self.op} #{self.order} of {self.name!r}{at}"


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
    moves: tuple[CollectiveOp, ...]

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

    Raises InternalError where a launch does not say whom it meets, or two are one by what they say.
    """
    meetings: list[CollectiveGroup] = []
    keys: set[tuple[str, int | None, tuple[int, int]]] = set()
    for actor in plan.actors:
        if actor.kind is not ActorKind.COMM:
            continue
        rows: list[tuple[str, int | None, list[CollectiveOp]]] = []
        for launch in actor.launches:
            group, peer, move = _move(plan, launch)
            if not rows or rows[-1][:2] != (group, peer):
                rows.append((group, peer, []))
            rows[-1][2].append(move)
        for turn, (group, peer, moves) in enumerate(rows):
            meeting = CollectiveGroup(
                actor.id, turn, group, peer, int(is_evaluation_actor(actor.name)), tuple(moves)
            )
            if (group, peer, meeting.place) in keys:
                raise InternalError(
                    f"two collectives of plan {plan.name!r} are number {meeting.moves[0].order} of"
                    f" their group along {group!r}, the second one is {meeting.moves[0]}"
                )
            keys.add((group, peer, meeting.place))
            meetings.append(meeting)
    return tuple(meetings)


def _move(plan: Plan, launch: Launch) -> tuple[str, int | None, CollectiveOp]:
    """Return the group of a launch, the peer in it, and what it moves."""
    attrs = Attrs(dict(launch.attrs))
    source = str(plan.sources[launch.source]) if plan.sources else ""
    name = launch.scope or launch.op
    try:
        order, group = attrs.int_("order"), attrs.str_("group")
        peer = attrs.int_("peer") if launch.op in (SEND, RECEIVE) else None
        by = attrs.str_("by") if launch.op in REDUCING else ""
        whole, parts = _whole(plan, launch, attrs)
        # A send joins two ranks, however long the axis is.
        size = 2 if peer is not None else attrs.int_("num_ranks")
    except (KeyError, TypeError, IndexError) as error:
        raise InternalError(
            f"{launch.op} of {name!r} ({source}) does not say whom it meets, and with what: {error}"
        ) from None
    axes = tuple([axis for axis, _, _ in parts])
    return group, peer, CollectiveOp(launch.op, order, by, axes, whole, size, parts, name, source)


def _whole(plan: Plan, launch: Launch, attrs: Attrs) -> tuple[TensorType, Parts]:
    """Return what the ranks of a launch have together, and this rank's part along each axis."""
    inputs = [plan.views[view].type for view in launch.inputs]
    outputs = [plan.views[view].type for view in launch.outputs]
    if launch.op == "reduce_scatter":
        axis = attrs.int_("axis")
        return inputs[0], ((axis, inputs[0].shape[axis], outputs[0].shape[axis]),)
    if launch.op == "all_gather":
        axis = attrs.int_("axis")
        return outputs[0], ((axis, outputs[0].shape[axis], inputs[0].shape[axis]),)
    if launch.op == "all_to_all":
        axis, to_axis, x = attrs.int_("axis"), attrs.int_("to_axis"), inputs[0]
        shape = (*x.shape[:axis], attrs.int_("rows"), *x.shape[axis + 1 :])
        extent = outputs[0].shape[to_axis]
        parts = ((axis, shape[axis], x.shape[axis]), (to_axis, shape[to_axis], extent))
        return TensorType(x.dtype, shape), parts
    # The other ops keep the shape: what a rank has is the whole.
    return (outputs if launch.op == RECEIVE else inputs)[0], ()


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
