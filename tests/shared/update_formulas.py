"""What updates of optimizers compute, in numpy's float64: for the table of ops."""

import numpy as np

RESCALE = {"growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 3}


def rescaled(scale, good, broken, growth_factor, backoff_factor, growth_interval):
    if broken:
        return scale * backoff_factor, np.array(0)
    is_long = good + 1 == growth_interval
    return scale * growth_factor if is_long else scale, np.array(0) if is_long else good + 1


def decayed(p, g, lr, weight_decay):
    return p - lr * (g + weight_decay * p)


def with_momentum(p, g, v, lr, momentum, nesterov, weight_decay):
    g = g + weight_decay * p
    v = momentum * v + g
    return p - lr * (g + momentum * v if nesterov else v), v


def adamw(p, g, m, v, lr, step, beta1, beta2, eps, weight_decay):
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    right = m / (1 - beta1 ** (step + 1)), v / (1 - beta2 ** (step + 1))
    return p * (1 - lr * weight_decay) - lr * right[0] / (np.sqrt(right[1]) + eps), m, v


def corrected(p, mean, largest, lr, step, beta1, beta2, eps):
    right = mean / (1 - beta1 ** (step + 1)), largest / (1 - beta2 ** (step + 1))
    return p - lr * right[0] / (np.sqrt(right[1]) + eps)


def adam(p, g, m, v, lr, step, beta1, beta2, eps, weight_decay):
    g = g + weight_decay * p
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    return corrected(p, m, v, lr, step, beta1, beta2, eps), m, v


def amsgrad(p, g, m, v, most, lr, step, beta1, beta2, eps, weight_decay, decoupled):
    p, g = (p * (1 - lr * weight_decay), g) if decoupled else (p, g + weight_decay * p)
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    most = np.maximum(most, v)
    return corrected(p, m, most, lr, step, beta1, beta2, eps), m, v, most


def lamb_step(p, g, m, v, rate, step, beta1, beta2, eps, weight_decay):
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    return corrected(p, m, v, rate, step, beta1, beta2, eps) - rate * weight_decay * p, m, v


def decayed_step(p, change, lr, weight_decay):
    return p * (1 - lr * weight_decay) - change


def muon_step(p, g, buffer, direction, lr, momentum, weight_decay, scale):
    shrunk = p * (1 - lr * weight_decay)
    return shrunk - lr * scale * direction, momentum * buffer + (1 - momentum) * g


def adagrad(p, g, total, lr, step, lr_decay, eps, weight_decay, maximize):
    g = (-g if maximize else g) + weight_decay * p
    total = total + g * g
    return p - lr / (1 + step * lr_decay) * g / (np.sqrt(total) + eps), total


def lion(p, g, m, lr, beta1, beta2, weight_decay):
    step = np.sign(beta1 * m + (1 - beta1) * g) + weight_decay * p
    return p - lr * step, beta2 * m + (1 - beta2) * g


def damped(p, g, buffer, lr, step, momentum, dampening, weight_decay):
    g = g + weight_decay * p
    buffer = g if step == 0 else momentum * buffer + (1 - dampening) * g
    return p - lr * buffer, buffer


def rmsprop(p, g, square, *rest, alpha, eps, weight_decay, momentum, centered):
    *olds, lr = rest
    g = g + weight_decay * p
    news = [alpha * square + (1 - alpha) * g * g]
    news += [alpha * olds[0] + (1 - alpha) * g] if centered else []
    change = g / (np.sqrt(news[0] - (news[1] ** 2 if centered else 0)) + eps)
    news += [momentum * olds[-1] + change] if momentum else []
    return p - lr * (news[-1] if momentum else change), *news
