"""What there is to choose from: the ways of every node, what each takes, and what moves take.

Times are stated and not measured: a rank's part of a node takes its operations and bytes, a step of
a tensor from one layout to another what it sends. What waits for nobody goes in buckets with others
like it, and shares their messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from compiler.attrs import Attrs
from compiler.errors import CompileError
from compiler.graph import Graph, Node, consumers, mark_needed
from compiler.mesh import MeshLink
from compiler.ops.sources import VARIABLE
from compiler.registry import Types, cost, view
from compiler.sbp.derive import Found, call_of
from compiler.sbp.impossible import Refused, impossible
from compiler.sbp.moves import WRITTEN_BYTES_PER_NS, ways_between
from compiler.sbp.project import local_attrs
from compiler.sbp.ways import is_possible, ways_of
from compiler.sbp.words import BROADCAST, Sbp, Split, local_shape, part_of
from compiler.turns import awaited_results
from compiler.types import Phase, TensorType, ValueId


@dataclass(frozen=True, slots=True)
class Speed:
    """What a rank computes with, as stated."""

    flops_per_ns: float = 100.0
    bytes_per_ns: float = WRITTEN_BYTES_PER_NS


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis of the mesh: how many ranks, what joins them, what each computes with."""

    parts: int
    wire: MeshLink
    speed: Speed
    name: str = ""


Fixed = Mapping[ValueId, Sbp]
"""Values whose layout is given."""


@dataclass(frozen=True, slots=True)
class SbpChoice:
    """A word for every value, and the way of every node."""

    words: tuple[Sbp, ...]
    ways: tuple[Found, ...]
    time_ns: float


@dataclass(slots=True)
class LayoutProblem:
    """All that the search reads."""

    graph: Graph
    types: Sequence[TensorType]
    axis: MeshAxis
    fixed: Fixed
    earlier: Sequence[tuple[int, SbpChoice]]
    ways: list[tuple[Found, ...]] = field(default_factory=list)
    own_ns: list[tuple[float, ...]] = field(default_factory=list)
    needs: dict[ValueId, Sbp] = field(default_factory=dict)
    bundled: frozenset[ValueId] = frozenset()
    of_value: dict[tuple[ValueId, Sbp, Sbp], float] = field(default_factory=dict)
    _moves: dict[tuple[TensorType, Sbp, Sbp, bool], float] = field(default_factory=dict)

    def move(self, value: ValueId, old: Sbp, new: Sbp) -> float:
        """Return the time that a value takes from one word to another."""
        if old == new:
            return 0.0
        known = self.of_value.get((value, old, new))
        if known is not None:
            return known
        type_, axis = self.types[value], self.axis
        rows = [type_.shape[word.axis] for word in (old, new) if isinstance(word, Split)]
        if min(rows, default=axis.parts) < axis.parts:
            # Who reads it so has it otherwise along the outer axes, too: its bytes are a guess.
            type_ = self.graph.types[value]
        is_bundled = value in self.bundled
        key = type_, old, new, is_bundled
        if key not in self._moves:
            wire = _shared(axis, type_) if is_bundled else axis.wire
            self._moves[key] = ways_between(type_, (old,), (new,), (axis.parts,), (wire,))[0]
        self.of_value[value, old, new] = self._moves[key]
        return self._moves[key]


def _shared(axis: MeshAxis, type_: TensorType) -> MeshLink:
    """Return what it takes to send a tensor among others of a bucket, which share messages.

    A bucket has as many bytes as a ring moves in the time of its messages, or more.
    """
    full = axis.parts * axis.wire.latency_ns * axis.wire.bytes_per_ns
    share = min(1.0, type_.size_bytes / full) if full else 1.0
    return replace(axis.wire, latency_ns=axis.wire.latency_ns * share)


def waiting_for_nobody(graph: Graph) -> frozenset[ValueId]:
    """Return the values that nobody waits for: parameters, and what updates and metrics alone read.

    Their collectives go together (`compiler.turns`).
    """
    readers, nodes = consumers(graph), graph.nodes
    needed = mark_needed(graph, awaited_results(graph))
    computes = [n and node.phase is not Phase.UPDATE for n, node in zip(needed, nodes, strict=True)]
    return frozenset(
        [
            value
            for node in nodes
            for value in node.outputs
            if node.op is VARIABLE or not any([computes[i] for i in readers[value]])
        ]
    )


