"""Cross entropy on top of a linear layer, without the logits as a whole.

A language model's logits are its largest tensor: 8,192 rows of 50,257 float32 are 1.6 GB, and as
much again for their gradient. Here `chunk_rows` rows of them exist at a time. The three ops are
what a job needs at its three places: the loss alone, the gradients of a loss computed before (each
chunk of logits is computed once more), and both at once (each chunk is turned into its gradient
where it lies, so that no product is done twice).
"""

from __future__ import annotations

from compiler.attrs import NO_ATTRS, Attrs
from compiler.errors import CompileError
from compiler.graph import GraphBuilder, Node
from compiler.ops.loss import CROSS_ENTROPY, CROSS_ENTROPY_GRAD
from compiler.ops.reduce import total
from compiler.ops.rule import Grads
from compiler.ops.signature import (
    Array,
    Types,
    expect_equal_dtypes,
    expect_float,
    expect_inputs,
    expect_type,
)
from compiler.registry import Cost, OpTypeError, cost, define, infer_type, reference
from compiler.rules import gradient
from compiler.types import TensorType, ValueId

LINEAR_CROSS_ENTROPY = define("linear_cross_entropy")
"""x [N, K], weight [C, K], (bias [C]), labels [N] -> loss [], lse [N].

The loss and lse of `cross_entropy` on the logits x @ weight.T + bias. Attrs: chunk_rows. A label
outside 0..C-1 raises IndexError at run time.
"""

LINEAR_CROSS_ENTROPY_GRAD = define("linear_cross_entropy_grad")
"""dloss [], x, weight, (bias), labels, lse -> the gradients asked for, of x, weight, bias.

Attrs: chunk_rows, and the flags dx, dweight and dbias, which ask.
"""

LINEAR_CROSS_ENTROPY_TRAIN = define("linear_cross_entropy_train")
"""dloss [], x, weight, (bias), labels -> loss [], and the gradients asked for, as above."""

GRADIENTS = ("dx", "dweight", "dbias")
"""The flags of the gradients, in the order of the outputs."""


@infer_type.of(LINEAR_CROSS_ENTROPY)
def _loss_type(inputs: Types, attrs: Attrs) -> Types:
    return _loss_types(_expect(inputs, (), ()), attrs)


@infer_type.of(LINEAR_CROSS_ENTROPY_GRAD)
def _grad_type(inputs: Types, attrs: Attrs) -> Types:
    operands = _expect(inputs, ("dloss",), ("lse",))
    loss, lse = _loss_types(operands, attrs)
    expect_type(inputs[0], "dloss", loss)
    expect_type(inputs[-1], "lse", lse)
    return _gradient_types(operands, attrs)


@infer_type.of(LINEAR_CROSS_ENTROPY_TRAIN)
def _train_type(inputs: Types, attrs: Attrs) -> Types:
    operands = _expect(inputs, ("dloss",), ())
    loss, _ = _loss_types(operands, attrs)
    expect_type(inputs[0], "dloss", loss)
    return (loss, *_gradient_types(operands, attrs))


def _expect(inputs: Types, before: tuple[str, ...], after: tuple[str, ...]) -> Types:
    """Return x, weight, the bias if there is one, and labels."""
    has_bias = len(inputs) != len(before) + 3 + len(after)
    bias = ("bias",) if has_bias else ()
    expect_inputs(inputs, *before, "x", "weight", *bias, "labels", *after)
    return inputs[len(before) : len(inputs) - len(after)]


