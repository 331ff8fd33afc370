"""Jobs on GPUs that the host acts: near to the host's losses, and one result however late they are.

Bytes that nobody may need are scribbled over all the time, guards stand around all memory, and
whatever the emulation finds wrong ends a run.
"""

import gc
import os
from dataclasses import replace

import numpy as np
import pytest
from jobs import GPT

import actorflow as af
from actorflow import nn
from actorflow.environment.settings import Settings
from actorflow.run.devices import with_poison
from actorflow.run.runner import Runner
from actors.testing.emulated import memory

STEPS, STEPS_OF_A_SEED = 20, 5

RNG = np.random.default_rng(5)
ROWS = {
    "x": RNG.standard_normal((48, 6)).astype(np.float32),
    "ids": RNG.integers(0, 11, (48, 7)).astype(np.int32),
    "y": RNG.integers(0, 5, 48).astype(np.int32),
}


class Layers(nn.Module):
    def __init__(self):
        self.up, self.norm, self.down = nn.Linear(6, 40), nn.LayerNorm(40), nn.Linear(40, 5)

    def __call__(self, batch):
        h = af.dropout(af.gelu(self.up(batch.x), approximate="tanh"), 0.1)
        return self.down(self.norm(h)), batch.y


class Bag(nn.Module):
    def __init__(self):
        self.rows, self.down = nn.Embedding(11, 12), nn.Linear(12, 5)

    def __call__(self, batch):
        return self.down(af.tanh(self.rows(batch.ids)).mean(1)), batch.y


class Halves(Layers):
    def __call__(self, batch):
        h = af.gelu(self.up(batch.x), approximate="tanh")
        with af.device("cuda:1"):
            return self.down(self.norm(h)), batch.y


class Letters(GPT):
    def __init__(self):
        super().__init__(11, seq=6, width=16, dropout=0.1)

    def __call__(self, batch):
        logits = super().__call__(batch.ids[:, :-1])
        return logits.reshape((-1, 11)), batch.ids[:, 1:].reshape((-1,))


CUDA = {"device": "cuda"}
KINDS = {
    "layers": (Layers, CUDA, {}),
    "embedding": (Bag, CUDA, {}),
    "accumulate": (Layers, CUDA | {"accumulate": 3}, {}),
    "streams": (Bag, CUDA | {"streams": 2}, {}),
    "offload": (Layers, CUDA | {"offload": "optimizer"}, {}),
    "two GPUs": (Halves, {"devices": ["cuda:0", "cuda:1"]}, {}),
    "bfloat16": (Layers, CUDA | {"precision": "bf16"}, {"rel": 2e-2}),
    "transformer": (Letters, CUDA, {}),
}


@pytest.fixture(autouse=True)
def emulated(native_toolchain, monkeypatch):
    monkeypatch.setenv("ACTORFLOW_CUDA", "emulated")


@pytest.fixture
def seeds(request):
    """How late GPUs are; the kernels of a GPU are the same with native ones of the host."""
    return range(1, 5 if request.config.getoption("--native") else 50)


def rows():
    return af.data.ArraySource(ROWS, batch=8, seed=3)


def runner(kind, **options):
    """Return a function from a seed to what runs a kind of job, compiled once."""
    make, where, _ = KINDS[kind]

    @af.job(optimizer=af.optim.AdamW(1e-2), seed=2, **where | options)
    def train(model, batch):
        logits, labels = model(batch)
        return af.cross_entropy(logits.flatten(0, -2), labels.flatten())

    plan = train.compile(make(), rows())
    settings = Settings.from_env(os.environ)
    return lambda seed: Runner(plan, settings=replace(settings, sim_seed=seed))


def ran(opened, steps):
    """Return the losses and the bytes of all variables."""
    losses = []
    result = opened.fit(
        rows(), steps=steps, progress=False, on_step=lambda _, m: losses.append(m["loss"])
    )
    return losses, {name: array.tobytes() for name, array in result.variables.items()}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "two GPUs"])
def test_twenty_losses_are_those_of_the_host(kind):
    near = {"rel": 1e-5} | KINDS[kind][2]
    losses, _ = ran(runner(kind)(0), STEPS)
    expected, _ = ran(runner(kind, device="host", offload="none")(0), STEPS)
    assert losses == pytest.approx(expected, **near)
    assert len({*losses}) > STEPS // 2


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", KINDS)
def test_however_late_a_gpu_is_the_bits_are_the_same(kind, seeds):
    run = runner(kind)
    expected = ran(run(0), STEPS_OF_A_SEED)
    assert np.isfinite(expected[0]).all()
    for seed in seeds:
        assert ran(run(seed), STEPS_OF_A_SEED) == expected, seed


def test_what_nobody_needs_is_scribbled_over_in_every_firing():
    opened = runner("layers")(0)
    for plan, is_there in ((opened.plan, False), (with_poison(opened.plan, opened.settings), True)):
        launches = [launch.op for actor in plan.actors for launch in actor.launches]
        assert ("poison" in launches) == is_there


def test_launch_by_launch_the_bits_are_the_same(monkeypatch):
    expected = ran(runner("layers")(0), STEPS_OF_A_SEED)
    monkeypatch.setenv("ACTORFLOW_SYNC", "1")
    assert ran(runner("layers")(0), STEPS_OF_A_SEED) == expected


def test_all_memory_is_given_back_when_a_run_is_gone(monkeypatch):
    seen = []
    make = memory.EmulatedMemory.__init__
    monkeypatch.setattr(
        memory.EmulatedMemory, "__init__", lambda self: (make(self), seen.append(self))[0]
    )
    run = runner("two GPUs")
    opened = run(0)
    ran(opened, 2)
    opened.close()
    del opened
    gc.collect()
    assert seen
    assert [block for held in seen for block in held._blocks.values()] == []
