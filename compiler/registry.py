"""Ops and the typed columns of knowledge about them.

An `Op` is only a name. What is known about it lives in columns (`OpAttr`), each registered from the
file that owns the knowledge, with the column object itself as the key, so that a typo is an
ImportError. A column is declared once, here, with its meaning, its default and its readers; a
second registration of the same cell raises and names both files. A new op is one new file under
`compiler/ops/`, or one in a user's own package: nothing here has to change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from compiler.attrs import Attrs
from compiler.types import TensorType

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
        found: set[str] = set()
        for fact, where in self._cells.values():
            code = getattr(fact, "__code__", None)
            found.update((where,) if code is None else (where, code.co_filename))
        return tuple(sorted(found))


COLUMNS: list[OpAttr[Any]] = []


def foreign_files(known: Sequence[Path]) -> tuple[str, ...]:
    """Return the files outside of the `known` folders that fill cells of any column, sorted.

    What is typed at a prompt has a name in angle brackets instead, as in Python's own tracebacks.
    """
    found = {file for column in COLUMNS for file in column.files()}
    return tuple(sorted(f for f in found if not any(Path(f).is_relative_to(k) for k in known)))


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
    moved = sum(t.size_bytes for t in inputs) + sum(t.size_bytes for t in outputs)
    return Cost(float(elements), float(moved))


infer_type = OpAttr[InferType]("infer_type", "output types from input types; read by the builder")
reference = OpAttr[Reference]("reference", "numpy semantics; read by folding, eager mode and tests")
cost = OpAttr[CostOf](
    "cost", "flops and bytes; read by targets and schedulers", default=_streaming_cost
)
view = OpAttr[ViewOf]("view", "output as a view of input 0; read by lowering")
inside = OpAttr[InsideOf](
    "inside",
    "the inputs as slices of the output: who makes them may write them there, and then the op is no"
    " launch; read by lowering",
)
writes = OpAttr[tuple[tuple[int, int], ...]](
    "writes",
    "pairs (output, input): the output is written over the input's storage, which must be a"
    " variable; of outputs and inputs that may be left out, where a node has them; read by ordering"
    " and lowering",
    default=(),
)
runs_as = OpAttr[str](
    "runs_as",
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