def _loss_types(operands: Types, attrs: Attrs) -> Types:
    """Check x, weight, bias and labels; return the types of loss and lse."""
    x, weight, *bias, labels = operands
    expect_float((x, weight, *bias), "x", "weight", "bias")
    dtype = expect_equal_dtypes((x, weight, *bias))
    if x.rank != 2 or weight.rank != 2 or x.shape[1] != weight.shape[1]:
        raise OpTypeError(
            "needs x of shape [rows, width] and a weight of shape [classes, width], got"
            f" {list(x.shape)} and {list(weight.shape)}"
        )
    for type_ in bias:
        expect_type(type_, "bias", TensorType(dtype, weight.shape[:1]))
    if attrs.int_("chunk_rows") < 1:
        raise OpTypeError(f"needs chunk_rows of 1 or more, got {attrs.int_('chunk_rows')}")
    logits = TensorType(dtype, (x.shape[0], weight.shape[0]))
    return infer_type.get(CROSS_ENTROPY)((logits, labels), NO_ATTRS)


def _gradient_types(operands: Types, attrs: Attrs) -> Types:
    candidates = operands[:-1]
    if len(candidates) < len(GRADIENTS) and attrs.bool_("dbias"):
        raise OpTypeError("has no bias, so dbias must be False")
    wanted = [attrs.bool_(name) for name in GRADIENTS[: len(candidates)]]
    if not any(wanted):
        raise OpTypeError(f"needs at least one of {', '.join(GRADIENTS)} to be True")
    return tuple([t for t, is_wanted in zip(candidates, wanted, strict=True) if is_wanted])


@reference.of(LINEAR_CROSS_ENTROPY)
def _loss_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    x, weight, *bias, labels = inputs
    return reference.get(CROSS_ENTROPY)(NO_ATTRS, _logits(x, weight, bias), labels)


@reference.of(LINEAR_CROSS_ENTROPY_GRAD)
def _grad_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    dloss, x, weight, *bias, labels, lse = inputs
    logits = _logits(x, weight, bias)
    (dy,) = reference.get(CROSS_ENTROPY_GRAD)(NO_ATTRS, dloss, logits, labels, lse)
    gradients = (dy @ weight, dy.T @ x, total(dy, 0))
    return tuple([g for g, name in zip(gradients, GRADIENTS, strict=True) if attrs.bool_(name)])


@reference.of(LINEAR_CROSS_ENTROPY_TRAIN)
def _train_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    loss, lse = _loss_reference(attrs, *inputs[1:])
    return (loss, *_grad_reference(attrs, *inputs, lse))


def _logits(x: Array, weight: Array, bias: list[Array]) -> Array:
    logits: Array = x @ weight.T
    return logits + bias[0] if bias else logits


@cost.of(LINEAR_CROSS_ENTROPY)
def _loss_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    return _products_cost(inputs[0], inputs[1], 1, (*inputs, *outputs))


@cost.of(LINEAR_CROSS_ENTROPY_GRAD, LINEAR_CROSS_ENTROPY_TRAIN)
def _grad_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    num_products = 1 + attrs.bool_("dx") + attrs.bool_("dweight")
    return _products_cost(inputs[1], inputs[2], num_products, (*inputs, *outputs))


def _products_cost(x: TensorType, weight: TensorType, count: int, moved: Types) -> Cost:
    """Per logit: `count` products over the width, and 10 for its exponential and its sum."""
    rows, width = x.shape
    flops = rows * weight.shape[0] * (2.0 * width * count + 10.0)
    return Cost(flops, float(sum(t.size_bytes for t in moved)))


@gradient.of(LINEAR_CROSS_ENTROPY)
def _loss_gradient(b: GraphBuilder, node: Node, grads: Grads) -> Grads:
    dloss, dlse = grads
    if dlse is not None:
        raise CompileError(
            f"{node.source}: linear_cross_entropy has no gradient for lse; compute it with max,"
            " exp, sum and log from logits of a linear layer"
        )
    nothing: list[ValueId | None] = [None] * len(node.inputs)
    if dloss is None:
        return tuple(nothing)
    has_bias = len(node.inputs) == 4
    attrs = {**node.attrs, "dx": True, "dweight": True, "dbias": has_bias}
    inputs = (dloss, *node.inputs, node.outputs[1])
    return (*b.emit(LINEAR_CROSS_ENTROPY_GRAD, inputs, attrs), None)
