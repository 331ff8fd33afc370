"""What one rank does of a node with its parts of the operands, for primitives and programs alike.

Of an op that is a program it is the program of the whole call, instruction by instruction as nodes
of the graph, on parts: so a divisor is that of the whole. Between two instructions a share of a sum
is made whole, where the signature says so, and numbers of rows and columns, and random ones, are
those of the rank's part. Fusion makes few launches of the nodes, as it would of anybody's.

A primitive says it in the column `project`. A loop runs all its steps on each rank: its body has
the rows of a batch, and shares of sums over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from compiler.contract.attrs import Attrs
from compiler.contract.errors import InternalError
from compiler.contract.placement import Mesh
from compiler.contract.program import Instruction
from compiler.contract.sbp import (
    BROADCAST,
    Partial,
    ReduceOp,
    Sbp,
    Shape,
    Split,
    local_shape,
)
from compiler.contract.types import DType, TensorType, ValueId
from compiler.graph.columns import (
    LocalCall,
    SbpSignature,
    local_attrs,
    project,
    sbp_signatures,
    whole,
)
from compiler.graph.graph import GraphBuilder, Node
from compiler.graph.registry import SIGNED, Op, Types, infer_type
from compiler.ops.families.embedding import CHECKED_INDEX
from compiler.ops.families.loops import SCAN, ScanParts
from compiler.ops.language.vjp import GraphEmitter
from compiler.ops.primitives.body import Body, add_operand, finish_body
from compiler.ops.primitives.reduce import MAX, SUM
from compiler.ops.primitives.shape import broadcast_value, reshape_to
from compiler.ops.primitives.sources import CONSTANT, INPUT, scalar
from compiler.sbp.derive import CandidateSignature, ProgramCall, call_of, derived, walked_sbp
from compiler.sbp.positions import ShardIndex, bits_of_part, kept_by, row_major_numbers

EmitReduction = Callable[[GraphBuilder, ValueId, ReduceOp, int], ValueId]
"""Emits what makes a value whole that is a share on the ranks along an axis of the mesh."""


def emit_local(
    b: GraphBuilder,
    call: LocalCall,
    whole: ProgramCall,
    ways: Sequence[CandidateSignature],
    make_whole: EmitReduction,
) -> tuple[ValueId, ...]:
    """Emit what a rank does of a call of a program; return its outputs.

    It is the op itself where its program is the same on parts as on the whole.

    Args:
        b: What to emit into.
        call: The node, and which parts of its operands the rank has.
        whole: The call on whole operands, as a program.
        ways: The signature along each axis of the mesh.
        make_whole: What emits collectives.
    """
    local = _Local(b, call, whole, ways, make_whole)
    if not any([way.whole or way.reads_position for way in ways]):
        attrs = local_attrs.get(call.node.op)(call.node.attrs, local.shape)
        types = tuple([b.type_of(v) for v in call.inputs])
        outputs = infer_type.get(call.node.op)(types, attrs)
        part = call_of(call.node.op, types, outputs, attrs)
        # The program of the part is that of the whole, so the op itself will do.
        if part is not None and part.program.instructions == whole.program.instructions:
            return b.emit(call.node.op, call.inputs, attrs)
    return local.emit()


class _Local:
    """One local form under construction."""

    def __init__(
        self,
        b: GraphBuilder,
        call: LocalCall,
        whole: ProgramCall,
        ways: Sequence[CandidateSignature],
        make_whole: EmitReduction,
    ) -> None:
        self.b, self.call, self.make_whole = b, whole, make_whole
        self.inputs = call.inputs
        self.shapes = [call.output_shape(index) for index in range(len(call.whole_outputs))]
        self.whole: dict[int, list[tuple[int, ReduceOp, int]]] = {}
        for mesh_axis, way in enumerate(ways):
            for before, value, by in way.whole:
                self.whole.setdefault(before, []).append((value, by, mesh_axis))
        sbp = [walked_sbp(whole.frame, call.whole_inputs, words) for words in call.signatures]
        self.place = ShardIndex.of_call(call, whole.frame.shape, tuple(sbp))
        self.shape = self.place.own
        self.values: list[ValueId] = []

    def emit(self) -> tuple[ValueId, ...]:
        program, frame = self.call.program, self.call.frame
        needed = self._wanted()
        for operand, aligned in zip(self.inputs, frame.inputs, strict=True):
            self.values.append(reshape_to(self.b, operand, self._local(aligned)))
        for number, instruction in enumerate(program.instructions):
            for value, by, mesh_axis in self.whole.get(number, ()):
                self.values[value] = self.make_whole(self.b, self.values[value], by, mesh_axis)
            is_wanted = needed[len(program.inputs) + number]
            self.values.append(self._made(instruction) if is_wanted else ValueId(-1))
        outputs = []
        for place, aligned, shape in zip(program.outputs, frame.outputs, self.shapes, strict=True):
            outputs.append(reshape_to(self.b, self._stretched(self.values[place], aligned), shape))
        return tuple(outputs)

    def _stretched(self, value: ValueId, aligned: Shape) -> ValueId:
        """Return a value with the elements of an output, whose axes of one element may be fewer."""
        shape = self._local(aligned)
        is_short = self.b.type_of(value).num_elements != math.prod(shape)
        return broadcast_value(self.b, value, shape) if is_short else value

    def _wanted(self) -> list[bool]:
        """Mark what is read: of a choice between a value and itself, the condition is not."""
        program = self.call.program
        first = len(program.inputs)
        marks = [False] * program.num_values
        for value in program.outputs:
            marks[value] = True
        for number in reversed(range(len(program.instructions))):
            instruction = program.instructions[number]
            # Kept though nobody may read it: it is there to fail.
            if instruction.op == "check_index":
                marks[first + number] = True
            if marks[first + number]:
                for value in _read(instruction):
                    marks[value] = True
        return marks

    def _local(self, aligned: Shape) -> Shape:
        """Return the rank's part of a shape that stretches to that of the walked tensor."""
        last = self.shape[len(self.shape) - len(aligned) :]
        wide = self.call.frame.shape[len(self.shape) - len(aligned) :]
        return tuple([m if n == w else n for n, m, w in zip(aligned, last, wide, strict=True)])

    def _made(self, instruction: Instruction) -> ValueId:
        name, b, emitter = instruction.op, self.b, GraphEmitter(self.b)
        operands = [self.values[v] for v in instruction.operands]
        if name == "constant":
            return scalar(b, instruction.constants[0], instruction.dtype)
        if name == "cast":
            return emitter.cast(operands[0], instruction.dtype)
        if name in ("row_index", "column_index"):
            return self._numbers(instruction)
        if name == "check_index":
            extent = int(instruction.constants[0])
            shape = b.type_of(operands[0]).shape
            rows = reshape_to(b, operands[0], (*shape, 1))
            return b.emit_one(CHECKED_INDEX, rows, extent=extent)
        # min(x) = -max(-x); of integers by the complement, for the least one has no negative.
        if name == "row_min":
            turn = "neg" if instruction.dtype.is_float else "not"
            return emitter.op(turn, self._reduced("row_max", emitter.op(turn, operands[0])))
        if name in ("row_sum", "row_max", "column_sum"):
            return self._reduced(name, operands[0])
        if name == "select" and instruction.operands[1] == instruction.operands[2]:
            return operands[1]  # a value of a lesser kind, which numpy's rule stretches
        if name == "philox":
            return self._random(instruction, operands)
        return emitter.op(name, *operands)

    def _random(self, instruction: Instruction, state: Sequence[ValueId]) -> ValueId:
        """Emit the random bits of the rank's part, or whether they keep an element."""
        key, p = instruction.constants
        bits = bits_of_part(self.b, tuple(state), int(key), self.place)
        return kept_by(self.b, bits, p) if instruction.dtype is DType.BOOL else bits

    def _reduced(self, name: str, value: ValueId) -> ValueId:
        """Emit a sum or maximum of the rank's part, whose axes stay with extent 1."""
        cut, rank = self.call.num_leading, len(self.shape)
        value = broadcast_value(self.b, value, self.shape)
        axes = tuple(range(cut)) if name == "column_sum" else tuple(range(cut, rank))
        return self.b.emit_one(MAX if name == "row_max" else SUM, value, axes=axes, keepdims=True)

    def _numbers(self, instruction: Instruction) -> ValueId:
        """Emit the numbers of the rank's rows [..., 1] or columns."""
        place, cut = self.place, self.call.num_leading
        rank, emitter = len(place.shape), GraphEmitter(self.b)
        is_column = instruction.op == "column_index"
        axes = range(cut, rank) if is_column else range(cut)
        numbers = row_major_numbers(self.b, place, axes)
        if not is_column:
            every, count = map(int, instruction.constants)
            for op, by in (("floordiv", every), ("mod", count)):
                if by > 1 or (op == "mod" and by):
                    numbers = emitter.op(op, numbers, scalar(self.b, by, DType.INT64))
            numbers = reshape_to(self.b, numbers, (*place.own[:cut], *[1] * (rank - cut)))
        return emitter.cast(numbers, instruction.dtype)


