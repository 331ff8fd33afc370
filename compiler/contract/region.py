"""A region: a wide value that exists some rows at a time, and all that makes and reads it.

    wide = x @ w; losses, dwide = program(wide, labels); dx = dwide @ w; dw = dwide^T @ x
    wide = x @ w; h = program(wide, bias)

A region has `rows` rows. Per chunk of `chunk_rows` of them its steps run in order: products that
make wide rows, fused programs over these, products that consume them. Values are numbered: inputs,
then those held inside, then outputs. An input or an output lies by rows (a row of it belongs to a
row of the region), is read whole by every chunk (a weight), or is added up over the chunks (its
gradient): which one follows from the steps alone.

With `chunk_rows` 0 a kernel cuts as suits it: into pieces for threads, such as stay in cache. Then
no step adds up over rows; what a program sums over all of them it sums itself.

Nothing of it says what is computed: the loss of a language model is one instance.

It is part of the plan (attributes of a launch), which may come from a file: `check_region` holds it
to its rules before a kernel trusts it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from compiler.contract.codec import Bounds, PlanAttribute, register_attribute
from compiler.contract.program import FusedProgram, Kind, Place, ProgramError, check_program
from compiler.contract.types import HALVES, DType, TensorType

Types = tuple[TensorType, ...]

_Count = Annotated[int, Bounds(1, 1 << 48)]
_CountOrNone = Annotated[int, Bounds(0, 1 << 48)]

OF_WHOLE_ROWS = ("column_sum", "row_index", "philox")
"""Instructions that look beyond the rows of a chunk: a program has them where a kernel cuts."""


class TileStepKind(Enum):
    """What a step does with the chunk's rows r of its operands."""

    PRODUCT = "product"
    """(a by rows [rows, k], b whole [k, n]) -> [rows, n]: made[r] = a[r] @ b."""
    SUM_OF_PRODUCTS = "sum_of_products"
    """(a by rows [rows, m], b by rows [rows, n]) -> [m, n]: made += a[r]^T @ b[r]."""
    COLUMN_SUM = "column_sum"
    """(a by rows [rows, columns]) -> [columns]: made += the sum of a[r] over its rows."""
    PROGRAM = "program"
    """The operands of the program -> its outputs, on the rows r."""


PRODUCTS = (TileStepKind.PRODUCT, TileStepKind.SUM_OF_PRODUCTS)


@dataclass(frozen=True, slots=True)
class TileStep:
    """One step: the values it reads and makes, and its program if it is one."""

    kind: TileStepKind
    reads: tuple[Place, ...]
    makes: tuple[Place, ...]
    program: FusedProgram | None = None


@dataclass(frozen=True, slots=True)
class TileValue:
    """A value inside: FULL, of a chunk's rows and all columns; or ROW, one element for each row."""

    dtype: DType
    kind: Kind


@register_attribute("region")
@dataclass(frozen=True, slots=True, eq=False)
class TiledLoop(PlanAttribute):
    """Steps over chunks of rows; see the module's docstring."""

    rows: _Count
    columns: _Count
    chunk_rows: _CountOrNone
    num_inputs: Place
    held: tuple[TileValue, ...]
    outputs: tuple[TensorType, ...]
    steps: tuple[TileStep, ...]

    @property
    def first_output(self) -> int:
        """The number of output 0."""
        return self.num_inputs + len(self.held)

    def held_at(self, value: int) -> TileValue | None:
        """Return the value inside that has a number; None for an input or an output."""
        inside = self.num_inputs <= value < self.first_output
        return self.held[value - self.num_inputs] if inside else None

    def is_wide(self, value: int) -> bool:
        """Whether a value exists by the chunk."""
        tile = self.held_at(value)
        return tile is not None and tile.kind is Kind.FULL

    def chunks(self) -> list[tuple[int, int]]:
        """Return the first row of every chunk, and the row behind its last."""
        # 0: all rows at once.
        step = self.chunk_rows or self.rows
        return [(row, min(row + step, self.rows)) for row in range(0, self.rows, step)]

    def looks_at_all_rows(self) -> bool:
        """Whether a program needs more of its operands than the rows of a chunk."""
        programs = [step.program for step in self.steps if step.program is not None]
        return any([not _is_by_rows(program, self.rows) for program in programs])

    def num_reads(self, value: int) -> int:
        """Return how many operands of steps a value is."""
        return sum([step.reads.count(value) for step in self.steps])

    def last_reads(self) -> dict[int, int]:
        """Return the last step that reads each value."""
        # Later steps write over earlier ones.
        return {v: index for index, step in enumerate(self.steps) for v in step.reads}


def check_region(region: TiledLoop, inputs: Types) -> None:
    """Check a region on operands of these types. Raises ProgramError."""
    if len(inputs) != region.num_inputs:
        raise ProgramError(f"a region of {region.num_inputs} operands, called with {len(inputs)}")
    if region.chunk_rows > region.rows:
        raise ProgramError(f"chunks of {region.chunk_rows} rows, of {region.rows}")
    if any([tile.kind not in (Kind.FULL, Kind.ROW) for tile in region.held]):
        raise ProgramError("a value inside of a region is neither full nor of rows")
    checker = _Checker(region, inputs)
    for number, step in enumerate(region.steps):
        try:
            checker.check(step)
        except ProgramError as error:
            raise ProgramError(f"step {number} of the region, {step.kind.value}: {error}") from None
    missing = set(range(region.num_inputs, checker.num_values)) - checker.made
    if missing:
        raise ProgramError(f"value {min(missing)} of the region is made by no step")


