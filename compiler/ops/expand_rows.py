"""Reductions, normalisation, softmax and cross entropy as instructions of a group."""

from __future__ import annotations

import math

from compiler.attrs import Attrs
from compiler.fusion.builder import ProgramBuilder
from compiler.fusion.expansion import Frame, Types, expand, frame
from compiler.ops.loss import CROSS_ENTROPY_GRAD
from compiler.ops.loss_rows import CROSS_ENTROPY_ROWS
from compiler.ops.norm import LAYER_NORM, LAYER_NORM_GRAD
from compiler.ops.reduce import MAX, MEAN, SUM, kept_shape, num_reduced
from compiler.ops.softmax import SOFTMAX, SOFTMAX_GRAD
from compiler.types import DType

Values = tuple[int, ...]

MAX_SUMMED_COLUMNS = 1 << 14
"""Sums over rows are kept per chunk of rows; wider ones are left to a kernel that cuts columns."""


@frame.of(MAX)
def _row_frame(inputs: Types, outputs: Types, attrs: Attrs) -> Frame | None:
    """Take reductions of floats over the last axes."""
    (x,) = inputs
    axes = attrs.ints("axes")
    if not x.dtype.is_float or not axes or not _are_last(axes, x.shape):
        return None
    return Frame(x.shape, (x.shape,), (kept_shape(x.shape, axes),), x.rank - axes[0])


@frame.of(SUM, MEAN)
def _sum_frame(inputs: Types, outputs: Types, attrs: Attrs) -> Frame | None:
    """Take sums of floats over the last axes, or over the first, whose result is write_only."""
    (x,) = inputs
    axes = attrs.ints("axes")
    if not x.dtype.is_float or not axes or _are_last(axes, x.shape):
        return _row_frame(inputs, outputs, attrs)
    columns = x.shape[axes[-1] + 1 :]
    is_first = _are_reduced(range(axes[-1] + 1), axes, x.shape)
    if not is_first or math.prod(columns) > MAX_SUMMED_COLUMNS:
        return None
    return Frame(x.shape, (x.shape,), (kept_shape(x.shape, axes),), len(columns), write_only=(0,))