def _read(instruction: Instruction) -> tuple[int, ...]:
    operands = instruction.operands
    is_same = instruction.op == "select" and operands[1] == operands[2]
    return operands[1:2] if is_same else operands


@lru_cache(maxsize=4096)
def candidate_signatures(
    op: Op, inputs: Types, outputs: Types, attrs: Attrs, parts: int
) -> tuple[CandidateSignature, ...]:
    """Return the signatures of a call along one axis of a mesh with so many parts.

    The first is that of whole operands. Of tensors that are split each rank has a row at least.
    """
    # First, for `_Following.settle` falls back to the first way.
    ways = {whole(inputs, outputs): CandidateSignature(whole(inputs, outputs))}
    if sbp_signatures.has(op):
        for signature in sbp_signatures.get(op)(inputs, outputs, attrs, parts):
            ways.setdefault(signature, CandidateSignature(signature))
    for way in derived(op, inputs, outputs, attrs):
        completed = _completed(way, inputs)
        ways.setdefault(completed.signature, completed)
    types = (*inputs, *outputs)
    return tuple([way for signature, way in ways.items() if is_possible(signature, types, parts)])


def _completed(way: CandidateSignature, inputs: Types) -> CandidateSignature:
    """Return a way with words for operands that are none of the program: all have them."""
    words = way.signature.inputs
    more = (BROADCAST,) * (len(inputs) - len(words))
    return replace(way, signature=replace(way.signature, inputs=words + more)) if more else way


