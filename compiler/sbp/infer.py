"""The choice of SBP: how every value lies, along one axis of the mesh after the other.

What is minimised is the time of a step on one rank, as stated and not as measured: what its parts
of all nodes take, and what it sends. A beam of partial choices goes over the nodes in their order;
two that agree on all that is still to be read are one, the cheaper. Then single nodes change their
minds as long as that is cheaper, seen with all who read them. The cheapest choice without look-
ahead is among those that are compared, so that none is dearer than greedy.

The choice is the same on every rank: it follows from the graph, the mesh and stated numbers alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from compiler.errors import CompileError
from compiler.graph import Graph, Node, consumers
from compiler.registry import Types, cost
from compiler.sbp.derive import Found
from compiler.sbp.moves import MeshLink, ways_between
from compiler.sbp.ways import ways_of
from compiler.sbp.words import (
    BROADCAST,
    PARTIAL,
    PARTIAL_MAX,
    PARTIAL_MIN,
    Sbp,
    Split,
    local_shape,
)
from compiler.types import TensorType, ValueId

BEAM = 12
"""Choices that are kept from node to node."""

_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Speed:
    """What a rank computes with, as stated."""

    flops_per_ns: float = 100.0
    bytes_per_ns: float = 20.0


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis of the mesh: how many ranks, what joins them, what each computes with."""

    parts: int
    wire: MeshLink
    speed: Speed


Fixed = Mapping[ValueId, Sbp]
"""Values whose layout is given."""


@dataclass(frozen=True, slots=True)
class SbpChoice:
    """A word for every value, and the way of every node."""

    words: tuple[Sbp, ...]
    ways: tuple[Found, ...]
    time_ns: float


@dataclass(slots=True)
class _Draft:
    """A choice for the nodes so far.

    `boxed` are the words that each value was brought into, its own among them. `key` is that of all
    that is still to be read: two states with one key go on alike.
    """

    time: float
    words: list[Sbp]
    boxed: list[tuple[Sbp, ...]]
    ways: list[int]
    key: int = 0

    def copy(self) -> _Draft:
        """Return the same choice, to go on in another way."""
        return _Draft(self.time, [*self.words], [*self.boxed], [*self.ways], self.key)


@dataclass(slots=True)
class _Given:
    """All that the search reads."""

    graph: Graph
    types: Sequence[TensorType]
    axis: MeshAxis
    fixed: Fixed
    earlier: Sequence[tuple[int, SbpChoice]]
    ways: list[tuple[Found, ...]] = field(default_factory=list)
    own_ns: list[tuple[float, ...]] = field(default_factory=list)
    needs: dict[ValueId, Sbp] = field(default_factory=dict)
    _moves: dict[tuple[TensorType, Sbp, Sbp], float] = field(default_factory=dict)

    def move(self, value: ValueId, old: Sbp, new: Sbp) -> float:
        """Return the time that a value takes from one word to another."""
        if old == new:
            return 0.0
        type_, axis = self.types[value], self.axis
        rows = [type_.shape[word.axis] for word in (old, new) if isinstance(word, Split)]
        if min(rows, default=axis.parts) < axis.parts:
            # Who reads it so has it otherwise along the outer axes, too: its bytes are a guess.
            type_ = self.graph.types[value]
        key = type_, old, new
        found = self._moves.get(key)
        if found is None:
            found = ways_between(key[0], (old,), (new,), (axis.parts,), (axis.wire,))[0]
            self._moves[key] = found
        return found


def choose(
    graph: Graph, earlier: Sequence[tuple[int, SbpChoice]], axis: MeshAxis, fixed: Fixed
) -> SbpChoice:
    """Return the choice along one axis of the mesh.

    Args:
        graph: The graph of whole tensors.
        earlier: The axes of the mesh outside of this one: parts, and what was chosen.
        axis: The axis.
        fixed: Words of values that are given: of inputs and variables, and of what writes these;
            of an output of the job it is what it is brought into.

    Raises:
        CompileError: A node can have none of its ways, as its values are fixed; it says which there
            are.
    """
    parts = [parts for parts, _ in earlier]
    types = [
        _part_type(type_, [choice.words[value] for _, choice in earlier], parts)
        for value, type_ in enumerate(graph.types)
    ]
    problem = _Given(graph, types, axis, fixed, earlier)
    _fill(problem)
    best = min([_searched(problem, beam) for beam in (BEAM, 1)], key=lambda s: s.time)
    _improve(problem, best)
    ways = [problem.ways[i][way] for i, way in enumerate(best.ways)]
    return SbpChoice(tuple(best.words), tuple(ways), _total(problem, best))


