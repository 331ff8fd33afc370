"""Losses of classes and of probabilities keep their digits, whatever part logits have in common."""

from functools import partial

import numpy as np
import pytest
from changed_passes import change_passes
from graphs import WideFrom
from rank_trainings import Training

import actorflow as af
from actorflow import nn
from actorflow.data import ArraySource
from compiler.fusion import regions

EACH_ONCE = pytest.mark.thinned(2)  # the types in turn
DTYPES = [pytest.param(name, marks=EACH_ONCE) for name in ("float32", "float64")]


def computed(function, device, *wanted, **batch):
    """Return losses of each row, and gradients of their sum weighed by the row's number."""

    @af.job(train=False, **device)
    def job(model, b):
        losses = function(b)
        weights = np.arange(1, 1 + losses.shape[0], dtype=losses.dtype.value)
        slopes = af.grad(losses, [b[name] for name in wanted], weights)
        return {"losses": losses, **dict(zip(wanted, slopes, strict=True))}

    return job.step(nn.Module(), batch)


COMMON = np.array([0, 1, -1e4, 1e4, 1e5, -1e6, 1e6, 1e7, 1e8, -1e9, 1e12, 1e30])


def logits(dtype, classes=7):
    """Return rows that have each of these numbers in common, as far as the dtype holds them."""
    own = np.random.default_rng(classes).normal(size=(len(COMMON), classes)) * 2
    return (own + COMMON[:, None]).astype(dtype)


WEIGHT = np.array([0.5, 2, 1, 1, 3, 0.25, 1])
SOFT = np.random.default_rng(1).dirichlet(np.ones(7), len(COMMON))
Y = np.arange(len(COMMON)) % 7


def log_probabilities(x):
    z = x.astype(np.float64) - x.astype(np.float64).max(1, keepdims=True)
    return z - np.log(np.exp(z).sum(1, keepdims=True))


def of_shares(x, shares):
    """Return losses and gradients for the share that each class has of a row: [rows, C]."""
    found = log_probabilities(x)
    rows = np.arange(1, 1 + len(x))[:, None]
    gradient = np.exp(found) * shares.sum(1, keepdims=True) - shares
    return -(shares * found).sum(1), gradient * rows


def shares_of(y, classes, smoothing=0.0, weight=1.0):
    return (np.eye(classes)[y] * (1 - smoothing) + smoothing / classes) * weight


of_rows = partial(af.cross_entropy, reduction="none")

FORMS = {
    "labels": (lambda x, b: of_rows(x, b.y), shares_of(Y, 7)),
    "weighted": (
        lambda x, b: of_rows(x, b.y, WEIGHT.astype(x.dtype.value)),
        shares_of(Y, 7, weight=WEIGHT),
    ),
    "smoothed": (lambda x, b: of_rows(x, b.y, label_smoothing=0.2), shares_of(Y, 7, 0.2)),
    "smoothed, weighted": (
        lambda x, b: of_rows(x, b.y, WEIGHT.astype(x.dtype.value), label_smoothing=0.3),
        shares_of(Y, 7, 0.3, WEIGHT),
    ),
    "some ignored": (
        lambda x, b: of_rows(x, b.y, ignore_index=3),
        shares_of(Y, 7) * (Y != 3)[:, None],
    ),
    "pixels": (
        lambda x, b: of_rows(x.reshape(4, 3, 7).permute(0, 2, 1), b.y.reshape(4, 3)).flatten(),
        shares_of(Y, 7),
    ),
    "probabilities": (lambda x, b: of_rows(x, SOFT.astype(x.dtype.value)), SOFT),
    "nll of log_softmax": (
        lambda x, b: af.nll_loss(af.log_softmax(x, 1), b.y, reduction="none"),
        shares_of(Y, 7),
    ),
    "as kl_div": (
        lambda x, b: (
            af.kl_div(
                af.log_softmax(x, 1), np.log(SOFT).astype(x.dtype.value), "none", log_target=True
            ).sum(1)
            - np.float32((SOFT * np.log(SOFT)).sum(1)).astype(x.dtype.value)
        ),
        SOFT,
    ),
}