def is_possible(signature: SbpSignature, types: Types, parts: int) -> bool:
    """Whether all parts of what is split have rows, and what is partial can be summed.

    `types` are those of inputs and outputs; of parts that are not alike, of the least.
    """
    for word, type_ in zip((*signature.inputs, *signature.outputs), types, strict=True):
        if isinstance(word, Split) and type_.shape[word.axis] < parts:
            return False
        if isinstance(word, Partial) and not (type_.dtype.is_float or type_.dtype in SIGNED):
            return False
    return True


def emit_part(
    b: GraphBuilder,
    call: LocalCall,
    ways: Sequence[CandidateSignature],
    make_whole: EmitReduction,
) -> tuple[ValueId, ...]:
    """Emit what a rank does of a node, by the way chosen along each axis of the mesh.

    Raises InternalError where that makes other types than those of the rank's parts.
    """
    node = call.node
    if project.has(node.op):
        outputs = project.get(node.op)(b, call)
    else:
        whole_call = call_of(node.op, call.whole_inputs, call.whole_outputs, node.attrs)
        if whole_call is None:
            outputs = b.emit(node.op, call.inputs, node.attrs)
        else:
            outputs = emit_local(b, call, whole_call, ways, make_whole)
    types = [b.type_of(value) for value in outputs]
    expected = [
        TensorType(t.dtype, call.output_shape(index)) for index, t in enumerate(call.whole_outputs)
    ]
    if types != expected:
        raise InternalError(
            f"{node.op} at {node.source} makes {types} of a rank's parts, where {expected} was said"
        )
    return outputs


# A body runs once per step on every rank, so nothing may meet inside: of each node those ways count
# that need no collective, and what one node makes the next one reads as it lies. From the layout of
# one operand the others follow: a node that is left with one way says how all that it reads and
# makes lies. A carry lies at the end of a step as at its beginning; what is added up from step to
# step may be a share of a sum, as all steps together are linear in it.


