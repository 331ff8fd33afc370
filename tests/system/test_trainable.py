"""Jobs that train some parameters of a model: by patterns, and by freezing and unfreezing."""

import numpy as np
import pytest
from error_texts import raises
from jobs import assert_same

import actorflow as af


def moved(model, before):
    return [
        name for name, array in model.state().items() if not np.array_equal(array, before[name])
    ]


@pytest.fixture
def trained(mlp, classification, classify):
    """Train a model with a job's options, and return the names that changed."""

    def run(**options):
        model = mlp()
        classify(train=True).step(model, next(classification()))  # gives it its first values
        before = model.state()
        classify(**options).fit(model, classification(), steps=2, progress=False)
        return moved(model, before)

    return run


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("down.*", ["down.weight", "down.bias"]),
        (["!*.bias"], ["up.weight", "down.weight"]),
        (["up.*", "!*.bias"], ["up.weight"]),
    ],
    ids=str,
)
def test_only_what_patterns_choose_is_trained(trained, patterns, expected):
    assert trained(trainable=patterns) == expected


def test_a_job_over_some_parameters_does_what_freezing_the_others_does(
    mlp, classification, classify
):
    by_pattern = classify(trainable="down.*").fit(mlp(), classification(), steps=4, progress=False)
    model = mlp()
    assert model.up.freeze() is model.up
    frozen = classify().fit(model, classification(), steps=4, progress=False)
    assert_same(by_pattern.variables, frozen.variables)
    assert "adam_m/up.weight" not in frozen.variables


def test_what_was_frozen_trains_again_after_unfreeze(mlp, classification, classify):
    model, job = mlp(), classify()
    model.up.freeze()
    model.down.bias.freeze()
    job.fit(model, classification(), steps=1, progress=False)
    before = model.state()
    assert model.unfreeze() is model
    model.down.weight.freeze().unfreeze()
    job.fit(model, classification(), steps=1, progress=False)
    assert len(moved(model, before)) == 4


def test_jobs_that_train_parts_of_one_model_take_turns(mlp, classification, classify):
    model, source = mlp(), classification()
    jobs = {part: classify(trainable=f"{part}.*") for part in ("up", "down")}
    for part in ("up", "down", "up"):
        model_before = model.state() if model.up.weight.data is not None else {}
        jobs[part].step(model, next(source))
        if model_before:
            assert moved(model, model_before) == [f"{part}.weight", f"{part}.bias"]


@pytest.mark.parametrize(
    "options",
    [
        {"trainable": "heda.*"},
        {"trainable": "down"},
        {"trainable": ["*", "!*"]},
        {"trainable": []},
        {"trainable": 3},
        {"trainable": "*", "train": False, "optimizer": None},
    ],
    ids=str,
)
def test_patterns_that_choose_nothing_are_errors_that_say_how_to_mend(
    mlp, classification, classify, options
):
    with raises(af.CompileError):
        classify(**options).fit(mlp(), classification(), steps=1, progress=False)
