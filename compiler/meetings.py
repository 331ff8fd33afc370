"""What the COMM actors of a plan have to do with other ranks, in rows.

A *move* is a launch of a COMM actor: tensors of the ranks of a group that become others. A
*meeting* is the moves in a row of one actor that have one group: its ranks begin it together, and
end it together. Most actors are one meeting; a bucket of several groups is several, one after the
other. The group is that of the ranks that differ along one axis of the mesh, or two of these where
one sends what the other receives.

A plan never says which rank it is, so neither do its meetings: `ranks_at` does, for a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiler.attrs import Attrs
from compiler.errors import InternalError
from compiler.labels import evaluates
from compiler.mesh import Mesh
from compiler.plan import ActorKind, Launch, Plan
from compiler.types import TensorType

SEND, RECEIVE = "send", "receive"
REDUCING = ("all_reduce", "reduce_scatter")

Parts = tuple[tuple[int, int, int], ...]
"""Axis of a tensor, its extent as all ranks have it together, and that of a rank's own part."""


@dataclass(frozen=True, slots=True)
class CommMove:
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
class Meeting:
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
    moves: tuple[CommMove, ...]

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
        return tuple(sorted({rank, group[self.peer]}))


def meetings_of(plan: Plan) -> tuple[Meeting, ...]:
    """Return the meetings of a plan, by actor and turn. O(launches of COMM actors).

    Raises InternalError where a launch does not say whom it meets, or two are one by what they say.
    """
    found: list[Meeting] = []
    known: set[tuple[str, int | None, tuple[int, int]]] = set()
    for actor in plan.actors:
        if actor.kind is not ActorKind.COMM:
            continue
        rows: list[tuple[str, int | None, list[CommMove]]] = []
        for launch in actor.launches:
            group, peer, move = _move(plan, launch)
            if not rows or rows[-1][:2] != (group, peer):
                rows.append((group, peer, []))
            rows[-1][2].append(move)
        for turn, (group, peer, moves) in enumerate(rows):
            own = Meeting(actor.id, turn, group, peer, int(evaluates(actor.name)), tuple(moves))
            if (group, peer, own.place) in known:
                raise InternalError(
                    f"two collectives of plan {plan.name!r} are number {own.moves[0].order} of"
                    f" their group along {group!r}, the second one is {own.moves[0]}"
                )
            known.add((group, peer, own.place))
            found.append(own)
    return tuple(found)


def _move(plan: Plan, launch: Launch) -> tuple[str, int | None, CommMove]:
    """Return the group of a launch, the peer in it, and what it moves."""
    attrs = Attrs(dict(launch.attrs))
    source = str(plan.sources[launch.source]) if plan.sources else ""
    name = launch.scope or launch.op
    try:
        order, group = attrs.int_("order"), attrs.str_("group")
        peer = attrs.int_("peer") if launch.op in (SEND, RECEIVE) else None
        by = attrs.str_("by") if launch.op in REDUCING else ""
        whole, parts = _whole(plan, launch, attrs)
        size = 2 if peer is not None else attrs.int_("num_ranks")
    except (KeyError, TypeError, IndexError) as error:
        raise InternalError(
            f"{launch.op} of {name!r} ({source}) does not say whom it meets, and with what: {error}"
        ) from None
    axes = tuple([axis for axis, _, _ in parts])
    return group, peer, CommMove(launch.op, order, by, axes, whole, size, parts, name, source)


def _whole(plan: Plan, launch: Launch, attrs: Attrs) -> tuple[TensorType, Parts]:
    """Return what the ranks of a launch have together, and this rank's part along each axis."""
    read = [plan.views[view].type for view in launch.inputs]
    made = [plan.views[view].type for view in launch.outputs]
    if launch.op == "reduce_scatter":
        axis = attrs.int_("axis")
        return read[0], ((axis, read[0].shape[axis], made[0].shape[axis]),)
    if launch.op == "all_gather":
        axis = attrs.int_("axis")
        return made[0], ((axis, made[0].shape[axis], read[0].shape[axis]),)
    if launch.op == "all_to_all":
        axis, to_axis, x = attrs.int_("axis"), attrs.int_("to_axis"), read[0]
        shape = (*x.shape[:axis], attrs.int_("rows"), *x.shape[axis + 1 :])
        own = made[0].shape[to_axis]
        parts = ((axis, shape[axis], x.shape[axis]), (to_axis, shape[to_axis], own))
        return TensorType(x.dtype, shape), parts
    return (made if launch.op == RECEIVE else read)[0], ()