@dataclass(frozen=True, slots=True)
class BodyLayout:
    """How the values of a body lie along one axis of the mesh, and the way of every node."""

    words: tuple[Sbp, ...]
    signatures: tuple[CandidateSignature | None, ...]


def body_layout(
    body: Body, parts: int, given: Sequence[tuple[int, Sbp]], carries: int
) -> BodyLayout | None:
    """Return the layouts that follow from those of some operands; None where none do.

    Args:
        body: The body.
        parts: Ranks along the axis of the mesh.
        given: Pairs (operand, word).
        carries: How many operands are the first results of the step before.
    """
    links = tuple(zip(body.operands[:carries], body.results[:carries], strict=True))
    state = _Following(body, _ways_inside(body, parts), links)
    for number, word in given:
        state.words[body.operands[number]] = word
    if not state.settle():
        return None
    words = [state.words.get(ValueId(v), BROADCAST) for v in range(len(body.graph.types))]
    return BodyLayout(tuple(words), tuple([ways[0] if ways else None for ways in state.candidates]))


def _ways_inside(body: Body, parts: int) -> list[tuple[CandidateSignature, ...]]:
    """Return, per node, the ways without a collective or a position; none for an operand."""
    types, candidates = body.graph.types, list[tuple[CandidateSignature, ...]]()
    for node in body.graph.nodes:
        if node.op is INPUT:
            candidates.append(())
            continue
        ins, outs = [tuple([types[v] for v in side]) for side in (node.inputs, node.outputs)]
        ways = candidate_signatures(node.op, ins, outs, node.attrs, parts)
        is_placed = node.op is CONSTANT or "key" in node.attrs or node.op.name in _BY_ROWS
        # Another rank would need other constants, bits or rows: these nodes stay whole inside a
        # body.
        usable = [w for w in ways[1:] if not (w.whole or w.reads_position or is_placed)]
        candidates.append((ways[0], *usable))
    return candidates


_BY_ROWS = ("embedding", "embedding_grad")
"""Ops whose parts know of which rows they are."""


@dataclass(slots=True)
class _Following:
    """Words that follow from each other; `links` are pairs of values that lie alike."""

    body: Body
    candidates: list[tuple[CandidateSignature, ...]]
    links: Sequence[tuple[ValueId, ValueId]]
    words: dict[ValueId, Sbp] = field(default_factory=dict)

    def settle(self) -> bool:
        """Leave every node one way. Return whether there is one."""
        nodes = self.body.graph.nodes
        while True:
            num_known = len(self.words)
            if not self._linked() or not all([self._narrowed(i) for i in range(len(nodes))]):
                return False
            if len(self.words) != num_known:
                continue
            open_ = [i for i, ways in enumerate(self.candidates) if len(ways) > 1]
            if not open_:
                return self._linked()
            # Who reads nothing that is known may do what all can.
            reached = [i for i in open_ if any([v in self.words for v in nodes[i].inputs])]
            index = (reached or open_)[0]
            self.candidates[index] = self.candidates[index][:1]

    def _linked(self) -> bool:
        for one, other in self.links:
            word = self.words.get(one, self.words.get(other))
            if word is not None and not (self._bind(one, word) and self._bind(other, word)):
                return False
        return True

    def _narrowed(self, index: int) -> bool:
        """Keep the ways of a node that agree with what is known, and note what all of them say."""
        node, ways = self.body.graph.nodes[index], self.candidates[index]
        if not ways:
            return True
        ways = self.candidates[index] = tuple([way for way in ways if self._agrees(node, way)])
        if not ways:
            return False
        sides = [(*way.signature.inputs, *way.signature.outputs) for way in ways]
        for place, value in enumerate((*node.inputs, *node.outputs)):
            words = {side[place] for side in sides}
            if len(words) == 1 and not self._bind(value, *words):
                return False
        return True

    def _agrees(self, node: Node, way: CandidateSignature) -> bool:
        # A copy: a value that is read in two places must lie alike in both.
        sbps = dict(self.words)
        words = (*way.signature.inputs, *way.signature.outputs)
        pairs = zip((*node.inputs, *node.outputs), words, strict=True)
        return all([sbps.setdefault(value, word) == word for value, word in pairs])

    def _bind(self, value: ValueId, word: Sbp) -> bool:
        return self.words.setdefault(value, word) == word