class _Checker:
    """The rules, step by step; `made` are values that exist, `sums` those not complete yet."""

    def __init__(self, region: TiledLoop, inputs: Types) -> None:
        self.region, self.inputs = region, inputs
        self.num_values = region.first_output + len(region.outputs)
        self.made = set(range(region.num_inputs))
        self.sums: set[int] = set()

    def check(self, step: TileStep) -> None:
        # A sum over chunks is complete after the last one, so no step of the loop may read it.
        for value in step.reads:
            _expect(value in self.made and value not in self.sums, f"value {value} to read")
        for value in step.makes:
            is_own = self.region.num_inputs <= value < self.num_values
            _expect(is_own and value not in self.made, f"value {value} not to be made before")
            self.made.add(value)
        if step.kind is TileStepKind.PROGRAM:
            self._check_program(step)
            return
        counts = {TileStepKind.COLUMN_SUM: 1}
        _expect(len(step.reads) == counts.get(step.kind, 2), "another number of operands")
        _expect(len(step.makes) == 1 and step.program is None, "one result, and no program")
        if step.kind is TileStepKind.PRODUCT:
            self._check_product(step)
        else:
            _expect(self.region.chunk_rows > 0, "chunks to add up")
            self._check_sum(step)
            self.sums.update(step.makes)

    def _check_product(self, step: TileStep) -> None:
        a, b = step.reads
        rows, inner = self._matrix(a)
        _expect(b < self.region.num_inputs, "a second operand from outside")
        depth, columns = self._matrix(b)
        _expect(rows == self.region.rows and inner == depth, "matrices that fit")
        self._expect_made(step.makes[0], self.region.rows, columns)
        self._expect_dtypes(step)

    def _check_sum(self, step: TileStep) -> None:
        extents = [self._matrix(v) for v in step.reads]
        _expect(all([n == self.region.rows for n, _ in extents]), "operands by rows")
        # A held value exists by the chunk; a sum outlives the chunks.
        _expect(not self.region.held_at(step.makes[0]), "a result that is an output")
        size = math.prod([columns for _, columns in extents])
        _expect(self._type_of(step.makes[0]).num_elements == size, f"{size} elements to add to")
        self._expect_dtypes(step)

    def _expect_dtypes(self, step: TileStep) -> None:
        dtypes = {self._dtype(v) for v in step.reads}
        dtype = self._dtype(step.makes[0])
        # Halves may be multiplied, or added up, into float32.
        is_upcast = dtypes in [{half} for half in HALVES] and dtype is DType.FLOAT32
        _expect(dtype.is_float and (dtypes == {dtype} or is_upcast), "floats of one type")

    def _check_program(self, step: TileStep) -> None:
        program, region = step.program, self.region
        if program is None:
            raise ProgramError("needs a program")
        check_program(program)
        is_cut = region.chunk_rows > 0
        _expect(not is_cut or _is_by_rows(program, region.rows), "instructions of single rows")
        _expect(len(step.reads) == len(program.inputs), "an operand for each of the program's")
        for entry, value in zip(program.inputs, step.reads, strict=True):
            self._expect_operand(value, entry.dtype, entry.kind, entry.count)
        _expect(len(step.makes) == len(program.outputs), "a value for each output")
        for number, value in zip(program.outputs, step.makes, strict=True):
            kind = program.kind_of(number)
            _expect(not is_cut or kind in (Kind.FULL, Kind.ROW), "outputs by rows")
            self._expect_operand(value, program.dtype_of(number), kind)

    def _expect_operand(self, value: int, dtype: DType, kind: Kind, count: int = 0) -> None:
        region, tile = self.region, self.region.held_at(value)
        _expect(self._dtype(value) is dtype, f"value {value} to be of {dtype}")
        if tile is not None:
            is_so = tile.kind is kind and count in (0, region.rows)
        else:
            rows, columns = count or region.rows, region.columns
            sizes = {Kind.FULL: rows * columns, Kind.ROW: rows, Kind.COLUMN: columns}
            is_so = self._type_of(value).num_elements == sizes.get(kind, 1)
        _expect(is_so, f"value {value} to be {kind.value}")

    def _expect_made(self, value: int, rows: int, columns: int) -> None:
        tile = self.region.held_at(value)
        if tile is not None:
            is_so = tile.kind is Kind.FULL and columns == self.region.columns
        else:
            is_so = self._type_of(value).num_elements == rows * columns
        _expect(is_so, f"a result of {rows} rows and {columns} columns")

    def _matrix(self, value: int) -> tuple[int, int]:
        if self.region.held_at(value) is not None:
            _expect(self.region.is_wide(value), f"value {value} to be full")
            return self.region.rows, self.region.columns
        _expect(value < self.region.num_inputs, f"value {value} to be no output")
        shape = self.inputs[value].shape
        _expect(len(shape) == 2, f"value {value} to be a matrix")
        return shape[0], shape[1]

    def _type_of(self, value: int) -> TensorType:
        if value < self.region.num_inputs:
            return self.inputs[value]
        return self.region.outputs[value - self.region.first_output]

    def _dtype(self, value: int) -> DType:
        tile = self.region.held_at(value)
        return self._type_of(value).dtype if tile is None else tile.dtype


def _is_by_rows(program: FusedProgram, rows: int) -> bool:
    """Whether a program can work on some of the rows alone."""
    is_plain = all([e.every == 1 and e.count in (0, rows) for e in program.inputs])
    return is_plain and not any([i.op in OF_WHOLE_ROWS for i in program.instructions])


def _expect(is_so: bool, wanted: str) -> None:
    if not is_so:
        raise ProgramError(f"needs {wanted}")
