"""Show of every value of a step how large it is and what of it is not finite, for `debug=`.

    y = log(x)  ->  y = log(x); outputs value_range(y)

Each float that an op computes gets a node that reads it, whose results are outputs of a probe
(`compiler.contract.probe`) with the op's name, module, phase and the ranges of what it reads. So a
run can name the first op whose result is not finite, in the order of the graph, of any device and
rank, for each batch. The body of a scan hands out those of all its iterations; the branches of a
choice and loops of unknown length are told by their results. Views are told by what they show; of
variables, batches and what other ranks send it is told what they bring. What writes over a variable
is left out: the next step begins with it, and tells.

It runs after the work is shared among ranks and products have their precision, on what is computed
indeed, and before fusion, while each node is an op of the user's or of a gradient. A value that is
read here is stored, so no fusion hides it.

Of ops that `shown` names, what they read and make is handed out whole beside its range: patterns as
of `fnmatch`, of an op's name, its module's path, both as in "log in 'head'", or its line, as
"train.py:41".

Guarantees: all nodes of before are there, with their inputs; what was an output is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import count, islice
from pathlib import PurePath

from compiler.contract.probe import ProbeKind, TensorProbe, ValueRange, is_probe, read_probe
from compiler.contract.types import HALVES, DType, ValueId
from compiler.graph.graph import Graph, GraphBuilder, Node, Output
from compiler.graph.registry import has_effect, is_comm, is_source, view
from compiler.ops.families.along import VALUE_RANGE
from compiler.ops.families.loops import SCAN, ScanParts
from compiler.ops.primitives.body import finish_body
from compiler.ops.primitives.shape import cast_to, reshape_to
from compiler.ops.primitives.sources import INPUT, OF_MODEL, VARIABLE

_Found = tuple[TensorProbe, tuple[ValueId, ...], Node]
"""A range: its probe, the values that are its operands, and the node whose result it is of."""


def show_ranges(graph: Graph, shown: Sequence[str] = ()) -> Graph:
    """Return the graph with a range of every float that it computes. O(nodes)."""
    probes = [read_probe(o.name)[0].number for o in graph.outputs if is_probe(o.name)]
    ranges = _Ranges(graph, count(1 + max(probes, default=0)), shown)
    b = ranges.copy()
    b.freeze_as(graph, ranges.new_id)
    for probe, values, node in ranges.found:
        # The ops of a kernel lend it one line: each range says itself which is its own.
        b.outputs += [Output(probe.name(i), value, node.source) for i, value in enumerate(values)]
    return b.freeze()


class _Ranges:
    """A copy of a graph, node by node, with a range behind each that makes floats.

    `numbers` are those of the probes, `shown` names ops whose values are handed out whole. Of the
    body of a scan, `operands` says what its inputs are: words for what differs from step to step,
    else the number of the range outside, if it has one.
    """

    def __init__(
        self,
        graph: Graph,
        numbers: Iterator[int],
        shown: Sequence[str],
        operands: Sequence[str | int | None] = (),
    ) -> None:
        self._graph = graph
        self._numbers, self._shown = numbers, shown
        self._is_whole = _values_of(graph, shown)
        self._operands = iter(operands)
        self._b = GraphBuilder()
        self._number: dict[ValueId, int] = {}
        """By value of the old graph, the number of the probe of its range."""
        self.new_id: list[ValueId] = [ValueId(-1)] * len(graph.types)
        self.found: list[_Found] = []

    def copy(self) -> GraphBuilder:
        """Return a builder with all nodes and ranges, and no outputs yet."""
        for node in self._graph.nodes:
            inputs = tuple([self.new_id[v] for v in node.inputs])
            if node.op is SCAN and node.attrs.int_("length"):
                outputs = self._scan(node, inputs)
            else:
                types = [self._graph.types[v] for v in node.outputs]
                outputs = self._b.copy(node, inputs, types)
            for old, new in zip(node.outputs, outputs, strict=True):
                self.new_id[old] = new
            self._show(node)
        return self._b

    def _scan(self, node: Node, inputs: tuple[ValueId, ...]) -> tuple[ValueId, ...]:
        """Emit a scan whose body hands out the ranges of its iterations; return its own results."""
        cut, where = ScanParts.of(node.attrs), _described(node)
        kinds = ["carry"] * cut.carries + ["entry of operand"] * cut.xs
        varying = [f"{kind} {number} of {where}" for number, kind in enumerate(kinds)]
        constants = [self._number.get(value) for value in node.inputs[len(kinds) :]]
        operands = [*varying, *constants]
        inside = _Ranges(cut.body.graph, self._numbers, self._shown, operands)
        b = inside.copy()
        results = [inside.new_id[v] for v in cut.body.results]
        body = finish_body(b, [*results, *[v for _, values, _ in inside.found for v in values]])
        with self._b.like_node(node):
            outputs = iter(self._b.emit(SCAN, inputs, {**node.attrs, "body": body}))
        own = tuple(islice(outputs, len(node.outputs)))
        loop = next(self._numbers)
        loop = -loop if node.attrs.bool_("reverse") else loop
        for probe, values, of in inside.found:
            shown = tuple(islice(outputs, len(values)))
            self.found.append((replace(probe, loops=(loop, *probe.loops)), shown, of))
        return own

    def _show(self, node: Node) -> None:
        if view.has(node.op):
            if node.inputs[0] in self._number:
                self._number[node.outputs[0]] = self._number[node.inputs[0]]
            return
        what = next(self._operands, _described(node)) if node.op is INPUT else _described(node)
        if isinstance(what, int):
            self._number[node.outputs[0]] = what
            return
        if not what or node.writes or has_effect.get(node.op):
            return
        is_given = is_source.get(node.op) or is_comm.get(node.op)
        reads = [self._number[v] for v in node.inputs if v in self._number]
        for place, value in enumerate(node.outputs):
            type_ = self._graph.types[value]
            if not type_.dtype.is_float or not type_.num_elements:
                continue
            named = what if len(node.outputs) == 1 else f"result {place} of {what}"
            phase = "" if is_given else node.phase.value
            self._range_of(node, value, ValueRange(phase, named, str(type_), tuple(reads)))

    def _range_of(self, node: Node, value: ValueId, row: ValueRange) -> None:
        """Emit the range of a value."""
        probe = TensorProbe(next(self._numbers), ProbeKind.RANGE, row.text())
        self._number[value] = probe.number
        with self._b.like_node(node):
            wide, type_ = self.new_id[value], self._graph.types[value]
            if type_.dtype in HALVES:
                wide = cast_to(self._b, wide, DType.FLOAT32)
            flat = reshape_to(self._b, wide, (1, type_.num_elements))
            values = self._b.emit(VALUE_RANGE, [flat])
            self.found.append((probe, (*values, *[wide] * (value in self._is_whole)), node))


def _values_of(graph: Graph, shown: Sequence[str]) -> frozenset[ValueId]:
    """Return what ops that patterns name read and make; of views, what they show."""
    origin: dict[ValueId, ValueId] = {}
    values: set[ValueId] = set()
    for node in graph.nodes if shown else ():
        if view.has(node.op):
            origin[node.outputs[0]] = origin.get(node.inputs[0], node.inputs[0])
        if _is_named(node, shown):
            values.update([origin.get(v, v) for v in (*node.inputs, *node.outputs)])
    return frozenset(values)


def _is_named(node: Node, shown: Sequence[str]) -> bool:
    """Whether a pattern names a node: its op, its module, both, or its line."""
    line = f"{PurePath(node.source.file).name}:{node.source.line}"
    names = (str(node.op), node.scope, _described(node), line)
    return any([fnmatchcase(name, pattern) for pattern in shown for name in names if name])


def _described(node: Node) -> str:
    """Return what a node is in words; nothing for one that makes no number of its own."""
    if node.op is INPUT:
        return f"batch[{node.attrs['name']!r}]"
    if node.op is VARIABLE:
        role = node.attrs.str_("role")
        return f"{role} {node.attrs['name']!r}" if role in OF_MODEL else ""
    if is_source.get(node.op):
        return ""
    return f"{node.op} in {node.scope!r}" if node.scope else str(node.op)
