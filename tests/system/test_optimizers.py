"""Every optimizer as jobs use it: resumed, skipped, accumulated, with other kernels."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.data import spec_of

optim = af.optim
OPTIMIZERS = {
    "sgd": optim.SGD(0.1, momentum=0.9, dampening=0.2, weight_decay=0.01),
    "adam": optim.Adam(0.01, amsgrad=True),
    "adamw": optim.AdamW(0.01, decay_only="matrices"),
    "adagrad": optim.Adagrad(0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "rmsprop": optim.RMSprop(0.01, momentum=0.9, centered=True, eps=1e-3),
    "lion": optim.Lion(optim.cosine(0.01, steps=20), weight_decay=0.1),
    "lamb": optim.LAMB(0.01, eps=1e-3),
    "adafactor": optim.Adafactor(0.05, weight_decay=0.1, eps=(1e-6, 1e-3)),
    "muon": optim.Muon(0.02),
}
JOINED = ("sgd", "adam", "adamw", "adagrad", "rmsprop", "lion")
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


class Net(nn.Module):
    def __init__(self, bias):
        self.first, self.last = nn.Linear(5, 7, bias=bias), nn.Linear(7, 3, bias=bias)

    def __call__(self, x):
        return self.last(af.tanh(self.first(x)))


def net(name):
    model = Net(bias=name != "muon")
    rng = np.random.default_rng(4)
    model.load({
        path: rng.normal(0, 0.5, p.type.shape).astype(np.float32)
        for path, p in model.named_parameters()
    })  # fmt: skip
    return model


def loss(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)


def data(rows=8):
    x = np.random.default_rng(0).normal(size=(32, 5)).astype(np.float32)
    y = x[:, :3].argmax(1)
    return af.data.ArraySource({"x": x, "y": y}, batch=rows, seed=1)


def trained(name, steps=6, source=None, fit=None, **options):
    """Return the parameters after some steps, and what the job said of each."""
    model, rows = net(name), []
    job = af.job(loss, optimizer=OPTIMIZERS[name], seed=3, **options)
    job.fit(
        model, data() if source is None else source, steps=steps, progress=False,
        on_step=lambda _, metrics: rows.append(dict(metrics)), **fit or {},
    )  # fmt: skip
    return {path: np.array(value) for path, value in model.state().items()}, rows


def near(got, expected, tolerance):
    for path, value in expected.items():
        np.testing.assert_allclose(got[path], value, rtol=tolerance, atol=tolerance, err_msg=path)


def equal(got, expected):
    for path, value in expected.items():
        np.testing.assert_array_equal(got[path], value, err_msg=path)


@pytest.mark.thinned(3)
@every_optimizer
def test_a_resumed_run_has_the_bits_of_a_whole_one(name, tmp_path):
    whole, rows = trained(name, steps=5)
    kept = {"checkpoint": tmp_path / "run", "every": 2}
    trained(name, steps=3, fit=kept)
    resumed, later = trained(name, steps=5, fit=kept)
    equal(resumed, whole)
    assert [row["loss"] for row in later] == [row["loss"] for row in rows[3:]]


@pytest.mark.thinned(3)
@every_optimizer
def test_a_step_with_nan_changes_nothing(name):
    source = data()
    batches = [next(source) for _ in range(4)]
    batches[2]["x"][1] = np.nan

    def after(steps):
        source = af.data.from_iterable(lambda: iter(batches), spec_of(batches[0], ""))
        return trained(name, steps=steps, source=source, fit={"on_nan": "skip"})[0]

    before, skipped, later = after(2), after(3), after(4)
    equal(skipped, before)
    for path, value in later.items():
        assert np.isfinite(value).all()
        assert np.any(value != before[path])


@pytest.mark.thinned(3)
@every_optimizer
def test_batches_that_are_accumulated_are_one_large_batch(name):
    got, _ = trained(name, steps=3, source=data(4), accumulate=2)
    expected, _ = trained(name, steps=3, source=data(8))
    near(got, expected, 2e-4)


@pytest.mark.thinned(3)
@every_optimizer
def test_native_kernels_compute_the_same(name, native):
    fast, _ = trained(name)
    native.disable()
    slow, _ = trained(name)
    near(fast, slow, 1e-4)


@pytest.mark.thinned(3)
@every_optimizer
def test_an_emulated_gpu_computes_the_same_and_joins_what_is_by_elements(
    name, native_toolchain, monkeypatch
):
    monkeypatch.setenv("ACTORFLOW_CUDA", "emulated")
    got, _ = trained(name, device="cuda")
    expected, _ = trained(name)
    near(got, expected, 1e-4)
    job = af.job(loss, optimizer=OPTIMIZERS[name], device="cuda")
    plan = job.compile(net(name), data())
    ops = [launch.op for actor in plan.actors for launch in actor.launches]
    if name in JOINED:
        assert ops.count("joined_updates") >= 1
        assert len([op for op in ops if "update" in op]) < 4


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ["lamb", "adafactor", "muon"])
def test_norms_and_products_are_of_gradients_without_the_loss_scale(name, monkeypatch):
    wide = {
        "lamb": optim.LAMB(0.1, eps=1.0),
        "adafactor": optim.Adafactor(0.1, eps=(0.1, 1e-3)),
        "muon": optim.Muon(0.1, eps=1.0),
    }
    monkeypatch.setitem(OPTIMIZERS, name, wide[name])
    near(*[trained(name, precision="fp16", loss_scale=s)[0] for s in (4.0, 512.0)], 2e-2)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ["lamb", "adafactor", "muon"])
def test_they_wait_for_the_gradients_of_all_ranks(name):
    job = af.job(loss, optimizer=OPTIMIZERS[name], mesh=af.Mesh(data=2))
    plan = job.compile(net(name), data())
    ops = [launch.op for actor in plan.actors for launch in actor.launches]
    assert {"all_reduce", "all_gather", "reduce_scatter"} & {*ops}
    assert not {"lamb_update", "adafactor_update", "muon_update"} & {*ops}


@pytest.mark.thinned(3)
@every_optimizer
def test_a_budget_and_bf16_hold_for_it(name):
    got, _ = trained(name, precision="bf16")
    expected, _ = trained(name)
    near(got, expected, 0.1)


def test_muon_refuses_what_is_no_matrix_by_name():
    job = af.job(loss, optimizer=optim.Muon())
    with raises(af.CompileError):
        job.compile(Net(bias=True), data())


def test_muon_has_the_matrices_and_another_optimizer_the_rest():
    parts = [optim.on("*.weight", optim.Muon(0.1)), optim.on("*.bias", optim.AdamW(0.05))]
    job, model = af.job(loss, optimizer=parts, clip_norm=1.0), Net(bias=True)
    found = []
    job.fit(
        model, data(32), steps=20, progress=False,
        on_step=lambda _, metrics: found.append(metrics["loss"]),
    )  # fmt: skip
    assert found[-1] < 0.5 * found[0]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ["lamb", "adafactor", "muon"])
def test_norms_and_products_are_of_clipped_gradients(name):
    """Clipped to a constant, gradients are those of any loss that is steep enough."""

    def moved(times):
        job = af.job(
            lambda model, batch: loss(model, batch) * times,
            optimizer=OPTIMIZERS[name], clip_norm=1e-2, seed=3,
        )  # fmt: skip
        model = net(name)
        job.fit(model, data(), steps=2, progress=False)
        return {path: np.array(value) for path, value in model.state().items()}

    near(moved(1000.0), moved(10.0), 1e-3)
