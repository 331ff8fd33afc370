"""Checks that `infer_type` functions share: number of inputs, dtypes, broadcasting.

Each raises `OpTypeError` with what was expected, what came and how to mend it; the builder puts op,
input types and the user's line in front.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from compiler.attrs import Attrs
from compiler.registry import Op, OpTypeError, infer_type
from compiler.registry import Types as Types
from compiler.types import DType, TensorType

Array = np.ndarray[Any, np.dtype[Any]]
"""What references take and return; dtype and rank are the op's business."""

Check = Callable[[Types, Attrs], None]
"""What a signature cannot say; raises OpTypeError."""

SIGNED = (DType.INT8, DType.INT16, DType.INT32, DType.INT64)


_NUMBERS = {d.value: TensorType(d, ()) for d in (DType.INT64, DType.FLOAT64)}
"""Types that a signature calls by their names."""

_OPERAND = re.compile(r"(\w+)(\??)(?:: (float)| = (\w+)( \[\])?)?")


class TypedOperand(NamedTuple):
    """An operand as a signature has it; "" or None stands for what it does not say."""

    name: str
    optional: str
    elements: str | None
    like: str | None
    brackets: str | None

    @property
    def is_number(self) -> bool:
        """Whether it is a tensor without axes, whatever the others are."""
        return self.brackets is not None or self.like in _NUMBERS


@dataclass(frozen=True, slots=True)
class TypeSignature:
    """Operands, and the names of those whose types the outputs have."""

    operands: tuple[TypedOperand, ...]
    results: tuple[str, ...]

    def infer(self, inputs: Types) -> Types:
        """Return the types of the outputs. Raises OpTypeError for inputs it cannot take."""
        needed = tuple([row for row in self.operands if not row.optional])
        given = self.operands if len(inputs) > len(needed) else needed
        expect_inputs(inputs, *[row.name for row in given])
        known = dict(_NUMBERS)
        for row, type_ in zip(given, inputs, strict=True):
            known[row.name] = type_
            if row.elements:
                expect_float((type_,), row.name)
            if row.like:
                shape = () if row.is_number else known[row.like].shape
                expect_type(type_, row.name, TensorType(known[row.like].dtype, shape))
        return tuple([known[name] for name in self.results])


def read_types(text: str) -> TypeSignature:
    """Return a signature in which each operand's type follows from an earlier one's.

        "x: float, factor = x [], times? = int64 -> x"

    `factor` is a number of x's dtype, and `times`, which may be left out, an int64 [].
    """
    operands, results = text.split(" -> ")
    matches = map(_OPERAND.fullmatch, operands.split(", "))
    found = tuple([TypedOperand(*match.groups()) for match in matches if match])
    return TypeSignature(found, tuple(results.split(", ")))


def typed(op: Op, text: str, check: Check | None = None) -> None:
    """Register the types of an op by a signature (`read_types`)."""
    signature = read_types(text)

    def infer(inputs: Types, attrs: Attrs) -> Types:
        made = signature.infer(inputs)
        if check is not None:
            check(inputs, attrs)
        return made

    infer_type.register(op, infer, sys._getframe(1).f_code.co_filename)


def expect_inputs(inputs: Types, *names: str) -> Types:
    """Return `inputs` when there is one for each name."""
    if len(inputs) != len(names):
        listed = ", ".join(names) or "none"
        raise OpTypeError(f"expects {_count(len(names))} ({listed}), got {len(inputs)}")
    return inputs


def expect_float(inputs: Types, *names: str) -> None:
    """Check that each input of a name is of a float dtype."""
    for type_, name in zip(inputs, names, strict=False):
        if not type_.dtype.is_float:
            raise OpTypeError(
                f"needs {name} of a float dtype, got {type_.dtype}; cast it with .to('float32')"
            )


def expect_integer(type_: TensorType, name: str) -> None:
    """Check that an input can index an axis."""
    if not type_.dtype.is_integer:
        raise OpTypeError(
            f"needs {name} of an integer dtype, got {type_.dtype}; cast it with .to('int64')"
        )


def expect_number(type_: TensorType, name: str) -> None:
    """Check that an input is not bool."""
    if type_.dtype is DType.BOOL:
        raise OpTypeError(f"needs numbers for {name}, got bool; cast it with .to('int64')")


def expect_type(type_: TensorType, name: str, expected: TensorType) -> None:
    """Check that an input has exactly this dtype and shape."""
    if type_ != expected:
        raise OpTypeError(f"needs {name} of type {expected}, got {type_}")


def expect_equal_dtypes(inputs: Types) -> DType:
    """Return the one dtype of the inputs; nothing is promoted silently."""
    dtypes = list(dict.fromkeys(t.dtype for t in inputs))
    if len(dtypes) != 1:
        raise OpTypeError(
            f"needs equal dtypes, got {' and '.join(map(str, dtypes))};"
            " cast one of them with .to(...)"
        )
    return dtypes[0]


def expect_axes(axes: tuple[int, ...], rank: int) -> None:
    """Check that axes are sorted, different and inside a rank."""
    if any(not 0 <= axis < rank for axis in axes):
        listed = ", ".join(map(str, axes))
        raise OpTypeError(f"has axes ({listed}) outside 0..{rank - 1} of an input of rank {rank}")
    if list(axes) != sorted(set(axes)):
        raise OpTypeError(f"needs each axis once and in ascending order, got {axes}")


def broadcast_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the common shape: aligned at the last axis, extents of 1 stretch (numpy's rule)."""
    if all(shape == shapes[0] for shape in shapes):
        return shapes[0]
    rank = max(len(shape) for shape in shapes)
    result: list[int] = []
    for back in range(rank, 0, -1):
        extents = [shape[-back] for shape in shapes if len(shape) >= back]
        wide = dict.fromkeys(extent for extent in extents if extent != 1)
        if len(wide) > 1:
            listed = " and ".join(str(list(shape)) for shape in shapes)
            raise OpTypeError(
                f"cannot broadcast shapes {listed}: axis {-back} has extents"
                f" {' and '.join(map(str, wide))}; equal extents or 1 are needed"
            )
        result.append(next(iter(wide), 1))
    return tuple(result)


def _count(number: int) -> str:
    return "1 input" if number == 1 else f"{number} inputs"
