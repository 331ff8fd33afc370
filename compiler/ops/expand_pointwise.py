"""Ops that act on each element alone, as instructions of a group.

Formulas are those of the references but for gelu, which is written with 1 / (1 + e^-2u) in place of
(1 + tanh u) / 2: the same number, without the cancellation near -1, and one instruction less.
Apart from the ops' own files as the formulas are in terms of one another.
"""

from __future__ import annotations

import math

from compiler.attrs import Attrs
from compiler.fusion.builder import ProgramBuilder
from compiler.fusion.expansion import Expand, Frame, Types, expand, frame, pointwise_frame
from compiler.ops import activation, binary, elementwise
from compiler.ops.random import DROPOUT
from compiler.types import DType

Values = tuple[int, ...]

_DIRECT = {
    elementwise.NEG: "neg",
    elementwise.ABS: "abs",
    elementwise.EXP: "exp",
    elementwise.LOG: "log",
    elementwise.SQRT: "sqrt",
    elementwise.RSQRT: "rsqrt",
    elementwise.RECIPROCAL: "reciprocal",
    elementwise.SIN: "sin",
    elementwise.COS: "cos",
    activation.TANH: "tanh",
    binary.ADD: "add",
    binary.SUB: "sub",
    binary.MUL: "mul",
    binary.DIV: "div",
    binary.POW: "pow",
    binary.EQUAL: "eq",
    binary.NOT_EQUAL: "ne",
    binary.LESS: "lt",
    binary.LESS_EQUAL: "le",
    binary.GREATER: "gt",
    binary.GREATER_EQUAL: "ge",
    binary.WHERE: "select",
}
"""Ops that are one instruction of the same operands."""


def _one(name: str) -> Expand:
    def emit(p: ProgramBuilder, attrs: Attrs, types: Types, values: Values) -> Values:
        return (p.op(name, *values),)

    return emit


for _op, _name in _DIRECT.items():
    expand.register(_op, _one(_name))


def _extremum(of_numbers: str, of_bools: str) -> Expand:
    def emit(p: ProgramBuilder, attrs: Attrs, types: Types, values: Values) -> Values:
        is_bool = types[0].dtype is DType.BOOL
        return (p.op(of_bools if is_bool else of_numbers, *values),)

    return emit


expand.register(binary.MAXIMUM, _extremum("max", "or"))
expand.register(binary.MINIMUM, _extremum("min", "and"))


@expand.of(elementwise.SQUARE)
def _square(p: ProgramBuilder, attrs: Attrs, types: Types, values: Values) -> Values:
    (x,) = values
    return (p.op("mul", x, x),)


@frame.of(elementwise.CAST)
def _cast_frame(inputs: Types, outputs: Types, attrs: Attrs) -> Frame | None:
    """Leave what is no conversion, and those to bool and from floats to integers, to numpy.

    What becomes of a float beyond an integer's range is the machine's choice.
    """
    before, after = inputs[0].dtype, outputs[0].dtype
    if before is after or after is DType.BOOL or (before.is_float and not after.is_float):
        return None
    return pointwise_frame(inputs, outputs, attrs)


@expand.of(elementwise.CAST)
def _cast(p: ProgramBuilder, attrs: Attrs, types: Types, values: Values) -> Values:
    return (p.cast(values[0], DType(attrs.str_("dtype"))),)


@expand.of(activation.RELU)
def _relu(p: ProgramBuilder, attrs: Attrs, types: Types, values: Values) -> Values:
    (x,) = values
    return (p.op("max", x, p.constant_like(0, x)),)


@expand.of(activation.SIGMOID)
def _sigmoid(p: ProgramBuilder, attrs: Attrs, types: Types, values: Values) -> Values:
    return (_sigmoid_of(p, values[0]),)


@expand.of(activation.SILU)
def _silu(p: ProgramBuilder, attrs: Attrs, types: Types, values: Values) -> Values:
    return (_silu_of(p, values[0]),)


@expand.of(activation.GELU)
def _gelu(p: ProgramBuilder, attrs: Attrs, types: Types, values: Values) -> Values:
    return (_gelu_of(p, values[0]),)


@expand.of(activation.TANH_GRAD)
def _tanh_grad(p: ProgramBuilder, attrs: Attrs, types: Types, values: Values) -> Values:
    dy, y = values
    return (p.op("mul", dy, p.op("sub", p.constant_like(1, y), p.op("mul", y, y))),)


@expand.of(activation.SIGMOID_GRAD)
def _sigmoid_grad(p: ProgramBuilder, attrs: Attrs, types: Types, values: Values) -> Values:
    dy, y = values
    return (p.op("mul", p.op("mul", dy, y), p.op("sub", p.constant_like(1, y), y)),)


