"""What the user's own functions raise during a run: it is saved, and comes out as it is."""

import json
import threading
import traceback

import numpy as np
import pytest

import actorflow as af
from actorflow.checkpoint.manager import CheckpointManager


def raise_at(step, error):
    def on_step(now, metrics):
        if now == step:
            raise error

    return on_step


def status_of(run):
    return json.loads((run / "status.json").read_text())["state"]


@pytest.fixture
def fit(mlp, classification, classify, tmp_path):
    """Train some steps with a checkpoint directory; the model is `fit.model`."""

    def run(on_step=None, steps=200, **options):
        run.model = mlp()
        options = {"checkpoint": tmp_path / "run", "every": 1000, "progress": False, **options}
        data = options.pop("data", None) or classification()
        return classify().fit(run.model, data, steps=steps, on_step=on_step, **options)

    return run


@pytest.fixture(autouse=True)
def no_thread_stays(new_threads):
    yield
    assert not new_threads()


@pytest.mark.parametrize("error", [KeyError("no such metric"), SystemExit(3)])
def test_what_on_step_raises_comes_out_as_itself_after_the_last_step_was_saved(
    fit, tmp_path, error
):
    with pytest.raises(type(error)) as caught:
        fit(raise_at(3, error))
    assert caught.value is error
    assert error.__notes__ == ["raised by on_step after step 3", "what was trained is kept"]
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    assert (innermost.filename, innermost.name) == (__file__, "on_step")
    loaded = CheckpointManager(tmp_path / "run").latest()
    assert 3 <= loaded.manifest.step < 200
    assert status_of(tmp_path / "run") == "failed"
    for name, array in fit.model.state().items():
        assert (array == loaded.tensors[name]).all()


def test_a_callback_that_failed_is_not_called_again(fit):
    told = []

    def on_step(step, metrics):
        told.append(step)
        raise ValueError("once")

    with pytest.raises(ValueError, match="once"):
        fit(on_step)
    assert told == [1]


def test_a_run_that_a_callback_ended_goes_on_bit_exact(
    fit, mlp, classification, classify, tmp_path
):
    with pytest.raises(KeyError):
        fit(raise_at(5, KeyError("x")))
    result = fit(steps=100)
    assert 5 <= result.first_step < 100  # as far ahead of its listener as the plan has slots
    whole = classify().fit(mlp(), classification(), steps=100, progress=False)
    for name, array in whole.variables.items():
        assert (array == result.variables[name]).all()


def test_stop_training_in_on_step_ends_the_run_with_its_result(fit, tmp_path, capsys):
    result = fit(raise_at(4, af.StopTraining("the loss is low enough")), progress=True)
    assert 4 <= result.last_step < 200
    assert CheckpointManager(tmp_path / "run").latest().manifest.step == result.last_step
    assert status_of(tmp_path / "run") == "stopped"
    out = capsys.readouterr().out
    words = "StopTraining in on_step (the loss is low enough)"
    assert f"{words}: stopping after the step that is under way" in out
    assert f"stopped by {words} after step {result.last_step}; it is checkpointed" in out


def test_on_step_hears_of_the_steps_that_were_under_way_too(fit):
    told = []

    def on_step(step, metrics):
        told.append(step)
        if step >= 4:
            raise af.StopTraining

    result = fit(on_step, checkpoint=None)
    assert told == list(range(1, result.last_step + 1))


def test_stop_training_in_the_last_step_is_a_run_that_finished(fit, tmp_path):
    assert fit(raise_at(4, af.StopTraining()), steps=4).last_step == 4
    assert status_of(tmp_path / "run") == "finished"


def evaluated(job, data, **options):
    return af.Evaluation(job, data, every=2, batches=2, **options)


@pytest.fixture
def evaluate():
    @af.job(train=False)
    def evaluate(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    return evaluate


def test_stop_training_in_on_result_ends_the_run_with_its_result(
    fit, evaluate, classification, tmp_path
):
    watched = evaluated(evaluate, classification(), on_result=raise_at(4, af.StopTraining()))
    result = fit(evaluation=watched)
    assert 4 <= result.last_step < 200
    assert CheckpointManager(tmp_path / "run").latest().manifest.step == result.last_step


class Failing:
    """A source whose batch after some raises."""

    def __init__(self, source, batches, error):
        self._source, self._left, self._error = source, batches, error

    def __getattr__(self, name):
        if name == "next_into":
            raise AttributeError
        return getattr(self._source, name)

    def __next__(self):
        if not self._left:
            raise self._error
        self._left -= 1
        return next(self._source)


def test_stop_training_in_the_data_source_ends_the_run_with_its_result(
    fit, classification, tmp_path, capsys
):
    result = fit(data=Failing(classification(), 5, af.StopTraining("enough")), progress=True)
    assert result.last_step == 5
    assert CheckpointManager(tmp_path / "run").latest().manifest.step == 5
    assert "stopped by StopTraining in the data source (enough) after step 5" in (
        capsys.readouterr().out
    )


def test_what_an_evaluations_source_raises_comes_out_as_itself_after_a_save(
    fit, evaluate, classification, tmp_path
):
    error = OSError("the shard is gone")
    results, told = [], []
    watched = evaluated(
        evaluate,
        Failing(classification(), 3, error),
        on_result=lambda step, _: results.append(step),
    )
    with pytest.raises(OSError, match="the shard is gone") as caught:
        fit(evaluation=watched, on_step=lambda step, metrics: told.append(step))
    assert caught.value is error
    loaded = CheckpointManager(tmp_path / "run").latest()
    assert loaded.manifest.step == told[-1] >= 4
    assert results == [2], "the evaluation that lacks batches is not told"


def test_a_step_that_fails_after_the_callback_did_is_a_note_on_its_error(fit, classification):
    wanted, noted = threading.Event(), threading.Event()

    class Noted(KeyError):
        def add_note(self, note):
            super().add_note(note)
            noted.set()

    def batches():
        source = classification()
        yield next(source)
        wanted.set()
        assert noted.wait(60)
        yield {**next(source), "y": np.full(16, 1000, np.int32)}

    def on_step(step, metrics):
        assert wanted.wait(60)
        raise Noted("first")

    data = af.data.from_iterable(batches, classification().spec())
    with pytest.raises(Noted) as caught:
        fit(on_step, data=data, checkpoint=None)
    assert "label 1000 at position 0 is outside" in caught.value.__notes__[1]
