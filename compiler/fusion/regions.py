"""Regions: products and the fused programs beside them as one launch, over chunks of rows.

    logits = x @ w; losses = fused(logits, labels); dlogits = fused(logits, ...); dx = dlogits @ w
        ->  losses, dx, dw = region(x, w, labels)

`run` makes regions of values that are far wider than what makes and reads them; `fuse_products`
makes one of a product and the kernel that alone reads it. A language model's logits are its largest
tensor: 8,192 rows of 50,257 float32 are 1.6 GB, and as much again for their gradient. Such a value
is taken where a product makes it, and only fused programs that work row by row, and products, read
it and what is computed of it in its width. A value that a job returns, or that anything else reads,
has to exist. Small ones stay.

Where nothing between the first step and the last needs a result of the region, as the gradient of a
loss times a constant does not, all is one region and every product is made once. Else those steps
become a second region, which computes its chunks of the wide value again: of the square of a loss.

Both run on fused programs, after everything that gives values their types, and in every job: what a
plan may spend on memory never changes its results. Bytes alone decide, never timings; the device
says from how many bytes on, and how large a chunk is.

Guarantees of `run`: of values above the limit, those that only such nodes read are gone; scope and
source of a region are those of its first program.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from compiler.contract.attrs import Attrs
from compiler.contract.errors import InternalError
from compiler.contract.program import FusedProgram, Kind
from compiler.contract.region import OF_WHOLE_ROWS, TiledLoop, TileStep, TileStepKind, TileValue
from compiler.contract.spaces import Space
from compiler.contract.types import DType, Phase, ValueId
from compiler.graph.graph import Graph, GraphBuilder, Node, consumers, prune, sole_readers
from compiler.graph.program_builder import ProgramBuilder
from compiler.graph.target import WideOf
from compiler.ops.language.program_ops import FUSED, REGION, program_of, region_attrs, space_of
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import SUM
from compiler.ops.primitives.shape import RESHAPE, TRANSPOSE, reshape_to, swap_last_axes
from compiler.sbp.collective_schedule import first_buckets_after, last_buckets_before, sorted_by
from compiler.storage.order import needed_per_step, place_views, sort_launches

# Make a region of its nodes: steps, programs, operands.
#
# Drafts name values by their ids in the graph. A sum over rows leaves its program and becomes a
# step that adds up chunks; programs that follow each other become one, so that a chunk is walked
# once; what nobody reads after that is not made at all.

MAX_INSTRUCTIONS = 96
"""The limit for joined programs: beyond it a compiler keeps too little of a row in registers."""


@dataclass(frozen=True, slots=True)
class Wide:
    """The wide values of a region: each, or a view of one, with the value that it shows.

    `turned` are views with rows and columns exchanged.
    """

    rows: int
    columns: int
    base: dict[ValueId, ValueId]
    turned: frozenset[ValueId]


@dataclass(frozen=True, slots=True)
class _RegionDraft:
    """A step whose values have the ids of the graph; of sums that left a program, below 0."""

    kind: TileStepKind
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    program: FusedProgram | None = None


def make_region(
    b: GraphBuilder, nodes: Iterable[Node], wide: Wide, wanted: tuple[ValueId, ...], chunk_rows: int
) -> tuple[TiledLoop, tuple[ValueId, ...]]:
    """Return the region that makes the `wanted` values, and its operands.

    `nodes` are the region's, in order; views that it needs of operands are emitted into `b`. With
    `chunk_rows` 0 programs stay as they are.
    """
    drafts: list[_RegionDraft] = []
    for node in nodes:
        if node.op is not FUSED:
            drafts.append(_draft(b, node, wide))
        elif chunk_rows:
            drafts += _program_drafts(node, wide)
        else:
            program = program_of(node.attrs)
            drafts.append(_RegionDraft(TileStepKind.PROGRAM, node.inputs, node.outputs, program))
    drafts = _needed(_merged(drafts), wanted)
    results = [v for draft in drafts for v in draft.makes]
    inputs = list(dict.fromkeys([v for d in drafts for v in d.reads if v not in results]))
    inside = [v for v in results if v not in wanted]
    number = {v: place for place, v in enumerate((*inputs, *inside, *wanted))}
    steps = [
        TileStep(d.kind, _numbers(number, d.reads), _numbers(number, d.makes), d.program)
        for d in drafts
    ]
    region = TiledLoop(
        wide.rows,
        wide.columns,
        chunk_rows,
        len(inputs),
        tuple([_held(b, drafts, v) for v in inside]),
        tuple([b.type_of(v) for v in wanted]),
        tuple(steps),
    )
    return region, tuple([ValueId(v) for v in inputs])


def _numbers(number: dict[int, int], values: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([number[v] for v in values])


def _held(b: GraphBuilder, drafts: list[_RegionDraft], value: int) -> TileValue:
    for draft in drafts:
        if value in draft.makes and draft.program is not None:
            place = draft.program.outputs[draft.makes.index(value)]
            return TileValue(draft.program.dtype_of(place), draft.program.kind_of(place))
    return TileValue(b.types[value].dtype, Kind.FULL)


def _draft(b: GraphBuilder, node: Node, wide: Wide) -> _RegionDraft:
    """Return the step of a product, or of a sum over rows."""
    first, *others = node.inputs
    makes = (node.outputs[0],)
    if node.op is not MATMUL:
        return _RegionDraft(TileStepKind.COLUMN_SUM, (wide.base[first],), makes)
    (second,) = others
    if first in wide.turned:
        return _RegionDraft(TileStepKind.SUM_OF_PRODUCTS, (wide.base[first], second), makes)
    if second in wide.base:
        by_rows = swap_last_axes(b, first)
        return _RegionDraft(TileStepKind.SUM_OF_PRODUCTS, (by_rows, wide.base[second]), makes)
    if first in wide.base:
        return _RegionDraft(TileStepKind.PRODUCT, (wide.base[first], second), makes)
    width = b.type_of(first).shape[-1]
    return _RegionDraft(
        TileStepKind.PRODUCT, (reshape_to(b, first, (wide.rows, width)), second), makes
    )


def _program_drafts(node: Node, wide: Wide) -> list[_RegionDraft]:
    """Return the steps of a fused program: itself without its sums over rows, and these."""
    program = program_of(node.attrs)
    reads = tuple([int(wide.base.get(v, v)) for v in node.inputs])
    name: dict[int, int] = dict(enumerate(reads))
    sums: list[tuple[int, int]] = []
    makes: dict[int, int] = {}
    for place, value in zip(program.outputs, map(int, node.outputs), strict=True):
        # A sum over rows becomes a step of its own; its operand is an output in its place.
        if program.kind_of(place) is Kind.COLUMN:
            operand = program.instructions[place - len(reads)].operands[0]
            sums.append((operand, value))
        else:
            name[place] = makes[place] = value
    for operand, value in sums:
        if operand not in name:  # no output until now
            # Values of the graph begin at 0, so numbers below are free.
            name[operand] = makes[operand] = -1 - value
    drafts: list[_RegionDraft] = []
    if makes:
        draft = _RegionDraft(TileStepKind.PROGRAM, reads, tuple(makes.values()), program)
        drafts.append(_restricted(draft, tuple(makes)))
    drafts += [_RegionDraft(TileStepKind.COLUMN_SUM, (name[v],), (total,)) for v, total in sums]
    return drafts


def _restricted(draft: _RegionDraft, outputs: tuple[int, ...]) -> _RegionDraft:
    """Return a program's draft with some of its values as outputs; `makes` are theirs already."""
    program = draft.program
    if program is None:
        return draft
    p = ProgramBuilder(1, 1)
    inputs = tuple([p.input(entry) for entry in program.inputs])
    restricted, used = p.finish(p.replay(replace(program, outputs=outputs), inputs))
    return replace(draft, reads=tuple([draft.reads[i] for i in used]), program=restricted)


