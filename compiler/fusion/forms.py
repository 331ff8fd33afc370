"""How one call of a fused op lies, and the columns of the registry that follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from compiler.attrs import Attrs
from compiler.errors import InternalError
from compiler.fusion import expansion
from compiler.fusion.builder import ProgramBuilder
from compiler.fusion.expressions import Expression
from compiler.fusion.interpreter import evaluate
from compiler.fusion.notation import Extents, Signature
from compiler.fusion.program import FusedProgram, Kind, ProgramInput, joined
from compiler.fusion.spaces import Space
from compiler.fusion.stated import remembered
from compiler.ops.fused import program_flops
from compiler.ops.signature import Array, Types
from compiler.registry import Cost, Op, OpTypeError, cost, reference
from compiler.types import DType, TensorType, numpy_dtype


@dataclass(frozen=True, slots=True)
class Slot:
    """An operand or output of one call: how it lies in the program, and its dtype."""

    name: str
    kind: Kind
    dtype: DType


@dataclass(frozen=True, slots=True)
class Form:
    """One call of a fused op: its operands and outputs, and where they lie.

    `extents` is None for an elementwise op, whose slots are all FULL.
    """

    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    extents: Extents | None

    def builder(self) -> ProgramBuilder:
        """Return an empty program in the form's space."""
        e = self.extents
        return ProgramBuilder(1, 1) if e is None else ProgramBuilder(e.rows, e.columns)


