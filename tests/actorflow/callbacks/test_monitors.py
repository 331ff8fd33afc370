"""What each monitor does with a sequence of numbers, without a run."""

import math

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow.callbacks import EarlyStopping, LearningRateFinder, Pruning, Timer
from actorflow.callbacks.protocol import StartedRun


def started(first_step=0, evaluations=(), outputs=("loss", "grad_norm"), evaluated=("loss",)):
    return StartedRun(
        job="train", model=None, first_step=first_step, total_steps=100, directory=None, rank=0,
        outputs=outputs, evaluated=evaluated, evaluations=tuple(evaluations), options={},
    )  # fmt: skip


def stops_at(stopping, values, evaluations=()):
    """Return the place of the value at which it ends the run, None where it does not."""
    stopping.on_start(started(evaluations=evaluations))
    for place, value in enumerate(values, len(evaluations)):
        try:
            stopping.on_evaluation(place, {"loss": value})
        except af.StopTraining:
            return place
    return None


@pytest.mark.parametrize(
    ("options", "values", "end"),
    [
        ({"patience": 2}, [3.0, 2.0, 2.5, 2.0, 1.0], 3),
        ({"patience": 2}, [3.0, 2.0, 2.5, 1.9, 2.0], None),
        ({"patience": 1, "min_delta": 0.5}, [3.0, 2.4, 2.0], 2),
        ({"patience": 2, "mode": "max"}, [1.0, 2.0, 1.5, math.nan], 3),
        ({"patience": 2}, [math.nan, math.inf], 1),
    ],
    ids=str,
)
def test_a_run_ends_after_so_many_evaluations_without_an_improvement(options, values, end):
    assert stops_at(EarlyStopping("loss", **options), values) == end
    for cut in range(1, len(values) if end is None else end):  # and where it was resumed in between
        before = [(place, {"loss": value}) for place, value in enumerate(values[:cut])]
        assert stops_at(EarlyStopping("loss", **options), values[cut:], before) == end


def test_the_best_evaluation_is_kept_with_its_step():
    stopping = EarlyStopping("loss", patience=3)
    stops_at(stopping, [3.0, 1.0, 2.0])
    assert (stopping.best, stopping.best_step) == (1.0, 1)


@pytest.mark.parametrize(
    "kind", [EarlyStopping, lambda metric: Pruning(None, metric)], ids=["stopping", "pruning"]
)
def test_a_metric_that_no_evaluation_has_is_an_error_that_names_those_there_are(kind):
    with raises(af.CompileError):
        kind("acc").on_start(started())
    with raises(af.CompileError):
        kind("acc").on_start(started(evaluated=()))


def test_a_sweep_hears_of_every_evaluation_and_prunes():
    told = []

    class Trial:
        def report(self, value, step):
            told.append((value, step))

        def should_prune(self):
            return len(told) == 2

    pruning = Pruning(Trial(), "loss")
    pruning.on_start(started())
    pruning.on_evaluation(5, {"loss": 0.5})
    assert not pruning.is_pruned
    with pytest.raises(af.StopTraining):
        pruning.on_evaluation(10, {"loss": 0.75})
    assert pruning.is_pruned
    assert told == [(0.5, 5), (0.75, 10)]


def test_a_timer_ends_a_run_when_its_time_is_over():
    now = [100.0]
    timer = Timer("1min", clock=lambda: now[0])
    now[0] = 1000.0
    timer.on_start(started())
    now[0] += 59.0
    timer.on_step(1, {})
    now[0] += 1.0
    with raises(af.StopTraining):
        timer.on_step(2, {})


def test_a_rate_is_suggested_where_the_smoothed_loss_falls_fastest():
    finder = LearningRateFinder(1e-4, 1.0, steps=101)
    finder.on_start(started())
    losses = [1.0 - 0.9 / (1.0 + math.exp(-(step - 60) / 3)) for step in range(101)]
    for step, loss in enumerate(losses, 1):
        finder.on_step(step, {"loss": loss})
    mean, smooth = 0.0, []
    for count, loss in enumerate(losses, 1):
        mean = 0.98 * mean + 0.02 * loss
        smooth.append(mean / (1 - 0.98**count))
    np.testing.assert_allclose(finder.losses, smooth, rtol=1e-12)
    np.testing.assert_allclose(finder.rates, np.geomspace(1e-4, 1.0, 101), rtol=1e-12)
    assert finder.rate == finder.rates[10 + np.gradient(smooth[10:-1]).argmin()]


def test_a_loss_that_diverges_ends_the_search():
    finder = LearningRateFinder(1e-4, 1.0, steps=100)
    finder.on_start(started())
    finder.on_step(1, {"loss": 1.0})
    with raises(af.StopTraining):
        finder.on_step(2, {"loss": 1000.0})
    with raises(af.CompileError):
        _ = finder.rate
    with raises(af.CompileError):
        finder.on_start(started(outputs=("score",)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: EarlyStopping("loss", mode="less"),
        lambda: EarlyStopping("loss", patience=0),
        lambda: EarlyStopping("loss", min_delta=-1.0),
        lambda: Timer("500"),
        lambda: Timer(0.0),
        lambda: LearningRateFinder(1.0, 0.1),
    ],
    ids=["mode", "patience", "min_delta", "steps", "no_time", "rates"],
)
def test_a_wrong_argument_is_an_error_with_the_users_line(make):
    with raises(af.CompileError):
        make()
