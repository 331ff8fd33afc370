"""Jobs on a GPU with cuDNN, acted by the host: which attention is its, and what comes of it."""

import os
from dataclasses import replace

import numpy as np
import pytest
from error_texts import raises
from jobs import GPT

import actorflow as af
from actorflow.environment.settings import Settings
from actorflow.run.devices import verify_and_build
from actorflow.run.runner import Runner
from actors.device.cuda import cudnn
from actors.kernels.cuda.cudnn_library import CudnnLibrary
from compiler.contract.errors import DeviceError

pytestmark = pytest.mark.host("it is about emulated GPUs")

STEPS = 6
OF_LIBRARY = {"cudnn.attention"}


def tokens():
    text = np.cumsum(np.random.default_rng(0).integers(0, 5, 2_000)) % 11
    return af.data.Tokens(text.astype(np.uint8), seq=9, batch=2, seed=0)


def make_model(width=16):
    """Return a model with two heads of `width` / 2 numbers."""
    model = GPT(11, seq=9, width=width, layers=1, heads=2)
    rng = np.random.default_rng(1)
    for name, parameter in model.named_parameters():
        is_scale = "norm" in name and name.endswith("weight")
        shape = parameter.type.shape
        array = np.ones(shape) if is_scale else rng.normal(0, 0.2, shape)
        parameter.load(array.astype(np.float32))
    return model


class Convolutions(af.nn.Module):
    """Says the next token by two convolutions over those before and after it."""

    def __init__(self):
        self.tokens = af.nn.Embedding(11, 8)
        self.convs = [af.nn.Conv1d(n, m, 3, padding=1) for n, m in ((8, 16), (16, 11))]
        rng = np.random.default_rng(2)
        for _, parameter in self.named_parameters():
            parameter.load(rng.normal(0, 0.3, parameter.type.shape).astype(np.float32))

    def __call__(self, ids):
        first, second = self.convs
        return second(af.relu(first(self.tokens(ids).swapaxes(1, 2)))).swapaxes(1, 2)


@pytest.fixture
def compiled(monkeypatch):
    """Return a function that compiles a job with or without cuDNN."""

    def compile_(uses, width=16, precision="bf16", model=None, **options):
        @af.job(
            optimizer=af.optim.AdamW(3e-3),
            device="cuda",
            gpu="h200",
            precision=precision,
            **options,
        )
        def train(model, batch):
            return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())

        monkeypatch.setenv("ACTORFLOW_CUDNN", uses)
        return train.compile(model or make_model(width), tokens(), every=3)

    return compile_


@pytest.fixture
def settings(cached_toolchain):
    """Of an emulated GPU; kernels are built once for all tests."""
    return replace(Settings.from_env(os.environ), emulated_gpus=8)


def kernels_of(plan):
    return {launch.kernel for actor in plan.actors for launch in actor.launches}


def fit(plan, settings, steps=STEPS, seed=0, **options):
    losses = []
    runner = Runner(plan, settings=replace(settings, sim_seed=seed))
    options |= {"on_step": lambda step, metrics: losses.append(metrics["loss"])}
    result = runner.fit(tokens(), steps=steps, progress=False, every=3, **options)
    return losses, {name: array.tobytes() for name, array in result.variables.items()}


def test_losses_are_those_of_composed_attention_and_the_same_however_late(compiled, settings):
    with_it, without = compiled("1"), compiled("0")
    assert kernels_of(with_it) >= OF_LIBRARY
    assert not kernels_of(without) & OF_LIBRARY
    losses, bits = fit(with_it, settings)
    np.testing.assert_allclose(losses, fit(without, settings)[0], rtol=2e-2)
    assert fit(with_it, settings, seed=3) == (losses, bits)
    assert fit(with_it, replace(settings, sync=True), seed=4) == (losses, bits)


@pytest.mark.parametrize(("precision", "limit"), [("bf16", 2e-2), ("fp32", 1e-5)])
def test_convolutions_give_the_losses_of_products(compiled, settings, precision, limit):
    plans = [compiled(u, precision=precision, model=Convolutions()) for u in ("1", "0")]
    ways = {"conv", "conv_input_grad", "conv_weight_grad"}
    for plan, kind in zip(plans, ("cudnn", "cuda"), strict=True):
        assert {k for k in kernels_of(plan) if ".conv" in k} == {f"{kind}.{op}" for op in ways}
    losses, bits = fit(plans[0], settings)
    np.testing.assert_allclose(losses, fit(plans[1], settings)[0], rtol=limit)
    assert fit(plans[0], settings, seed=3) == (losses, bits)
    exact = compiled("1", precision=precision, model=Convolutions(), deterministic=True)
    np.testing.assert_allclose(fit(exact, settings)[0], losses, rtol=limit)


def test_a_resumed_run_has_the_same_bits(compiled, settings, tmp_path):
    plan = compiled("1")
    losses, bits = fit(plan, settings)
    first, _ = fit(plan, settings, steps=3, checkpoint=tmp_path / "run")
    rest, again = fit(plan, settings, seed=5, checkpoint=tmp_path / "run")
    assert (first + rest, again) == (losses, bits)


@pytest.mark.parametrize("options", [{"width": 24}, {"precision": "fp32"}], ids=str)
def test_heads_that_are_not_8n_and_float32_are_composed_and_the_plan_says_so(compiled, options):
    plan = compiled("1", **options)
    assert not kernels_of(plan) & OF_LIBRARY
    assert {"cuda.attention", "cuda.attention_grad"} <= kernels_of(plan)


def test_whether_it_is_used_is_of_the_plan_and_not_of_where_it_runs(compiled, settings, caplog):
    with_it, without = compiled("1"), compiled("0")
    assert with_it.target != without.target
    for plan in (with_it, without):
        verify_and_build(plan, settings)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("precision", "lacking"),
    [
        # The second convolution has 11 results, an odd number.
        ("bf16", [f"{op} of bfloat16" for op in ("conv_weight_grad", "conv_input_grad")]),
        ("fp32", [f"{op} of float32" for op in ("conv", "conv_weight_grad", "conv_input_grad")]),
    ],
)
def test_what_the_small_library_lacks_is_ours_and_said_once_when_a_plan_is_compiled(
    compiled, settings, monkeypatch, caplog, precision, lacking
):
    monkeypatch.setattr(cudnn, "library_here", lambda: CudnnLibrary(is_jit=True))
    plan = compiled("1", precision=precision, model=Convolutions())
    ours = {kernel for kernel in kernels_of(plan) if kernel.startswith("cuda.conv")}
    assert ours == {f"cuda.{text.partition(' ')[0]}" for text in lacking}
    said = [record.getMessage() for record in caplog.records]
    assert sorted([text[8:].partition("[")[0] for text in said]) == sorted(lacking)
    assert all("nvidia-cudnn-jit-cu13) has no plan for it" in text for text in said)
    caplog.clear()
    verify_and_build(plan, settings)
    fit(plan, settings, steps=3)
    assert caplog.records == []


@pytest.mark.parametrize("is_here", [False, True])
def test_unless_it_is_said_it_is_used_where_its_packages_are(compiled, monkeypatch, is_here):
    monkeypatch.setattr(cudnn, "library_here", lambda: CudnnLibrary() if is_here else None)
    assert bool(kernels_of(compiled("")) & OF_LIBRARY) is is_here


def test_where_its_packages_are_missing_a_plan_with_it_is_refused(compiled, settings, monkeypatch):
    monkeypatch.setattr(cudnn, "why_not", lambda *oldest: "its packages are missing")
    with raises(DeviceError):
        fit(compiled("1"), replace(settings, emulated_gpus=0))
