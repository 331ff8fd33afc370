"""Writes over variables: counters, sums of batches, and the optimizers' updates.

Each is its program (`compiler.ops.language.define`), and has no gradient. Semantics are
torch.optim's where torch has the optimizer: SGD with weight decay added to the gradient, heavy-ball
momentum (Polyak 1964; Nesterov's form after Sutskever et al. 2013), and AdamW with decoupled decay
(Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2). Updates that need norms,
products or sums of axes are staged.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from compiler.contract.attrs import Attrs
from compiler.contract.types import DType, ValueId
from compiler.graph.graph import Node
from compiler.graph.registry import Op, OpTypeError, Types
from compiler.ops.language.define import CompositeBuilder, composite_update, fused_op, update_op
from compiler.ops.language.expressions import Expression

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """Shares of the old means, what divisors are kept above 0 by, and the decay of weights."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def _adamw(
    param: Value, grad: Value, m: Value, v: Value, lr: Value, step: Value, settings: AdamSettings
) -> tuple[Value, Value, Value]:
    """Return the update with t = step + 1, its last term with one division less per element.

    lr / (1 - beta1^t) * m / (sqrt(v) / s + eps) is computed as
    (lr s / (1 - beta1^t)) * m / (sqrt(v) + eps s), where s = sqrt(1 - beta2^t).
    """
    t, rate, dtype = step.to(DType.FLOAT64) + 1.0, lr.to(DType.FLOAT64), param.dtype
    beta1, beta2 = settings.beta1, settings.beta2
    correction = (1.0 - beta2**t).sqrt()
    mean = m * beta1 + grad * (1.0 - beta1)
    square = v * beta2 + grad * (1.0 - beta2) * grad  # in this order: grad * grad may overflow
    shrunk = param * (1.0 - rate * settings.weight_decay).to(dtype)
    change = mean / (square.sqrt() + (correction * settings.eps).to(dtype))
    change = change * (rate * correction / (1.0 - beta1**t)).to(dtype)
    return shrunk - change, mean, square


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

EMA_UPDATE = update_op(
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
    good_steps = good + 1
    is_whole, is_long = broken == 0, good_steps >= growth_interval
    grown = scale * growth_factor
    grown = (grown <= float(np.finfo(np.float32).max)).where(grown, scale)
    new_scale = is_whole.where(is_long.where(grown, scale), scale * backoff_factor)
    return new_scale, is_whole.where(is_long.where(0, good_steps), 0)


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
    return ends_step(node) and node.op not in (ASSIGN, EMA_UPDATE)


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
    settings=AdamSettings,
    shares=("beta1", "beta2"),
)
"""param, grad, m, v, lr [], step [] -> param', m', v', over them.

Attrs: beta1, beta2, eps, weight_decay. step is int64 and counts the updates done; the bias
correction uses t = step + 1.
"""


# Updates whose step follows the size of past gradients, or their sign alone: Adam with decay added
# to the gradient (Kingma & Ba 2015), AMSGrad (Reddi et al. 2018), Adagrad (Duchi et al. 2011),
# RMSprop (Hinton 2012; centred after Graves 2013), and Lion (Chen et al. 2023, algorithm 2).
# Corrections of the bias are computed in float64, once a launch.

_ADAM = "param: float, grad = param, m = param, v = param, {}lr = param [], step = int64 -> {}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AmsgradSettings(AdamSettings):
    """The decay is of the weights where it is `decoupled`, else part of gradients."""

    decoupled: bool


def moments(grad: Value, m: Value, v: Value, settings: AdamSettings) -> tuple[Value, Value]:
    """Return the new means of gradients and of their squares."""
    beta1, beta2 = settings.beta1, settings.beta2
    square = v * beta2 + grad * (1.0 - beta2) * grad  # in this order: grad * grad may overflow
    return m * beta1 + grad * (1.0 - beta1), square


def corrections(step: Value, settings: AdamSettings) -> tuple[Value, Value]:
    """Return what the two means lack of their limits after step + 1 steps; the second's root."""
    t = step.to(DType.FLOAT64) + 1.0
    return 1.0 - settings.beta1**t, (1.0 - settings.beta2**t).sqrt()


def _adam(
    param: Value, grad: Value, m: Value, v: Value, lr: Value, step: Value, settings: AdamSettings
) -> tuple[Value, Value, Value]:
    slope, dtype = decayed(param, grad, settings.weight_decay), param.dtype
    mean, square = moments(slope, m, v, settings)
    first, second = corrections(step, settings)
    change = mean / (square.sqrt() + (second * settings.eps).to(dtype))
    return param - change * (lr.to(DType.FLOAT64) * second / first).to(dtype), mean, square


