"""The logical graph: immutable, typed, with the user's own lines.

A `Node` applies an op to values; a `Value` is an id, and every fact about it is a column of the
`Graph` indexed by that id. Nodes stand in topological order. `source` is the user's file and line,
`scope` the module path ("blocks.0.attn"); both survive to the plan, the trace and every error.
Inputs of the job, variables and constants are nodes too (ops `input`, `variable`, `constant`), so
that every value has exactly one producer.

A graph never changes: `GraphBuilder` makes another one, and `prune` is the one way in which nodes
leave. What follows from a graph alone is a `cached_analysis`, worked out once for each graph. The
columns whose cells emit nodes, `gradient` and `simplify`, are declared here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from compiler.contract.attrs import NO_ATTRS, Attrs, AttrValue
from compiler.contract.errors import CompileError
from compiler.contract.html_table import html_table
from compiler.contract.types import MOST_ELEMENTS, Phase, TensorType, ValueId
from compiler.graph.registry import (
    Op,
    OpAttr,
    OpTypeError,
    has_effect,
    infer_type,
    input_output_aliases,
)

# Facts are kept with the graph: who makes a value, who reads it, which values share bytes, what
# runs once per step. A pass that returns the graph it was given passes all of them on; one that
# returns another graph starts afresh. A fact is a tuple or a frozen value: whoever asks next gets
# the same one.

T = TypeVar("T")


def cached_analysis(compute: Callable[[Graph], T]) -> Callable[[Graph], T]:
    """Let a function of a graph alone be called once per version; a decorator.

    Two threads that ask at once both work it out, and keep one of two equal answers.
    """

    @functools.wraps(compute)
    def known(graph: Graph) -> T:
        facts = graph.facts
        if known not in facts:
            facts[known] = compute(graph)
        return cast("T", facts[known])

    return known


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """A line of the user's program."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


UNKNOWN_SOURCE = SourceLocation("<unknown>", 0)

UNPLACED = -1
"""The device of a node that may run on any."""

UNSTAGED = -1
"""The stage of a node that runs where what it reads is, or wherever it is needed."""


@dataclass(frozen=True, slots=True)
class Node:
    """One application of an op. `outputs` are the values it produces, in order.

    `after` are values that must exist before the node runs, beyond its inputs: control edges. Only
    passes that run after `order` set them. `device` is a number into the ordered devices of the
    job, which the graph does not know; UNPLACED until the pass `place` has chosen. `stage` is that
    of a pipeline; see `compiler.sbp.stages`.
    """

    op: Op
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    attrs: Attrs
    scope: str
    source: SourceLocation
    phase: Phase = Phase.FORWARD
    after: tuple[ValueId, ...] = ()
    device: int = 0
    stage: int = UNSTAGED

    @property
    def writes(self) -> tuple[tuple[int, int], ...]:
        """The pairs (output, input) of its op's column `writes` that it has."""
        pairs = input_output_aliases.get(self.op)
        if not pairs:
            return pairs
        # Operands may be optional: a pair counts where the node has both ends.
        n_out, n_in = len(self.outputs), len(self.inputs)
        return tuple([p for p in pairs if p[0] < n_out and p[1] < n_in])

    def with_values(self, inputs: tuple[ValueId, ...], outputs: tuple[ValueId, ...]) -> Node:
        """Return the node with other inputs and outputs; a fifth of the time of `replace`."""
        same = self.attrs, self.scope, self.source, self.phase, self.after, self.device, self.stage
        return Node(self.op, inputs, outputs, *same)


@dataclass(frozen=True, slots=True)
class Output:
    """A value the job returns at every step: a metric or a prediction.

    `source` is the user's line of an output that has one of its own. The node that makes the value
    is no witness of it: fused with others it has one line for all. None is the line of the node.
    """

    name: str
    value: ValueId
    source: SourceLocation | None = None


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """How the optimizer changes one variable, before autodiff knows the gradient.

    The update node reads `(variable, gradient, *state, *scalars)` and writes `(variable, *state)`.
    `objective` is what the gradient is of; optimizers leave it to the job.
    """

    op: Op
    variable: ValueId
    state: tuple[ValueId, ...]
    scalars: tuple[ValueId, ...]
    attrs: Attrs
    objective: ValueId | None = None


@dataclass(frozen=True, slots=True)
class Accumulation:
    """A step consumes `every` batches and updates once, with the mean of their gradients.

    `batch` is the int64 variable that counts the batches done. A graph has it to the end: of a
    stage of a pipeline that sums no gradients nothing else would say so.
    """

    every: int
    batch: ValueId


@dataclass(frozen=True, slots=True)
class Write:
    """At the end of the step the storage of `variable` holds `value`.

    That of itself writes nothing: it keeps a variable in the graph that no node may read.
    """

    variable: ValueId
    value: ValueId

    @property
    def is_of_itself(self) -> bool:
        """Whether it writes nothing."""
        return self.variable == self.value


