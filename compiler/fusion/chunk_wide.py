"""Let values that are far wider than what makes and reads them exist a chunk of rows at a time.

    logits = x @ w; losses = fused(logits, labels); dlogits = fused(logits, ...); dx = dlogits @ w
        ->  losses, dx, dw = region(x, w, labels)

A language model's logits are its largest tensor: 8,192 rows of 50,257 float32 are 1.6 GB, and as
much again for their gradient. Such a value is taken where a product makes it, and only fused
programs that work row by row, and products, read it and what is computed of it in its width. A
value that a job returns, or that anything else reads, has to exist. Small ones stay.

Where nothing between the first step and the last needs a result of the region, as the gradient of a
loss times a constant does not, all is one region and every product is made once. Else those steps
become a second region, which computes its chunks of the wide value again: of the square of a loss.

Runs on fused programs, after everything that gives values their types, and in every job: what a
plan may spend on memory never changes its results. Decided by bytes alone, never by timings; from
how many bytes on, and how large a chunk is, follows from the device.

Guarantees: of values above the limit, those that only such nodes read are gone; scope and source of
a region are those of its first program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from compiler.errors import InternalError
from compiler.fusion.program import FusedProgram, Kind
from compiler.fusion.region import OF_WHOLE_ROWS
from compiler.fusion.region_steps import Wide, make_region, names_of
from compiler.fusion.spaces import Space
from compiler.graph import Graph, GraphBuilder, Node, consumers
from compiler.lowering.order import place_views, sort_launches
from compiler.ops.fused import FUSED, program_of, space_of
from compiler.ops.matmul import MATMUL
from compiler.ops.reduce import SUM
from compiler.ops.region import REGION, region_attrs
from compiler.ops.shape import RESHAPE, TRANSPOSE
from compiler.prune import prune
from compiler.rates import needed_per_step
from compiler.target import WideOf
from compiler.turns import first_buckets_after, last_buckets_before
from compiler.types import DType, Phase, ValueId

_SUMMED = (DType.FLOAT32, DType.FLOAT64)
"""What is summed over rows by the chunk."""


def run(graph: Graph, wide_of: WideOf) -> Graph:
    """Return the graph with regions in place of large wide values. O(nodes) for each of these.

    `wide_of` says of a device what is wide there.
    """
    large = [
        node.outputs[0]
        for node in graph.nodes
        if node.op is MATMUL
        and graph.types[node.outputs[0]].size_bytes > wide_of(node.device).min_bytes
        and graph.types[node.inputs[1]].rank == 2
    ]
    for value in large:
        made = graph.producers()[value]
        if made >= 0 and graph.nodes[made].op is MATMUL:  # not part of a region by now
            graph = _with_region(graph, made, wide_of)
    return prune(graph) if large else graph


def _with_region(graph: Graph, product: int, wide_of: WideOf) -> Graph:
    """Return the graph with the region that begins at a product, or as it is."""
    found = _ChunkSearch(graph, product).found()
    if found is None:
        return graph
    wide, members = found
    item = max([graph.types[v].dtype.itemsize for v in wide.base])
    chosen = wide_of(graph.nodes[product].device).choose_chunk_rows(wide.rows, wide.columns * item)
    rows = min(wide.rows, chosen)
    late = _late(graph, members, wide)
    early = [index for index in members if index not in late]
    if not late:
        return _replaced(graph, wide, members, members, rows) or graph
    first = _replaced(graph, wide, early, early, rows)
    # The nodes of the first region run again in the second, as far as that reads their results.
    both = None if first is None else _replaced(first, wide, members, sorted(late), rows, graph)
    return both or graph


@dataclass(slots=True)
class _ChunkSearch:
    """The walk from a product to all that reads what it makes, and what is made of that."""

    graph: Graph
    product: int
    base: dict[ValueId, ValueId] = field(default_factory=dict)
    turned: set[ValueId] = field(default_factory=set)
    members: set[int] = field(default_factory=set)

    def found(self) -> tuple[Wide, list[int]] | None:
        """Return the wide values and all nodes of the region; None where there is none."""
        node = self.graph.nodes[self.product]
        *leading, columns = self.graph.types[node.outputs[0]].shape
        space = Space(math.prod(leading), columns)
        readers, roots = consumers(self.graph), frozenset(self.graph.roots())
        self.members.add(self.product)
        self.base[node.outputs[0]] = node.outputs[0]
        pending = [node.outputs[0]]
        while pending:
            value = pending.pop()
            if value in roots:
                return None
            for index in readers[value]:
                made = self._through(index, value, space)
                if made is None:
                    return None
                pending += made
        members = sorted(self.members)
        if not all([self._is_taken(self.graph.nodes[i], space) for i in members]):
            return None
        per_step = needed_per_step(self.graph)
        if len({per_step[i] for i in members}) > 1 or len(members) < 2:
            return None
        before, after = last_buckets_before(self.graph), first_buckets_after(self.graph)
        if max([before[i] for i in members]) >= min([after[i] for i in members]):
            return None  # one of them makes what another one waits for, by way of other ranks
        return Wide(space.rows, space.columns, self.base, frozenset(self.turned)), members

    def _through(self, index: int, value: ValueId, space: Space) -> list[ValueId] | None:
        """Take in a reader of a wide value; return what is wide of its results."""
        node = self.graph.nodes[index]
        shape = self.graph.types[node.outputs[0]].shape
        is_turned = value in self.turned
        if node.op is RESHAPE and not is_turned and shape[-1:] == (space.columns,):
            self.base[node.outputs[0]] = self.base[value]
            return [node.outputs[0]]
        if node.op is TRANSPOSE and len(shape) == 2 and node.attrs.ints("perm") == (1, 0):
            self.base[node.outputs[0]] = self.base[value]
            if not is_turned:
                self.turned.add(node.outputs[0])
            return [node.outputs[0]]
        if node.op not in (FUSED, MATMUL, SUM) or (node.op is not MATMUL and is_turned):
            return None
        if index in self.members:
            return []
        self.members.add(index)
        if node.op is not FUSED:
            return []
        program = program_of(node.attrs)
        made = [
            v
            for v, place in zip(node.outputs, program.outputs, strict=True)
            if program.kind_of(place) is Kind.FULL
        ]
        self.base.update({v: v for v in made})
        return made

    def _is_taken(self, node: Node, space: Space) -> bool:
        if node.op is FUSED:
            return space_of(node.attrs) == space and self._is_by_rows(node, space)
        if node.op is SUM:
            type_ = self.graph.types[node.inputs[0]]
            is_over_rows = node.attrs.ints("axes") == tuple(range(type_.rank - 1))
            return is_over_rows and type_.dtype in _SUMMED
        return node is self.graph.nodes[self.product] or self._reads_rows(node)

    def _is_by_rows(self, node: Node, space: Space) -> bool:
        """Whether a program can work on some rows, and reads nothing else of this width."""
        program = program_of(node.attrs)
        ops = [i.op for i in program.instructions if i.op != "column_sum"]
        return (
            not set(ops) & set(OF_WHOLE_ROWS)
            and all([e.every == 1 and e.count in (0, space.rows) for e in program.inputs])
            and all(
                [
                    (entry.kind is Kind.FULL) == (value in self.base)
                    for value, entry in zip(node.inputs, program.inputs, strict=True)
                ]
            )
            and all([_is_left(program, place) for place in program.outputs])
        )

    def _reads_rows(self, node: Node) -> bool:
        """Whether a product reads one wide value, by rows, and another operand from outside."""
        a, b = node.inputs
        if (a in self.base) == (b in self.base) or self.graph.types[b].rank != 2:
            return False
        return b not in self.turned and self.graph.types[a].rank in (2, self._rank(a))

    def _rank(self, value: ValueId) -> int:
        """Return the rank that the first operand may have: of wide rows any."""
        is_plain = value in self.base and value not in self.turned
        return self.graph.types[value].rank if is_plain else 2


def _is_left(program: FusedProgram, place: int) -> bool:
    """Whether an output may leave a chunk: by rows, or as a plain sum over them."""
    kind = program.kind_of(place)
    if kind is not Kind.COLUMN:
        return kind is not Kind.SCALAR
    number = place - len(program.inputs)
    is_summed = number >= 0 and program.instructions[number].op == "column_sum"
    return is_summed and program.dtype_of(place) in _SUMMED


def _late(graph: Graph, members: list[int], wide: Wide) -> set[int]:
    """Return the nodes of a region that need what others computed from its results meanwhile."""
    inside = set(members)
    made: set[ValueId] = set()
    foreign: set[ValueId] = set()
    late: set[int] = set()
    for index in range(members[0], members[-1] + 1):
        node = graph.nodes[index]
        if index in inside:
            if any([v in foreign for v in node.inputs]):
                late.add(index)
                foreign.update(node.outputs)
            made.update(node.outputs)
        elif node.outputs[0] in wide.base:
            if node.inputs[0] in foreign:
                foreign.add(node.outputs[0])
        elif any([v in made or v in foreign for v in node.inputs]):
            foreign.update(node.outputs)
    return late


def _replaced(
    graph: Graph,
    wide: Wide,
    members: list[int],
    gone: list[int],
    chunk_rows: int,
    source: Graph | None = None,
) -> Graph | None:
    """Return the graph with a region of `members` in place of `gone`; None if no order allows it.

    Both are indices of `source`, by default the graph itself. What stands between the first and the
    last of them goes before the region, or after it where it needs its results.
    """
    source = source or graph
    nodes = [source.nodes[i] for i in members]
    views = {(v,) for v, shown in wide.base.items() if v != shown}
    removed = {source.nodes[i].outputs for i in gone} | views
    wanted = tuple(_wanted(source, wide, members, gone))
    b = GraphBuilder.continuing(graph)
    template = next((n for n in nodes if n.op is FUSED and n.outputs in removed), nodes[0])
    is_backward = any([n.phase is Phase.BACKWARD for n in nodes if n.outputs in removed])
    phase = Phase.BACKWARD if is_backward else Phase.FORWARD
    with b.beside(template, phase):
        region, inputs = make_region(b, nodes, wide, wanted, chunk_rows)
    new_views = b.nodes[len(graph.nodes) :]
    attrs = region_attrs(region, names_of(nodes))
    node = replace(
        template, op=REGION, inputs=inputs, outputs=wanted, attrs=attrs, phase=phase, after=()
    )
    return _placed(replace(graph, types=tuple(b.types)), removed, new_views, node)


def _wanted(graph: Graph, wide: Wide, members: list[int], gone: list[int]) -> Iterator[ValueId]:
    """Yield the results of nodes that others than the region's read."""
    readers, roots, inside = consumers(graph), frozenset(graph.roots()), set(members)
    for index in gone:
        for value in graph.nodes[index].outputs:
            is_read = value in roots or any([r not in inside for r in readers[value]])
            if value not in wide.base and is_read:
                yield value


def _placed(
    graph: Graph, removed: set[tuple[ValueId, ...]], views: list[Node], node: Node
) -> Graph | None:
    """Put a region where the first of its nodes was, and move after it what needs its results.

    Views that it reads stand where the last of them was: by then there is what they show.
    """
    places = [i for i, other in enumerate(graph.nodes) if other.outputs in removed]
    put = {places[-1]: views, places[0]: [node, *(views if len(places) == 1 else ())]}
    nodes = [
        new
        for index, other in enumerate(graph.nodes)
        for new in (put.get(index, ()) if other.outputs in removed else (other,))
    ]
    loose = replace(graph, nodes=tuple(nodes))
    try:
        order = sort_launches(loose)
    except InternalError:  # something would have to run both before the region and after it
        return None
    return replace(loose, nodes=place_views(loose, order))
