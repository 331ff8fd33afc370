"""Runs on simulated devices: what fit, step and stream of a job give there, and what a fault costs.

Plans are those of the host with their streams on a device: what moves data is tested elsewhere.
"""

import logging
import os
from dataclasses import replace

import numpy as np
import pytest

import actorflow as af
from actorflow import nn
from actorflow.run import training_run
from actorflow.run.runner import Runner
from actorflow.settings import Settings
from actors.errors import ActorFailed
from actors.load import load
from compiler.errors import DeviceError
from compiler.placement import Device, DeviceKind, StreamRole

SIM = Device(DeviceKind.SIM)
ROWS = {
    "x": np.random.default_rng(0).standard_normal((32, 6)).astype(np.float32),
    "y": np.arange(32, dtype=np.int32) % 5,
}


class Model(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 5)

    def __call__(self, x):
        return self.down(af.dropout(af.gelu(self.up(x)), 0.1))


@af.job(optimizer=af.optim.AdamW(1e-2))
def train(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)


def rows(batch=4):
    return af.data.ArraySource(ROWS, batch=batch)


def on(plan, device):
    """Put all but the ports of a plan on a device."""
    streams = [s if s.role is StreamRole.PORT else replace(s, device=device) for s in plan.streams]
    return replace(plan, streams=tuple(streams))


def bytes_of(variables):
    return {name: array.tobytes() for name, array in variables.items()}


@pytest.fixture(scope="module")
def plan():
    return train.compile(Model(), rows(), every=3)


def runner(plan, seed=0):
    return Runner(plan, settings=replace(Settings.from_env(os.environ), sim_seed=seed))


@pytest.mark.parametrize("seed", range(4))
def test_fit_gives_the_bits_of_the_host_and_a_resumed_run_too(plan, seed, tmp_path):
    expected = runner(plan).fit(rows(), steps=11, progress=False)
    losses = []
    options = {"every": 3, "checkpoint": tmp_path / "run", "progress": False}
    late = runner(on(plan, SIM), seed)
    late.fit(rows(), steps=5, on_step=lambda step, m: losses.append(m["loss"]), **options)
    result = runner(on(plan, SIM), seed + 1).fit(rows(), steps=11, **options)
    assert (result.first_step, result.metrics) == (5, expected.metrics)
    assert bytes_of(result.variables) == bytes_of(expected.variables)
    assert len(losses) == 5


def test_step_and_stream_give_the_bits_of_the_host(plan):
    batches = [{name: array[i : i + 4] for name, array in ROWS.items()} for i in (0, 4, 8)]
    seen = []
    for device in (Device(DeviceKind.HOST), SIM):
        stepped = runner(on(plan, device), 3)
        outputs = [stepped.step(batch) for batch in batches]
        stepped.write({"up.bias": np.ones(16, np.float32)})
        assert stepped.variables()["up.bias"].tolist() == [1.0] * 16
        outputs.append(stepped.step(batches[0]))
        stepped.close()
        outputs += list(stepped.stream(rows(), steps=4))
        seen.append(([o["loss"] for o in outputs], bytes_of(stepped.variables())))
    assert seen[0] == seen[1]


def test_the_seed_of_the_lateness_is_the_first_that_a_run_says(plan, caplog):
    with caplog.at_level(logging.INFO, "actorflow"):
        runner(on(plan, SIM), 41).fit(rows(), steps=1, progress=False)
    assert caplog.messages[0] == (
        "plan 'train' runs on the simulated device sim:0, late as ACTORFLOW_SIM_SEED=41 makes it:"
        " no measure of speed"
    )


def test_a_plan_of_a_device_that_is_not_here_is_refused_before_anything_runs(plan):
    with pytest.raises(DeviceError, match=r"was compiled for cuda:0, host:0; this process has"):
        runner(on(plan, Device(DeviceKind.CUDA))).fit(rows(), steps=1, progress=False)


@af.job(optimizer=af.optim.AdamW(1e-2))
def look_up(model, batch):
    return af.cross_entropy(model.out(model.table(batch.ids)), batch.y)


class Table(nn.Module):
    def __init__(self):
        self.table, self.out = nn.Embedding(7, 6), nn.Linear(6, 5)


def ids(bad_at):
    found = {"ids": np.arange(40, dtype=np.int32) % 7, "y": np.arange(40, dtype=np.int32) % 5}
    if bad_at is not None:
        found["ids"][bad_at * 4] = 99
    return af.data.ArraySource(found, batch=4)


@pytest.mark.parametrize("has_directory", [True, False])
def test_after_a_fault_the_error_names_the_checkpoint_and_the_values_are_those_of_before(
    has_directory, tmp_path, caplog
):
    plan = on(look_up.compile(Table(), ids(None), every=2), SIM)
    failing = runner(plan, 5)
    before = bytes_of(failing.variables())
    where = {"checkpoint": tmp_path / "run", "every": 2} if has_directory else {}
    with pytest.raises(ActorFailed, match="99") as caught:
        failing.fit(ids(8), steps=10, progress=False, **where)
    (note,) = [n for n in caught.value.__notes__ if "lost" in n]
    if has_directory:
        newest = max((tmp_path / "run").glob("step-*"))
        step = int(newest.name.removeprefix("step-"))
        assert f"the newest checkpoint is that of step {step} in {tmp_path / 'run'}" in note
    else:
        assert "none was to be written" in note
    assert note.endswith("The model has its values from before the run")
    assert bytes_of(failing.variables()) == before
    assert "the variables of plan 'look_up' went with a device: launch" in caplog.text


def test_what_nobody_may_need_is_scribbled_over_in_a_run(plan, monkeypatch):
    """A batch slot is free as soon as its step ends; a plan that read it later would see NaN."""
    loaded = []
    monkeypatch.setattr(
        training_run,
        "load",
        lambda plan, *rest, **options: loaded.append(plan) or load(plan, *rest, **options),
    )
    runner(on(plan, SIM)).fit(rows(), steps=1, progress=False)
    runner(plan).fit(rows(), steps=1, progress=False)
    last = [[a.launches[-1].op for a in p.actors if a.launches] for p in loaded]
    assert [ops.count("poison") for ops in last] == [1, 0]
