"""Functions on tensors: activations, attention, losses, regularisation.

Names and semantics are the field's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from actorflow.literals import checked_number, checked_size
from actorflow.tensor import (
    Operand,
    Tensor,
    apply,
    apply_many,
    as_tensor,
    checked_axis,
)
from actorflow.trace.tracer import Trace, current_trace, find_source
from compiler.errors import CompileError
from compiler.fusion.expressions import Expression
from compiler.ops import activation, binary, elementwise, loss, norm, random, slicing
from compiler.ops import embedding as embedding_ops
from compiler.ops import softmax as softmax_ops
from compiler.ops.sources import SCRATCH
from compiler.types import DType, TensorType


def relu(x: Tensor) -> Tensor:
    """Return max(x, 0)."""
    return apply(activation.RELU, x)


def gelu(x: Tensor) -> Tensor:
    """Return the Gaussian error linear unit in its tanh form (Hendrycks & Gimpel, 2016)."""
    return apply(activation.GELU, x)


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x)."""
    return apply(activation.SILU, x)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x))."""
    return apply(activation.SIGMOID, x)


def tanh(x: Tensor) -> Tensor:
    """Return the hyperbolic tangent."""
    return apply(activation.TANH, x)


def exp(x: Tensor) -> Tensor:
    """Return e to the power of x."""
    return apply(elementwise.EXP, x)


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm."""
    return apply(elementwise.LOG, x)


def sqrt(x: Tensor) -> Tensor:
    """Return the square root."""
    return apply(elementwise.SQRT, x)


def cos(x: Tensor) -> Tensor:
    """Return the cosine of x in radians."""
    return apply(elementwise.COS, x)


def sin(x: Tensor) -> Tensor:
    """Return the sine of x in radians."""
    return apply(elementwise.SIN, x)


def square(x: Tensor) -> Tensor:
    """Return x * x."""
    return apply(elementwise.SQUARE, x)


def minimum(a: Operand, b: Operand) -> Tensor:
    """Return the smaller of two, elementwise."""
    return apply(binary.MINIMUM, a, b)


def maximum(a: Operand, b: Operand) -> Tensor:
    """Return the larger of two, elementwise."""
    return apply(binary.MAXIMUM, a, b)


def where(condition: Tensor, a: Operand, b: Operand) -> Tensor:
    """Return a where the bool tensor `condition` holds, else b; all three broadcast."""
    operands: tuple[object, ...] = (condition, a, b)
    if any([isinstance(o, Expression) for o in operands]):
        return apply(binary.WHERE, condition, a, b)
    partner = next((o.dtype for o in (a, b) if isinstance(o, Tensor)), DType.FLOAT32)
    chosen = as_tensor(condition, DType.BOOL)
    return apply(binary.WHERE, chosen, as_tensor(a, partner), as_tensor(b, partner))