def _merged(drafts: list[_RegionDraft]) -> list[_RegionDraft]:
    """Make one of programs that follow each other."""
    merged: list[_RegionDraft] = []
    for draft in drafts:
        before = merged[-1] if merged else None
        joined = None if before is None else _joined(before, draft)
        if joined is None:
            merged.append(draft)
        else:
            merged[-1] = joined
    return merged


def _joined(first: _RegionDraft, second: _RegionDraft) -> _RegionDraft | None:
    if first.program is None or second.program is None:
        return None
    size = len(first.program.instructions) + len(second.program.instructions)
    if size > MAX_INSTRUCTIONS:
        return None
    p = ProgramBuilder(1, 1)
    input_of: dict[tuple[object, ...], int] = {}
    reads: list[int] = []
    outs: dict[int, int] = {}
    for draft, program in ((first, first.program), (second, second.program)):
        values: list[int] = []
        for value, entry in zip(draft.reads, program.inputs, strict=True):
            if value in outs:
                values.append(outs[value])
                continue
            # A program may read one value in two ways (kind, repeats): each is an input.
            if (value, entry) not in input_of:
                input_of[value, entry] = p.input(entry)
                reads.append(value)
            values.append(input_of[value, entry])
        outs.update(zip(draft.makes, p.replay(program, tuple(values)), strict=True))
    program, used = p.finish(tuple(outs.values()))
    return _RegionDraft(TileStepKind.PROGRAM, tuple([reads[i] for i in used]), tuple(outs), program)


