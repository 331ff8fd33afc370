"""Writes over variables: the counters, sums of batches, and the optimizers' updates.

Semantics are torch.optim's: SGD with weight decay added to the gradient, heavy-ball momentum
(Polyak 1964; Nesterov's form after Sutskever et al. 2013), and AdamW with decoupled decay (Kingma &
Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2). `compiler.ops.adaptive_updates` has
more of them.

Each is its program; see `compiler.fusion.updates`. They have no gradient.
"""

from __future__ import annotations

import numpy as np

from compiler.attrs import Attrs
from compiler.fusion.define import fused_op
from compiler.fusion.expressions import Expression
from compiler.fusion.updates import update_op
from compiler.graph import Node
from compiler.ops.signature import Types
from compiler.registry import OpTypeError
from compiler.types import DType

Value = Expression


def decayed(param: Value, grad: Value, weight_decay: float) -> Value:
    """Return the slope. Without decay the parameter is not read: it may be infinite."""
    return grad if weight_decay == 0 else param * weight_decay + grad


def _sgd(param: Value, grad: Value, lr: Value, *, weight_decay: float) -> Value:
    return param - decayed(param, grad, weight_decay) * lr


def _momentum(
    param: Value, grad: Value, buffer: Value, lr: Value,
    *, momentum: float, nesterov: bool, weight_decay: float,
) -> tuple[Value, Value]:  # fmt: skip
    slope = decayed(param, grad, weight_decay)
    now = buffer * momentum + slope
    return param - (now * momentum + slope if nesterov else now) * lr, now


def _damped_momentum(
    param: Value, grad: Value, buffer: Value, lr: Value, step: Value,
    *, momentum: float, dampening: float, weight_decay: float,
) -> tuple[Value, Value]:  # fmt: skip
    slope = decayed(param, grad, weight_decay)
    now = (step == 0).where(slope, buffer * momentum + slope * (1.0 - dampening))
    return param - now * lr, now


def _adamw(
    param: Value, grad: Value, m: Value, v: Value, lr: Value, step: Value,
    *, beta1: float, beta2: float, eps: float, weight_decay: float,
) -> tuple[Value, Value, Value]:  # fmt: skip
    """Return the update with t = step + 1, its last term with one division less per element.

    lr / (1 - beta1^t) * m / (sqrt(v) / s + eps) is computed as
    (lr s / (1 - beta1^t)) * m / (sqrt(v) + eps s), where s = sqrt(1 - beta2^t).
    """
    t, rate, own = step.to(DType.FLOAT64) + 1.0, lr.to(DType.FLOAT64), param.dtype
    correction = (1.0 - beta2**t).sqrt()
    mean = m * beta1 + grad * (1.0 - beta1)
    square = v * beta2 + grad * (1.0 - beta2) * grad  # in this order: grad * grad may overflow
    kept = param * (1.0 - rate * weight_decay).to(own)
    change = mean / (square.sqrt() + (correction * eps).to(own))
    change = change * (rate * correction / (1.0 - beta1**t)).to(own)
    return kept - change, mean, square


def _accumulate(total: Value, grad: Value, batch: Value, *, every: int) -> Value:
    return (batch % every == 0).where(grad, total + grad)


def _check_every(inputs: Types, attrs: Attrs) -> None:
    if attrs.int_("every") < 1:
        raise OpTypeError(f"needs every >= 1, got {attrs.int_('every')}")


INCREMENT = update_op("increment", "step = int64 -> step", lambda step: step + 1, skippable=False)
"""step [] -> step + 1, over step. int64."""

COUNT = update_op(
    "count", "total = int64, by = int64 -> total", lambda total, by: total + by, skippable=False
)
"""total [], by [] -> total + by, over total. int64."""

ACCUMULATE = update_op(
    "accumulate",
    "sum: float, grad = sum, batch = int64 -> sum",
    _accumulate,
    check=_check_every,
    skippable=False,
)
"""sum, grad, batch [] -> sum + grad, over sum; grad alone where batch is the first of a step.

Floats; batch is int64 and counts the batches done. Attrs: every (batches per step).

Overwriting at the first batch, in place of zeros after the last, saves a pass over the sums and
makes what a cut step left in them harmless.
"""


