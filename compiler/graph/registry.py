"""Ops, the typed columns of knowledge about them, and the checks that `infer_type` cells share.

An `Op` is only a name. What is known about it lives in columns (`OpAttr`), each registered from the
file that owns the knowledge, with the column object itself as the key, so that a typo is an
ImportError. A column is declared once, with its meaning, its default and its readers; a second
registration of the same cell raises and names both files. A new op is one new file under
`compiler/ops/families/`, or one in a user's own package: nothing here has to change.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from compiler.contract.attrs import Attrs
from compiler.contract.types import DType, TensorType

T = TypeVar("T")

Types = tuple[TensorType, ...]
"""Types of the inputs or of the outputs of a node."""


class OpTypeError(Exception):
    """Raised by `infer_type` for inputs an op cannot take; the builder adds op and user line."""


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """The identity of an operation; equal to itself alone. Compare with `is` or by name."""

    name: str

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Callable[[str], Op], tuple[str]]:
        return find_op, (self.name,)


_OPS: dict[str, Op] = {}


def define(name: str) -> Op:
    """Create the op `name`. Raises ValueError when the name is taken."""
    if name in _OPS:
        raise ValueError(f"op {name!r} is defined twice")
    op = _OPS[name] = Op(name)
    return op


def free_name(wanted: str) -> str:
    """Return a name that no op has: the one that is wanted, numbered where there is such an op."""
    name, count = wanted, 1
    while name in _OPS:
        count += 1
        name = f"{wanted}#{count}"
    return name


def find_op(name: str) -> Op:
    """Return the op called `name`. Raises KeyError when there is none."""
    return _OPS[name]


def all_ops() -> tuple[Op, ...]:
    """Return every defined op, sorted by name."""
    return tuple(_OPS[name] for name in sorted(_OPS))


class OpAttr(Generic[T]):
    """One column of the table op x knowledge."""

    def __init__(self, name: str, doc: str, default: T | None = None) -> None:
        self.name = name
        self.doc = doc
        self.default = default
        self._cells: dict[str, tuple[T, str]] = {}
        COLUMNS.append(self)

    def register(self, op: Op, fact: T, where: str | None = None) -> T:
        """Fill the cell of `op`; `where` is the file that knows, by default the caller's.

        Raises ValueError when the cell is filled already, naming both files.
        """
        where = where or sys._getframe(1).f_code.co_filename
        if op.name in self._cells:
            first = self._cells[op.name][1]
            raise ValueError(f"{self.name} of {op} is registered twice: in {first} and in {where}")
        self._cells[op.name] = (fact, where)
        return fact

    def of(self, *ops: Op) -> Callable[[T], T]:
        """Return a decorator that registers a function for each of `ops`."""
        where = sys._getframe(1).f_code.co_filename

        def decorate(fact: T) -> T:
            for op in ops:
                self.register(op, fact, where)
            return fact

        return decorate

    def has(self, op: Op) -> bool:
        """Whether the cell of `op` is filled."""
        return op.name in self._cells

    def get(self, op: Op) -> T:
        """Return the fact for `op`, or the default. Raises LookupError when there is neither."""
        cell = self._cells.get(op.name)
        if cell is not None:
            return cell[0]
        if self.default is None:
            raise LookupError(f"op {op} has no {self.name}")
        return self.default

    def where(self, op: Op) -> str:
        """Return the file that filled the cell of `op`. Raises KeyError for an empty one."""
        return self._cells[op.name][1]

    def files(self) -> tuple[str, ...]:
        """Return the files that filled cells and those that hold their functions, sorted."""
        paths: set[str] = set()
        for fact, where in self._cells.values():
            code = getattr(fact, "__code__", None)
            paths.update((where,) if code is None else (where, code.co_filename))
        return tuple(sorted(paths))


COLUMNS: list[OpAttr[Any]] = []


def foreign_files(known: Sequence[Path]) -> tuple[str, ...]:
    """Return the files outside of the `known` folders that fill cells of any column, sorted.

    What is typed at a prompt has a name in angle brackets instead, as in Python's own tracebacks.
    """
    files = {file for column in COLUMNS for file in column.files()}
    return tuple(sorted(f for f in files if not any(Path(f).is_relative_to(k) for k in known)))


InferType = Callable[[Types, Attrs], Types]
"""Types of the outputs from the types of the inputs, and attributes. Raises OpTypeError."""

Reference = Callable[..., tuple[Any, ...]]
"""(attrs, *arrays) -> one new array per output, in any float width; the inputs stay as they are.

