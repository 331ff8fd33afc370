"""References over many steps and far out, and against torch where it is installed."""

import math

import numpy as np
import pytest

import compiler.ops.standard  # noqa: F401  # registers the ops
from compiler.attrs import Attrs
from compiler.registry import find_op, reference

RNG = np.random.default_rng(3)


def run(name, *arrays, **attrs):
    return reference.get(find_op(name))(Attrs(attrs), *arrays)


def test_softmax_and_cross_entropy_survive_huge_logits():
    x = np.array([[1e4, 0.0], [-1e4, -1e4]])
    np.testing.assert_array_equal(
        run("softmax", x, scale=1.0, causal=False)[0], [[1, 0], [0.5, 0.5]]
    )
    losses, lse = run("cross_entropy_rows", x, np.array([1, 0]))
    np.testing.assert_allclose(lse, [1e4, -1e4 + math.log(2)])
    np.testing.assert_allclose(losses, [1e4, math.log(2)])


def adamw_by_hand(p, grads, lr, beta1, beta2, eps, decay):
    m = v = 0.0
    for t, g in enumerate(grads, 1):
        p *= 1 - lr * decay
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        p -= lr * (m / (1 - beta1**t)) / (math.sqrt(v / (1 - beta2**t)) + eps)
    return p


ADAMW = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1}


def adamw_run(param, grads, lr):
    m, v = np.zeros_like(param), np.zeros_like(param)
    for step, grad in enumerate(grads):
        param, m, v = run("adamw_update", param, grad, m, v, lr, np.array(step), **ADAMW)
    return param


def test_five_steps_of_adamw_follow_the_paper():
    param, grads = RNG.standard_normal(3), RNG.standard_normal((5, 3))
    got = adamw_run(param, grads, np.array(0.05))
    expected = [adamw_by_hand(param[i], grads[:, i], 0.05, 0.8, 0.9, 1e-3, 0.1) for i in range(3)]
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def momentum_run(param, grads, lr, nesterov, decay):
    buffer = np.zeros_like(param)
    for grad in grads:
        param, buffer = run(
            "momentum_update", param, grad, buffer, lr,
            momentum=0.9, nesterov=nesterov, weight_decay=decay,
        )  # fmt: skip
    return param


def test_momentum_is_a_geometric_sum_of_gradients():
    grads = RNG.standard_normal(4)
    got = momentum_run(np.array([1.0]), grads[:, None], np.array(0.1), False, 0.0)
    moved = sum(sum(0.9 ** (t - i) * grads[i] for i in range(t + 1)) for t in range(4))
    np.testing.assert_allclose(got, [1.0 - 0.1 * moved])


def test_torch_agrees_on_forward_backward_and_updates():
    torch = pytest.importorskip("torch", reason="the torch oracle needs torch")
    functional = torch.nn.functional
    x, dy = RNG.standard_normal((3, 5)), RNG.standard_normal((3, 5))
    gamma, beta = RNG.standard_normal(5), RNG.standard_normal(5)
    tx, tg, tb = (torch.tensor(a, requires_grad=True) for a in (x, gamma, beta))
    functional.layer_norm(tx, (5,), tg, tb, 1e-5).backward(torch.tensor(dy))
    _, mean, rstd = run("layer_norm", x, gamma, beta, eps=1e-5)
    for got, expected in zip(
        run("layer_norm_grad", dy, x, gamma, mean, rstd), (tx, tg, tb), strict=True
    ):
        np.testing.assert_allclose(got, expected.grad.numpy(), rtol=1e-9, atol=1e-12)
    tx = torch.tensor(x, requires_grad=True)
    functional.gelu(tx, approximate="tanh").backward(torch.tensor(dy))
    np.testing.assert_allclose(run("gelu_grad", dy, x)[0], tx.grad.numpy(), rtol=1e-9)
    param, grads = RNG.standard_normal(3), RNG.standard_normal((5, 3))
    for got, make in (
        (
            adamw_run(param, grads, np.array(0.05)),
            lambda p: torch.optim.AdamW(p, 0.05, (0.8, 0.9), 1e-3, 0.1),
        ),
        (
            momentum_run(param, grads, np.array(0.05), True, 0.1),
            lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=0.1, nesterov=True),
        ),
    ):
        p = torch.nn.Parameter(torch.tensor(param))
        optimizer = make([p])
        for grad in grads:
            p.grad = torch.tensor(grad)
            optimizer.step()
        np.testing.assert_allclose(got, p.detach().numpy(), rtol=1e-10)