@expand.of(activation.RELU_GRAD)
def _relu_grad(p: ProgramBuilder, attrs: Attrs, types: Types, values: Values) -> Values:
    dy, y = values
    zero = p.constant_like(0, dy)
    return (p.op("select", p.op("gt", y, zero), dy, zero),)


@expand.of(activation.SILU_GRAD)
def _silu_grad(p: ProgramBuilder, attrs: Attrs, types: Types, values: Values) -> Values:
    return (_silu_grad_of(p, *values),)


@expand.of(activation.SILU_GRAD_OUTPUT)
def _silu_grad_output(p: ProgramBuilder, attrs: Attrs, types: Types, values: Values) -> Values:
    dy, x = values
    return _silu_grad_of(p, dy, x), _silu_of(p, x)


@expand.of(activation.GELU_GRAD)
def _gelu_grad(p: ProgramBuilder, attrs: Attrs, types: Types, values: Values) -> Values:
    return (_gelu_grad_of(p, *values),)


@expand.of(activation.GELU_GRAD_OUTPUT)
def _gelu_grad_output(p: ProgramBuilder, attrs: Attrs, types: Types, values: Values) -> Values:
    dy, x = values
    return _gelu_grad_of(p, dy, x), _gelu_of(p, x)


@frame.of(DROPOUT)
def _dropout_frame(inputs: Types, outputs: Types, attrs: Attrs) -> Frame | None:
    """A mask belongs to the row-major index of an element, so x must be FULL.

    One element is left to numpy: seed and step have as many, and would be read as FULL too.
    """
    shape = outputs[0].shape
    if math.prod(shape) == 1:
        return None
    return Frame(shape, (shape, (), ()), (shape,), is_whole=True)


@expand.of(DROPOUT)
def _dropout(p: ProgramBuilder, attrs: Attrs, types: Types, values: Values) -> Values:
    """Multiply, so that NaN stays NaN where the mask drops it, as in the reference."""
    x, seed, step = values
    rate = attrs.float_("p")
    kept = p.philox(seed, step, attrs.int_("key"), rate)
    factor = p.op("select", kept, p.constant_like(1 / (1 - rate), x), p.constant_like(0, x))
    return (p.op("mul", x, factor),)


def _sigmoid_of(p: ProgramBuilder, x: int) -> int:
    """Emit 1 / (1 + e^-x): where e^-x overflows the result is 0, which is right to the last bit."""
    return p.op("reciprocal", p.op("add", p.constant_like(1, x), p.op("exp", p.op("neg", x))))


def _silu_of(p: ProgramBuilder, x: int) -> int:
    low = p.op("max", x, p.constant_like(-activation.SILU_BOUND, x))
    return p.op("mul", low, _sigmoid_of(p, low))


def _silu_grad_of(p: ProgramBuilder, dy: int, x: int) -> int:
    x = _bounded(p, x, activation.SILU_BOUND)
    s, one = _sigmoid_of(p, x), p.constant_like(1, x)
    slope = p.op("add", one, p.op("mul", x, p.op("sub", one, s)))
    return p.op("mul", p.op("mul", dy, s), slope)


def _bounded(p: ProgramBuilder, x: int, bound: float) -> int:
    """Emit x between -bound and bound, NaN as it is."""
    low = p.op("max", x, p.constant_like(-bound, x))
    return p.op("min", low, p.constant_like(bound, x))


_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715


def _gelu_gate(p: ProgramBuilder, x: int) -> tuple[int, int]:
    """Emit s = 1 / (1 + e^-v) with v = x (slope + slope cubic x^2), and x^2."""
    squared = p.op("mul", x, x)
    factor = p.op(
        "add",
        p.op("mul", squared, p.constant_like(_SLOPE * _CUBIC, x)),
        p.constant_like(_SLOPE, x),
    )
    return _sigmoid_of(p, p.op("mul", x, factor)), squared


def _gelu_of(p: ProgramBuilder, x: int) -> int:
    bounded = _bounded(p, x, activation.GELU_BOUND)
    low = p.op("max", x, p.constant_like(-activation.GELU_BOUND, x))
    return p.op("mul", low, _gelu_gate(p, bounded)[0])


def _gelu_grad_of(p: ProgramBuilder, dy: int, x: int) -> int:
    """Emit dy (s + x s (1 - s) v') with v' = slope + 3 slope cubic x^2."""
    x = _bounded(p, x, activation.GELU_BOUND)
    s, squared = _gelu_gate(p, x)
    change = p.op(
        "add",
        p.op("mul", squared, p.constant_like(3 * _SLOPE * _CUBIC, x)),
        p.constant_like(_SLOPE, x),
    )
    bend = p.op(
        "mul", p.op("mul", s, p.op("sub", p.constant_like(1, x), s)), p.op("mul", x, change)
    )
    return p.op("mul", dy, p.op("add", s, bend))
