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