ASSIGN = update_op("assign", "variable, value = variable -> variable", lambda old, new: new)
"""variable, value -> value, over variable: at the end of a step. Any dtype."""

APPROACH = update_op(
    "approach",
    "old: float, new = old, share = old [] -> old",
    lambda old, new, share: old + (new - old) * share,
)
"""old, new, share [] -> old + share * (new - old), over old: an average that moves. Floats."""

HOLD = update_op("hold", "held, value = held -> held", lambda old, new: new, skippable=False)
"""held, value -> value, over held: at the end of a batch, for the next one of the step."""

HANDED_ON = fused_op(
    "handed_on",
    "batch: int, variable: any, held: any -> y",
    lambda batch, variable, held, *, every=1: (batch % every == 0).where(variable, held),
)
"""batch [], variable, held -> variable where batch is the first of a step, else held.

batch is as of `ACCUMULATE`. Attrs: every (batches per step).
"""

PER_BATCH = (ACCUMULATE, HOLD)
"""What is written once per batch, and read once per step: rates meet there."""


def _rescale(
    scale: Value, good: Value, broken: Value,
    *, growth_factor: float, backoff_factor: float, growth_interval: int,
) -> tuple[Value, Value]:  # fmt: skip
    done = good + 1
    is_whole, is_long = broken == 0, done >= growth_interval
    grown = scale * growth_factor
    grown = (grown <= float(np.finfo(np.float32).max)).where(grown, scale)
    changed = is_whole.where(is_long.where(grown, scale), scale * backoff_factor)
    return changed, is_whole.where(is_long.where(0, done), 0)


RESCALE = update_op(
    "rescale",
    "scale: float, good = int64, broken = int64 -> scale, good",
    _rescale,
    skippable=False,
)
"""scale [], good [], broken [] -> scale', good', over both: torch.amp.GradScaler's update.

good is int64 and counts the steps in a row that were not broken, since the scale was changed. After
a broken one the scale is multiplied by `backoff_factor`, after `growth_interval` good ones by
`growth_factor`, unless that is infinite. Attrs: growth_factor, backoff_factor, growth_interval.
"""

_COUNTERS = (INCREMENT, COUNT, ACCUMULATE, HOLD, RESCALE)


def is_update(node: Node) -> bool:
    """Whether a node applies a gradient to a variable; what counts, sums or averages does not."""
    return ends_step(node) and node.op not in (ASSIGN, APPROACH)


def ends_step(node: Node) -> bool:
    """Whether a node makes state of a step's results: an update, or an assignment.

    A step that is skipped leaves it out.
    """
    return bool(node.writes) and node.op not in _COUNTERS


SGD_UPDATE = update_op("sgd_update", "param: float, grad = param, lr = param [] -> param", _sgd)
"""param, grad, lr [] -> param', over param. Floats. Attrs: weight_decay."""

MOMENTUM_UPDATE = update_op(
    "momentum_update",
    "param: float, grad = param, buffer = param, lr = param [] -> param, buffer",
    _momentum,
    shares=("momentum",),
)
"""param, grad, buffer, lr [] -> param', buffer', over both.

Attrs: momentum, nesterov, weight_decay.

g = grad + weight_decay * param; buffer' = momentum * buffer + g;
param' = param - lr * (g + momentum * buffer' if nesterov else buffer').
"""

DAMPED_MOMENTUM_UPDATE = update_op(
    "damped_momentum_update",
    "param: float, grad = param, buffer = param, lr = param [], step = int64 -> param, buffer",
    _damped_momentum,
    shares=("momentum",),
)
"""param, grad, buffer, lr [], step [] -> param', buffer', over both.

Attrs: momentum, dampening, weight_decay. buffer' = momentum * buffer + (1 - dampening) * g, but g
itself in the first step (torch's).
"""

ADAMW_UPDATE = update_op(
    "adamw_update",
    "param: float, grad = param, m = param, v = param, lr = param [], step = int64 -> param, m, v",
    _adamw,
    shares=("beta1", "beta2"),
)
"""param, grad, m, v, lr [], step [] -> param', m', v', over them.

Attrs: beta1, beta2, eps, weight_decay. step is int64 and counts the updates done; the bias
correction uses t = step + 1.
"""
