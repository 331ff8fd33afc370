"""The choice of SBP: how every value lies, along one axis of the mesh after the other.

What is minimised is the time of a step on one rank (`SbpSearchProblem`). A beam of partial choices
goes over the nodes in their order; two that agree on all that is still to be read are one, the
cheaper. Then single nodes change their minds as long as that is cheaper, seen with all who read
them. The cheapest choice without look-ahead is among those that are compared, so that none is
dearer than greedy.

Where an axis crosses hosts, the search also begins from the choice for one host. Messages between
hosts are so long that a beam drops, one node after the other, all that gathers a value for several
readers at once.

Another search is in even parts, where the first one splits into parts of unequal sizes what the
job does not. Each size of a part makes another class of ranks, with a plan of its own to compile,
and kernels that are chosen by rule and not by measurements (`actorflow.distributed.agreed_plan`).
Along an axis of 50 ranks, matrices of several extents make five classes of one. The even choice
counts unless it is slower by more than `_EVEN_SHARE`.

The choice is the same on every rank: it follows from the graph, the mesh and stated numbers alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from compiler.contract.attrs import Attrs
from compiler.contract.errors import CompileError
from compiler.contract.placement import AxisLinks
from compiler.contract.sbp import (
    BROADCAST,
    PARTIAL,
    PARTIAL_MAX,
    PARTIAL_MIN,
    Partial,
    Sbp,
    Split,
    local_shape,
)
from compiler.contract.types import Phase, TensorType, ValueId
from compiler.graph.columns import local_attrs
from compiler.graph.graph import Graph, Node, consumers, mark_needed
from compiler.graph.registry import Types, cost, view
from compiler.ops.primitives.sources import INPUT, VARIABLE
from compiler.ops.primitives.transfer import ALL_REDUCE
from compiler.sbp.boxing import WRITTEN_BYTES_PER_NS, cheapest_boxing
from compiler.sbp.collective_schedule import awaited_results
from compiler.sbp.derive import CandidateSignature, call_of, walked_sbp
from compiler.sbp.local_form import candidate_signatures, is_possible

__all__ = [
    "MeshAxis",
    "SbpChoice",
    "Speed",
    "choose",
]


_MOST_LISTED = 12


@dataclass(frozen=True, slots=True)
class InfeasibleNode:
    """A node that has none of its `ways`; `least` are its inputs and outputs on the last rank."""

    graph: Graph
    node: Node
    least: Types
    fixed: Mapping[ValueId, Sbp]
    candidates: Sequence[CandidateSignature]


def infeasible_message(found: InfeasibleNode, axis: str, parts: int) -> str:
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
    results = [f"{graph.types[v]} as {found.fixed.get(v, 'any')}" for v in node.outputs]
    reads = [_name_and_word(graph, v, found.fixed) for v in node.inputs]
    over = [node.inputs[old] for _, old in node.writes if node.inputs[old] in found.fixed]
    text = (
        f"{node.source}: {node.op} cannot make {'; '.join(results)} {along}. It reads"
        f" {'; '.join(reads) or 'nothing'}. {_candidates(found.candidates)}"
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
    part = least.shape[word.axis]
    inner = f" ({part} where other axes of the mesh split it, too)" if part != rows else ""
    return (
        f"it is {type_}, whose axis {word.axis} has extent {rows}{inner}, fewer than the ranks;"
        f" split a longer axis, keep it whole (B), or take {max(part, 1)} along this one"
    )


def _candidates(ways: Sequence[CandidateSignature]) -> str:
    listed = [str(way.signature) for way in ways]
    num_more = len(listed) - _MOST_LISTED
    more = f"; and {num_more} more" if num_more > 0 else ""
    return f"It can: {'; '.join(listed[:_MOST_LISTED])}{more}."


def _name_and_word(graph: Graph, value: ValueId, fixed: Mapping[ValueId, Sbp]) -> str:
    word = fixed.get(value)
    return f"{_name_of(graph, value)} {'in any layout' if word is None else f'as {word}'}"


def _name_of(graph: Graph, value: ValueId) -> str:
    """Return a name for a value: the user's, or its type and the op that makes it."""
    maker = graph.nodes[graph.producers()[value]]
    type_ = graph.types[value]
    if maker.op is INPUT:
        return f"batch[{maker.attrs['name']!r}]"
    if maker.op is VARIABLE:
        return f"{maker.attrs.str_('role')} {maker.attrs['name']!r}"
    return f"{type_} of {maker.op}"


