"""Outputs of several steps that reach the listener together: none is lost, none is out of order."""

import numpy as np
import pytest
from error_texts import raises
from jobs import assert_same, rows_of_fit

import actorflow as af
from actorflow import nn


@pytest.mark.parametrize("options", [{}, {"accumulate": 3}], ids=str)
@pytest.mark.parametrize("every", [2, 5, 100])
@pytest.mark.parametrize("steps", [1, 9, 10])
def test_every_step_arrives_in_order_with_the_outputs_it_has_alone(
    mlp, classification, classify, every, steps, options
):
    expected, alone = rows_of_fit(classify(**options), mlp(), classification(), steps)
    rows, together = rows_of_fit(
        classify(metrics_every=every, **options), mlp(), classification(), steps
    )
    assert [step for step, _ in rows] == list(range(1, steps + 1))
    assert rows == expected
    assert (together.last_step, together.mean_loss) == (alone.last_step, alone.mean_loss)
    assert_same(together.variables, alone.variables)


def test_a_step_that_the_end_of_the_data_cuts_short_is_no_row(mlp, classify):
    arrays = {"x": np.ones((4 * 11, 8), np.float32), "y": np.zeros(4 * 11, np.int32)}
    source = af.data.ArraySource(arrays, batch=4, epochs=1)
    rows, result = rows_of_fit(classify(metrics_every=4, accumulate=2), mlp(), source, 99)
    assert [step for step, _ in rows] == [1, 2, 3, 4, 5]
    assert result.last_step == 5


def test_a_resumed_run_goes_on_with_the_next_step(mlp, classification, classify, tmp_path):
    whole, _ = rows_of_fit(classify(), mlp(), classification(), 11)
    parts = []
    for steps in (3, 7, 11):
        rows, _ = rows_of_fit(
            classify(metrics_every=4), mlp(), classification(), steps,
            checkpoint=tmp_path / "run", every=1,
        )  # fmt: skip
        parts += rows
    assert parts == whole


@pytest.mark.one_device("looks for one chain")
def test_the_listener_is_woken_once_for_so_many_steps(mlp, classification, classify):
    plan = classify(metrics_every=5).compile(mlp(), classification())
    runner = af.Runner(plan)
    runner.fit(classification(), steps=20, progress=False)
    metrics = next(a for a in plan.actors if a.name == "metrics")
    step = next(a for a in plan.actors if a.name == "step")
    assert metrics.inputs[0].rate == 5
    firings = {a.name: a.firings for a in runner.statistics().actors}
    assert (firings[metrics.name], firings[step.name]) == (4 + 1, 20)


class Jumping(nn.Module):
    """A loss that is 1 until one batch makes it infinite."""

    def __init__(self):
        self.weight = nn.Parameter((1,), (("kind", "zeros"),))

    def __call__(self, x):
        return (self.weight * 0.0 + x).sum()


@pytest.mark.host("outputs leave a device some steps late")
@pytest.mark.parametrize("bad", [1, 4, 5, 7, 10])
def test_a_loss_that_is_not_finite_is_raised_with_its_step_and_at_most_so_many_steps_late(
    bad, new_threads
):
    every = 5

    @af.job(optimizer=af.optim.SGD(0.1), metrics_every=every)
    def train(model, batch):
        return model(batch.x)

    x = np.ones((40, 1), np.float32)
    x[bad - 1] = np.inf
    source = af.data.ArraySource({"x": x}, batch=1, shuffle=False)
    plan = train.compile(Jumping(), source)
    runner = af.Runner(plan)
    rows = []
    with raises(af.NonFiniteLoss):
        runner.fit(source, steps=40, progress=False, on_step=lambda step, m: rows.append(step))
    assert rows == list(range(1, bad))
    assert not new_threads()
    slots = next(r.num_slots for r in plan.registers if r.name == "metrics")
    assert every <= slots <= 2 * every
    steps = next(a.firings for a in runner.statistics().actors if a.name == "step")
    last_of_the_firing = -(-bad // every) * every
    assert last_of_the_firing <= steps <= last_of_the_firing - every + slots


def test_stream_yields_every_step_and_ends_with_the_rest(mlp, classification, classify):
    expected, _ = rows_of_fit(classify(), mlp(), classification(), 8)
    train = classify(metrics_every=3)
    streamed = [m["loss"] for m in train.stream(mlp(), classification(), steps=8)]
    assert streamed == [loss for _, loss in expected]


def test_leaving_a_stream_early_ends_all_threads(mlp, classification, classify, new_threads):
    stream = classify(metrics_every=3).stream(mlp(), classification())
    first = [next(stream)["loss"] for _ in range(4)]
    stream.close()
    assert not new_threads()
    expected, _ = rows_of_fit(classify(), mlp(), classification(), 4)
    assert first == [loss for _, loss in expected]


def test_single_steps_of_a_job_give_their_outputs_at_once(mlp, classification, classify):
    expected, _ = rows_of_fit(classify(), mlp(), classification(), 3)
    train, model, data = classify(metrics_every=4), mlp(), classification()
    assert [train.step(model, next(data))["loss"] for _ in range(3)] == [x for _, x in expected]
    train.close(model)


def test_single_steps_of_a_plan_that_hands_several_on_together_are_refused(
    mlp, classification, classify
):
    runner = af.Runner(classify(metrics_every=4).compile(mlp(), classification()))
    with raises(af.CompileError):
        runner.step(next(classification()))
