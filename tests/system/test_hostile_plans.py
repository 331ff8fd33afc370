"""Plan files that somebody has changed: every command refuses one in words, or shows it."""

from dataclasses import replace

import numpy as np
import pytest

import actorflow as af
from actorflow import nn
from actorflow.cli.main import main
from compiler.contract.plan import Plan

VALUES = (0, -1, 1 << 62, 1e300, True, None, "x", b"", (), (0,), ((1, 2), (3,)))


@pytest.fixture(scope="module", params=["host", "cuda"])
def plan(request):
    arrays = {"x": np.ones((32, 8), np.float32), "y": np.zeros(32, np.int32)}
    options = {"device": "cuda", "gpu": "h200"} if request.param == "cuda" else {}
    train = af.job(loss, optimizer=af.optim.AdamW(0.1), clip_norm=1.0, **options)
    return train.compile(Net(), af.data.ArraySource(arrays, batch=16))


class Net(nn.Module):
    def __init__(self):
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 5)

    def __call__(self, x):
        return self.down(self.drop(af.relu(self.up(x))))


def loss(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)


def changes(launch, others):
    """Yield the launch with one thing of it changed."""
    for name, _ in launch.attrs:
        yield replace(launch, attrs=tuple([pair for pair in launch.attrs if pair[0] != name]))
        for value in VALUES:
            attrs = tuple([(n, value if n == name else v) for n, v in launch.attrs])
            yield replace(launch, attrs=attrs)
    for other in others:
        yield replace(launch, kernel=other.kernel)
        yield replace(launch, op=other.op)
        yield replace(launch, attrs=other.attrs)
        yield replace(launch, inputs=other.inputs)
        yield replace(launch, outputs=other.outputs)
    yield replace(launch, op="no such op")
    yield replace(launch, kernel="no such kernel")
    yield replace(launch, inputs=())
    yield replace(launch, outputs=())
    yield replace(launch, duration_ns=1e18)


def mutants(plan):
    distinct = {}
    for actor in plan.actors:
        for launch in actor.launches:
            distinct.setdefault((launch.op, launch.kernel), launch)
    others = list(distinct.values())
    for place, actor in enumerate(plan.actors):
        for index, launch in enumerate(actor.launches):
            if distinct[launch.op, launch.kernel] is not launch:
                continue
            for changed in changes(launch, others):
                launches = (*actor.launches[:index], changed, *actor.launches[index + 1 :])
                actors = list(plan.actors)
                actors[place] = replace(actor, launches=launches)
                yield replace(plan, actors=tuple(actors))


@pytest.fixture
def priced(monkeypatch, probes):
    """Keep no measurement of this machine."""
    monkeypatch.setenv("ACTORFLOW_CACHE", "off")


COMMANDS = {
    "simulate": ["simulate", "FILE", "--steps", "2"],
    "simulate, estimated": ["simulate", "FILE", "--steps", "2", "--no-calibrate", "--json"],
    "plan": ["plan", "FILE", "--full"],
    "memory": ["plan", "FILE", "--memory", "MAP"],
    "beside": ["plan", "WHOLE", "--memory", "MAP", "--without", "FILE"],
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_changed_plan_is_refused_in_words_or_shown(plan, priced, tmp_path, capsys, command):
    """Of every 23rd mutant: neither a traceback, nor a report of a bug of ours."""
    file, whole = tmp_path / "changed.plan", tmp_path / "whole.plan"
    plan.save(whole)
    words = {"FILE": str(file), "WHOLE": str(whole), "MAP": str(tmp_path / "map.html")}
    arguments = [words.get(word, word) for word in COMMANDS[command]]
    codes = []
    for changed in list(mutants(plan))[::23]:
        changed.save(file)
        codes.append(main(arguments))
        said = capsys.readouterr().err
        assert "bug in actorflow" not in said
        assert (codes[-1] == 0) == (said == ""), said
        if codes[-1]:
            assert said.startswith(f"actorflow: {file}"), said
    assert codes.count(1) > 5
    assert codes.count(0) > 0


def test_a_launch_without_its_program_is_named(plan, priced, tmp_path, capsys):
    for actor in plan.actors:
        for index, launch in enumerate(actor.launches):
            names = dict(launch.attrs)
            if launch.op != "fused" or "program" not in names:
                continue
            attrs = tuple([pair for pair in launch.attrs if pair[0] != "program"])
            launches = list(actor.launches)
            launches[index] = replace(launch, attrs=attrs)
            bad = [replace(a, launches=tuple(launches)) if a is actor else a for a in plan.actors]
            replace(plan, actors=tuple(bad)).save(tmp_path / "bad.plan")
            assert main(["simulate", str(tmp_path / "bad.plan")]) == 1
            said = capsys.readouterr().err
            assert f"launch {index} of {actor.name!r}, fused(" in said
            assert "does not fit its op: no 'program'" in said
            assert "compile the job again" in said
            return
    pytest.fail("the plan has no fused launch")


def test_a_plan_of_kernels_that_are_not_here_is_shown_and_simulated(plan, priced, tmp_path, capsys):
    """It may be of a machine with a plugin, a compiler or a GPU that this one lacks."""
    renamed = [
        replace(a, launches=tuple([replace(x, kernel=f"other.{x.op}") for x in a.launches]))
        for a in plan.actors
    ]
    file = tmp_path / "other.plan"
    replace(plan, actors=tuple(renamed)).save(file)
    assert main(["plan", str(file), "--full"]) == 0
    assert main(["simulate", str(file), "--steps", "2"]) == 0
    capsys.readouterr()
    assert main(["run", str(file), "--text", __file__, "--steps", "1"]) == 1
    assert Plan.load(file).fingerprint