def _amsgrad(
    param: Value, grad: Value, m: Value, v: Value, most: Value, lr: Value, step: Value,
    settings: AmsgradSettings,
) -> tuple[Value, Value, Value, Value]:  # fmt: skip
    rate, dtype, weight_decay = lr.to(DType.FLOAT64), param.dtype, settings.weight_decay
    slope = decayed(param, grad, 0.0 if settings.decoupled else weight_decay)
    mean, square = moments(slope, m, v, settings)
    largest = most.maximum(square)
    first, second = corrections(step, settings)
    shrunk = param * (1.0 - rate * weight_decay).to(dtype) if settings.decoupled else param
    change = mean / (largest.sqrt() + (second * settings.eps).to(dtype))
    return shrunk - change * (rate * second / first).to(dtype), mean, square, largest


def _adagrad(
    param: Value, grad: Value, total: Value, lr: Value, step: Value,
    *, lr_decay: float, eps: float, weight_decay: float,
) -> tuple[Value, Value]:  # fmt: skip
    slope = decayed(param, grad, weight_decay)
    rate = lr.to(DType.FLOAT64) / (step.to(DType.FLOAT64) * lr_decay + 1.0)
    now = total + slope * slope
    return param - slope / (now.sqrt() + eps) * rate.to(param.dtype), now


def _lion(
    param: Value, grad: Value, m: Value, lr: Value,
    *, beta1: float, beta2: float, weight_decay: float,
) -> tuple[Value, Value]:  # fmt: skip
    change = (m * beta1 + grad * (1.0 - beta1)).sign()
    return param - decayed(param, change, weight_decay) * lr, m * beta2 + grad * (1.0 - beta2)


def _rmsprop(*, is_centered: bool, has_momentum: bool) -> Op:
    """Define one of the four forms, which have different state."""

    def program(
        param: Value, grad: Value, square: Value, *rest: Value,
        alpha: float, eps: float, weight_decay: float, momentum: float,
    ) -> tuple[Value, ...]:  # fmt: skip
        *olds, lr = rest
        slope = decayed(param, grad, weight_decay)
        state = [square * alpha + slope * (1.0 - alpha) * slope]
        moment = state[0]
        if is_centered:
            state.append(olds[0] * alpha + slope * (1.0 - alpha))
            moment = (moment - state[1] * state[1]).maximum(0.0)  # which rounding may make negative
        change = slope / (moment.sqrt() + eps)
        if has_momentum:
            state.append(change := olds[-1] * momentum + change)
        return param - change * lr, *state

    states = ["square", *["mean"] * is_centered, *["buffer"] * has_momentum]
    name = "centered_" * is_centered + "rmsprop" + "_momentum" * has_momentum
    operands = ", ".join(["param: float", "grad = param", *[f"{s} = param" for s in states]])
    return update_op(
        f"{name}_update",
        f"{operands}, lr = param [] -> {', '.join(['param', *states])}",
        program,
        shares=("momentum",),
    )


ADAM_UPDATE = update_op(
    "adam_update",
    _ADAM.format("", "param, m, v"),
    _adam,
    settings=AdamSettings,
    shares=("beta1", "beta2"),
)
"""As `adamw_update`, with the decay added to the gradient."""

AMSGRAD_UPDATE = update_op(
    "amsgrad_update",
    _ADAM.format("most = param, ", "param, m, v, most"),
    _amsgrad,
    settings=AmsgradSettings,
    shares=("beta1", "beta2"),
)
"""As `adam_update`, or where `decoupled` as `adamw_update`; divides by the largest v there was."""

ADAGRAD_UPDATE = update_op(
    "adagrad_update",
    "param: float, grad = param, total = param, lr = param [], step = int64 -> param, total",
    _adagrad,
)
"""total' = total + g^2; param' = param - lr / (1 + step * lr_decay) * g / (sqrt(total') + eps).

Attrs: lr_decay, eps, weight_decay.
"""

LION_UPDATE = update_op(
    "lion_update",
    "param: float, grad = param, m = param, lr = param [] -> param, m",
    _lion,
    shares=("beta1", "beta2"),
)
"""param' = param - lr * (sign(beta1 m + (1 - beta1) g) + weight_decay * param), m' by beta2.

Attrs: beta1, beta2, weight_decay.
"""

