"""Runs on simulated devices: what fit, step and stream of a job give there, and what a fault costs.

What decides where ops run, and what copies values, is tested elsewhere.
"""

import logging
import os
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.environment.settings import Settings
from actorflow.run import training_run
from actorflow.run.runner import Runner
from actors.loop.load import load
from actors.machine.errors import ActorFailed

ROWS = {
    "x": np.random.default_rng(0).standard_normal((32, 6)).astype(np.float32),
    "y": np.arange(32, dtype=np.int32) % 5,
}


class Model(nn.Module):
    def __init__(self):
        self.up, self.mid, self.down = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def __call__(self, x, aside):
        hidden = af.dropout(af.gelu(self.up(x), approximate="tanh"), 0.1)
        with nullcontext() if aside is None else af.device(aside):
            hidden = af.gelu(self.mid(hidden), approximate="tanh")
        return self.down(hidden)


WHERE = {
    "host": {"device": "host"},
    "sim": {"device": "sim:1"},
    "two": {"devices": ["sim:0", "sim:1"]},
    "beside the host": {"devices": ["host", "sim:0"]},
}


def compiled(where, **options):
    aside = WHERE[where].get("devices", [None])[-1]

    @af.job(optimizer=af.optim.AdamW(1e-2), **WHERE[where], **options)
    def train(model, batch):
        return af.cross_entropy(model(batch.x, aside), batch.y)

    return train.compile(Model(), rows(), every=3)


def rows(batch=4):
    return af.data.ArraySource(ROWS, batch=batch)


def bytes_of(variables):
    return {name: array.tobytes() for name, array in variables.items()}


@pytest.fixture(scope="module")
def plans():
    """Plans of one job by where it runs."""
    return {where: compiled(where) for where in WHERE}


def runner(plan, seed=0):
    return Runner(plan, settings=replace(Settings.from_env(os.environ), sim_seed=seed))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("where", ["sim", "two", "beside the host"])
def test_fit_gives_the_bits_of_the_host_and_a_resumed_run_too(plans, where, seed, tmp_path):
    expected = runner(plans["host"]).fit(rows(), steps=11, progress=False)
    losses = []
    options = {"every": 3, "checkpoint": tmp_path / "run", "progress": False}
    late = runner(plans[where], seed)
    late.fit(rows(), steps=5, on_step=lambda step, m: losses.append(m["loss"]), **options)
    result = runner(plans[where], seed + 1).fit(rows(), steps=11, **options)
    assert (result.first_step, result.metrics) == (5, expected.metrics)
    assert bytes_of(result.variables) == bytes_of(expected.variables)
    assert len(losses) == 5


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"streams": 2}], ids=str)
@pytest.mark.parametrize("where", ["sim", "two"])
def test_options_of_the_job_give_the_bits_of_the_host_there(where, options):
    expected = runner(compiled("host", **options)).fit(rows(), steps=7, progress=False)
    plan = compiled(where, **options)
    for seed in range(3):
        result = runner(plan, seed).fit(rows(), steps=7, progress=False)
        assert result.metrics == expected.metrics
        assert bytes_of(result.variables) == bytes_of(expected.variables)


def test_step_and_stream_give_the_bits_of_the_host(plans):
    batches = [{name: array[i : i + 4] for name, array in ROWS.items()} for i in (0, 4, 8)]
    seen = []
    for plan in plans.values():
        stepped = runner(plan, 3)
        outputs = [stepped.step(batch) for batch in batches]
        stepped.write({"up.bias": np.ones(16, np.float32)})
        assert stepped.variables()["up.bias"].tolist() == [1.0] * 16
        outputs.append(stepped.step(batches[0]))
        stepped.close()
        outputs += list(stepped.stream(rows(), steps=4))
        seen.append(([o["loss"] for o in outputs], bytes_of(stepped.variables())))
    assert all([row == seen[0] for row in seen[1:]])