@dataclass(frozen=True, slots=True)
class Graph:
    """A logical graph. `types[v]` is the type of value v; nodes stand in topological order.

    `updates` are what autodiff consumes; afterwards there are none, and the gradients, sums and
    update nodes are ordinary nodes with `writes`.
    """

    nodes: tuple[Node, ...]
    types: tuple[TensorType, ...]
    outputs: tuple[Output, ...]
    updates: tuple[UpdateRule, ...] = ()
    writes: tuple[Write, ...] = ()
    accumulation: Accumulation | None = None
    facts: dict[Callable[..., object], object] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Cached analyses of this graph (`cached_analysis`); not part of its value."""
    predicates: Mapping[int, Callable[..., object]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """What a traced job's checks call, by the number of their probe: the user's code, no value."""

    def __repr__(self) -> str:
        """Name its size and outputs; ACTORFLOW_DUMP writes a line for each node."""
        named = ", ".join([f"{o.name}: {self.types[o.value]}" for o in self.outputs])
        return f"Graph({len(self.nodes)} nodes -> {named or 'no output'})"

    def _repr_html_(self) -> str:
        rows = {"nodes": len(self.nodes)}
        return html_table("Graph", rows | {o.name: self.types[o.value] for o in self.outputs})

    @cached_analysis
    def producers(self) -> tuple[int, ...]:
        """Return, per value, the index of the node that produces it (-1 for unused ids)."""
        column = [-1] * len(self.types)
        for index, node in enumerate(self.nodes):
            for value in node.outputs:
                column[value] = index
        return tuple(column)

    def objectives(self) -> tuple[ValueId, ...]:
        """Return what gradients are taken of, each once, in the order of the updates."""
        named = [rule.objective for rule in self.updates if rule.objective is not None]
        return tuple(dict.fromkeys(named))

    def effects(self) -> tuple[ValueId, ...]:
        """Return what nodes make that do something beyond it."""
        # A column is asked once per op: nodes are a hundred times as many.
        ops = {op for op in {node.op for node in self.nodes} if has_effect.get(op)}
        return tuple([v for n in self.nodes if n.op in ops for v in n.outputs]) if ops else ()

    @cached_analysis
    def roots(self) -> tuple[ValueId, ...]:
        """Return the values that must be computed: outputs, objectives, written values, effects."""
        values = [o.value for o in self.outputs] + [w.value for w in self.writes]
        values += self.effects()
        values += self.objectives()
        for rule in self.updates:
            values += [rule.variable, *rule.state, *rule.scalars]
        if self.accumulation is not None:
            values.append(self.accumulation.batch)
        return tuple(dict.fromkeys(values))


@cached_analysis
def consumers(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Return, per value, the indices of the nodes that read it, in order."""
    column: list[list[int]] = [[] for _ in graph.types]
    for index, node in enumerate(graph.nodes):
        inputs = node.inputs
        # A node that reads a value twice is one reader.
        for value in inputs if len(inputs) < 2 else dict.fromkeys(inputs):
            column[value].append(index)
    return tuple([tuple(readers) for readers in column])


@cached_analysis
def sole_readers(graph: Graph) -> tuple[int, ...]:
    """Return, per value, the index of the node that alone reads it; else -1.

    -1 for a root too, which is read where no node stands. Whoever rewrites that node may drop the
    value.
    """
    column = [readers[0] if len(readers) == 1 else -1 for readers in consumers(graph)]
    for value in graph.roots():
        column[value] = -1
    return tuple(column)


def mark_needed(
    graph: Graph, wanted: Sequence[ValueId], ends_at: Sequence[Op] = ()
) -> tuple[bool, ...]:
    """Mark the nodes that values need, as far back as those of some ops. O(nodes)."""
    is_needed = [False] * len(graph.types)
    for value in wanted:
        is_needed[value] = True
    marks = [False] * len(graph.nodes)
    # Backwards: all readers of a node's values stand after it, so their marks are final.
    for index in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[index]
        if node.op in ends_at:
            continue
        for value in node.outputs:
            if is_needed[value]:
                break
        else:
            continue
        marks[index] = True
        for value in node.inputs:
            is_needed[value] = True
    return tuple(marks)


def reachable(successors: Sequence[Sequence[int]], starts: Iterable[int]) -> set[int]:
    """Return the nodes that paths lead to, the starts among them. O(edges)."""
    reached = set(starts)
    waiting = list(reached)
    while waiting:
        for after in successors[waiting.pop()]:
            if after not in reached:
                reached.add(after)
                waiting.append(after)
    return reached


Place = tuple[str, SourceLocation, Phase, int, int]
"""What a builder gives a node beside op and operands: scope, source, phase, device and stage."""


