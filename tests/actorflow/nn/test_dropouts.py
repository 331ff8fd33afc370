"""Dropout of channels and between SELUs, and statistics that instance norm keeps."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from compiler.contract.errors import CompileError


def trained(function, x):
    """Return what a job that trains computes of x, beside a parameter that it moves nowhere."""

    class Scale(nn.Module):
        def __init__(self):
            self.one = nn.Parameter((1,), (("kind", "ones"),))
            self.inner = function if isinstance(function, nn.Module) else nn.Identity()

    def loss(model, batch):
        made = (model.inner if isinstance(function, nn.Module) else function)(batch.x)
        return {"loss": (made * model.one).mean(), "y": made}

    job, model = af.job(loss, optimizer=af.optim.SGD(0.0)), Scale()
    return job.step(model, {"x": x})["y"], model.inner


@pytest.mark.parametrize("layer", [nn.Dropout1d, nn.Dropout2d, nn.Dropout3d])
@pytest.mark.parametrize("is_batch", [True, False])
def test_whole_channels_are_dropped_and_others_scaled(layer, is_batch):
    spatial = (2, 3, 2)[: int(layer.__name__[-2])]
    shape = (40, 50, *spatial) if is_batch else (2000, *spatial)
    made, _ = trained(layer(0.25), np.ones(shape, np.float32))
    channels = made.reshape(2000, -1)
    assert (channels == channels[:, :1]).all()
    kept = channels[:, 0] != 0
    np.testing.assert_allclose(channels[kept, 0], 1 / 0.75, rtol=1e-6)
    assert kept.mean() == pytest.approx(0.75, abs=0.04)


def test_outside_of_training_and_at_0_nothing_is_dropped():
    x = np.ones((3, 4, 5), np.float32)
    job = af.job(lambda m, b: nn.AlphaDropout()(nn.Dropout1d()(nn.Dropout()(b.x))), train=False)
    np.testing.assert_array_equal(job.step(nn.Module(), {"x": x})["output"], x)
    np.testing.assert_array_equal(trained(lambda x: af.alpha_dropout(x, 0.0), x)[0], x)


DROPOUTS = {
    "elements": lambda x, p: af.dropout(x, p),
    "channels": lambda x, p: nn.Dropout2d(p)(x),
    "alpha": lambda x, p: af.alpha_dropout(x, p),
    "weights of attention": lambda x, p: af.scaled_dot_product_attention(x, x, x, dropout_p=p),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_a_dropout_of_1_leaves_zeros_and_of_0_everything_with_gradients(name):
    def loss(model, batch):
        made = {p: DROPOUTS[name](batch.x, p) for p in (0.0, 1.0)}
        grads = {p: af.grad(y.sum(), batch.x) for p, y in made.items()}
        made |= {p + 2.0: grad for p, grad in grads.items()}
        return {"loss": model.one.sum(), **{f"{p:.0f}": y for p, y in made.items()}}

    model = nn.Module()
    model.one = nn.Parameter((1,), "ones")
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 4)).astype(np.float32)
    made = af.job(loss, optimizer=af.optim.SGD(0.0)).step(model, {"x": x})
    if name != "weights of attention":
        np.testing.assert_array_equal(made["0"], x)
        np.testing.assert_array_equal(made["2"], np.ones_like(x))
    np.testing.assert_array_equal(made["1"], np.zeros_like(x))
    np.testing.assert_array_equal(made["3"], np.zeros_like(x))


def test_alpha_dropout_keeps_mean_and_variance():
    x = np.random.default_rng(0).normal(size=(300, 300)).astype(np.float32)
    made, _ = trained(nn.AlphaDropout(0.2), x)
    assert made.mean() == pytest.approx(0.0, abs=0.02)
    assert made.std() == pytest.approx(1.0, abs=0.02)
    _, counts = np.unique(made, return_counts=True)
    assert counts.max() / made.size == pytest.approx(0.2, abs=0.01)


def test_layers_drop_half_where_nothing_is_said_as_torchs_do():
    assert [layer().p for layer in (nn.Dropout, nn.Dropout2d, nn.AlphaDropout)] == [0.5] * 3


@pytest.mark.parametrize("layer", [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d])
def test_instance_norm_follows_the_means_of_its_statistics(layer):
    shape = (4, 3, 5, 2, 2)[: layer.ranks[0]]
    x = np.random.default_rng(1).normal(1.0, 2.0, shape).astype(np.float32)
    made, inner = trained(layer(3, affine=True, track_running_stats=True, momentum=0.25), x)
    flat = x.reshape(4, 3, -1)
    mean, var = flat.mean(2).mean(0), flat.var(2, ddof=1).mean(0)
    np.testing.assert_allclose(inner.running_mean.data, 0.25 * mean, rtol=1e-5)
    np.testing.assert_allclose(inner.running_var.data, 0.75 + 0.25 * var, rtol=1e-5)
    own = (flat - flat.mean(2, keepdims=True)) / np.sqrt(flat.var(2, keepdims=True) + 1e-5)
    np.testing.assert_allclose(made.reshape(flat.shape), own, atol=1e-5)
    got = af.job(lambda m, b: m(b.x), train=False).step(inner, {"x": x})["output"]
    m, v = [s.data[None, :, None] for s in (inner.running_mean, inner.running_var)]
    np.testing.assert_allclose(got.reshape(flat.shape), (flat - m) / np.sqrt(v + 1e-5), atol=1e-5)


def test_instance_norm_without_statistics_has_no_state_and_refuses_one_value():
    assert [*nn.InstanceNorm2d(3).named_stored()] == []
    x = np.ones((2, 3, 1), np.float32)
    with raises(CompileError):
        trained(nn.InstanceNorm1d(3, track_running_stats=True), x)
    with raises(CompileError):
        trained(nn.InstanceNorm2d(3), x)
