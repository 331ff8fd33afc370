"""Cross entropy of integer labels from logits: log-sum-exp minus the label's logit, row mean."""

from __future__ import annotations

import numpy as np

from compiler.attrs import Attrs
from compiler.errors import CompileError
from compiler.graph import GraphBuilder, Node
from compiler.ops.reduce import total
from compiler.ops.rule import Grads
from compiler.ops.signature import (
    Array,
    Types,
    expect_float,
    expect_inputs,
    expect_integer,
    expect_type,
)
from compiler.registry import Cost, OpTypeError, cost, define, infer_type, reference
from compiler.rules import gradient
from compiler.types import TensorType

CROSS_ENTROPY = define("cross_entropy")
"""logits [N, C], labels [N] -> loss [], lse [N]. The mean over rows of lse - logit of the label.

lse is the log of the sum of exponentials of a row, kept for the gradient. A label outside 0..C-1
raises IndexError at run time.
"""

CROSS_ENTROPY_GRAD = define("cross_entropy_grad")
"""dloss [], logits [N, C], labels [N], lse [N] -> dlogits [N, C]."""


@infer_type.of(CROSS_ENTROPY)
def _cross_entropy_type(inputs: Types, attrs: Attrs) -> Types:
    logits, labels = expect_inputs(inputs, "logits", "labels")
    _expect_rows(logits, labels)
    return TensorType(logits.dtype, ()), TensorType(logits.dtype, labels.shape)


@infer_type.of(CROSS_ENTROPY_GRAD)
def _cross_entropy_grad_type(inputs: Types, attrs: Attrs) -> Types:
    dloss, logits, labels, lse = expect_inputs(inputs, "dloss", "logits", "labels", "lse")
    _expect_rows(logits, labels)
    expect_type(dloss, "dloss", TensorType(logits.dtype, ()))
    expect_type(lse, "lse", TensorType(logits.dtype, labels.shape))
    return (logits,)


def _expect_rows(logits: TensorType, labels: TensorType) -> None:
    expect_float((logits,), "logits")
    if logits.rank != 2:
        raise OpTypeError(
            f"needs logits of shape [rows, classes], got {list(logits.shape)};"
            " reshape other leading axes into one, and the labels with them"
        )
    if 0 in logits.shape:
        raise OpTypeError(f"needs at least one row and one class, got {list(logits.shape)}")
    expect_integer(labels, "labels")
    if labels.shape != logits.shape[:1]:
        raise OpTypeError(
            f"needs one label for each of the {logits.shape[0]} rows, got labels of shape"
            f" {list(labels.shape)}"
        )


@reference.of(CROSS_ENTROPY)
def _cross_entropy_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    logits, labels = inputs
    check_indices(labels, logits.shape[1], "cross_entropy", "label", "classes")
    largest = logits.max(axis=1)
    lse = largest + np.log(total(np.exp(logits - largest[:, None]), 1))
    picked = logits[np.arange(len(labels)), labels]
    return total(lse - picked, 0, len(lse)), lse


@reference.of(CROSS_ENTROPY_GRAD)
def _cross_entropy_grad_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    dloss, logits, labels, lse = inputs
    check_indices(labels, logits.shape[1], "cross_entropy", "label", "classes")
    difference = np.exp(logits - lse[:, None])
    difference[np.arange(len(labels)), labels] -= 1
    return (difference * (dloss / len(labels)),)


def check_indices(indices: Array, count: int, op: str, name: str, what: str) -> None:
    """Raise IndexError when an index lies outside 0..count-1, naming it and its position."""
    bad = (indices < 0) | (indices >= count)
    if bad.any():
        position = tuple(int(i) for i in np.argwhere(bad)[0])
        raise IndexError(
            f"{op}: {name} {indices[position]} at position {position} is outside 0..{count - 1}"
            f" ({count} {what})"
        )


@cost.of(CROSS_ENTROPY, CROSS_ENTROPY_GRAD)
def _cross_entropy_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    """Difference, exponential (8) and sum or scale per logit."""
    moved = sum(t.size_bytes for t in (*inputs, *outputs))
    logits = max(inputs, key=lambda t: t.rank)
    return Cost(10.0 * logits.num_elements, float(moved))


@gradient.of(CROSS_ENTROPY)
def _cross_entropy_gradient(b: GraphBuilder, node: Node, grads: Grads) -> Grads:
    dloss, dlse = grads
    if dlse is not None:
        raise CompileError(
            f"{node.source}: cross_entropy has no gradient for lse; compute it with max, exp, sum"
            " and log where it is needed in the loss"
        )
    if dloss is None:
        return None, None
    logits, labels = node.inputs
    return b.one(CROSS_ENTROPY_GRAD, dloss, logits, labels, node.outputs[1]), None