class _PlacedInside:
    """Gives a builder a place until it is left; a generator would take three times as long."""

    __slots__ = ("_builder", "_place", "_saved")

    def __init__(self, builder: GraphBuilder, place: Place) -> None:
        self._builder = builder
        self._place = place

    def __enter__(self) -> None:
        self._saved, self._builder.place = self._builder.place, self._place

    def __exit__(self, *error: object) -> None:
        self._builder.place = self._saved


class GraphBuilder:
    """Grow a graph node by node; types are inferred, and errors carry op and user line.

    One builder serves the trace, gradient rules and rewriting passes alike.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.types: list[TensorType] = []
        self._producers: list[int] = []
        self.outputs: list[Output] = []
        self.updates: list[UpdateRule] = []
        self.writes: list[Write] = []
        self.accumulation: Accumulation | None = None
        self.place: Place = ("", UNKNOWN_SOURCE, Phase.FORWARD, 0, UNSTAGED)

    def at(
        self,
        scope: str,
        source: SourceLocation,
        phase: Phase = Phase.FORWARD,
        device: int = 0,
        stage: int = UNSTAGED,
    ) -> AbstractContextManager[None]:
        """Give all nodes emitted inside this scope, source, phase, device and stage."""
        return _PlacedInside(self, (scope, source, phase, device, stage))

    def like_node(self, node: Node, phase: Phase | None = None) -> AbstractContextManager[None]:
        """Give all nodes emitted inside what a node has, perhaps in another phase."""
        place = node.scope, node.source, phase or node.phase, node.device, node.stage
        return _PlacedInside(self, place)

    def on(self, device: int) -> AbstractContextManager[None]:
        """Give all nodes emitted inside this device, and scope, source and phase as they are."""
        scope, source, phase, _, stage = self.place
        return _PlacedInside(self, (scope, source, phase, device, stage))

    @property
    def stage(self) -> int:
        """The stage that nodes are given."""
        return self.place[-1]

    def emit(
        self, op: Op, inputs: Sequence[ValueId], attrs: Attrs | Mapping[str, AttrValue] = NO_ATTRS
    ) -> tuple[ValueId, ...]:
        """Append a node and return its output values. Raises CompileError on wrong input types."""
        frozen = attrs if isinstance(attrs, Attrs) else Attrs(attrs)
        input_types = tuple([self.types[v] for v in inputs])
        try:
            output_types = infer_type.get(op)(input_types, frozen)
        except OpTypeError as error:
            operands = ", ".join(map(str, input_types))
            raise CompileError(
                f"{self.place[1]}: {op}({operands}){_in_scope(self.place[0])}: {error}"
            ) from error.__cause__
        scope, source, phase, device, stage = self.place
        for out in output_types:
            if not out.is_possible:
                raise CompileError(
                    f"{source}: {op}{_in_scope(scope)} would make {out}: extents are 0 or more,"
                    f" and a tensor has at most {MOST_ELEMENTS:,} elements"
                )
        outputs = numbers(len(self.types), len(output_types))
        self.types.extend(output_types)
        self._producers.extend([len(self.nodes)] * len(output_types))
        node = Node(op, tuple(inputs), outputs, frozen, scope, source, phase, (), device, stage)
        self.nodes.append(node)
        return outputs

    def copy(
        self, node: Node, inputs: tuple[ValueId, ...], types: Sequence[TensorType]
    ) -> tuple[ValueId, ...]:
        """Append a node of another graph, with all that it has but its inputs.

        `types` are those of its outputs there: inputs of the same types give the same. The node
        itself is appended where it has the same ids here, as most of a rewritten graph has.
        """
        outputs = numbers(len(self.types), len(types))
        if inputs != node.inputs or outputs != node.outputs:
            node = node.with_values(inputs, outputs)
        self.types.extend(types)
        self._producers.extend([len(self.nodes)] * len(types))
        self.nodes.append(node)
        return outputs

    def add_outputs(
        self, value: ValueId, attrs: Attrs, types: Sequence[TensorType]
    ) -> tuple[ValueId, ...]:
        """Give the node that made a value further outputs, and other attributes; return those.

        For a gradient that needs more of a node than whoever emitted it asked for.
        """
        index = self._producers[value]
        outputs = numbers(len(self.types), len(types))
        self.types.extend(types)
        self._producers.extend([index] * len(types))
        node = self.nodes[index]
        self.nodes[index] = replace(node, attrs=attrs, outputs=(*node.outputs, *outputs))
        return outputs

    def emit_one(self, op: Op, *inputs: ValueId, **attrs: AttrValue) -> ValueId:
        """Append a node of an op with one output and return that value."""
        return self.emit(op, inputs, Attrs(attrs) if attrs else NO_ATTRS)[0]

    def type_of(self, value: ValueId) -> TensorType:
        """Return the type of a value emitted earlier."""
        return self.types[value]

    def producer_of(self, value: ValueId) -> Node:
        """Return the node that produces a value emitted earlier. O(1)."""
        return self.nodes[self._producers[value]]

    def index_of_producer(self, value: ValueId) -> int:
        """Return the place of that node among `nodes`. O(1)."""
        return self._producers[value]

    def freeze(self) -> Graph:
        """Return the graph built so far."""
        return Graph(
            tuple(self.nodes),
            tuple(self.types),
            tuple(self.outputs),
            tuple(self.updates),
            tuple(self.writes),
            self.accumulation,
        )

    def freeze_as(self, graph: Graph, new_id: Sequence[ValueId]) -> Graph:
        """Return the graph built so far with the outputs and all other columns of `graph`.

        For passes that copy its nodes one by one; `new_id` has the value here of each value there.
        """
        self.outputs = [replace(o, value=new_id[o.value]) for o in graph.outputs]
        self.updates = [
            replace(
                u,
                variable=new_id[u.variable],
                state=tuple([new_id[v] for v in u.state]),
                scalars=tuple([new_id[v] for v in u.scalars]),
                objective=None if u.objective is None else new_id[u.objective],
            )
            for u in graph.updates
        ]
        self.writes = [Write(new_id[w.variable], new_id[w.value]) for w in graph.writes]
        self.accumulation = graph.accumulation and replace(
            graph.accumulation, batch=new_id[graph.accumulation.batch]
        )
        return self.freeze()

    @staticmethod
    def continuing(graph: Graph) -> GraphBuilder:
        """Return a builder that holds `graph` already, with the same value ids."""
        b = GraphBuilder()
        b.nodes, b.types = list(graph.nodes), list(graph.types)
        b._producers = list(graph.producers())
        b.outputs = list(graph.outputs)
        b.updates, b.writes = list(graph.updates), list(graph.writes)
        b.accumulation = graph.accumulation
        return b


def new_value(types: list[TensorType], type_: TensorType) -> ValueId:
    """Return a value more, in the types of a graph that is rewritten."""
    types.append(type_)
    return ValueId(len(types) - 1)


def numbers(first: int, count: int) -> tuple[ValueId, ...]:
    """Return the next values."""
    # A `ValueId` is an int at run time: the range makes all of them without a call for each.
    values: Any = range(first, first + count)
    return tuple(values)


def _in_scope(scope: str) -> str:
    return f" in '{scope}'" if scope else ""


def prune(graph: Graph) -> Graph:
    """Return the graph with only the nodes that roots need, and dense value ids. O(nodes).

    A pass that gives a reader something else to read leaves the old node where it is, and its last
    line is this: so no pass decides by itself what is still read.
    """
    needed = needed_nodes(graph)
    if len(needed) == len(graph.nodes) and _is_dense(graph):
        return graph
    # Not by `GraphBuilder.copy`: half of the time of a compilation's rewrites would go there.
    new_id: list[ValueId] = [ValueId(-1)] * len(graph.types)
    # This builder is only frozen, so its column of producers stays empty.
    b = GraphBuilder()
    types, nodes = b.types, b.nodes
    old_types = graph.types
    for node in needed:
        inputs = tuple([new_id[v] for v in node.inputs])
        outputs = numbers(len(types), len(node.outputs))
        for value, new in zip(node.outputs, outputs, strict=True):
            new_id[value] = new
            types.append(old_types[value])
        is_same = inputs == node.inputs and outputs == node.outputs
        nodes.append(node if is_same else node.with_values(inputs, outputs))
    return b.freeze_as(graph, new_id)


def needed_nodes(graph: Graph) -> list[Node]:
    """Return the nodes that roots need, in order."""
    marks = mark_needed(graph, graph.roots())
    return [node for node, is_needed in zip(graph.nodes, marks, strict=True) if is_needed]


def _is_dense(graph: Graph) -> bool:
    """Whether the values are numbered as their nodes stand, and every number is a value."""
    values = [value for node in graph.nodes for value in node.outputs]
    return values == list(range(len(graph.types)))


Maybe = tuple[ValueId | None, ...]

Gradient = Callable[[GraphBuilder, Node, Maybe], Maybe]
"""Emits the gradient of a node.

Takes one value per output of the node, None where nothing flows back; returns one per input, of the
input's type, or None.
"""

Simplify = Callable[[GraphBuilder, Node, tuple[ValueId, ...]], tuple[ValueId, ...] | None]
"""Rewrites a node, whose inputs here are in the builder, while it is copied.

Returns one value per output, or None to keep the node.
"""

gradient = OpAttr[Gradient]("gradient", "the op's vector-Jacobian product; read by autodiff")
simplify = OpAttr[Simplify]("simplify", "local algebraic rewrite; read by the simplify pass")