# Times are stated and not measured: a rank's part of a node takes its operations and bytes, a step
# of a tensor from one layout to another what it sends. What waits for nobody goes in buckets with
# others like it, and shares their messages.


@dataclass(frozen=True, slots=True)
class Speed:
    """The stated speed of a rank's arithmetic and memory."""

    flops_per_ns: float = 100.0
    bytes_per_ns: float = WRITTEN_BYTES_PER_NS


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis of the mesh: how many ranks, what joins them, what each computes with."""

    parts: int
    wire: AxisLinks
    speed: Speed
    name: str = ""


Fixed = Mapping[ValueId, Sbp]
"""Values whose layout is given."""


@dataclass(frozen=True, slots=True)
class SbpChoice:
    """A word for every value, and the way of every node."""

    words: tuple[Sbp, ...]
    signatures: tuple[CandidateSignature, ...]
    time_ns: float


@dataclass(slots=True)
class SbpSearchProblem:
    """All that the search reads."""

    graph: Graph
    types: Sequence[TensorType]
    axis: MeshAxis
    fixed: Fixed
    earlier: Sequence[tuple[int, SbpChoice]]
    candidates: list[tuple[CandidateSignature, ...]] = field(default_factory=list)
    own_ns: list[tuple[float, ...]] = field(default_factory=list)
    needs: dict[ValueId, Sbp] = field(default_factory=dict)
    bundled: frozenset[ValueId] = frozenset()
    _move_ns: dict[tuple[ValueId, Sbp, Sbp], float] = field(default_factory=dict)

    def move(self, value: ValueId, old: Sbp, new: Sbp) -> float:
        """Return the time that a value takes from one word to another."""
        time_ns = self._move_ns.get((value, old, new))
        if time_ns is not None:
            return time_ns
        type_, axis = self.types[value], self.axis
        rows = [type_.shape[word.axis] for word in (old, new) if isinstance(word, Split)]
        if min(rows, default=axis.parts) < axis.parts:
            # Who reads it so has it otherwise along the outer axes, too: its bytes are a guess.
            type_ = self.graph.types[value]
        wire = _shared(axis, type_) if value in self.bundled else axis.wire
        time_ns = cheapest_boxing(type_, (old,), (new,), (axis.parts,), (wire,))[0]
        self._move_ns[value, old, new] = time_ns
        return time_ns


def _shared(axis: MeshAxis, type_: TensorType) -> AxisLinks:
    """Return what it takes to send a tensor among others of a bucket, which share messages.

    A bucket has as many bytes as move in the time of its messages, or more.
    """
    full = axis.wire.least_bytes(axis.parts)
    return axis.wire.with_messages(min(1.0, type_.size_bytes / full) if full else 1.0)


def bucketable_values(graph: Graph) -> frozenset[ValueId]:
    """Return the values no step waits for: parameters, and what only updates and metrics read.

    Their collectives go together (`compiler.sbp.collective_schedule`).
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


def enumerate_candidates(problem: SbpSearchProblem) -> None:
    """Find the ways of every node. Raises CompileError for a node that has none."""
    graph = problem.graph
    for output in graph.outputs:
        problem.needs[output.value] = BROADCAST
    parts = [parts for parts, _ in problem.earlier]
    for index, node in enumerate(graph.nodes):
        signatures = [choice.signatures[index].signature for _, choice in problem.earlier]
        inputs = tuple(
            [
                part_type(graph.types[v], [s.inputs[i] for s in signatures], parts)
                for i, v in enumerate(node.inputs)
            ]
        )
        outputs = tuple([problem.types[v] for v in node.outputs])
        attrs = _attrs_of_part(problem, index)
        ways = candidate_signatures(node.op, inputs, outputs, attrs, problem.axis.parts)
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
        feasible = tuple([way for way in ways if _agrees(problem, node, way)])
        if not feasible:
            refused = InfeasibleNode(graph, node, least, problem.fixed, ways)
            raise CompileError(infeasible_message(refused, problem.axis.name, problem.axis.parts))
        problem.candidates.append(feasible)
        problem.own_ns.append(tuple([_own_ns(problem, node, inputs, outputs, w) for w in feasible]))


