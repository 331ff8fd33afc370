"""Arithmetic and functions of each element alone: of one input, of two, rounding, bits, selection.

Dtypes must be equal; shapes broadcast as in numpy. Each op is its program (`fused_op`), and so has
no kernel of its own.
"""

from __future__ import annotations

import math
import operator

from compiler.contract.types import ValueId
from compiler.graph.columns import Values
from compiler.graph.graph import GraphBuilder, Node, simplify
from compiler.ops.language.define import fused_op
from compiler.ops.language.expressions import Expression
from compiler.ops.primitives.sources import is_scalar_constant, scalar

# Functions of analysis beside exp, log, sin and cos keep their digits near 0, near their branch
# points and where a number in between would overflow; the forms of the hyperbolic ones are those of
# Kahan (Branch Cuts for Complex Elementary Functions, 1987, section 4). Gradients are formulas of
# their own, because a choice between two branches would multiply 0 by what is infinite in the other
# one.

LOG1P = fused_op("log1p", "x -> y", Expression.log1p)

EXPM1 = fused_op("expm1", "x -> y", Expression.expm1)

LOG2 = fused_op("log2", "x -> y", Expression.log2)

LOG10 = fused_op("log10", "x -> y", Expression.log10)

EXP2 = fused_op("exp2", "x -> y", lambda x: 2.0**x, gradient=lambda dy, y: dy * y * math.log(2))

ERF = fused_op("erf", "x -> y", Expression.erf)

ERFC = fused_op("erfc", "x -> y", Expression.erfc)


def _atan2_gradient(dy: Expression, a: Expression, b: Expression) -> tuple[Expression, Expression]:
    """Divide by the larger side first: squares of small and of large numbers do not exist.

    The slope at the origin is 0, as in torch.
    """
    large = abs(a).maximum(abs(b))
    p, q = a / large, b / large
    share = dy / (p * p + q * q)
    is_plain = (large > 0) & (large < math.inf)
    return (
        is_plain.where(q * share / large, 0.0 * dy),
        is_plain.where(-p * share / large, 0.0 * dy),
    )


ATAN2 = fused_op("atan2", "a, b -> y", Expression.atan2, gradient=_atan2_gradient)
"""The angle of the point (b, a), from -pi to pi."""


def _root(x: Expression) -> Expression:
    """Return sqrt(1 - x^2), also where x is near 1."""
    return ((1 - x) * (1 + x)).sqrt()


ASIN = fused_op("asin", "x -> y", lambda x: x.atan2(_root(x)), gradient=lambda dy, x: dy / _root(x))

ACOS = fused_op(
    "acos",
    "x -> y",
    lambda x: (1 - x).sqrt().atan2((1 + x).sqrt()) * 2.0,
    gradient=lambda dy, x: -(dy / _root(x)),
)

ATAN = fused_op("atan", "x -> y", lambda x: x.atan2(1.0), gradient=lambda dy, x: dy / (x * x + 1.0))

TAN = fused_op(
    "tan", "x -> y", lambda x: x.sin() / x.cos(), gradient=lambda dy, y: dy * (y * y + 1.0)
)

_LARGE = 20.0
"""From here on e^-2x is nothing beside 1."""


def _odd(x: Expression, of_positive: Expression) -> Expression:
    return (x < 0).where(-of_positive, of_positive)


def _half_of_exp(x: Expression) -> Expression:
    """Return e^x / 2, also where e^x overflows."""
    root = (x * 0.5).exp()
    return root * 0.5 * root


def _sinh(x: Expression) -> Expression:
    size = abs(x)
    m = size.expm1()
    return _odd(x, (size > _LARGE).where(_half_of_exp(size), (m + m / (m + 1)) * 0.5))


def _cosh(x: Expression) -> Expression:
    half = _half_of_exp(abs(x))
    return half + 0.25 / half


def _asinh(x: Expression) -> Expression:
    size = abs(x)
    inverse = 1 / size
    return _odd(x, _log_of_sum(size, size / (inverse + (inverse * inverse + 1).sqrt())))


def _log_of_sum(a: Expression, b: Expression) -> Expression:
    """Return log(1 + a + b); the sum of two large ones may be beyond what there is."""
    quarter = a * 0.25 + b * 0.25
    return (a > 1).where((quarter + 0.25).log() + 2 * math.log(2), (a + b).log1p())


def _atanh(x: Expression) -> Expression:
    size = abs(x)
    return _odd(x, (2.0 * size / (1 - size)).log1p() * 0.5)


SINH = fused_op("sinh", "x -> y", _sinh, gradient=lambda dy, x: dy * _cosh(x))

COSH = fused_op("cosh", "x -> y", _cosh, gradient=lambda dy, x: dy * _sinh(x))

ASINH = fused_op("asinh", "x -> y", _asinh, gradient=lambda dy, x: dy / _hypot(x, x.clip(1, 1)))

