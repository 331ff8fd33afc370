"""Bodies of loops on many ranks: each has the rows of a batch, and its share of sums over them.

A body runs once per step on every rank, so nothing may meet inside: of each node those ways count
that need no collective, and what one node makes the next one reads as it lies. From the layout of
one operand the others follow: a node that is left with one way says how all that it reads and makes
lies. A carry lies at the end of a step as at its beginning; what is added up from step to step may
be a share of a sum, as all steps together are linear in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from compiler.body import Body, closed, operand
from compiler.errors import InternalError
from compiler.graph import GraphBuilder, Node
from compiler.mesh import Mesh
from compiler.ops.sources import CONSTANT, INPUT
from compiler.sbp.derive import Found
from compiler.sbp.project import LocalCall
from compiler.sbp.ways import emit_part, ways_of
from compiler.sbp.words import BROADCAST, By, NdSbp, Sbp, Split, local_shape, local_slices
from compiler.types import TensorType, ValueId


@dataclass(frozen=True, slots=True)
class BodyLayout:
    """How the values of a body lie along one axis of the mesh, and the way of every node."""

    words: tuple[Sbp, ...]
    ways: tuple[Found | None, ...]


def body_layout(
    body: Body, parts: int, given: Sequence[tuple[int, Sbp]], carries: int
) -> BodyLayout | None:
    """Return the layouts that follow from those of some operands; None where none do.

    Args:
        body: The body.
        parts: Ranks along the axis of the mesh.
        given: Pairs (operand, word).
        carries: How many operands are the first results of the step before.
    """
    links = tuple(zip(body.operands[:carries], body.results[:carries], strict=True))
    found = _Following(body, _ways_inside(body, parts), links)
    for number, word in given:
        found.words[body.operands[number]] = word
    if not found.settle():
        return None
    words = [found.words.get(ValueId(v), BROADCAST) for v in range(len(body.graph.types))]
    return BodyLayout(tuple(words), tuple([own[0] if own else None for own in found.ways]))


def _ways_inside(body: Body, parts: int) -> list[tuple[Found, ...]]:
    """Return, per node, the ways that meet nobody and know of no place; none of an operand."""
    types, found = body.graph.types, list[tuple[Found, ...]]()
    for node in body.graph.nodes:
        if node.op is INPUT:
            found.append(())
            continue
        read, made = [tuple([types[v] for v in side]) for side in (node.inputs, node.outputs)]
        ways = ways_of(node.op, read, made, node.attrs, parts)
        is_placed = node.op is CONSTANT or "key" in node.attrs or node.op.name in _BY_ROWS
        usable = [w for w in ways[1:] if not (w.whole or w.reads_position or is_placed)]
        found.append((ways[0], *usable))
    return found


_BY_ROWS = ("embedding", "embedding_grad")
"""Ops whose parts know of which rows they are."""


@dataclass(slots=True)
class _Following:
    """Words that follow from each other; `links` are pairs of values that lie alike."""

    body: Body
    ways: list[tuple[Found, ...]]
    links: Sequence[tuple[ValueId, ValueId]]
    words: dict[ValueId, Sbp] = field(default_factory=dict)

    def settle(self) -> bool:
        """Leave every node one way. Return whether there is one."""
        nodes = self.body.graph.nodes
        while True:
            known = len(self.words)
            if not self._linked() or not all([self._narrowed(i) for i in range(len(nodes))]):
                return False
            if len(self.words) != known:
                continue
            open_ = [i for i, own in enumerate(self.ways) if len(own) > 1]
            if not open_:
                return self._linked()
            # Who reads nothing that is known may do what all can.
            touched = [i for i in open_ if any([v in self.words for v in nodes[i].inputs])]
            index = (touched or open_)[0]
            self.ways[index] = self.ways[index][:1]

    def _linked(self) -> bool:
        for one, other in self.links:
            word = self.words.get(one, self.words.get(other))
            if word is not None and not (self._bind(one, word) and self._bind(other, word)):
                return False
        return True

    def _narrowed(self, index: int) -> bool:
        """Keep the ways of a node that agree with what is known, and note what all of them say."""
        node, own = self.body.graph.nodes[index], self.ways[index]
        if not own:
            return True
        own = self.ways[index] = tuple([way for way in own if self._agrees(node, way)])
        if not own:
            return False
        sides = [(*way.signature.inputs, *way.signature.outputs) for way in own]
        for place, value in enumerate((*node.inputs, *node.outputs)):
            said = {side[place] for side in sides}
            if len(said) == 1 and not self._bind(value, *said):
                return False
        return True

    def _agrees(self, node: Node, way: Found) -> bool:
        known = dict(self.words)
        words = (*way.signature.inputs, *way.signature.outputs)
        pairs = zip((*node.inputs, *node.outputs), words, strict=True)
        return all([known.setdefault(value, word) == word for value, word in pairs])

    def _bind(self, value: ValueId, word: Sbp) -> bool:
        return self.words.setdefault(value, word) == word


def local_body(
    body: Body, layouts: Sequence[BodyLayout], mesh: Mesh, coordinates: Sequence[int]
) -> Body:
    """Return what one rank does at each step; `layouts` are those along each axis of the mesh."""
    graph, b = body.graph, GraphBuilder()
    known: dict[ValueId, ValueId] = {}

    def words_of(value: ValueId) -> NdSbp:
        return tuple([layout.words[value] for layout in layouts])

    def part_of_value(value: ValueId) -> tuple[slice, ...]:
        shape = graph.types[value].shape
        return local_slices(shape, words_of(value), mesh.shape, coordinates)

    for index, node in enumerate(graph.nodes):
        with b.beside(node):
            if node.op is INPUT:
                (value,) = node.outputs
                type_ = graph.types[value]
                shape = local_shape(type_.shape, words_of(value), mesh.shape, coordinates)
                known[value] = operand(b, TensorType(type_.dtype, shape))
                continue
            ways = [(axis, way) for axis, x in enumerate(layouts) if (way := x.ways[index])]
            call = LocalCall(
                node,
                tuple([known[v] for v in node.inputs]),
                tuple([graph.types[v] for v in node.inputs]),
                tuple([graph.types[v] for v in node.outputs]),
                tuple([part_of_value(v) for v in node.inputs]),
                tuple([part_of_value(v) for v in node.outputs]),
                mesh=mesh,
                coordinates=tuple(coordinates),
            )
            known.update(zip(node.outputs, emit_part(b, call, ways, _meets_nobody), strict=True))
    return closed(b, [known[v] for v in body.results])


def _meets_nobody(b: GraphBuilder, value: ValueId, by: By, axis: int) -> ValueId:
    raise InternalError("a step of a loop meets other ranks")


def stacked(word: Sbp) -> Sbp:
    """Return the word of the entries of all steps, from that of one."""
    return Split(word.axis + 1) if isinstance(word, Split) else word


def unstacked(word: Sbp) -> Sbp:
    """Return the word of an entry, from that of the entries of all steps."""
    return Split(word.axis - 1) if isinstance(word, Split) else word