def _attrs_of_part(problem: SbpSearchProblem, index: int) -> Attrs:
    """Return the attributes of a node on the first part of what it walks, by the outer axes."""
    node, types = problem.graph.nodes[index], problem.graph.types
    if not local_attrs.has(node.op) or not problem.earlier:
        return node.attrs
    in_types, out_types = [tuple([types[v] for v in side]) for side in (node.inputs, node.outputs)]
    call = call_of(node.op, in_types, out_types, node.attrs)
    if call is None:
        return node.attrs
    signatures = [choice.signatures[index].signature for _, choice in problem.earlier]
    sbp = tuple([walked_sbp(call.frame, in_types, signature) for signature in signatures])
    parts = [parts for parts, _ in problem.earlier]
    shape = local_shape(call.frame.shape, sbp, parts, [0] * len(sbp))
    return local_attrs.get(node.op)(node.attrs, shape)


def part_type(
    type_: TensorType, words: Sequence[Sbp], parts: Sequence[int], *, last: bool = False
) -> TensorType:
    """Return the type of the first part of a tensor, the largest; or of the last, the least."""
    if not words:
        return type_
    at = [n - 1 for n in parts] if last else [0] * len(words)
    shape = local_shape(type_.shape, tuple(words), parts, at)
    return TensorType(type_.dtype, shape)


def _agrees(problem: SbpSearchProblem, node: Node, way: CandidateSignature) -> bool:
    fixed, ins, outs = problem.fixed, way.signature.inputs, way.signature.outputs
    # What is written over is the variable itself, and no copy of it that was brought elsewhere.
    over = [(node.inputs[old], (ins[old], outs[new])) for new, old in node.writes]
    pairs = zip(node.outputs, outs, strict=True)
    return all([fixed.get(value, word) == word for value, word in pairs]) and all(
        [{fixed[value]} == {*words} for value, words in over if value in fixed]
    )


def _own_ns(
    problem: SbpSearchProblem, node: Node, given: Types, made: Types, way: CandidateSignature
) -> float:
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
    # Roofline: arithmetic or memory, whichever takes longer.
    time = max(work.flops / speed.flops_per_ns, work.bytes / speed.bytes_per_ns)
    # What a program makes whole is a number per row or column: about as large as the smallest
    # operand. Its messages are what counts.
    size = min([t.size_bytes for t in local])
    return time + len(way.whole) * wire.time_ns(ALL_REDUCE.name, size, parts)


BEAM = 12
"""Choices that are kept from node to node, at least."""

_MOST_STATES = 6_000
"""Choices that are kept in all, at most, where more are kept than that: small graphs are searched
to the end."""

_ROUNDS = 4

_EVEN_SHARE = 0.02
"""By how much of its time a step may be slower for parts of equal sizes."""


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
    problem = SbpSearchProblem(graph, types, axis, fixed, earlier, bundled=bucketable_values(graph))
    problems = [problem]
    if axis.wire.per_host < axis.parts:
        near = replace(axis, wire=AxisLinks.alike(axis.wire.inside))
        problems.append(
            SbpSearchProblem(graph, types, near, fixed, earlier, bundled=problem.bundled)
        )
    for one in problems:
        enumerate_candidates(one)
    choice, rests = _searched(problems), _given_rests(problem)
    if any([_is_uneven(problem, rests, *pair) for pair in enumerate(choice.words)]):
        for one in problems:
            _keep_even(one, rests)
        even = _searched(problems)
        choice = even if even.time_ns <= choice.time_ns * (1 + _EVEN_SHARE) else choice
    return choice


def _given_rests(problem: SbpSearchProblem) -> frozenset[int]:
    """Return n mod p of all extents n that the job splits into p parts, and 0.

    That many parts are longer by one. Of extents with one remainder these are the same ranks.
    """
    splits = [(value, word) for value, word in problem.fixed.items() if isinstance(word, Split)]
    extents = [problem.types[value].shape[word.axis] for value, word in splits]
    return frozenset([0, *[extent % problem.axis.parts for extent in extents]])


def _is_uneven(problem: SbpSearchProblem, rests: frozenset[int], value: int, word: Sbp) -> bool:
    """Whether a word cuts a value into parts of unequal sizes, where no given value is cut so."""
    if not isinstance(word, Split):
        return False
    return problem.types[value].shape[word.axis] % problem.axis.parts not in rests


def _keep_even(problem: SbpSearchProblem, rests: frozenset[int]) -> None:
    """Drop the ways of nodes with uneven parts, where a node has others."""
    for index, node in enumerate(problem.graph.nodes):
        values, kept = (*node.inputs, *node.outputs), list[int]()
        for number, way in enumerate(problem.candidates[index]):
            words = (*way.signature.inputs, *way.signature.outputs)
            pairs = zip(values, words, strict=True)
            if not any([_is_uneven(problem, rests, *pair) for pair in pairs]):
                kept.append(number)
        if kept:
            problem.candidates[index] = tuple([problem.candidates[index][n] for n in kept])
            problem.own_ns[index] = tuple([problem.own_ns[index][n] for n in kept])


