"""Updates that need norms, products or sums of axes; see `compiler.fusion.staged`.

LAMB (You et al. 2020, algorithm 2), Adafactor (Shazeer & Stern 2018, as torch.optim.Adafactor has
it) and Muon (Jordan et al. 2024, as torch.optim.Muon has it). Each ends in a step by a program,
which can be joined with others of its kind.
"""

from __future__ import annotations

from compiler.fusion.expressions import Expression
from compiler.fusion.staged import StageBuilder, staged_update
from compiler.fusion.updates import update_op
from compiler.ops.adaptive_updates import corrections, moments
from compiler.ops.update import APPROACH, decayed
from compiler.types import DType, ValueId

Value = Expression
News = tuple[ValueId, ...]


def _lamb_change(
    param: Value, grad: Value, m: Value, v: Value, step: Value,
    beta1: float, beta2: float, eps: float, weight_decay: float,
) -> tuple[Value, Value, Value]:  # fmt: skip
    """Return the direction, before trust, and the new means."""
    mean, square = moments(grad, m, v, beta1, beta2)
    first, second = corrections(step, beta1, beta2)
    own = param.dtype
    change = mean / (square.sqrt() + (second * eps).to(own)) * (second / first).to(own)
    return decayed(param, change, weight_decay), mean, square


def _lamb_step(
    param: Value, grad: Value, m: Value, v: Value, rate: Value, step: Value,
    *, beta1: float, beta2: float, eps: float, weight_decay: float,
) -> tuple[Value, Value, Value]:  # fmt: skip
    change, mean, square = _lamb_change(param, grad, m, v, step, beta1, beta2, eps, weight_decay)
    return param - change * rate, mean, square


_MOMENTS = "param: float, grad = param, m = param, v = param, {} = param [], step = int64"

LAMB_STEP = update_op(
    "lamb_step",
    _MOMENTS.format("rate") + " -> param, m, v",
    _lamb_step,
    shares=("beta1", "beta2"),
)
"""The step of `lamb_update` once trust is in the rate."""


def _lamb(
    s: StageBuilder, param: Value, grad: Value, m: Value, v: Value, lr: Value, step: Value,
    *, beta1: float, beta2: float, eps: float, weight_decay: float,
) -> News:  # fmt: skip
    settings = (beta1, beta2, eps, weight_decay)
    change, _, _ = _lamb_change(param, grad, m, v, step, *settings)
    size, length = s.norm(param), s.norm(change)
    trust = (size > 0.0).where((length > 0.0).where(size / length, 1.0), 1.0)
    return s.update(
        LAMB_STEP, param, grad, m, v, lr * trust, step,
        beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay,
    )  # fmt: skip


LAMB_UPDATE = staged_update("lamb_update", _MOMENTS.format("lr") + " -> param, m, v", _lamb)
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


def _clipped(
    s: StageBuilder, param: Value, grad: Value, estimate: Value, lr: Value, count: Value,
    eps1: float, eps2: float, d: float,
) -> Value:  # fmt: skip
    """Return Adafactor's step from the estimate of the squares."""
    direction = estimate.maximum(eps1 * eps1).rsqrt() * grad
    denominator = (s.mean(direction * direction).sqrt() * (1.0 / d)).maximum(1.0)
    rate = lr.minimum(count.rsqrt().to(param.dtype))
    return direction * (s.mean(param * param).sqrt().maximum(eps2) * rate / denominator)


def _adafactor(
    s: StageBuilder, param: Value, grad: Value, rows: Value, columns: Value, lr: Value, step: Value,
    *, beta2_decay: float, eps1: float, eps2: float, d: float, weight_decay: float,
) -> News:  # fmt: skip
    count = step.to(DType.FLOAT64) + 1.0
    share = (count**beta2_decay).to(param.dtype)
    row, column = s.mean(grad * grad, (-1,)), s.mean(grad * grad, (-2,))
    now = rows + (row - rows) * share
    estimate = now * (columns + (column - columns) * share) / s.mean(now, (-2,)).maximum(eps1)
    change = _clipped(s, param, grad, estimate, lr, count, eps1, eps2, d)
    return (
        *s.update(DECAYED_STEP, param, change, lr, weight_decay=weight_decay),
        *s.update(APPROACH, rows, row, share),
        *s.update(APPROACH, columns, column, share),
    )


def _adafactor_vector(
    s: StageBuilder, param: Value, grad: Value, variance: Value, lr: Value, step: Value,
    *, beta2_decay: float, eps1: float, eps2: float, d: float, weight_decay: float,
) -> News:  # fmt: skip
    count = step.to(DType.FLOAT64) + 1.0
    share, square = (count**beta2_decay).to(param.dtype), grad * grad
    estimate = variance + (square - variance) * share
    change = _clipped(s, param, grad, estimate, lr, count, eps1, eps2, d)
    return (
        *s.update(DECAYED_STEP, param, change, lr, weight_decay=weight_decay),
        *s.update(APPROACH, variance, square, share),
    )


ADAFACTOR_UPDATE = staged_update(
    "adafactor_update",
    "param: float, grad = param, rows: float, columns: float, lr = param [], step = int64"
    " -> param, rows, columns",
    _adafactor,
)
"""param [..., R, C], grad, rows [..., R, 1], columns [..., 1, C], lr [], step [] -> all three new.

Attrs: beta2_decay, eps1, eps2, d, weight_decay.
"""

ADAFACTOR_VECTOR_UPDATE = staged_update(
    "adafactor_vector_update",
    "param: float, grad = param, variance = param, lr = param [], step = int64 -> param, variance",
    _adafactor_vector,
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


def _muon(
    s: StageBuilder, param: Value, grad: Value, buffer: Value, lr: Value,
    *, momentum: float, nesterov: bool, weight_decay: float, scale: float,
    a: float, b: float, c: float, ns_steps: int, eps: float,
) -> News:  # fmt: skip
    mean = buffer + (grad - buffer) * (1.0 - momentum)
    x = grad + (mean - grad) * momentum if nesterov else mean
    is_tall = param.shape[0] > param.shape[1]
    x = s.turned(x) if is_tall else x
    x = x / s.norm(x).maximum(eps)
    for _ in range(ns_steps):
        gram = s.product(x, s.turned(x))
        x = x * a + s.product(gram * b + s.product(gram, gram) * c, x)
    direction = s.turned(x) if is_tall else x
    return s.update(
        MUON_STEP, param, grad, buffer, direction, lr,
        momentum=momentum, weight_decay=weight_decay, scale=scale,
    )  # fmt: skip


MUON_UPDATE = staged_update(
    "muon_update",
    "param: float, grad = param, buffer = param, lr = param [] -> param, buffer",
    _muon,
)
"""param [R, C], grad, buffer, lr [] -> param', buffer': a step along the momentum made orthogonal.

Attrs: momentum, nesterov, weight_decay, scale (of the rate), a, b, c, ns_steps, eps (of Newton and
Schulz' iteration).
"""
