"""A collective as its launch states it: the one description, from the plan to the transport.

Who proves or simulates a plan reads it from the launch (`collective_of`), and so does who loads the
plan; the transport takes the same object. A plan never says which rank it is, so neither does a
collective: what a rank has of it follows from the rank's place along the axis of the mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from compiler.contract.attrs import Attrs, AttrValue
from compiler.contract.errors import InternalError
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import Actor, Launch
from compiler.contract.types import TensorType

SEND, RECEIVE = "send", "receive"
REDUCING = ("all_reduce", "reduce_scatter")
_GATHERING = ("all_gather", "all_to_all")
_SCATTERED_BY = {"reduce_scatter": "axis", "all_to_all": "to_axis"}


@dataclass(frozen=True, slots=True)
class LaunchSite:
    """Where a launch stands: in its plan, in the model, and in the user's code.

    `stream` is which of the rank's streams between ranks it is on: they run side by side. `name`
    and `label` are what it is in the model, without its op and with it; `source` is the line.
    """

    actor: str
    stream: int
    name: str
    label: str
    source: str

    @property
    def where(self) -> str:
        """What it is in the model, and the user's line."""
        return f"{self.label} at {self.source}" if self.label else self.source


@dataclass(frozen=True, slots=True)
class Collective:
    """What the ranks along an axis of the mesh do together, or one sends and another receives.

    `op` names the op (`compiler.ops.primitives.transfer`), `group` the axis, of `num_ranks` ranks;
    `order` is its place among all collectives of a graph, `peer` the place along the axis of who
    sends or receives, None where all meet. A rank reads and makes tensors of the types `reads` and
    `makes`, of a transfer both that of what moves. `by` is the reduction, empty where nothing is
    reduced. The whole is cut along `axis` before, where it has so many `rows` (a rank sees those of
    its part alone), and along `to_axis` after; None where it is not.
    """

    op: str
    group: str
    order: int
    num_ranks: int
    reads: TensorType
    makes: TensorType
    peer: int | None
    by: str
    axis: int | None
    rows: int | None
    to_axis: int | None
    site: LaunchSite = field(hash=False)  # its texts would take as long as all else

    @staticmethod
    def of(
        op: str,
        attrs: Mapping[str, AttrValue],
        inputs: Sequence[TensorType],
        outputs: Sequence[TensorType],
        site: LaunchSite,
    ) -> Collective:
        """Read a launch. Raises KeyError, TypeError or IndexError where something is missing."""
        fields = Attrs(attrs)
        peer = fields.int_("peer") if op in (SEND, RECEIVE) else None
        # Beside what moves, a send and a receive have tokens alone.
        moved = (outputs if op == RECEIVE else inputs)[0]
        is_gathered = op in _GATHERING
        return Collective(
            op,
            fields.str_("group"),
            fields.int_("order"),
            fields.int_("num_ranks"),
            moved,
            outputs[0] if peer is None else moved,
            peer,
            fields.str_("by") if op in REDUCING else "",
            fields.int_("axis") if is_gathered else None,
            fields.int_("rows") if is_gathered else None,
            fields.int_(_SCATTERED_BY[op]) if op in _SCATTERED_BY else None,
            site,
        )

    @property
    def whole(self) -> TensorType:
        """The type of what all ranks reduce, gather or exchange together."""
        shape, axis = self.reads.shape, self.axis
        if axis is None or self.rows is None:
            return self.reads
        return TensorType(self.reads.dtype, (*shape[:axis], self.rows, *shape[axis + 1 :]))

    @property
    def parts(self) -> tuple[tuple[int, int, int], ...]:
        """Each axis that is cut, with its extent in the whole, and that of this rank's part.

        Raises IndexError where the tensor has no such axis.
        """
        cuts, whole = ((self.axis, self.reads), (self.to_axis, self.makes)), self.whole.shape
        return tuple([(n, whole[n], type_.shape[n]) for n, type_ in cuts if n is not None])

    @property
    def group_size(self) -> int:
        """How many ranks meet: a transfer joins two, however long the axis is."""
        return self.num_ranks if self.peer is None else 2

    def __str__(self) -> str:
        at = f" ({self.site.source})" if self.site.source else ""
        return f"{self.op} #{self.order} of {self.site.name!r}{at}"


def collective_of(plan: Plan, actor: Actor, launch: Launch) -> Collective:
    """Return what a launch of a COMM actor moves.

    Raises InternalError where it lacks attributes of a collective.
    """
    source = str(plan.sources[launch.source]) if plan.sources else ""
    name = launch.scope or launch.op
    stream = plan.streams[actor.stream].index
    site = LaunchSite(actor.name, stream, name, launch.label, source)
    inputs, outputs = [
        [plan.views[view].type for view in views] for views in (launch.inputs, launch.outputs)
    ]
    try:
        collective = Collective.of(launch.op, dict(launch.attrs), inputs, outputs, site)
        tuple(collective.parts)  # or there is no such axis
    except (KeyError, TypeError, IndexError) as error:
        raise InternalError(
            f"{launch.op} of {name!r} ({source}) lacks attributes of a collective: {error}"
        ) from None
    return collective
