"""References against formulas written here by element, and against torch where it is installed."""

import math

import numpy as np
import pytest

import compiler.ops.standard  # noqa: F401  # registers the ops
from compiler.attrs import Attrs
from compiler.registry import find_op, reference

RNG = np.random.default_rng(3)


def run(name, *arrays, **attrs):
    return reference.get(find_op(name))(Attrs(attrs), *arrays)


def test_causal_softmax_attends_to_the_past_only():
    x = RNG.standard_normal((2, 3, 5))
    (y,) = run("softmax", x, scale=0.5, causal=True)
    for batch in range(2):
        for row in range(3):
            width = row + 2 + 1
            e = [math.exp(0.5 * x[batch, row, j]) for j in range(width)]
            expected = [v / sum(e) for v in e] + [0.0] * (5 - width)
            np.testing.assert_allclose(y[batch, row], expected, rtol=1e-12)


def test_softmax_and_cross_entropy_survive_huge_logits():
    x = np.array([[1e4, 0.0], [-1e4, -1e4]])
    np.testing.assert_array_equal(
        run("softmax", x, scale=1.0, causal=False)[0], [[1, 0], [0.5, 0.5]]
    )
    loss, lse = run("cross_entropy", x, np.array([1, 0]))
    np.testing.assert_allclose(lse, [1e4, -1e4 + math.log(2)])
    np.testing.assert_allclose(loss, (1e4 + math.log(2)) / 2)


def test_layer_norm_uses_the_biased_variance():
    x, gamma, beta = RNG.standard_normal((4, 6)), RNG.standard_normal(6), RNG.standard_normal(6)
    y, mean, rstd = run("layer_norm", x, gamma, beta, eps=0.01)
    for i, row in enumerate(x):
        m = sum(row) / 6
        r = 1 / math.sqrt(sum((v - m) ** 2 for v in row) / 6 + 0.01)
        np.testing.assert_allclose([mean[i], rstd[i]], [m, r], rtol=1e-12)
        expected = [(v - m) * r * g + b for v, g, b in zip(row, gamma, beta, strict=True)]
        np.testing.assert_allclose(y[i], expected, rtol=1e-10)


def test_cross_entropy_is_the_mean_of_minus_log_softmax():
    x, labels = RNG.standard_normal((4, 3)), np.array([2, 0, 1, 2])
    loss, _ = run("cross_entropy", x, labels)
    logs = [
        math.log(math.exp(r[j]) / sum(map(math.exp, r))) for r, j in zip(x, labels, strict=True)
    ]
    assert loss == pytest.approx(-sum(logs) / 4, rel=1e-12)


def test_activations_follow_their_formulas():
    x = np.linspace(-5, 5, 21)
    gelu = [v / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in x]
    np.testing.assert_allclose(run("gelu", x)[0], gelu, rtol=1e-12, atol=1e-15)
    silu = [v / (1 + math.exp(-v)) for v in x]
    np.testing.assert_allclose(run("silu", x)[0], silu, rtol=1e-12)
    np.testing.assert_array_equal(run("relu", x)[0], [max(v, 0.0) for v in x])
    np.testing.assert_array_equal(run("sigmoid", np.array([-1e4, 1e4]))[0], [0.0, 1.0])


def test_argmax_takes_the_first_of_ties():
    x = np.array([[1, 3, 3], [2, 2, 0]])
    np.testing.assert_array_equal(run("argmax", x, axis=1, keepdims=False)[0], [1, 0])


def test_pad_spreads_elements_into_zeros():
    (y,) = run("pad", np.array([5.0, 6.0]), low=(1,), high=(2,), steps=(3,))
    np.testing.assert_array_equal(y, [0, 5, 0, 0, 6, 0, 0])


def test_embedding_grad_adds_the_rows_of_equal_ids():
    (y,) = run("embedding_grad", np.array([[1.0], [2.0], [4.0]]), np.array([2, 0, 2]), rows=4)
    np.testing.assert_array_equal(y, [[2], [0], [5], [0]])


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


def test_nesterov_looks_one_step_ahead():
    got = momentum_run(np.array([1.0]), np.array([[2.0]]), np.array(0.1), True, 0.5)
    np.testing.assert_allclose(got, [1.0 - 0.1 * (2.5 + 0.9 * 2.5)])


def test_plain_descent_decays_towards_zero():
    (got,) = run("sgd_update", np.array([2.0]), np.array([1.0]), np.array(0.1), weight_decay=0.5)
    np.testing.assert_allclose(got, [2.0 - 0.1 * 2.0])


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
