"""What a run is asked: of the plan, and where it is derived from the keywords of a call."""

from dataclasses import replace

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow.checkpoint.errors import Every
from actorflow.options.run_spec import ENDLESS, PlanOptions, RunSpec


@pytest.fixture
def source():
    return af.data.ArraySource({"x": np.ones((8, 2), np.float32)}, batch=4)


def hear(step, outputs):
    pass


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, PlanOptions()),
        ({"every": 7}, PlanOptions()),
        ({"checkpoint": "runs/a"}, PlanOptions(Every(seconds=5.0))),
        ({"checkpoint": "runs/a", "every": 7}, PlanOptions(Every(steps=7))),
        ({"on_nan": "skip", "on_step": hear}, PlanOptions(on_nan="skip", has_listener=True)),
    ],
)
def test_a_plan_is_asked_for_what_the_run_uses(source, options, asked):
    assert RunSpec(source, steps=3, **options).plan_options == asked


def test_a_changed_spec_asks_for_what_it_says_now(source):
    assert replace(RunSpec(source, steps=3), on_step=hear).plan_options.has_listener


def test_a_period_that_means_nothing_is_refused_where_nothing_is_kept_too(source):
    with raises(af.CheckpointError):
        RunSpec(source, steps=3, every="soon")


@pytest.mark.parametrize(("steps", "counted"), [(None, ENDLESS), (0, 0), (5, 5)])
def test_a_stream_has_its_steps_or_no_end(source, steps, counted):
    assert RunSpec.of_stream(source, steps, "raise").steps == counted


def test_a_run_has_fewer_steps_than_a_stream_without_end(source):
    with raises(af.CompileError):
        RunSpec(source, steps=ENDLESS + 1)


def test_jobs_and_sources_are_shown_in_one_line_with_what_is_not_a_default(source):
    job = af.job(lambda model, batch: model(batch.x), train=False, seed=3)
    assert repr(job).startswith("Job('<lambda>' at ")
    assert repr(job).endswith(", train=False, seed=3)")
    assert repr(source) == "ArraySource(x: float32; 8 samples, batches of 4)"
    tokens = af.data.Tokens(np.arange(50) % 9, seq=4, batch=3)
    assert repr(tokens) == "Tokens(50 tokens, batches of 3 x 4)"


@pytest.mark.parametrize("kind", ["arrays", "pipeline"])
def test_an_evaluation_of_the_source_that_trains_is_refused(source, kind):
    if kind == "pipeline":
        source = af.data.from_arrays({"x": np.ones((8, 2), np.float32)}).batch(4)
    job = af.job(lambda model, batch: model(batch.x).mean(), train=False)
    with raises(af.DataError):
        RunSpec(source, steps=3, evaluation=af.Evaluation(job, source, every=1, batches=1))


def test_an_evaluation_of_what_is_iterated_anew_is_read_beside_the_training():
    batches = DataLoader()
    job = af.job(lambda model, batch: model(batch.x).mean(), train=False)
    evaluation = af.Evaluation(job, batches, every=1, batches=1)
    assert RunSpec(batches, steps=3, evaluation=evaluation).data is not evaluation.data


class DataLoader:
    def __len__(self):
        return 2

    def __iter__(self):
        return iter([{"x": np.ones((4, 2), np.float32)}] * 2)