@pytest.mark.one_device("reads what a run on the device says")
def test_the_seed_of_the_lateness_is_the_first_that_a_run_says(plans, caplog):
    with caplog.at_level(logging.INFO, "actorflow"):
        runner(plans["two"], 41).fit(rows(), steps=1, progress=False)
    assert caplog.messages[0] == (
        "plan 'train' runs on the simulated device sim:0, sim:1, late as ACTORFLOW_SIM_SEED=41"
        " makes it: no measure of speed"
    )


def test_what_was_written_is_in_memory_of_its_device_and_is_read_from_there(plans):
    """No variable is a view that numpy could reach: values move as arrays, at a step's end."""
    plan = plans["two"]
    places = {
        v.name: str(plan.arenas[plan.registers[plan.views[v.view].register].arena].device)
        for v in plan.variables
    }
    assert (places["up.weight"], places["mid.weight"]) == ("sim:0", "sim:1")
    stepped = runner(plan, 2)
    stepped.step({name: array[:4] for name, array in ROWS.items()})
    before = stepped.variables()["mid.weight"]
    stepped.step({name: array[:4] for name, array in ROWS.items()})
    after = stepped.variables()["mid.weight"]
    stepped.close()
    assert not np.shares_memory(before, after)
    assert before.tobytes() != after.tobytes()


@af.job(optimizer=af.optim.AdamW(1e-2), device="sim")
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
    failing = runner(look_up.compile(Table(), ids(None), every=2), 5)
    before = bytes_of(failing.variables())
    where = {"checkpoint": tmp_path / "run", "every": 2} if has_directory else {}
    with pytest.raises(ActorFailed, match="99") as caught:
        failing.fit(ids(8), steps=10, progress=False, **where)
    (note,) = [n for n in caught.value.__notes__ if "lost" in n]
    if has_directory:
        newest = max((tmp_path / "run").glob("step-*"))
        step = int(newest.name.removeprefix("step-"))
        assert f"the newest checkpoint is of step {step} in {tmp_path / 'run'}" in note
    else:
        assert "are lost; no checkpoint was to be written. The model has" in note
    assert note.endswith("The model has its values from before the run")
    assert bytes_of(failing.variables()) == before
    assert "the variables of plan 'look_up' went with a device: launch" in caplog.text


def test_a_step_that_fails_on_a_device_takes_the_steps_before_along():
    stepped = runner(look_up.compile(Table(), ids(None)), 5)
    before = bytes_of(stepped.variables())
    good, bad = (next(ids(bad_at)) for bad_at in (None, 0))
    stepped.step(good)
    with raises(ActorFailed):
        stepped.step(bad)
    assert bytes_of(stepped.variables()) == before
    stepped.step(good)
    stepped.close()


def test_a_step_that_fails_on_a_device_goes_back_to_what_was_read_between_steps(caplog):
    """Parameters, moments and counters, as of one step: to go on is to go on from there."""
    good, bad = (next(ids(bad_at)) for bad_at in (None, 0))

    def trained(*batches):
        table = Table()
        for batch in batches:
            if batch is None:
                table.state()
            elif batch is bad:
                with raises(ActorFailed) as caught:
                    look_up.step(table, batch)
                assert any(
                    "has the values that were read last" in n for n in caught.value.__notes__
                )
            else:
                look_up.step(table, batch)
        return table.state()

    straight, back = trained(good, good, good), trained(good, good, None, good, bad, good)
    for name, array in straight.items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)
    assert "the variables return to their values read last" in caplog.text


def test_what_nobody_may_need_is_scribbled_over_in_a_run(plans, monkeypatch):
    """A batch slot is free as soon as its step ends; a plan that read it later would see NaN."""
    loaded = []
    monkeypatch.setattr(
        training_run,
        "load",
        lambda plan, *rest, **options: loaded.append(plan) or load(plan, *rest, **options),
    )
    runner(plans["sim"]).fit(rows(), steps=1, progress=False)
    runner(plans["host"]).fit(rows(), steps=1, progress=False)
    last = [[a.launches[-1].op for a in p.actors if a.launches] for p in loaded]
    assert ["poison" in ops for ops in last] == [True, False]