RMSPROP_UPDATES = {
    (is_centered, has_momentum): _rmsprop(is_centered=is_centered, has_momentum=has_momentum)
    for is_centered in (False, True)
    for has_momentum in (False, True)
}
"""By (centered, whether there is momentum): param, grad, square[, mean][, buffer], lr -> all new.

square' = alpha square + (1 - alpha) g^2, mean' so of g; g is divided by sqrt(square' - mean'^2)
+ eps, or by sqrt(square') + eps. Attrs: alpha, eps, weight_decay, momentum.
"""


# Staged updates: LAMB (You et al. 2020, algorithm 2), Adafactor (Shazeer & Stern 2018, as
# torch.optim.Adafactor has it) and Muon (Jordan et al. 2024, as torch.optim.Muon has it). Each ends
# in a step by a program, which can be joined with others of its kind.

News = tuple[ValueId, ...]


def _lamb_change(
    param: Value, grad: Value, m: Value, v: Value, step: Value, settings: AdamSettings
) -> tuple[Value, Value, Value]:
    """Return the direction, before trust, and the new means."""
    mean, square = moments(grad, m, v, settings)
    first, second = corrections(step, settings)
    dtype = param.dtype
    root = square.sqrt() + (second * settings.eps).to(dtype)
    change = mean / root * (second / first).to(dtype)
    return decayed(param, change, settings.weight_decay), mean, square


def _lamb_step(
    param: Value, grad: Value, m: Value, v: Value, rate: Value, step: Value, settings: AdamSettings
) -> tuple[Value, Value, Value]:
    change, mean, square = _lamb_change(param, grad, m, v, step, settings)
    return param - change * rate, mean, square


_MOMENTS = "param: float, grad = param, m = param, v = param, {} = param [], step = int64"

LAMB_STEP = update_op(
    "lamb_step",
    _MOMENTS.format("rate") + " -> param, m, v",
    _lamb_step,
    settings=AdamSettings,
    shares=("beta1", "beta2"),
)
"""The step of `lamb_update` once trust is in the rate."""


def _lamb(
    s: CompositeBuilder, param: Value, grad: Value, m: Value, v: Value, lr: Value, step: Value,
    settings: AdamSettings,
) -> News:  # fmt: skip
    change, _, _ = _lamb_change(param, grad, m, v, step, settings)
    size, length = s.norm(param), s.norm(change)
    trust = (size > 0.0).where((length > 0.0).where(size / length, 1.0), 1.0)
    return s.update(LAMB_STEP, param, grad, m, v, lr * trust, step, **asdict(settings))


LAMB_UPDATE = composite_update(
    "lamb_update", _MOMENTS.format("lr") + " -> param, m, v", _lamb, settings=AdamSettings
)
"""param, grad, m, v, lr [], step [] -> param', m', v': Adam's direction, as long as param times lr.

Attrs: beta1, beta2, eps, weight_decay. Trust is 1 where a norm is 0.
"""

DECAYED_STEP = update_op(
    "decayed_step",
    "param: float, change = param, lr = param [] -> param",
    lambda param, change, lr, *, weight_decay: _kept(param, lr, weight_decay) - change,
)
"""param' = param * (1 - lr * weight_decay) - change. Attrs: weight_decay."""


