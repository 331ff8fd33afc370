"""Grow a fused program instruction by instruction.

Kinds follow from the operands by the rules of `compiler.contract.program`; equal instructions are
emitted once. `finish` leaves out what no output needs. The columns `frame` and `expand` say how an
op becomes part of such a program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from compiler.contract.attrs import Attrs
from compiler.contract.errors import InternalError
from compiler.contract.program import (
    COLUMN_REDUCTIONS,
    COMPARISONS,
    ROW_REDUCTIONS,
    FusedProgram,
    Instruction,
    Kind,
    ProgramInput,
    joined,
)
from compiler.contract.types import DType
from compiler.graph.registry import OpAttr, Types
from compiler.graph.target import KernelCall

_REDUCTIONS = frozenset(ROW_REDUCTIONS + COLUMN_REDUCTIONS)


class ProgramBuilder:
    """A program under construction in a space of `rows` by `columns`; values are plain numbers."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows = rows
        self.columns = columns
        self._inputs: list[ProgramInput] = []
        self._values: list[ProgramInput | Instruction] = []
        self._seen: dict[object, int] = {}

    @property
    def num_instructions(self) -> int:
        """Instructions emitted so far."""
        return len(self._values) - len(self._inputs)

    @property
    def num_values(self) -> int:
        """Inputs and instructions so far: the number of the next value."""
        return len(self._values)

    def made_by(self, value: int) -> ProgramInput | Instruction:
        """Return what a value is."""
        return self._values[value]

    def input(self, operand: ProgramInput) -> int:
        """Add an operand of the launch."""
        self._inputs.append(operand)
        self._values.append(operand)
        return len(self._values) - 1

    def is_input(self, value: int) -> bool:
        """Return whether a value is an operand of the launch."""
        return isinstance(self._values[value], ProgramInput)

    def dtype_of(self, value: int) -> DType:
        """Return the element type of a value."""
        return self._values[value].dtype

    def kind_of(self, value: int) -> Kind:
        """Return how a value lies in the space."""
        return self._values[value].kind

    def constant(self, number: float, dtype: DType) -> int:
        """Emit a number as a SCALAR."""
        value = number if dtype.is_float else int(bool(number) if dtype is DType.BOOL else number)
        return self._emit("constant", (), dtype, Kind.SCALAR, (value,))

    def constant_like(self, number: float, value: int) -> int:
        """Emit a number as a SCALAR of the dtype of another value."""
        return self.constant(number, self.dtype_of(value))

    def op(self, name: str, *operands: int) -> int:
        """Emit an elementwise op; its dtype is that of the last operand, or bool if it compares."""
        dtype = DType.BOOL if name in COMPARISONS else self.dtype_of(operands[-1])
        return self._emit(name, operands, dtype, joined([self.kind_of(v) for v in operands]))

    def cast(self, value: int, dtype: DType) -> int:
        """Emit a conversion, or nothing where the value has the dtype."""
        if self.dtype_of(value) is dtype:
            return value
        return self._emit("cast", (value,), dtype, self.kind_of(value))

    def copied(self, value: int) -> int:
        """Emit a value once more, as an instruction: what an output needs that is an input."""
        return self._emit("cast", (value,), self.dtype_of(value), self.kind_of(value))

    def widened(self, value: int, kind: Kind) -> int:
        """Emit a value of a lesser kind as one of `kind`, or nothing where it is.

        There is no instruction that repeats, so a choice between the value and itself does it, by
        a condition of the kind that is wanted.
        """
        if joined([self.kind_of(value), kind]) is self.kind_of(value):
            return value
        row, column = self.row_index(1, 0), self.column_index()
        along = {Kind.ROW: (row, row), Kind.COLUMN: (column, column), Kind.FULL: (row, column)}
        return self.op("select", self.op("le", *along[kind]), value, value)

    def reduce(self, name: str, value: int) -> int:
        """Emit a reduction over columns (`row_sum`) or rows (`column_sum`).

        A value of a lesser kind than FULL is repeated first.
        """
        value = self.widened(value, Kind.FULL)
        kind = Kind.ROW if name in ROW_REDUCTIONS else Kind.COLUMN
        return self._emit(name, (value,), self.dtype_of(value), kind)

    def column_index(self) -> int:
        """Emit the number of the column, an int32."""
        return self._emit("column_index", (), DType.INT32, Kind.COLUMN)

    def row_index(self, every: int, count: int) -> int:
        """Emit (row // every) % count, or row // every where count is 0: an int32."""
        return self._emit("row_index", (), DType.INT32, Kind.ROW, (every, count))

    def check_index(self, value: int, extent: int) -> int:
        """Emit a ROW of integers as it is; the launch fails for one outside of [0, extent).

        It stays in the program whether its result is read or not. A number, as labels of a single
        row are, is a ROW first.
        """
        value = self.widened(value, Kind.ROW)
        dtype, kind = self.dtype_of(value), self.kind_of(value)
        return self._emit("check_index", (value,), dtype, kind, (extent,))

    def philox(self, state: tuple[int, ...], key: int, p: float) -> int:
        """Emit whether dropout keeps an element, see `compiler.contract.program.OTHERS`.

        `state`: seed and step, and perhaps the number of the first element.
        """
        return self._emit("philox", state, DType.BOOL, Kind.FULL, (key, p))

    def random_bits(self, state: tuple[int, ...], key: int) -> int:
        """Emit 24 random bits for each element, an int32."""
        return self._emit("philox", state, DType.INT32, Kind.FULL, (key, 0.0))

    def replay(self, program: FusedProgram, values: tuple[int, ...]) -> tuple[int, ...]:
        """Emit the instructions of a whole program on these inputs; return its outputs.

        Kinds are those of the inputs here, which may be lesser ones than the program's.
        """
        ids = list(values)
        for instruction in program.instructions:
            ids.append(self.repeat(instruction, tuple([ids[v] for v in instruction.operands])))
        return tuple([ids[v] for v in program.outputs])

    def repeat(self, made: Instruction, operands: tuple[int, ...]) -> int:
        """Emit an instruction of another program on operands of this one."""
        if made.op in _REDUCTIONS:
            return self.reduce(made.op, operands[0])
        if made.op == "check_index":
            return self.check_index(operands[0], int(made.constants[0]))
        kind = made.kind  # that of an instruction without operands, and of philox
        if operands and made.op != "philox":
            kinds = [self._values[v].kind for v in operands]
            kind = kinds[0] if len(kinds) == 1 else joined(kinds)
        return self._emit(made.op, operands, made.dtype, kind, made.constants)

    def whole(self, outputs: tuple[int, ...]) -> FusedProgram:
        """Return all that was emitted, needed or not, with its numbers. Inputs came first."""
        inputs = tuple(self._inputs)
        instructions = tuple([v for v in self._values if isinstance(v, Instruction)])
        return FusedProgram(inputs, instructions, outputs)

    def finish(self, outputs: tuple[int, ...]) -> tuple[FusedProgram, tuple[int, ...]]:
        """Return the program of what the outputs need, and which inputs are left, by their order.

        Raises InternalError for an output that is an input: no instruction makes it.
        """
        is_needed = [False] * len(self._values)
        for value in outputs:
            is_needed[value] = True
            if isinstance(self._values[value], ProgramInput):
                raise InternalError(
                    "an output of a fused program is one of its inputs; nothing computes it"
                )
        for value in range(len(self._values) - 1, -1, -1):
            maker = self._values[value]
            if not isinstance(maker, Instruction):
                continue
            is_needed[value] = is_needed[value] or maker.op == "check_index"
            if is_needed[value]:
                for operand in maker.operands:
                    is_needed[operand] = True
        # Inputs first, then instructions as they came.
        ids = [v for v, maker in enumerate(self._values) if isinstance(maker, ProgramInput)]
        places = tuple([place for place, value in enumerate(ids) if is_needed[value]])
        number = {ids[place]: n for n, place in enumerate(places)}
        instructions: list[Instruction] = []
        for value, maker in enumerate(self._values):
            if isinstance(maker, Instruction) and is_needed[value]:
                number[value] = len(number)
                operands = tuple([number[v] for v in maker.operands])
                instructions.append(
                    Instruction(maker.op, operands, maker.dtype, maker.kind, maker.constants)
                )
        inputs = tuple([self._inputs[place] for place in places])
        return FusedProgram(
            inputs, tuple(instructions), tuple([number[v] for v in outputs])
        ), places

    def _emit(
        self,
        op: str,
        operands: tuple[int, ...],
        dtype: DType,
        kind: Kind,
        constants: tuple[int | float, ...] = (),
    ) -> int:
        # 0.0 == -0.0 and 1 == True: the text of a number tells them apart.
        key = (op, operands, id(dtype), repr(constants) if constants else "")
        if key not in self._seen:
            self._seen[key] = len(self._values)
            self._values.append(Instruction(op, operands, dtype, kind, constants))
        return self._seen[key]


