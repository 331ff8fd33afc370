"""What is said where no way of a node leads to the layouts that are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compiler.graph import Graph, Node
from compiler.ops.sources import INPUT, VARIABLE
from compiler.registry import Types
from compiler.sbp.derive import Found
from compiler.sbp.words import Partial, Sbp, Split
from compiler.types import TensorType, ValueId

_MOST_LISTED = 12


@dataclass(frozen=True, slots=True)
class Refused:
    """A node that has none of its `ways`; `least` are its inputs and outputs on the last rank."""

    graph: Graph
    node: Node
    least: Types
    fixed: Mapping[ValueId, Sbp]
    ways: Sequence[Found]


def impossible(found: Refused, axis: str, parts: int) -> str:
    """Return the text: the line, what was asked for, of what, why not, and how to mend it."""
    along = f"the axis {axis!r} of the mesh" if axis else "an axis of the mesh"
    along = f"along {along}, of {parts} ranks"
    node, graph = found.node, found.graph
    for value, least in zip(node.outputs, found.least[len(node.inputs) :], strict=True):
        word = found.fixed.get(value)
        if node.op in (INPUT, VARIABLE) and word is not None:
            name = _name_of(graph, value)
            return f"{node.source}: {name} cannot lie as {word} {along}: " + _of_source(
                graph.types[value], least, word, parts
            )
    wanted = [f"{graph.types[v]} as {found.fixed.get(v, 'any')}" for v in node.outputs]
    read = [_name_and_word(graph, v, found.fixed) for v in node.inputs]
    over = [node.inputs[old] for _, old in node.writes if node.inputs[old] in found.fixed]
    text = (
        f"{node.source}: {node.op} cannot make {'; '.join(wanted)} {along}. It reads"
        f" {'; '.join(read) or 'nothing'}. {_candidates(found.ways)}"
    )
    if over:
        text += (
            f" It writes over {_name_of(graph, over[0])}, which it reads as a whole there: lay that"
            " out whole (af.broadcast, and no zero=True), or as one of these ways has it"
        )
        return text
    return text + " Lay it out as one of these, or leave its layout open by taking its sbp away"


def _of_source(type_: TensorType, least: TensorType, word: Sbp, parts: int) -> str:
    """Return why a source cannot have a layout, and how to mend it."""
    if isinstance(word, Partial):
        return f"what comes from outside is {type_}, whole or in slices; lay it out as a whole"
    if not isinstance(word, Split) or word.axis >= type_.rank:
        last = type_.rank - 1
        has = f"axes 0..{last}" if last > 0 else "axis 0 alone" if not last else "no axes"
        return f"it is {type_}, which has {has}; split one that there is, or lay it out whole (B)"
    rows = type_.shape[word.axis]
    left = least.shape[word.axis]
    inner = f" ({left} where other axes of the mesh split it, too)" if left != rows else ""
    return (
        f"it is {type_}, whose axis {word.axis} has extent {rows}{inner}, less than there are"
        f" ranks; split a longer axis, lay it out whole (B), or take {max(left, 1)} along this one"
    )


def _candidates(ways: Sequence[Found]) -> str:
    listed = [str(way.signature) for way in ways]
    rest = len(listed) - _MOST_LISTED
    more = f"; and {rest} more" if rest > 0 else ""
    return f"It can: {'; '.join(listed[:_MOST_LISTED])}{more}."


def _name_and_word(graph: Graph, value: ValueId, fixed: Mapping[ValueId, Sbp]) -> str:
    word = fixed.get(value)
    return f"{_name_of(graph, value)} {'in any layout' if word is None else f'as {word}'}"


def _name_of(graph: Graph, value: ValueId) -> str:
    """Return what a value is called: by the user's name, or by what makes it."""
    maker = graph.nodes[graph.producers()[value]]
    type_ = graph.types[value]
    if maker.op is INPUT:
        return f"batch[{maker.attrs['name']!r}]"
    if maker.op is VARIABLE:
        return f"{maker.attrs.str_('role')} {maker.attrs['name']!r}"
    return f"{type_} of {maker.op}"
