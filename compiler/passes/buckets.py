"""Put collectives together into buckets: one launch moves what is made one after the other.

    update(w, all_reduce(g), ...)   ->   b = all_reduce(concat(reshape(g), reshape(h)))
    update(v, all_reduce(h), ...)        update(w, reshape(slice(b)), ...)
                                         update(v, reshape(slice(b)), ...)

A bucket is one row of elements. Whoever makes a gradient writes it into its slice of the row where
that can be (`compiler.lowering.destinations`), the all-reduce works in place, and updates read
slices. It runs when launches have their order, so that the chain of launches that ends with the
last gradient of a bucket begins after the last one of the bucket before.

**Which tensors make a bucket, and in which order buckets go, follows from the graph alone**: from
the order of launches, and from bytes. It is written into the attributes of each collective, and
never follows from durations, which ranks measure differently: two that disagreed would sum
different tensors without an error. A bucket is full with an eighth of all bytes, and with no less
than what a ring moves in the time of its messages (`Ranks.least_bytes`): below, it would wait
longer for messages than for bytes.

Guarantees: no collective waits for another one but by its order; nodes stand in topological order,
and what reads a mean after all that does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from compiler.errors import InternalError
from compiler.graph import Graph, GraphBuilder, Node
from compiler.lowering.storage import launch_of_values
from compiler.ops.comm import ALL_REDUCE
from compiler.ops.shape import RESHAPE
from compiler.ops.slicing import CONCAT, SLICE
from compiler.placement import Ranks
from compiler.types import DType, ValueId

MAX_BUCKETS = 8
"""Enough to overlap with the backward pass, few enough to cost no latency."""

ROW_BYTES = 64
"""What tensors of a bucket are aligned to as far as that goes: others stand behind all of these."""

_Kind = tuple[int, str, DType, object]
"""Device, group, elements and reduction of a row."""


def run(graph: Graph, ranks: Ranks) -> Graph:
    """Return the ordered graph with a collective for each bucket. O(nodes)."""
    alone = [node for node in graph.nodes if node.op is ALL_REDUCE]
    if not alone:
        return graph
    rows, order = _Rows(graph, GraphBuilder.continuing(graph)), 0
    for bucket, nodes in enumerate(_buckets(graph, alone, ranks)):
        alike: dict[_Kind, list[Node]] = {}
        for node in nodes:
            dtype = graph.types[node.inputs[0]].dtype
            kind = node.device, node.attrs.str_("group"), dtype, node.attrs.get("by")
            alike.setdefault(kind, []).append(node)
        for own in alike.values():
            rows.meet(own, bucket, order)
            order += 1
    return rows.result()


def _buckets(graph: Graph, alone: Sequence[Node], ranks: Ranks) -> list[list[Node]]:
    """Put collectives whose operands are made one after the other together, by bytes."""
    made_by = launch_of_values(graph)
    total = sum([graph.types[node.inputs[0]].size_bytes for node in alone])
    enough = max(total / MAX_BUCKETS, ranks.least_bytes)
    buckets: list[list[Node]] = []
    held, last = 0, -1
    for node in sorted(alone, key=lambda n: (made_by[n.inputs[0]], n.attrs.int_("order"))):
        maker = made_by[node.inputs[0]]
        # What one launch makes stays together: a bucket ends where another launch begins.
        if not buckets or (held >= enough and maker != last):
            buckets.append([])
            held = 0
        buckets[-1].append(node)
        held, last = held + graph.types[node.inputs[0]].size_bytes, maker
    return buckets


@dataclass(slots=True)
class _Rows:
    """What has been emitted: the mean of each value, and nodes by the one that they stand after."""

    graph: Graph
    b: GraphBuilder
    mean: dict[ValueId, ValueId] = field(default_factory=dict)
    after: dict[int, list[Node]] = field(default_factory=dict)

    def meet(self, nodes: list[Node], bucket: int, order: int) -> None:
        """Emit one collective in the place of several, and the slices that they would have made."""
        b, types, made_by = self.b, self.graph.types, self.graph.producers()
        nodes = sorted(nodes, key=lambda n: bool(types[n.inputs[0]].size_bytes % ROW_BYTES))
        first, start = len(b.nodes), 0
        with b.beside(nodes[0]):
            rows = [_reshaped(b, n.inputs[0], (types[n.inputs[0]].num_elements,)) for n in nodes]
            row = rows[0] if len(rows) == 1 else b.one(CONCAT, *rows, axis=0)
            attrs = {**nodes[0].attrs, "bucket": bucket, "order": order}
            (row,) = b.emit(ALL_REDUCE, (row,), attrs)
            for node in nodes:
                type_ = types[node.outputs[0]]
                part, stop = row, start + type_.num_elements
                if len(nodes) > 1:
                    part = b.one(SLICE, row, starts=(start,), stops=(stop,), steps=(1,))
                self.mean[node.outputs[0]] = _reshaped(b, part, type_.shape)
                start = stop
        last = max([made_by[node.inputs[0]] for node in nodes])
        self.after.setdefault(last, []).extend(b.nodes[first:])

    def result(self) -> Graph:
        """Return the graph whose readers read slices; they, and what needs them, stand last."""
        graph = self.graph
        late = self._late()
        nodes: list[Node] = []
        for index, node in enumerate(graph.nodes):
            if not late[index]:
                nodes += [node, *self.after.pop(index, ())]
        if self.after:
            node = graph.nodes[min(self.after)]
            raise InternalError(
                f"{node.op} at {node.source} makes what ranks sum of what they have summed"
            )
        for index, node in enumerate(graph.nodes):
            if late[index] and node.op is not ALL_REDUCE:
                inputs = tuple([self.mean.get(value, value) for value in node.inputs])
                nodes.append(node.with_values(inputs, node.outputs))
        return replace(graph, nodes=tuple(nodes), types=tuple(self.b.types))

    def _late(self) -> list[bool]:
        late = [node.op is ALL_REDUCE for node in self.graph.nodes]
        made_late: set[ValueId] = set()
        for index, node in enumerate(self.graph.nodes):
            late[index] = late[index] or any([v in made_late for v in node.inputs])
            if late[index]:
                made_late.update(node.outputs)
        return late


def _reshaped(b: GraphBuilder, value: ValueId, shape: tuple[int, ...]) -> ValueId:
    return value if b.type_of(value).shape == shape else b.one(RESHAPE, value, shape=shape)
