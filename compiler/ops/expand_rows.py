"""Cross entropy as instructions of a group."""

from __future__ import annotations

from compiler.attrs import Attrs
from compiler.fusion.builder import ProgramBuilder
from compiler.fusion.expansion import Frame, Types, expand, frame
from compiler.ops.loss import CROSS_ENTROPY_GRAD
from compiler.ops.loss_rows import CROSS_ENTROPY_ROWS
from compiler.types import DType

Values = tuple[int, ...]


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
