"""Averages of weights where a job runs on other devices than the host, or on several.

On simulated devices they have the bits of the host. A GPU sums otherwise: there, what a job is
asked for besides changes no bit.
"""

import numpy as np
import pytest
from jobs import assert_same

import actorflow as af
from actorflow import nn

EMA = af.optim.EMA(0.9, warmup=2 / 3)
ROWS = {
    "x": np.random.default_rng(0).standard_normal((32, 6)).astype(np.float32),
    "y": np.arange(32, dtype=np.int32) % 5,
}


class Halves(nn.Module):
    def __init__(self):
        self.lower, self.upper = nn.Linear(6, 16), nn.Linear(16, 5)


def body(aside):
    """Return a loss whose upper half runs on a device of its own, where one is named."""

    def loss(model, batch):
        h = af.gelu(model.lower(batch.x), approximate="tanh")
        if aside is None:
            return af.cross_entropy(model.upper(h), batch.y)
        with af.device(aside):
            h = model.upper(h)
        return af.cross_entropy(h, batch.y)

    return loss


def rows():
    return af.data.ArraySource(ROWS, batch=4, seed=1)


def trained(steps=6, watched=False, aside=None, fit=None, **options):
    """Return what a fit leaves: variables with averages among them, and what evaluations said."""
    where = options if "devices" in options else {"device": "host"} | options
    loss = body(aside)
    job = af.job(loss, optimizer=af.optim.AdamW(1e-2), ema=EMA, seed=3, **where)
    valid = af.job(loss, train=False, devices=where.get("devices"))
    seen = af.Evaluation(valid, rows(), every=3, batches=2, ema=True) if watched else None
    result = job.fit(Halves(), rows(), steps=steps, progress=False, evaluation=seen, **(fit or {}))
    assert {*result.averages} == {"lower.weight", "lower.bias", "upper.weight", "upper.bias"}
    assert any(name.startswith("ema/") for name in result.variables)
    return result


def means(result):
    return [value["output"] for _, value in result.evaluations]


SIMULATED = {
    "one": {"device": "sim"},
    "two": {"devices": ["sim:0", "sim:1"], "aside": "sim:1"},
    "two, by cost": {"devices": ["sim:0", "sim:1"]},
    "beside the host": {"devices": ["host", "sim:0"], "aside": "sim:0"},
    "before the host": {"devices": ["sim:0", "host"], "aside": "host:0"},
}
GPUS = {
    "one": {"device": "cuda"},
    "two": {"devices": ["cuda:0", "cuda:1"], "aside": "cuda:1"},
    "beside the host": {"devices": ["host", "cuda:0"], "aside": "cuda:0"},
    "before the host": {"devices": ["cuda:0", "host"], "aside": "host:0"},
}


@pytest.mark.host("names its devices")
@pytest.mark.parametrize(
    "asked", [{}, {"accumulate": 2}, {"streams": 2}, {"clip_norm": 0.3}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("where", SIMULATED)
def test_averages_on_simulated_devices_have_the_bits_of_the_host(where, asked):
    assert_same(trained(**SIMULATED[where], **asked).variables, trained(**asked).variables)


@pytest.mark.host("names its devices")
def test_averages_of_a_job_in_bfloat16_have_the_bits_of_the_host_on_one_device():
    found = trained(device="sim", precision="bf16").variables
    assert_same(found, trained(precision="bf16").variables)


@pytest.mark.host("names its devices")
def test_an_average_lies_beside_its_parameter():
    job = af.job(body("sim:1"), optimizer=af.optim.SGD(0.1), ema=EMA, devices=["sim:0", "sim:1"])
    plan = job.compile(Halves(), rows())
    places = {
        v.name: plan.arenas[plan.registers[plan.views[v.view].register].arena].device
        for v in plan.variables
    }
    assert str(places["upper.weight"]) == "sim:1"
    for path in ("lower.weight", "lower.bias", "upper.weight", "upper.bias"):
        assert places["ema/" + path] == places[path]


@pytest.mark.host("names its devices")
@pytest.mark.parametrize("where", SIMULATED)
def test_evaluations_read_the_averages_where_they_lie(where):
    got, expected = trained(watched=True, **SIMULATED[where]), trained(watched=True)
    assert means(got) == means(expected)
    assert len(means(got)) == 2


@pytest.mark.host("names its devices")
@pytest.mark.parametrize("where", ["two", "beside the host"])
def test_a_run_resumed_elsewhere_goes_on_with_the_averages(where, tmp_path):
    halves = {"fit": {"checkpoint": tmp_path / "run", "every": 3}}
    trained(3, **SIMULATED[where], **halves)
    assert_same(trained(6, **halves).variables, trained(6).variables)


@pytest.fixture
def emulated(native_toolchain, monkeypatch):
    monkeypatch.setenv("ACTORFLOW_CUDA", "emulated")


@pytest.mark.host("names its devices")
@pytest.mark.parametrize("where", GPUS)
def test_averages_on_gpus_are_those_of_the_host_but_for_rounding(emulated, where):
    got, expected = trained(watched=True, **GPUS[where]), trained(watched=True)
    for name, average in expected.averages.items():
        np.testing.assert_allclose(got.averages[name], average, rtol=1e-4, atol=1e-6, err_msg=name)
    assert got.variables["ema_count"] == expected.variables["ema_count"] == 6
    assert means(got) == pytest.approx(means(expected), rel=1e-5)


@pytest.mark.host("names its devices")
def test_what_a_job_is_asked_for_changes_no_bit_of_averages_on_a_gpu(emulated, tmp_path):
    plain = trained(device="cuda").variables
    for asked in ({"offload": "optimizer"}, {"streams": 2}, {"recompute": "blocks"}):
        assert_same(trained(device="cuda", **asked).variables, plain)
    halves = {"fit": {"checkpoint": tmp_path / "run", "every": 3}, "device": "cuda"}
    trained(3, **halves)
    assert_same(trained(6, **halves).variables, plain)