def _fill(problem: _Given) -> None:
    graph = problem.graph
    for output in graph.outputs:
        problem.needs[output.value] = BROADCAST
    parts = [parts for parts, _ in problem.earlier]
    for index, node in enumerate(graph.nodes):
        signatures = [choice.ways[index].signature for _, choice in problem.earlier]
        given = tuple(
            [
                _part_type(graph.types[v], [s.inputs[i] for s in signatures], parts)
                for i, v in enumerate(node.inputs)
            ]
        )
        made = tuple([problem.types[v] for v in node.outputs])
        ways = ways_of(node.op, given, made, node.attrs, problem.axis.parts)
        kept = tuple([way for way in ways if _agrees(problem, node, way)])
        if not kept:
            raise CompileError(_impossible(problem, node, ways))
        problem.ways.append(kept)
        problem.own_ns.append(tuple([_own_ns(problem, node, given, made, w) for w in kept]))


def _part_type(type_: TensorType, words: Sequence[Sbp], parts: Sequence[int]) -> TensorType:
    """Return the type of the largest part of a tensor."""
    if not words:
        return type_
    shape = local_shape(type_.shape, tuple(words), parts, [0] * len(words))
    return TensorType(type_.dtype, shape)


def _agrees(problem: _Given, node: Node, way: Found) -> bool:
    fixed = problem.fixed
    pairs = zip(node.outputs, way.signature.outputs, strict=True)
    return all([fixed.get(value, word) == word for value, word in pairs])


def _impossible(problem: _Given, node: Node, ways: Sequence[Found]) -> str:
    wanted = ", ".join([str(problem.fixed.get(v, "any")) for v in node.outputs])
    known = "; ".join([str(way.signature) for way in ways])
    return (
        f"{node.source}: {node.op} over {problem.axis.parts} ranks cannot make {wanted}; it can:"
        f" {known}"
    )


def _own_ns(problem: _Given, node: Node, given: Types, made: Types, way: Found) -> float:
    """Return what a rank's part of a node takes, with what is made whole on its way."""
    parts, speed, wire = problem.axis.parts, problem.axis.speed, problem.axis.wire
    words = (*way.signature.inputs, *way.signature.outputs)
    local = [
        TensorType(t.dtype, local_shape(t.shape, (word,), (parts,), (0,)))
        for t, word in zip((*given, *made), words, strict=True)
    ]
    if not given:
        return 0.0
    work = cost.get(node.op)(tuple(local[: len(given)]), tuple(local[len(given) :]), node.attrs)
    time = max(work.flops / speed.flops_per_ns, work.bytes / speed.bytes_per_ns)
    # What a program makes whole is a number per row or column: about as large as the smallest
    # operand. Its messages are what counts.
    size = min([t.size_bytes for t in local]) * 2 * (parts - 1) / parts
    each = size / wire.bytes_per_ns + 2 * (parts - 1) * wire.latency_ns
    return time + len(way.whole) * each


def _searched(problem: _Given, beam: int) -> _Draft:
    """Go over the nodes with so many choices at a time."""
    graph = problem.graph
    dying: dict[int, list[ValueId]] = {}
    for value, last in enumerate(_last_reads(graph)):
        dying.setdefault(last, []).append(ValueId(value))
    num = len(graph.types)
    states = [_Draft(0.0, [BROADCAST] * num, [()] * num, [])]
    for index in range(len(graph.nodes)):
        found: list[tuple[float, int, int]] = []
        for number, state in enumerate(states):
            found += [
                (state.time + _step_ns(problem, state, index, way), number, way)
                for way in range(len(problem.ways[index]))
            ]
        found.sort()
        gone = tuple(dying.get(index, ()))
        kept: dict[int, tuple[float, int, int]] = {}
        for step in found:
            kept.setdefault(_key_after(problem, states[step[1]], index, step[2], gone), step)
            if len(kept) == beam:
                break
        states = _continued(problem, states, index, kept)
    return states[0]


def _continued(
    problem: _Given, states: list[_Draft], index: int, kept: Mapping[int, tuple[float, int, int]]
) -> list[_Draft]:
    """Return the states that are kept. A state that goes on in one way alone is not copied."""
    left = [0] * len(states)
    for _, number, _ in kept.values():
        left[number] += 1
    node, found = problem.graph.nodes[index], []
    for key, (time, number, way) in kept.items():
        left[number] -= 1
        state = states[number].copy() if left[number] else states[number]
        for value, word in _news(problem, index, way):
            if word not in state.boxed[value]:
                state.boxed[value] = (*state.boxed[value], word)
        signature = problem.ways[index][way].signature
        for value, word in zip(node.outputs, signature.outputs, strict=True):
            state.words[value] = word
        state.ways.append(way)
        state.time, state.key = time, key
        found.append(state)
    return found