Numpy semantics: the oracle and the constant folder.
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one execution: floating point operations and bytes read plus written."""

    flops: float
    bytes: float


CostOf = Callable[[Types, Types, Attrs], Cost]
"""Cost of one execution from the types of inputs and outputs."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a value lies in its storage: byte offset of the first element and byte strides."""

    offset_bytes: int
    strides_bytes: tuple[int, ...]


ViewOf = Callable[[TensorType, Layout, TensorType, Attrs], Layout | None]
"""(input type, its layout, output type) -> the output's layout in the storage of input 0.

None where bytes must be copied.
"""

InsideOf = Callable[[TensorType, Layout, Types, Attrs], tuple[Layout | None, ...]]
"""(output type, its layout, input types) -> one layout per input in the output's storage, or None.

Wherever the output lies, it is nothing but its inputs then.
"""


def _streaming_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    elements = sum(t.num_elements for t in outputs)
    moved_bytes = sum(t.size_bytes for t in inputs) + sum(t.size_bytes for t in outputs)
    return Cost(float(elements), float(moved_bytes))


infer_type = OpAttr[InferType]("infer_type", "output types from input types; read by the builder")
reference = OpAttr[Reference]("reference", "numpy semantics; read by folding, eager mode and tests")
cost = OpAttr[CostOf](
    "cost", "flops and bytes; read by targets and schedulers", default=_streaming_cost
)
view = OpAttr[ViewOf]("view", "output as a view of input 0; read by lowering")
concat_slices = OpAttr[InsideOf](
    "concat_slices",
    "the inputs as slices of the output: who makes them may write them there, and then the op is no"
    " launch; read by lowering",
)
input_output_aliases = OpAttr[tuple[tuple[int, int], ...]](
    "input_output_aliases",
    "pairs (output, input): the output is written over the input's storage, which must be a"
    " variable; of outputs and inputs that may be left out, where a node has them; read by ordering"
    " and lowering",
    default=(),
)
kernel_op = OpAttr[str](
    "kernel_op",
    "what kernels compute it from a program in its attributes; read by targets and proof",
    default="",
)
is_source = OpAttr[bool](
    "is_source", "the op has no inputs and no launch; read by lowering", default=False
)
is_comm = OpAttr[bool](
    "is_comm",
    "the op moves tensors between ranks, in an actor of its own; read by lowering",
    default=False,
)
has_effect = OpAttr[bool](
    "has_effect",
    "the op does something beyond what it makes, and runs though nobody reads that; read by pruning"
    " and rates",
    default=False,
)
recompute = OpAttr[bool](
    "recompute",
    "the op may run again to save the bytes of its outputs: it makes the same bits from the same"
    " inputs; ops that write, and those of is_comm, never do; read by recomputation",
    default=True,
)
is_exact = OpAttr[bool](
    "is_exact",
    "every right kernel gives the bits of the reference: it only moves elements, or rounds one"
    " IEEE operation per element; read by folding",
    default=False,
)


# Checks that `infer_type` functions share. Each raises `OpTypeError` with what was expected, what
# came and how to mend it; the builder puts op, input types and the user's line in front.

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
        required = tuple([row for row in self.operands if not row.optional])
        operands = self.operands if len(inputs) > len(required) else required
        expect_inputs(inputs, *[row.name for row in operands])
        types = dict(_NUMBERS)
        for row, type_ in zip(operands, inputs, strict=True):
            types[row.name] = type_
            if row.elements:
                expect_float((type_,), row.name)
            if row.like:
                shape = () if row.is_number else types[row.like].shape
                expect_type(type_, row.name, TensorType(types[row.like].dtype, shape))
        return tuple([types[name] for name in self.results])


def read_types(text: str) -> TypeSignature:
    """Return a signature in which each operand's type follows from an earlier one's.

        "x: float, factor = x [], times? = int64 -> x"

    `factor` is a number of x's dtype, and `times`, which may be left out, an int64 [].
    """
    operands, results = text.split(" -> ")
    matches = map(_OPERAND.fullmatch, operands.split(", "))
    specs = tuple([TypedOperand(*match.groups()) for match in matches if match])
    return TypeSignature(specs, tuple(results.split(", ")))


def typed(op: Op, text: str, check: Check | None = None) -> None:
    """Register the types of an op by a signature (`read_types`)."""
    signature = read_types(text)

    def infer(inputs: Types, attrs: Attrs) -> Types:
        outputs = signature.infer(inputs)
        if check is not None:
            check(inputs, attrs)
        return outputs

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
