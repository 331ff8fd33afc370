"""Put collectives together into buckets: one launch moves what is made one after the other.

    update(w, all_reduce(g), ...)   ->   b = all_reduce(concat(reshape(g), reshape(h)))
    update(v, all_reduce(h), ...)        update(w, reshape(slice(b)), ...)
                                         update(v, reshape(slice(b)), ...)

What a bucket reduces is one row of elements. Whoever makes a gradient writes it into its slice of
the row where that can be (`compiler.lowering.destinations`), the all-reduce works in place, and
updates read slices. Other collectives of a bucket stay launches of their own in one firing: ranks
have parts of each tensor, which do not lie side by side in the whole of a row.

**Which tensors make a bucket, and in which order buckets go, is said by attributes**
(`compiler.sbp.collective_schedule`), and nothing here changes it. It runs when launches have their
order, so that the chain of launches that ends with the last gradient of a bucket begins after the
last one of the bucket before. What ranks gather ahead of its use waits until the bucket before it
is used: memory holds two of these, and not all parameters.

Guarantees: what a collective or another stage reads is dense; no collective waits for another one
but by its order, or for what that one's readers need; nodes stand in topological order, and what
reads a late one after all that does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from compiler.contract.attrs import Attrs
from compiler.contract.errors import InternalError
from compiler.contract.types import DType, ValueId
from compiler.graph.graph import Graph, GraphBuilder, Node, new_value
from compiler.ops.primitives.shape import COPY, RESHAPE
from compiler.ops.primitives.slicing import CONCAT, SLICE
from compiler.ops.primitives.transfer import ALL_REDUCE, DEFERRED, PREFETCH, SEND, is_collective
from compiler.sbp.collective_schedule import sorted_by
from compiler.storage.order import needed_per_step, rank_edges
from compiler.storage.storage import assign_storage, is_dense, launch_of_values, write_after_read

ROW_BYTES = 64
"""What tensors of a bucket are aligned to as far as that goes: others stand behind all of these."""

_Kind = tuple[int, str, DType, object]
"""Device, group, elements and reduction of a row."""


def run(graph: Graph) -> Graph:
    """Return the ordered graph with a launch for each row of each bucket. O(nodes log nodes)."""
    graph = _with_whole_sends(graph)
    if not any([is_collective(node.op) for node in graph.nodes]):
        return graph
    return _Rows(graph).result()


def _with_whole_sends(graph: Graph) -> Graph:
    """Make every tensor sent to another stage contiguous: a view that is not is copied."""
    if not any([node.op is SEND for node in graph.nodes]):
        return graph
    is_whole, types = _lie_dense(graph), [*graph.types]
    strided = {n.inputs[0] for n in graph.nodes if n.op is SEND and not is_whole[n.inputs[0]]}
    copies: dict[ValueId, ValueId] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        is_sent = node.op is SEND and node.inputs[0] in copies
        nodes.append(replace(node, inputs=(copies[node.inputs[0]],)) if is_sent else node)
        for value in [v for v in node.outputs if v in strided]:
            # Where it is made, so that nothing stands between the sends of a batch.
            copies[value] = new_value(types, graph.types[value])
            where = (node.scope, node.source, node.phase)
            nodes.append(Node(COPY, (value,), (copies[value],), Attrs(), *where, (), node.device))
    return replace(graph, nodes=tuple(nodes), types=tuple(types)) if copies else graph


def _lie_dense(graph: Graph) -> list[bool]:
    """Whether each value is one block, wherever it begins: what other ranks can be met with."""
    layouts = [replace(layout, offset_bytes=0) for layout in assign_storage(graph).layout]
    return [is_dense(t, layout) for t, layout in zip(graph.types, layouts, strict=True)]


@dataclass(slots=True)
class _Rows:
    """What has been emitted: launches of collectives, and what each value is read from now."""

    graph: Graph
    b: GraphBuilder = field(init=False)
    met: dict[ValueId, ValueId] = field(default_factory=dict)
    launches: list[list[int]] = field(default_factory=list)
    """By bucket, in their order: nodes of the builder."""
    per_step: list[bool] = field(default_factory=list)
    """By bucket: whether it goes once per step, and not for every batch."""
    _launch_of: dict[ValueId, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.b = GraphBuilder.continuing(self.graph)

    def result(self) -> Graph:
        """Return the graph whose readers read what collectives of buckets have made."""
        graph, dense = self.graph, _lie_dense(self.graph)
        buckets: dict[int, list[Node]] = {}
        per_step: dict[int, bool] = {}
        for node, is_once in zip(graph.nodes, needed_per_step(graph), strict=True):
            if is_collective(node.op):
                buckets.setdefault(node.attrs.int_("bucket"), []).append(node)
                per_step[node.attrs.int_("bucket")] = is_once
        self.per_step = [is_once for _, is_once in sorted(per_step.items())]
        # What leaves the step has bytes of its own, and is no part of a row.
        leaving = {*[o.value for o in graph.outputs], *[w.value for w in graph.writes]}
        for _, nodes in sorted(buckets.items()):
            alike: dict[_Kind, list[Node]] = {}
            indices: list[int] = []
            for node in sorted(nodes, key=lambda n: n.attrs.int_("order")):
                if node.op is not ALL_REDUCE or node.outputs[0] in leaving:
                    indices.append(self._alone(node, is_ready=dense[node.inputs[0]]))
                    continue
                dtype = graph.types[node.inputs[0]].dtype
                kind = node.device, node.attrs.str_("group"), dtype, node.attrs.get("by")
                alike.setdefault(kind, []).append(node)
            indices += [self._row(members, dense) for members in alike.values()]
            indices.sort(key=lambda index: self.b.nodes[index].attrs.int_("order"))
            self.launches.append(indices)
        return self._in_order()

    def _alone(self, node: Node, *, is_ready: bool) -> int:
        """Emit a collective as it is; what it reads is made dense first."""
        b, (value,) = self.b, node.inputs
        with b.like_node(node):
            value = self.met.get(value, value)
            if not is_ready:
                value = b.emit_one(COPY, value)
            (self.met[node.outputs[0]],) = b.emit(node.op, (value,), node.attrs)
        self._launch_of[node.outputs[0]] = len(b.nodes) - 1
        return len(b.nodes) - 1

    def _row(self, nodes: list[Node], dense: Sequence[bool]) -> int:
        """Emit one collective in the place of several, and the slices that they would have made."""
        b, types = self.b, self.graph.types
        attrs, start = nodes[0].attrs, 0
        # Stable: multiples of ROW_BYTES come first, so that their slices stay aligned.
        nodes = sorted(nodes, key=lambda n: bool(types[n.inputs[0]].size_bytes % ROW_BYTES))
        with b.like_node(nodes[0]):
            rows = [self._flat(n.inputs[0]) for n in nodes]
            if len(rows) > 1:
                row = b.emit_one(CONCAT, *rows, axis=0)
            else:  # an element that is shown many times is a row without bytes of its own
                row = rows[0] if dense[nodes[0].inputs[0]] else b.emit_one(COPY, rows[0])
            launch = len(b.nodes)
            (row,) = b.emit(ALL_REDUCE, (row,), attrs)
            for node in nodes:
                type_ = types[node.outputs[0]]
                part, stop = row, start + type_.num_elements
                if len(nodes) > 1:
                    part = b.emit_one(SLICE, row, starts=(start,), stops=(stop,), steps=(1,))
                self.met[node.outputs[0]] = _reshaped(b, part, type_.shape)
                self._launch_of[node.outputs[0]] = launch
                start = stop
        return launch

    def _flat(self, value: ValueId) -> ValueId:
        value = self.met.get(value, value)
        return _reshaped(self.b, value, (self.b.type_of(value).num_elements,))

    def _in_order(self) -> Graph:
        """Return the graph in topological order, with each bucket as soon as it can begin."""
        old, first = self.graph, len(self.graph.nodes)
        places = [i for i, node in enumerate(old.nodes) if not is_collective(node.op)]
        new = {i: place for place, i in enumerate(places)}
        shift = len(places) - first
        for ids in self.launches:
            ids[:] = [index + shift for index in ids]
        for i, node in enumerate(old.nodes):
            if is_collective(node.op):
                new[i] = self._launch_of[node.outputs[0]] + shift
        nodes = [self._reading_what_met(old.nodes[i]) for i in places] + self.b.nodes[first:]
        graph = replace(
            old,
            nodes=tuple(nodes),
            types=tuple(self.b.types),
            outputs=tuple([replace(o, value=self.met.get(o.value, o.value)) for o in old.outputs]),
            writes=tuple([replace(w, value=self.met.get(w.value, w.value)) for w in old.writes]),
        )
        reads = [(new[a], new[b]) for a, b in (*write_after_read(old), *rank_edges(old))]
        ordered = _sorted(graph, self.launches, self.per_step, places, reads)
        if ordered is None:
            raise InternalError("collectives wait for each other: theirs is no topological order")
        graph, launches = ordered
        delayed = _held(graph, launches)
        if delayed is graph:
            return graph
        reads = [*write_after_read(graph), *rank_edges(graph)]
        resorted = _sorted(delayed, launches, self.per_step, range(len(delayed.nodes)), reads)
        return graph if resorted is None else resorted[0]

    def _reading_what_met(self, node: Node) -> Node:
        if self.met.keys().isdisjoint(node.inputs):
            return node
        inputs = tuple([self.met.get(v, v) for v in node.inputs])
        return node.with_values(inputs, node.outputs)


def _reshaped(b: GraphBuilder, value: ValueId, shape: tuple[int, ...]) -> ValueId:
    return value if b.type_of(value).shape == shape else b.emit_one(RESHAPE, value, shape=shape)


def _sorted(
    graph: Graph,
    launches: Sequence[Sequence[int]],
    per_step: Sequence[bool],
    places: Sequence[int],
    reads: Sequence[tuple[int, int]],
) -> tuple[Graph, list[list[int]]] | None:
    """Return the graph in topological order with its launches by bucket; None in a circle.

    What the first bucket needs stands first, and so on, so that all its parts are made in one chain
    of launches; what needs something late stands behind all else. For the rest nodes stand as they
    stood: `places` are those of the first ones, and what is new stands where what it reads is made.
    `reads` are of variables, before they are written, and what must come before anything else.
    """
    edges = _edges(graph, launches, reads)
    # The given order as far as edges allow: the keys are worked out along it.
    legal = sorted_by([(float(i),) for i in range(len(graph.nodes))], edges)
    if legal is None:
        return None
    keys = zip(
        _needed_by(graph, launches, per_step, legal), _places(graph, legal, places), strict=True
    )
    order = sorted_by([*keys], edges) or legal
    new = {index: position for position, index in enumerate(order)}
    ordered = replace(graph, nodes=tuple([graph.nodes[i] for i in order]))
    return ordered, [[new[i] for i in ids] for ids in launches]


def _edges(
    graph: Graph, launches: Sequence[Sequence[int]], reads: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return pairs (before, after) of nodes: values, updates after old readers, and turns."""
    makers = graph.producers()
    edges = [(makers[v], i) for i, n in enumerate(graph.nodes) for v in (*n.inputs, *n.after)]
    edges += reads
    last: list[int] = []
    for ids in launches:
        # A bucket begins once all that its members read is there, and the one before it is done.
        ready = {makers[v] for i in ids for v in (*graph.nodes[i].inputs, *graph.nodes[i].after)}
        edges += [(maker, i) for i in ids for maker in sorted(ready.union(last).difference(ids))]
        edges += itertools.pairwise(ids)
        last = [ids[-1]]
    return edges