# `frame` says how its operands lie around the tensor that it walks over, `expand` emits its
# instructions. The two speak of shapes only: which rows and columns there are is the program's
# choice, and an op whose frame leaves the columns open may become part of one that sees its tensor
# as [rows, columns], as one value per row, per column, or as a scalar.

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class IterationDomain:
    """How the operands of one node lie.

    `shape` is the tensor walked over. Each of `inputs` and `outputs` is the operand's shape with
    such axes of extent 1 put in that numpy's rule stretches it to `shape`. `num_trailing` is how
    many of the last axes make up the columns; None leaves that open. `is_whole` forbids any place
    in a program but that of a FULL value. `write_only` are outputs that no other instruction may
    read.
    """

    shape: Shape
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    num_trailing: int | None = None
    is_whole: bool = False
    write_only: tuple[int, ...] = ()


FrameOf = Callable[[Types, Types, Attrs], IterationDomain | None]
"""The frame of a node from its types, or None where a fused kernel cannot compute it."""

Expand = Callable[[ProgramBuilder, Attrs, Types, tuple[int, ...]], tuple[int, ...]]
"""Emits the instructions of a node, and returns one value per output.

Takes the types of the node's inputs, and the inputs as values in the program, in the same order.
"""


def pointwise_frame(inputs: Types, outputs: Types, attrs: Attrs) -> IterationDomain | None:
    """Return the frame of an op that acts on each element alone, with numpy's broadcasting."""
    return _pointwise(outputs[0].shape, tuple([t.shape for t in inputs]), len(outputs))


@lru_cache(maxsize=4096)  # a graph has few of them, and each is looked at in every pass
def _pointwise(shape: Shape, inputs: tuple[Shape, ...], num_outputs: int) -> IterationDomain:
    return IterationDomain(shape, inputs, (shape,) * num_outputs)


expand = OpAttr[Expand](
    "expand", "the op as instructions of a program; read by fuse, which leaves others alone"
)
has_plugin_kernel = OpAttr[Callable[[KernelCall, int], bool]](
    "has_plugin_kernel",
    "whether a kernel from elsewhere takes a node as it is, on a device; read by fuse",
)
frame = OpAttr[FrameOf](
    "frame", "how operands lie in a program's space; read by fuse", default=pointwise_frame
)
