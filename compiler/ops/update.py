"""Writes over variables: the step counter and the optimizers' updates. They have no gradient.

Semantics are torch.optim's: SGD with weight decay added to the gradient, heavy-ball momentum
without dampening (Polyak 1964; Nesterov's form after Sutskever et al. 2013), and AdamW with
decoupled decay (Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2).

The optimizers' updates take one more input, `skip` [] int64, at the end: where it is not 0, they
change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from compiler.attrs import Attrs
from compiler.ops.signature import Array, Types, expect_float, expect_inputs, expect_type
from compiler.registry import (
    Cost,
    Op,
    OpTypeError,
    can_skip,
    cost,
    define,
    infer_type,
    reference,
    writes,
)
from compiler.types import DType, TensorType

INCREMENT = define("increment")
"""step [], by [] -> step + by, over step. int64; `by` may be left out, and is 1 then."""

SGD_UPDATE = define("sgd_update")
"""param, grad, lr [] -> param', over param. Floats. Attrs: weight_decay."""

MOMENTUM_UPDATE = define("momentum_update")
"""param, grad, buffer, lr [] -> param', buffer', over both.

Attrs: momentum, nesterov, weight_decay.

g = grad + weight_decay * param; buffer' = momentum * buffer + g;
param' = param - lr * (g + momentum * buffer' if nesterov else buffer').
"""

ADAMW_UPDATE = define("adamw_update")
"""param, grad, m, v, lr [], step [] -> param', m', v', over them.

Attrs: beta1, beta2, eps, weight_decay. step is int64 and counts the updates done; the bias
correction uses t = step + 1.
"""

ACCUMULATE = define("accumulate")
"""sum, grad, batch [] -> sum + grad, over sum; grad alone where batch is the first of a step.

Floats; batch is int64 and counts the batches done. Attrs: every (batches per step).

Overwriting at the first batch, in place of zeros after the last, saves a pass over the sums and
makes what a cut step left in them harmless.
"""

_STEP = TensorType(DType.INT64, ())

writes.register(INCREMENT, ((0, 0),))
writes.register(SGD_UPDATE, ((0, 0),))
writes.register(MOMENTUM_UPDATE, ((0, 0), (1, 2)))
writes.register(ADAMW_UPDATE, ((0, 0), (1, 2), (2, 3)))
writes.register(ACCUMULATE, ((0, 0),))
for _op in (SGD_UPDATE, MOMENTUM_UPDATE, ADAMW_UPDATE):
    can_skip.register(_op, True)


@infer_type.of(INCREMENT)
def _increment_type(inputs: Types, attrs: Attrs) -> Types:
    names = ("step", "by") if len(inputs) > 1 else ("step",)
    for name, type_ in zip(names, expect_inputs(inputs, *names), strict=True):
        expect_type(type_, name, _STEP)
    return (_STEP,)


@infer_type.of(SGD_UPDATE)
def _sgd_type(inputs: Types, attrs: Attrs) -> Types:
    param, grad, lr = _expect_update(inputs, "param", "grad", "lr")
    _expect_like(param, lr, grad=grad)
    _expect_finite(attrs, "weight_decay")
    return (param,)


@infer_type.of(MOMENTUM_UPDATE)
def _momentum_type(inputs: Types, attrs: Attrs) -> Types:
    param, grad, buffer, lr = _expect_update(inputs, "param", "grad", "buffer", "lr")
    _expect_like(param, lr, grad=grad, buffer=buffer)
    _expect_fraction(attrs, "momentum")
    _expect_finite(attrs, "weight_decay")
    attrs.bool_("nesterov")
    return param, buffer


@infer_type.of(ADAMW_UPDATE)
def _adamw_type(inputs: Types, attrs: Attrs) -> Types:
    param, grad, m, v, lr, step = _expect_update(inputs, "param", "grad", "m", "v", "lr", "step")
    _expect_like(param, lr, grad=grad, m=m, v=v)
    expect_type(step, "step", _STEP)
    _expect_fraction(attrs, "beta1")
    _expect_fraction(attrs, "beta2")
    _expect_finite(attrs, "eps", "weight_decay")
    return param, m, v


