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
from compiler.ops.rule import array_of, streams
from compiler.ops.signature import Array, Check, Types, typed
from compiler.registry import Op, OpTypeError, can_skip, define, reference, writes

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

writes.register(INCREMENT, ((0, 0),))
writes.register(SGD_UPDATE, ((0, 0),))
writes.register(MOMENTUM_UPDATE, ((0, 0), (1, 2)))
writes.register(ADAMW_UPDATE, ((0, 0), (1, 2), (2, 3)))
writes.register(ACCUMULATE, ((0, 0),))
for _op in (SGD_UPDATE, MOMENTUM_UPDATE, ADAMW_UPDATE):
    can_skip.register(_op, True)


def _settings(*names: str) -> Check:
    """Return the check of an update's numbers: shares below 1, and all else finite."""

    def check(inputs: Types, attrs: Attrs) -> None:
        for name in names:
            number = attrs.float_(name)
            if name in ("momentum", "beta1", "beta2") and not 0 <= number < 1:
                raise OpTypeError(f"needs 0 <= {name} < 1, got {number}")
            if not math.isfinite(number):
                raise OpTypeError(f"needs a finite {name}, got {number}")
        if "momentum" in names:
            attrs.bool_("nesterov")

    return check


def _check_every(inputs: Types, attrs: Attrs) -> None:
    if attrs.int_("every") < 1:
        raise OpTypeError(f"needs every >= 1, got {attrs.int_('every')}")


typed(INCREMENT, "step = int64, by? = int64 -> step")
typed(
    SGD_UPDATE,
    "param: float, grad = param, lr = param [], skip? = int64 -> param",
    _settings("weight_decay"),
)
typed(
    MOMENTUM_UPDATE,
    "param: float, grad = param, buffer = param, lr = param [], skip? = int64 -> param, buffer",
    _settings("momentum", "weight_decay"),
)
typed(
    ADAMW_UPDATE,
    "param: float, grad = param, m = param, v = param, lr = param [], step = int64, skip? = int64"
    " -> param, m, v",
    _settings("beta1", "beta2", "eps", "weight_decay"),
)
typed(ACCUMULATE, "sum: float, grad = sum, batch = int64 -> sum", _check_every)
for _op, _flops in ((ACCUMULATE, 1), (SGD_UPDATE, 4), (MOMENTUM_UPDATE, 8), (ADAMW_UPDATE, 16)):
    streams(_op, flops=_flops)


@array_of(INCREMENT)
def _increment(attrs: Attrs, step: Array, by: Array | int = 1) -> Array:
    return step + by


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


@array_of(ACCUMULATE)
def _accumulate(attrs: Attrs, total: Array, grad: Array, batch: Array) -> Array:
    is_first = int(batch) % attrs.int_("every") == 0
    return np.array(grad) if is_first else np.asarray(total + grad)