def _searched(problems: Sequence[SbpSearchProblem]) -> SbpChoice:
    """Return the best choice for the first problem, from the best ones for each of them."""
    problem, beam = problems[0], max(BEAM, _MOST_STATES // len(problems[0].graph.nodes))
    searches, found = [_LayoutSearch(one) for one in problems], list[tuple[float, list[int]]]()
    for one in searches:
        # A beam of 1 is the greedy choice: a wider beam may have dropped what comes out cheapest.
        ways = min([one.searched(width) for width in (beam, 1)])[1]
        one.improve(ways)
        if one is not searches[0]:
            searches[0].improve(ways)
        found.append((searches[0].total(ways), ways))
    time, ways = min(found)
    words = searches[0].words(ways)
    return SbpChoice(words, tuple([problem.candidates[i][way] for i, way in enumerate(ways)]), time)


@dataclass(slots=True)
class _SearchedWay:
    """One way of a node as the search reads it; `time` is what it takes of its own.

    `inputs` are the words of all operands; `reads` each of them once, with the bit of its word;
    `makes` the results, with the bits of all words in which a result is there then.
    """

    time: float
    inputs: tuple[Sbp, ...]
    reads: tuple[tuple[ValueId, Sbp, int], ...]
    makes: tuple[tuple[ValueId, Sbp, int], ...]


_Trail = tuple["_Trail", int] | None
"""The ways of the nodes so far, the last one first."""


@dataclass(slots=True)
class _Draft:
    """A choice for the nodes so far.

    `held` has, for each value that is still to be read, its word and a bit (`_bit`) for every word
    that it was brought into. `key` is that of all of these: two drafts with one key go on alike.
    """

    time: float
    held: dict[ValueId, tuple[Sbp, int]]
    trail: _Trail
    key: int = 0


_FIRST_BITS = (BROADCAST, PARTIAL, PARTIAL_MAX, PARTIAL_MIN)


def _bit(word: Sbp) -> int:
    """Return the set of one word; sets of words are joined by `|`."""
    return 1 << (5 + word.axis if isinstance(word, Split) else 1 + _FIRST_BITS.index(word))


# Increment and first multiplier of splitmix64.
_SOME_PRIME, _OTHER_PRIME, _BITS = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, (1 << 64) - 1


def _mixed(value: ValueId, word: Sbp, seen: int) -> int:
    """Return 64 bits for a value that lies in some ways, the same in every process."""
    number = _bit(word).bit_length() - 1
    mixed = (((value + 1) * 128 + number) * _SOME_PRIME ^ seen * _OTHER_PRIME) & _BITS
    mixed = (mixed ^ mixed >> 29) * _OTHER_PRIME & _BITS
    return mixed ^ mixed >> 32


class _LayoutSearch:
    """The search for the ways of all nodes of a problem."""

    def __init__(self, problem: SbpSearchProblem) -> None:
        self.problem, self.nodes = problem, problem.graph.nodes
        self.needs, self.move = problem.needs, problem.move
        self._keys: dict[tuple[ValueId, Sbp, int], int] = {}
        self.rows = [
            [self._row(node, way, way_ns) for way, way_ns in zip(ways, own_ns, strict=True)]
            for node, ways, own_ns in zip(
                self.nodes, problem.candidates, problem.own_ns, strict=True
            )
        ]
        self.readers: list[list[tuple[int, int]]] = [[] for _ in problem.graph.types]
        for index, node in enumerate(self.nodes):
            for place, value in enumerate(node.inputs):
                self.readers[value].append((index, place))

    def _row(self, node: Node, way: CandidateSignature, own_ns: float) -> _SearchedWay:
        inputs = way.signature.inputs
        needs, pairs = self.needs, list(zip(node.outputs, way.signature.outputs, strict=True))
        reads = dict.fromkeys(zip(node.inputs, inputs, strict=True))
        ends = [self.move(v, word, needs[v]) for v, word in pairs if v in needs]
        return _SearchedWay(
            own_ns + sum(ends),
            inputs,
            tuple([(v, word, _bit(word)) for v, word in reads]),
            tuple([(v, word, _bit(word) | _bit(needs.get(v, word))) for v, word in pairs]),
        )

    def _key(self, value: ValueId, word: Sbp, seen: int) -> int:
        key = value, word, seen
        mixed = self._keys.get(key)
        if mixed is None:
            mixed = self._keys[key] = _mixed(value, word, seen)
        return mixed

    def searched(self, beam: int) -> tuple[float, list[int]]:
        """Search over the nodes with a beam of that width; return the best time and its ways."""
        # The last node that reads each value, -1 for none: after it the value leaves held and key.
        last = [reads[-1][0] if reads else -1 for reads in self.readers]
        drafts = [_Draft(0.0, {}, None)]
        for index, rows in enumerate(self.rows):
            steps: list[tuple[float, int, int]] = []
            for number, draft in enumerate(drafts):
                held, time = draft.held, draft.time
                for way, row in enumerate(rows):
                    later = time + row.time
                    for value, word, bit in row.reads:
                        old, seen = held[value]
                        if not seen & bit:
                            later += self.move(value, old, word)
                    steps.append((later, number, way))
            # Cheapest first, so that `setdefault` keeps the cheapest draft of a key; indices break
            # ties.
            steps.sort()
            best: dict[int, _Draft] = {}
            for step in steps:
                draft = self._after(drafts[step[1]], rows[step[2]], step, last, index)
                best.setdefault(draft.key, draft)
                if len(best) == beam:
                    break
            drafts = [*best.values()]
        ways: list[int] = []
        trail = drafts[0].trail
        while trail is not None:
            trail, way = trail
            ways.append(way)
        return drafts[0].time, ways[::-1]

    def _after(
        self,
        draft: _Draft,
        row: _SearchedWay,
        step: tuple[float, int, int],
        last: list[int],
        index: int,
    ) -> _Draft:
        """Return a draft that has gone on by a way of the next node."""
        held, key = draft.held.copy(), draft.key
        for value, _, bit in row.reads:
            old, seen = held[value]
            # Zobrist hashing: to take an entry out and to put one in is one XOR each.
            key ^= self._key(value, old, seen)
            held[value] = old, seen | bit
            key ^= self._key(value, old, seen | bit)
        for value, word, seen in row.makes:
            held[value] = word, seen
            key ^= self._key(value, word, seen)
        for value in {v for v, _, _ in (*row.reads, *row.makes)}:
            if last[value] <= index:
                key ^= self._key(value, *held.pop(value))
        return _Draft(step[0], held, (draft.trail, step[2]), key)

    def words(self, ways: Sequence[int]) -> tuple[Sbp, ...]:
        """Return the word of every value."""
        sbps: list[Sbp] = [BROADCAST] * len(self.readers)
        for index, way in enumerate(ways):
            for value, word, _ in self.rows[index][way].makes:
                sbps[value] = word
        return tuple(sbps)

    def _value_ns(self, ways: Sequence[int], value: ValueId, word: Sbp) -> float:
        """Return the time of the conversions that the readers of a value need."""
        needs = {self.rows[i][ways[i]].inputs[place] for i, place in self.readers[value]}
        needs -= {word, self.needs.get(value, word)}
        # In order, so that sums have the same bits in every process.
        return sum([self.move(value, word, need) for need in sorted(needs)])

    def total(self, ways: Sequence[int]) -> float:
        """Return the time of a choice."""
        time = 0.0
        for index, way in enumerate(ways):
            row = self.rows[index][way]
            time += row.time + sum([self._value_ns(ways, v, word) for v, word, _ in row.makes])
        return time

    def improve(self, ways: list[int]) -> None:
        """Change the way of single nodes while that makes the whole cheaper."""
        words = [*self.words(ways)]
        for _ in range(_ROUNDS):
            is_changed = False
            for index, node in enumerate(self.nodes):
                if len(self.rows[index]) == 1:
                    continue
                operands, times, best = tuple(dict.fromkeys(node.inputs)), [], ways[index]
                for way, row in enumerate(self.rows[index]):
                    ways[index] = way
                    around = [self._value_ns(ways, value, words[value]) for value in operands]
                    ahead = [self._value_ns(ways, v, word) for v, word, _ in row.makes]
                    times.append((row.time + sum(around) + sum(ahead), way))
                # By more than rounding: ways of equal cost must not take turns.
                if min(times)[0] < times[best][0] * (1 - 1e-12):
                    best, is_changed = min(times)[1], True
                ways[index] = best
                for value, word, _ in self.rows[index][best].makes:
                    words[value] = word
            if not is_changed:
                return
