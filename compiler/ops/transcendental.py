"""Functions of analysis beside exp, log, sin and cos: arcs, hyperbolic functions, near 0 and 1.

Each keeps its digits near 0, near its branch points and where a number in between would overflow;
the forms of the hyperbolic ones are those of Kahan (Branch Cuts for Complex Elementary Functions,
1987, section 4). Gradients are formulas of their own, because a choice between two branches would
multiply 0 by what is infinite in the other one.
"""

from __future__ import annotations

import math

from compiler.fusion.define import fused_op
from compiler.fusion.expressions import Expression

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

ASINH = fused_op("asinh", "x -> y", _asinh, gradient=lambda dy, x: dy * (x * x + 1).rsqrt())

ACOSH = fused_op(
    "acosh",
    "x -> y",
    lambda x: _log_of_sum(x - 1, (x - 1).sqrt() * (x + 1).sqrt()),
    gradient=lambda dy, x: dy / ((x - 1) * (x + 1)).sqrt(),
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