def _news(problem: _Given, index: int, way: int) -> list[tuple[ValueId, Sbp]]:
    """Return the words that a node makes of its results and has its operands brought into."""
    node, signature = problem.graph.nodes[index], problem.ways[index][way].signature
    pairs = [*zip(node.inputs, signature.inputs, strict=True)]
    return [*pairs, *zip(node.outputs, signature.outputs, strict=True)]


def _key_after(
    problem: _Given, state: _Draft, index: int, way: int, gone: Sequence[ValueId]
) -> int:
    """Return the key of a state after a node, whose last read values are no longer in it."""
    key, seen = state.key, set()
    for value, word in _news(problem, index, way):
        if (value, word) not in seen and word not in state.boxed[value]:
            seen.add((value, word))
            if value not in gone:
                key ^= _mixed(value, word)
    made = problem.ways[index][way].signature.outputs
    for value, word in zip(problem.graph.nodes[index].outputs, made, strict=True):
        if value not in gone:
            key ^= _mixed(value, word, is_own=True)
    for value in gone:
        for word in state.boxed[value]:
            key ^= _mixed(value, word)
        if state.boxed[value]:
            key ^= _mixed(value, state.words[value], is_own=True)
    return key


_NUMBERS = {BROADCAST: 1, PARTIAL: 2, PARTIAL_MAX: 3, PARTIAL_MIN: 4}
_SOME_PRIME, _BITS = 0x9E3779B97F4A7C15, (1 << 64) - 1


def _mixed(value: ValueId, word: Sbp, *, is_own: bool = False) -> int:
    """Return 64 bits for a value that lies in some way, the same in every process."""
    number = 5 + word.axis if isinstance(word, Split) else _NUMBERS[word]
    mixed = ((value + 1) * 128 + 64 * is_own + number) * _SOME_PRIME & _BITS
    mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & _BITS
    return mixed ^ mixed >> 32


def _last_reads(graph: Graph) -> list[int]:
    found = [-1] * len(graph.types)
    for value, readers in enumerate(consumers(graph)):
        if readers:
            found[value] = readers[-1]
    return found


def _step_ns(problem: _Given, state: _Draft, index: int, way: int) -> float:
    """Return what a node adds to the time of a choice."""
    node, signature = problem.graph.nodes[index], problem.ways[index][way].signature
    time = problem.own_ns[index][way]
    new: dict[tuple[ValueId, Sbp], None] = {}
    for value, word in zip(node.inputs, signature.inputs, strict=True):
        if word not in state.boxed[value] and (value, word) not in new:
            new[value, word] = None
            time += problem.move(value, state.words[value], word)
    for value, word in zip(node.outputs, signature.outputs, strict=True):
        if value in problem.needs:
            time += problem.move(value, word, problem.needs[value])
    return time


def _value_ns(problem: _Given, state: _Draft, value: ValueId) -> float:
    """Return what all readers of a value together have it brought into."""
    nodes, needs = (
        problem.graph.nodes,
        dict.fromkeys([problem.needs.get(value, state.words[value])]),
    )
    for reader in consumers(problem.graph)[value]:
        signature = problem.ways[reader][state.ways[reader]].signature
        for read, word in zip(nodes[reader].inputs, signature.inputs, strict=True):
            if read == value:
                needs[word] = None
    return sum([problem.move(value, state.words[value], word) for word in needs])


def _total(problem: _Given, state: _Draft) -> float:
    values = [v for node in problem.graph.nodes for v in node.outputs]
    own = [problem.own_ns[i][way] for i, way in enumerate(state.ways)]
    return sum(own) + sum([_value_ns(problem, state, v) for v in values])


def _improve(problem: _Given, state: _Draft) -> None:
    """Change the way of single nodes while that makes the whole cheaper."""
    for _ in range(_ROUNDS):
        is_changed = False
        for index, node in enumerate(problem.graph.nodes):
            touched = tuple(dict.fromkeys((*node.inputs, *node.outputs)))
            best = state.ways[index]

            def time(way: int, index: int = index, touched: tuple[ValueId, ...] = touched) -> float:
                _set(problem, state, index, way)
                around = sum([_value_ns(problem, state, v) for v in touched])
                return problem.own_ns[index][way] + around

            times = [(time(way), way) for way in range(len(problem.ways[index]))]
            if min(times)[0] < times[best][0] * (1 - 1e-12):
                best, is_changed = min(times)[1], True
            _set(problem, state, index, best)
        if not is_changed:
            return


def _set(problem: _Given, state: _Draft, index: int, way: int) -> None:
    state.ways[index] = way
    signature = problem.ways[index][way].signature
    for value, word in zip(problem.graph.nodes[index].outputs, signature.outputs, strict=True):
        state.words[value] = word
