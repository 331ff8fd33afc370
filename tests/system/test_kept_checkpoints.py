"""Checkpoints that stay are those of the evaluated weights, over stops, kills and on ranks."""

import signal
from pathlib import Path

import numpy as np
import pytest
from error_texts import raises
from jobs import assert_same
from rank_trainings import Training, images
from rank_trainings import loss as loss_of_images

import actorflow as af
from actorflow.checkpoint.errors import CheckpointError
from actorflow.checkpoint.manager import CheckpointManager


def steps_in(run):
    return [int(path.name.removeprefix("step-")) for path in sorted(Path(run).glob("step-*"))]


@pytest.fixture
def fit(mlp, classification, classify, tmp_path):
    """Train with an evaluation every three steps; `fit.losses` has all of them by step."""
    evaluate = af.job(train=False)(
        lambda model, batch: {"loss": af.cross_entropy(model(batch.x), batch.y)}
    )

    def run(steps, keep, folder="run", on_result=None, source=None, **options):
        job = {name: options.pop(name) for name in ("accumulate", "streams") if name in options}
        run.model = mlp()
        watched = af.Evaluation(
            evaluate, source or classification(seed=7), every=3, batches=2, on_result=on_result
        )
        data = options.pop("data", None) or classification()
        result = classify(**job).fit(
            run.model, data, steps=steps, checkpoint=tmp_path / folder, keep=keep,
            evaluation=watched, progress=False, **options,
        )  # fmt: skip
        run.losses.update({step: means["loss"] for step, means in result.evaluations})
        return result

    def measured(state):
        model = mlp()
        model.load(state)
        data = classification(seed=7)
        losses = [evaluate.step(model, next(data))["loss"] for _ in range(2)]
        evaluate.close(model)
        return sum(losses) / 2

    run.losses, run.measured = {}, measured
    return run


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"streams": 2}], ids=str)
@pytest.mark.parametrize("every", ["1h", 2], ids=["time", "steps"])
def test_the_best_checkpoint_has_exactly_the_weights_that_were_evaluated(
    fit, tmp_path, options, every
):
    keep = af.Keep(last=2, best=2, every=10)
    fit(26, keep, every=every, **options)
    best = sorted(fit.losses, key=lambda step: (fit.losses[step], step))[:2]
    newest = {26} | ({24} if every == "1h" else {26 - 26 % 2, 24})
    assert {*steps_in(tmp_path / "run")} == {*best, 10, 20} | newest
    for step in best:
        state = af.load(tmp_path / "run" / f"step-{step:010}")
        assert fit.measured(state) == fit.losses[step]
    assert_same(af.load(tmp_path / "run", best=True), af.load(tmp_path / f"run/step-{best[0]:010}"))


def test_a_run_that_was_stopped_keeps_what_an_uninterrupted_one_does(fit, tmp_path):
    keep = af.Keep(last=1, best=2)
    fit(20, keep, "whole", every="1h")
    for steps in (3, 8, 9, 16, 20):
        fit(steps, keep, every="1h")
    assert steps_in(tmp_path / "run") == steps_in(tmp_path / "whole")


KILLED = """
import os, signal, sys
import numpy as np
import actorflow as af
from actorflow import nn

x = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
data = lambda: af.data.ArraySource({"x": x, "y": (x[:, 0] > 0).astype(np.int64)}, batch=16)
score = lambda model, batch: {"loss": af.cross_entropy(model(batch.x), batch.y)}

def die(step, means):
    print(step, means["loss"], flush=True)
    if step == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

watched = af.Evaluation(af.job(score, train=False), data(), every=3, batches=2, on_result=die)
train = af.job(score, optimizer=af.optim.AdamW(0.1))
train.fit(nn.Linear(8, 2), data(), steps=20, checkpoint=sys.argv[1], every="1h", progress=False,
          evaluation=watched, keep=af.Keep(last=1, best=2, mode="max"))
"""


def test_a_run_that_is_killed_at_an_evaluation_makes_it_again_and_keeps_the_same(
    run_python, tmp_path
):
    whole = run_python(KILLED, "whole", "0").stdout.split("\n")
    for step in (6, 12):
        killed = run_python(KILLED, "run", str(step), check=False)
        assert killed.returncode == -signal.SIGKILL
    rest = run_python(KILLED, "run", "0").stdout.split("\n")
    assert rest == whole[-len(rest) :]
    assert steps_in(tmp_path / "run") == steps_in(tmp_path / "whole")


@pytest.mark.parametrize("step", [3, 6, 7])
def test_a_stop_at_an_evaluation_still_measures_its_checkpoint(fit, tmp_path, step):
    def stop(now, means):
        if now >= step:
            raise af.StopTraining

    result = fit(1000, af.Keep(last=1, best=99), on_result=stop, every="1h")
    reader = CheckpointManager(tmp_path / "run")
    assert {s: fit.losses[s] for s in steps_in(tmp_path / "run") if s % 3 == 0} == reader.measured(
        "loss"
    )
    assert result.last_step == steps_in(tmp_path / "run")[-1]


