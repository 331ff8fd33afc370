"""Gradients of eager values: the same rules as in a job, over the records that lead to an output.

The records are put into a graph, the rules emit the nodes of the gradients into it, and those nodes
are computed one after the other. What lies between is let go once it is read, and computed again
where a gradient of a gradient asks for it. The nodes of the last few graphs are kept: a loop that
computes the same has its gradients without the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from actorflow.eager_mode.values import EagerValue, OpRecord
from compiler.contract.attrs import Attrs
from compiler.contract.types import ValueId
from compiler.graph.graph import GraphBuilder, Node, mark_needed
from compiler.ops.families.gradients import emit_gradients
from compiler.ops.primitives.sources import CONSTANT, INPUT, VARIABLE

_MOST_KEPT = 32

Compute = Callable[[Node, tuple[EagerValue, ...]], tuple[EagerValue, ...]]
"""Runs the op of a node on values."""


class Tape:
    """The records that some values were made by, as a graph with values of its own."""

    def __init__(self, values: Iterable[EagerValue]) -> None:
        self.builder = GraphBuilder()
        self.ids: dict[EagerValue, ValueId] = {}
        self.values: dict[ValueId, EagerValue] = {}
        key: list[object] = []
        for record in _records(values):
            inputs = tuple([self.ids[value] for value in record.inputs])
            key.append((record.op, record.attrs, record.types, inputs, record.place[2]))
            self._add(record, inputs)
        self.key = tuple(key)
        self.num_nodes = len(self.builder.nodes)

    def _add(self, record: OpRecord, inputs: tuple[ValueId, ...]) -> None:
        b, node = self.builder, record.node()
        if inputs or record.op in (CONSTANT, VARIABLE):
            ids = b.copy(node, inputs, record.types)
        else:
            # Whatever it was made by, no gradient flows through it.
            ids = ()
            for type_ in record.types:
                attrs = {
                    "name": str(len(b.nodes)),
                    "dtype": type_.dtype.value,
                    "shape": type_.shape,
                }
                leaf = Node(INPUT, (), (), Attrs(attrs), node.scope, node.source, node.phase)
                ids += b.copy(leaf, (), (type_,))
        for index, id_ in enumerate(ids):
            value = EagerValue(record, index)
            self.ids[value], self.values[id_] = id_, value


def _records(values: Iterable[EagerValue]) -> list[OpRecord]:
    """Return the records that values come from, in the order in which they were made."""
    found: dict[int, OpRecord] = {}
    todo = [value.record for value in values]
    while todo:
        record = todo.pop()
        if record.number not in found:
            found[record.number] = record
            todo += [value.record for value in record.inputs]
    return [found[number] for number in sorted(found)]


@dataclass(frozen=True, slots=True)
class _Gradients:
    """The nodes that gradients are computed by, and where these are, by wanted value."""

    nodes: tuple[Node, ...]
    results: dict[ValueId, ValueId]


class GradientCache:
    """The nodes of gradients, by the graphs that they are of."""

    def __init__(self) -> None:
        self._kept: dict[object, _Gradients] = {}

    def gradients(
        self,
        compute: Compute,
        seeds: Mapping[EagerValue, EagerValue],
        wanted: Sequence[EagerValue],
    ) -> dict[EagerValue, EagerValue]:
        """Return the gradients of wanted values; see `emit_gradients`."""
        tape = Tape([*seeds, *seeds.values(), *wanted])
        pairs = {tape.ids[value]: tape.ids[seed] for value, seed in seeds.items()}
        ids = [tape.ids[value] for value in wanted]
        key = (tape.key, tuple(pairs.items()), tuple(ids))
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            found = self._kept[key] = _emitted(tape, pairs, ids)
        results = evaluate(tape.values, found.nodes, list(found.results.values()), compute)
        by_id = dict(zip(found.results, results, strict=True))
        return {v: by_id[i] for v, i in zip(wanted, ids, strict=True) if i in by_id}


def _emitted(tape: Tape, pairs: dict[ValueId, ValueId], ids: list[ValueId]) -> _Gradients:
    b = tape.builder
    before = list(b.nodes)
    results = emit_gradients(b, pairs, ids)
    graph = b.freeze()
    # Rules may have asked for more outputs of a node that was run already: it runs again.
    is_new = [i >= len(before) or node is not before[i] for i, node in enumerate(graph.nodes)]
    marks = mark_needed(graph, list(results.values()))
    pairs_of = zip(graph.nodes, is_new, marks, strict=True)
    return _Gradients(tuple([n for n, new, needed in pairs_of if new and needed]), results)


def evaluate(
    known: Mapping[ValueId, EagerValue],
    nodes: Sequence[Node],
    wanted: Sequence[ValueId],
    compute: Compute,
    *,
    ends: bool = False,
) -> list[EagerValue]:
    """Compute nodes in order from known values; what only they read is let go. Return values.

    Where nothing but these nodes reads the known values, as it `ends` there, they go as well.
    """
    values, kept = dict(known), set(wanted)
    last = {value: index for index, node in enumerate(nodes) for value in node.inputs}
    readers = _ReadOutputs()
    if ends:
        for value, its in known.items():
            if value not in last and value not in kept:
                readers.end(its)
    ending: dict[int, list[ValueId]] = {}
    for value, index in last.items():
        if value not in kept and (ends or value not in known):
            ending.setdefault(index, []).append(value)
    for index, node in enumerate(nodes):
        made = compute(node, tuple([values[v] for v in node.inputs]))
        values.update(zip(node.outputs, made, strict=True))
        for value in node.outputs:
            if value not in last and value not in kept:
                readers.end(values[value])
        for value in ending.get(index, ()):
            readers.end(values.pop(value))
    return [values[v] for v in wanted]


class _ReadOutputs:
    """Which outputs of each record nobody reads any more."""

    def __init__(self) -> None:
        self._ended: dict[int, set[int]] = {}

    def end(self, value: EagerValue) -> None:
        """Note the end of an output; with the last one the record lets go of all."""
        record = value.record
        ended = self._ended.setdefault(record.number, set())
        ended.add(value.index)
        # Without inputs there is no way to compute it again.
        if len(ended) == len(record.types) and record.inputs:
            record.stored = None