def _needed(drafts: list[_RegionDraft], wanted: tuple[ValueId, ...]) -> list[_RegionDraft]:
    """Leave out what neither the wanted values nor later steps read."""
    reads: set[int] = set(wanted)
    needed: list[_RegionDraft] = []
    # From the end, so that the readers of each value are known.
    for draft in reversed(drafts):
        places = [i for i, value in enumerate(draft.makes) if value in reads]
        if not places:
            continue
        if draft.program is not None and len(places) < len(draft.makes):
            outputs = tuple([draft.program.outputs[i] for i in places])
            fewer = replace(draft, makes=tuple([draft.makes[i] for i in places]))
            draft = _restricted(fewer, outputs)
        needed.append(draft)
        reads.update(draft.reads)
    return needed[::-1]


def names_of(nodes: Iterable[Node]) -> tuple[str, ...]:
    """Return the ops of a region's nodes, of a fused program its members."""
    names: list[str] = []
    for node in nodes:
        is_fused = node.op is FUSED
        names += node.attrs.texts("members") if is_fused else (node.op.name,)
    return tuple(names)


_SUMMED = (DType.FLOAT32, DType.FLOAT64)
"""Element types that may be summed over rows chunk by chunk."""


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
        maker = graph.producers()[value]
        if maker >= 0 and graph.nodes[maker].op is MATMUL:  # not part of a region by now
            graph = _with_region(graph, maker, wide_of)
    return prune(graph) if large else graph


def _with_region(graph: Graph, product: int, wide_of: WideOf) -> Graph:
    """Return the graph with the region that begins at a product, or as it is."""
    region = _ChunkSearch(graph, product).found()
    if region is None:
        return graph
    wide, members = region
    item = max([graph.types[v].dtype.itemsize for v in wide.base])
    chunk = wide_of(graph.nodes[product].device).choose_chunk_rows(wide.rows, wide.columns * item)
    rows = min(wide.rows, chunk)
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
            # Read where no node stands, so it must exist as a whole.
            if value in roots:
                return None
            for index in readers[value]:
                wide = self._through(index, value, space)
                if wide is None:
                    return None
                pending += wide
        members = sorted(self.members)
        if not all([self._is_taken(self.graph.nodes[i], space) for i in members]):
            return None
        # One launch has one rate, and a product alone gains nothing.
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
        wide = [
            v
            for v, place in zip(node.outputs, program.outputs, strict=True)
            if program.kind_of(place) is Kind.FULL
        ]
        self.base.update({v: v for v in wide})
        return wide

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
    results: set[ValueId] = set()
    foreign: set[ValueId] = set()
    late: set[int] = set()
    # A node outside this range cannot both follow one member and precede another.
    for index in range(members[0], members[-1] + 1):
        node = graph.nodes[index]
        if index in inside:
            if any([v in foreign for v in node.inputs]):
                late.add(index)
                foreign.update(node.outputs)
            results.update(node.outputs)
        elif node.outputs[0] in wide.base:
            if node.inputs[0] in foreign:
                foreign.add(node.outputs[0])
        elif any([v in results or v in foreign for v in node.inputs]):
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
    views = {(v,) for v, base in wide.base.items() if v != base}
    removed = {source.nodes[i].outputs for i in gone} | views
    wanted = tuple(_wanted(source, wide, members, gone))
    b = GraphBuilder.continuing(graph)
    template = next((n for n in nodes if n.op is FUSED and n.outputs in removed), nodes[0])
    is_backward = any([n.phase is Phase.BACKWARD for n in nodes if n.outputs in removed])
    phase = Phase.BACKWARD if is_backward else Phase.FORWARD
    with b.like_node(template, phase):
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
    inserts = {places[-1]: views, places[0]: [node, *(views if len(places) == 1 else ())]}
    nodes = [
        new
        for index, other in enumerate(graph.nodes)
        for new in (inserts.get(index, ()) if other.outputs in removed else (other,))
    ]
    # The region may read what stands between its first node and its last: facts about a graph, as
    # `sort_launches` asks for, need its nodes in topological order.
    makers = {value: index for index, other in enumerate(nodes) for value in other.outputs}
    # Without a maker are results of a first region's nodes that a second one runs again.
    edges = [(makers[v], n) for n, other in enumerate(nodes) for v in other.inputs if v in makers]
    by_values = sorted_by([(float(index),) for index in range(len(nodes))], edges)
    if by_values is None:  # something would have to run both before the region and after it
        return None
    loose = replace(graph, nodes=tuple([nodes[index] for index in by_values]))
    try:
        order = sort_launches(loose)
    except InternalError:  # the same, by other edges than those of values
        return None
    return replace(loose, nodes=place_views(loose, order))