ACOSH = fused_op(
    "acosh",
    "x -> y",
    lambda x: _log_of_sum(x - 1, (x - 1).sqrt() * (x + 1).sqrt()),
    gradient=lambda dy, x: dy / (abs(x) > 1e9).where(abs(x), ((x - 1) * (x + 1)).sqrt()),
)

ATANH = fused_op("atanh", "x -> y", _atanh, gradient=lambda dy, x: dy / ((1 - x) * (1 + x)))


def _hypot(a: Expression, b: Expression) -> Expression:
    large, small = abs(a).maximum(abs(b)), abs(a).minimum(abs(b))
    share = small / large
    is_plain = (large > 0) & (large < math.inf)
    is_infinite = (abs(a) == math.inf) | (abs(b) == math.inf)  # beside NaN, too: IEEE 754
    return is_infinite.where(math.inf, is_plain.where(large * (share * share + 1).sqrt(), large))


def _hypot_gradient(
    dy: Expression, a: Expression, b: Expression, y: Expression
) -> tuple[Expression, Expression]:
    return dy * (y > 0).where(a / y, 0.0), dy * (y > 0).where(b / y, 0.0)


HYPOT = fused_op("hypot", "a, b -> y", _hypot, gradient=_hypot_gradient)
"""sqrt(a^2 + b^2), where the squares overflow, too. The gradient at the origin is 0."""


def _logaddexp(a: Expression, b: Expression) -> Expression:
    return (a == b).where(a + math.log(2), a.maximum(b) + (-abs(a - b)).exp().log1p())


LOGADDEXP = fused_op(
    "logaddexp",
    "a, b -> y",
    _logaddexp,
    gradient=lambda dy, a, b: (dy / (1 + (b - a).exp()), dy / (1 + (a - b).exp())),
)


def _lerp(start: Expression, end: Expression, weight: Expression) -> Expression:
    way = end - start
    return (abs(weight) < 0.5).where(start + weight * way, end - way * (1 - weight))


LERP = fused_op("lerp", "start, end, weight -> y", _lerp)
"""start + weight (end - start), taken from the nearer end."""


# Ops of one input.

NEG = fused_op("neg", "x: signed -> y", lambda x: -x)

ABS = fused_op("abs", "x: signed -> y", abs)
"""The gradient at 0 is 0."""

SQUARE = fused_op("square", "x: signed -> y", lambda x: x * x)

EXP = fused_op("exp", "x -> y", Expression.exp)

LOG = fused_op("log", "x -> y", Expression.log)
"""-inf at 0, NaN below."""

SQRT = fused_op("sqrt", "x -> y", Expression.sqrt)
"""NaN below 0."""

RSQRT = fused_op("rsqrt", "x -> y", Expression.rsqrt)

RECIPROCAL = fused_op("reciprocal", "x -> y", Expression.reciprocal)

SIN = fused_op("sin", "x -> y", Expression.sin)

COS = fused_op("cos", "x -> y", Expression.cos)