@pytest.mark.thinned(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_a_common_part_of_logits_leaves_loss_and_gradient_their_digits(form, dtype, device):
    function, shares = FORMS[form]
    x = logits(dtype)
    made = computed(lambda b: function(b.x, b), device, "x", x=x, y=Y)
    losses, gradient = of_shares(x, shares)
    near = 1e-5 if dtype == "float32" or form == "as kl_div" else 1e-11
    np.testing.assert_allclose(made["losses"], losses, rtol=near, atol=near / 10)
    np.testing.assert_allclose(made["x"], gradient, rtol=near, atol=near)


@pytest.mark.parametrize("classes", [1, 2, 33, 1000])
def test_so_it_is_of_any_number_of_classes(classes, device):
    x, y = logits("float32", classes), Y % classes
    made = computed(lambda b: of_rows(b.x, b.y), device, "x", x=x, y=y)
    losses, gradient = of_shares(x, shares_of(y, classes))
    np.testing.assert_allclose(made["losses"], losses, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(made["x"], gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_weights_of_classes_a_masked_class_and_second_derivatives_are_finite(reduction, device):
    x = logits("float32")[:6]
    x[:, 5] = -np.inf

    @af.job(train=False, **device)
    def job(model, b):
        loss = af.cross_entropy(b.x, b.y, reduction=reduction)
        (first,) = af.grad(loss.sum(), [b.x])
        return {"loss": loss, "first": first, "second": af.grad((first * first).sum(), [b.x])[0]}

    made = job.step(nn.Module(), {"x": x, "y": Y[:6] % 5})
    losses = of_shares(x[:, [0, 1, 2, 3, 4, 6]], shares_of(Y[:6] % 5, 6))[0]
    expected = losses if reduction == "none" else getattr(np, reduction)(losses)
    np.testing.assert_allclose(made["loss"], expected, rtol=1e-5)
    assert np.isfinite(made["first"]).all()
    assert np.isfinite(made["second"]).all()


class Shifted(nn.Module):
    """A bias of which ranks along "model" have classes each."""

    def __init__(self):
        self.shift = nn.Parameter((8,), (("kind", "zeros"),), sbp={"model": af.split(0)})

    def __call__(self, x):
        return x + self.shift


@pytest.mark.thinned(2)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("mesh", [{"model": 2}, {"data": 2, "model": 2}])
def test_ranks_with_parts_of_the_classes_compute_the_same(mesh, smoothing, native_toolchain):
    x, y = logits("float32", 8), Y % 8
    training = Training(
        Shifted,
        lambda: ArraySource({"x": x, "y": y}, batch=len(x), shuffle=False),
        optimizer=af.optim.SGD(0.5),
        fn=lambda model, b: af.cross_entropy(model(b.x), b.y, label_smoothing=smoothing),
    )
    for rank in training.run(af.Mesh(**mesh), steps=1):
        losses, gradient = of_shares(x, shares_of(y, 8, smoothing))
        np.testing.assert_allclose(rank.losses, [losses.mean()], rtol=1e-5)
        slope = (gradient / np.arange(1, 1 + len(x))[:, None]).mean(0)
        np.testing.assert_allclose(rank.result.variables["shift"], -0.5 * slope, atol=1e-6)


class Head(nn.Module):
    """A linear layer without bias, of ones: all logits of a row are equal."""

    def __init__(self, classes):
        self.weight = nn.Parameter((classes, 1), (("kind", "ones"),))

    def __call__(self, x):
        return x @ self.weight.T


def test_logits_that_never_exist_as_a_whole_have_these_losses(device, monkeypatch, tmp_path):
    def chunk(graph, context):
        return regions.run(graph, WideFrom(1, 5))

    change_passes(monkeypatch, chunk_wide=chunk)
    monkeypatch.setenv("ACTORFLOW_CACHE", str(tmp_path))

    @af.job(train=False, **device)
    def job(model, b):
        losses = af.cross_entropy(model(b.x), b.y, reduction="none")
        return {"losses": losses, "gradient": af.grad(losses.sum(), [b.x])[0]}

    x = np.array([0, 1e4, 1e6, 1e9, 1, 2, 3], np.float32).reshape(7, 1)
    made = job.step(Head(23), {"x": x, "y": np.arange(7)})
    np.testing.assert_allclose(made["losses"], np.log(23), rtol=1e-6)
    np.testing.assert_allclose(made["gradient"], 0, atol=1e-6)


X = np.array([0, 1e-3, 0.5, 3, 10, 20, 50, 80, 1e3, 1e6])
X = np.concatenate([X, -X])


def of_logits(x, y, w):
    above, below = [np.logaddexp(0, s * x.astype(np.float64)) for s in (1, -1)]
    with np.errstate(over="ignore"):
        slopes = [1 / (1 + np.exp(-s * x.astype(np.float64))) for s in (1, -1)]
    return (1 - y) * above + w * y * below, (1 - y) * slopes[0] - w * y * slopes[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("y", [0.0, 1.0, 0.25])
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_certain_logits_have_small_losses_and_slopes(y, weight, dtype, device):
    x = X.astype(dtype)

    def function(b):
        return af.binary_cross_entropy_with_logits(
            b.x, y, reduction="none", pos_weight=None if weight == 1 else weight
        )

    made = computed(function, device, "x", x=x)
    losses, slopes = of_logits(x, y, weight)
    near = 2e-6 if dtype == "float32" else 1e-13
    np.testing.assert_allclose(made["losses"], losses, rtol=near, atol=1e-37)
    slopes = slopes * np.arange(1, 1 + len(x))
    np.testing.assert_allclose(made["x"], slopes, rtol=near, atol=near * 10)


@pytest.mark.parametrize("y", [0.0, 1.0])
def test_small_probabilities_have_small_losses(y, device):
    x = np.array([1e-30, 1e-10, 1e-8, 1e-4, 0.25], np.float32)

    def function(b):
        return af.binary_cross_entropy(b.x, as_constant(y, x), reduction="none")

    expected = -np.log(x.astype(np.float64)) if y else -np.log1p(-x.astype(np.float64))
    made = computed(function, device, "x", x=x)
    np.testing.assert_allclose(made["losses"], expected, rtol=1e-6)


def as_constant(number, like):
    return np.full_like(like, number)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_soft_margins_keep_what_is_small(sign, device):
    x = X.astype(np.float32)

    def function(b):
        return af.soft_margin_loss(b.x, as_constant(sign, x), reduction="none")

    made = computed(function, device, "x", x=x)
    expected = np.logaddexp(0, -sign * x.astype(np.float64))
    np.testing.assert_allclose(made["losses"], expected, rtol=2e-6, atol=1e-37)


def test_a_hinge_at_its_bound_has_torchs_slope(device):
    x = np.ones(2, np.float32)
    made = computed(lambda b: af.margin_ranking_loss(b.x, x, 1.0, 0.0, "none"), device, "x", x=x)
    np.testing.assert_array_equal(made["x"], [-1, -2])


def test_a_target_of_logits_of_any_size_has_minus_the_logit_as_gradient():
    x = np.array([-np.inf, -1e30, -3.0, -1e-4, 1e-12, 1e-30, 0.0, 5.0, 90.0, np.inf], np.float32)

    def slope(model, batch):
        loss = af.binary_cross_entropy_with_logits(batch.x, batch.y, reduction="sum")
        return {"dy": af.grad([loss], [batch.y])[0]}

    batch = {"x": x, "y": np.linspace(0, 1, x.size, dtype=np.float32)}
    assert af.job(slope, train=False).step(nn.Linear(1, 1), batch)["dy"].tolist() == (-x).tolist()
