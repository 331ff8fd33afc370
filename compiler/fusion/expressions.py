"""Expressions: what a program computes, written as arithmetic.

    def softsign(x):
        return x / (1 + x.abs())

An `Expression` is a value of something that emits instructions (a `ProgramBuilder`, or a graph
whose ops are named by the same words), so one function over expressions is an op's program, and one
rule of differentiation serves both. Numbers take the dtype of the expression beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, NoReturn

from compiler.fusion.program import Kind
from compiler.registry import OpTypeError
from compiler.types import DType

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
            "asks for the truth of an expression, which has no number yet; choose with"
            " condition.where(a, b)"
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
    0.5: Expression.sqrt,
    -0.5: Expression.rsqrt,
    -1: Expression.reciprocal,
}
"""Powers that have an instruction, or two, with fewer roundings than `pow` and a hundredth of its
time."""


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
