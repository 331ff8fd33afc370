"""The choice of SBP: how every value lies, along one axis of the mesh after the other.

What is minimised is the time of a step on one rank (`compiler.sbp.problem`). A beam of partial
choices goes over the nodes in their order; two that agree on all that is still to be read are one,
the cheaper. Then single nodes change their minds as long as that is cheaper, seen with all who read
them. The cheapest choice without look-ahead is among those that are compared, so that none is
dearer than greedy.

The choice is the same on every rank: it follows from the graph, the mesh and stated numbers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiler.graph import Graph, Node
from compiler.sbp.derive import Found
from compiler.sbp.problem import (
    Fixed,
    LayoutProblem,
    MeshAxis,
    SbpChoice,
    Speed,
    fill,
    part_type,
    waiting_for_nobody,
)
from compiler.sbp.words import BROADCAST, PARTIAL, PARTIAL_MAX, PARTIAL_MIN, Sbp, Split
from compiler.types import ValueId

__all__ = ["MeshAxis", "SbpChoice", "Speed", "choose"]

BEAM = 12
"""Choices that are kept from node to node, at least."""

_MOST_STATES = 6_000
"""Choices that are kept in all, at most, where more are kept than that: small graphs are searched
to the end."""

_ROUNDS = 4


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
        part_type(type_, [choice.words[value] for _, choice in earlier], parts)
        for value, type_ in enumerate(graph.types)
    ]
    problem = LayoutProblem(graph, types, axis, fixed, earlier, bundled=waiting_for_nobody(graph))
    fill(problem)
    search = _LayoutSearch(problem)
    beam = max(BEAM, _MOST_STATES // len(graph.nodes))
    ways = min([search.searched(kept) for kept in (beam, 1)])[1]
    search.improve(ways)
    time, words = search.total(ways), search.words(ways)
    return SbpChoice(words, tuple([problem.ways[i][way] for i, way in enumerate(ways)]), time)


@dataclass(slots=True)
class _NumberedWay:
    """One way of a node, in numbers for words; `time` is what it takes of its own."""

    time: float
    inputs: tuple[int, ...]
    reads: tuple[tuple[ValueId, int], ...]
    makes: tuple[tuple[ValueId, int], ...]


_Trail = tuple["_Trail", int] | None
"""The ways of the nodes so far, the last one first."""


@dataclass(slots=True)
class _Draft:
    """A choice for the nodes so far.

    `held` has, for each value that is still to be read, its word and a bit for every word that it
    was brought into. `key` is that of all of these: two drafts with one key go on alike.
    """

    time: float
    held: dict[ValueId, tuple[int, int]]
    trail: _Trail
    key: int = 0


_NUMBERS: dict[Sbp, int] = {BROADCAST: 1, PARTIAL: 2, PARTIAL_MAX: 3, PARTIAL_MIN: 4}


def _number(word: Sbp) -> int:
    return 5 + word.axis if isinstance(word, Split) else _NUMBERS[word]


def _word(number: int) -> Sbp:
    return Split(number - 5) if number >= 5 else [*_NUMBERS][number - 1]


_SOME_PRIME, _OTHER_PRIME, _BITS = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, (1 << 64) - 1


def _mixed(value: ValueId, word: int, seen: int) -> int:
    """Return 64 bits for a value that lies in some ways, the same in every process."""
    mixed = (((value + 1) * 128 + word) * _SOME_PRIME ^ seen * _OTHER_PRIME) & _BITS
    mixed = (mixed ^ mixed >> 29) * _OTHER_PRIME & _BITS
    return mixed ^ mixed >> 32


class _LayoutSearch:
    """The search for the ways of all nodes of a problem."""

    def __init__(self, problem: LayoutProblem) -> None:
        self.problem, self.nodes = problem, problem.graph.nodes
        self.needs = {value: _number(word) for value, word in problem.needs.items()}
        self._moves: dict[tuple[ValueId, int, int], float] = {}
        self._keys: dict[tuple[ValueId, int, int], int] = {}
        self.rows = [
            [self._row(node, way, own) for way, own in zip(ways, own_ns, strict=True)]
            for node, ways, own_ns in zip(self.nodes, problem.ways, problem.own_ns, strict=True)
        ]
        self.readers: list[list[tuple[int, int]]] = [[] for _ in problem.graph.types]
        for index, node in enumerate(self.nodes):
            for place, value in enumerate(node.inputs):
                self.readers[value].append((index, place))

    def _row(self, node: Node, way: Found, own_ns: float) -> _NumberedWay:
        inputs = tuple([_number(word) for word in way.signature.inputs])
        outputs = [_number(word) for word in way.signature.outputs]
        reads = tuple(dict.fromkeys(zip(node.inputs, inputs, strict=True)))
        makes = tuple(zip(node.outputs, outputs, strict=True))
        ends = [self.move(v, n, self.needs[v]) for v, n in makes if v in self.needs]
        return _NumberedWay(own_ns + sum(ends), inputs, reads, makes)

    def move(self, value: ValueId, old: int, new: int) -> float:
        """Return the time that a value takes from one word to another."""
        key = value, old, new
        found = self._moves.get(key)
        if found is None:
            found = self._moves[key] = self.problem.move(value, _word(old), _word(new))
        return found

    def _key(self, value: ValueId, word: int, seen: int) -> int:
        key = value, word, seen
        found = self._keys.get(key)
        if found is None:
            found = self._keys[key] = _mixed(value, word, seen)
        return found

    def searched(self, beam: int) -> tuple[float, list[int]]:
        """Go over the nodes with so many choices at a time; return the best one and its time."""
        last = [own[-1][0] if own else -1 for own in self.readers]
        drafts = [_Draft(0.0, {}, None)]
        for index, rows in enumerate(self.rows):
            found: list[tuple[float, int, int]] = []
            for number, draft in enumerate(drafts):
                held, time = draft.held, draft.time
                for way, row in enumerate(rows):
                    later = time + row.time
                    for value, word in row.reads:
                        own, seen = held[value]
                        if not seen >> word & 1:
                            later += self.move(value, own, word)
                    found.append((later, number, way))
            found.sort()
            kept: dict[int, _Draft] = {}
            for step in found:
                draft = self._after(drafts[step[1]], rows[step[2]], step, last, index)
                kept.setdefault(draft.key, draft)
                if len(kept) == beam:
                    break
            drafts = [*kept.values()]
        ways: list[int] = []
        trail = drafts[0].trail
        while trail is not None:
            trail, way = trail
            ways.append(way)
        return drafts[0].time, ways[::-1]

    def _after(
        self,
        draft: _Draft,
        row: _NumberedWay,
        step: tuple[float, int, int],
        last: list[int],
        index: int,
    ) -> _Draft:
        """Return a draft that has gone on by a way of the next node."""
        held, key = draft.held.copy(), draft.key
        for value, word in row.reads:
            own, seen = held[value]
            key ^= self._key(value, own, seen)
            held[value] = own, seen | 1 << word
            key ^= self._key(value, own, seen | 1 << word)
        for value, word in row.makes:
            seen = 1 << word | (1 << self.needs[value] if value in self.needs else 0)
            held[value] = word, seen
            key ^= self._key(value, word, seen)
        for value in {*[v for v, _ in row.reads], *[v for v, _ in row.makes]}:
            if last[value] <= index:
                key ^= self._key(value, *held.pop(value))
        return _Draft(step[0], held, (draft.trail, step[2]), key)

    def words(self, ways: Sequence[int]) -> tuple[Sbp, ...]:
        """Return the word of every value."""
        found: list[Sbp] = [BROADCAST] * len(self.readers)
        for index, way in enumerate(ways):
            for value, word in self.rows[index][way].makes:
                found[value] = _word(word)
        return tuple(found)

    def _value_ns(self, ways: Sequence[int], value: ValueId, word: int) -> float:
        """Return what all readers of a value together have it brought into, but for the job."""
        needs = {self.rows[i][ways[i]].inputs[place] for i, place in self.readers[value]}
        needs -= {word, self.needs.get(value, word)}
        # In order, so that sums have the same bits in every process.
        return sum([self.move(value, word, need) for need in sorted(needs)])

    def total(self, ways: Sequence[int]) -> float:
        """Return the time of a choice."""
        time = 0.0
        for index, way in enumerate(ways):
            row = self.rows[index][way]
            time += row.time + sum([self._value_ns(ways, *made) for made in row.makes])
        return time

    def improve(self, ways: list[int]) -> None:
        """Change the way of single nodes while that makes the whole cheaper."""
        own = [0] * len(self.readers)
        for index, way in enumerate(ways):
            for value, word in self.rows[index][way].makes:
                own[value] = word
        for _ in range(_ROUNDS):
            is_changed = False
            for index, node in enumerate(self.nodes):
                if len(self.rows[index]) == 1:
                    continue
                touched, times, best = tuple(dict.fromkeys(node.inputs)), [], ways[index]
                for way, row in enumerate(self.rows[index]):
                    ways[index] = way
                    around = [self._value_ns(ways, value, own[value]) for value in touched]
                    ahead = [self._value_ns(ways, *made) for made in row.makes]
                    times.append((row.time + sum(around) + sum(ahead), way))
                if min(times)[0] < times[best][0] * (1 - 1e-12):
                    best, is_changed = min(times)[1], True
                ways[index] = best
                for value, word in self.rows[index][best].makes:
                    own[value] = word
            if not is_changed:
                return