def local_body(
    body: Body, layouts: Sequence[BodyLayout], mesh: Mesh, coordinates: Sequence[int]
) -> Body:
    """Return what one rank does at each step; `layouts` are those along each axis of the mesh."""
    graph, b = body.graph, GraphBuilder()
    value_of: dict[ValueId, ValueId] = {}

    for index, node in enumerate(graph.nodes):
        with b.like_node(node):
            if node.op is INPUT:
                (value,) = node.outputs
                type_ = graph.types[value]
                sbp = tuple([layout.words[value] for layout in layouts])
                shape = local_shape(type_.shape, sbp, mesh.shape, coordinates)
                value_of[value] = add_operand(b, TensorType(type_.dtype, shape))
                continue
            ways = [way for layout in layouts if (way := layout.signatures[index])]
            call = LocalCall(
                node,
                tuple([value_of[v] for v in node.inputs]),
                tuple([graph.types[v] for v in node.inputs]),
                tuple([graph.types[v] for v in node.outputs]),
                tuple([way.signature for way in ways]),
                mesh,
                tuple(coordinates),
            )
            value_of.update(zip(node.outputs, emit_part(b, call, ways, _meets_nobody), strict=True))
    return finish_body(b, [value_of[v] for v in body.results])


def _meets_nobody(b: GraphBuilder, value: ValueId, by: ReduceOp, axis: int) -> ValueId:
    raise InternalError("a step of a loop meets other ranks")


def stacked(word: Sbp) -> Sbp:
    """Return the word of the entries of all steps, from that of one."""
    return Split(word.axis + 1) if isinstance(word, Split) else word


def unstacked(word: Sbp) -> Sbp:
    """Return the word of an entry, from that of the entries of all steps."""
    return Split(word.axis - 1) if isinstance(word, Split) else word


# The cells of `scan`. Steps follow each other, so the axis of steps stays whole. Weights are
# whole, their gradients shares of a sum that meets once, after the loop.


@sbp_signatures.of(SCAN)
def _signatures(inputs: Types, outputs: Types, attrs: Attrs, parts: int) -> list[SbpSignature]:
    """Split an axis of a carry or of an entry, and whatever follows from that."""
    cut, signatures = ScanParts.of(attrs), dict[SbpSignature, None]()
    for number, type_ in enumerate(cut.body.operand_types[: cut.first_constant]):
        for axis, extent in enumerate(type_.shape):
            layout = None
            if extent >= parts:
                layout = body_layout(cut.body, parts, [(number, Split(axis))], cut.carries)
            if layout is not None:
                signatures[_outside(cut, layout)] = None
    return list(signatures)


def _outside(cut: ScanParts, layout: BodyLayout) -> SbpSignature:
    ins = [layout.words[v] for v in cut.body.operands]
    outs = [layout.words[v] for v in cut.body.results]
    entries = range(cut.carries, cut.first_constant)
    return SbpSignature(
        tuple([stacked(word) if i in entries else word for i, word in enumerate(ins)]),
        tuple([stacked(word) if i >= cut.carries else word for i, word in enumerate(outs)]),
    )


@project.of(SCAN)
def _own_steps(b: GraphBuilder, call: LocalCall) -> tuple[ValueId, ...]:
    """Emit all steps on the rank's rows."""
    cut, attrs = ScanParts.of(call.node.attrs), call.node.attrs
    if all([signature.is_whole for signature in call.signatures]):
        return b.emit(SCAN, call.inputs, attrs)
    pairs = zip(call.signatures, call.mesh.shape, strict=True)
    layouts = [_layout_of(cut, signature, parts) for signature, parts in pairs]
    body = local_body(cut.body, layouts, call.mesh, call.coordinates)
    return b.emit(SCAN, call.inputs, {**attrs, "body": body})


def _layout_of(cut: ScanParts, signature: SbpSignature, parts: int) -> BodyLayout:
    """Return the layout of the body that a signature was made of."""
    entries = range(cut.carries, cut.first_constant)
    words = [unstacked(w) if i in entries else w for i, w in enumerate(signature.inputs)]
    layout = body_layout(cut.body, parts, list(enumerate(words)), cut.carries)
    if layout is None:
        raise InternalError(f"no layout of a loop's body follows from {signature}")
    return layout
