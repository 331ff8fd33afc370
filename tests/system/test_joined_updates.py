"""Jobs whose updates are one launch on a GPU: the bits of those that have a launch each."""

import numpy as np
import pytest

import actorflow as af
from actorflow import nn
from actorflow.compile.cuda_target import CudaTarget


class Narrow(nn.Module):
    """Many small layers, of one column some of them."""

    def __init__(self, layers, width):
        self.first = nn.Linear(5, width)
        self.between = [nn.Linear(width, width) for _ in range(layers)]
        self.last = nn.Linear(width, 3)

    def __call__(self, x):
        x = af.tanh(self.first(x))
        for layer in self.between:
            x = x + af.tanh(layer(x))
        return self.last(x)


@pytest.fixture(autouse=True)
def emulated(native_toolchain, monkeypatch):
    monkeypatch.setenv("ACTORFLOW_CUDA", "emulated")


def data():
    x = np.random.default_rng(0).normal(size=(32, 5)).astype(np.float32)
    return af.data.ArraySource({"x": x, "y": x[:, :3].argmax(1)}, batch=8, seed=1)


def loss(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)


def trained(layers, width, steps, on_nan="raise", **options):
    """Return losses, variables, and the launches of updates of a job."""
    job = af.job(loss, seed=3, device="cuda", **options)
    model, found = Narrow(layers, width), []

    def note(_, metrics):
        found.append(metrics["loss"])

    job.fit(model, data(), steps=steps, on_nan=on_nan, progress=False, on_step=note)
    plan = job.compile(Narrow(layers, width), data(), on_nan=on_nan)
    ops = [launch for actor in plan.actors for launch in actor.launches if "update" in launch.op]
    return found, {k: np.array(v) for k, v in model.state().items()}, ops


CASES = {
    "adamw": {"optimizer": af.optim.AdamW(3e-3)},
    "momentum": {"optimizer": af.optim.SGD(0.1, momentum=0.9)},
    "bf16": {"optimizer": af.optim.AdamW(3e-3), "precision": "bf16"},
    "accumulate": {"optimizer": af.optim.AdamW(3e-3), "accumulate": 2},
    "skip": {"optimizer": af.optim.AdamW(3e-3), "on_nan": "skip"},
    "schedule": {"optimizer": af.optim.AdamW(af.optim.cosine(3e-3, steps=20))},
}


@pytest.mark.parametrize("case", CASES)
def test_joined_updates_train_with_the_bits_of_updates_apart(case, monkeypatch):
    losses, variables, launches = trained(6, 7, 20, **CASES[case])
    assert [launch.op for launch in launches].count("joined_updates") >= 1
    assert len(launches) < 8
    known = CudaTarget.fingerprint.fget
    monkeypatch.setattr(CudaTarget, "fingerprint", property(lambda self: known(self) + " apart"))
    monkeypatch.setattr(CudaTarget, "joined_updates", lambda self, num_full: 1)
    expected = trained(6, 7, 20, **CASES[case])
    assert {launch.op for launch in expected[2]} & {"joined_updates"} == set()
    assert len(expected[2]) == 16
    assert losses == expected[0]
    for name, value in variables.items():
        np.testing.assert_array_equal(value, expected[1][name])


def test_300_parameters_are_a_handful_of_launches_that_name_them():
    _, _, launches = trained(149, 1, 2, optimizer=af.optim.SGD(0.1))
    names = [name for x in launches for name in dict(x.attrs).get("variables", ())]
    assert len(launches) <= 6
    assert len(set(names)) == len(names) >= 290
    assert {"first.weight", "last.bias"} <= {*names}
    assert all([" x sgd_update" in x.label for x in launches if x.op == "joined_updates"])
