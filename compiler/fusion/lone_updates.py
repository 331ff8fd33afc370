"""An update of one variable as its program and operands: what can be joined with others.

It comes in two forms, as an op of its own that has its program, and as `joined_updates` of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from compiler.attrs import Attrs, AttrValue
from compiler.fusion.program import FusedProgram, is_by_elements
from compiler.graph import Graph, Node
from compiler.lowering.storage import assign_storage, is_dense
from compiler.ops.fused import FUSED, program_of
from compiler.ops.joined_updates import JOINED_UPDATES, joined_members, member_operands
from compiler.ops.sources import VARIABLE
from compiler.ops.update import ends_step
from compiler.registry import runs_as
from compiler.types import ValueId


@dataclass(frozen=True, slots=True)
class LoneUpdate:
    """A program on its operands; `over` are those that its outputs lie over.

    `rest`: perhaps what says to skip it. `rule` is what users call it.
    """

    program: FusedProgram
    over: tuple[int, ...]
    operands: tuple[ValueId, ...]
    rest: tuple[ValueId, ...]
    rule: str

    @property
    def full(self) -> tuple[ValueId, ...]:
        """The operands of full size."""
        return tuple([v for i, v in enumerate(self.operands) if self.program.is_full(i)])

    @property
    def numbers(self) -> tuple[ValueId, ...]:
        """The operands that are numbers, and what says to skip it."""
        own = [v for i, v in enumerate(self.operands) if not self.program.is_full(i)]
        return (*own, *self.rest)


def lone_update(graph: Graph, node: Node) -> LoneUpdate | None:
    """Return an update that works element by element on dense tensors; None for any other node.

    Counters, and sums over batches, are none: by their ops rates are told apart.
    """
    if not ends_step(node):
        return None
    if node.op is JOINED_UPDATES and node.attrs.int_("count") == 1:
        (member,) = joined_members(node.attrs)
        operands = tuple([node.inputs[place] for place in member])
        rest, over = node.inputs[len(member) :], node.attrs.ints("over")
        (rule,) = node.attrs.texts("members")
    elif runs_as.get(node.op) == FUSED.name:
        count = len(program_of(node.attrs).inputs)
        operands, rest, rule = node.inputs[:count], node.inputs[count:], node.op.name
        over = tuple([given for _, given in sorted(node.writes)])
    else:
        return None
    found = LoneUpdate(program_of(node.attrs), over, operands, rest, rule)
    storage = assign_storage(graph)
    is_whole = all([is_dense(graph.types[v], storage.layout[v]) for v in found.full])
    is_taken = is_by_elements(found.program) and len(over) == len(found.program.outputs)
    return found if is_whole and is_taken else None


def joined(
    graph: Graph, node: Node, updates: Sequence[LoneUpdate], outputs: tuple[ValueId, ...]
) -> Node:
    """Return one node for updates of one program and the same numbers; all else is of `node`."""
    first, count = updates[0], len(updates)
    placed: dict[int, ValueId] = {}
    for update, member in zip(
        updates, member_operands(first.program, first.over, count), strict=True
    ):
        placed |= dict(zip(member, update.operands, strict=True))
    makers = [graph.nodes[graph.producers()[update.operands[0]]] for update in updates]
    attrs: dict[str, AttrValue] = {
        "program": first.program,
        "over": first.over,
        "count": count,
        "members": (first.rule if count == 1 else f"{count} x {first.rule}",),
        "variables": tuple([n.attrs.str_("name") for n in makers if n.op is VARIABLE]),
    }
    inputs = (*[placed[place] for place in range(len(placed))], *first.rest)
    return replace(node, op=JOINED_UPDATES, inputs=inputs, outputs=outputs, attrs=Attrs(attrs))
