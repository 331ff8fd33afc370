"""By whatever road a plan comes to a run, it is proven: its versions and its races."""

import dataclasses

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.cli.main import main
from actorflow.compile.compiling import PlanCache
from actors.race.race import RaceError, check_races
from compiler.contract.errors import ActorflowError, PlanFormatError
from compiler.contract.plan import Plan
from compiler.verify.verify import verify_plan


class Towers(nn.Module):
    def __init__(self):
        self.left, self.right = nn.Linear(8, 12), nn.Linear(8, 12)

    def __call__(self, x):
        return af.relu(self.left(x)) * af.relu(self.right(x))


def job():
    @af.job(optimizer=af.optim.AdamW(1e-2), streams=2)
    def train(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    return train


def stale(plan):
    """Leave out a launch that works in place."""
    for actor in plan.actors:
        for i, launch in enumerate(actor.launches):
            if set(launch.inputs) & set(launch.outputs) and launch.op != "adamw_update":
                launches = actor.launches[:i] + actor.launches[i + 1 :]
                changed = dataclasses.replace(actor, launches=launches)
                return with_actor(plan, changed)
    raise AssertionError("nothing works in place")


def racing(plan):
    """Take an actor off an edge without which nothing but the race check has an objection."""
    for actor in plan.actors:
        for port in actor.inputs:
            ports = tuple([p for p in actor.inputs if p is not port])
            changed = with_actor(plan, dataclasses.replace(actor, inputs=ports))
            try:
                verify_plan(changed)
                check_races(changed)
            except RaceError:
                return changed
            except ActorflowError:
                continue
    raise AssertionError("each edge without which there is a race is needed otherwise too")


def with_actor(plan, changed):
    actors = tuple([changed if a.id == changed.id else a for a in plan.actors])
    return dataclasses.replace(plan, actors=actors)


@pytest.fixture
def data(many_chains, numpys_kernels):
    x = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
    y = (x.argmax(1) % 12).astype(np.int32)
    return lambda: af.data.ArraySource({"x": x, "y": y}, batch=8)


@pytest.mark.parametrize("change", [stale, racing])
def test_a_runner_proves_what_it_is_given(data, tmp_path, change):
    plan = job().compile(Towers(), data())
    wrong = change(plan)
    wrong.save(tmp_path / "p.plan")
    with raises(PlanFormatError):
        af.Runner(wrong)
    with raises(PlanFormatError):
        af.Runner(Plan.load(tmp_path / "p.plan"))
    af.Runner(plan).fit(data(), steps=1, progress=False)


@pytest.mark.parametrize("change", [stale, racing])
def test_the_command_line_proves_a_plan_file(data, tmp_path, capsys, change):
    change(job().compile(Towers(), data())).save(tmp_path / "p.plan")
    (tmp_path / "text.txt").write_text("some text to train on")
    where = str(tmp_path / "p.plan")
    assert main(["run", where, "--text", str(tmp_path / "text.txt"), "--steps", "1"]) == 1
    assert "cannot run" in capsys.readouterr().err


@pytest.mark.parametrize("change", [stale, racing])
def test_a_plan_of_the_cache_that_cannot_be_proven_is_compiled_anew(
    data, tmp_path, monkeypatch, caplog, change
):
    folder = tmp_path / "kept"
    monkeypatch.setenv("ACTORFLOW_CACHE", str(folder))

    def compiled():
        return job().compile(Towers(), data())

    plan = compiled()
    key = next(folder.glob("*.plan")).stem
    PlanCache(folder, pytest.fail).store(key, change(plan))
    assert compiled() == plan
    assert "cannot run" in caplog.text
