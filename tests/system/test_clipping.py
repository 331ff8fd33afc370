"""Gradients that are clipped, by their norm and by value, against the formula in float64."""

import numpy as np
import pytest
from error_texts import raises
from jobs import assert_same

import actorflow as af
from actorflow import nn

OPTIMIZERS = {
    "sgd": af.optim.SGD(0.02),
    "momentum": af.optim.SGD(0.02, momentum=0.9, weight_decay=0.01),
    "adamw": af.optim.AdamW(1e-2),
}


class Products(nn.Module):
    """Scalars, vectors and matrices, one of them used transposed."""

    def __init__(self, dtype="float32"):
        self.w = nn.Parameter((8, 6), (("kind", "normal"), ("std", 0.5)), af.DType(dtype))
        self.v = nn.Parameter((5, 6), (("kind", "normal"), ("std", 0.5)), af.DType(dtype))
        self.shift = nn.Parameter((5,), (("kind", "normal"), ("std", 0.5)), af.DType(dtype))
        self.scale = nn.Parameter((), (("kind", "constant"), ("value", 1.5)), af.DType(dtype))

    def __call__(self, x):
        return ((x @ self.w) @ self.v.transpose(0, 1) + self.shift) * self.scale


def training(optimizer="sgd", **options):
    @af.job(optimizer=OPTIMIZERS[optimizer], **options)
    def train(model, batch):
        return (model(batch.x) * model(batch.x)).mean()

    return train


def gradients(p, x):
    """The gradients of the job, in float64."""
    h = x @ p["w"]
    y = h @ p["v"].T + p["shift"]
    dz = 2 * (y * p["scale"]) / y.size
    dy = dz * p["scale"]
    return {
        "w": x.T @ (dy @ p["v"]), "v": dy.T @ h, "shift": dy.sum(0), "scale": (dz * y).sum(),
    }  # fmt: skip


