"""What fits float16 as a result does not overflow on the way to it, nor do gradients.

The oracles are formulas in numpy's float64, of the same float16 numbers.
"""

import numpy as np
import pytest

import actorflow as af
from actorflow import nn

pytestmark = pytest.mark.host("it says where each job runs")

X = (np.random.default_rng(0).normal(size=(500, 4)) * 100).astype(np.float16)
W = X.astype(np.float64)
IMAGES = (300 + np.random.default_rng(1).normal(size=(2, 3, 32, 32))).astype(np.float16)
WIDE = IMAGES.astype(np.float64)

NORM = np.sqrt((W**2).sum(0))
QUARTERS = WIDE.reshape(2, 3, 2, 16, 2, 16).mean((3, 5))
CHANNELS = WIDE.mean((0, 2, 3), keepdims=True), WIDE.var((0, 2, 3), keepdims=True)

FACTORS = np.array([1e3, 1e3, 1e-2, 1e3, 1e-3, 1e-2], np.float16)

STATISTICS = {
    "std of columns": (lambda x: x.std(0), W.std(0, ddof=1)),
    "std of rows": (lambda x: x.T.std(1), W.std(0, ddof=1)),
    "std of all": (lambda x: x.std(), W.std(ddof=1)),
    "var": (lambda x: x.var(0), W.var(0, ddof=1)),
    "norm of columns": (lambda x: af.norm(x, dim=0), NORM),
    "norm of all": (lambda x: af.norm(x), np.sqrt((W**2).sum())),
    "norm of p = 3": (lambda x: af.norm(x, p=3, dim=0), (np.abs(W) ** 3).sum(0) ** (1 / 3)),
    "normalize": (lambda x: af.normalize(x, dim=0), W / NORM),
    "cosine": (lambda x: af.cosine_similarity(x, x * 2, dim=0), np.ones(4)),
    "distance": (lambda x: af.pairwise_distance(x.T, -x.T), 2 * NORM),
    "rms_norm": (lambda x: af.rms_norm(x.T * 5, (500,)), (W / np.sqrt((W**2).mean(0))).T),
    "mse_loss": (lambda x: af.mse_loss(x, -x), (4 * W**2).mean()),
    "logsumexp": (lambda x: (x * 0 + 5).logsumexp(0), np.full(4, 5 + np.log(500))),
    "prod": (lambda x: (x[:6, 0] * 0 + FACTORS).prod(), 1e2),
    "sum of opposites": (lambda x: af.concat([x * 100, x * -100], 1).sum(), 0.0),
}

POOLS = {
    "batch_norm": (
        lambda x: af.batch_norm(x * 4, training=True),
        (WIDE - CHANNELS[0]) / np.sqrt(CHANNELS[1]),
    ),
    "group_norm": (
        lambda x: af.group_norm(x, 3),
        (WIDE - WIDE.mean((2, 3), keepdims=True)) / WIDE.std((2, 3), keepdims=True),
    ),
    "avg_pool2d": (lambda x: af.avg_pool2d(x, 16), QUARTERS),
    "avg_pool1d": (lambda x: af.avg_pool1d(x.flatten(2), 512), WIDE.reshape(2, 3, 2, -1).mean(3)),
    "adaptive_avg_pool2d": (lambda x: af.adaptive_avg_pool2d(x, 2), QUARTERS),
    "area": (lambda x: af.interpolate(x, size=2, mode="area"), QUARTERS),
    "local_response_norm": (
        lambda x: af.local_response_norm(x, 1),
        WIDE / (1e-4 * WIDE**2 + 1) ** 0.75,
    ),
}