@infer_type.of(ACCUMULATE)
def _accumulate_type(inputs: Types, attrs: Attrs) -> Types:
    total, grad, batch = expect_inputs(inputs, "sum", "grad", "batch")
    expect_float((total,), "sum")
    expect_type(grad, "grad", total)
    expect_type(batch, "batch", _STEP)
    if attrs.int_("every") < 1:
        raise OpTypeError(f"needs every >= 1, got {attrs.int_('every')}")
    return (total,)


def _expect_update(inputs: Types, *names: str) -> Types:
    """Return the inputs of these names; `skip` may follow them."""
    if len(inputs) > len(names):
        expect_type(expect_inputs(inputs, *names, "skip")[-1], "skip", _STEP)
        inputs = inputs[:-1]
    return expect_inputs(inputs, *names)


def _expect_like(param: TensorType, lr: TensorType, **others: TensorType) -> None:
    expect_float((param,), "param")
    for name, type_ in others.items():
        expect_type(type_, name, param)
    expect_type(lr, "lr", TensorType(param.dtype, ()))


def _expect_finite(attrs: Attrs, *names: str) -> None:
    for name in names:
        if not math.isfinite(attrs.float_(name)):
            raise OpTypeError(f"needs a finite {name}, got {attrs.float_(name)}")


def _expect_fraction(attrs: Attrs, name: str) -> None:
    if not 0 <= attrs.float_(name) < 1:
        raise OpTypeError(f"needs 0 <= {name} < 1, got {attrs.float_(name)}")


@reference.of(INCREMENT)
def _increment_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    step, *by = inputs
    return (np.asarray(step + (by[0] if by else 1)),)


_Semantics = Callable[..., tuple[Array, ...]]


def _skippable(op: Op, num_inputs: int) -> Callable[[_Semantics], _Semantics]:
    """Return a decorator that adds the input `skip` to the semantics of an update."""

    def decorate(function: _Semantics) -> _Semantics:
        def update(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
            if len(inputs) > num_inputs and inputs[num_inputs] != 0:
                return tuple([np.array(inputs[over]) for _, over in writes.get(op)])
            return function(attrs, *inputs[:num_inputs])

        return update

    return decorate


@reference.of(SGD_UPDATE)
@_skippable(SGD_UPDATE, 3)
def _sgd_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    param, grad, lr = inputs
    return (np.asarray(param - lr * (grad + attrs.float_("weight_decay") * param)),)


@reference.of(MOMENTUM_UPDATE)
@_skippable(MOMENTUM_UPDATE, 4)
def _momentum_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    param, grad, buffer, lr = inputs
    momentum = attrs.float_("momentum")
    g = grad + attrs.float_("weight_decay") * param
    new = momentum * buffer + g
    direction = g + momentum * new if attrs.bool_("nesterov") else new
    return np.asarray(param - lr * direction), np.asarray(new)


@reference.of(ADAMW_UPDATE)
@_skippable(ADAMW_UPDATE, 6)
def _adamw_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    param, grad, m, v, lr, step = inputs
    beta1, beta2 = attrs.float_("beta1"), attrs.float_("beta2")
    t = int(step) + 1
    decayed = param * (1 - lr * attrs.float_("weight_decay"))
    new_m = beta1 * m + (1 - beta1) * grad
    new_v = beta2 * v + (1 - beta2) * grad * grad
    denominator = np.sqrt(new_v) / math.sqrt(1 - beta2**t) + attrs.float_("eps")
    new = decayed - lr / (1 - beta1**t) * new_m / denominator
    return np.asarray(new), np.asarray(new_m), np.asarray(new_v)


@reference.of(ACCUMULATE)
def _accumulate_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    total, grad, batch = inputs
    is_first = int(batch) % attrs.int_("every") == 0
    return (np.array(grad) if is_first else np.asarray(total + grad),)


@cost.of(ACCUMULATE)
def _accumulate_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    return _update_cost(1.0, inputs, outputs)


@cost.of(SGD_UPDATE)
def _sgd_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    return _update_cost(4.0, inputs, outputs)


@cost.of(MOMENTUM_UPDATE)
def _momentum_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    return _update_cost(8.0, inputs, outputs)


@cost.of(ADAMW_UPDATE)
def _adamw_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    return _update_cost(16.0, inputs, outputs)


def _update_cost(flops: float, inputs: Types, outputs: Types) -> Cost:
    moved = sum(t.size_bytes for t in (*inputs, *outputs))
    return Cost(flops * inputs[0].num_elements, float(moved))