@pytest.mark.parametrize("error", [OSError("gone"), StopIteration()], ids=["error", "end"])
def test_an_evaluation_without_its_data_does_not_hold_up_the_last_checkpoint(
    fit, classification, tmp_path, error
):
    class Fails:
        def __init__(self):
            self.source, self.count = classification(seed=7), 0
            self.spec, self.state = self.source.spec, self.source.state
            self.restore = self.source.restore

        def __next__(self):
            self.count += 1
            if self.count == 6:
                raise error
            return next(self.source)

    with pytest.raises((OSError, af.DataError)):
        fit(1000, af.Keep(last=9, best=1), source=Fails(), every="1h")
    assert {*CheckpointManager(tmp_path / "run").measured("loss")} == {3, 6}
    assert steps_in(tmp_path / "run")[-1] >= 9


def test_a_launch_that_fails_in_an_evaluation_ends_the_run(mlp, classification, classify, tmp_path):
    @af.job(train=False)
    def evaluate(model, batch):
        loss = af.cross_entropy(model(batch.x), batch.y)
        af.debug.check(loss, lambda value: bool(value < 0.0))
        return {"loss": loss}

    watched = af.Evaluation(evaluate, classification(seed=7), every=3, batches=1)
    with pytest.raises(af.ActorflowError, match="check"):
        classify().fit(
            mlp(), classification(), steps=50, checkpoint=tmp_path / "run", progress=False,
            evaluation=watched, keep=af.Keep(best=1),
        )  # fmt: skip


def test_batches_of_several_shapes_keep_the_best_too(fit, classification, tmp_path):
    def batches():
        for place in range(40):
            rows = 16 if place % 3 else 8
            yield {name: array[:rows] for name, array in next(source).items()}

    source = classification()
    full = source.spec()
    types = [
        {n: af.TensorType(t.dtype, (rows, *t.shape[1:])) for n, t in full.items()}
        for rows in (16, 8)
    ]
    fit(14, af.Keep(last=1, best=1), data=af.data.from_iterable(batches, types), every="1h")
    best = min(fit.losses, key=fit.losses.__getitem__)
    assert steps_in(tmp_path / "run") == sorted({best, 14})
    assert fit.measured(af.load(tmp_path / "run", best=True)) == fit.losses[best]


@pytest.mark.usefixtures("native_toolchain")
@pytest.mark.no_gpu("ranks meet in memory of the host")
def test_ranks_keep_what_one_rank_does(tmp_path):
    training = Training(options={"zero": True})
    evaluate = af.job(train=False)(lambda m, b: {"loss": loss_of_images(m, b)})
    options = {
        "evaluation": lambda: af.Evaluation(evaluate, images(8, seed=9), every=2, batches=2),
        "compiled": {"every": 2}, "every": 4, "keep": af.Keep(last=1, best=2, mode="max"),
    }  # fmt: skip
    training.run(None, steps=9, checkpoint=tmp_path / "one", **options)
    training.run(af.Mesh(data=2), steps=5, checkpoint=tmp_path / "two", **options)
    training.run(af.Mesh(data=2), steps=9, checkpoint=tmp_path / "two", **options)
    assert steps_in(tmp_path / "two") == steps_in(tmp_path / "one")
    one, two = (CheckpointManager(tmp_path / name).measured("loss") for name in ("one", "two"))
    assert one.keys() == two.keys()
    np.testing.assert_allclose([*two.values()], [*one.values()], rtol=1e-5)


def test_a_value_that_is_not_finite_is_never_the_best(fit, mlp, classification, classify, tmp_path):
    evaluate = af.job(train=False)(
        lambda model, batch: {"loss": model(batch.x).mean() * float("nan"), "zero": af.zeros(())}
    )
    watched = af.Evaluation(evaluate, classification(seed=7), every=2, batches=1)
    classify().fit(
        mlp(), classification(), steps=6, checkpoint=tmp_path / "run", progress=False,
        evaluation=watched, keep=af.Keep(last=1, best=1),
    )  # fmt: skip
    assert steps_in(tmp_path / "run") == [6]
    with raises(CheckpointError):
        af.load(tmp_path / "run", best=True)


def test_a_metric_that_is_not_there_and_a_plan_with_other_snapshots_are_errors(
    fit, mlp, classification, classify, tmp_path
):
    with raises(af.CompileError):
        fit(9, af.Keep(best=1, metric="accuracy"))
    plan = classify().compile(mlp(), classification(), every=4)
    with raises(af.CompileError):
        af.Runner(plan).fit(
            classification(), steps=9, checkpoint=tmp_path / "run", every=4, progress=False,
            keep=af.Keep(every=6),
        )  # fmt: skip