class Fused(Protocol):
    """A fused op that was written down or derived."""

    @property
    def signature(self) -> Signature:
        """What the op, or what it was derived from, reads and makes."""
        ...

    def __hash__(self) -> int:
        """Definitions are equal to themselves alone."""
        ...

    def form(self, inputs: Types, attrs: Attrs) -> Form:
        """Return how the operands of a call lie."""
        ...

    def emit(
        self, p: ProgramBuilder, attrs: Attrs, extents: Extents | None, values: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Emit the program on values; return one value per output."""
        ...


def output_of(p: ProgramBuilder, made: Any, kind: Kind) -> int:
    """Return a result as a value of a kind that an instruction makes."""
    if not isinstance(made, Expression):
        raise OpTypeError(f"has a program that returns a {type(made).__name__}, no expression")
    value, found = made.value, p.kind_of(made.value)
    if kind is Kind.FULL or found is Kind.SCALAR:
        value = p.widened(value, kind)
    # In one row whatever has columns is a column.
    elif found is not kind and not (p.rows == 1 and kind is Kind.COLUMN):
        is_row = kind is Kind.ROW
        mend = "reduce it over the columns, e.g. with .mean()" if is_row else "sum rows outside"
        raise OpTypeError(
            f"has a program with a result for each {_EACH[found]} where its signature has one for"
            f" each {_EACH[kind]}; {mend}"
        )
    if p.is_input(value):  # a copy: the larger of x and x
        return p.op("or" if made.dtype is DType.BOOL else "max", value, value)
    return int(value)


_EACH = {Kind.FULL: "element", Kind.ROW: "row", Kind.COLUMN: "column", Kind.SCALAR: "call"}


def register_program(op: Op, found: Fused, where: str) -> None:
    """Fill the columns that follow from `found.form` and `found.emit`."""
    is_elementwise = found.signature.is_elementwise

    def expand(
        p: ProgramBuilder, attrs: Attrs, types: Types, values: tuple[int, ...]
    ) -> tuple[int, ...]:
        made = p.replay(trace(found, types, attrs), values)
        if not is_elementwise:
            return made
        wide = joined([p.kind_of(v) for v in values])  # a lesser value where an operand is unused
        return tuple(
            [
                v
                if p.kind_of(v) is wide and not p.is_input(v)
                else output_of(p, Expression(p, v), wide)
                for v in made
            ]
        )

    @lru_cache(maxsize=512)  # asked again and again, in every pass
    def frame(inputs: Types, outputs: Types, attrs: Attrs) -> expansion.Frame | None:
        return _frame_of(found.form(inputs, attrs))

    def run(attrs: Attrs, *arrays: Array) -> tuple[Array, ...]:
        attrs = Attrs(attrs)  # whoever asks for a reference by hand may have a dict
        given = [np.asarray(a) for a in arrays]
        types = tuple([TensorType(DType(str(a.dtype)), a.shape) for a in given])
        form = found.form(types, attrs)
        made = _interpret(form, trace(found, types, attrs), [_widened(a) for a in given])
        return tuple(
            [a.astype(numpy_dtype(s.dtype)) for a, s in zip(made, form.outputs, strict=True)]
        )

    def work(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        e = found.form(inputs, attrs).extents
        elements = Space(1, max([t.num_elements for t in outputs]))
        space = elements if e is None else Space(e.rows, e.columns)
        moved = sum([t.size_bytes for t in (*inputs, *outputs)])
        return Cost(program_flops(trace(found, inputs, attrs), space), float(moved))

    expansion.expand.register(op, expand, where)
    if not is_elementwise:
        expansion.frame.register(op, frame, where)
    reference.register(op, run, where)
    cost.register(op, work, where)


def _widened(array: Array) -> Array:
    """Return float16 as float32: a sum of its largest numbers is none of its own."""
    return array.astype(np.float32) if array.dtype == np.float16 else array


def _frame_of(form: Form) -> expansion.Frame | None:
    """Return how the operands of a call with rows and columns lie."""
    e = form.extents
    if e is None:
        raise InternalError("elementwise ops have the pointwise frame")
    sums = [i for i, slot in enumerate(form.outputs) if slot.kind is Kind.COLUMN and e.rows != 1]
    outputs = [
        e.shape if slot.kind is Kind.COLUMN and e.rows == 1 else e.stretchable(slot.kind)
        for slot in form.outputs
    ]
    return expansion.Frame(
        e.shape,
        tuple([e.stretchable(slot.kind) for slot in form.inputs]),
        tuple(outputs),
        num_trailing=len(e.named),
        write_only=tuple(sums),
    )


def _interpret(form: Form, program: FusedProgram, arrays: list[Array]) -> tuple[Array, ...]:
    """Follow a program in numpy, in the width of the arrays."""
    e = form.extents
    if e is None:
        shape = np.broadcast_shapes(*[a.shape for a in arrays])
        arrays = [np.broadcast_to(a, shape) for a in arrays]
        made = evaluate(program, Space(1, math.prod(shape)), tuple(arrays))
        return tuple([array.reshape(shape) for array in made])
    if 0 in e.shape:  # of empty rows nothing is summed, and no rows have no largest element
        return tuple([np.zeros(e.of(slot.kind), arrays[0].dtype) for slot in form.outputs])
    made = evaluate(program, Space(e.rows, e.columns), tuple(arrays))
    return tuple([a.reshape(e.of(s.kind)) for a, s in zip(made, form.outputs, strict=True)])


def trace(found: Fused, inputs: Types, attrs: Attrs) -> FusedProgram:
    """Return the program of one call; the same one again for a call like it."""
    if found.signature.is_elementwise:  # one for all shapes
        return _traced_elementwise(found, tuple([t.dtype for t in inputs]), attrs)
    return _traced(found, inputs, attrs)


@remembered(4096)
def _traced_elementwise(found: Fused, dtypes: tuple[DType, ...], attrs: Attrs) -> FusedProgram:
    return _traced(found, tuple([TensorType(dtype, ()) for dtype in dtypes]), attrs)


@remembered(4096)
def _traced(found: Fused, inputs: Types, attrs: Attrs) -> FusedProgram:
    form = found.form(inputs, attrs)
    p = form.builder()
    values = tuple([p.input(ProgramInput(slot.dtype, slot.kind)) for slot in form.inputs])
    return p.whole(found.emit(p, attrs, form.extents, values))