def walk(p, batches, rule, clip_norm=None, clip_value=None, every=1):
    """Return the norms of the steps and the parameters after them."""
    p, state, norms = {n: a.astype(np.float64) for n, a in p.items()}, {}, []
    for t in range(len(batches) // every):
        own = [gradients(p, x.astype(np.float64)) for x in batches[t * every : (t + 1) * every]]
        g = {n: sum(one[n] for one in own) / every for n in p}
        if clip_value is not None:
            g = {n: np.clip(a, -clip_value, clip_value) for n, a in g.items()}
        norm = np.sqrt(sum(np.sum(a * a) for a in g.values()))
        norms.append(norm)
        if clip_norm is not None:
            g = {n: a * min(1.0, clip_norm / (norm + 1e-6)) for n, a in g.items()}
        for n in p:
            p[n] = rule(p[n], g[n], state, n, t + 1)
    return norms, p


def sgd(p, g, state, name, t):
    return p - 0.02 * g


def momentum(p, g, state, name, t):
    state[name] = 0.9 * state.get(name, 0.0) + g + 0.01 * p
    return p - 0.02 * state[name]


def adamw(p, g, state, name, t):
    m, v = state.get(name, (0.0, 0.0))
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    state[name] = m, v
    direction = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return p - 1e-2 * 0.01 * p - 1e-2 * direction


RULES = {"sgd": sgd, "momentum": momentum, "adamw": adamw}


def batches(count, dtype=np.float32):
    rng = np.random.default_rng(4)
    return list(rng.standard_normal((count, 7, 8)).astype(dtype))


def source(xs):
    return af.data.ArraySource({"x": np.concatenate(xs)}, batch=7, shuffle=False)


def rows_of_fit(train, model, source, steps, **options):
    """Return (step, outputs) of every step, and what fit returns."""
    rows = []
    result = train.fit(
        model, source, steps=steps, progress=False,
        on_step=lambda step, metrics: rows.append((step, metrics)), **options,
    )  # fmt: skip
    return rows, result


def first_values(model, dtype=np.float32):
    rng = np.random.default_rng(9)
    model.load(
        {n: rng.standard_normal(p.type.shape).astype(dtype) for n, p in model.named_parameters()}
    )
    return model.state()


CLIPS = [
    {"clip_norm": 0.3}, {"clip_norm": 1e6}, {"clip_value": 0.05},
    {"clip_norm": 0.2, "clip_value": 0.05}, {"clip_norm": float("inf")},
]  # fmt: skip


@pytest.mark.parametrize("clip", CLIPS, ids=str)
@pytest.mark.parametrize("optimizer", RULES)
def test_steps_are_those_of_the_formula(optimizer, clip):
    model, xs = Products(), batches(5)
    before = first_values(model)
    rows, result = rows_of_fit(training(optimizer, **clip), model, source(xs), 5)
    norms, expected = walk(before, xs, RULES[optimizer], **clip)
    for name, array in expected.items():
        np.testing.assert_allclose(result.variables[name], array, rtol=2e-5, atol=2e-6)
    if "clip_norm" in clip:
        np.testing.assert_allclose([row["grad_norm"] for _, row in rows], norms, rtol=1e-5)
    else:
        assert "grad_norm" not in rows[0][1]


OPTIONS = [
    {"streams": 2}, {"metrics_every": 3}, {"recompute": "blocks"}, {"offload": "optimizer"},
    {"devices": ["sim:0", "sim:1"]}, {"device": "sim"}, {"device": "sim", "metrics_every": 2},
]  # fmt: skip


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_clipping_is_the_same_under_every_option(options, every):
    runs = []
    for more in ({}, options):
        model = Products()
        first_values(model)
        train = training("adamw", clip_norm=0.3, accumulate=every, **more)
        runs.append(rows_of_fit(train, model, source(batches(6)), 6 // every))
    (rows, plain), (others, result) = runs
    assert rows == others
    assert_same(result.variables, plain.variables)


@pytest.mark.parametrize("metrics_every", [1, 2])
@pytest.mark.parametrize("clip", [{"clip_norm": 0.3}, {"clip_value": 0.05}], ids=str)
def test_the_sum_over_the_batches_of_a_step_is_clipped(clip, metrics_every):
    model, xs = Products(), batches(15)
    before = first_values(model)
    train = training("momentum", accumulate=3, metrics_every=metrics_every, **clip)
    rows, result = rows_of_fit(train, model, source(xs), 5)
    norms, expected = walk(before, xs, momentum, every=3, **clip)
    for name, array in expected.items():
        np.testing.assert_allclose(result.variables[name], array, rtol=2e-5, atol=2e-6)
    assert len(rows) == 5
    if "clip_norm" in clip:
        np.testing.assert_allclose([row["grad_norm"] for _, row in rows], norms, rtol=1e-5)


def test_a_norm_of_zero_clips_nothing():
    model = Products()
    before = first_values(model)
    zeros = [np.zeros((7, 8), np.float32)]
    model.load({**before, "shift": np.zeros(5, np.float32)})
    rows, result = rows_of_fit(training(clip_norm=1.0), model, source(zeros), 1)
    assert rows[0][1]["grad_norm"] == 0.0
    np.testing.assert_array_equal(result.variables["w"], before["w"])


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
def test_an_infinite_norm_makes_finite_gradients_zero_and_others_nan():
    @af.job(optimizer=af.optim.SGD(0.02), clip_norm=1.0)
    def train(model, batch):
        return (
            (model.shift * batch.x[0, 0:5]).sum()
            + model.w.sum() * 1.0
            + 0.0 * (model.v.sum() + model.scale)
        )

    model = Products()
    before = first_values(model)
    x = np.ones((7, 8), np.float32)
    x[0, 2] = np.inf
    rows, result = rows_of_fit(train, model, source([x]), 1, on_nan="warn")
    assert rows[0][1]["grad_norm"] == np.inf
    np.testing.assert_array_equal(result.variables["w"], before["w"])
    assert np.isnan(result.variables["shift"]).tolist() == [False, False, True, False, False]


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
def test_squares_that_overflow_float32_still_clip():
    @af.job(optimizer=af.optim.SGD(1.0), clip_norm=1.0)
    def train(model, batch):
        return ((model.shift + model.w.sum() * 0.0 + model.v.sum() * 0.0 + model.scale * 0.0)
            * batch.x[0, 0:5]).sum()  # fmt: skip

    model = Products()
    first_values(model)
    model.load({**model.state(), "shift": np.zeros(5, np.float32)})
    rows, result = rows_of_fit(train, model, source([np.full((7, 8), 1e30, np.float32)]), 1)
    assert rows[0][1]["grad_norm"] == pytest.approx(1e30 * 5**0.5, rel=1e-6)
    np.testing.assert_allclose(result.variables["shift"], -(5**-0.5), rtol=1e-6)


def test_a_broken_batch_is_skipped_and_the_rest_clipped():
    xs = batches(6)
    model = Products()
    before = first_values(model)
    broken = [x * np.float32(np.nan) if i == 2 else x for i, x in enumerate(xs)]
    rows, result = rows_of_fit(
        training("momentum", clip_norm=0.3), model, source(broken), 6, on_nan="skip"
    )
    _, expected = walk(before, xs[:2] + xs[3:], momentum, clip_norm=0.3)
    for name, array in expected.items():
        np.testing.assert_allclose(result.variables[name], array, rtol=2e-5, atol=2e-6)
    assert np.isnan(rows[2][1]["grad_norm"])
    assert result.num_skipped == 1


def test_a_scaled_loss_is_clipped_by_the_norm_without_the_scale():
    runs = []
    for scale in (None, 512.0):
        model = Products()
        first_values(model)
        own = {"precision": "fp16", "loss_scale": scale} if scale else {}
        runs.append(rows_of_fit(training(clip_norm=0.3, **own), model, source(batches(3)), 3)[0])
    plain, scaled = ([row["grad_norm"] for _, row in rows] for rows in runs)
    np.testing.assert_allclose(scaled, plain, rtol=2e-2)


def test_a_resumed_run_clips_as_one_that_was_not_cut(tmp_path):
    whole = Products()
    first_values(whole)
    train = training("adamw", clip_norm=0.3, accumulate=2)
    rows, expected = rows_of_fit(train, whole, source(batches(12)), 6, checkpoint=tmp_path / "a")
    cut = Products()
    first_values(cut)
    for steps in (3, 6):
        again, result = rows_of_fit(
            train, cut, source(batches(12)), steps, checkpoint=tmp_path / "b"
        )
    assert again == rows[3:]
    assert_same(result.variables, expected.variables)


def test_step_tells_the_norm(mlp, classification, classify):
    model = mlp()
    row = classify(clip_norm=1.0, accumulate=2).step(model, [next(classification())] * 2)
    assert row["grad_norm"] > 0


WRONG = [
    {"clip_norm": -1.0},
    {"clip_norm": 0},
    {"clip_norm": float("nan")},
    {"clip_norm": "1"},
    {"clip_value": float("inf")},
    {"clip_value": -0.5},
    {"clip_value": float("nan")},
    {"clip_norm": 1.0, "train": False, "optimizer": None},
]


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_what_cannot_clip_is_an_error(classify, options):
    with raises(af.CompileError):
        classify(**options)


def test_a_job_that_returns_the_norm_itself_is_told(mlp, classification):
    @af.job(optimizer=af.optim.SGD(0.1), clip_norm=1.0)
    def train(model, batch):
        loss = af.cross_entropy(model(batch.x), batch.y)
        return {"loss": loss, "grad_norm": loss}

    with raises(af.CompileError):
        train.compile(mlp(), classification())


def test_the_error_of_a_broken_loss_names_the_option(mlp, classification, classify):
    batch = {**next(classification())}
    batch["x"] = batch["x"] * np.float32(np.nan)
    with raises(af.NonFiniteLoss):
        classify().step(mlp(), batch)
