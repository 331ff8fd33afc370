"""How one call of a fused op lies: its operands and outputs as values of a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from compiler.attrs import Attrs
from compiler.fusion.builder import ProgramBuilder
from compiler.fusion.expressions import Expression, filled
from compiler.fusion.notation import Extents, Signature
from compiler.fusion.program import Kind, ProgramInput
from compiler.ops.signature import Types
from compiler.registry import Op, OpTypeError
from compiler.types import DType


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
    def op(self) -> Op:
        """The op itself."""
        ...

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
    wide = made if p.kind_of(made.value) is kind else _spread(made, kind)
    if isinstance(p.made_by(wide.value), ProgramInput):  # a copy: the larger of x and x
        return p.op("or" if wide.dtype is DType.BOOL else "max", wide.value, wide.value)
    return wide.value  # type: ignore[no-any-return]  # a value of p


def _spread(made: Expression, kind: Kind) -> Expression:
    found = made.emitter.kind_of(made.value)
    if kind is Kind.FULL:
        return filled(made)
    if found is Kind.SCALAR:
        index = made.row_index() if kind is Kind.ROW else made.column_index()
        return (index >= index).where(made, made)
    if made.emitter.rows == 1 and kind is Kind.COLUMN:
        return made  # in one row whatever has columns is a column
    raise OpTypeError(
        f"has a program with a result for each {_EACH[found]} where its signature has one for each"
        f" {_EACH[kind]}; reduce it over the columns, e.g. with .mean()"
    )


_EACH = {Kind.FULL: "element", Kind.ROW: "row", Kind.COLUMN: "column", Kind.SCALAR: "call"}