def _needed_by(
    graph: Graph,
    launches: Sequence[Sequence[int]],
    per_step: Sequence[bool],
    given: Sequence[int],
) -> list[float]:
    """Return the first late bucket that needs a node; what none needs, with what it reads.

    One that goes once per step waits for all batches, in whatever order they make what it sums.
    """
    makers, none = graph.producers(), float(len(launches))
    bucket_of = [none] * len(graph.nodes)
    is_after = [False] * len(graph.nodes)
    for index in given:
        before = [makers[v] for v in graph.nodes[index].inputs]
        is_after[index] = any([is_after[m] or _is(graph.nodes[m], DEFERRED) for m in before])
    for turn, ids in enumerate(launches):
        for index in ids:
            if _is(graph.nodes[index], DEFERRED) and not per_step[turn]:
                bucket_of[index] = turn
    for index in reversed(given):
        # Backwards: a node counts for the first bucket of all that need it.
        for value in graph.nodes[index].inputs:
            bucket_of[makers[value]] = min(bucket_of[makers[value]], bucket_of[index])
    for index in given:
        if is_after[index]:
            bucket_of[index] = none
        elif bucket_of[index] == none:
            before = [makers[v] for v in graph.nodes[index].inputs]
            bucket_of[index] = max([bucket_of[m] for m in before], default=0.0)
    return bucket_of