def _kept(param: Value, lr: Value, weight_decay: float) -> Value:
    if weight_decay == 0.0:
        return param
    return param * (1.0 - lr.to(DType.FLOAT64) * weight_decay).to(param.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdafactorSettings:
    """How fast means forget, bounds of squares and of weights, and of the size of a step (d)."""

    beta2_decay: float
    eps1: float
    eps2: float
    d: float
    weight_decay: float


def _clipped(
    s: CompositeBuilder, param: Value, grad: Value, estimate: Value, lr: Value, count: Value,
    settings: AdafactorSettings,
) -> Value:  # fmt: skip
    """Return Adafactor's step from the estimate of the squares."""
    direction = estimate.maximum(settings.eps1 * settings.eps1).rsqrt() * grad
    denominator = (s.mean(direction * direction).sqrt() * (1.0 / settings.d)).maximum(1.0)
    rate = lr.minimum(count.rsqrt().to(param.dtype))
    return direction * (s.mean(param * param).sqrt().maximum(settings.eps2) * rate / denominator)


def _adafactor(
    s: CompositeBuilder, param: Value, grad: Value, rows: Value, columns: Value, lr: Value,
    step: Value, settings: AdafactorSettings,
) -> News:  # fmt: skip
    count = step.to(DType.FLOAT64) + 1.0
    share = (count**settings.beta2_decay).to(param.dtype)
    row, column = s.mean(grad * grad, (-1,)), s.mean(grad * grad, (-2,))
    now = rows + (row - rows) * share
    estimate = now * (columns + (column - columns) * share)
    estimate = estimate / s.mean(now, (-2,)).maximum(settings.eps1)
    change = _clipped(s, param, grad, estimate, lr, count, settings)
    return (
        *s.update(DECAYED_STEP, param, change, lr, weight_decay=settings.weight_decay),
        *s.update(EMA_UPDATE, rows, row, share),
        *s.update(EMA_UPDATE, columns, column, share),
    )


def _adafactor_vector(
    s: CompositeBuilder, param: Value, grad: Value, variance: Value, lr: Value, step: Value,
    settings: AdafactorSettings,
) -> News:  # fmt: skip
    count = step.to(DType.FLOAT64) + 1.0
    share, square = (count**settings.beta2_decay).to(param.dtype), grad * grad
    estimate = variance + (square - variance) * share
    change = _clipped(s, param, grad, estimate, lr, count, settings)
    return (
        *s.update(DECAYED_STEP, param, change, lr, weight_decay=settings.weight_decay),
        *s.update(EMA_UPDATE, variance, square, share),
    )


ADAFACTOR_UPDATE = composite_update(
    "adafactor_update",
    "param: float, grad = param, rows: float, columns: float, lr = param [], step = int64"
    " -> param, rows, columns",
    _adafactor,
    settings=AdafactorSettings,
)
"""param [..., R, C], grad, rows [..., R, 1], columns [..., 1, C], lr [], step [] -> all three new.

Attrs: beta2_decay, eps1, eps2, d, weight_decay.
"""

ADAFACTOR_VECTOR_UPDATE = composite_update(
    "adafactor_vector_update",
    "param: float, grad = param, variance = param, lr = param [], step = int64 -> param, variance",
    _adafactor_vector,
    settings=AdafactorSettings,
)
"""The same for a vector or a number, whose squares are kept whole."""


def _muon_step(
    param: Value, grad: Value, buffer: Value, direction: Value, lr: Value,
    *, momentum: float, weight_decay: float, scale: float,
) -> tuple[Value, Value]:  # fmt: skip
    step = direction * (lr.to(DType.FLOAT64) * scale).to(param.dtype)
    return _kept(param, lr, weight_decay) - step, buffer + (grad - buffer) * (1.0 - momentum)


MUON_STEP = update_op(
    "muon_step",
    "param: float, grad = param, buffer = param, direction = param, lr = param [] -> param, buffer",
    _muon_step,
    shares=("momentum",),
)
"""The step of `muon_update` along the direction that its products make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonSettings:
    """Of the step: momentum, decay, scale of the rate. Of the iteration: a, b, c, steps, eps."""

    momentum: float
    nesterov: bool
    weight_decay: float
    scale: float
    a: float
    b: float
    c: float
    ns_steps: int
    eps: float


def _muon(
    s: CompositeBuilder, param: Value, grad: Value, buffer: Value, lr: Value, settings: MuonSettings
) -> News:
    mean = buffer + (grad - buffer) * (1.0 - settings.momentum)
    x = grad + (mean - grad) * settings.momentum if settings.nesterov else mean
    is_tall = param.shape[0] > param.shape[1]
    x = s.turned(x) if is_tall else x
    x = x / s.norm(x).maximum(settings.eps)
    a, b, c = settings.a, settings.b, settings.c
    for _ in range(settings.ns_steps):
        gram = s.product(x, s.turned(x))
        x = x * a + s.product(gram * b + s.product(gram, gram) * c, x)
    direction = s.turned(x) if is_tall else x
    return s.update(
        MUON_STEP, param, grad, buffer, direction, lr,
        momentum=settings.momentum, weight_decay=settings.weight_decay, scale=settings.scale,
    )  # fmt: skip


MUON_UPDATE = composite_update(
    "muon_update",
    "param: float, grad = param, buffer = param, lr = param [] -> param, buffer",
    _muon,
    settings=MuonSettings,
)
"""param [R, C], grad, buffer, lr [] -> param', buffer': a step along the momentum made orthogonal.

Attrs: momentum, nesterov, weight_decay, scale (of the rate), a, b, c, ns_steps, eps (of Newton and
Schulz' iteration).
"""
