"""Make a region of nodes that were found to belong to one: steps, programs, operands.

Drafts name values by their ids in the graph. A sum over rows leaves its program and becomes a step
that adds up chunks; programs that follow each other become one, so that a chunk is walked once;
what nobody reads after that is not made at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from compiler.fusion.builder import ProgramBuilder
from compiler.fusion.program import FusedProgram, Kind
from compiler.fusion.region import Held, Region, Step, StepKind
from compiler.graph import GraphBuilder, Node
from compiler.ops.fused import FUSED, program_of
from compiler.ops.matmul import MATMUL
from compiler.ops.shape import reshape_to, swap_last_axes
from compiler.types import ValueId

MAX_INSTRUCTIONS = 96
"""Of programs that become one: beyond that a compiler keeps too little of a row in registers."""


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

    kind: StepKind
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    program: FusedProgram | None = None


def make_region(
    b: GraphBuilder, nodes: Iterable[Node], wide: Wide, wanted: tuple[ValueId, ...], chunk_rows: int
) -> tuple[Region, tuple[ValueId, ...]]:
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
            drafts.append(_RegionDraft(StepKind.PROGRAM, node.inputs, node.outputs, program))
    drafts = _needed(_merged(drafts), wanted)
    made = [v for draft in drafts for v in draft.makes]
    inputs = list(dict.fromkeys([v for d in drafts for v in d.reads if v not in made]))
    inside = [v for v in made if v not in wanted]
    number = {v: place for place, v in enumerate((*inputs, *inside, *wanted))}
    steps = [
        Step(d.kind, _numbers(number, d.reads), _numbers(number, d.makes), d.program)
        for d in drafts
    ]
    region = Region(
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


def _held(b: GraphBuilder, drafts: list[_RegionDraft], value: int) -> Held:
    for draft in drafts:
        if value in draft.makes and draft.program is not None:
            place = draft.program.outputs[draft.makes.index(value)]
            return Held(draft.program.dtype_of(place), draft.program.kind_of(place))
    return Held(b.types[value].dtype, Kind.FULL)


def _draft(b: GraphBuilder, node: Node, wide: Wide) -> _RegionDraft:
    """Return the step of a product, or of a sum over rows."""
    first, *others = node.inputs
    makes = (node.outputs[0],)
    if node.op is not MATMUL:
        return _RegionDraft(StepKind.COLUMN_SUM, (wide.base[first],), makes)
    (second,) = others
    if first in wide.turned:
        return _RegionDraft(StepKind.SUM_OF_PRODUCTS, (wide.base[first], second), makes)
    if second in wide.base:
        by_rows = swap_last_axes(b, first)
        return _RegionDraft(StepKind.SUM_OF_PRODUCTS, (by_rows, wide.base[second]), makes)
    if first in wide.base:
        return _RegionDraft(StepKind.PRODUCT, (wide.base[first], second), makes)
    width = b.type_of(first).shape[-1]
    return _RegionDraft(StepKind.PRODUCT, (reshape_to(b, first, (wide.rows, width)), second), makes)


def _program_drafts(node: Node, wide: Wide) -> list[_RegionDraft]:
    """Return the steps of a fused program: itself without its sums over rows, and these."""
    program = program_of(node.attrs)
    reads = tuple([int(wide.base.get(v, v)) for v in node.inputs])
    name: dict[int, int] = dict(enumerate(reads))
    sums: list[tuple[int, int]] = []
    kept: dict[int, int] = {}
    for place, value in zip(program.outputs, map(int, node.outputs), strict=True):
        if program.kind_of(place) is Kind.COLUMN:
            operand = program.instructions[place - len(reads)].operands[0]
            sums.append((operand, value))
        else:
            name[place] = kept[place] = value
    for operand, value in sums:
        if operand not in name:  # no output until now
            name[operand] = kept[operand] = -1 - value
    drafts: list[_RegionDraft] = []
    if kept:
        whole = _RegionDraft(StepKind.PROGRAM, reads, tuple(kept.values()), program)
        drafts.append(_restricted(whole, tuple(kept)))
    drafts += [_RegionDraft(StepKind.COLUMN_SUM, (name[v],), (total,)) for v, total in sums]
    return drafts


def _restricted(draft: _RegionDraft, outputs: tuple[int, ...]) -> _RegionDraft:
    """Return a program's draft with some of its values as outputs; `makes` are theirs already."""
    program = draft.program
    if program is None:
        return draft
    p = ProgramBuilder(1, 1)
    inputs = tuple([p.input(entry) for entry in program.inputs])
    made, kept = p.finish(p.replay(replace(program, outputs=outputs), inputs))
    return replace(draft, reads=tuple([draft.reads[i] for i in kept]), program=made)


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
    known: dict[tuple[object, ...], int] = {}
    reads: list[int] = []
    made: dict[int, int] = {}
    for draft, program in ((first, first.program), (second, second.program)):
        values: list[int] = []
        for value, entry in zip(draft.reads, program.inputs, strict=True):
            if value in made:
                values.append(made[value])
                continue
            if (value, entry) not in known:
                known[value, entry] = p.input(entry)
                reads.append(value)
            values.append(known[value, entry])
        made.update(zip(draft.makes, p.replay(program, tuple(values)), strict=True))
    program, kept = p.finish(tuple(made.values()))
    return _RegionDraft(StepKind.PROGRAM, tuple([reads[i] for i in kept]), tuple(made), program)


def _needed(drafts: list[_RegionDraft], wanted: tuple[ValueId, ...]) -> list[_RegionDraft]:
    """Leave out what neither the wanted values nor later steps read."""
    read: set[int] = set(wanted)
    needed: list[_RegionDraft] = []
    for draft in reversed(drafts):
        left = [i for i, value in enumerate(draft.makes) if value in read]
        if not left:
            continue
        if draft.program is not None and len(left) < len(draft.makes):
            outputs = tuple([draft.program.outputs[i] for i in left])
            fewer = replace(draft, makes=tuple([draft.makes[i] for i in left]))
            draft = _restricted(fewer, outputs)
        needed.append(draft)
        read.update(draft.reads)
    return needed[::-1]


def names_of(nodes: Iterable[Node]) -> tuple[str, ...]:
    """Return the ops of a region's nodes, of a fused program its members."""
    names: list[str] = []
    for node in nodes:
        is_fused = node.op is FUSED
        names += node.attrs.texts("members") if is_fused else (node.op.name,)
    return tuple(names)
