"""Have ranks meet: what updates read is the mean over all ranks, one all-reduce for each bucket.

    update(w, g, ...)   ->   b = all_reduce(concat(reshape(g), reshape(h), ...))
    update(v, h, ...)        update(w, reshape(slice(b)), ...)
                             update(v, reshape(slice(b)), ...)

A bucket is one row of elements. Whoever makes a gradient writes it into its slice of the row where
that can be (`compiler.lowering.destinations`), the all-reduce works in place, and updates read
slices. So does a search for NaN: what it searches is summed as well, that all ranks decide alike.

**Which tensors make a bucket, and in which order buckets go, follows from the graph alone**: from
the order in which gradients are made, and from bytes. It is written into the attributes of each
collective, and never follows from durations, which ranks measure differently: two that disagreed
would sum different tensors without an error. A bucket is full with an eighth of all bytes, and with
no less than what a ring moves in the time of its messages (`Ranks.least_bytes`): below, it would
wait longer for messages than for bytes.

Guarantees: with one rank the graph is the same; else every update reads gradients of all ranks, and
no collective waits for another one but by its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from compiler.errors import InternalError
from compiler.fusion.program import GRADIENT
from compiler.graph import Graph, GraphBuilder, Node
from compiler.ops.comm import ALL_REDUCE, EVERYONE
from compiler.ops.non_finite import NON_FINITE
from compiler.ops.shape import RESHAPE, TRANSPOSE
from compiler.ops.slicing import CONCAT, SLICE
from compiler.ops.sources import INPUT
from compiler.ops.update import is_update
from compiler.placement import ALONE, Ranks
from compiler.types import DType, Phase, ValueId

MAX_BUCKETS = 8
"""Enough to overlap with the backward pass, few enough to cost no latency."""

ROW_BYTES = 64
"""What tensors of a bucket are aligned to as far as that goes: others stand behind all of these."""

_SHOWS = (RESHAPE, TRANSPOSE)
"""What only shows its input in another form: that input is what is summed."""


def run(graph: Graph, ranks: Ranks = ALONE) -> Graph:
    """Return the graph of one of some ranks. O(nodes)."""
    reads = _reads(graph) if ranks.count > 1 else {}
    if not reads:
        return graph
    meetings = _Meetings(graph, GraphBuilder.continuing(graph))
    made_by = graph.producers()
    members = dict.fromkeys([_shown(graph, made_by, value) for value in reads.values()])
    order = 0
    for bucket, values in enumerate(_buckets(graph, made_by, tuple(members), ranks)):
        alike: dict[tuple[int, DType], list[ValueId]] = {}
        for value in values:
            kind = graph.nodes[made_by[value]].device, graph.types[value].dtype
            alike.setdefault(kind, []).append(value)
        for own in alike.values():
            meetings.meet(own, bucket=bucket, order=order, num_ranks=ranks.count)
            order += 1
    return meetings.result(reads)


def _reads(graph: Graph) -> dict[tuple[int, int], ValueId]:
    """Return the value that a node reads at a position, where all ranks must read the same."""
    differs = _differs(graph)
    found: dict[tuple[int, int], ValueId] = {}
    for index, node in enumerate(graph.nodes):
        if is_update(node):
            found[index, GRADIENT] = node.inputs[GRADIENT]
        elif node.op is NON_FINITE and differs[node.inputs[0]]:
            found[index, 0] = node.inputs[0]
    return {place: value for place, value in found.items() if graph.types[value].num_elements}


def _differs(graph: Graph) -> list[bool]:
    """Mark the values that a rank makes of its own batches."""
    marks = [False] * len(graph.types)
    for node in graph.nodes:
        if node.op is INPUT or any([marks[v] for v in node.inputs]):
            for value in node.outputs:
                marks[value] = True
    return marks


def _shown(graph: Graph, made_by: Sequence[int], value: ValueId) -> ValueId:
    """Return the value that another one shows."""
    while graph.nodes[made_by[value]].op in _SHOWS:
        value = graph.nodes[made_by[value]].inputs[0]
    return value


def _buckets(
    graph: Graph, made_by: Sequence[int], values: Sequence[ValueId], ranks: Ranks
) -> list[list[ValueId]]:
    """Put values that are made one after the other together, up to a share of all bytes."""
    total = sum([graph.types[v].size_bytes for v in values])
    enough = max(total / MAX_BUCKETS, ranks.least_bytes)
    buckets: list[list[ValueId]] = [[]]
    held = 0
    for value in sorted(values, key=lambda v: (made_by[v], v)):
        if held >= enough:
            buckets.append([])
            held = 0
        buckets[-1].append(value)
        held += graph.types[value].size_bytes
    return buckets


@dataclass(slots=True)
class _Meetings:
    """What has been emitted: the mean of each value, and nodes by the one that they stand after."""

    graph: Graph
    b: GraphBuilder
    mean: dict[ValueId, ValueId] = field(default_factory=dict)
    after: dict[int, list[Node]] = field(default_factory=dict)

    def meet(self, values: list[ValueId], *, bucket: int, order: int, num_ranks: int) -> None:
        """Emit the all-reduce of some values alike in device and elements, and the slices of it."""
        b, types, made_by = self.b, self.graph.types, self.graph.producers()
        values = sorted(values, key=lambda v: bool(types[v].size_bytes % ROW_BYTES))
        first, maker = len(b.nodes), self.graph.nodes[made_by[values[0]]]
        with b.at("optimizer", maker.source, Phase.UPDATE, maker.device):
            rows = [_reshaped(b, v, (types[v].num_elements,)) for v in values]
            row = rows[0] if len(rows) == 1 else b.one(CONCAT, *rows, axis=0)
            row = b.one(
                ALL_REDUCE, row, num_ranks=num_ranks, group=EVERYONE, bucket=bucket, order=order
            )
            start = 0
            for value in values:
                stop = start + types[value].num_elements
                part = row
                if len(values) > 1:
                    part = b.one(SLICE, row, starts=(start,), stops=(stop,), steps=(1,))
                self.mean[value] = _reshaped(b, part, types[value].shape)
                start = stop
        last = max([made_by[v] for v in values])
        self.after.setdefault(last, []).extend(b.nodes[first:])

    def result(self, reads: dict[tuple[int, int], ValueId]) -> Graph:
        """Return the graph whose readers read the means; they, and what needs them, stand last."""
        graph = self.graph
        late = self._late({index for index, _ in reads})
        nodes: list[Node] = []
        for index, node in enumerate(graph.nodes):
            if not late[index]:
                nodes += [node, *self.after.pop(index, ())]
        if self.after:
            node = graph.nodes[min(self.after)]
            raise InternalError(
                f"{node.op} at {node.source} makes a gradient of what updates made before"
            )
        for index, node in enumerate(graph.nodes):
            if not late[index]:
                continue
            inputs = list(node.inputs)
            for position, value in enumerate(node.inputs):
                if (index, position) in reads:
                    first = len(self.b.nodes)
                    inputs[position] = self._shown_again(value)
                    nodes += self.b.nodes[first:]
            nodes.append(node.with_values(tuple(inputs), node.outputs))
        return replace(graph, nodes=tuple(nodes), types=tuple(self.b.types))

    def _late(self, readers: set[int]) -> list[bool]:
        late = [False] * len(self.graph.nodes)
        made_late: set[ValueId] = set()
        for index, node in enumerate(self.graph.nodes):
            late[index] = index in readers or any([v in made_late for v in node.inputs])
            if late[index]:
                made_late.update(node.outputs)
        return late

    def _shown_again(self, value: ValueId) -> ValueId:
        """Return the mean of a value; of one that shows another, that one's mean shown alike."""
        if value not in self.mean:
            node = self.graph.nodes[self.graph.producers()[value]]
            shown, type_ = self._shown_again(node.inputs[0]), self.graph.types[value]
            (self.mean[value],) = self.b.copy(node, (shown,), (type_,))
        return self.mean[value]


def _reshaped(b: GraphBuilder, value: ValueId, shape: tuple[int, ...]) -> ValueId:
    return value if b.type_of(value).shape == shape else b.one(RESHAPE, value, shape=shape)