def _are_last(axes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return _are_reduced(range(axes[0], len(shape)), axes, shape)


def _are_reduced(span: range, axes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a reduction leaves nothing of a span of axes."""
    return all([axis in axes or shape[axis] == 1 for axis in span])


@expand.of(MAX)
def _max(p: ProgramBuilder, attrs: Attrs, types: Types, values: Values) -> Values:
    return (p.reduce("row_max", values[0]),)


@expand.of(SUM)
def _sum(p: ProgramBuilder, attrs: Attrs, types: Types, values: Values) -> Values:
    return (p.reduce(_sum_name(attrs, types), values[0]),)


@expand.of(MEAN)
def _mean(p: ProgramBuilder, attrs: Attrs, types: Types, values: Values) -> Values:
    """Scale before a sum over rows, whose result no instruction may read."""
    (x,) = values
    share = p.constant_like(1.0 / num_reduced(attrs, types[0].shape), x)
    if _sum_name(attrs, types) == "row_sum":
        return (p.op("mul", p.reduce("row_sum", x), share),)
    return (p.reduce("column_sum", p.op("mul", x, share)),)


def _sum_name(attrs: Attrs, types: Types) -> str:
    return "row_sum" if _are_last(attrs.ints("axes"), types[0].shape) else "column_sum"


@frame.of(SOFTMAX, SOFTMAX_GRAD)
def _last_axis_frame(inputs: Types, outputs: Types, attrs: Attrs) -> Frame | None:
    shape = outputs[0].shape
    return Frame(shape, (shape,) * len(inputs), (shape,), num_trailing=1)


@expand.of(SOFTMAX)
def _softmax(p: ProgramBuilder, attrs: Attrs, types: Types, values: Values) -> Values:
    (x,) = values
    z = p.op("mul", x, p.constant_like(attrs.float_("scale"), x))
    if attrs.bool_("causal"):
        rows, columns = types[0].shape[-2:]
        row = p.row_index(1, rows)
        last = p.op("add", row, p.constant_like(columns - rows, row))
        is_seen = p.op("le", p.column_index(), last)
        z = p.op("select", is_seen, z, p.constant_like(-math.inf, x))
    e = p.op("exp", p.op("sub", z, p.reduce("row_max", z)))
    return (p.op("div", e, p.reduce("row_sum", e)),)


@expand.of(SOFTMAX_GRAD)
def _softmax_grad(p: ProgramBuilder, attrs: Attrs, types: Types, values: Values) -> Values:
    dy, y = values
    slope = p.op("sub", dy, p.reduce("row_sum", p.op("mul", dy, y)))
    scaled = p.op("mul", y, p.constant_like(attrs.float_("scale"), y))
    return (p.op("mul", scaled, slope),)


@frame.of(LAYER_NORM)
def _layer_norm_frame(inputs: Types, outputs: Types, attrs: Attrs) -> Frame | None:
    x, gamma, beta = [t.shape for t in inputs]
    rows = (*x[:-1], 1)
    return Frame(x, (x, gamma, beta), (x, rows, rows), num_trailing=1)


@expand.of(LAYER_NORM)
def _layer_norm(p: ProgramBuilder, attrs: Attrs, types: Types, values: Values) -> Values:
    """Take the variance of differences to the mean: a second walk in cache, no cancellation."""
    x, gamma, beta = values
    mean = _row_mean(p, x)
    difference = p.op("sub", x, mean)
    variance = _row_mean(p, p.op("mul", difference, difference))
    rstd = p.op("rsqrt", p.op("add", variance, p.constant_like(attrs.float_("eps"), x)))
    normal = p.op("mul", difference, rstd)
    return p.op("add", p.op("mul", normal, gamma), beta), mean, rstd


@frame.of(LAYER_NORM_GRAD)
def _layer_norm_grad_frame(inputs: Types, outputs: Types, attrs: Attrs) -> Frame | None:
    x, gamma = inputs[1].shape, inputs[2].shape
    rows = (*x[:-1], 1)
    if math.prod(x) == x[-1]:
        return None  # one row: nothing to sum, and a vector is no sum's result
    return Frame(x, (x, x, gamma, rows, rows), (x, gamma, gamma), 1, write_only=(1, 2))


@expand.of(LAYER_NORM_GRAD)
def _layer_norm_grad(p: ProgramBuilder, attrs: Attrs, types: Types, values: Values) -> Values:
    dy, x, gamma, mean, rstd = values
    normal = p.op("mul", p.op("sub", x, mean), rstd)
    inner = p.op("mul", dy, gamma)
    constant = _row_mean(p, inner)
    slope = _row_mean(p, p.op("mul", inner, normal))
    rest = p.op("sub", p.op("sub", inner, constant), p.op("mul", normal, slope))
    dgamma = p.reduce("column_sum", p.op("mul", dy, normal))
    return p.op("mul", rstd, rest), dgamma, p.reduce("column_sum", dy)


def _row_mean(p: ProgramBuilder, value: int) -> int:
    return p.op("mul", p.reduce("row_sum", value), p.constant_like(1.0 / p.columns, value))


@frame.of(CROSS_ENTROPY_ROWS)
def _cross_entropy_frame(inputs: Types, outputs: Types, attrs: Attrs) -> Frame | None:
    shape = inputs[0].shape
    rows = (shape[0], 1)
    return Frame(shape, (shape, rows), (rows, rows), num_trailing=1)


@expand.of(CROSS_ENTROPY_ROWS)
def _cross_entropy(p: ProgramBuilder, attrs: Attrs, types: Types, values: Values) -> Values:
    logits, labels = values
    largest = p.reduce("row_max", logits)
    total = p.reduce("row_sum", p.op("exp", p.op("sub", logits, largest)))
    lse = p.op("add", largest, p.op("log", total))
    is_label = _is_label(p, p.check_index(labels, types[0].shape[1]))
    picked = p.reduce("row_sum", p.op("select", is_label, logits, p.constant_like(0, logits)))
    return p.op("sub", lse, picked), lse


@frame.of(CROSS_ENTROPY_GRAD)
def _cross_entropy_grad_frame(inputs: Types, outputs: Types, attrs: Attrs) -> Frame | None:
    shape = outputs[0].shape
    rows = (shape[0], 1)
    return Frame(shape, ((), shape, rows, rows), (shape,), num_trailing=1)


@expand.of(CROSS_ENTROPY_GRAD)
def _cross_entropy_grad(p: ProgramBuilder, attrs: Attrs, types: Types, values: Values) -> Values:
    """Trust the labels: the loss, which made lse, has checked them."""
    dloss, logits, labels, lse = values
    share = p.op("div", dloss, p.constant_like(types[1].shape[0], dloss))
    probability = p.op("exp", p.op("sub", logits, lse))
    one, zero = p.constant_like(1, logits), p.constant_like(0, logits)
    hit = p.op("select", _is_label(p, labels), one, zero)
    return (p.op("mul", p.op("sub", probability, hit), share),)


def _is_label(p: ProgramBuilder, labels: int) -> int:
    return p.op("eq", p.column_index(), p.cast(labels, DType.INT32))
