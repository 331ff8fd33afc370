"""`fit(epochs=)`: the steps of so many passes, the same after a resume, told in the progress."""

import itertools

import numpy as np
import pytest
from error_texts import raises
from jobs import assert_same
from rank_trainings import Training, images

import actorflow as af
from actorflow.run.report import read_metrics


@pytest.fixture
def sources(classification):
    """Sources of twenty batches a pass, by name."""

    def loader():
        source = classification()
        return itertools.islice(iter(lambda: next(source), None), 20)

    spec = classification().spec()
    rows = classification(batch=320)
    table = next(rows)
    return {
        "arrays": classification,
        "pipeline": lambda: af.data.from_arrays(table).shuffle(3).batch(16),
        "loader": lambda: af.data.from_iterable(loader, spec),
    }


@pytest.mark.parametrize("name", ["arrays", "pipeline", "loader"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_epochs_are_their_steps_and_a_resume_repeats_none(
    sources, mlp, classify, tmp_path, name, accumulate
):
    def fit(epochs, folder, stop=None):
        def on_step(step, metrics):
            losses[step] = metrics["loss"]
            if step == stop:
                raise af.StopTraining

        model, losses = mlp(dropout=0.2), {}
        result = classify(accumulate=accumulate).fit(
            model, sources[name](), epochs=epochs, checkpoint=tmp_path / folder, every=1000,
            progress=False, on_step=on_step,
        )  # fmt: skip
        return result, losses

    whole, losses = fit(3, "whole")
    assert whole.last_step == 60 // accumulate
    assert whole.epoch == 3
    rest = {}
    for epochs, stop in [(1, 4), (1, None), (3, 11), (3, None)]:
        result, some = fit(epochs, "parts", stop)
        rest |= some
        assert result.epoch == -(-result.last_step * accumulate // 20)
    assert rest == losses
    assert_same(result.variables, whole.variables)


def test_progress_and_the_metrics_file_say_the_epoch(sources, mlp, classify, tmp_path, capsys):
    for name, total in (("arrays", "40"), ("loader", "")):
        classify().fit(mlp(), sources[name](), epochs=2, checkpoint=tmp_path / name)
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
        of = f"/{total}" if total else ""
        assert lines[0].startswith(f"step 1{of}  epoch 1/2  loss ")
        assert lines[-1].startswith(f"step 40{of}  epoch 2/2  loss ")
        assert read_metrics(tmp_path / name / "metrics.jsonl")[-1]["epoch"] == 2
        classify().fit(mlp(), sources[name](), epochs=2, checkpoint=tmp_path / name)
        assert "nothing to do" in capsys.readouterr().out


def test_steps_that_are_asked_for_have_no_epoch(sources, mlp, classify):
    result = classify().fit(mlp(), sources["arrays"](), steps=3, progress=False)
    assert result.epoch is None


def test_batches_that_fill_no_step_are_told(sources, mlp, classify, caplog):
    classify(accumulate=3).fit(mlp(), sources["arrays"](), epochs=1, progress=False)
    assert "1 epochs have 20 batches, of which the last 2 fill no step" in caplog.text


@pytest.mark.usefixtures("native_toolchain")
@pytest.mark.no_gpu("ranks meet in memory of the host")
def test_ranks_agree_on_epochs():
    spec = images(8).spec()

    def loader():
        source = images(8)
        return itertools.islice(iter(lambda: next(source), None), 3)

    training = Training(data=lambda: af.data.from_iterable(loader, spec))
    (alone,) = training.run(None, steps=None, epochs=2)
    assert len(alone.losses) == 6
    for own in training.run(af.Mesh(data=2), steps=None, epochs=2):
        np.testing.assert_allclose(own.losses, alone.losses, rtol=1e-5)
        assert own.result.epoch == 2


@pytest.mark.parametrize(
    "options",
    [{}, {"steps": 3, "epochs": 1}, {"epochs": 0}, {"epochs": 1.5}],
    ids=["neither", "both", "none", "half"],
)
def test_what_is_no_number_of_epochs_is_an_error(sources, mlp, classify, options):
    with raises(af.CompileError):
        classify().fit(mlp(), sources["arrays"](), **options)


def test_epochs_that_hold_no_step_are_an_error(mlp, classify, classification):
    with raises(af.DataError):
        classify(accumulate=30).fit(mlp(), classification(), epochs=1, progress=False)
