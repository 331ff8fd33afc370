"""Updates whose step follows the size of past gradients, or their sign alone.

Semantics are torch.optim's where torch has them: Adam with decay added to the gradient (Kingma & Ba
2015), AMSGrad (Reddi et al. 2018), Adagrad (Duchi et al. 2011), RMSprop (Hinton 2012; centred after
Graves 2013), and Lion (Chen et al. 2023, algorithm 2). Each is its program; see
`compiler.fusion.updates`. Corrections of the bias are computed in float64, once a launch.
"""

from __future__ import annotations

from compiler.fusion.expressions import Expression
from compiler.fusion.updates import update_op
from compiler.ops.update import decayed
from compiler.registry import Op
from compiler.types import DType

Value = Expression

_ADAM = "param: float, grad = param, m = param, v = param, {}lr = param [], step = int64 -> {}"


def moments(grad: Value, m: Value, v: Value, beta1: float, beta2: float) -> tuple[Value, Value]:
    """Return the new means of gradients and of their squares."""
    square = v * beta2 + grad * (1.0 - beta2) * grad  # in this order: grad * grad may overflow
    return m * beta1 + grad * (1.0 - beta1), square


def corrections(step: Value, beta1: float, beta2: float) -> tuple[Value, Value]:
    """Return what the two means lack of their limits after step + 1 steps; the second's root."""
    t = step.to(DType.FLOAT64) + 1.0
    return 1.0 - beta1**t, (1.0 - beta2**t).sqrt()


def _adam(
    param: Value, grad: Value, m: Value, v: Value, lr: Value, step: Value,
    *, beta1: float, beta2: float, eps: float, weight_decay: float,
) -> tuple[Value, Value, Value]:  # fmt: skip
    slope, own = decayed(param, grad, weight_decay), param.dtype
    mean, square = moments(slope, m, v, beta1, beta2)
    first, second = corrections(step, beta1, beta2)
    change = mean / (square.sqrt() + (second * eps).to(own))
    return param - change * (lr.to(DType.FLOAT64) * second / first).to(own), mean, square


def _amsgrad(
    param: Value, grad: Value, m: Value, v: Value, most: Value, lr: Value, step: Value,
    *, beta1: float, beta2: float, eps: float, weight_decay: float, decoupled: bool,
) -> tuple[Value, Value, Value, Value]:  # fmt: skip
    rate, own = lr.to(DType.FLOAT64), param.dtype
    slope = decayed(param, grad, 0.0 if decoupled else weight_decay)
    mean, square = moments(slope, m, v, beta1, beta2)
    largest = most.maximum(square)
    first, second = corrections(step, beta1, beta2)
    kept = param * (1.0 - rate * weight_decay).to(own) if decoupled else param
    change = mean / (largest.sqrt() + (second * eps).to(own))
    return kept - change * (rate * second / first).to(own), mean, square, largest


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
        news = [square * alpha + slope * (1.0 - alpha) * slope]
        spread = news[0]
        if is_centered:
            news.append(olds[0] * alpha + slope * (1.0 - alpha))
            spread = (spread - news[1] * news[1]).maximum(0.0)  # which rounding may make negative
        change = slope / (spread.sqrt() + eps)
        if has_momentum:
            news.append(change := olds[-1] * momentum + change)
        return param - change * lr, *news

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
    "adam_update", _ADAM.format("", "param, m, v"), _adam, shares=("beta1", "beta2")
)
"""As `adamw_update`, with the decay added to the gradient."""

AMSGRAD_UPDATE = update_op(
    "amsgrad_update",
    _ADAM.format("most = param, ", "param, m, v, most"),
    _amsgrad,
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
