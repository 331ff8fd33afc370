"""The local form of an op that is a program: what a rank does with its parts of the operands.

It is the program of the whole call, instruction by instruction as nodes of the graph, on parts: so
a divisor is that of the whole. Between two instructions a share of a sum is made whole, where the
signature says so, and numbers of rows and columns, and random ones, are those of the rank's part.
Fusion makes few launches of the nodes, as it would of anybody's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from compiler.fusion.products import GraphEmitter
from compiler.fusion.program import Instruction
from compiler.graph import GraphBuilder
from compiler.ops.embedding import CHECKED_INDEX
from compiler.ops.random_parts import bits_of_part, kept_by
from compiler.ops.reduce import MAX, SUM
from compiler.ops.shape import broadcast_value, reshape_to
from compiler.ops.sources import scalar
from compiler.registry import infer_type
from compiler.sbp.derive import Found, ProgramCall, call_of
from compiler.sbp.positions import PartPlace, row_major_numbers
from compiler.sbp.project import LocalCall, Part, local_attrs, shape_of
from compiler.sbp.words import By, Shape
from compiler.types import DType, ValueId

MakeWhole = Callable[[GraphBuilder, ValueId, By, int], ValueId]
"""Emits what makes a value whole that is a share on the ranks along an axis of the mesh."""


def emit_local(
    b: GraphBuilder,
    call: LocalCall,
    whole: ProgramCall,
    founds: Sequence[tuple[int, Found]],
    make_whole: MakeWhole,
) -> tuple[ValueId, ...]:
    """Emit what a rank does of a call of a program; return its outputs.

    It is the op itself where its program is the same on parts as on the whole.

    Args:
        b: What to emit into.
        call: The node, and which parts of its operands the rank has.
        whole: The call on whole operands, as a program.
        founds: The signature along each axis of the mesh, by the number of the axis.
        make_whole: What emits collectives.
    """
    local = _Local(b, call, whole, founds, make_whole)
    if not any([found.whole or found.reads_position for _, found in founds]):
        attrs = local_attrs.get(call.node.op)(call.node.attrs, local.shape)
        types = tuple([b.type_of(v) for v in call.inputs])
        made = infer_type.get(call.node.op)(types, attrs)
        own = call_of(call.node.op, types, made, attrs)
        if own is not None and own.program.instructions == whole.program.instructions:
            return b.emit(call.node.op, call.inputs, attrs)
    return local.emit()


class _Local:
    """One local form under construction."""

    def __init__(
        self,
        b: GraphBuilder,
        call: LocalCall,
        whole: ProgramCall,
        founds: Sequence[tuple[int, Found]],
        make_whole: MakeWhole,
    ) -> None:
        self.b, self.call, self.make_whole = b, whole, make_whole
        self.inputs = call.inputs
        self.shapes = [shape_of(part) for part in call.output_parts]
        self.whole: dict[int, list[tuple[int, By, int]]] = {}
        for mesh_axis, found in founds:
            for before, value, by in found.whole:
                self.whole.setdefault(before, []).append((value, by, mesh_axis))
        names = call.mesh.names
        axes = [(names[axis], f.axis) for axis, f in founds if names]
        splits = tuple([(name, axis) for name, axis in axes if axis >= 0])
        self.place = PartPlace(whole.frame.shape, _walked(call, whole), splits, call.shared)
        self.shape = self.place.own
        self.values: list[ValueId] = []

    def emit(self) -> tuple[ValueId, ...]:
        program, frame = self.call.program, self.call.frame
        wanted = self._wanted()
        for given, aligned in zip(self.inputs, frame.inputs, strict=True):
            self.values.append(reshape_to(self.b, given, self._local(aligned)))
        for number, instruction in enumerate(program.instructions):
            for value, by, mesh_axis in self.whole.get(number, ()):
                self.values[value] = self._whole(value, by, mesh_axis)
            is_wanted = wanted[len(program.inputs) + number]
            self.values.append(self._made(instruction) if is_wanted else ValueId(-1))
        made = []
        for place, aligned, shape in zip(program.outputs, frame.outputs, self.shapes, strict=True):
            made.append(reshape_to(self.b, self._stretched(self.values[place], aligned), shape))
        return tuple(made)

    def _whole(self, value: int, by: By, mesh_axis: int) -> ValueId:
        return self.make_whole(self.b, self.values[value], by, mesh_axis)

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
            return b.one(CHECKED_INDEX, rows, extent=extent)
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
        return self.b.one(MAX if name == "row_max" else SUM, value, axes=axes, keepdims=True)

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


def _walked(call: LocalCall, whole: ProgramCall) -> Part:
    """Return which elements of the walked tensor are the rank's, from those of its operands."""
    frame = whole.frame
    found = [slice(0, n) for n in frame.shape]
    # An operand beyond those of the program, such as the flag of a skipped step, is walked nowhere.
    operands = zip(frame.inputs, call.input_parts, call.whole_inputs, strict=False)
    for aligned, part, type_ in operands:
        own = [(rows, n) for rows, n in zip(part, type_.shape, strict=True) if n != 1]
        first = len(frame.shape) - len(aligned)
        for axis, extent in enumerate(aligned, first):
            if extent != 1:
                (rows, _), *own = own
                if extent == frame.shape[axis]:
                    found[axis] = rows
    return tuple(found)