def fill(problem: LayoutProblem) -> None:
    """Find the ways of every node. Raises CompileError for a node that has none."""
    graph = problem.graph
    for output in graph.outputs:
        problem.needs[output.value] = BROADCAST
    parts = [parts for parts, _ in problem.earlier]
    for index, node in enumerate(graph.nodes):
        signatures = [choice.ways[index].signature for _, choice in problem.earlier]
        given = tuple(
            [
                part_type(graph.types[v], [s.inputs[i] for s in signatures], parts)
                for i, v in enumerate(node.inputs)
            ]
        )
        made = tuple([problem.types[v] for v in node.outputs])
        attrs = _attrs_of_part(problem, index)
        ways = ways_of(node.op, given, made, attrs, problem.axis.parts)
        least = (
            *[
                part_type(graph.types[v], [s.inputs[i] for s in signatures], parts, last=True)
                for i, v in enumerate(node.inputs)
            ],
            *[
                part_type(graph.types[v], [s.outputs[i] for s in signatures], parts, last=True)
                for i, v in enumerate(node.outputs)
            ],
        )
        ways = tuple([w for w in ways if is_possible(w.signature, least, problem.axis.parts)])
        kept = tuple([way for way in ways if _agrees(problem, node, way)])
        if not kept:
            refused = Refused(graph, node, least, problem.fixed, ways)
            raise CompileError(impossible(refused, problem.axis.name, problem.axis.parts))
        problem.ways.append(kept)
        problem.own_ns.append(tuple([_own_ns(problem, node, given, made, w) for w in kept]))


def _attrs_of_part(problem: LayoutProblem, index: int) -> Attrs:
    """Return the attributes of a node on the first part of what it walks, by the outer axes."""
    node, types = problem.graph.nodes[index], problem.graph.types
    if not local_attrs.has(node.op) or not problem.earlier:
        return node.attrs
    given, made = [tuple([types[v] for v in own]) for own in (node.inputs, node.outputs)]
    call = call_of(node.op, given, made, node.attrs)
    if call is None:
        return node.attrs
    shape = list(call.frame.shape)
    for parts, choice in problem.earlier:
        axis = choice.ways[index].axis
        if axis >= 0:
            shape[axis] = len(part_of(shape[axis], parts, 0))
    return local_attrs.get(node.op)(node.attrs, tuple(shape))


def part_type(
    type_: TensorType, words: Sequence[Sbp], parts: Sequence[int], *, last: bool = False
) -> TensorType:
    """Return the type of the first part of a tensor, the largest; or of the last, the least."""
    if not words:
        return type_
    at = [n - 1 for n in parts] if last else [0] * len(words)
    shape = local_shape(type_.shape, tuple(words), parts, at)
    return TensorType(type_.dtype, shape)


def _agrees(problem: LayoutProblem, node: Node, way: Found) -> bool:
    fixed, given, made = problem.fixed, way.signature.inputs, way.signature.outputs
    # What is written over is the variable itself, and no copy of it that was brought elsewhere.
    over = [(node.inputs[old], (given[old], made[new])) for new, old in node.writes]
    pairs = zip(node.outputs, made, strict=True)
    return all([fixed.get(value, word) == word for value, word in pairs]) and all(
        [{fixed[value]} == {*words} for value, words in over if value in fixed]
    )


def _own_ns(problem: LayoutProblem, node: Node, given: Types, made: Types, way: Found) -> float:
    """Return what a rank's part of a node takes, with what is made whole on its way."""
    parts, speed, wire = problem.axis.parts, problem.axis.speed, problem.axis.wire
    words = (*way.signature.inputs, *way.signature.outputs)
    local = [
        TensorType(t.dtype, local_shape(t.shape, (word,), (parts,), (0,)))
        for t, word in zip((*given, *made), words, strict=True)
    ]
    if not given or view.has(node.op):
        return 0.0
    work = cost.get(node.op)(tuple(local[: len(given)]), tuple(local[len(given) :]), node.attrs)
    time = max(work.flops / speed.flops_per_ns, work.bytes / speed.bytes_per_ns)
    # What a program makes whole is a number per row or column: about as large as the smallest
    # operand. Its messages are what counts.
    size = min([t.size_bytes for t in local]) * 2 * (parts - 1) / parts
    each = size / wire.bytes_per_ns + 2 * (parts - 1) * wire.latency_ns
    return time + len(way.whole) * each
