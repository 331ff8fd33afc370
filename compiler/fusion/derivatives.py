"""How each instruction of a program is differentiated: one rule for programs and graphs alike.

A rule prefers the result over the operand where both serve (exp, sqrt, div): operands can die then.
None multiplies by 0 what may be infinite: it selects. Formulas: Griewank & Walther, Evaluating
Derivatives (2008), table 2.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from compiler.fusion.expressions import Expression

Adjoints = tuple[Expression | None, ...]
"""One per operand of an instruction; None where nothing flows."""

Rule = Callable[..., Adjoints]
"""(adjoint, result, *operands) -> adjoints of the operands."""


def _pow(g: Expression, y: Expression, x: Expression, n: Expression) -> Adjoints:
    """0^0 counts as constant in both arguments, as does 0^b in b; so no NaN arises from 0 * inf."""
    return power_gradient(g, y, x, n), g * (x == 0).where(0.0, y * x.log())


def power_gradient(g: Expression, y: Expression, x: Expression, n: Expression) -> Expression:
    """Return the adjoint of the base of a power: all there is where the exponent is constant."""
    return (n == 0).where(0.0, g * (n * x.power(n - 1)))


def _extremum(g: Expression, a: Expression, b: Expression, wins: Any, loses: Any) -> Adjoints:
    share = (a == b).where(g * 0.5, g)
    return wins.where(share, 0.0), loses.where(share, 0.0)


RULES: dict[str, Rule] = {
    "add": lambda g, y, a, b: (g, g),
    "sub": lambda g, y, a, b: (g, -g),
    "mul": lambda g, y, a, b: (g * b, g * a) if a.value != b.value else (g * 2.0 * a, None),
    # y is divided, not g: with a small b, g / b may be infinite where y is 0.
    "div": lambda g, y, a, b: (g / b, -(g * (y / b))),
    "max": lambda g, y, a, b: _extremum(g, a, b, a >= b, a <= b),
    "min": lambda g, y, a, b: _extremum(g, a, b, a <= b, a >= b),
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
    """Give those that tie for a row's extreme equal shares of its adjoint."""
    is_extreme = x == y
    return is_extreme.where(g / is_extreme.to(x.dtype).sum(), 0.0)
