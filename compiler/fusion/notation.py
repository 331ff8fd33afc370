"""The signature of a fused op, as text: what it reads and makes, and how that lies.

    "x[*, D], gamma[D], beta[D] -> y[*, D], mean[*], rstd[*]"
    "a: number, b: number -> y"
    "logits[*, C], labels[*]: int -> loss[*]"

In brackets `*` stands for any leading axes, the rows, and names for the last ones, the columns: one
name is one extent, and `[]` is a single number. Operands without brackets are elementwise, and
stretch to one another by numpy's rule. After a colon stands what the elements may be; all operands
but those of `int` and `bool` are of one dtype, and so are outputs that say nothing.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from compiler.errors import InternalError
from compiler.fusion.program import Kind
from compiler.ops.signature import (
    SIGNED,
    broadcast_shape,
    expect_equal_dtypes,
    expect_float,
    expect_integer,
    expect_number,
    expect_type,
)
from compiler.registry import OpTypeError, Types
from compiler.types import DType, TensorType

Shape = tuple[int, ...]

ELEMENTS = ("float", "signed", "number", "any", "whole", "bits", "int", "bool")
"""What operands may hold: floats, those and signed integers, anything but bool, anything, integers,
those and bool; and, with a dtype of its own, integers or bool."""

_OPERAND = re.compile(r"(?P<name>[A-Za-z_]\w*)\s*(?P<axes>\[[^\]]*\])?\s*(:\s*(?P<elements>\w+))?")


@dataclass(frozen=True, slots=True)
class OperandSpec:
    """One operand or output; `kind` is None for an elementwise one."""

    name: str
    kind: Kind | None
    elements: str


@dataclass(frozen=True, slots=True)
class Extents:
    """The leading and the named extents of one call."""

    leading: Shape
    named: Shape

    @property
    def shape(self) -> Shape:
        """The tensor walked over."""
        return self.leading + self.named

    @property
    def rows(self) -> int:
        """How many rows."""
        return math.prod(self.leading)

    @property
    def columns(self) -> int:
        """How many columns."""
        return math.prod(self.named)

    def of(self, kind: Kind) -> Shape:
        """Return the shape of an operand."""
        leading = self.leading if kind in (Kind.FULL, Kind.ROW) else ()
        return leading + (self.named if kind in (Kind.FULL, Kind.COLUMN) else ())

    def stretchable(self, kind: Kind) -> Shape:
        """Return the shape with such axes of 1 that numpy's rule stretches it to `shape`."""
        is_row = kind is Kind.ROW
        return self.of(kind) + ((1,) * len(self.named) if is_row else ())


