"""Show of every value of a step how large it is and what of it is not finite, for `debug=`.

    y = log(x)  ->  y = log(x); outputs value_range(y)

Each float that an op computes gets a node that reads it, whose results are outputs of a probe
(`compiler.contract.probe`) with the op's name, module, phase and the ranges of what it reads. So a
run can name the first op whose result is not finite, in the order of the graph, of any device and
rank, for each batch. Views are told by what they show; of variables, batches and what other ranks
send it is told what they bring. What writes over a variable is left out: that is told by the next
step, which begins with it.

It runs after the work is shared among ranks and products have their precision, on what is computed
indeed, and before fusion, while each node is an op of the user's or of a gradient. A value that is
read here is stored, so no fusion hides it.

Guarantees: all nodes of before are there, with their inputs; what was an output is one.
"""

from __future__ import annotations

from compiler.contract.probe import Probe, ProbeKind, ValueRange, is_probe, read_probe
from compiler.contract.types import HALVES, DType, ValueId
from compiler.graph.graph import Graph, GraphBuilder, Node, Output
from compiler.graph.registry import has_effect, is_comm, is_source, view
from compiler.ops.families.along import VALUE_RANGE
from compiler.ops.primitives.shape import cast_to, reshape_to
from compiler.ops.primitives.sources import INPUT, OF_MODEL, VARIABLE


def show_ranges(graph: Graph) -> Graph:
    """Return the graph with a range of every float that it computes. O(nodes)."""
    return _Ranges(graph).run()


class _Ranges:
    """A copy of a graph, node by node, with a range behind each that makes floats."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._b = GraphBuilder()
        self._new_id: list[ValueId] = [ValueId(-1)] * len(graph.types)
        self._number: dict[ValueId, int] = {}
        """By value of the old graph, the number of the probe of its range."""
        probes = [read_probe(o.name)[0].number for o in graph.outputs if is_probe(o.name)]
        self._next = 1 + max(probes, default=0)
        self._outputs: list[Output] = []

    def run(self) -> Graph:
        graph, b = self._graph, self._b
        for node in graph.nodes:
            inputs = tuple([self._new_id[v] for v in node.inputs])
            outputs = b.copy(node, inputs, [graph.types[v] for v in node.outputs])
            for old, new in zip(node.outputs, outputs, strict=True):
                self._new_id[old] = new
            self._show(node)
        b.freeze_as(graph, self._new_id)
        b.outputs += self._outputs
        return b.freeze()

    def _show(self, node: Node) -> None:
        if view.has(node.op):
            if node.inputs[0] in self._number:
                self._number[node.outputs[0]] = self._number[node.inputs[0]]
            return
        what = _described(node)
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
        """Emit the range of a value, as outputs of a probe."""
        probe = Probe(self._next, ProbeKind.RANGE, row.text())
        self._number[value] = self._next
        self._next += 1
        with self._b.like_node(node):
            wide, type_ = self._new_id[value], self._graph.types[value]
            if type_.dtype in HALVES:
                wide = cast_to(self._b, wide, DType.FLOAT32)
            flat = reshape_to(self._b, wide, (1, type_.num_elements))
            results = self._b.emit(VALUE_RANGE, [flat])
        self._outputs += [Output(probe.name(i), v) for i, v in enumerate(results)]


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
