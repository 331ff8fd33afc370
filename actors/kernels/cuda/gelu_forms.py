"""GELU and its gradient in a fused program, found in the form in which the compiler states them.

gelu(x) = max(x, -30) g(c) with c = clip(x, -30, 30) and g(c) = 1 / (1 + e^-2u), which is
(1 + tanh u) / 2 of u = sqrt(2 / pi) (c + 0.044715 c^3): the tanh form, as the library has it. The
bounds change no result: there the gate is 0 or 1. Only for |x| beyond 1e19, where the library's
slope may be NaN, ours is 0 or 1.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

from compiler.fusion.program import FusedProgram

_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715 * _SLOPE
_BOUND = 30.0

_Form = float | str | tuple["_Form", ...]
"""A constant, a value by a name, or an op with its operands."""

_CLIPPED: _Form = ("min", ("max", "x", -_BOUND), _BOUND)
_SQUARE: _Form = ("mul", _CLIPPED, _CLIPPED)
_TWICE_U: _Form = ("mul", _CLIPPED, ("add", ("mul", _SQUARE, _CUBIC), _SLOPE))
_GATE: _Form = ("reciprocal", ("add", 1.0, ("exp", ("neg", _TWICE_U))))
_GELU: _Form = ("mul", ("max", "x", -_BOUND), _GATE)
_CHANGE: _Form = ("mul", _CLIPPED, ("add", ("mul", _SQUARE, 3.0 * _CUBIC), _SLOPE))
_GRADIENT: _Form = (
    "mul",
    "dy",
    ("add", _GATE, ("mul", ("mul", _GATE, ("sub", 1.0, _GATE)), _CHANGE)),
)
_COMMUTATIVE = ("add", "mul", "max", "min")


@dataclass(frozen=True, slots=True)
class GeluGradient:
    """dy gelu'(x), by the values dy and x."""

    dy: int
    x: int


@functools.lru_cache(maxsize=512)
def gelu_operand(program: FusedProgram, value: int) -> int | None:
    """Return the x of which a value is the GELU; None where it is none."""
    found = _named(program, value, _GELU, {})
    return None if found is None else found["x"]


@functools.lru_cache(maxsize=512)
def gelu_gradient(program: FusedProgram, value: int) -> GeluGradient | None:
    """Return what a value is the gradient of GELU of; None where it is none."""
    found = _named(program, value, _GRADIENT, {})
    return None if found is None else GeluGradient(found["dy"], found["x"])


def _named(
    program: FusedProgram, value: int, form: _Form, named: dict[str, int]
) -> dict[str, int] | None:
    """Return the values that names of a form stand for where a value has it, beside `named`."""
    if isinstance(form, str):
        return named | {form: value} if named.get(form, value) == value else None
    own = value - len(program.inputs)
    if own < 0:
        return None
    instruction = program.instructions[own]
    if isinstance(form, float):
        is_it = instruction.op == "constant" and math.isclose(instruction.constants[0], form)
        return named if is_it else None
    op, *parts = form
    if instruction.op != op or len(instruction.operands) != len(parts):
        return None
    operands = instruction.operands
    for order in itertools.permutations(operands) if op in _COMMUTATIVE else (operands,):
        found: dict[str, int] | None = named
        for operand, part in zip(order, parts, strict=True):
            found = None if found is None else _named(program, operand, part, found)
        if found is not None:
            return found
    return None