@dataclass(frozen=True, slots=True)
class Signature:
    """The operands and outputs of an op; `axes` are the names of its columns."""

    inputs: tuple[OperandSpec, ...]
    outputs: tuple[OperandSpec, ...]
    axes: tuple[str, ...]

    @property
    def is_elementwise(self) -> bool:
        """Whether every element is computed alone."""
        return self.outputs[0].kind is None

    def dtype_of(self, inputs: Types) -> DType:
        """Return the common dtype. Raises OpTypeError where an operand's is none it may have."""
        pairs = tuple(zip(self.inputs, inputs, strict=True))
        for spec, type_ in pairs:
            if spec.elements == "int":
                expect_integer(type_, spec.name)
            if spec.elements == "bool" and type_.dtype is not DType.BOOL:
                raise OpTypeError(
                    f"needs a bool {spec.name}, got {type_.dtype}; compare it first, e.g."
                    f" {spec.name} != 0"
                )
        common = [(s, t) for s, t in pairs if s.elements not in ("int", "bool")]
        if not common:
            return DType.BOOL
        dtype = expect_equal_dtypes(tuple([t for _, t in common]))
        elements, first = common[0][0].elements, common[0][1]
        if elements == "float":
            expect_float((first,), common[0][0].name)
        elif elements == "number":
            expect_number(first, " and ".join([s.name for s, _ in common]))
        elif elements in ("whole", "bits") and not dtype.is_integer:
            if elements == "whole" or dtype is not DType.BOOL:
                or_bools = " or bools" if elements == "bits" else ""
                raise OpTypeError(f"needs integers{or_bools}, got {dtype}; cast with .to('int64')")
        elif elements == "signed" and not dtype.is_float and dtype not in SIGNED:
            raise OpTypeError(
                f"needs floats or signed integers, got {dtype}; cast it with .to('int64')"
            )
        return dtype

    def extents_of(self, inputs: Types) -> Extents:
        """Return the extents of a call. Raises OpTypeError for shapes that do not agree."""
        leading: Shape | None = None
        named: Shape | None = None
        for spec, type_ in zip(self.inputs, inputs, strict=True):
            num_named = len(self.axes) if spec.kind in (Kind.FULL, Kind.COLUMN) else 0
            if type_.rank < num_named:
                raise OpTypeError(f"needs {spec.name} of rank {num_named} or more, got {type_}")
            cut = type_.rank - num_named
            if spec.kind in (Kind.FULL, Kind.ROW) and leading is None:
                leading = type_.shape[:cut]
            if num_named and named is None:
                named = type_.shape[cut:]
        found = Extents(leading or (), named or ())
        for spec, type_ in zip(self.inputs, inputs, strict=True):
            if spec.kind is None:
                raise InternalError("elementwise operands have no extents")
            expect_type(type_, spec.name, TensorType(type_.dtype, found.of(spec.kind)))
        if 0 in found.named and 0 not in found.leading:
            short = [s.name for s in self.outputs if s.kind in (Kind.ROW, Kind.SCALAR)]
            if short:
                raise OpTypeError(
                    f"needs at least one element along {', '.join(self.axes)} of"
                    f" {self.inputs[0].name}, got {inputs[0]}"
                )
        return found

    def types_of(self, inputs: Types) -> Types:
        """Return the types of the outputs. Raises OpTypeError for inputs it cannot take."""
        dtype = self.dtype_of(inputs)
        dtypes = [DType.BOOL if spec.elements == "bool" else dtype for spec in self.outputs]
        if self.is_elementwise:
            shapes = [broadcast_shape(*[t.shape for t in inputs])] * len(dtypes)
        else:
            extents = self.extents_of(inputs)
            shapes = [extents.of(spec.kind) for spec in self.outputs if spec.kind is not None]
        return tuple(map(TensorType, dtypes, shapes))


def read_signature(text: str) -> Signature:
    """Return the signature in a text. Raises ValueError saying what is wrong with it."""
    sides = text.split("->")
    if len(sides) != 2:
        raise ValueError(f"signature {text!r} needs one '->' between operands and outputs")
    axes: list[tuple[str, ...]] = []
    inputs, outputs = [tuple(_specs(text, side, axes)) for side in sides]
    names = [spec.name for spec in (*inputs, *outputs)]
    kinds = [spec.kind for spec in (*inputs, *outputs)]
    has_dtype = [spec.elements not in ("int", "bool") for spec in inputs]
    made = {spec.elements for spec in outputs}
    wrong = {
        "gives one name twice": len(set(names)) != len(names),
        "says of an output what it holds: it has the operands' dtype, or is bool": (
            not made <= {"float", "bool"}
        ),
        "has outputs of no dtype: write ': number' of an operand whose dtype they have": (
            "float" in made and not any(has_dtype)
        ),
        "needs brackets on all operands and outputs, or none": len({k is None for k in kinds}) > 1,
        "names different columns; an op has one set of them, on every operand that has columns": (
            len(set(axes)) > 1
        ),
        "has no columns; leave the brackets out": kinds[0] is not None and not axes,
    }
    for message, is_so in wrong.items():
        if is_so:
            raise ValueError(f"signature {text!r} {message}")
    return Signature(inputs, outputs, axes[0] if axes else ())


def _specs(text: str, side: str, axes: list[tuple[str, ...]]) -> list[OperandSpec]:
    found: list[OperandSpec] = []
    for part in re.split(r",(?![^\[]*\])", side):  # commas outside of brackets
        match = _OPERAND.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"signature {text!r} has {part.strip()!r}, which is no operand")
        elements = match["elements"] or "float"
        if elements not in ELEMENTS:
            known = ", ".join(ELEMENTS)
            raise ValueError(f"signature {text!r} has elements {elements!r}; one of: {known}")
        found.append(OperandSpec(match["name"], _kind(match["axes"], axes), elements))
    return found


def _kind(brackets: str | None, axes: list[tuple[str, ...]]) -> Kind | None:
    if brackets is None:
        return None
    names = [name.strip() for name in brackets[1:-1].split(",") if name.strip()]
    has_rows = names[:1] == ["*"]
    columns = tuple(names[has_rows:])
    if columns:
        axes.append(columns)
    if has_rows:
        return Kind.FULL if columns else Kind.ROW
    return Kind.COLUMN if columns else Kind.SCALAR