@pytest.mark.parametrize("names", [STATISTICS, POOLS], ids=["rows", "images"])
def test_what_fits_does_not_overflow_on_the_way(options, computed, names):
    x, of = (X, STATISTICS) if names is STATISTICS else (IMAGES, POOLS)
    found = computed(lambda b: {name: f(b.x) for name, (f, _) in of.items()}, options, x=x)
    for name, (_, want) in of.items():
        assert found[name].dtype == np.float16 or not found[name].ndim, name
        # Of differences to a mean of 300 the operands' own last places are 1e-3 of what is left.
        slack = 0.02 if name.endswith("_norm") else 1e-3 * np.abs(want).max()
        np.testing.assert_allclose(found[name], want, 2e-3, slack, err_msg=name)


def test_gradients_fit_where_what_they_sum_up_does_not(options, computed):
    def outputs(b):
        row, column = b.x.T.std(1), b.x.std(0)
        y = af.batch_norm(b.images, training=True)
        top = af.concat([b.x * 0] * 40, 0).amax(0)
        return {
            "std": af.grad(column.sum() * 64, [b.x])[0],
            "std of rows": af.grad(row.sum() * 64, [b.x])[0],
            "norm": af.grad(af.norm(b.x, dim=0).sum() * 64, [b.x])[0],
            "batch_norm": af.grad((y.float() * 50).sum(), [b.images])[0],
            "avg_pool": af.grad((af.avg_pool2d(b.images, 16).float() * 1e3).sum(), [b.images])[0],
            "ties": af.grad(top.float().sum() * 1e4, [b.x])[0],
        }

    found = computed(outputs, options, x=X, images=IMAGES)
    of_std = 64 * (W - W.mean(0)) / (499 * W.std(0, ddof=1))
    wanted = {
        "std": of_std,
        "std of rows": of_std,
        "norm": 64 * W / NORM,
        "batch_norm": np.zeros(WIDE.shape),
        "avg_pool": np.full(WIDE.shape, 1e3 / 256),
    }
    for name, want in wanted.items():
        slack = 1e-3 * max(np.abs(want).max(), 1.0)
        np.testing.assert_allclose(found[name], want, 2e-3, slack, err_msg=name)
    assert np.isfinite(found["ties"]).all()


def test_a_layer_keeps_statistics_of_float16_batches(options):
    class Net(nn.Module):
        def __init__(self):
            self.bn = nn.BatchNorm1d(4)
            self.instances = nn.InstanceNorm1d(4, track_running_stats=True)

    def train(model, b):
        y = model.bn(b.x)
        z = model.instances(b.x.T.reshape(1, 4, 500))
        return {"loss": (y.float() ** 2).mean() + (z.float() ** 2).mean(), "y": y}

    model, job = Net(), af.job(train, optimizer=af.optim.SGD(0.0), **options)
    found = job.step(model, {"x": X})
    job.close(model)
    np.testing.assert_allclose(np.asarray(found["y"]).std(0), 1.0, 1e-3)
    for name in ("bn", "instances"):
        kept = model.state()[f"{name}.running_var"]
        np.testing.assert_allclose(kept, 0.9 + 0.1 * W.var(0, ddof=1), 1e-3, err_msg=name)


@pytest.mark.parametrize("has_gradient", [False, True])
def test_attention_keeps_scores_in_float32(options, computed, has_gradient):
    q = np.full((1, 2, 8, 64), 60, np.float16)
    v = np.random.default_rng(0).normal(size=q.shape).astype(np.float16)
    forms = {
        "attention": lambda q, v: af.attention(q, q, v),
        "causal attention": lambda q, v: af.attention(q, q, v, causal=True),
        "scaled": lambda q, v: af.scaled_dot_product_attention(q, q, v),
        "causal scaled": lambda q, v: af.scaled_dot_product_attention(q, q, v, is_causal=True),
        "masked": lambda q, v: af.scaled_dot_product_attention(q, q, v, np.ones((8, 8), bool)),
    }

    def outputs(b):
        made = {name: form(b.q, b.v) for name, form in forms.items()}
        slopes = {f"{name} dv": af.grad(y.sum(), [b.v])[0] for name, y in made.items()}
        return made | slopes if has_gradient else made

    found = computed(outputs, options, q=q, v=v)
    for name in forms:
        shares = np.tril(np.ones((8, 8))) if "causal" in name else np.ones((8, 8))
        shares /= shares.sum(1, keepdims=True)
        want = shares @ v.astype(np.float64)
        np.testing.assert_allclose(found[name], want, 2e-3, 1e-3, err_msg=name)
        if has_gradient:
            want = np.broadcast_to(shares.sum(0)[:, None], q.shape)
            np.testing.assert_allclose(found[f"{name} dv"], want, 2e-3, err_msg=name)