def _places(graph: Graph, given: Sequence[int], places: Sequence[int]) -> list[float]:
    """Return where nodes stood; what is new, with what it reads."""
    makers = graph.producers()
    place = [float(p) for p in places] + [-1.0] * (len(graph.nodes) - len(places))
    for index in given:
        if index >= len(places):
            node = graph.nodes[index]
            place[index] = max([place[makers[v]] for v in (*node.inputs, *node.after)], default=-1)
    return place


def _is(node: Node, when: str) -> bool:
    return is_collective(node.op) and node.attrs.get("when") == when


def _held(graph: Graph, launches: Sequence[Sequence[int]]) -> Graph:
    """Let each prefetched bucket wait until the bucket before it is about to be read."""
    per_step = needed_per_step(graph)
    ahead = [(turn, ids) for turn, ids in enumerate(launches) if _is(graph.nodes[ids[0]], PREFETCH)]
    made_by, reach = launch_of_values(graph), _reach(graph, launches)
    nodes = [*graph.nodes]
    # One bucket is used while the next one is brought: two are in memory.
    for (_, one), (turn, other) in itertools.pairwise(ahead):
        if per_step[one[0]] == per_step[other[0]]:
            may = [maker >= 0 and last < turn for maker, last in zip(made_by, reach, strict=True)]
            value = _about_to_be_read(graph, one, may)
            if value is not None:
                nodes[other[0]] = replace(nodes[other[0]], after=(value,))
    return replace(graph, nodes=tuple(nodes)) if tuple(nodes) != graph.nodes else graph


def _reach(graph: Graph, launches: Sequence[Sequence[int]]) -> list[int]:
    """Return, per value, the last bucket that it needs, or -1."""
    turn = {index: turn for turn, ids in enumerate(launches) for index in ids}
    reach = [-1] * len(graph.types)
    for index, node in enumerate(graph.nodes):
        last = max([turn.get(index, -1), *[reach[v] for v in node.inputs]])
        for value in node.outputs:
            reach[value] = last
    return reach


def _about_to_be_read(graph: Graph, bucket: Sequence[int], may: Sequence[bool]) -> ValueId | None:
    """Return what a bucket is read beside, of what may be waited for: it is made just before."""
    reached = {v for index in bucket for v in graph.nodes[index].outputs}
    makers = graph.producers()
    for node in graph.nodes[min(bucket) + 1 :]:
        if reached.isdisjoint(node.inputs):
            continue
        others = [v for v in node.inputs if v not in reached and may[v]]
        if others:
            return max(others, key=lambda v: makers[v])
        reached.update(node.outputs)
    return None
