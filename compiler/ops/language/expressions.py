"""Expressions, by which a program is written as arithmetic; their derivatives and signatures.

    def softsign(x):
        return x / (1 + x.abs())

An `Expression` is a value of something that emits instructions (a `ProgramBuilder`, or a graph
whose ops are named by the same words), so one function over expressions is an op's program, and one
rule of differentiation (`RULES`) serves both. Numbers take the dtype of the expression beside them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NoReturn

from compiler.contract.errors import InternalError
from compiler.contract.program import Kind
from compiler.contract.types import DType, TensorType
from compiler.graph.registry import (
    SIGNED,
    OpTypeError,
    Types,
    broadcast_shape,
    expect_equal_dtypes,
    expect_float,
    expect_integer,
    expect_number,
    expect_type,
)

Number = int | float


def _one(name: str) -> Callable[[Expression], Expression]:
    """Return the method that emits an instruction on one value."""

    def method(self: Expression) -> Expression:
        return Expression(self.emitter, self.emitter.op(name, self.value))

    return method


def _two_ways(
    name: str,
) -> tuple[Callable[[Expression, Operand], Expression], Callable[[Expression, Number], Expression]]:
    """Return the methods that emit an instruction on two values, this one first and last."""
    return (
        lambda self, other: _two(name, self, other),
        lambda self, other: _two(name, other, self),
    )


class Expression:
    """A value under computation. Arithmetic on it emits instructions.

    `shape` is that of the tensor, for operands of an op with rows and columns; () for others.
    """

    __slots__ = ("emitter", "shape", "value")

    def __init__(self, emitter: Any, value: Any, shape: tuple[int, ...] = ()) -> None:
        self.emitter = emitter
        self.value = value
        self.shape = shape

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self.emitter.dtype_of(self.value)  # type: ignore[no-any-return]  # see __init__

    __add__, __radd__ = _two_ways("add")
    __sub__, __rsub__ = _two_ways("sub")
    __mul__, __rmul__ = _two_ways("mul")
    __mod__, _ = _two_ways("mod")
    __floordiv__, _ = _two_ways("floordiv")
    __truediv__, _rdiv = _two_ways("div")
    power, __rpow__ = _two_ways("pow")
    __lt__, _ = _two_ways("lt")
    __le__, _ = _two_ways("le")
    __gt__, _ = _two_ways("gt")
    __ge__, _ = _two_ways("ge")
    __and__, _ = _two_ways("and")
    __or__, _ = _two_ways("or")
    __xor__, _ = _two_ways("xor")
    __lshift__, _ = _two_ways("shl")
    __rshift__, _ = _two_ways("shr")
    atan2, _ = _two_ways("atan2")
    __neg__, __invert__ = _one("neg"), _one("not")
    __abs__ = abs = _one("abs")

    def __rtruediv__(self, other: Number) -> Expression:
        return self.reciprocal() if other == 1 else self._rdiv(other)

    def __pow__(self, other: Operand) -> Expression:
        if isinstance(other, (int, float)) and other in _POWERS:
            return _POWERS[other](self)
        return self.power(other)

    def __eq__(self, other: object) -> Expression:  # type: ignore[override]  # elementwise
        return _two("eq", self, other)

    def __ne__(self, other: object) -> Expression:  # type: ignore[override]  # elementwise
        return _two("ne", self, other)

    __hash__ = None  # type: ignore[assignment]  # equality is an instruction

    def __bool__(self) -> NoReturn:
        raise OpTypeError(
            "needs the truth value of an expression, which has no value while it is traced;"
            " choose with condition.where(a, b)"
        )

    sign = _one("sign")
    """-1, 0 or 1."""
    reciprocal, rsqrt = _one("reciprocal"), _one("rsqrt")
    """1 / x and 1 / sqrt(x)."""
    exp, log, sqrt, tanh, erf = _one("exp"), _one("log"), _one("sqrt"), _one("tanh"), _one("erf")
    erfc, expm1, log1p = _one("erfc"), _one("expm1"), _one("log1p")
    """1 - erf(x), e^x - 1 and log(1 + x), of which no digits are lost."""
    log2, log10 = _one("log2"), _one("log10")
    sin, cos = _one("sin"), _one("cos")
    """Of radians."""
    floor, ceil = _one("floor"), _one("ceil")
    round = _one("round")
    """The nearest whole number, ties to even."""

    def maximum(self, other: Operand) -> Expression:
        """Return the larger of two, NaN where either is; of bools whether either holds."""
        return _two("or" if self.dtype is DType.BOOL else "max", self, other)

    def minimum(self, other: Operand) -> Expression:
        """Return the smaller of two, NaN where either is; of bools whether both hold."""
        return _two("and" if self.dtype is DType.BOOL else "min", self, other)

    def clip(self, low: Operand, high: Operand) -> Expression:
        """Return x between two bounds, NaN as it is."""
        return self.maximum(low).minimum(high)

    def where(self, a: Operand, b: Operand) -> Expression:
        """Return a where this condition holds, else b."""
        if self.dtype is not DType.BOOL:
            raise OpTypeError(f"chooses by a {self.dtype}; compare it first, e.g. x != 0")
        first, second = _paired("where", a, b)
        return Expression(self.emitter, self.emitter.op("select", self.value, first, second))

    def to(self, dtype: DType | str) -> Expression:
        """Return x in another dtype."""
        return Expression(self.emitter, self.emitter.cast(self.value, DType(dtype)))

    def sum(self) -> Expression:
        """Return the sum of each row over its columns."""
        p, kind = self.emitter, self.emitter.kind_of(self.value)
        if kind in (Kind.ROW, Kind.SCALAR):  # as often as there are columns
            return self * int(p.columns)
        return Expression(p, p.reduce("row_sum", self.value))

    def mean(self) -> Expression:
        """Return the mean of each row over its columns."""
        p = self.emitter
        if p.kind_of(self.value) in (Kind.ROW, Kind.SCALAR):
            return self
        return self.sum() * (1.0 / int(p.columns))

    def max(self) -> Expression:
        """Return the largest element of each row, NaN where one is."""
        return self._extreme("row_max")

    def min(self) -> Expression:
        """Return the smallest element of each row, NaN where one is."""
        return self._extreme("row_min")

    def _extreme(self, name: str) -> Expression:
        p = self.emitter
        if p.kind_of(self.value) in (Kind.ROW, Kind.SCALAR):
            return self
        return Expression(p, p.reduce(name, self.value))

    def column_index(self) -> Expression:
        """Return the number of the column, an int32."""
        return Expression(self.emitter, self.emitter.column_index())

    def within(self, extent: int) -> Expression:
        """Return indices as they are; the launch fails for one outside of 0..extent-1."""
        return Expression(self.emitter, self.emitter.check_index(self.value, extent))

    def row_index(self, every: int = 1, count: int = 0) -> Expression:
        """Return (row // every) % count, or row // every where count is 0: an int32."""
        return Expression(self.emitter, self.emitter.row_index(every, count))


Operand = Expression | int | float
"""What arithmetic takes."""

_POWERS: dict[float, Callable[[Expression], Expression]] = {
    1: lambda x: x,
    2: lambda x: x * x,
    3: lambda x: x * x * x,
    0.5: lambda x: _radicand(x).sqrt(),
    -0.5: lambda x: _radicand(x).rsqrt(),
    -1: Expression.reciprocal,
}
"""Powers that have an instruction, or a few, with fewer roundings than `pow` and a hundredth of its
time."""


def _radicand(x: Expression) -> Expression:
    """Return what has x's power for a root: in IEEE 754 those of -inf and -0.0 are positive."""
    return (x == -math.inf).where(math.inf, x) + 0.0


def _two(name: str, a: object, b: object) -> Expression:
    first, second = _paired(name, a, b)
    emitter = a.emitter if isinstance(a, Expression) else b.emitter  # type: ignore[attr-defined]  # one is
    return Expression(emitter, emitter.op(name, first, second))


def _paired(name: str, a: object, b: object) -> tuple[Any, Any]:
    """Return two operands as values of one dtype. Raises OpTypeError for those that have none."""
    a, b = plain(a), plain(b)
    if isinstance(a, Expression) and isinstance(b, Expression):
        if a.emitter is not b.emitter:
            raise OpTypeError(f"has a program that computes {name} with a value of another program")
        if a.dtype is not b.dtype:
            raise OpTypeError(
                f"has a program that computes {name} of {a.dtype} and {b.dtype}; cast one of them"
                " with .to(...)"
            )
        return a.value, b.value
    if isinstance(a, Expression) and isinstance(b, (int, float)):
        return a.value, _number(name, b, a)
    if isinstance(b, Expression) and isinstance(a, (int, float)):
        return _number(name, a, b), b.value
    strange = type(b if isinstance(a, (Expression, int, float)) else a).__name__
    raise OpTypeError(
        f"has a program that computes {name} of a {strange}; it takes expressions and numbers, and"
        " at least one expression"
    )


def plain(operand: Any) -> Any:
    """Return a number of numpy as one of Python."""
    if isinstance(operand, (Expression, int, float)) or not isinstance(operand, Real):
        return operand
    return int(operand) if isinstance(operand, Integral) else float(operand)


def as_expression(operand: Any, beside: Expression) -> Any:
    """Return a number as a constant of the dtype of an expression."""
    number, p = plain(operand), beside.emitter
    if not isinstance(number, (int, float)):
        return operand
    return Expression(p, p.constant_like(number, beside.value))


def _number(name: str, number: float, beside: Expression) -> Any:
    if not beside.dtype.is_float and number != int(number):
        raise OpTypeError(
            f"has a program that computes {name} of {beside.dtype} and {number}; cast the first"
            " with .to('float32')"
        )
    return beside.emitter.constant_like(number, beside.value)


# A rule of differentiation prefers the result over the operand where both serve (exp, sqrt, div):
# operands can die then. None multiplies by 0 what may be infinite: it selects. Formulas: Griewank &
# Walther, Evaluating Derivatives (2008), table 2.3.

Adjoints = tuple[Expression | None, ...]
"""One per operand of an instruction; None where nothing flows."""

Rule = Callable[..., Adjoints]
"""(adjoint, result, *operands) -> adjoints of the operands."""


def _pow(g: Expression, y: Expression, x: Expression, n: Expression) -> Adjoints:
    """0^b counts as constant in b from 0 on, and 0^0 in both; so no NaN arises from 0 * inf."""
    return power_gradient(g, y, x, n), g * ((x == 0) & (n >= 0)).where(0.0, y * x.log())


def power_gradient(g: Expression, y: Expression, x: Expression, n: Expression) -> Expression:
    """Return the adjoint of the base of a power: all there is where the exponent is constant."""
    return (n == 0).where(0.0, g * (n * x.power(n - 1)))


def _extremum(g: Expression, a: Expression, b: Expression, loses: Any, wins: Any) -> Adjoints:
    """Of two that tie each has half; beside NaN neither loses, and both have all, as in torch."""
    share = (a == b).where(g * 0.5, g)
    return loses.where(0.0, share), wins.where(0.0, share)


RULES: dict[str, Rule] = {
    "add": lambda g, y, a, b: (g, g),
    "sub": lambda g, y, a, b: (g, -g),
    "mul": lambda g, y, a, b: (g * b, g * a) if a.value != b.value else (g * 2.0 * a, None),
    # y is divided, not g: with a small b, g / b may be infinite where y is 0.
    "div": lambda g, y, a, b: (g / b, -(g * (y / b))),
    "max": lambda g, y, a, b: _extremum(g, a, b, a < b, a > b),
    "min": lambda g, y, a, b: _extremum(g, a, b, a > b, a < b),
    "pow": _pow,
    "mod": lambda g, y, a, b: (g, -(g * (a / b).floor())),
    "neg": lambda g, y, x: (-g,),
    "abs": lambda g, y, x: ((x == 0).where(0.0, (x < 0).where(-g, g)),),
    "reciprocal": lambda g, y, x: (-(g * (y * y)),),
    "exp": lambda g, y, x: (g * y,),
    "log": lambda g, y, x: (g / x,),
    "sqrt": lambda g, y, x: (g * 0.5 / y,),
    "rsqrt": lambda g, y, x: (g * -0.5 * (y * (y * y)),),
    "tanh": lambda g, y, x: (g * (1 - y * y),),
    "erf": lambda g, y, x: (g * ((-(x * x)).exp() * (2 / math.sqrt(math.pi))),),
    "erfc": lambda g, y, x: (-(g * ((-(x * x)).exp() * (2 / math.sqrt(math.pi)))),),
    "log1p": lambda g, y, x: (g / (x + 1.0),),
    "expm1": lambda g, y, x: (g * (y + 1.0),),
    "log2": lambda g, y, x: (g / (x * math.log(2)),),
    "log10": lambda g, y, x: (g / (x * math.log(10)),),
    "atan2": lambda g, y, a, b: (g * (b / (a * a + b * b)), -(g * (a / (a * a + b * b)))),
    "sin": lambda g, y, x: (g * x.cos(),),
    "cos": lambda g, y, x: (-(g * x.sin()),),
    "select": lambda g, y, c, a, b: (None, c.where(g, 0.0), c.where(0.0, g)),
    "cast": lambda g, y, x: (g.to(x.dtype),),
    "check_index": lambda g, y, x: (g,),
    "row_sum": lambda g, y, x: (g,),
    "column_sum": lambda g, y, x: (g,),
    "row_max": lambda g, y, x: (_shared(g, y, x),),
    "row_min": lambda g, y, x: (_shared(g, y, x),),
}
"""Adjoints of operands. An instruction that is not here (sign, floor, comparisons, ...) is flat."""


def _shared(g: Expression, y: Expression, x: Expression) -> Expression:
    """Give those that tie for a row's extreme equal shares of its adjoint; NaN where it is NaN."""
    is_extreme = x == y
    return is_extreme.where(g / is_extreme.to(x.dtype).sum(), (y == y).where(0.0, y))


# The signature of a fused op, as text: what it reads and makes, and how that lies.
#
#     "x[*, D], gamma[D], beta[D] -> y[*, D], mean[*], rstd[*]"
#     "a: number, b: number -> y"
#     "logits[*, C], labels[*]: int -> loss[*]"
#
# In brackets `*` stands for any leading axes, the rows, and names for the last ones, the columns:
# one name is one extent, and `[]` is a single number. Operands without brackets are elementwise,
# and stretch to one another by numpy's rule. After a colon stands what the elements may be; all
# operands but those of `int` and `bool` are of one dtype, and so are outputs that say nothing.

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
            num_leading = type_.rank - num_named
            if spec.kind in (Kind.FULL, Kind.ROW) and leading is None:
                leading = type_.shape[:num_leading]
            if num_named and named is None:
                named = type_.shape[num_leading:]
        extents = Extents(leading or (), named or ())
        for spec, type_ in zip(self.inputs, inputs, strict=True):
            if spec.kind is None:
                raise InternalError("elementwise operands have no extents")
            expect_type(type_, spec.name, TensorType(type_.dtype, extents.of(spec.kind)))
        if 0 in extents.named and 0 not in extents.leading:
            short = [s.name for s in self.outputs if s.kind in (Kind.ROW, Kind.SCALAR)]
            if short:
                raise OpTypeError(
                    f"needs at least one element along {', '.join(self.axes)} of"
                    f" {self.inputs[0].name}, got {inputs[0]}"
                )
        return extents

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
    elements = {spec.elements for spec in outputs}
    wrong = {
        "gives one name twice": len(set(names)) != len(names),
        "declares the elements of an output: an output has the dtype of the operands, or is bool": (
            not elements <= {"float", "bool"}
        ),
        "has outputs of no dtype: write ': number' of an operand whose dtype they have": (
            "float" in elements and not any(has_dtype)
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
    specs: list[OperandSpec] = []
    for part in re.split(r",(?![^\[]*\])", side):  # commas outside of brackets
        match = _OPERAND.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"signature {text!r} has {part.strip()!r}, which is no operand")
        elements = match["elements"] or "float"
        if elements not in ELEMENTS:
            listed = ", ".join(ELEMENTS)
            raise ValueError(f"signature {text!r} has elements {elements!r}; one of: {listed}")
        specs.append(OperandSpec(match["name"], _kind(match["axes"], axes), elements))
    return specs


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