# Let the fused kernel that alone reads a matrix product work on it while it is made.
#
#     y = a @ b; h = fused(y, bias)  ->  h = region(a, b, bias)
#
# wherever the product has the rows and columns of the kernel's space. No cycle can arise: nothing
# but the kernel reads the product, so no path leads from one to the other around it. Of several
# products that a kernel reads, the one made last goes along.
#
# A job's own outputs, products read elsewhere too and products of batches stay as they are.
#
# Guarantees: the same values; of a product and its kernel one node is left, where the kernel was.


def fuse_products(graph: Graph) -> Graph:
    """Return the graph with products inside the kernels that read them. O(nodes)."""
    if not any([node.op is FUSED for node in graph.nodes]):
        return graph
    producers, per_step, sole = graph.producers(), needed_per_step(graph), sole_readers(graph)
    b, nodes = GraphBuilder.continuing(graph), list[Node]()
    known: dict[object, _Made] = {}
    for index, node in enumerate(graph.nodes):
        if node.op is FUSED:
            inputs = [
                (producers[value], position)
                for position, value in enumerate(node.inputs)
                if sole[value] == index
                and node.inputs.count(value) == 1
                and per_step[producers[value]] == per_step[index]
            ]
            for producer, position in sorted(inputs, reverse=True):
                if _fits(graph, graph.nodes[producer], node, position):
                    node = _with_product(b, graph.nodes[producer], node, known)
                    break
        nodes.append(node)
    fused = replace(graph, nodes=tuple(nodes))
    is_same = all([before is after for before, after in zip(graph.nodes, nodes, strict=True)])
    return graph if is_same else prune(fused)


def _fits(graph: Graph, product: Node, kernel: Node, position: int) -> bool:
    """Whether a kernel may work on a product that is its input at a position."""
    if product.op is not MATMUL or product.phase is not kernel.phase:
        return False
    if product.device != kernel.device:
        return False
    shape = graph.types[product.outputs[0]].shape
    if len(shape) != 2 or 0 in shape:
        return False
    program = program_of(kernel.attrs)
    operand = program.inputs[position]
    if operand.kind is not Kind.FULL or operand.count:
        return False
    return Space(*shape) == space_of(kernel.attrs)


_Made = tuple[Attrs, tuple[int, ...]]
"""The attributes of a region, and which of its nodes' inputs are its operands."""


def _with_product(b: GraphBuilder, product: Node, kernel: Node, known: dict[object, _Made]) -> Node:
    """Return the region of a product and a kernel; layers that are alike share its attributes."""
    (value,), nodes = product.outputs, (product, kernel)
    reads, number = (*product.inputs, *kernel.inputs), dict[ValueId, int]()
    places = tuple([number.setdefault(v, len(number)) for v in (value, *reads, *kernel.outputs)])
    types = tuple([(b.type_of(v).dtype, b.type_of(v).shape) for v in number])
    key = (product.attrs, kernel.attrs, places, types)
    if key not in known:
        space = space_of(kernel.attrs)
        wide = Wide(space.rows, space.columns, {value: value}, frozenset())
        region, inputs = make_region(b, nodes, wide, kernel.outputs, chunk_rows=0)
        operands = tuple([reads.index(v) for v in inputs])
        known[key] = region_attrs(region, names_of(nodes)), operands
    attrs, operands = known[key]
    return replace(kernel, op=REGION, inputs=tuple([reads[i] for i in operands]), attrs=attrs)