def test_a_mask_that_is_trained_has_a_gradient_where_scores_do_not_fit(options, computed):
    q = np.full((1, 2, 8, 64), 60, np.float16)  # scores of 230,400, and 28,800 when scaled
    v = np.random.default_rng(0).normal(size=q.shape).astype(np.float16)

    def outputs(b):
        y = af.scaled_dot_product_attention(b.q, b.q, b.v, attn_mask=b.mask)
        return {"dmask": af.grad(y.sum(), [b.mask])[0]}

    found = computed(outputs, options, q=q, v=v, mask=np.zeros((1, 2, 8, 8), np.float16))
    slopes = v.astype(np.float64).sum(-1)[:, :, None]
    want = np.broadcast_to((slopes - slopes.mean(-1, keepdims=True)) / 8, (1, 2, 8, 8))
    np.testing.assert_allclose(found["dmask"], want, 5e-3, 5e-3)


def test_float16_may_have_more_elements_than_its_largest_number(options, computed):
    x = np.random.default_rng(0).normal(size=(20000, 4)).astype(np.float16)
    found = computed(
        lambda b: {"var": b.x.var(), "std": b.x.std(), "mse": af.mse_loss(b.x, 0.0)}, options, x=x
    )
    wide = x.astype(np.float64)
    want = {"var": wide.var(ddof=1), "std": wide.std(ddof=1), "mse": (wide**2).mean()}
    for name, number in want.items():
        np.testing.assert_allclose(found[name], number, 1e-3, err_msg=name)


def test_weights_of_classes_and_bags_of_float16(options, computed):
    logits = (np.arange(12).reshape(4, 3) % 5).astype(np.float16)
    labels, shares = np.array([0, 2, 1, 1]), np.array([1.0, 2.0, 0.5], np.float16)
    table = np.full((5, 3), 3e4, np.float16)

    def outputs(b):
        return {
            "loss": af.cross_entropy(b.logits, b.labels, weight=shares),
            "bags": af.embedding_bag(np.arange(4).reshape(1, 4), b.table),
        }

    found = computed(outputs, options, logits=logits, labels=labels, table=table)
    wide = logits.astype(np.float64)
    each = np.log(np.exp(wide).sum(1)) - wide[np.arange(4), labels]
    own = shares[labels].astype(np.float64)
    np.testing.assert_allclose(found["loss"], (each * own).sum() / own.sum(), 1e-3)
    np.testing.assert_array_equal(found["bags"], table[:1])


@pytest.mark.no_gpu("LAPACK and pocketfft run on the host")
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_decompositions_and_transforms_have_the_type_of_what_they_take(computed, dtype):
    def function(b):
        q, r = af.linalg.qr(b.x)
        u, s, v = af.linalg.svd(b.x)
        values, vectors = af.linalg.eigh(b.x @ b.x.T)
        spectrum = af.fft.rfft(b.x)
        back = af.fft.irfft(spectrum, b.x.shape[-1])
        made = {"q": q, "r": r, "u": u, "s": s, "v": v, "values": values, "vectors": vectors}
        return made | {"spectrum": spectrum, "back": back}

    x = np.random.default_rng(5).normal(size=(4, 4)).astype(dtype)
    made = computed(function, {}, x=x)
    assert {name: str(array.dtype) for name, array in made.items()} == dict.fromkeys(made, dtype)
    np.testing.assert_allclose(made["back"], x, atol=2e-3)
    np.testing.assert_allclose(made["q"] @ made["r"], x, atol=2e-2)