@simplify.of(NEG)
def _simplify_neg(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    before = b.producer_of(inputs[0])
    return before.inputs if before.op is NEG else None


@simplify.of(ABS, SQUARE)
def _simplify_even(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    """An even function does not see the sign."""
    before = b.producer_of(inputs[0])
    return b.emit(node.op, before.inputs) if before.op in (NEG, ABS) else None


# Arithmetic and comparison of two inputs, and selection.

NUMBERS = "a: number, b: number -> y"
ANY = "a: any, b: any -> y"
COMPARED = "a: any, b: any -> y: bool"

ADD = fused_op("add", NUMBERS, operator.add)

SUB = fused_op("sub", NUMBERS, operator.sub)

MUL = fused_op("mul", NUMBERS, operator.mul)

DIV = fused_op("div", "a, b -> y", operator.truediv)
"""Division by zero gives inf or NaN."""

POW = fused_op("pow", "a, b -> y", operator.pow)
"""NaN for negative a and fractional b."""

MAXIMUM = fused_op("maximum", ANY, Expression.maximum)
"""The larger, NaN where either is (bool: or). Ties share the gradient."""

MINIMUM = fused_op("minimum", ANY, Expression.minimum)
"""The smaller, NaN where either is (bool: and). Ties share the gradient."""

EQUAL = fused_op("equal", COMPARED, operator.eq)

NOT_EQUAL = fused_op("not_equal", COMPARED, operator.ne)

LESS = fused_op("less", COMPARED, operator.lt)

LESS_EQUAL = fused_op("less_equal", COMPARED, operator.le)

GREATER = fused_op("greater", COMPARED, operator.gt)

GREATER_EQUAL = fused_op("greater_equal", COMPARED, operator.ge)

WHERE = fused_op("where", "condition: bool, a: any, b: any -> y", Expression.where)
"""a where the condition holds, else b. All three broadcast."""


def scaled(b: GraphBuilder, value: ValueId, factor: float) -> ValueId:
    """Emit `value` times a number."""
    return b.emit_one(MUL, value, scalar(b, factor, b.type_of(value).dtype))


@simplify.of(ADD)
def _simplify_add(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    x, y = inputs
    # -0.0 is the neutral element of float addition: x + 0.0 would turn a -0.0 into 0.0.
    zero = -0.0 if b.type_of(x).dtype.is_float else 0
    for term, other in ((x, y), (y, x)):
        if _is_neutral(b, term, other, zero):
            return (term,)
        negated = b.producer_of(other)
        if negated.op is NEG:
            return (b.emit_one(SUB, term, negated.inputs[0]),)
    return None


@simplify.of(SUB)
def _simplify_sub(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    x, y = inputs
    if _is_neutral(b, x, y, 0.0):
        return (x,)
    negated = b.producer_of(y)
    return (b.emit_one(ADD, x, negated.inputs[0]),) if negated.op is NEG else None


@simplify.of(MUL)
def _simplify_mul(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    x, y = inputs
    if _is_neutral(b, x, y, 1.0):
        return (x,)
    return (y,) if _is_neutral(b, y, x, 1.0) else None


@simplify.of(DIV)
def _simplify_div(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    return inputs[:1] if _is_neutral(b, inputs[0], inputs[1], 1.0) else None


@simplify.of(POW)
def _simplify_pow(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    x, exponent = inputs
    if _is_neutral(b, x, exponent, 1.0):
        return (x,)
    if _is_neutral(b, x, exponent, 2.0):
        return (b.emit_one(SQUARE, x),)
    return None


def _is_neutral(b: GraphBuilder, kept: ValueId, other: ValueId, number: float) -> bool:
    """Whether `other` is this constant and the result has the shape of `kept`."""
    if not is_scalar_constant(b, other, number):
        return False
    return b.type_of(other).rank <= b.type_of(kept).rank


# Rounding, remainders, quotients of integers, bits, and bounds.

ONE, TWO = "x: number -> y", "a: number, b: number -> y"

SIGN = fused_op("sign", ONE, lambda x: (x > 0).to(x.dtype) - (x < 0).to(x.dtype))
"""-1, 0 or 1; 0 for NaN, as torch has it."""

FLOOR = fused_op("floor", ONE, Expression.floor)

CEIL = fused_op("ceil", ONE, Expression.ceil)

ROUND = fused_op("round", ONE, Expression.round)
"""To the nearest, ties to even."""

TRUNC = fused_op("trunc", ONE, lambda x: (x < 0).where(x.ceil(), x.floor()))

REMAINDER = fused_op("remainder", TWO, operator.mod)
"""With the sign of the divisor, as Python has it; of integers by 0: 0."""


def _fmod(a: Expression, b: Expression) -> Expression:
    """An integer's absolute value may overflow, a float's difference may round."""
    if a.dtype.is_float:
        size = abs(a) % abs(b)
        return (a < 0).where(-size, size)
    remainder = a % b
    return ((remainder != 0) & ((a < 0) != (b < 0))).where(remainder - b, remainder)


FMOD = fused_op(
    "fmod",
    TWO,
    _fmod,
    gradient=lambda dy, a, b: (dy, -(dy * (a / b < 0).where((a / b).ceil(), (a / b).floor()))),
)
"""The remainder with the sign of the dividend, as C has it."""


def _floor_divide(a: Expression, b: Expression) -> Expression:
    """Of floats: what is left of a, but for the remainder, is a multiple of b."""
    if not a.dtype.is_float:
        return a // b
    remainder = _fmod(a, b)
    is_below = (remainder != 0) & ((remainder < 0) != (b < 0))
    return (b == 0).where(a / b, ((a - remainder) / b).round() - is_below.to(a.dtype))


FLOOR_DIVIDE = fused_op("floor_divide", TWO, _floor_divide)
"""Rounded down; of integers by 0: 0."""

BITWISE_AND = fused_op("bitwise_and", "a: bits, b: bits -> y", operator.and_)

BITWISE_OR = fused_op("bitwise_or", "a: bits, b: bits -> y", operator.or_)

BITWISE_XOR = fused_op("bitwise_xor", "a: bits, b: bits -> y", operator.xor)

BITWISE_NOT = fused_op("bitwise_not", "x: bits -> y", operator.invert)

SHIFT_LEFT = fused_op("shift_left", "a: whole, b: whole -> y", operator.lshift)

SHIFT_RIGHT = fused_op("shift_right", "a: whole, b: whole -> y", operator.rshift)


def _clamp(x: Expression, low: Expression, high: Expression) -> Expression:
    return x.maximum(low).minimum(high)


def _clamp_gradient(
    dy: Expression, x: Expression, low: Expression, high: Expression
) -> tuple[Expression, ...]:
    """As torch has it: all of it to x at a bound, and to `high` where the bounds are crossed."""
    is_over, is_under = (x > high) | (low > high), x < low
    return (
        ((x >= low) & (x <= high)).where(dy, 0.0),
        (is_under & (low < high)).where(dy, 0.0),
        is_over.where(dy, 0.0),
    )


CLAMP = fused_op(
    "clamp", "x: number, low: number, high: number -> y", _clamp, gradient=_clamp_gradient
)
"""x between two bounds; `high` where they are crossed."""