def concat(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Join tensors of equal shape, but for `axis`, along that axis."""
    if not isinstance(tensors, Sequence):
        raise CompileError(
            f"{find_source()}: concat needs a list of tensors, got {type(tensors).__name__}"
        )
    if not tensors:
        raise CompileError(f"{find_source()}: concat needs at least one tensor")
    first = as_tensor(tensors[0])
    return apply(slicing.CONCAT, first, *tensors[1:], axis=checked_axis(first, axis))


def split(x: Tensor, sections: int, axis: int = 0) -> tuple[Tensor, ...]:
    """Cut a tensor into `sections` parts of equal extent along `axis`."""
    x, parts = as_tensor(x), checked_size(sections, "the number of sections")
    axis = checked_axis(x, axis)
    if parts < 1 or x.shape[axis] % parts:
        raise CompileError(
            f"{find_source()}: cannot cut extent {x.shape[axis]} of axis {axis} into {parts} equal"
            " parts"
        )
    before, extent = (slice(None),) * axis, x.shape[axis] // parts
    return tuple([x[(*before, slice(i * extent, (i + 1) * extent))] for i in range(parts)])


def softmax(x: Tensor, *, scale: float = 1.0, causal: bool = False) -> Tensor:
    """Return the softmax of `scale * x` over the last axis.

    With `causal`, x is [..., T, S] and row i sees only columns j <= i + (S - T).
    """
    factor = checked_number(scale, "the scale of softmax")
    return apply(softmax_ops.SOFTMAX, x, scale=factor, causal=bool(causal))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    """Normalise the last axis to mean 0 and variance 1, then scale and shift (Ba et al., 2016)."""
    small = checked_number(eps, "the eps of layer_norm")
    return apply_many(norm.LAYER_NORM, x, weight, bias, eps=small)[0]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias.

    Args:
        x: [..., in]; all leading axes become the rows of one matrix product.
        weight: [out, in].
        bias: [out], or None.
    """
    x, weight = as_tensor(x), as_tensor(weight)
    if weight.ndim != 2:
        raise CompileError(f"{find_source()}: linear expects a weight [out, in], got {weight.type}")
    if x.ndim < 1 or x.shape[-1] != weight.shape[-1]:
        raise CompileError(
            f"{find_source()}: linear expects [..., {weight.shape[-1]}] for a weight"
            f" {weight.type}, got {x.type}"
        )
    leading = x.shape[:-1]
    rows = x.reshape(math.prod(leading), x.shape[-1])
    y = rows @ weight.T
    if bias is not None:
        y = y + bias
    return y.reshape(*leading, weight.shape[0])


def embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """Return the rows of `weight` [V, D] at integer `ids`: ids.shape + [D].

    An id outside 0..V-1 fails the step with an IndexError that names it.
    """
    return apply(embedding_ops.EMBEDDING, weight, as_tensor(ids, DType.INT64))


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """Scaled dot-product attention (Vaswani et al., 2017): softmax(q kT / sqrt(d)) v.

    Args:
        q: [..., T, d].
        k: [..., S, d].
        v: [..., S, e].
        causal: row i attends to columns j <= i + (S - T) only.
    """
    q, k = as_tensor(q), as_tensor(k)
    scores = q @ k.swapaxes(-1, -2)
    return softmax(scores, scale=1.0 / math.sqrt(max(q.shape[-1], 1)), causal=causal) @ v


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of integer labels, a scalar.

    On top of a linear layer, large logits are computed a chunk of rows at a time and never exist as
    a whole, unless the job reads them too: for an accuracy, say, or as an output.

    Args:
        logits: [..., C].
        labels: integers of shape [...]; one outside 0..C-1 fails the step with an IndexError.
    """
    logits, labels = as_tensor(logits), as_tensor(labels, DType.INT64)
    if logits.ndim < 1 or logits.shape[:-1] != labels.shape:
        raise CompileError(
            f"{find_source()}: cross_entropy expects labels of shape {list(logits.shape[:-1])} for"
            f" logits {logits.type}, got {labels.type}"
        )
    rows = math.prod(labels.shape)
    flat = logits.reshape(rows, logits.shape[-1])
    if labels.dtype is DType.UINT64:
        labels = labels.to(DType.INT64)  # no fused kernel computes with these
    return apply_many(loss.CROSS_ENTROPY_ROWS, flat, labels.reshape(rows))[0].mean()


def mse_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Return the mean of squared differences, a scalar."""
    return square(apply(binary.SUB, prediction, target)).mean()


def dropout(x: Tensor, p: float) -> Tensor:
    """Zero elements with probability p and scale the rest by 1/(1-p).

    Outside training it is the identity. The mask is a pure function of (seed, step, this op,
    element), so that it replays after a resume and under recomputation.
    """
    p = checked_probability(p)
    given: object = x
    if isinstance(given, Expression):  # it would be the identity, for nothing trains while it runs
        raise CompileError(
            f"{find_source()}: a program draws no random numbers; draw them in the job, and make"
            " them an operand"
        )
    trace = current_trace()
    if trace is None or not trace.is_training or p == 0.0:
        return x
    key = trace.next_random_key()
    counter = batches_of(trace) if trace.batches_per_step > 1 else step_of(trace)
    return apply(random.DROPOUT, x, seed_of(trace), counter, p=p, key=key)


def checked_probability(p: float) -> float:
    """Return a dropout probability as a float. Raises CompileError outside of [0, 1)."""
    number = checked_number(p, "dropout probability")
    if not 0.0 <= number < 1.0:
        raise CompileError(f"{find_source()}: dropout probability must be in [0, 1), got {number}")
    return number


def step_of(trace: Trace) -> Tensor:
    """Return the number of finished steps as an int64 scalar."""
    counter = TensorType(DType.INT64, ())
    return Tensor(trace, trace.variable("step", counter, "counter", (("kind", "zeros"),)))


def batches_of(trace: Trace) -> Tensor:
    """Return the number of finished batches as an int64 scalar, where a step has several."""
    counter = TensorType(DType.INT64, ())
    return Tensor(trace, trace.variable("batches", counter, SCRATCH, (("kind", "zeros"),)))


def seed_of(trace: Trace) -> Tensor:
    """Return the seed of the run as an int64 scalar."""
    counter = TensorType(DType.INT64, ())
    return Tensor(trace, trace.variable("seed", counter, "counter", (("kind", "seed"),)))
